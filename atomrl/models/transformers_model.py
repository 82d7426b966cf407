"""Train any causal language model of transformers: `HFModel`, with packed rows and published weight names."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from atomrl.atoms.logprobs import head_logits
from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError
from atomrl.models.kernel_switches import are_plain
from atomrl.models.rounding import Rounding, stays_float32
from atomrl.models.shapes import text_config
from atomrl.models.stream import Stream, packs_rows
from atomrl.models.transformers_stream import Layout, let_stream, longest_row, small_stream, streaming
from atomrl.models.vision import Vision
from atomrl.types import Image

CHANGED_LOGITS = (
    "changes its logits after the output matrix (a bias or a soft cap), which the chunked log-probs do not support; "
    "use another model"
)
NO_TEXT = "cannot be trained on text"
LATER_TOKENS = "attends to later tokens, so it is not a causal language model; use a causal one"
BOTH_WAYS = ("cpmant", "paligemma", "xlm", "xlnet")
"""Model types with a causal class that reads its prompt in both directions."""
FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
SOFT_CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap", "ngram")
"""Names of what changes logits after the output matrix, in the configs of transformers (the last is ProphetNet's)."""
NO_WRITER = (
    "ForMaskedLM", "Encoder", "Classification", "ForQuestionAnswering"
)  # fmt: skip
"""Suffixes of architecture names that do not generate text."""


class HFModel(nn.Module):
    """A causal language model of transformers with the interface of `GPT`.

    Args:
        inner: the transformers model.
        compute_dtype: dtype of the forward pass, as if the weights were rounded to it; None: the weights' dtype.
    """

    def __init__(self, inner: Any, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config
        self.generation_config = inner.generation_config
        self.compute_dtype = compute_dtype
        self._rounding = None if compute_dtype is None else Rounding(inner, compute_dtype)
        self.pack_rows: bool | None = None
        """The config key `model.pack_rows`."""
        self.sharing: Any = None
        """Process group for sequence parallelism; None: none."""
        self.factor = 1.0
        """Factor of the logits, after the output matrix (Command R, Granite); set by `check`."""
        self.vision: Vision | None = None
        """Computes pictures; None: rows have none."""
        self.streams = False
        """True if it can compute an `attention.Stream`; set by `check`."""

    @property
    def head_weight(self) -> Tensor:
        """Output matrix [V, H]: logits are `hidden @ head_weight.T`."""
        return cast(Tensor, self.inner.get_output_embeddings().weight)

    @property
    def shares_prompts(self) -> bool:
        """True if rows are computed as an `attention.Stream`."""
        return (
            self.streams
            and not are_plain()
            and packs_rows(self.pack_rows, self.head_weight.device.type, self.compute_dtype or self.head_weight.dtype)
        )

    def forward_hidden(self, tokens: Tensor, images: Sequence[Sequence[Image]] = ()) -> Tensor:
        """Compute hidden states [B, T, H], of which the output matrix makes logits, of right-padded tokens [B, T].

        Args:
            images: [B] pictures of each row; empty: no row has any.
        """
        if not images:
            return self._hidden(tokens)
        assert self.vision is not None, "a run with pictures sets it for each of its models"
        return self._hidden(tokens, **self.vision.inputs(tokens, images))

    def stream_states(self, tokens: Tensor, stream: Stream) -> Tensor:
        """Compute the states of a stream after the final norm, at its `before` tokens: [B, T] -> [n, H]."""
        stream = stream.to(tokens.device)
        longest = longest_row(text_config(self.inner.config))
        if longest is not None and tokens.shape[1] > longest:  # streams have no attention windows: compute rows
            last = stream.source[stream.before]
            return self._hidden(tokens).flatten(0, 1).index_select(0, last)
        row = tokens.flatten()[stream.source][None]
        return self._hidden(row, stream, position_ids=stream.positions[None])[0].index_select(0, stream.before)

    def _hidden(self, tokens: Tensor, layout: Layout = "rows", **named: Any) -> Tensor:
        if self.streams:
            named["attention_mask"] = torch.ones_like(tokens)
        with self._rounding.saving_masters() if self._rounding else nullcontext(), streaming(layout):
            hidden: Tensor = body(self.inner)(input_ids=tokens, use_cache=False, **named).last_hidden_state
        hidden = hidden.to(self.compute_dtype or self.head_weight.dtype)  # a few families end in float32
        return hidden if self.factor == 1 else hidden * self.factor

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits [B, T, V], float32, of tokens [B, T]."""
        return head_logits(self.forward_hidden(tokens), self.head_weight)

    @torch.no_grad()
    def check(self, streams: bool = True) -> None:
        """Raise ConfigError if the model is not causal, or changes its logits otherwise than by a factor.

        Args:
            streams: prepare the model for streams if possible, which changes its attention; False: leave it.
        """
        tokens = torch.arange(4, device=self.head_weight.device)[None] % text_config(self.config).vocab_size
        kind = f"model_type {self.config.model_type!r}"
        with reraise_as(ConfigError, f"{kind} {NO_TEXT}", TypeError, ValueError, AttributeError):
            hidden, theirs = self.forward_hidden(tokens), self.inner(input_ids=tokens).logits.float()
        if not torch.allclose(hidden[:, :2].float(), self.forward_hidden(tokens[:, :2]).float(), rtol=1e-2, atol=1e-2):
            raise ConfigError(f"{kind} {LATER_TOKENS}")
        ours = head_logits(hidden, self.head_weight)
        fitting = (factor for factor in logit_factors(self.config) if torch.allclose(theirs, factor * ours, 1e-2, 1e-2))
        self.factor = next(fitting, 0.0)
        if not self.factor:
            raise ConfigError(f"{kind} {CHANGED_LOGITS}")
        self.streams = streams and self._can_stream()

    def _can_stream(self) -> bool:
        if not let_stream(self.inner):
            return False
        rows, wanted, stream = small_stream(text_config(self.config).vocab_size, self.head_weight.device)
        expected = self.forward_hidden(rows).flatten(0, 1)[wanted.flatten().nonzero()[:, 0] - 1]
        # NotImplementedError is `attention`'s; the others are those of families that read their mask (Doge).
        with suppress(NotImplementedError, AttributeError, TypeError, ValueError):
            close = 1e-4 if expected.dtype == torch.float32 else 2e-2
            return torch.allclose(self.stream_states(rows, stream), expected, rtol=close, atol=close)
        return False


def logit_factors(config: Any) -> list[float]:
    """Return the factors that a model may multiply its logits by: 1, and what its config has, which some divide by."""
    found = [value for name in FACTORS if (value := getattr(text_config(config), name, None))]
    return [1.0, *(factor for value in found for factor in (float(value), 1 / value))]


def body(inner: Any) -> Any:
    """Return the part of a transformers model that ends before the output matrix."""
    if inner.base_model is not inner:
        return inner.base_model
    decoder = inner.get_decoder()  # Llama 4
    return inner.model if decoder is inner else body(decoder)


def check_trainable(inner: Any) -> None:
    """Raise ConfigError if a model cannot be trained on text, as far as that can be told without its weights.

    `HFModel.check` computes, and finds the rest.

    Args:
        inner: a transformers model on the meta device.
    """
    kind, text = f"model_type {inner.config.model_type!r}", text_config(inner.config)
    head = inner.get_output_embeddings()
    if head is None:
        raise ConfigError(f"{kind} {NO_TEXT}: {type(inner).__name__} has no output matrix")
    words = reraise_as(ConfigError, f"{kind} {NO_TEXT}", TypeError, ValueError, AttributeError)
    with words, suppress(RuntimeError, LookupError):  # some compute with values, which the meta device does not have
        tokens = torch.ones(1, 4, dtype=torch.long, device="meta")
        body(inner)(input_ids=tokens, use_cache=False).last_hidden_state  # noqa: B018
        inner(input_ids=tokens, use_cache=False).logits  # noqa: B018
    if inner.config.model_type in BOTH_WAYS:
        raise ConfigError(f"{kind} {LATER_TOKENS}")
    if getattr(head, "bias", None) is not None or any(getattr(text, name, None) for name in SOFT_CAPS):
        raise ConfigError(f"{kind} {CHANGED_LOGITS}")


def check_causal(config: Any, path: object) -> None:
    """Raise ConfigError if a config is of no causal language model (T5, BERT, a reward model, an image model)."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    kinds = tuple(config.architectures or ())
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    known |= type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    other = any(kind.endswith(NO_WRITER) for kind in kinds)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:  # some of these families also have a causal class
        other |= not any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)
    named = f"{path} is a {config.model_type} model ({', '.join(kinds) or 'no architectures'})"
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not other and not getattr(config, "is_decoder", True):
        raise ConfigError(f"{named}, which {LATER_TOKENS} (its config.json has is_decoder=false)")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{named}, which reads the prompt with an encoder, and is not a causal "
            "language model: use one whose config.json names a ...ForCausalLM in `architectures`"
        )
    if other or not known:
        raise ConfigError(
            f"{named}, which is not a causal "
            "language model: use one whose config.json names a ...ForCausalLM in `architectures`"
        )


def switch_dropout_off(inner: nn.Module) -> None:
    """Set all dropout of a model to 0, as when sampling; its config is unchanged."""
    for module in inner.modules():
        names = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        for name in [*names, *(["p"] if isinstance(module, nn.Dropout) else [])]:
            setattr(module, name, 0.0)


def rounded_to(inner: Any, dtype: torch.dtype) -> Any:
    """Round the weights of a float32 model in place, as if transformers had loaded it in `dtype`."""
    for name, weight in inner.named_parameters():
        weight.data = weight.data.to(torch.float32 if stays_float32(inner, name) else dtype)
    inner.config.dtype = dtype
    return inner
