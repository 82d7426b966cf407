"""Random episodes over chat templates and tokenizers: is what is trained what was sampled, and what was answered?

    python -m benchmarks.agents_exact --episodes 10000

A scripted engine draws random tokens, special ones among them; an environment answers random texts: with line breaks,
quotes, the text of special tokens, characters of several bytes, one message or several. For each episode:

1. each turn's prompt is the row so far, and the row is the prompt, what was drawn and what was answered, id by id; in
   half of the episodes old turns are dropped (`when_full`), and a row is what was seen;
2. what is trained on (`loss_mask`) is what was drawn, and nothing else;
3. where the model wrote what its tokenizer would write, the row is the whole conversation as the template writes it,
   tokenized at once, for the templates that write it so (`COMPARED`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from atomrl.config import DataConfig, EnvironmentConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.rows import to_rows
from atomrl.engines.episodes import EpisodeEngine
from atomrl.engines.fake import FakeEngine
from atomrl.engines.generation import generate
from atomrl.engines.requests import RequestState
from atomrl.environments import Reply
from atomrl.environments.pool import Answer
from atomrl.environments.worker import as_replies
from atomrl.types import FinishReason, Problem, Prompt, SamplingParams, Trajectory
from tests.templates import TEMPLATES, TOKENIZERS, TOOL_ROLE, make_tokenizer

PIECES = (
    "the model", " ", "\n", "\n\n", '"quoted"', "<|im_end|>", "</s>", "<s>", "[INST]", "<tool_call>", "Zürich", "日本",
    "🙂", "  two", "x\\n", "{1: 2}", "</think>", "<think>", "answer", ".", "'", "<|eot_id|>", "<end_of_turn>", "\t",
)  # fmt: skip
COMPARED = set(TEMPLATES) - {"qwen3", "thinking", "deepseek", "mistral", "llama2"}
"""Templates that write the model's words as they were: no thoughts are dropped or put in, and no spaces."""


class RandomEngine(FakeEngine):
    """Draws any tokens, or a text's own; keeps what it was asked and what it drew, by the request's name."""

    def __init__(self, tokenizer: Any, plain: bool) -> None:
        super().__init__(lambda prompt, index: (), tokenizer)
        self.plain, self.drawn = plain, dict[str, tuple[tuple[int, ...], list[int]]]()

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        finished: list[tuple[RequestState, FinishReason]] = []
        while self.waiting:
            state = self.waiting.popleft()
            request = state.request
            rng, eos = random.Random(request.seed), self.tokenizer.eos_token_id
            if self.plain:
                text = " ".join(rng.choices(("model", "answer", "x", "1"), k=rng.randint(1, 6)))
                front, whole = (self.tokenizer.encode(part, add_special_tokens=False) for part in ("\n", f"\n{text}"))
                tokens = [*whole[len(front) :], eos]
            else:
                tokens = [rng.randrange(len(self.tokenizer)) for _ in range(rng.randint(1, 12))]
                tokens += [eos] if rng.random() < 0.7 else []
            state.set_version(0)
            state.token_ids, state.logprobs = tokens, [-1.0] * len(tokens)
            self.drawn[request.request_id] = (request.prompt_token_ids, tokens)
            finished.append((state, "stop"))
        return finished


def random_text(rng: random.Random, plain: bool = False) -> str:
    text = "".join(rng.choices([piece for piece in PIECES if not plain or not {*"<["} & {*piece}], k=rng.randint(0, 8)))
    return f"x {text} x" if plain else text  # nothing to trim


def answers(name: str, role: str, plain: bool) -> list[list[str]]:
    """Return the replies of an episode, turn by turn: one text, or the texts of several messages."""
    rng = random.Random(name)
    counts = [rng.randint(1, 3) if role == "tool" else 1 for _ in range(rng.randint(1, 4))]
    return [[random_text(rng, plain) for _ in range(count)] for count in counts]


def babble(sample: Problem, *, role: str = "user", plain: bool = False) -> Iterator[Any]:
    """An environment that answers anything."""
    yield Reply(text=random_text(random.Random(sample.problem_id)), role="user") if sample.columns["opening"] else None
    for texts in answers(sample.problem_id, role, plain):
        yield [Reply(text=text, role=role) for text in texts]  # type: ignore[arg-type]


class Here:
    """Plays episodes in this process: an `EnvironmentPool` without processes."""

    def __init__(self, role: str, plain: bool) -> None:
        self.role, self.plain = role, plain
        self.episodes: list[Iterator[Any]] = []
        self.due: list[tuple[int, Answer]] = []

    @property
    def waiting(self) -> bool:
        return bool(self.due)

    def start(self, sample: Problem, seed: int, rendered: str = "") -> int:
        self.episodes.append(babble(sample, role=self.role, plain=self.plain))
        self.say(len(self.episodes) - 1, "")
        return len(self.episodes) - 1

    def say(self, key: int, text: str) -> None:
        try:
            self.due.append((key, Answer(tuple(as_replies(next(self.episodes[key]))))))
        except StopIteration:
            self.due.append((key, Answer(ended=True)))

    def cut(self, key: int) -> None:
        self.due.append((key, Answer(ended=True)))

    def answers(self, wait_s: float) -> list[tuple[int, Answer]]:
        found, self.due = self.due, []
        return found

    def close(self) -> None:
        self.episodes.clear()


