"""The models of a training run by their role: policy, reference, critic, teacher, reward model.

All back ends have the same roles, which give the same outputs; a back end decides where their weights lie.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from atomrl.atoms.logits import head_logits
from atomrl.atoms.logprobs import row_logprobs
from atomrl.atoms.natural_gradient import fisher_vector_product, flat
from atomrl.batches import RowBatch
from atomrl.config import ConfigError
from atomrl.devices import sent
from atomrl.models.kernels import plain_formulas
from atomrl.models.lora import adapters_disabled
from atomrl.models.shared_prefix import states_before
from atomrl.models.ulysses import total
from atomrl.protocols import Distributions, Output
from atomrl.training.optimizer import Optimizer

RoleName = Literal["policy", "reference", "critic", "teacher", "reward_model"]
SOURCES: Mapping[str, tuple[RoleName, Output]] = {
    "logprobs": ("policy", "logprobs"),
    "entropy": ("policy", "entropy"),
    "distributions": ("policy", "distributions"),
    "old_logprobs": ("policy", "logprobs"),
    "old_entropy": ("policy", "entropy"),
    "ref_logprobs": ("reference", "logprobs"),
    "teacher_logprobs": ("teacher", "logprobs"),
    "teacher_distributions": ("teacher", "distributions"),
    "values": ("critic", "values"),
    "scores": ("reward_model", "scores"),
}
"""Which output of which role a name stands for."""
TRAINED: Mapping[RoleName, str] = {"policy": "actor", "reward_model": "actor", "critic": "critic"}
"""The roles that are trained, and what the metrics of their optimizers begin with."""


def sources(names: Iterable[str], roles: Collection[RoleName]) -> dict[RoleName, dict[str, Output]]:
    """What is asked of each role, in a fixed order.

    Raises:
        ValueError: of a role that is not there.

    Example:
        >>> sources({"old_logprobs", "values"}, ["policy", "critic"])
        {'policy': {'old_logprobs': 'logprobs'}, 'critic': {'values': 'values'}}
    """
    found: dict[RoleName, dict[str, Output]] = {}
    for name, (role, output) in SOURCES.items():
        if name in names:
            if role not in roles:
                raise ValueError(f"{name} are needed, but the back end was made without a {role}: {', '.join(roles)}")
            found.setdefault(role, {})[name] = output
    return found


@dataclass(frozen=True)
class Role:
    """A model at work."""

    model: Any
    optimizer: Optimizer | None = None
    """None: frozen."""
    without_adapters: bool = False
    """The model is the policy's, and its adapters are left out: the reference of a run with adapters."""

    def outputs(self, micro: RowBatch, wanted: Collection[Output], temperature: float) -> dict[Output, Any]:
        """Outputs of the forward pass of a micro-batch on the model's device, with gradient where it is trained.

        The micro-batch is on the host: shapes are made of its numbers, and the host then waits for no device.
        """
        found: dict[Output, Any] = {}
        tokens, mask, model = micro.tokens, micro.loss_mask, self.model
        grad = nullcontext() if self.optimizer else torch.no_grad()
        adapters = adapters_disabled(model) if self.without_adapters else nullcontext()
        with grad, adapters:
            if "scores" in wanted:
                found["scores"] = model.scores(tokens, micro.lengths)
            if "values" in wanted:
                found["values"] = model.values(tokens, mask, micro.prompt_lengths)
            if not found.keys() >= set(wanted):
                states, own = states_before(model, tokens, mask, micro.prompt_lengths)
            if "logprobs" in wanted or "entropy" in wanted:
                kept = micro.candidates
                lists = (None, None) if kept is None else (kept.ids, kept.counts)
                logprobs, entropy = row_logprobs(
                    states, model.head_weight, tokens, own, temperature, None, "entropy" in wanted, *lists
                )
                found["logprobs"] = total(logprobs, model.sharing)
                if entropy is not None:
                    found["entropy"] = total(entropy, model.sharing)
            if "distributions" in wanted:
                of_all = partial(_of_all, own=own, mask=mask, sharing=model.sharing)
                places = sent(mask.flatten().nonzero()[:, 0], states.device)
                found["distributions"] = Distributions(states, model.head_weight, places, temperature, of_all)
        return found


def _of_all(found: Tensor, own: Tensor, mask: Tensor, sharing: Any) -> Tensor:
    """[N, ...] for each token of the mask, from [n, ...] of this rank's tokens."""
    if sharing is None:
        return found
    at = sent(own[:, 1:][mask[:, 1:]].nonzero()[:, 0], found.device)
    every = found.new_zeros(int(mask[:, 1:].sum()), *found.shape[1:])
    return total(every.index_copy(0, at, found), sharing)


def check_forward_mode(policy: Role, device: torch.device) -> None:
    """Raise ConfigError where the policy has no forward-mode derivative, which a trust region takes."""
    assert policy.optimizer is not None
    model, weights = policy.model, list(policy.optimizer.weights.values())
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)

    def distributions(forward: bool) -> Tensor:
        with plain_formulas():
            return head_logits(model.forward_hidden(tokens)[0], model.head_weight).log_softmax(-1)

    try:
        fisher_vector_product(distributions, torch.ones(2, device=device), weights, flat(weights))
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            "algorithm.update: a trust region differentiates the policy forward, which this model cannot "
            f"({reason}); take another model, or update: optimizer"
        ) from None
