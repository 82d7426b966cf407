"""AdamW with gradient clipping, a learning-rate schedule, and skipped updates."""

import logging
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from atomrl.common.metrics import Count, Mean, Metrics
from atomrl.config import ConfigError, TrainConfig
from atomrl.models.quantized import bitsandbytes

log = logging.getLogger(__name__)
MAX_SKIPPED_IN_A_ROW = 3


class Diverged(RuntimeError):
    """Too many updates in a row had a non-finite gradient."""


class Optimizer:
    """AdamW on float32 weights, with weight decay on matrices only.

    Moments are float32, or 8-bit (bitsandbytes, for weights of at least 4096 elements) with `adamw8bit` and
    `paged_adamw8bit`.

    Args:
        name: prefix of its metrics, `actor` or `critic`.
        model: model whose parameters with `requires_grad` are trained.
        train: Adam's constants, clipping and the schedule.
        peak: highest learning rate of the schedule.
        total_updates: optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, name: str, model: nn.Module, train: TrainConfig, peak: float, total_updates: int) -> None:
        self.name, self.train, self.peak, self.total_updates = name, train, peak, total_updates
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.skipped_in_a_row = 0
        groups = [
            {"params": [w for w in weights if (w.dim() >= 2) == wide], "weight_decay": train.weight_decay * wide}
            for weights in self._by_mesh()
            for wide in (True, False)
        ]
        betas = (train.adam_beta1, train.adam_beta2)
        settings: dict[str, Any] = {"lr": peak, "betas": betas, "eps": train.adam_eps}
        self.adamw: Any
        if train.optimizer == "adamw":
            self.adamw = torch.optim.AdamW(groups, **settings, fused=True)
        else:
            library = bitsandbytes().optim
            kind = library.AdamW8bit if train.optimizer == "adamw8bit" else library.PagedAdamW8bit
            self.adamw = kind([group for group in groups if group["params"]], **settings)

    def _by_mesh(self) -> list[list[nn.Parameter]]:
        """Group the weights by device mesh, because foreach operations take DTensors of one mesh at a time."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for weight in self.weights.values():
            groups.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
        return list(groups.values())

    def step(self, updates: int, any_rank: Callable[[bool], bool] = bool) -> Metrics:
        """Clip the gradient, set the learning rate and step; skip the update if its gradient is 0 or not finite.

        Args:
            updates: number of updates before this one.
            any_rank: returns True if its argument is true on any rank.

        Raises:
            Diverged: third update in a row with a non-finite gradient.
        """
        train, name = self.train, self.name
        rate = learning_rate(updates, self.total_updates, self.peak, train)
        norm = self.norm_clipped()
        metrics: Metrics = {f"{name}/lr": Mean(rate)}
        if not self.count_finite(updates, not any_rank(not norm < math.inf)):
            metrics[f"{name}/skipped_updates"] = Count()
        else:
            metrics[f"{name}/grad_norm"] = Mean(norm)
            if norm == 0:  # momentum and weight decay would change weights although the batch has no signal
                metrics[f"{name}/empty_updates"] = Count()
            else:
                self.apply(rate)
        self.zero_grad()
        return metrics

    def norm_clipped(self) -> float:
        """Clip the gradient to `max_grad_norm`; return its norm before clipping."""
        meshes, max_norm = self._by_mesh(), self.train.max_grad_norm
        norms = [torch.nn.utils.get_total_norm([w.grad for w in m if w.grad is not None], foreach=True) for m in meshes]
        total = norms[0] if len(norms) == 1 else torch.stack([full_tensor(part) for part in norms]).norm()
        norm: float = full_tensor(total).item()
        if norm > max_norm:
            for weights in meshes:
                torch.nn.utils.clip_grads_with_norm_(weights, max_norm, total, foreach=True)
        return norm

    def apply(self, rate: float) -> None:
        """Take AdamW's step at this learning rate."""
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()

    def count_finite(self, updates: int, finite: bool) -> bool:
        """Count updates in a row that are skipped because of a non-finite gradient; return `finite`.

        Raises:
            Diverged: this is the third in a row.
        """
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if not finite:
            log.warning("skipped update %d of the %s: its gradient is not finite", updates, self.name)
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise Diverged(
                f"{MAX_SKIPPED_IN_A_ROW} updates in a row, up to update {updates}, had a gradient that is not "
                "finite; the weights are those of the last finite update"
            )
        return finite

    def zero_grad(self) -> None:
        """Set gradients to None."""
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return moments and step counts as `exp_avg/NAME`, ..., for the weights that were stepped."""
        states = {name: self.adamw.state.get(weight, {}) for name, weight in self.weights.items()}
        return {
            f"{key}/{name}": torch.as_tensor(value).contiguous()  # bitsandbytes counts by a Python number
            for name, own in states.items()
            for key, value in own.items()
            if not key.startswith("qmap")  # a constant
        }

    def load(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Load what `state` returned.

        Raises:
            ConfigError: the state is of another kind of optimizer.
        """
        in_8_bits = self.train.optimizer != "adamw"
        if any(key.startswith("state1/") != in_8_bits for key in state if key.startswith(("state1/", "exp_avg/"))):
            raise ConfigError(f"train.optimizer={self.train.optimizer}: the checkpoint has another optimizer's moments")
        self.adamw.state.clear()
        for number, group in enumerate(self.adamw.param_groups if in_8_bits else ()):
            for place, weight in enumerate(group["params"]):  # allocate: paged moments are not ordinary tensors
                self.adamw.init_state(group, weight, number, place)
        for key, value in state.items():
            kind, _, name = key.partition("/")
            own = self.adamw.state[self.weights[name]]
            if not in_8_bits:
                own[kind] = value.to(device)
            elif kind == "step":
                own[kind] = int(value)
            else:
                own[kind].copy_(value)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be a DTensor; collective."""
    return cast(Tensor, tensor.full_tensor()) if hasattr(tensor, "full_tensor") else tensor


def learning_rate(update: int, total_updates: int, peak: float, train: TrainConfig) -> float:
    """Return the learning rate of one optimizer step.

    Linear warm-up over the first `w = warmup_updates or ceil(warmup_ratio * total_updates)` updates, starting above 0:

        lr_u = peak (u + 1) / w                                              u < w
        lr_u = peak                                                          constant
        lr_u = peak (m + (1 - m) (1 - (u - w) / (total - w)))                linear, m = min_lr_ratio
        lr_u = peak (m + (1 - m) (1 + cos(pi (u - w) / (total - w))) / 2)    cosine
        lr_u = peak sqrt(s / (s + u - w))                                    inverse_sqrt, s = w, or 10,000 without

    `inverse_sqrt` is that of transformers.

    Args:
        update: u, counted from 0; after the last update the rate stays at its minimum.
        total_updates: optimizer steps of the whole run.
        peak: learning rate after warm-up.
        train: `schedule`, `warmup_updates` or `warmup_ratio`, and `min_lr_ratio` (m).

    Example:
        >>> train = TrainConfig(schedule="cosine", warmup_ratio=1 / 3)
        >>> [round(learning_rate(u, 6, 1.0, train), 3) for u in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
        >>> train = TrainConfig(schedule="linear", warmup_ratio=1 / 3)
        >>> [round(learning_rate(u, 6, 1.0, train), 3) for u in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
        >>> train = TrainConfig(schedule="inverse_sqrt", warmup_ratio=1 / 3)
        >>> [round(learning_rate(u, 6, 1.0, train), 3) for u in range(7)]
        [0.5, 1.0, 1.0, 0.816, 0.707, 0.632, 0.577]
    """
    warmup = train.warmup_updates or math.ceil(train.warmup_ratio * total_updates)
    if update < warmup:
        return peak * (update + 1) / warmup
    if train.schedule == "constant":
        return peak
    if train.schedule == "inverse_sqrt":
        scale = warmup or 10_000
        return peak * math.sqrt(scale / (scale + update - warmup))
    progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
    left = 1 - progress if train.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)
