"""Resolve what a config leaves at `auto`: engine, its share of the GPU's memory, and settings chosen by memory.

`with_engine` and `with_share` are for runs with rollouts. `chosen_here` takes the fastest settings that fit the free
memory of this machine's GPU, by the formulas of `memory_estimate`.
"""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from atomrl.cluster.placement import Wanted
from atomrl.common.memory import readable
from atomrl.config import ConfigError, RunConfig, read_yaml
from atomrl.engines.vllm import VLLMEngine
from atomrl.models.decoder_spec import unsupported
from atomrl.models.loading import compute_dtype, model_config_only
from atomrl.models.memory import IN_CPU_MEMORY, MOST_TOKENS, SHARDED
from atomrl.models.shapes import text_config
from atomrl.models.vision import why_no_images
from atomrl.protocols import Algorithm
from atomrl.tracking.run_directory import is_begun
from atomrl.tracking.system_info import installed_version
from atomrl.trainer.build import (
    ENGINES,
    algorithm_of,
    chosen_class,
    device_name,
    train_sampling,
    why_no_pictures,
    with_settings,
)
from atomrl.trainer.colocation import shares_base
from atomrl.trainer.memory import (
    CONTEXT_GIB,
    GIB,
    LEAST_CONCURRENT,
    USABLE_FRACTION,
    Memory,
    memory_by_phase,
    memory_estimate,
    peak_of,
    sampling_bytes,
)

log = logging.getLogger(__name__)
ENGINE_PARTS = ("engine weights", "key-value cache")
"""Keys of `memory_estimate` that belong to the engine."""
ROLE_PARTS = {"reference": ("reference",), "critic": ("critic", "critic activations"), "teacher": ("teacher",)}
"""Keys of `memory_estimate` that belong to a role when it has actors of its own."""
FULL_SHARE = 0.9
"""`gpu_memory_utilization` of an engine with a GPU of its own."""
ENGINE_OVERHEAD = 3 * GIB
"""Bytes of vLLM or SGLang beside weights and cache: a prefill's activations, CUDA graphs, workspaces. Not measured."""
MIN_CAPABILITY = (8, 0)
"""Lowest CUDA compute capability for which vLLM is chosen: it has bfloat16 and FlashAttention."""
LEAST_TOKENS = 2048
"""Below so many tokens in a micro-batch, recomputing layers (`gradient_checkpointing`) costs less than still smaller
micro-batches: their matrix products are slower, and fewer rows share the prompt of their group."""
MOST_CONCURRENT = 512
"""Most completions decoded at once. The fewest are `LEAST_CONCURRENT`."""


def with_engine(config: RunConfig, path: str) -> tuple[RunConfig, str]:
    """Replace `rollout.engine=auto` by the name of an engine; also return the reason.

    A resumed run keeps the engine that it started with.

    Args:
        config: config of a run with rollouts.
        path: folder or hub name of the policy.

    Raises:
        ConfigError: `rollout.server` is set while the engine is `auto`.
    """
    if config.rollout.engine != "auto":
        return config, "set in the config"
    if config.rollout.server:
        raise ConfigError("rollout.server: set the engine of the servers: rollout.engine=vllm-server or sglang")
    stored = config.run_dir / "config.yaml"
    begun = is_begun(config.run_dir) and stored.is_file()
    recorded = read_yaml(stored).get("rollout", {}).get("engine") if begun else None
    if recorded in ENGINES:
        name, reason = recorded, "the run started with it"
    elif refusal := why_not_vllm(config, path):
        name, reason = "native", f"auto: {refusal}"
    else:
        name, reason = "vllm", f"auto: on a GPU, vLLM {installed_version('vllm')} is installed and supports the model"
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": name})}), reason


