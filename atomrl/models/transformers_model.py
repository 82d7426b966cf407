"""Any causal language model of transformers, computed as the engines compute it, by its published weight names."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from atomrl.atoms.logprobs import head_logits
from atomrl.config import ConfigError
from atomrl.models.attention import Stream, attend, make_stream, packs_rows
from atomrl.models.batches import Kept, get, put
from atomrl.models.kernels import are_plain

# --------------------------------------------------------------------------------------------------------------------
# A `shared_prefix.Stream` through a model of transformers: everything but attention takes it as one row.
#
# transformers looks up what makes the mask and what attends in two tables, by a name in the model's config. Under
# `NAME` both are its own of SDPA, but within `streaming` the mask is the stream itself, and attention is
# `attention.attend`. Without a mask of padding, transformers asks the device whether positions begin anew, and with one
# whether it hides anything: a model that streams is given one, so that the host does not wait, and within `streaming`
# nobody reads it.

NAME = "atomrl_stream"
Laid = Stream | Literal["rows"]
_stream: ContextVar[Laid | None] = ContextVar("stream", default=None)


@contextmanager
def streaming(stream: Laid) -> Iterator[None]:
    """Within it, a model that `let_stream` prepared takes its one row of tokens as this stream, or rows as they are,
    padded on the right or not at all."""
    before = _stream.set(stream)
    try:
        yield
    finally:
        _stream.reset(before)


def let_stream(inner: Any) -> bool:
    """Prepare a model for `streaming`, where it has rows in nothing but its attention and positions.

    Returns:
        Whether it has. False: it carries a state along its row, reads no `position_ids`, or does its own attention.
    """
    config, base = inner.config, inner.base_model
    kinds = set(getattr(config, "layer_types", None) or ())
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
    """Tokens of the longest row of which every token sees all before it; None where that is any."""
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((window for window in windows if window), default=None)


def small_stream(vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Stream]:
    """Three rows, two of which share a prompt: tokens [3, 7], which of them are wanted, and the stream."""
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
        laid = _stream.get()
        if isinstance(laid, Stream):
            return laid
        return sdpa_mask(*arguments, **named | ({} if laid is None else {"attention_mask": None}))

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


Rounded = tuple[nn.Parameter, tuple[int, ...], tuple[int, ...], int]
"""A rounded weight, or a part of it: what it was rounded from, and size, strides and offset."""


class HFModel(nn.Module):
    """A model of transformers behind the methods that training uses of `GPT`."""

    def __init__(self, inner: Any, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config
        self.generation_config = inner.generation_config
        self.compute_dtype = compute_dtype
        """None computes in the dtype of the weights; another one as a model does whose weights were rounded to it."""
        self._rounding = None if compute_dtype is None else _Rounding(inner, compute_dtype)
        self.pack_rows: bool | None = None
        """As `config.ModelConfig`'s."""
        self.sharing: Any = None
        """As `GPT`'s."""
        self.streams = False
        """Whether it can compute a `shared_prefix.Stream`: what `check` found."""

    @property
    def head_weight(self) -> Tensor:
        """[V, H]: logits are `hidden @ head_weight.T`."""
        return cast(Tensor, self.inner.get_output_embeddings().weight)

    @property
    def shares_prompts(self) -> bool:
        """Whether rows are computed as a `shared_prefix.Stream`."""
        return (
            self.streams
            and not are_plain()
            and packs_rows(self.pack_rows, self.head_weight.device.type, self.compute_dtype or self.head_weight.dtype)
        )

    def forward_hidden(self, tokens: Tensor) -> Tensor:
        """[B, T] right-padded token ids -> hidden states after the final norm, [B, T, H]."""
        return self._hidden(tokens)

    def stream_states(self, tokens: Tensor, stream: Stream) -> Tensor:
        """States of a stream after the final norm: tokens [B, T] -> [n, H], at each of its `before`."""
        stream = stream.to(tokens.device)
        longest = longest_row(self.inner.config.get_text_config())
        if longest is not None and tokens.shape[1] > longest:  # a window is of rows
            last = stream.source[stream.before]
            return self._hidden(tokens).flatten(0, 1).index_select(0, last)
        row = tokens.flatten()[stream.source][None]
        return self._hidden(row, stream, position_ids=stream.positions[None])[0].index_select(0, stream.before)

    def _hidden(self, tokens: Tensor, laid: Laid = "rows", **named: Tensor) -> Tensor:
        if self.streams:
            named["attention_mask"] = torch.ones_like(tokens)
        with self._rounding.saving_masters() if self._rounding else nullcontext(), streaming(laid):
            hidden: Tensor = self.inner.base_model(input_ids=tokens, use_cache=False, **named).last_hidden_state
        return hidden.to(self.compute_dtype or self.head_weight.dtype)  # a few families end in float32

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V], float32."""
        return head_logits(self.forward_hidden(tokens), self.head_weight)

    @torch.no_grad()
    def check(self, streams: bool = True) -> None:
        """Raise ConfigError where the model is not causal, or does more to its logits than the output matrix does.

        Args:
            streams: prepare it for streams, where it can be, which sets its attention; False leaves it as it is.
        """
        tokens = torch.arange(4, device=self.head_weight.device)[None] % self.config.vocab_size
        kind = f"model_type {self.config.model_type!r}"
        hidden = self.forward_hidden(tokens)
        if not torch.allclose(hidden[:, :2].float(), self.forward_hidden(tokens[:, :2]).float(), rtol=1e-2, atol=1e-2):
            raise ConfigError(f"{kind} sees later tokens, so it is no causal language model; choose one that is")
        ours = head_logits(hidden, self.head_weight)
        theirs = self.inner(input_ids=tokens).logits.float()
        if not torch.allclose(theirs, ours, rtol=1e-2, atol=1e-2):
            raise ConfigError(
                f"{kind} changes its logits after the output matrix (a bias, a scale or a soft cap), which the chunked "
                "log-probs do not know; choose another model"
            )
        self.streams = streams and self._can_stream()

    def _can_stream(self) -> bool:
        if not let_stream(self.inner):
            return False
        rows, wanted, stream = small_stream(self.config.vocab_size, self.head_weight.device)
        expected = self.forward_hidden(rows).flatten(0, 1)[wanted.flatten().nonzero()[:, 0] - 1]
        with suppress(NotImplementedError):
            close = 1e-4 if expected.dtype == torch.float32 else 2e-2
            return torch.allclose(self.stream_states(rows, stream), expected, rtol=close, atol=close)
        return False


NO_WRITER = (
    "ForMaskedLM", "Encoder", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
)  # fmt: skip
"""How the names of architectures end that do not write text."""


def check_causal(config: Any, path: object) -> None:
    """Raise ConfigError where a config is of a model that does not write text from left to right (T5, BERT, a reward
    model, one of images)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kinds = tuple(config.architectures or ())
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    other = getattr(config, "is_encoder_decoder", False) or any(kind.endswith(NO_WRITER) for kind in kinds)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:  # some of these families can be trained to write, by another class
        other |= not any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)
    if other or not known:
        raise ConfigError(
            f"{path} is a {config.model_type} model ({', '.join(kinds) or 'no architectures'}), which is no causal "
            "language model: take one whose config.json names a ...ForCausalLM in `architectures`"
        )


