"""The models of a training run by their role: policy, reference, critic, teacher, reward model.

All back ends have the same roles, which give the same outputs; a back end decides where their weights lie.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from atomrl.atoms.logprobs import head_logits, row_logprobs
from atomrl.atoms.natural_gradient import fisher_vector_product, flat
from atomrl.backends.optimizer import Optimizer
from atomrl.batches import RowBatch
from atomrl.common.threads import sent
from atomrl.config import ConfigError, ModelConfig
from atomrl.models.attention import states_before, total
from atomrl.models.kernels import plain_formulas
from atomrl.models.loading import load_policy, load_tokenizer, model_config_only, save_model
from atomrl.models.lora import adapters_disabled, has_adapters, save_adapters
from atomrl.models.reward_model import HFScalar, Reader, ScalarModel, load_scalar, save_scalar
from atomrl.models.transformers_model import HFModel
from atomrl.protocols import Distributions, Output

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


# --------------------------------------------------------------------------------------------------------------------
# How the model of a role comes from a folder, and goes into one.

log = logging.getLogger(__name__)
STATE_FOLDER, SHARDS = "training_state", "shards"
"""Beside the model in a checkpoint, so that a server that loads every *.safetensors of the folder does not meet it."""


def check_shards(folder: Path) -> None:
    """Raise ConfigError where a checkpoint is not one of several ranks."""
    if not (folder / STATE_FOLDER / SHARDS).is_dir():
        raise ConfigError(
            f"{folder} holds no {STATE_FOLDER}/{SHARDS}: it is no checkpoint of several ranks; go on without the "
            "section backend, or start a new run from its model"
        )


def load_role(
    name: RoleName, path: str, config: ModelConfig, device: torch.device, dtype: str | torch.dtype | None = None
) -> torch.nn.Module:
    """A role's model; checkpointed and compiled as the config asks where it is trained.

    Args:
        device: where its weights are put.
        dtype: what it computes in; None: the config's.

    Raises:
        ConfigError: it is not there, or cannot be trained here.
    """
    trained = name in TRAINED
    common: dict[str, Any] = {"dtype": dtype or config.dtype, "device": device, "trainable": trained}
    common["trust_remote_code"] = config.trust_remote_code
    if name == "reward_model" and config.lora is not None:
        raise ConfigError("model.lora: reward models are trained whole; leave it out")
    if name in ("critic", "reward_model"):
        model: Any = load_scalar(path, **common)
        if name == "reward_model":
            tokenizer = load_tokenizer(config.tokenizer or path, config.trust_remote_code, path)
            shape = model_config_only(path, config.trust_remote_code)
            model.config.get_text_config().pad_token_id = Reader(tokenizer, shape, path).pad_token_id(shape)
    else:
        quantization = config.quantization if trained else None
        model = load_policy(path, lora=config.lora if trained else None, quantization=quantization, **common)
    model.pack_rows = config.pack_rows
    if config.pack_rows and isinstance(model, HFModel) and not model.streams:
        raise ConfigError(
            f"model.pack_rows=true: {path} ({model.config.model_type}) takes padded rows alone; leave it out"
        )
    if trained and config.checkpoints_layers:
        enable_checkpointing(model)
    if trained and config.compile:
        if isinstance(model, HFModel | HFScalar):
            log.warning("model.compile has no effect on models that are trained through transformers")
        else:
            model.compile_layers()
    return cast(torch.nn.Module, model.train(trained))


def enable_checkpointing(model: Any) -> None:
    """Have a model compute its layers again in the backward pass, in place of keeping what they computed."""
    if isinstance(model, HFModel | HFScalar):
        model.inner.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing = True


def save_role(name: RoleName, model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model (or its adapters) and the tokenizer for transformers; the critic into a folder in it."""
    if isinstance(model, ScalarModel):
        save_scalar(model, tokenizer, folder / role_prefix(name))
    elif has_adapters(model):
        save_adapters(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    else:
        save_model(model, tokenizer, folder)


def role_prefix(name: RoleName, end: str = "") -> str:
    """Of what is the critic's in a checkpoint."""
    return f"critic{end}" if name == "critic" else ""
