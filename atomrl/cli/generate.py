"""Complete a prompt with a model, or play an episode that begins with it.

atomrl generate runs/quickstart/model --prompt "2 + 2 * 3 = ?"
echo "2 + 2 * 3 = ?" | atomrl generate MODEL --prompt - --n 4 --temperature 0.7
atomrl generate runs/tools/model --config runs/tools/config.yaml --prompt "What is 17 * 23?"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atomrl.cli.sampling import NO_LIMIT, add_option, add_sampling_arguments, config_over, within_context

if TYPE_CHECKING:
    from atomrl.config import RunConfig
    from atomrl.episodes import Episode
    from atomrl.types import Sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any key of a config")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="- reads it from standard input")
    add_option(parser, "--n", "eval.samples_per_prompt", "N", "completions to draw (default 1)")
    parser.add_argument("--ids", action="store_true", help="print the tokens' ids and log-probs as well")
    parser.add_argument("--config", metavar="CONFIG", help="take environment, tools, template and stops from a config")
    parser.add_argument("--row", metavar="JSON", help="other columns of the problem, which an environment may read")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.rollout.generate import generate
    from atomrl.runs.build import build_rollout, eval_sampling, model_path, policy_tokenizer, processor
    from atomrl.runs.episode_checks import check_environment, with_tools

    config = config_of(arguments)
    sample = sample_of(read_prompt(arguments.prompt), arguments.row, config)
    tokenizer = policy_tokenizer(config)
    config = with_tools(config, tokenizer)
    check_environment(config, tokenizer)
    (prompt,) = processor(config, tokenizer).to_prompts([("prompt", sample)])
    config = within_context(config, len(prompt.token_ids))
    engine = build_rollout(config, model_path(config), tokenizer, None)
    try:
        completions = generate(engine, [prompt], eval_sampling(config))
    finally:
        engine.close()
    for number, completion in enumerate(completions, start=1):
        if len(completions) > 1:
            print(
                f"--- {number} of {len(completions)}, {completion.response_tokens} tokens, {completion.finish_reason}"
            )
        print(completion.text if completion.episode is None else "\n".join(conversation(completion.episode)))
        if arguments.ids:
            drawn = [segment for segment in completion.segments if segment.origin == "model"]
            print([token for segment in drawn for token in segment.token_ids])
            print([round(logprob, 4) for segment in drawn for logprob in segment.logprobs or ()])
    return int(any(item.episode is not None and item.episode.failure for item in completions))


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """Defaults, then `--config`, then overrides, then options.

    Raises:
        ConfigError: a value is wrong.
    """
    from atomrl.cli.config_arguments import read_tree
    from atomrl.config import merge_trees, parse_overrides

    base: dict[str, Any] = {"run_name": "generate", "data": {"train": "-", "max_prompt_tokens": NO_LIMIT}}
    tree = merge_trees(base, read_tree(arguments.config, {}) if arguments.config else {})
    return config_over(merge_trees(tree, parse_overrides(arguments.overrides)), arguments)


def sample_of(text: str, row: str | None, config: RunConfig) -> Sample:
    """The problem that a prompt is.

    Raises:
        ValueError: the prompt is empty, or `row` is no JSON object.
    """
    from atomrl.types import Sample

    if not text:
        raise ValueError("--prompt: the prompt is empty")
    try:
        columns = json.loads(row or "{}")
    except ValueError as error:
        raise ValueError(f"--row: it is no JSON: {error}") from None
    if not isinstance(columns, dict):
        raise ValueError('--row: it is no JSON object, such as {"ground_truth": "4"}')
    return Sample(
        sample_id="prompt", prompt=text, ground_truth=columns.pop(config.data.answer_field, None), columns=columns
    )


def conversation(episode: Episode) -> Iterator[str]:
    """An episode's lines: the model's as they are, the environment's with `> ` in front, and how it ended.

    Example:
        >>> from atomrl.episodes import Episode, Turn
        >>> first = Turn(model_tokens=9, reply_tokens=4, text="<search>x", reply="a b\\nc")
        >>> turns = (first, Turn(model_tokens=2, text="c"))
        >>> print(*conversation(Episode(turns=turns, ended="environment", outcome=1.0)), sep="\\n")
        <search>x
        > a b
        > c
        c
        --- ended by the environment after 2 turns, outcome 1
    """
    from atomrl.tracking.console import printable

    def said(text: str) -> Iterator[str]:
        yield from (f"> {line}" for line in printable(text).strip("\n").splitlines())

    yield from said(episode.opening)
    for turn in episode.turns:
        yield printable(turn.text)
        yield from said(turn.reply)
    ended = {"environment": "by the environment", "turns": "at environment.max_turns", "failed": "by a failure"}
    outcome = "" if episode.outcome is None else f", outcome {episode.outcome:g}"
    why = f": {episode.failure}: {printable(episode.message)}" if episode.failure else ""
    where = ended.get(episode.ended, "at the limit on tokens")
    turns = f"{len(episode.turns)} turn{'s' * (len(episode.turns) != 1)}"
    yield f"--- ended {where} after {turns}{outcome}{why}"


def read_prompt(given: str) -> str:
    """The prompt itself, or standard input for `-`.

    Raises:
        ValueError: it is no UTF-8.
    """
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode("utf-8")  # an argument that is no UTF-8 comes in as lone surrogates
    except UnicodeError:
        raise ValueError("--prompt: the prompt is not valid UTF-8") from None
    return text
