"""Throughput of the engine with slow tools, compared with a barrier after each turn.

    python benchmarks/agents.py [--repeats 3] [--rows 128] [--dtype float32] [--out FILE.json]

The native engine and a random model of 3 million parameters; every episode has the same number of tokens, and begins
within the first second, so that only waiting differs. `busy`: tools of 200 ms; tokens per second beside the same
episodes with tools that answer at once (the bar is 0.85), and the share of the rows that wait, on average over the
step (a quarter is what is meant; `--rows` sets it). `tails`: tools of 0.05 to 5 s, most of them short, beside a
barrier per turn (a turn begins when the tools of all rows have answered); the bar is twice as fast. Kinds take turns
in one run, and ratios are medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch  # noqa: E402
from rollout import make_model  # noqa: E402

from atomrl.config import EnvironmentConfig  # noqa: E402
from atomrl.engines.episodes import EpisodeEngine  # noqa: E402
from atomrl.engines.generation import generate  # noqa: E402
from atomrl.engines.native.engine import NativeEngine  # noqa: E402
from atomrl.engines.requests import EngineOptions  # noqa: E402
from atomrl.environments import Reply  # noqa: E402
from atomrl.environments.pool import Answer  # noqa: E402
from atomrl.models.loading import load_tokenizer  # noqa: E402
from atomrl.protocols import RolloutEngine  # noqa: E402
from atomrl.types import GenerationOutput, Problem, Prompt, SamplingParams  # noqa: E402

TURN_TOKENS, REPLY_TOKENS, TURNS, SHORT_S, LONG_S = 48, 16, 8, 0.05, 5.0
BARS = {"busy": 0.85, "tails": 2.0}


def tool(problem: Problem, *, seconds: float = 0.0, tails: bool = False, turns: int = TURNS, seed: int = 0) -> Any:
    """Answers each turn after some time, with a reply of always the same length."""
    rng = random.Random(seed)
    time.sleep(rng.random())
    yield None
    for _ in range(turns - 1):
        time.sleep(tail(rng) if tails else seconds)
        yield Reply(text="a" * REPLY_TOKENS)
    return 1.0


def tail(rng: random.Random) -> float:
    """Seconds between 0.05 and 5: most are short, a few are long."""
    return SHORT_S * math.exp(math.log(LONG_S / SHORT_S) * rng.random() ** 3)


class Barrier(EpisodeEngine):
    """Every turn begins when the tools of all rows have answered."""

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        finished: list[GenerationOutput] = []
        while self.held and not finished:
            answers: list[tuple[int, Answer]] = []
            while self.pool.waiting:
                answers.extend(self.pool.answers(60.0))
            finished = self.take_answers(answers)
            while self.by_turn:
                self.take_turns(self.engine.poll())
        return finished


def play(
    kind: type[EpisodeEngine], engine: RolloutEngine, tokenizer: Any, rows: int, **args: Any
) -> tuple[float, float]:
    """Tokens per second of one step of episodes, whose workers are there before, and the share of rows that wait."""
    settings = EnvironmentConfig(
        function="benchmarks.agents.tool", args=args, max_turns=TURNS, max_turn_tokens=TURN_TOKENS, workers=2,
        timeout_s=60.0,
    )  # fmt: skip
    episodes = kind(engine, tokenizer, settings)
    longest = TURNS * TURN_TOKENS + (TURNS - 1) * REPLY_TOKENS + 1
    sampling = SamplingParams(completions_per_prompt=8, max_completion_tokens=longest, ignore_eos=True, seed=1)
    with closing(episodes.pool):
        generate(episodes, prompts(2, "warm"), replace(sampling, completions_per_prompt=1))
        began = time.perf_counter()
        found = generate(episodes, prompts(rows // 8, "row"), sampling)
        seconds = time.perf_counter() - began
    assert all(item.episode and item.episode.ended == "environment" for item in found)
    waited = sum(turn.seconds for item in found if item.episode for turn in item.episode.turns)
    return sum(item.response_tokens for item in found) / seconds, waited / seconds / len(found)


def prompts(count: int, name: str) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=f"{name}{index}",
            problem=Problem(problem_id=f"{name}{index}", prompt="", ground_truth=None),
            token_ids=tuple(range(5 + index, 45 + index)),
        )
        for index in range(count)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {"busy": [], "tails": []}
    with tempfile.TemporaryDirectory() as folder:
        path = str(make_model(Path(folder), ragged=False))
        tokenizer = load_tokenizer(path)
        made = EngineOptions(getattr(torch, options.dtype), "cpu", options.rows)
        engine = NativeEngine.from_pretrained(path, tokenizer, made)
        for turn in range(options.repeats):
            free, _ = play(EpisodeEngine, engine, tokenizer, options.rows)
            waiting, share = play(EpisodeEngine, engine, tokenizer, options.rows, seconds=0.2)
            tails, _ = play(EpisodeEngine, engine, tokenizer, options.rows, tails=True)
            barrier, _ = play(Barrier, engine, tokenizer, options.rows, tails=True)
            ratios["busy"].append(waiting / free)
            ratios["tails"].append(tails / barrier)
            print(
                f"turn {turn}: no waiting {free:.0f} tokens/s, tools of 200 ms {waiting:.0f} "
                f"({share:.0%} of the rows wait), "
                f"long tails {tails:.0f}, with a barrier {barrier:.0f}",
                flush=True,
            )
    found = {name: median(values) for name, values in ratios.items()}
    for name, ratio in found.items():
        print(f"{name}: {ratio:.2f} (bar {BARS[name]})")
    if options.out:
        options.out.write_text(json.dumps({"ratios": ratios, "medians": found}, indent=1) + "\n", encoding="utf-8")
    return int(any(found[name] < bar for name, bar in BARS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
