"""A decode step over KV-cache pages, which a CUDA graph can replay.

A step launches ten kernels per layer: norm, q|k|v, rotation with the write into the pages, attention (parts of prompts
and own tokens, then their sum), output, norm, gate|up, SwiGLU, down. Adapters add one product to each of the four
projections. Nothing in it depends on the host: sizes are those of the padded batch, and per-row values are read from
`StepRows`.

Everything except matrix products is a `StepOps` (`step_ops`).
"""

from torch import Tensor
from torch.nn import functional as F

from atomrl.engines.native.decoder import DecoderModel
from atomrl.engines.native.linear import StackedLinear, WideLinear
from atomrl.engines.native.paged_cache import PagedKVCache
from atomrl.engines.native.step_ops import Drawing, StepOps, StepRows


class DecodeStep:
    """Forward pass of one token for every row, with sampling if `drawing` is given.

    Args:
        model: with `WideLinear` layers.
    """

    def __init__(self, model: DecoderModel, cache: PagedKVCache, ops: StepOps) -> None:
        self.model, self.cache, self.ops = model, cache, ops
        self.linears = [
            [_wide(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)] for layer in model.layers
        ]
        self.head = _wide(model.head)

    def __call__(self, rows: StepRows, drawing: Drawing | None) -> Tensor:
        """Logits [N, vocab] float32."""
        model, cache, ops, eps = self.model, self.cache, self.ops, self.model.spec.norm_eps
        x = F.embedding(rows.tokens, model.embedding)
        for index, (layer, (qkv, output, gate_up, down)) in enumerate(zip(model.layers, self.linears, strict=True)):
            keys, values = cache.keys[index], cache.values[index]
            norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
            heads = qkv.multiply(self._normed(x, layer.attention_norm, qkv))
            ops.rotate_and_write(heads, cache.rope, norms, eps, keys, values, rows)
            room = output.room(len(x))
            ops.attend(heads, keys, values, rows, room[:, : output.inputs])
            output.multiply(room, x)
            both = gate_up.multiply(self._normed(x, layer.mlp_norm, gate_up))
            room = down.room(len(x))
            ops.silu_mul(both, room[:, : down.inputs])
            down.multiply(room, x)
        logits = self.head.multiply(self._normed(x, model.norm, self.head))
        if drawing is not None:
            ops.draw(logits, rows, drawing)
        return logits

    def _normed(self, x: Tensor, weight: Tensor, linear: WideLinear) -> Tensor:
        """Normalize `x` into the input buffer of a linear layer."""
        room = linear.room(len(x))
        self.ops.rms_norm(x, weight, self.model.spec.norm_eps, room[:, : linear.inputs])
        return room


def _wide(linear: StackedLinear) -> WideLinear:
    assert isinstance(linear, WideLinear)
    return linear
