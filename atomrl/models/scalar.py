"""Models that give a number where a language model gives a distribution: critics and reward models.

Both are a decoder with an output of size 1, in the layout of transformers' `...ForSequenceClassification` with one
label: what is saved here loads there, and a reward model can start a critic. Every other sequence classifier (DeBERTa,
...) is trained and called through transformers; it scores whole texts and cannot be a critic.
"""

import logging
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomrl.config import ConfigError
from atomrl.devices import sent
from atomrl.models.gpt import GPT, Linear
from atomrl.models.loading import (
    compute_dtype,
    load_decoder,
    load_transformers,
    model_config_only,
    read_weights,
    save_model,
)
from atomrl.models.shared_prefix import states_before
from atomrl.models.spec import unsupported
from atomrl.models.ulysses import total

log = logging.getLogger(__name__)
CLASSIFIER = "ForSequenceClassification"


class GPTScalar(GPT):
    """The decoder of `GPT` with an output matrix of one row, `score`.

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
        """[B, T] float32: at each masked token the number that the token before it has; 0 elsewhere."""
        wanted = mask.clone()
        wanted[:, 0] = False
        states, own = states_before(self, tokens, wanted, prompt_lengths)
        return total(self._spread(states, own.flatten()), self.sharing).view(mask.shape)

    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B] float32: the number at each row's last token that is not the config's pad token (`scored_lengths`)."""
        lengths = scored_lengths(tokens, lengths, self.config.pad_token_id)
        after = F.one_hot(lengths, tokens.shape[1] + 1).bool()
        states, own = states_before(self, F.pad(tokens, (0, 1)), after, torch.zeros_like(lengths))
        return total(self._spread(states, own.any(1)), self.sharing)

    def _spread(self, states: Tensor, where: Tensor) -> Tensor:
        """[N] float32: the number of each state at the places [N] bool that are its; 0 elsewhere."""
        numbers: Tensor = self.score(states)[:, 0].float()
        return numbers.new_zeros(len(where)).index_copy(0, sent(where.nonzero()[:, 0], numbers.device), numbers)


def scored_lengths(tokens: Tensor, lengths: Tensor, pad_token_id: int | None) -> Tensor:
    """[B]: the tokens of each row up to the one whose number is its score. transformers takes the last one that is not
    the pad token, which in many models is the end of sequence, and the first where all are.

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
    """Any sequence classifier of transformers with one label."""

    shares_prompts, pack_rows, sharing, generation_config = False, None, None, None

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def values(self, tokens: Tensor, mask: Tensor, prompt_lengths: Tensor) -> Tensor:
        """Not of these: they see the whole text at once."""
        raise ConfigError(f"critic.path: a {self.config.model_type} model reads whole texts; a critic must be causal")

    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B] float32."""
        config = self.config.get_text_config()
        if (pad := config.pad_token_id) is None:  # the last token has the score: pad with one that is no row's last
            last = set(tokens.gather(1, lengths[:, None] - 1)[:, 0].tolist())
            config.pad_token_id = next(token for token in range(len(last) + 1) if token not in last)
        try:
            return self._scores(tokens, lengths, config.pad_token_id)
        finally:
            config.pad_token_id = pad

    def _scores(self, tokens: Tensor, lengths: Tensor, pad: int) -> Tensor:
        tokens, lengths = (sent(part, self.inner.device) for part in (tokens, lengths))
        attention = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        padded = tokens.masked_fill(~attention, pad)
        return cast(Tensor, self.inner(input_ids=padded, attention_mask=attention.long()).logits[:, 0].float())


ScalarModel = GPTScalar | HFScalar


def is_classifier(config: Any) -> bool:
    """Whether a transformers config is of a model that has a score already."""
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def load_scalar(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    trainable: bool = True,
) -> ScalarModel:
    """A critic or reward model: of a reward model's folder as it is, of a language model's with a score of 0.

    Args:
        dtype: what the forward pass computes in; weights that are trained are float32 in any case.
        trainable: False keeps all weights in `dtype` and without gradient.

    Raises:
        ConfigError: the model is not there, has several labels, or its files do not fit its config.
    """
    config = model_config_only(path, trust_remote_code)
    if is_classifier(config) and config.num_labels != 1:
        raise ConfigError(f"{path} has {config.num_labels} labels; a reward model has one")
    compute = compute_dtype(dtype, device)
    weight_dtype = torch.float32 if trainable else compute
    model: ScalarModel
    if unsupported(config) is None:
        # A fresh critic expects nothing, a fresh reward model prefers nothing.
        stored = read_weights(path, is_classifier(config), trust_remote_code)
        weights = {"score.weight": torch.zeros(1, config.hidden_size)} | dict(stored)
        weights.pop("lm_head.weight", None)
        model = load_decoder(GPTScalar, path, config, weights.items(), weight_dtype)
        model.compute_dtype = compute if compute != weight_dtype else None
    else:
        if not is_classifier(config):
            log.warning("%s has no score yet: it starts with a fresh one", path)
        model = HFScalar(load_transformers(path, weight_dtype, trust_remote_code, scalar=True))
    return model.to(device).requires_grad_(trainable)


def save_scalar(model: ScalarModel, tokenizer: Any, folder: str | Path) -> None:
    """Write a folder that `AutoModelForSequenceClassification` loads: config, safetensors, tokenizer.

    Args:
        tokenizer: None leaves it out.
    """
    save_model(model, tokenizer, folder, **scalar_settings(model, tokenizer))


def scalar_settings(model: ScalarModel, tokenizer: Any) -> dict[str, Any]:
    """What the config of such a folder has otherwise than the model's; arguments as of `save_scalar`."""
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
