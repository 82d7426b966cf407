"""A `shared_prefix.Stream` through a model of transformers: everything but attention takes it as one row.

transformers looks up what makes the mask and what attends in two tables, by a name in the model's config. Under `NAME`
both are its own of SDPA, but within `streaming` the mask is the stream itself, and attention is `attention.attend`.
Without a mask of padding, transformers asks the device whether positions begin anew, and with one whether it hides
anything: a model that streams is given one, so that the host does not wait, and within `streaming` nobody reads it.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from atomrl.models.attention import attend
from atomrl.models.shared_prefix import Stream, make_stream

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
