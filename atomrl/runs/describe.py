"""What a dry run prints: the batch arithmetic, the data, and an estimate of the memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from atomrl.config import RunConfig
from atomrl.data.checks import repetitions
from atomrl.data.processor import DataProcessor
from atomrl.models.memory import memory_estimate
from atomrl.protocols import Algorithm
from atomrl.runs.build import device_name, needs_teacher
from atomrl.types import Sample


def describe_samples(name: str, samples: Sequence[Sample], processor: DataProcessor) -> list[str]:
    """How many problems of a split are used, of which sources, and how long their prompts are."""
    sources = Counter(sample.data_source for sample in samples)
    lengths = sorted(len(ids) for ids in processor.token_ids(samples))
    return [
        f"{name}: {len(samples)} problems ({', '.join(f'{source} x{count}' for source, count in sources.items())})",
        *(f"       {line}" for line in repetitions(samples)),
        f"       prompt tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}",
    ]


def batch_arithmetic(config: RunConfig, problems: int) -> list[str]:
    """Prompts x completions -> rows -> optimizer steps -> micro-batches, and passes over the data.

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
    return [
        f"a step: {rollout.prompts_per_step} prompts x {rollout.completions_per_prompt} completions = {rows} rows, "
        f"each of at most {row_tokens} tokens",
        f"optimizer steps in a step: {rows} rows / {update_rows} rows_per_update x {train.epochs_per_step} epochs "
        f"= {updates}",
        f"forward passes in an optimizer step: at most {math.ceil(update_rows / micro_rows)}, "
        f"of at most {micro_rows} rows ({tokens} tokens)",
        f"the run: {train.steps} steps x {rollout.prompts_per_step} prompts = {prompts} prompts = "
        f"{prompts / problems:.2f} passes over {problems} problems; {train.steps * updates} optimizer steps",
    ]


def longest_row(config: RunConfig) -> int:
    """Tokens of the longest row that training can see."""
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    return min(longest, config.train.max_row_tokens or longest)


def memory(config: RunConfig, algorithm: Algorithm) -> list[str]:
    """The estimate, a line a part."""
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