def why_not_vllm(config: RunConfig, path: str) -> str | None:
    """Return the reason why `auto` does not choose vLLM; None if it does."""
    gpu, cluster, backend = _on_gpu(config), config.cluster, config.backend
    if gpu is None:
        return "no GPU"
    version, shape = installed_version("vllm"), model_config_only(path, config.model.trust_remote_code)
    # CPU builds of vLLM are another package, or have "cpu" in their version.
    if version is None or find_spec("vllm") is None or "cpu" in version:
        return "vLLM for GPUs is not installed (pip install 'atomrl[vllm]')"
    if Version(version) < Version(str(VLLMEngine.least_version)):
        return f"vLLM {version} is older than {VLLMEngine.least_version}"
    if cluster is None and backend is not None and backend.ranks != 1:
        return "vLLM cannot run in the process of one of several ranks (rollout.engine=vllm-server can)"
    if torch.cuda.is_available() and gpu != "elsewhere":
        if (capability := torch.cuda.get_device_capability(torch.device(gpu))) < MIN_CAPABILITY:
            has, least = (".".join(map(str, pair)) for pair in (capability, MIN_CAPABILITY))
            return f"the GPU has compute capability {has}, and auto chooses vLLM from {least}"
        if compute_dtype(config.model.dtype, gpu) == torch.float32:
            return "the model computes in float32"
    if reason := VLLMEngine.refusal(train_sampling(config)):
        return f"vLLM does not support the sampling parameters: {reason}"
    if why_no_images(shape, path) is None and (reason := why_no_pictures(VLLMEngine, config)):
        return f"the data may have pictures: {reason} (text alone: rollout.engine=vllm)"
    architectures = getattr(shape, "architectures", None) or []
    if not architectures or not {*architectures} <= known_architectures():
        return f"vLLM {version} does not support {', '.join(architectures) or 'the model'}"
    if unsupported(shape) is not None and config.model.lora is not None:
        return "it is unknown whether vLLM supports adapters for this model"
    return None if gpu == "elsewhere" else only_native_fits(config, shape, gpu)


def only_native_fits(config: RunConfig, shape: Any, gpu: str) -> str | None:
    """Return the memory that the run needs with either engine, if it fits a GPU only with the native one, which uses
    the trainer's base weights; else None.

    `auto` settings count with their smallest values.
    """
    row = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    smallest: dict[str, dict[str, Any]] = {"rollout": {"engine": "native"}}
    if config.rollout.max_concurrent_completions == "auto":
        smallest["rollout"]["max_concurrent_completions"] = LEAST_CONCURRENT
    if config.train.tokens_per_micro_batch == "auto":
        smallest["train"] = {"tokens_per_micro_batch": row}
    if config.model.gradient_checkpointing == "auto":
        smallest["model"] = {"gradient_checkpointing": True}
    native = with_settings(config, smallest)
    compute = compute_dtype(config.model.dtype, gpu).itemsize
    if not shares_base(native, shape, "cuda", compute):
        return None
    algorithm = algorithm_of(config)
    vllm = with_settings(native, {"rollout": {"engine": "vllm"}})
    parts = memory_estimate(vllm, algorithm, device="cuda", compute=compute)
    trainer = role_parts("trainer", parts, {})
    engine = _engine_need(vllm, shape, parts)
    # vLLM gives its memory back during an update, unless both work at the same time.
    updating = peak_of(trainer) + (engine if config.asynchronous is not None else 0)
    with_vllm = max(resident_bytes(trainer) + engine, updating)
    with_native = memory_by_phase(native, algorithm, device="cuda", compute=compute).peak
    capacity = int(torch.cuda.get_device_properties(torch.device(gpu)).total_memory)
    usable = (capacity - CONTEXT_GIB * GIB) * USABLE_FRACTION
    if not with_native <= usable < with_vllm:
        return None
    return (
        f"only native fits, because it uses the trainer's base weights: {with_native / GIB:.1f} GiB, "
        f"{with_vllm / GIB:.1f} with vLLM, of {usable / GIB:.1f}"
    )


