"""One set of weights and how gradients change it: AdamW, clipping, the learning rate, and what is not applied."""

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
    """Too many updates in a row had a gradient that is not finite."""


class Optimizer:
    """AdamW on float32 weights, its moments in float32 or (of weights from 4096 numbers on) in 8 bits; weight decay on
    matrices alone.

    Args:
        name: `actor` or `critic`; its metrics begin with it.
        model: whose weights it trains, where they have a gradient.
        train: Adam's constants, clipping and the schedule.
        peak: the schedule's highest learning rate.
        total_updates: of the whole run, for the schedule.
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
            made = bitsandbytes().optim
            kind = made.AdamW8bit if train.optimizer == "adamw8bit" else made.PagedAdamW8bit
            self.adamw = kind([group for group in groups if group["params"]], **settings)

    def _by_mesh(self) -> list[list[nn.Parameter]]:
        """The weights, those that are cut over the same ranks together: no operation takes others at the same time."""
        found: dict[Any, list[nn.Parameter]] = {}
        for weight in self.weights.values():
            found.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
        return list(found.values())

    def step(self, updates: int, any_rank: Callable[[bool], bool] = bool) -> Metrics:
        """Clip, set the learning rate, step; or leave the update out, where its gradient is 0 or not finite.

        Args:
            updates: how many were before.
            any_rank: whether something is so on any rank.

        Raises:
            Diverged: the third in a row with a gradient that is not finite.
        """
        train, name = self.train, self.name
        rate = learning_rate(updates, self.total_updates, self.peak, train)
        norm = self.norm_clipped()
        metrics: Metrics = {f"{name}/lr": Mean(rate)}
        if not self.count_finite(updates, not any_rank(not norm < math.inf)):
            metrics[f"{name}/skipped_updates"] = Count()
        else:
            metrics[f"{name}/grad_norm"] = Mean(norm)
            if norm == 0:  # momentum and weight decay would move weights although the batch says nothing
                metrics[f"{name}/empty_updates"] = Count()
            else:
                self.apply(rate)
        self.zero_grad()
        return metrics

    def norm_clipped(self) -> float:
        """The norm of the gradient, which is then scaled down to `max_grad_norm` where it is above."""
        meshes, most = self._by_mesh(), self.train.max_grad_norm
        norms = [torch.nn.utils.get_total_norm([w.grad for w in m if w.grad is not None], foreach=True) for m in meshes]
        total = norms[0] if len(norms) == 1 else torch.stack([whole(part) for part in norms]).norm()
        norm: float = whole(total).item()
        if norm > most:
            for weights in meshes:
                torch.nn.utils.clip_grads_with_norm_(weights, most, total, foreach=True)
        return norm

    def apply(self, rate: float) -> None:
        """AdamW's step."""
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()

    def count_finite(self, updates: int, finite: bool) -> bool:
        """Count an update whose gradient is not finite, and is left out. Returns `finite`.

        Raises:
            Diverged: it is the third in a row.
        """
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if not finite:
            log.warning("update %d of the %s left out: its gradient is not finite", updates, self.name)
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise Diverged(
                f"{MAX_SKIPPED_IN_A_ROW} updates in a row, up to update {updates}, had a gradient that is not "
                "finite; the weights are those of the last update that was"
            )
        return finite

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and counts, `exp_avg/NAME`, of the weights that were stepped."""
        states = {name: self.adamw.state.get(weight, {}) for name, weight in self.weights.items()}
        return {
            f"{key}/{name}": torch.as_tensor(value).contiguous()  # bitsandbytes counts by a Python number
            for name, found in states.items()
            for key, value in found.items()
            if not key.startswith("qmap")  # the same for all weights, always
        }

    def load(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Continue from `state`.

        Raises:
            ConfigError: it is of another kind of optimizer.
        """
        in_8_bits = self.train.optimizer != "adamw"
        if any(key.startswith("state1/") != in_8_bits for key in state if key.startswith(("state1/", "exp_avg/"))):
            raise ConfigError(f"train.optimizer={self.train.optimizer}: the checkpoint has another optimizer's moments")
        self.adamw.state.clear()
        for number, group in enumerate(self.adamw.param_groups if in_8_bits else ()):
            for place, weight in enumerate(group["params"]):  # room, which of the paged one is no common tensor
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


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may lie in shards over several ranks, all of which ask for it."""
    return cast(Tensor, tensor.full_tensor()) if hasattr(tensor, "full_tensor") else tensor


def learning_rate(update: int, total_updates: int, peak: float, train: TrainConfig) -> float:
    """The learning rate of one optimizer step.

    Linear warm-up over the first `w = ceil(warmup_ratio * total_updates)` updates, of which the first is not 0:

        lr_u = peak (u + 1) / w                                              u < w
        lr_u = peak                                                          constant
        lr_u = peak (m + (1 - m) (1 - (u - w) / (total - w)))                linear, m = min_lr_ratio
        lr_u = peak (m + (1 - m) (1 + cos(pi (u - w) / (total - w))) / 2)    cosine

    Args:
        update: u, counted from 0; past the end the rate stays at its minimum.
        total_updates: optimizer steps of the whole run.
        peak: after warm-up.
        train: `schedule`, `warmup_ratio`, and `min_lr_ratio` (m).

    Example:
        >>> train = TrainConfig(schedule="cosine", warmup_ratio=1 / 3)
        >>> [round(learning_rate(u, 6, 1.0, train), 3) for u in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
        >>> train = TrainConfig(schedule="linear", warmup_ratio=1 / 3)
        >>> [round(learning_rate(u, 6, 1.0, train), 3) for u in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = math.ceil(train.warmup_ratio * total_updates)
    if update < warmup:
        return peak * (update + 1) / warmup
    if train.schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
    left = 1 - progress if train.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)
