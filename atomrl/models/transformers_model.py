"""Train any causal language model of transformers: `HFModel`, with packed rows and published weight names."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from atomrl.atoms.logprobs import head_logits
from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError
from atomrl.models.attention import Stream, attend, make_stream, packs_rows
from atomrl.models.kernels import are_plain
from atomrl.models.offloading import Kept, get, put
from atomrl.models.shapes import text_config
from atomrl.models.vision import Vision
from atomrl.types import Image

# --------------------------------------------------------------------------------------------------------------------
# An `attention.Stream` through a transformers model: everything except attention processes it as one long row.
#
# transformers looks up the mask function and the attention function in two registries, by a name in the model's
# config. We register both under `NAME`. They are SDPA's, but inside `streaming` the mask is the stream itself, and
# attention is `attention.attend`. Without a padding mask, transformers reads positions from the device to detect packed
# rows, which is a sync. So the model gets a mask, which nothing reads inside `streaming`.

NAME = "atomrl_stream"
Layout = Stream | Literal["rows"]
_stream: ContextVar[Layout | None] = ContextVar("stream", default=None)


@contextmanager
def streaming(stream: Layout) -> Iterator[None]:
    """Make a model prepared by `let_stream` treat its input as this stream, or as right-padded rows, in the block."""
    before = _stream.set(stream)
    try:
        yield
    finally:
        _stream.reset(before)


def let_stream(inner: Any) -> bool:
    """Prepare a model for `streaming`, if tokens of a row interact only through attention and positions.

    Returns:
        True if prepared. False: it has a recurrent state, takes no `position_ids`, or has its own attention.
    """
    config, base = inner.config, inner.base_model
    kinds = set(getattr(text_config(config), "layer_types", None) or ())
    if (
        config._attn_implementation != "sdpa"
        or not inner._can_set_attn_implementation()
        or inner._is_stateful
        or kinds - {"full_attention", "sliding_attention"}
        or "position_ids" not in inspect.signature(base.forward).parameters
    ):
        return False
    _register()
    inner.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)


def longest_row(config: Any) -> int | None:
    """Return the smallest attention window or chunk, up to which attention is full; None: no window."""
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((window for window in windows if window), default=None)


def small_stream(vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Stream]:
    """Create a test input of three rows, two with a shared prompt: tokens and wanted [3, 7], and the stream."""
    tokens = (torch.arange(21) * 5 + 3).view(3, 7) % vocabulary
    tokens[1, :4] = tokens[0, :4]
    lengths = torch.tensor([7, 6, 5])
    wanted = (torch.arange(7) >= 4) & (torch.arange(7) < lengths[:, None])
    stream = make_stream(tokens, wanted, torch.tensor([4, 4, 4]))
    return tokens.to(device), wanted.to(device), stream


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mask(*arguments: Any, **named: Any) -> Any:
        layout = _stream.get()
        if isinstance(layout, Stream):
            return layout
        return sdpa_mask(*arguments, **named | ({} if layout is None else {"attention_mask": None}))

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **named: Any) -> Any:
        if not isinstance(attention_mask, Stream):
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, attention_mask, **named)
        if named.get("position_bias") is not None:
            raise NotImplementedError("attention adds a bias for each pair of positions")
        q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))
        blocks, spans, share = attention_mask.blocks, attention_mask.spans, attention_mask.share
        if share is not None:
            q, k, v = share.heads(q, k, v)
        mixed = attend(q, k, v, blocks, spans, named.get("scaling"))
        if share is not None:
            mixed = share.tokens(mixed.flatten(1)).unflatten(1, (-1, v.shape[2]))
        return mixed[None], None

    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


# --------------------------------------------------------------------------------------------------------------------
# The model.


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
        self._rounding = None if compute_dtype is None else _Rounding(inner, compute_dtype)
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


NO_WRITER = (
    "ForMaskedLM", "Encoder", "Classification", "ForQuestionAnswering"
)  # fmt: skip
"""Suffixes of architecture names that do not generate text."""


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
        weight.data = weight.data.to(torch.float32 if _stays_float32(inner, name) else dtype)
    inner.config.dtype = dtype
    return inner


# --------------------------------------------------------------------------------------------------------------------
# Float32 masters with computation in another dtype.

Rounded = tuple[nn.Parameter, tuple[int, ...], tuple[int, ...], int]
"""A saved view of a rounded weight: its float32 master, and size, strides and offset of the view."""


def _stays_float32(inner: Any, name: str) -> bool:
    """Return True if transformers keeps a weight in float32 in any dtype."""
    strict: set[str] = getattr(inner, "_keep_in_fp32_modules_strict", None) or set()
    return bool(strict & set(name.split(".")))


class _Rounding:
    """Makes a model with float32 weights compute exactly like one loaded in `dtype`.

    While a layer runs, its weights are replaced by rounded ones. With autocast, residual stream and norms would be
    float32, and log-probs would differ from those of engine and reference by 0.01 nats on average. Autograd saves the
    float32 weights instead of rounded ones, and the backward pass rounds them again. So no rounded copy of the model is
    in memory.
    """

    def __init__(self, inner: Any, dtype: torch.dtype) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.dtype = dtype
        self.masters: dict[int, nn.Parameter] = {}
        """Float32 weights by the address of the rounded weight, while that exists."""
        unrounded = {name for name, _ in inner.named_parameters() if _stays_float32(inner, name)}
        names = {id(module): name for name, module in inner.named_modules()}
        head = inner.get_output_embeddings()  # only `check` runs it, in float32
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.weight.dtype),))
        layers = [module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)]
        rest = [[module] for module in inner.modules()]
        done = {id(head)}
        for unit, *modules in [[layer, *layer.modules()] for layer in layers or [inner.base_model]] + rest:
            slots = []
            for module in modules or [unit]:
                if id(module) in done:
                    continue
                done.add(id(module))
                if type(module) is nn.Embedding:  # round the rows that are looked up, not the full table
                    module.register_forward_hook(lambda module, inputs, output: output.to(dtype))
                    continue
                if isinstance(module, _ConvNd):  # a tower casts to its dtype, which is float32 outside
                    module.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(dtype),))
                own = [name for name, weight in module._parameters.items() if weight is not None]
                slots += [(module, name) for name in own if f"{names[id(module)]}.{name}" not in unrounded]
            if slots:
                self._round_while_running(unit, slots)

    def _round_while_running(self, unit: nn.Module, slots: list[tuple[nn.Module, str]]) -> None:
        def enter(*_: Any) -> None:
            for module, name in slots:
                master = cast(nn.Parameter, module._parameters[name])
                rounded = master.to(self.dtype)  # before the weight is removed, because memory may run out here
                del module._parameters[name]
                module.__dict__[name] = rounded
                self.masters[rounded.data_ptr()] = master

        def leave(*_: Any) -> None:
            for module, name in slots:
                if name in module.__dict__:
                    module._parameters[name] = self.masters.pop(module.__dict__.pop(name).data_ptr())

        unit.register_forward_pre_hook(enter)
        unit.register_forward_hook(leave, always_call=True)

    def saving_masters(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Make autograd save float32 weights instead of rounded ones inside the block."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Kept | Rounded:
        master = self.masters.get(saved.untyped_storage().data_ptr())
        return put(saved) if master is None else (master, saved.size(), saved.stride(), int(saved.storage_offset()))

    def _unpack(self, packed: Kept | Rounded) -> Tensor:
        if isinstance(packed, Tensor) or len(packed) == 2:
            return get(packed)
        master, size, stride, offset = packed
        return master.detach().to(self.dtype).as_strided(size, stride, offset)


# --------------------------------------------------------------------------------------------------------------------
# Published weight names.


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return storage and offset of a tensor; works on the meta device too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class _View(Tensor):
    """A tensor whose `contiguous` does not copy, so that the parts into which transformers splits it stay views."""

    def contiguous(self, *_: Any, **__: Any) -> Tensor:
        return self


def published_weights(inner: Any, weights: Iterable[tuple[str, Tensor]] | None = None) -> dict[str, Tensor]:
    """Return weights by the names of published checkpoints, which serving engines use.

    transformers 5 renames and fuses weights of some families when it loads them (mixtures of experts, GPT-NeoX). This
    reverts it by transformers' own table. Parts of fused weights are views, so that they can be written in place. A few
    families whose published weights combine several of transformers' weights keep transformers' names.

    Args:
        inner: a transformers model.
        weights: its weights by transformers' names; None: its state dict. Tied weights are returned once.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = dict(inner.state_dict().items() if weights is None else weights)
    first: dict[tuple[int, int], str] = {}
    for name, tensor in state.items():
        first.setdefault(_place(tensor), name)
    state = {name: tensor.detach() for name, tensor in state.items() if first[_place(tensor)] == name}
    reverted = revert_weight_conversion(inner, {name: tensor.as_subclass(_View) for name, tensor in state.items()})
    storages = {_place(tensor)[0] for tensor in state.values()}
    if any(_place(tensor)[0] not in storages for tensor in reverted.values()):
        return state
    return {name: tensor.as_subclass(Tensor) for name, tensor in reverted.items()}


def published_names(inner: Any) -> dict[str, str]:
    """Return the published name of each weight that is not a part or a sum of others, by transformers' name.

    Layers beneath adapters have the names that they have without them.
    """
    state = {name.replace(".base_layer.", "."): weight for name, weight in inner.state_dict().items()}
    state = {name: weight for name, weight in state.items() if ".lora_" not in name}
    by_place = {_place(weight): name for name, weight in published_weights(inner, state.items()).items()}
    return {name: by_place.get(_place(weight), name) for name, weight in state.items()}