def _on_gpu(config: RunConfig) -> str | None:
    """Return the GPU of the engine, `elsewhere` for one that only an actor sees; None for a CPU."""
    cluster = config.cluster
    if config.model.device == "cpu":
        return None
    if cluster is not None and config.rollout.engine == "auto":
        num_gpus = cluster.resources["rollout"].num_gpus if "rollout" in cluster.resources else None
        if num_gpus == 0 or (num_gpus is None and cluster.placement is None):
            return None
        return "elsewhere" if cluster.address or not torch.cuda.is_available() else "cuda"
    device = device_name(config.model.device)
    return None if device == "cpu" else device


def known_architectures() -> set[str]:
    """Return the architectures that the installed vLLM supports.

    They are parsed from the source of its registry, because importing vLLM takes seconds.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    file = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    if not file.is_file():
        return set()
    tables = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Dict))
    keys = (key.value for table in tables for key in table.keys if isinstance(key, ast.Constant))
    return {key for key in keys if isinstance(key, str)}


def with_share(config: RunConfig, algorithm: Algorithm) -> tuple[RunConfig, str | None]:
    """Replace `rollout.gpu_memory_utilization=auto` by a number; also return the reason.

    The reason is None if the value was set, or has no effect on the engine.

    Args:
        config: config of a run, with the name of its engine.
        algorithm: decides which models the trainer holds.

    Raises:
        ConfigError: the trainer leaves no room for the engine.
    """
    rollout, share = config.rollout, FULL_SHARE
    capacity: int | None = None
    reason: str | None = None
    if rollout.gpu_memory_utilization != "auto":
        return config, None
    on_cpu = config.model.device == "cpu" or (config.cluster is None and not torch.cuda.is_available())
    if chosen_class(rollout).package is not None and not rollout.server and not on_cpu:
        if torch.cuda.is_available():
            device = "cuda" if config.model.device == "auto" or config.cluster is not None else config.model.device
            capacity = int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
        ranks = 1 if config.backend is None else config.backend.ranks or 1
        share, reason = engine_share(config, memory_estimate(config, algorithm, ranks), capacity)
    return config.model_copy(update={"rollout": rollout.model_copy(update={"gpu_memory_utilization": share})}), reason


def engine_share(
    config: RunConfig, parts: Mapping[str, int], capacity: int | None, wanted: Mapping[str, Wanted] | None = None
) -> tuple[float, str]:
    """Compute `rollout.gpu_memory_utilization` if it is `auto`; also return the reason.

    An engine that shares a GPU with the trainer gets the memory that the trainer leaves free: during rollouts, or at
    its peak if both work at the same time (`asynchronous`). It never gets more than weights, cache and
    `ENGINE_OVERHEAD` take.

    Args:
        config: config of a run whose engine is vLLM or SGLang.
        parts: result of `memory_estimate`.
        capacity: bytes of the GPU; None if unknown.
        wanted: actors of the cluster by role; None: as in the config.

    Raises:
        ConfigError: the trainer leaves no room for the engine.
    """
    rollout, cluster = config.rollout, config.cluster
    if rollout.gpu_memory_utilization != "auto":
        return rollout.gpu_memory_utilization, "set in the config"
    if cluster is not None and cluster.placement != "colocated":
        num_gpus = cluster.resources["rollout"].num_gpus if "rollout" in cluster.resources else None
        part = min(1.0, num_gpus or 1.0)
        reason = f"the engine has {part:g} of a GPU" if part < 1 else "the engine has its own GPU"
        return round(FULL_SHARE * part, 2), reason
    engines = cluster.replicas if cluster else 1
    if capacity is None:
        share = round(0.5 / engines, 2)
        return share, "half of a GPU not visible to this process, shared by the engines"
    # On-policy, the trainer holds only what stays resident during rollouts; asynchronously, its peak.
    trainer_parts = role_parts("trainer", parts, wanted or {})
    trainer = peak_of(trainer_parts) if config.asynchronous is not None else resident_bytes(trainer_parts)
    room = (capacity - CONTEXT_GIB * GIB) * USABLE_FRACTION - trainer
    path = config.model.path
    assert path is not None, "a run with rollouts has a model.path"
    need = _engine_need(config, model_config_only(path, config.model.trust_remote_code), parts)
    # Rounded down, and never more than the engine can use.
    share = int(100 * min(room / engines, need) / capacity) / 100
    reason = (
        f"{trainer / GIB:.1f} GiB of {capacity / GIB:.1f} are used by the trainer, the engine can use {need / GIB:.1f}"
    )
    if share <= 0 or share * capacity < parts["engine weights"]:
        raise ConfigError(
            f"rollout.gpu_memory_utilization: no room for the engine, by estimate: {reason}; use "
            "model.lora, model.quantization, cluster.placement=split, or set it to a value that fits"
        )
    return share, reason


def _engine_need(config: RunConfig, shape: Any, parts: Mapping[str, int]) -> float:
    """Return the bytes that vLLM or SGLang can use."""
    sampling = sampling_bytes(config, int(text_config(shape).vocab_size))
    return ENGINE_OVERHEAD + 1.1 * sum(parts[part] for part in ENGINE_PARTS) + sampling


def resident_bytes(parts: Mapping[str, int]) -> int:
    """Return the bytes that the trainer holds during rollouts: weights, optimizer state and other models."""
    return sum(size for part, size in parts.items() if part in SHARDED and part != "gradients")


def role_parts(role: str, parts: Mapping[str, int], wanted: Mapping[str, Any]) -> dict[str, int]:
    """Select the parts of a memory estimate that belong to a role.

    The trainer has all parts except those of the engine and of roles with actors of their own (`wanted`).
    """
    if role != "trainer":
        return {part: parts.get(part, 0) for part in ROLE_PARTS[role]}
    remote = {part for other in ROLE_PARTS if other in wanted for part in ROLE_PARTS[other]}
    return {part: size for part, size in parts.items() if part not in {*ENGINE_PARTS, *remote, IN_CPU_MEMORY, "total"}}


def autos(config: RunConfig) -> dict[str, str]:
    """Return the settings that are `auto` and chosen by memory: section -> key."""
    settings = {
        "rollout": ("max_concurrent_completions", config.rollout.max_concurrent_completions),
        "train": ("tokens_per_micro_batch", config.train.tokens_per_micro_batch),
        "model": ("gradient_checkpointing", config.model.gradient_checkpointing),
    }
    used = settings if config.kind == "rl" else {name: settings[name] for name in ("train", "model")}
    return {section: key for section, (key, value) in used.items() if value == "auto"}


def choose(config: RunConfig, budget: int, memory_of: Callable[[RunConfig], Memory], ranks: int = 1) -> RunConfig:
    """Replace `auto` settings by the fastest ones with which a run fits into memory.

    They are chosen in this order: as many concurrent completions as fit, at most those of a step; no gradient
    checkpointing, if a micro-batch of `LEAST_TOKENS` fits without; as many tokens per micro-batch as fit. If nothing
    fits, the smallest values are taken.

    Args:
        config: config of any kind of run.
        budget: bytes of one device.
        memory_of: estimates the memory of a changed config, on the rank with the highest peak.
        ranks: number of ranks of `config.backend`; all get the same settings.

    Returns:
        The config with numbers. `model.gradient_checkpointing` stays `auto` if it is not needed; a run turns it on if
        it runs out of memory.
    """

    def first_fit(phases: Iterable[str], changes: Iterable[Mapping[str, Any]]) -> RunConfig:
        """Apply the first change with which these phases fit, or the last one."""
        for change in changes:
            changed = with_settings(config, change)
            memory = memory_of(changed)
            if memory.process + memory.resident + max(memory.phases.get(phase, 0) for phase in phases) <= budget:
                break
        return changed

    unset, replicas = autos(config), ranks // config.backend.ranks_per_row if config.backend else 1
    rows = -(-config.rows_per_update // replicas)
    if "rollout" in unset:
        completions = min(MOST_CONCURRENT, config.rollout.prompts_per_step * config.rollout.completions_per_prompt)
        sizes = halves(completions, LEAST_CONCURRENT)
        config = first_fit(["rollout"], ({"rollout": {"max_concurrent_completions": size}} for size in sizes))
    if "train" in unset or "model" in unset:
        row = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
        row = min(row, config.train.max_row_tokens or row)
        most = max(row, min(MOST_TOKENS, rows * row))
        tokens = config.train.tokens_per_micro_batch
        sizes, least = ([tokens], 1) if tokens != "auto" else (halves(most, row), min(most, LEAST_TOKENS))
        # (gradient checkpointing, tokens): first large micro-batches without checkpointing, then all sizes with it.
        pairs: list[tuple[Any, int]] = [(config.model.gradient_checkpointing, size) for size in sizes]
        if "model" in unset:
            pairs = [pair for pair in pairs if pair[1] >= least] + [(True, size) for size in sizes]
        config = first_fit(
            ["log-probs", "update"],
            (
                {"train": {"tokens_per_micro_batch": size}, "model": {"gradient_checkpointing": checkpointing}}
                for checkpointing, size in pairs
            ),
        )
    return config


def halves(most: int, least: int) -> list[int]:
    """Halve a number repeatedly, down to a lower bound.

    Example:
        >>> halves(100, 20), halves(8, 8)
        ([100, 50, 25, 20], [8])
    """
    sizes = [most]
    while sizes[-1] > least:
        sizes.append(max(least, sizes[-1] // 2))
    return sizes


def chosen_here(config: RunConfig, algorithm: Algorithm, ranks: int) -> RunConfig:
    """Replace `auto` settings by those for this machine's GPU, and log them with the reason.

    A resumed run keeps the settings that it started with. `auto` stays, and means the defaults in the config reference,
    on a CPU, for a fresh model, and in Ray actors, whose GPUs are not known here.
    """
    unset = autos(config)
    if not unset:
        return config
    if is_begun(config.run_dir) and (file := config.run_dir / "config.yaml").is_file():
        stored = read_yaml(file)
        same = {name: {key: stored[name][key]} for name, key in unset.items() if key in stored.get(name, {})}
        return with_settings(config, same)
    device = device_name(config.model.device)
    if device == "cpu" or config.gpt is not None or config.cluster is not None:
        return config
    budget = int(free_bytes(device, ranks) * USABLE_FRACTION)

    def memory_of(changed: RunConfig) -> Memory:
        return memory_by_phase(changed, algorithm, ranks)

    chosen = choose(config, budget, memory_of, ranks)
    peak = memory_of(chosen).peak
    log.info(
        "auto: %s; estimated %s of %s free memory%s",
        ", ".join(auto_values(config, chosen)), readable(peak).strip(), readable(budget).strip(),
        " on the fullest of the ranks' GPUs" if ranks > 1 else "",
    )  # fmt: skip
    if peak > budget:
        log.warning("estimated memory does not fit: `atomrl plan CONFIG` lists settings that reduce it")
    return chosen


def free_bytes(device: str, ranks: int) -> int:
    """Return the free memory of a GPU; for several ranks the minimum over their GPUs on this machine."""
    if ranks == 1:
        return torch.cuda.mem_get_info(torch.device(device))[0]
    count = min(ranks, torch.cuda.device_count())
    # In another process: the query creates a CUDA context on each GPU, which holds memory until its process ends.
    query = f"import torch; print(min(torch.cuda.mem_get_info(n)[0] for n in range({count})))"
    return int(subprocess.run([sys.executable, "-c", query], check=True, stdout=subprocess.PIPE).stdout)


def auto_values(config: RunConfig, chosen: RunConfig) -> list[str]:
    """Return the values chosen for `auto` settings as `KEY=VALUE`, such as `train.tokens_per_micro_batch=8192`."""
    lines = []
    for section, key in autos(config).items():
        value = getattr(getattr(chosen, section), key)
        shown = str(value).lower() if isinstance(value, bool) else "false" if section == "model" else value
        lines.append(f"{section}.{key}={shown}")
    return lines
