"""Critics and reward models: models with a scalar head.

Both are a decoder with an output of size 1, saved in the layout of transformers' `...ForSequenceClassification` with
one label. So a reward model can initialize a critic. Other sequence classifiers (DeBERTa, ...) run through
transformers; they score full texts and cannot be critics.
"""

import logging
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomrl.common.devices import to_device
from atomrl.config import ConfigError, LoraConfig, Quantization
from atomrl.models.decoder_spec import unsupported
from atomrl.models.gpt import GPT, Linear
from atomrl.models.loading import (
    CLASSIFIER,
    compute_dtype,
    load_decoder,
    load_transformers,
    model_config_only,
    read_weights,
    save_model,
)
from atomrl.models.lora import SCORE, add_adapters
from atomrl.models.quantized import quantize
from atomrl.models.sequence_parallel import total
from atomrl.models.shapes import text_config
from atomrl.models.stream import states_before

log = logging.getLogger(__name__)


class GPTScalar(GPT):
    """A `GPT` with a scalar head, `score`, instead of the output matrix.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> model = GPTScalar(new_gpt(vocab_size=11, layers=1, hidden=32, heads=1).config)
        >>> model.scores(torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([3, 2])).shape
        torch.Size([2])
    """

    def __init__(self, config: Any) -> None:
        config.tie_word_embeddings = True  # so that there is no output matrix of logits
        super().__init__(config)
        self.score = Linear(config.hidden_size, 1, bias=False)

    def values(self, tokens: Tensor, mask: Tensor, prompt_lengths: Tensor) -> Tensor:
        """Compute values [B, T] float32: at each masked token the output of the token before it; 0 elsewhere."""
        wanted = mask.clone()
        wanted[:, 0] = False
        states, own = states_before(self, tokens, wanted, prompt_lengths)
        return total(self._spread(states, own.flatten()), self.sharing).view(mask.shape)

    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Compute scores [B] float32: the output at each row's last token that is not padding (`scored_lengths`)."""
        lengths = scored_lengths(tokens, lengths, self.config.pad_token_id)
        after = F.one_hot(lengths, tokens.shape[1] + 1).bool()
        states, own = states_before(self, F.pad(tokens, (0, 1)), after, torch.zeros_like(lengths))
        return total(self._spread(states, own.any(1)), self.sharing)

    def _spread(self, states: Tensor, where: Tensor) -> Tensor:
        """Apply the scalar head to states [n, H] and scatter to the n True places of `where` [N]; 0 elsewhere."""
        scalars: Tensor = self.score(states)[:, 0].float()
        return scalars.new_zeros(len(where)).index_copy(0, to_device(where.nonzero()[:, 0], scalars.device), scalars)


def scored_lengths(tokens: Tensor, lengths: Tensor, pad_token_id: int | None) -> Tensor:
    """Return the length of each row up to the token with its score, [B].

    As in transformers, that is the last token other than the pad token (in many models the end of sequence), or the
    first if all are.

    Example:
        >>> scored_lengths(torch.tensor([[5, 6, 2], [5, 2, 2]]), torch.tensor([3, 2]), 2)
        tensor([2, 1])
    """
    if pad_token_id is None:
        return lengths
    places = torch.arange(1, tokens.shape[1] + 1)
    ends = places * ((tokens != pad_token_id) & (places <= lengths[:, None]))
    return ends.amax(1).clamp(min=1).minimum(lengths)


