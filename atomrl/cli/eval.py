"""Score a model on held-out problems: accuracy, pass@k, majority@k, reward by data source, lengths, format.

atomrl eval MODEL --data held_out.jsonl --samples-per-prompt 4
atomrl eval MODEL --data gsm8k.jsonl --prompt-field question --answer-field answer --answer-pattern '####\\s*(.+)'
atomrl eval MODEL --data arithmetic --limit 500 data.generator_args.steps=4
atomrl eval runs/quickstart/model --config runs/quickstart/config.yaml
atomrl eval MODEL --data held_out.jsonl --response-prefix '<think>.</think><answer>'
"""

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

from atomrl.cli.sampling import NO_LIMIT, add_option, add_sampling_arguments, config_over, within_context
from atomrl.files import check_writable, write_jsonl, write_text

if TYPE_CHECKING:
    from atomrl.config import RunConfig
    from atomrl.loop.evaluate import EvalResult, Figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser)
    add = parser.add_argument
    option = partial(add_option, parser)
    add("overrides", nargs="*", metavar="key=value", help="any key of a config")
    option("--data", "data.eval", "FILE|TASK", "a JSONL file, or a task (its eval split)")
    add("--config", metavar="CONFIG", help="take data, fields, rewards and lengths from a run's config")
    option("--samples-per-prompt", "eval.samples_per_prompt", "N", "completions (default 1)")
    option("--limit", "data.eval_size", "N", "problems to use (of a task: to draw)")
    option("--reward", "reward.functions", "NAME", "default strict_math; repeatable", action="append")
    option("--prompt-field", "data.prompt_field", "COLUMN", "the column with the prompt (default prompt)")
    option("--answer-field", "data.answer_field", "COLUMN", "the column with the answer (default ground_truth)")
    option("--answer-pattern", "data.answer_pattern", "REGEX", "its first group in the answer is the ground truth")
    add("--response-prefix", default="", metavar="TEXT", help="what every completion has to start with")
    add("--out", type=Path, metavar="FILE.json", help="the result (default: in runs/eval)")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.config import dump_config
    from atomrl.tracking.environment import refuse_secrets

    config = config_of(arguments)
    refuse_secrets(dump_config(config))
    out = arguments.out or default_out(config)
    if out.suffix != ".json":
        raise ValueError(f"--out {out}: the result is JSON, and its completions go beside it; name it *.json")
    started = time.perf_counter()
    result, config = evaluate_config(config, arguments.response_prefix, out)
    seconds = time.perf_counter() - started
    write_result(out, config, arguments.response_prefix, result, seconds)
    print(table(result))
    if arguments.response_prefix and result.overall["format"].mean == 0:
        print("note: with this --response-prefix no completion has the strict form, without which strict_math gives 0; "
              "an empty think block breaks it, <think>.</think><answer> does not", file=sys.stderr)  # fmt: skip
    print(f"\nresult      {out}\ncompletions {out.with_suffix('.jsonl')}")
    return 0


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """Defaults, then `--config`, then options, then overrides.

    Raises:
        ConfigError: no problems are named, or a value is wrong.
    """
    from atomrl.cli.config_arguments import read_tree
    from atomrl.config import ConfigError, merge_trees, parse_overrides
    from atomrl.data.generators import is_generator

    base = {"run_name": "eval", "data": {"max_prompt_tokens": NO_LIMIT}}
    tree = merge_trees(base, read_tree(arguments.config, {}) if arguments.config else {})
    tree = merge_trees(tree, parse_overrides(arguments.overrides))
    problems = getattr(arguments, "data.eval") or tree["data"].get("eval")
    if problems is None:
        raise ConfigError("name the problems with --data FILE|TASK, or a --config that has data.eval")
    config = config_over(merge_trees({"data": {"train": problems}}, tree), arguments)  # it is required, and not read
    if is_generator(problems) and config.data.eval_size is None:
        raise ConfigError(f"{problems} makes as many problems as are asked for: say how many with --limit N")
    return config