def check(item: Trajectory, engine: RandomEngine, name: str) -> int:
    """1 and 2; how many rows there are.

    Raises:
        AssertionError: it is not so.
    """
    rows, turn, row = to_rows([replace(item, reward=0.0)]), 0, list[int]()
    turn_ids = rows.loss_mask.long() - 1 if rows.rollout.turn_ids is None else rows.rollout.turn_ids
    for segment in item.segments:
        if segment.origin == "model":
            prompt, drawn = engine.drawn[f"{name}#{turn}"]
            own = turn_ids == turn
            number = int(own.any(1).nonzero()[0, 0])
            start = int(own[number].nonzero()[0, 0])
            assert rows.tokens[number, :start].tolist() == list(prompt), "a turn was fed another row"
            assert rows.tokens[own].tolist() == drawn == list(segment.token_ids), (
                "what is trained is not what was drawn"
            )
            assert rows.rows > 1 or list(prompt) == row
            turn += 1
        row += segment.token_ids
    assert int(rows.loss_mask.sum()) == int((turn_ids >= 0).sum()), "something else is trained"
    assert rows.rows > 1 or rows.tokens[0].tolist() == row
    return rows.rows


def conversation(item: Trajectory, tokenizer: Any, role: str, system: str | None) -> list[dict[str, Any]]:
    """The messages of an episode: what was drawn, and what was answered."""
    messages = [{"role": "user", "content": str(item.problem.prompt)}]
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    spoken = [segment.token_ids for segment in item.segments if segment.origin == "model"]
    for tokens, texts in zip_longest(spoken, answers(item.problem.problem_id, role, True), fillvalue=[]):
        messages.append({"role": "assistant", "content": tokenizer.decode(tokens[:-1])})
        messages += [{"role": role, "content": text, "tool_call_id": "atomrl001"} for text in texts]
    return messages


def play(
    kind: str, template: str, role: str, plain: bool, episodes: int, opening: bool, full: bool, seed: int
) -> Counter[str]:
    """Episodes of a tokenizer and a template.

    Raises:
        AssertionError: one of the three does not hold.
    """
    tokenizer, found = make_tokenizer(kind, template), Counter[str]()
    system = "Rules." if template == "needs_system" else None
    processor = DataProcessor(tokenizer, DataConfig(train="-", system_prompt=system), opening=opening)
    columns = {"opening": opening}
    items = [
        Problem(problem_id=f"{seed}-{index}", prompt="the model?", ground_truth=None, columns=columns)
        for index in range(episodes)
    ]
    prompts: list[Prompt] = processor.to_prompts([(item.problem_id, item) for item in items])
    limits = {"when_full": "drop_oldest", "max_turn_tokens": 20} if full else {}
    settings = EnvironmentConfig(function="benchmarks.agents_exact.babble", max_turns=6, opening=opening, **limits)
    engine = RandomEngine(tokenizer, plain)
    with closing(EpisodeEngine(engine, tokenizer, settings)) as whole:
        whole.pool = Here(role, plain)  # type: ignore[assignment]
        for item in generate(whole, prompts, SamplingParams(max_completion_tokens=100 if full else 100_000, seed=seed)):
            assert item.episode is not None and item.episode.failure is None, item.episode
            found["rows"] += check(item, engine, f"{item.prompt_id}/{item.index}")
            if plain and not opening and not full and template in COMPARED:
                messages = conversation(item, tokenizer, role, system)
                text = tokenizer.apply_chat_template(messages, tokenize=False)
                written = tokenizer(text, add_special_tokens=False)["input_ids"]
                row = list(item.token_ids)
                assert written[: len(row)] == row, f"{tokenizer.decode(row)!r} is not how {text!r} begins"
                found["compared with the whole"] += 1
            found["episodes"] += 1
            found["turns"] += len(item.episode.turns)
            found["sampled"] += sum(turn.model_tokens for turn in item.episode.turns)
            found["answered"] += sum(turn.reply_tokens for turn in item.episode.turns)
    return found


def cases(episodes: int) -> Iterator[dict[str, Any]]:
    """Every template with every tokenizer, role and way of drawing."""
    every = [
        {"kind": kind, "template": template, "role": role, "plain": plain, "opening": opening, "full": full}
        for template in TEMPLATES
        for kind in TOKENIZERS
        for role in ("", "user", "tool")
        if role != "tool" or template in TOOL_ROLE
        for plain in (False, True)
        if role or not plain
        for opening in (False, True)
        if role == "user" or not opening
        for full in (False, True)
    ]
    share, more = divmod(episodes, len(every))
    for seed, case in enumerate(every):
        yield case | {"episodes": share + (seed < more), "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    arguments = parser.parse_args()
    started, total = time.perf_counter(), Counter[str]()
    for case in cases(arguments.episodes):
        if case["episodes"]:
            total += play(**case)
    print(f"{len(TEMPLATES)} templates, {len(TOKENIZERS)} tokenizers: {dict(total)}")
    print(f"every row is what was drawn and answered; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
