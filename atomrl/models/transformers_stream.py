"""An `attention.Stream` through a transformers model: everything except attention processes it as one long row.

transformers looks up the mask function and the attention function in two registries, by a name in the model's
config. We register both under `NAME`. They are SDPA's, but inside `streaming` the mask is the stream itself, and
attention is `attention.attend`. Without a padding mask, transformers reads positions from the device to detect packed
rows, which is a sync. So the model gets a mask, which nothing reads inside `streaming`.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from atomrl.models.attention import attend
from atomrl.models.shapes import text_config
from atomrl.models.stream import Stream, make_stream

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