def switch_dropout_off(inner: nn.Module) -> None:
    """The policy that is trained must be the one that sampled, and that had none; the config keeps its values."""
    for module in inner.modules():
        names = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        for name in [*names, *(["p"] if isinstance(module, nn.Dropout) else [])]:
            setattr(module, name, 0.0)


def rounded_to(inner: Any, dtype: torch.dtype) -> Any:
    """A model whose weights are float32, as transformers would have loaded it in `dtype`."""
    for name, weight in inner.named_parameters():
        weight.data = weight.data.to(torch.float32 if _stays_wide(inner, name) else dtype)
    inner.config.dtype = dtype
    return inner


def _stays_wide(inner: Any, name: str) -> bool:
    """Whether a weight is float32 in a model of any dtype."""
    strict: set[str] = getattr(inner, "_keep_in_fp32_modules_strict", None) or set()
    return bool(strict & set(name.split(".")))


class _Rounding:
    """Lets a model with float32 weights compute exactly as one does that was loaded in `dtype`.

    While a layer runs, its weights are replaced by rounded ones. (Autocast would keep residual stream and norms in
    float32: log-probs then differ from those of engine and reference by 0.01 nats on average.) What autograd saves
    of rounded weights is the float32 ones, which the backward pass rounds again: no copy of the model is kept.
    """

    def __init__(self, inner: Any, dtype: torch.dtype) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.dtype = dtype
        self.masters: dict[int, nn.Parameter] = {}
        """By the address of the rounded weight, while that lives."""
        kept = {name for name, _ in inner.named_parameters() if _stays_wide(inner, name)}
        names = {id(module): name for name, module in inner.named_modules()}
        head = inner.get_output_embeddings()  # only `check` runs it: in float32
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
                if type(module) is nn.Embedding:  # the rows that are looked up are rounded, not the whole table
                    module.register_forward_hook(lambda module, inputs, output: output.to(dtype))
                    continue
                found = [name for name, weight in module._parameters.items() if weight is not None]
                slots += [(module, name) for name in found if f"{names[id(module)]}.{name}" not in kept]
            if slots:
                self._round_while_running(unit, slots)

    def _round_while_running(self, unit: nn.Module, slots: list[tuple[nn.Module, str]]) -> None:
        def enter(*_: Any) -> None:
            for module, name in slots:
                master = cast(nn.Parameter, module._parameters[name])
                rounded = master.to(self.dtype)  # before the weight is taken out: memory may run out here
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
        """Within it, autograd saves float32 weights in place of rounded ones."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Kept | Rounded:
        master = self.masters.get(saved.untyped_storage().data_ptr())
        return put(saved) if master is None else (master, saved.size(), saved.stride(), int(saved.storage_offset()))

    def _unpack(self, packed: Kept | Rounded) -> Tensor:
        if isinstance(packed, Tensor) or len(packed) == 2:
            return get(packed)
        master, size, stride, offset = packed
        return master.detach().to(self.dtype).as_strided(size, stride, offset)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Storage and offset of a tensor; also of one without memory."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class _View(Tensor):
    """A tensor whose parts stay views of it: transformers copies parts of fused weights to make them contiguous."""

    def contiguous(self, *_: Any, **__: Any) -> Tensor:
        return self


def published_weights(inner: Any, weights: Iterable[tuple[str, Tensor]] | None = None) -> dict[str, Tensor]:
    """Weights under the names and in the pieces that published checkpoints have, which serving engines read.

    transformers 5 renames and fuses weights when it loads some families (mixtures of experts, GPT-NeoX). This is the
    way back, by its own table. Parts of fused weights are views of them, so that they can be written in place; the
    few families whose published weights are made of several of transformers' own keep transformers' names.

    Args:
        inner: a model of transformers.
        weights: of it, by its own names; None is its state dict. Weights that are tied come once.
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
