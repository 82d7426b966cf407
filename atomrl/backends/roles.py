"""The models of a training run by role: policy, reference, critic, teacher, reward model.

All back ends have the same roles with the same outputs. A back end decides where the weights are stored.
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
"""Role and output of the forward pass that each input of an algorithm comes from."""
TRAINED: Mapping[RoleName, str] = {"policy": "actor", "reward_model": "actor", "critic": "critic"}
"""Roles that are trained, and the prefix of their optimizer's metrics."""


def sources(names: Iterable[str], roles: Collection[RoleName]) -> dict[RoleName, dict[str, Output]]:
    """Group inputs by the role that computes them, in a fixed order: {role: {name: output}}.

    Raises:
        ValueError: a name needs a role that is not in `roles`.

    Example:
        >>> sources({"old_logprobs", "values"}, ["policy", "critic"])
        {'policy': {'old_logprobs': 'logprobs'}, 'critic': {'values': 'values'}}
    """
    outputs: dict[RoleName, dict[str, Output]] = {}
    for name, (role, output) in SOURCES.items():
        if name in names:
            if role not in roles:
                raise ValueError(f"{name} are needed, but the back end was made without a {role}: {', '.join(roles)}")
            outputs.setdefault(role, {})[name] = output
    return outputs


@dataclass(frozen=True)
class Role:
    """A model with its optimizer, if it is trained."""

    model: Any
    optimizer: Optimizer | None = None
    """None: frozen."""
    without_adapters: bool = False
    """True for the reference of a run with adapters: it is the policy's model with adapters disabled."""

    def outputs(self, micro: RowBatch, wanted: Collection[Output], temperature: float) -> dict[Output, Any]:
        """Run the forward pass of a micro-batch; return outputs on the model's device, with gradient if it is trained.

        Args:
            micro: rows on the CPU. Shapes depend on their values, and reading these from a GPU would force a sync.
            wanted: outputs to compute: `logprobs`, `entropy`, `values` [B, T]; `scores` [B]; `distributions`.
        """
        outputs: dict[Output, Any] = {}
        tokens, mask, model = micro.tokens, micro.loss_mask, self.model
        grad = nullcontext() if self.optimizer else torch.no_grad()
        adapters = adapters_disabled(model) if self.without_adapters else nullcontext()
        with grad, adapters:
            if "scores" in wanted:
                outputs["scores"] = model.scores(tokens, micro.lengths)
            if "values" in wanted:
                outputs["values"] = model.values(tokens, mask, micro.prompt_lengths)
            if not outputs.keys() >= set(wanted):
                states, own = states_before(model, tokens, mask, micro.prompt_lengths)
            if "logprobs" in wanted or "entropy" in wanted:
                candidates = micro.candidates
                lists = (None, None) if candidates is None else (candidates.ids, candidates.counts)
                logprobs, entropy = row_logprobs(
                    states, model.head_weight, tokens, own, temperature, None, "entropy" in wanted, *lists
                )
                outputs["logprobs"] = total(logprobs, model.sharing)
                if entropy is not None:
                    outputs["entropy"] = total(entropy, model.sharing)
            if "distributions" in wanted:
                gather = partial(_gather_tokens, own=own, mask=mask, sharing=model.sharing)
                places = sent(mask.flatten().nonzero()[:, 0], states.device)
                outputs["distributions"] = Distributions(states, model.head_weight, places, temperature, gather)
        return outputs


def _gather_tokens(values: Tensor, own: Tensor, mask: Tensor, sharing: Any) -> Tensor:
    """Gather values [n, ...] of this rank's tokens into [N, ...] for all tokens of the mask."""
    if sharing is None:
        return values
    at = sent(own[:, 1:][mask[:, 1:]].nonzero()[:, 0], values.device)
    gathered = values.new_zeros(int(mask[:, 1:].sum()), *values.shape[1:])
    return total(gathered.index_copy(0, at, values), sharing)


def check_forward_mode(policy: Role, device: torch.device) -> None:
    """Raise ConfigError if the policy has no forward-mode derivative, which a trust region needs."""
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
# Load the model of a role from a folder, and save it.

log = logging.getLogger(__name__)
STATE_FOLDER, SHARDS = "training_state", "shards"
"""A subfolder, so that a server that loads every *.safetensors of the checkpoint does not load optimizer state."""


def check_shards(folder: Path) -> None:
    """Raise ConfigError if a checkpoint was not written by several ranks."""
    if not (folder / STATE_FOLDER / SHARDS).is_dir():
        raise ConfigError(
            f"{folder} holds no {STATE_FOLDER}/{SHARDS}: it is no checkpoint of several ranks; go on without the "
            "section backend, or start a new run from its model"
        )


def load_role(
    name: RoleName, path: str, config: ModelConfig, device: torch.device, dtype: str | torch.dtype | None = None
) -> torch.nn.Module:
    """Load the model of a role; with gradient checkpointing and compilation as configured if it is trained.

    Args:
        device: device of its weights.
        dtype: dtype of the forward pass; None: the config's.

    Raises:
        ConfigError: the model does not exist, or cannot be trained with this config.
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
    """Turn on gradient checkpointing: layers are recomputed in the backward pass."""
    if isinstance(model, HFModel | HFScalar):
        model.inner.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing = True


def save_role(name: RoleName, model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model (or its adapters) and the tokenizer in Hugging Face layout; the critic into a subfolder."""
    if isinstance(model, ScalarModel):
        save_scalar(model, tokenizer, folder / role_prefix(name))
    elif has_adapters(model):
        save_adapters(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    else:
        save_model(model, tokenizer, folder)


def role_prefix(name: RoleName, end: str = "") -> str:
    """Return the prefix of a role's files in a checkpoint: `critic` + end for the critic, else empty."""
    return f"critic{end}" if name == "critic" else ""
