"""`atomrl generate`: complete a prompt, or play an episode."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atomrl.cli.arguments import NO_LIMIT, add_option, add_sampling, config_over, within_context
from atomrl.cli.main import Run
from atomrl.cli.model_argument import check_inputs

if TYPE_CHECKING:
    from atomrl.config import RunConfig
    from atomrl.types import Episode, Problem


def add_generate(parser: argparse.ArgumentParser) -> Run:
    """Complete a prompt with a model, or run an episode that begins with it.

    atomrl generate runs/quickstart --prompt "2 + 2 * 3 = ?"
    echo "2 + 2 * 3 = ?" | atomrl generate MODEL --prompt - --n 4 --temperature 0.7
    atomrl generate MODEL --config runs/tools --prompt "What is 17 * 23?"
    """
    add_sampling(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any key of a config")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="- reads standard input")
    add_option(parser, "--n", "eval.samples_per_prompt", "N", "number of completions (default 1)")
    parser.add_argument("--ids", action="store_true", help="also print token ids and log-probs")
    parser.add_argument("--config", metavar="CONFIG", help="use environment, tools, template and stops of this config")
    parser.add_argument("--row", metavar="JSON", help="other columns of the problem, for the environment")
    return complete_prompt


def complete_prompt(arguments: argparse.Namespace) -> int:
    """Print the completions; exit code 1 if an episode failed."""
    check_inputs(arguments)
    from atomrl.engines.generation import generate
    from atomrl.trainer.build import (
        build_engine,
        eval_sampling,
        image_reader,
        image_store,
        model_path,
        policy_tokenizer,
        processor,
    )
    from atomrl.trainer.checks.data import check_image_engine
    from atomrl.trainer.checks.environment import check_environment, with_tools

    config = generate_config(arguments)
    problem = to_problem(read_prompt(arguments.prompt), arguments.row, config)
    tokenizer = policy_tokenizer(config)
    config = with_tools(config, tokenizer)
    check_environment(config, tokenizer)
    images = image_store(config, image_reader(config, model_path(config)))
    check_image_engine(config, images)
    (prompt,) = processor(config, tokenizer).to_prompts([("prompt", problem)])
    config = within_context(config, len(prompt.token_ids))
    engine = build_engine(config, model_path(config), tokenizer, images=images.reader if images else None)
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
            segments = [segment for segment in completion.segments if segment.origin == "model"]
            print([token for segment in segments for token in segment.token_ids])
            print([round(logprob, 4) for segment in segments for logprob in segment.logprobs or ()])
    return int(any(item.episode is not None and item.episode.failure for item in completions))


def generate_config(arguments: argparse.Namespace) -> RunConfig:
    """Build the config of `generate`: defaults, then `--config`, then overrides, then options.

    Raises:
        ConfigError: a value is invalid.
    """
    from atomrl.config import merge_trees, parse_overrides, read_tree

    base: dict[str, Any] = {"run_name": "generate", "data": {"train": "-", "max_prompt_tokens": NO_LIMIT}}
    tree = merge_trees(base, read_tree(arguments.config, {}) if arguments.config else {})
    return config_over(merge_trees(tree, parse_overrides(arguments.overrides)), arguments)


def to_problem(text: str, row: str | None, config: RunConfig) -> Problem:
    """Build a problem from a prompt and, as JSON, the other columns of its row.

    Raises:
        ValueError: the prompt is empty, or `row` is not a JSON object.
    """
    from atomrl.types import Problem

    if not text:
        raise ValueError("--prompt: the prompt is empty")
    try:
        columns = json.loads(row or "{}")
    except ValueError as error:
        raise ValueError(f"--row: not valid JSON: {error}") from None
    if not isinstance(columns, dict):
        raise ValueError('--row: not a JSON object, such as {"ground_truth": "4"}')
    return Problem(
        problem_id="prompt", prompt=text, ground_truth=columns.pop(config.data.answer_field, None), columns=columns
    )


def conversation(episode: Episode) -> Iterator[str]:
    """Yield the lines of an episode: the model's text, the environment's text after `> `, and how it ended.

    Example:
        >>> from atomrl.types import Episode, Turn
        >>> first = Turn(model_tokens=9, reply_tokens=4, text="<search>x", reply="a b\\nc")
        >>> turns = (first, Turn(model_tokens=2, text="c"))
        >>> print(*conversation(Episode(turns=turns, ended="environment", outcome=1.0)), sep="\\n")
        <search>x
        > a b
        > c
        c
        --- ended by the environment after 2 turns, outcome 1
    """
    from atomrl.common.terminal import printable

    def quoted(text: str) -> Iterator[str]:
        yield from (f"> {line}" for line in printable(text).strip("\n").splitlines())

    yield from quoted(episode.opening)
    yield from (f"> picture: {image.path}" for image in episode.opening_images)
    for turn in episode.turns:
        yield printable(turn.text)
        yield from quoted(turn.reply)
        yield from (f"> picture: {image.path}" for image in turn.images)
    ended = {"environment": "by the environment", "turns": "at environment.max_turns", "failed": "by a failure"}
    outcome = "" if episode.outcome is None else f", outcome {episode.outcome:g}"
    why = f": {episode.failure}: {printable(episode.message)}" if episode.failure else ""
    where = ended.get(episode.ended, "at the token limit")
    turns = f"{len(episode.turns)} turn{'s' * (len(episode.turns) != 1)}"
    yield f"--- ended {where} after {turns}{outcome}{why}"


def read_prompt(prompt: str) -> str:
    """Return the prompt, or for `-` the text from standard input.

    Raises:
        ValueError: it is not valid UTF-8.
    """
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode("utf-8")  # fails for arguments that are not UTF-8: they contain lone surrogates
    except UnicodeError:
        raise ValueError("--prompt: the prompt is not valid UTF-8") from None
    return text
