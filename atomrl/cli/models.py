"""Commands for a model: `eval` scores it, `generate` completes a prompt, `export` writes a plain model folder."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.cli.arguments import (
    NO_LIMIT,
    add_option,
    add_sampling,
    check_config,
    check_exists,
    config_over,
    within_context,
)
from atomrl.cli.main import Run
from atomrl.common.files import check_writable, new_folder, write_jsonl, write_text

if TYPE_CHECKING:
    from atomrl.config import RunConfig
    from atomrl.trainer.evaluate import EvalResult, Figure
    from atomrl.types import Episode, Problem


def add_eval(parser: argparse.ArgumentParser) -> Run:
    """Score a model on held-out problems: accuracy, pass@k, majority@k, reward by data source, lengths, format.

    atomrl eval runs/quickstart                                 # the evaluation of its config
    atomrl eval MODEL --data held_out.jsonl --samples-per-prompt 4
    atomrl eval MODEL --data gsm8k.jsonl --prompt-field question --answer-field answer --answer-pattern '####\\s*(.+)'
    atomrl eval MODEL --data arithmetic --limit 500 data.generator_args.steps=4
    atomrl eval runs/quickstart/checkpoints/step_000060 --config runs/quickstart
    atomrl eval MODEL --data held_out.jsonl --response-prefix '<think>.</think><answer>'
    """
    add_sampling(parser)
    add = parser.add_argument
    option = partial(add_option, parser)
    add("overrides", nargs="*", metavar="key=value", help="any key of a config")
    option("--data", "data.eval", "FILE|TASK", "a JSONL file, or a task (its eval split)")
    add("--config", metavar="CONFIG", help="use data, fields, rewards and lengths of this config")
    option("--samples-per-prompt", "eval.samples_per_prompt", "N")
    option("--limit", "data.eval_size", "N", "number of problems")
    option("--reward", "reward.functions", "NAME", "default strict_math; repeatable", action="append")
    option("--prompt-field", "data.prompt_field", "COLUMN")
    option("--answer-field", "data.answer_field", "COLUMN")
    option("--answer-pattern", "data.answer_pattern", "REGEX")
    add("--response-prefix", default="", metavar="TEXT", help="text that every completion begins with")
    add("--out", type=Path, metavar="FILE.json", help="the result (default: in runs/eval)")
    add("--json", action="store_true", help="print the metrics as one JSON object, and nothing else on stdout")
    return evaluate_model


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


def add_export(parser: argparse.ArgumentParser) -> Run:
    """Write a checkpoint as a plain model folder that transformers and serving engines load; adapters are merged.

    For a RUN it is the run's model or, before the run has ended, its newest complete checkpoint.

    atomrl export runs/quickstart                                          # to runs/quickstart/exported
    atomrl export runs/quickstart my_model
    atomrl export runs/quickstart/checkpoints/step_000060 my_model
    """
    parser.add_argument("checkpoint", metavar="RUN|CHECKPOINT", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="a new folder (of a run: RUN/exported)")
    parser.add_argument("--base", help="base model of the adapters, if it was moved")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="allow code of the base model to run, as in training"
    )
    return export_model


def evaluate_model(arguments: argparse.Namespace) -> int:
    """Evaluate the model, print the metrics, and write them with the completions."""
    check_inputs(arguments)
    from atomrl.config import dump_config
    from atomrl.tracking.environment import refuse_secrets

    config = eval_config(arguments)
    refuse_secrets(dump_config(config))
    out = arguments.out or default_out(config)
    if out.suffix != ".json":
        raise ValueError(f"--out {out}: the result is JSON; the file name must end in .json")
    started = time.perf_counter()
    result, config = evaluate_config(config, arguments.response_prefix, out)
    seconds = time.perf_counter() - started
    content = write_result(out, config, arguments.response_prefix, result, seconds)
    if arguments.json:
        files = {"result": str(out), "completions": str(out.with_suffix(".jsonl"))}
        print(json.dumps({key: value for key, value in content.items() if key != "config"} | files))
    else:
        print(table(result))
    if arguments.response_prefix and result.overall["format"].mean == 0:
        print("note: with this --response-prefix no completion has the strict form, so strict_math returns 0; "
              "an empty think block is invalid, <think>.</think><answer> is valid", file=sys.stderr)  # fmt: skip
    if not arguments.json:
        print(f"\nresult      {out}\ncompletions {out.with_suffix('.jsonl')}")
    return 0


def check_inputs(arguments: argparse.Namespace) -> None:
    """Check that the files of `--config` and `--data` exist, before the libraries that read them are imported. For the
    folder of a run take its model, and its config unless another is given.

    Raises:
        ValueError: one does not exist, or the run has no model yet.
    """
    run = Path(vars(arguments)["model.path"])
    if (run / "config.yaml").is_file() and not (run / "config.json").is_file():
        model = model_folder(run)
        if model == run:
            raise ValueError(f"{run} has no model and no complete checkpoint")
        vars(arguments)["model.path"] = str(model)
        arguments.config = arguments.config or str(run)
    if arguments.config is not None:
        from atomrl.common.yaml_files import config_file

        check_config(arguments)
        arguments.config = config_file(arguments.config)
    data = getattr(arguments, "data.eval", None)
    if data is not None:
        check_exists(data, "--data: data file")


def eval_config(arguments: argparse.Namespace) -> RunConfig:
    """Build the config of `eval`: defaults, then `--config`, then overrides, then options.

    Raises:
        ConfigError: no data set is given, or a value is invalid.
    """
    from atomrl.config import ConfigError, merge_trees, parse_overrides, read_tree
    from atomrl.data.tasks import is_generator

    base = {"run_name": "eval", "data": {"max_prompt_tokens": NO_LIMIT}}
    tree = merge_trees(base, read_tree(arguments.config, {}) if arguments.config else {})
    tree = merge_trees(tree, parse_overrides(arguments.overrides))
    problems = getattr(arguments, "data.eval") or tree["data"].get("eval")
    if problems is None:
        raise ConfigError("no problems given: use --data FILE|TASK, or a --config with data.eval")
    config = config_over(merge_trees({"data": {"train": problems}}, tree), arguments)  # data.train is required, unused
    if is_generator(problems) and config.data.eval_size is None:
        raise ConfigError(f"{problems} is a generator: set the number of problems with --limit N")
    return config


def evaluate_config(config: RunConfig, response_prefix: str, out: Path) -> tuple[EvalResult, RunConfig]:
    """Load model and problems, and evaluate. Everything is checked before weights are loaded.

    Returns:
        The metrics, and the config with the maximum completion length that was used.
    """
    from atomrl.data.problems import load_problems
    from atomrl.rewards.compute import build_rewards
    from atomrl.trainer.build import (
        build_engine,
        device_name,
        eval_sampling,
        image_reader,
        image_store,
        model_path,
        policy_tokenizer,
    )
    from atomrl.trainer.build import processor as build_processor
    from atomrl.trainer.checks.data import check_image_engine
    from atomrl.trainer.checks.environment import check_environment, check_outcome, with_tools
    from atomrl.trainer.evaluate import evaluate

    rewards = build_rewards(
        config.reward, device=device_name(config.model.device), trust_remote_code=config.model.trust_remote_code
    )
    reader = image_reader(config, model_path(config))
    images = image_store(config, reader)
    report = load_problems(config.data, "eval", config.seed, images=images)
    rewards.check_sources(report.problems)
    tokenizer = policy_tokenizer(config)
    config = with_tools(config, tokenizer)
    check_environment(config, tokenizer)
    check_outcome(config)
    processor = build_processor(config, tokenizer, images=reader)
    check_writable(out)
    _, lengths = processor.filter_overlong(report.problems)
    prefix = tokenizer.encode(response_prefix, add_special_tokens=False)
    config = within_context(config, min(max(lengths), processor.max_prompt_tokens) + len(prefix))
    check_image_engine(config, images)
    if images:
        images.write()
    engine = build_engine(config, model_path(config), tokenizer, images=reader)
    try:
        result = evaluate(
            engine, report.problems, processor, rewards, eval_sampling(config), response_prefix, rewards.says_right
        )
        return result, config
    finally:
        engine.close()
        rewards.close()


def default_out(config: RunConfig) -> Path:
    """Return `OUTPUT_DIR/eval/MODEL_DATA_TIME.json`, a new name each time, so that nothing is overwritten."""
    parts = Path(str(config.model.path)).parts[-3:], Path(str(config.data.eval)).stem
    name = "_".join([*parts[0], parts[1], datetime.now().strftime("%Y%m%d-%H%M%S")])
    return Path(config.output_dir) / "eval" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-._')}.json"


def write_result(
    out: Path, config: RunConfig, response_prefix: str, result: EvalResult, seconds: float
) -> dict[str, Any]:
    """Write the metrics as JSON (NaN as null), and the completions as JSONL beside it. Returns the content written."""
    content: dict[str, Any] = {
        **result.summary(),
        "metrics": result.metrics(),
        "response_prefix": response_prefix,
        "wall_s": round(seconds, 2),
        "config": config.to_tree(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    write_text(out, json.dumps(plain, indent=2, ensure_ascii=False) + "\n")
    write_jsonl(result.rows, out.with_suffix(".jsonl"), lenient=True)
    return plain


def table(result: EvalResult) -> str:
    """Format the metrics as a table: one row per metric, one column per data source."""
    sources = dict(result.by_data_source) if len(result.by_data_source) > 1 else {}
    columns = {"all": result.overall, **sources}
    dropped = f", {result.dropped_prompts} more dropped (too long)" if result.dropped_prompts else ""
    lines = [f"{result.prompts} problems x {result.samples_per_prompt} completions{dropped}", ""]
    width = max(16, *(len(name) + 2 for name in columns))
    lines.append(f"{'':<22}" + "".join(f"{name if sources else 'mean ± s.e.':>{width}}" for name in columns))
    for name in [name for name, figure in result.overall.items() if not math.isnan(figure.mean)]:
        lines.append(f"{name:<22}" + "".join(f"{show(figures[name]):>{width}}" for figures in columns.values()))
    return "\n".join(lines)


def show(figure: Figure) -> str:
    """Format mean and standard error: `0.512 ± 0.014`."""
    if math.isnan(figure.mean):
        return "-"
    digits = 1 if figure.mean >= 10 else 3
    error = "" if figure.standard_error is None else f" ± {figure.standard_error:.{digits}f}"
    return f"{figure.mean:.{digits}f}{error}"


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


def model_folder(path: Path) -> Path:
    """Return the folder of the model of a run: the final one, or its newest complete checkpoint; else `path` itself."""
    if (path / "model").is_dir():
        return path / "model"
    if not (path / "checkpoints").is_dir():
        return path
    from atomrl.tracking.checkpoints import checkpoint_fault, step_folders

    folders = step_folders(path / "checkpoints")
    return next((folder for _, folder in reversed(folders) if checkpoint_fault(folder) is None), path)


def export_model(arguments: argparse.Namespace) -> int:
    """Copy the model's files, or merge its adapters and report the rounding error."""
    from atomrl.tracking.checkpoint_format import MANIFEST, PROGRESS

    checkpoint, note = model_folder(arguments.checkpoint), ""
    if checkpoint == arguments.checkpoint and arguments.out is None:
        raise ValueError(f"{checkpoint} is not the folder of a run: give OUT, a new folder")
    out = arguments.out or arguments.checkpoint / "exported"
    with new_folder(out) as folder:
        if (checkpoint / "adapter_config.json").is_file():
            from atomrl.models.lora import export

            error = export(checkpoint, folder, arguments.base, arguments.trust_remote_code)
            note = f"adapters change the weights by {error.added:.2%}; rounding error {error.rounding:.2%}"
            if error.quantization:
                note += f"; error of the {error.quantization} base, whose weights are exported: {error.of_base:.2%}"
        elif (checkpoint / "config.json").is_file():
            for path in checkpoint.iterdir():
                if path.is_file() and path.name not in (MANIFEST, PROGRESS):
                    shutil.copy2(path, folder)
        else:
            raise ValueError(f"{checkpoint} is not a checkpoint: it has neither config.json nor adapter_config.json")
    if note:
        print(note, file=sys.stderr)
    print(out)
    return 0