class HFScalar(nn.Module):
    """A sequence classifier of transformers with one label."""

    shares_prompts, pack_rows, sharing, generation_config = False, None, None, None

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def values(self, tokens: Tensor, mask: Tensor, prompt_lengths: Tensor) -> Tensor:
        """Raise ConfigError: these models are not causal."""
        raise ConfigError(f"critic.path: a {self.config.model_type} model is bidirectional; a critic must be causal")

    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Compute scores, [B] float32."""
        config = text_config(self.config)
        if (pad := config.pad_token_id) is None:  # pad with a token that is never a row's last, which has the score
            last = set(tokens.gather(1, lengths[:, None] - 1)[:, 0].tolist())
            config.pad_token_id = next(token for token in range(len(last) + 1) if token not in last)
        try:
            return self._scores(tokens, lengths, config.pad_token_id)
        finally:
            config.pad_token_id = pad

    def _scores(self, tokens: Tensor, lengths: Tensor, pad: int) -> Tensor:
        tokens, lengths = (to_device(part, self.inner.device) for part in (tokens, lengths))
        attention = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        padded = tokens.masked_fill(~attention, pad)
        return cast(Tensor, self.inner(input_ids=padded, attention_mask=attention.long()).logits[:, 0].float())


ScalarModel = GPTScalar | HFScalar


def is_classifier(config: Any) -> bool:
    """Return True if a transformers config is of a sequence classifier, which has a score head."""
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def load_scalar(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    lora: LoraConfig | None = None,
    quantization: Quantization | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    trainable: bool = True,
) -> ScalarModel:
    """Load a critic or reward model; from a language model, with a new score head (0 for a built-in decoder).

    Args:
        dtype: dtype of the forward pass and of frozen weights. Trained weights are float32, and so is all of a model
            of transformers that is trained.
        lora: add low-rank adapters; only they, the score head and `modules_to_save` are trained.
        quantization: quantize the base beneath the adapters.
        trainable: False: all weights are in `dtype`, without gradient.

    Raises:
        ConfigError: the model does not exist, has several labels, or its files do not fit its config; or as
            `lora.add_adapters`.
    """
    config = model_config_only(path, trust_remote_code)
    if is_classifier(config) and config.num_labels != 1:
        raise ConfigError(f"{path} has {config.num_labels} labels; a reward model has one")
    compute = compute_dtype(dtype, device)
    weight_dtype = torch.float32 if trainable else compute
    model: ScalarModel
    if unsupported(config) is None:
        # The new head is 0: a new critic predicts 0, and a new reward model has no preference.
        stored = read_weights(path, is_classifier(config), trust_remote_code)
        weights = {"score.weight": torch.zeros(1, config.hidden_size)} | dict(stored)
        weights.pop("lm_head.weight", None)
        frozen = compute if lora is not None else weight_dtype
        model = load_decoder(GPTScalar, path, config, weights.items(), frozen)
        model.compute_dtype = compute if compute != weight_dtype else None
    else:
        if not is_classifier(config):
            log.warning("%s has no score head; initializing a new one", path)
        model = HFScalar(load_transformers(path, weight_dtype, trust_remote_code, scalar=True))
    if lora is None:
        return model.to(device).requires_grad_(trainable)
    inner: nn.Module = getattr(model, "inner", model)
    if quantization is not None and isinstance(score := getattr(inner, SCORE, None), nn.Linear):
        quantize(inner, score.weight, quantization, torch.device(device))
    model.to(device).requires_grad_(False)
    add_adapters(model, lora, str(path), scores=True)
    return model


def save_scalar(model: ScalarModel, tokenizer: Any, folder: str | Path) -> None:
    """Save config, weights and tokenizer for `AutoModelForSequenceClassification`.

    Args:
        tokenizer: None: not saved.
    """
    save_model(model, tokenizer, folder, **scalar_settings(model, tokenizer))


def scalar_settings(model: ScalarModel, tokenizer: Any) -> dict[str, Any]:
    """Return fields of the saved config that differ from the model's; arguments as for `save_scalar`."""
    config = model.config
    settings: dict[str, Any] = {"num_labels": 1}
    if isinstance(model, HFScalar):
        settings["architectures"] = [type(model.inner).__name__]  # the config may still name the language model's
    else:
        family = (config.architectures or ["LlamaForCausalLM"])[0].partition("For")[0]
        settings["architectures"] = [family + CLASSIFIER]
        if config.pad_token_id is None:  # transformers finds the last token by it
            settings["pad_token_id"] = getattr(tokenizer, "pad_token_id", None) or 0
    return settings
