"""Resuming: which changes of the config, the data and the tokenizer are allowed."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from atomrl.config import ConfigError, RunConfig, load_config
from atomrl.tracking.reading.lines import flat_tree

HARMLESS = (
    "run_name", "output_dir", "checkpoint", "tracking", "eval.every_steps", "eval.before", "eval.after",
    # The files behind these paths are compared by content (`identity`), so they may be moved.
    "model.path", "model.tokenizer", "data.train",
    # Speed and memory: the same objective, up to rounding.
    "model.device", "model.gradient_checkpointing", "model.activation_offload", "model.compile", "model.pack_rows",
    "rollout.max_concurrent_completions",
    "train.tokens_per_micro_batch", "train.rows_per_micro_batch", "backend",
    # Timeouts and capacities.
    "pool.timeout_s", "pool.lease_s", "pool.capacity", "pool.ttl_s",
    "train.timeout_s", "asynchronous.timeout_s", "cluster.timeout_s", "rollout.server_timeout_s",
    "reward.wait_s", "environment.wait_s",
)  # fmt: skip
"""Keys and sections that may change when a run is resumed. Any other change is refused."""


def config_changes(before: Mapping[str, Any], now: RunConfig) -> list[str]:
    """List the differences between a stored config tree and a config: `train.steps: 100 -> 200`.

    A key that the stored tree lacks (it was written by an older version) counts as its default.
    """
    with contextlib.suppress(ConfigError):  # a key that no longer exists stays in the tree, as a difference
        before = load_config(before).to_tree()
    old, new = flat_tree(before), flat_tree(now.to_tree())
    keys = [*old, *(key for key in new if key not in old)]
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def stopping_changes(changes: list[str], now: RunConfig) -> list[str]:
    """Return the lines of `config_changes` with which a run must not be resumed.

    `train.steps` may change if the learning rate does not depend on it (constant, no warm-up).
    """
    allowed: tuple[str, ...] = HARMLESS
    if now.train.schedule == "constant" and not now.train.warmup_ratio:
        allowed = (*HARMLESS, "train.steps")
    prefixes = tuple(f"{key}." for key in allowed)
    return [line for line in changes if not f"{line.partition(':')[0]}.".startswith(prefixes)]


def tokenizer_identity(tokenizer: Any) -> str:
    """Hash everything that determines the token ids of a prompt: vocabulary, rules, chat template, special tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    # Truncation and padding are settings of the last call.
    rules = {**json.loads(fast.to_str()), "truncation": None, "padding": None} if fast else tokenizer.get_vocab()
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    content = [rules, tokenizer.chat_template, ids]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
