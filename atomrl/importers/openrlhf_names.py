"""OpenRLHF's flags that are not translated, with the reason; its schedules and its names of data."""

from typing import Any

from atomrl.importers.sources import hub_source

SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
GPUS = "the first line says what becomes of the GPUs"
SHARDS = "how GPUs share a model, which changes no number: section backend (docs/guides/multi_gpu.md)"
KERNEL = "how it is computed, not what; AtomRL has kernels of its own"
REASONS = {
    **{
        f"{role}.{name}": GPUS
        for role in ("ref", "reward", "critic", "actor")
        for name in ("num_nodes", "num_gpus_per_node")
    },
    **dict.fromkeys(("train.colocate_", "vllm.num_engines", "train.colocate_all"), GPUS),
    "vllm.": "a switch of vLLM; section rollout says where completions are drawn",
    "ds.zero_stage": SHARDS,
    "ds.": SHARDS,
    **dict.fromkeys((
        "ds.packing_samples", "ds.attn_implementation", "ds.experts_implementation", "ds.use_liger_kernel",
        "ds.deepcompile", "ds.param_dtype", "ds.grad_accum_dtype",
    ), KERNEL),
    **dict.fromkeys(("actor.gradient_checkpointing_reentrant", "model.gradient_checkpointing_reentrant"), KERNEL),
    **dict.fromkeys(("ref.offload", "reward.offload"), "models that wait stay where they are"),
    "ckpt.output_dir": "output_dir and run_name say where a run is",
    "ckpt.path": "output_dir and run_name say where a run is",
    "ckpt.": "a run goes on with --resume, from checkpoints that hold all it needs (docs/guides/checkpoints.md)",
    "logger.": "each step is in the run's metrics.jsonl",
    "local_rank": GPUS,
    "bf16": "model.dtype is bfloat16",
    "data.disable_fast_tokenizer": "how rows are loaded; the rows are the same",
    "data.dataloader_num_workers": "how rows are loaded; the rows are the same",
    "use_ms": "models and data are of the Hugging Face hub, or folders",
    "rollout.micro_batch_size": "forward passes are as large as train.tokens_per_micro_batch says",
    "rollout.max_tokens_per_gpu": "forward passes are as large as train.tokens_per_micro_batch says",
    "rollout.vllm_generate_batch_size": "missing groups are drawn as they are needed",
    "train.full_determinism_enable": "draws are functions of the seed",
    "critic.save_value_network": "checkpoints have the critic too",
    "train.enable_ema": "no mean of the weights is kept",
    "train.ema_beta": "no mean of the weights is kept",
    "train.async_": "rollouts beside training: section asynchronous (docs/guides/distributed_rollout.md)",
    "train.partial_rollout_enable": "rollouts beside training: section asynchronous "
    "(docs/guides/distributed_rollout.md)",
    "data.image_key": "models are of text alone",
    "data.max_images_per_prompt": "models are of text alone",
    "algo.kl.target": "of an adaptive KL, which is off",
}  # fmt: skip
"""Why flags have no counterpart, by their beginnings."""


def source_file(given: str, split: str) -> str:
    """A file or folder as it is given, or a split of a hub's data set."""
    if given.endswith((".json", ".jsonl", ".csv", ".parquet", ".gz")):
        return given
    return hub_source(given, split=split)


def listed(value: Any) -> list[str]:
    """Names with commas between them."""
    return [] if value is None else str(value).split(",")
