"""`atomrl train CONFIG --dry-run`: everything that can be known before weights are loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atomrl.config import ConfigError, RunConfig, dump_config
from atomrl.data.checks import repetitions
from atomrl.data.processor import DataProcessor
from atomrl.data.sources import LoadReport, load_samples

if TYPE_CHECKING:
    from atomrl.protocols import Algorithm


def dry_run(config: RunConfig) -> None:
    """Check a config with its data and print what a run would do.

    Raises:
        ConfigError, DataError, ValueError: what is wrong, as the run itself would say it.
    """
    from atomrl.algorithms.table import build_algorithm
    from atomrl.assembly import ENGINES, check_kept, device_name, prompt_limit
    from atomrl.assembly.critic import check_critic
    from atomrl.assembly.teacher import check_teacher
    from atomrl.models.loading import is_local, load_tokenizer
    from atomrl.rewards.compute import build_rewards

    print(dump_config(config))
    name, limit = config.algorithm.name, config.rollout.max_completion_tokens
    algorithm = build_algorithm(name, config.algorithm.axes, max_completion_tokens=limit)
    build_rewards(config.reward, device=device_name(config.model.device))
    if config.rollout.engine not in ENGINES:
        raise ConfigError(f"rollout.engine: unknown engine {config.rollout.engine!r}; there are {', '.join(ENGINES)}")
    path = config.model.path
    local = path is not None and is_local(path)
    processor = None
    if local and path is not None:
        tokenizer = load_tokenizer(config.model.tokenizer or path)
        check_teacher(config, algorithm, path, tokenizer)
        check_kept(config, path)
        check_critic(config, algorithm, path, tokenizer)
        processor = DataProcessor(tokenizer, config.data, prompt_limit(config, path))
    train, held_out = (load_samples(config.data, split, config.seed) for split in ("train", "eval"))
    used, lines = describe_data("train", train, processor)
    eval_lines = describe_data("eval", held_out, processor)[1] if held_out.samples else ["eval: none"]
    section("model", [describe_model(path, local)])
    section("data", lines + eval_lines)
    section("batch", batch_arithmetic(config, used))
    section("memory", memory(config, algorithm) if local else ["not known without the model"])
    taken = config.run_dir.exists() and any(config.run_dir.iterdir())
    section("run", [f"{config.run_dir}" + (" exists already: use --resume or another run_name" if taken else " (new)")])


def section(title: str, lines: Sequence[str]) -> None:
    """Print lines under a title."""
    for index, line in enumerate(lines):
        print(f"{title if index == 0 else '':<8}{line}")


def describe_model(path: str | None, local: bool) -> str:
    """Where the model is."""
    if path is None:
        return "a fresh GPT, made by `sft.gpt`"
    if local:
        return path
    return f"{path} is not on this machine: prompts were not tokenized, and a run would first need the model"


def describe_data(name: str, report: LoadReport, processor: DataProcessor | None) -> tuple[int, list[str]]:
    """How many problems of a split are used, and lines that describe them."""
    samples = report.samples
    sources = Counter(sample.data_source for sample in samples)
    lines = [f"{name}: {report.source}: {len(samples)} problems ({', '.join(f'{n} x{c}' for n, c in sources.items())})"]
    if report.skipped:
        lines.append(f"       {report.skipped} rows with problems are skipped")
    lines += [f"       {line}" for line in repetitions(samples)]
    if processor is None:
        return len(samples), lines
    lengths = sorted(len(ids) for ids in processor.token_ids(samples))
    limit = processor.max_prompt_tokens
    over = sum(length > limit for length in lengths)
    what = "left out" if processor.config.overlong_prompt == "drop" else "cut"
    middle = lengths[len(lengths) // 2]
    lines.append(f"       prompt tokens: median {middle}, longest {lengths[-1]}; {over} over {limit} are {what}")
    used, _ = processor.filter_overlong(samples)
    return len(used), lines


def batch_arithmetic(config: RunConfig, problems: int | None = None) -> list[str]:
    """Prompts x completions -> rows -> optimizer steps -> micro-batches, and (of known data) passes over it.

    Example:
        >>> from atomrl.config import build_config
        >>> tree = {"run_name": "r", "model": {"path": "m", "device": "cpu"}, "data": {"train": "d"}}
        >>> tree |= {"rollout": {"prompts_per_step": 4}, "train": {"rows_per_update": 16, "epochs_per_step": 2}}
        >>> print(*batch_arithmetic(build_config(tree), problems=100), sep="\\n")
        a step: 4 prompts x 8 completions = 32 rows, each of at most 768 tokens
        optimizer steps in a step: 32 rows / 16 rows_per_update x 2 epochs = 4
        forward passes in an optimizer step: at most 4, of at most 4 rows (3072 tokens)
        the run: 100 steps x 4 prompts = 400 prompts = 4.00 passes over 100 problems; 400 optimizer steps
    """
    from atomrl.assembly import device_name

    rollout, train = config.rollout, config.train
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    update_rows = train.rows_per_update or rows
    updates = rows // update_rows * train.epochs_per_step
    row_tokens = longest_row(config)
    device = config.model.device
    tokens = train.micro_batch_tokens(device_name() if device == "auto" else device.partition(":")[0])
    fitting = max(1, tokens // row_tokens)
    micro_rows = min(update_rows, fitting, train.rows_per_micro_batch or update_rows)
    prompts = train.steps * rollout.prompts_per_step
    passes = f" = {prompts / problems:.2f} passes over {problems} problems" if problems else ""
    return [
        f"a step: {rollout.prompts_per_step} prompts x {rollout.completions_per_prompt} completions = {rows} rows, "
        f"each of at most {row_tokens} tokens",
        f"optimizer steps in a step: {rows} rows / {update_rows} rows_per_update x {train.epochs_per_step} epochs "
        f"= {updates}",
        f"forward passes in an optimizer step: at most {math.ceil(update_rows / micro_rows)}, "
        f"of at most {micro_rows} rows ({tokens} tokens)",
        f"the run: {train.steps} steps x {rollout.prompts_per_step} prompts = {prompts} prompts{passes}; "
        f"{train.steps * updates} optimizer steps",
    ]


def longest_row(config: RunConfig) -> int:
    """Tokens of the longest row that training can see."""
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    return min(longest, config.train.max_row_tokens or longest)


def memory(config: RunConfig, algorithm: Algorithm) -> list[str]:
    """The estimate, a line a part."""
    from atomrl.assembly.teacher import needs_teacher
    from atomrl.models.memory import memory_estimate

    parts = memory_estimate(
        config,
        needs_reference="ref_logprobs" in algorithm.needs,
        needs_teacher=needs_teacher(algorithm),
        needs_critic="values" in algorithm.needs,
        distributions="distributions" in algorithm.outputs,
    )
    return [f"{name:<20}{readable(size)}" for name, size in parts.items()]


def readable(size: int) -> str:
    """Bytes for people.

    Example:
        >>> readable(3 * 2**29), readable(2**20)
        ('    1.50 GiB', '    1.00 MiB')
    """
    return f"{size / 2**30:8.2f} GiB" if size >= 2**30 else f"{size / 2**20:8.2f} MiB"
