"""What may differ between a run and its resumption: the config, and what the config's paths lead to."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from atomrl.config import ConfigError, RunConfig, build_config
from atomrl.reading.lines import flat_tree

HARMLESS = (
    "run_name", "output_dir", "checkpoint", "tracking", "eval.every_steps", "eval.before", "eval.after",
    # What these name is compared by its content (`identity`), so a folder may have moved.
    "model.path", "model.tokenizer", "data.train",
    # Speed and memory; the objective stays, though not its last bits.
    "model.device", "model.gradient_checkpointing", "model.activation_offload", "model.compile", "model.pack_rows",
    "rollout.max_concurrent_completions",
    "train.tokens_per_micro_batch", "train.rows_per_micro_batch", "backend",
    # How long one waits, and how much room there is.
    "pool.timeout_s", "pool.lease_s", "pool.capacity", "pool.ttl_s",
    "train.timeout_s", "asynchronous.timeout_s", "cluster.timeout_s", "rollout.server_timeout_s",
    "reward.wait_s", "environment.wait_s",
)  # fmt: skip
"""Keys, and sections of keys, that may change when a run is resumed. Every other change stops it."""


def config_changes(before: Mapping[str, Any], now: RunConfig) -> list[str]:
    """What differs between a stored config tree and a config: `train.steps: 100 -> 200`.

    A key that the stored tree lacks, because it is of an older version, counts as its default.
    """
    with contextlib.suppress(ConfigError):  # it has a key that is no more, which is a difference
        before = build_config(before).to_tree()
    old, new = flat_tree(before), flat_tree(now.to_tree())
    keys = [*old, *(key for key in new if key not in old)]
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def stopping_changes(changes: list[str], now: RunConfig) -> list[str]:
    """Those of `config_changes` after which the run would not be the one that was started.

    `train.steps` may change where the learning rate does not depend on it (constant, without warm-up).
    """
    free: tuple[str, ...] = HARMLESS
    if now.train.schedule == "constant" and not now.train.warmup_ratio:
        free = (*HARMLESS, "train.steps")
    return [line for line in changes if not f"{line.partition(':')[0]}.".startswith(tuple(f"{key}." for key in free))]


def tokenizer_identity(tokenizer: Any) -> str:
    """A hash of all that decides how a tokenizer turns a prompt into token ids."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    # Truncation and padding are settings of the last call, no part of the tokenizer.
    rules = {**json.loads(fast.to_str()), "truncation": None, "padding": None} if fast else tokenizer.get_vocab()
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    content = [rules, tokenizer.chat_template, ids]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
