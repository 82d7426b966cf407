"""Settings that are `auto`: on a GPU chosen from its free memory, by the formulas of `memory_estimate`."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from atomrl.config import RunConfig, read_yaml
from atomrl.models.memory import MOST_TOKENS
from atomrl.protocols import Algorithm
from atomrl.runs.base import readable
from atomrl.runs.build import device_name, with_settings
from atomrl.runs.hardware import USABLE
from atomrl.runs.plan import Memory, memory_by_phase
from atomrl.tracking.run_directory import is_begun

log = logging.getLogger(__name__)
LEAST_TOKENS = 2048
"""Tokens of a micro-batch below which computing layers twice (`gradient_checkpointing`) costs less than smaller
products, and the prompts of a group that fewer rows share."""
MOST_AT_ONCE, LEAST_AT_ONCE = 512, 32
"""Completions that are decoded at once. With fewer, decoding takes many times as long: `atomrl plan CONFIG --fit` names
better ways to take less memory."""


def autos(config: RunConfig) -> dict[str, str]:
    """The settings of this file that are `auto`, by section."""
    settings = {
        "rollout": ("max_concurrent_completions", config.rollout.max_concurrent_completions),
        "train": ("tokens_per_micro_batch", config.train.tokens_per_micro_batch),
        "model": ("gradient_checkpointing", config.model.gradient_checkpointing),
    }
    used = settings if config.kind == "rl" else {name: settings[name] for name in ("train", "model")}
    return {section: key for section, (key, value) in used.items() if value == "auto"}


def choose(config: RunConfig, budget: int, memory_of: Callable[[RunConfig], Memory], ranks: int = 1) -> RunConfig:
    """Replace the settings that are `auto` by the fastest with which a run fits into some memory.

    These are, in this order: as many completions at once as fit, up to all of a step; layers computed once, if a
    micro-batch of `LEAST_TOKENS` fits so; as many tokens in a micro-batch as fit. Where nothing fits, it is the
    smallest of each.

    Args:
        config: of any kind of run.
        budget: bytes of one device.
        memory_of: the memory of a changed config, on the rank that holds most.
        ranks: of the config's `backend`; each is given the same numbers.

    Returns:
        The config with numbers. `model.gradient_checkpointing` stays `auto` where it is not needed, and is turned on
        if memory runs out all the same.
    """

    def first(phases: Iterable[str], changes: Iterable[Mapping[str, Any]]) -> RunConfig:
        """The first of some changes with which these phases fit, or the last."""
        for change in changes:
            changed = with_settings(config, change)
            memory = memory_of(changed)
            if memory.process + memory.resident + max(memory.phases.get(phase, 0) for phase in phases) <= budget:
                break
        return changed

    left, copies = autos(config), ranks // config.backend.ranks_per_row if config.backend else 1
    rows = -(-config.rows_per_update // copies)
    if "rollout" in left:
        drawn = min(MOST_AT_ONCE, config.rollout.prompts_per_step * config.rollout.completions_per_prompt)
        sizes = halves(drawn, LEAST_AT_ONCE)
        config = first(["rollout"], ({"rollout": {"max_concurrent_completions": size}} for size in sizes))
    if "train" in left or "model" in left:
        row = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
        row = min(row, config.train.max_row_tokens or row)
        most = max(row, min(MOST_TOKENS, rows * row))
        given = config.train.tokens_per_micro_batch
        sizes, least = ([given], 1) if given != "auto" else (halves(most, row), min(most, LEAST_TOKENS))
        pairs: list[tuple[Any, int]] = [(config.model.gradient_checkpointing, size) for size in sizes]
        if "model" in left:
            pairs = [pair for pair in pairs if pair[1] >= least] + [(True, size) for size in sizes]
        config = first(
            ["log-probs", "update"],
            (
                {"train": {"tokens_per_micro_batch": size}, "model": {"gradient_checkpointing": way}}
                for way, size in pairs
            ),
        )
    return config


def halves(most: int, least: int) -> list[int]:
    """A number and its halves, down to another.

    Example:
        >>> halves(100, 20), halves(8, 8)
        ([100, 50, 25, 20], [8])
    """
    sizes = [most]
    while sizes[-1] > least:
        sizes.append(max(least, sizes[-1] // 2))
    return sizes


def chosen_here(config: RunConfig, algorithm: Algorithm, ranks: int) -> RunConfig:
    """Replace the settings that are `auto` by those for this machine's GPU, and log them with the reason.

    A run that goes on keeps those that it began with. On a CPU, for a fresh model, and where trainer or engine are in
    Ray actors, whose GPUs are not known here, `auto` stays, and stands for the values that the config's docs give.
    """
    left = autos(config)
    if not left:
        return config
    if is_begun(config.run_dir) and (file := config.run_dir / "config.yaml").is_file():
        stored = read_yaml(file)
        kept = {section: {key: stored[section][key]} for section, key in left.items() if key in stored.get(section, {})}
        return with_settings(config, kept)
    device = device_name(config.model.device)
    if device == "cpu" or config.gpt is not None or config.cluster is not None:
        return config
    budget = int(free_bytes(device, ranks) * USABLE)

    def memory_of(changed: RunConfig) -> Memory:
        return memory_by_phase(changed, algorithm, ranks)

    found = choose(config, budget, memory_of, ranks)
    log.info(
        "auto: %s; by the formulas %s of %s that are free%s",
        ", ".join(described(config, found)), readable(memory_of(found).peak).strip(), readable(budget).strip(),
        " on the fullest of the ranks' GPUs" if ranks > 1 else "",
    )  # fmt: skip
    if memory_of(found).peak > budget:
        log.warning("by the formulas the run does not fit: `atomrl plan CONFIG` says what takes less memory")
    return found


def free_bytes(device: str, ranks: int) -> int:
    """Free memory of a GPU, or with several ranks the least that one of their GPUs on this machine has."""
    if ranks == 1:
        return torch.cuda.mem_get_info(torch.device(device))[0]
    count = min(ranks, torch.cuda.device_count())
    # In a process that ends: to ask a GPU takes some of its memory for as long as the process lives.
    ask = f"import torch; print(min(torch.cuda.mem_get_info(n)[0] for n in range({count})))"
    return int(subprocess.run([sys.executable, "-c", ask], check=True, stdout=subprocess.PIPE).stdout)


def described(config: RunConfig, found: RunConfig) -> list[str]:
    """The settings that were `auto`, with what was chosen: `train.tokens_per_micro_batch=8192`."""
    lines = []
    for section, key in autos(config).items():
        value = getattr(getattr(found, section), key)
        shown = str(value).lower() if isinstance(value, bool) else "false" if section == "model" else value
        lines.append(f"{section}.{key}={shown}")
    return lines
