"""`atomrl eval`: score a model on held-out problems."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.cli.arguments import NO_LIMIT, add_option, add_sampling, config_over, within_context
from atomrl.cli.main import Run
from atomrl.cli.model_argument import check_inputs
from atomrl.common.files import check_writable, write_jsonl, write_text

if TYPE_CHECKING:
    from atomrl.config import RunConfig
    from atomrl.trainer.evaluate import EvalResult, Figure


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


def evaluate_model(arguments: argparse.Namespace) -> int:
    """Evaluate the model, print the metrics, and write them with the completions."""
    check_inputs(arguments)
    from atomrl.common.secrets import refuse_secrets
    from atomrl.config import dump_config

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