def evaluate_config(config: RunConfig, response_prefix: str, out: Path) -> tuple[EvalResult, RunConfig]:
    """Load model and problems, and evaluate. All that can be wrong is checked before weights are loaded.

    Returns:
        The figures, and the config with the length of completions that was used.
    """
    from atomrl.data.sources import load_samples
    from atomrl.loop.evaluate import evaluate
    from atomrl.rewards.compute import build_rewards
    from atomrl.runs.build import build_rollout, device_name, eval_sampling, model_path, policy_tokenizer
    from atomrl.runs.build import processor as build_processor
    from atomrl.runs.episode_checks import check_environment, check_outcome, with_tools

    rewards = build_rewards(
        config.reward, device=device_name(config.model.device), trust_remote_code=config.model.trust_remote_code
    )
    report = load_samples(config.data, "eval", config.seed)
    if report.problems:
        print(f"{report.source}: {len(report.problems)} rows with problems were skipped", file=sys.stderr)
    rewards.check_sources(report.samples)
    tokenizer = policy_tokenizer(config)
    config = with_tools(config, tokenizer)
    check_environment(config, tokenizer)
    check_outcome(config)
    processor = build_processor(config, tokenizer)
    check_writable(out)
    prompts = processor.token_ids(processor.filter_overlong(report.samples)[0])
    prefix = tokenizer.encode(response_prefix, add_special_tokens=False)
    config = within_context(config, min(max(map(len, prompts)), processor.max_prompt_tokens) + len(prefix))
    engine = build_rollout(config, model_path(config), tokenizer, None)
    try:
        return evaluate(engine, report.samples, processor, rewards, eval_sampling(config), response_prefix), config
    finally:
        engine.close()
        rewards.close()


def default_out(config: RunConfig) -> Path:
    """`runs/eval/MODEL_DATA_TIME.json`; a new name each time, so that nothing is written over."""
    parts = Path(str(config.model.path)).parts[-3:], Path(str(config.data.eval)).stem
    name = "_".join([*parts[0], parts[1], datetime.now().strftime("%Y%m%d-%H%M%S")])
    return Path(config.output_dir) / "eval" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-._')}.json"


def write_result(out: Path, config: RunConfig, response_prefix: str, result: EvalResult, seconds: float) -> None:
    """The figures as JSON (NaN as null), and the completions beside it, one a line."""

    content: dict[str, Any] = {
        **result.summary(),
        "metrics": result.metrics(),
        "response_prefix": response_prefix,
        "wall_s": round(seconds, 2),
        "config": config.to_tree(),
    }
    plain = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    write_text(out, json.dumps(plain, indent=2, ensure_ascii=False) + "\n")
    write_jsonl(result.rows, out.with_suffix(".jsonl"), lenient=True)


def table(result: EvalResult) -> str:
    """The figures for people: a row each that there is, a column for each data source."""
    sources = dict(result.by_data_source) if len(result.by_data_source) > 1 else {}
    columns = {"all": result.overall, **sources}
    dropped = f", {result.dropped_prompts} more left out (over the limit)" if result.dropped_prompts else ""
    lines = [f"{result.prompts} problems x {result.samples_per_prompt} completions{dropped}", ""]
    width = max(16, *(len(name) + 2 for name in columns))
    lines.append(f"{'':<22}" + "".join(f"{name if sources else 'mean ± s.e.':>{width}}" for name in columns))
    for name in [name for name, figure in result.overall.items() if not math.isnan(figure.mean)]:
        lines.append(f"{name:<22}" + "".join(f"{show(figures[name]):>{width}}" for figures in columns.values()))
    return "\n".join(lines)


def show(figure: Figure) -> str:
    """`0.512 ± 0.014`."""
    if math.isnan(figure.mean):
        return "-"
    digits = 1 if figure.mean >= 10 else 3
    error = "" if figure.standard_error is None else f" ± {figure.standard_error:.{digits}f}"
    return f"{figure.mean:.{digits}f}{error}"
