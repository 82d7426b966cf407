"""The Triton kernels equal `PlainOps`; in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from atomrl.engines.generation import generate, requests_of
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.native.step_ops import PlainOps
from atomrl.engines.requests import EngineOptions
from atomrl.models.decoder_spec import DecoderSpec, read_spec
from atomrl.models.loading import model_config_only
from atomrl.types import SamplingParams
from tests.prompts import logprobs_of, prompts_of, response
from tests.tiny import make_tiny_model

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and Version(np.__version__) >= Version("2.4"):
    pytest.skip("the interpreter of Triton 3.6 needs numpy < 2.4", allow_module_level=True)

from atomrl.engines.native import triton_ops  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # the interpreter's

SHAPES = {
    "qwen2-1.5b": {"heads": 12, "kv_heads": 2, "head_dim": 128},
    "one head each, odd size": {"heads": 3, "kv_heads": 3, "head_dim": 24},
    "one key head": {"heads": 5, "kv_heads": 1, "head_dim": 16},
    "qwen3": {"heads": 4, "kv_heads": 2, "head_dim": 32, "qk_norm": True},
}


def spec_of(vocab=5000, heads=4, kv_heads=2, head_dim=8, qk_norm=False):
    return DecoderSpec(
        layers=1, hidden=100, heads=heads, kv_heads=kv_heads, head_dim=head_dim, intermediate=72, vocab=vocab,
        norm_eps=1e-5, tied_head=True, qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=qk_norm,
        max_positions=256,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Each costs milliseconds in the interpreter."""
    monkeypatch.setattr(triton_ops, "MAX_SPLITS", 2)


@pytest.mark.slow
# The interpreter multiplies bfloat16 by its bits, so float16 stands for it there.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_are_the_reference(shape, dtype):
    """Over ragged prompts and completions, tiles that a group overflows, rows that have ended, are fed or padded."""
    spec = spec_of(**SHAPES[shape])
    ops = triton_ops.TritonOps(spec)
    ops.tile = 2
    triton_ops.check_ops(ops, spec, dtype, DEVICE)


@pytest.mark.parametrize("name", ["rms_norm", "silu_mul", "attend", "draw"])
def test_a_wrong_kernel_is_refused(name, monkeypatch):
    """So that an engine decodes in PyTorch where a GPU computes something else."""
    spec = spec_of(vocab=300)
    ops = triton_ops.TritonOps(spec)
    right = getattr(ops, name)

    def wrong(*args):
        right(*args)
        args[-1].mul_(1.1) if name != "draw" else args[1].tokens.add_(1)

    monkeypatch.setattr(ops, name, wrong)
    with pytest.raises(RuntimeError, match=f"{name} differs"):
        triton_ops.check_ops(ops, spec, torch.float32, DEVICE)


def test_logits_that_are_not_finite_give_no_number():
    rows = triton_ops.example_rows(1, DEVICE, torch.Generator().manual_seed(0))
    logits = torch.zeros(8, 300, device=DEVICE)
    logits[0, 7], logits[1, 8], logits[2] = torch.nan, torch.inf, -torch.inf
    one, zero = torch.ones(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    logprobs = torch.zeros(6, 80, device=DEVICE)
    drawing = triton_ops.Drawing(
        False, False, one, zero, torch.zeros(300, dtype=torch.int8, device=DEVICE), logprobs.int(), logprobs
    )
    before = rows.lengths.clone()
    triton_ops.TritonOps(spec_of(vocab=300)).draw(logits, rows, drawing)
    assert logprobs[rows.slots[:3], before[:3]].isnan().all()
    assert logprobs[rows.slots[5], before[5]] == pytest.approx(-np.log(300), abs=1e-5)


SAMPLINGS = [
    {},
    {"temperature": 0},
    {"min_completion_tokens": 3, "temperature": 0.7},
    {"top_k": 5, "logprobs_over": "kept"},
]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_engine_draws_what_it_draws_in_pytorch(tmp_path, sampling):
    folder = make_tiny_model(tmp_path, "qwen3", seed=1, scale=0.2, head_dim=16, num_hidden_layers=1)
    ops = triton_ops.TritonOps(read_spec(model_config_only(str(folder), False)))
    drawn = []
    for each in (ops, PlainOps()):
        options = EngineOptions(torch.float32, DEVICE.type, max_concurrent_completions=3)
        engine = NativeEngine.from_pretrained(str(folder), AutoTokenizer.from_pretrained(folder), options, ops=each)
        params = SamplingParams(completions_per_prompt=2, max_completion_tokens=6, **sampling)
        drawn.append(generate(engine, prompts_of(range(5, 40), (7, 8)), params))
    for mine, theirs in zip(*drawn, strict=True):
        assert response(mine) == response(theirs)
        assert logprobs_of(mine) == pytest.approx(logprobs_of(theirs), abs=1e-5)


class Tape(TorchDispatchMode):
    """A CUDA graph on the CPU: what a step launched, launched again with the tensors and the numbers of then."""

    def __init__(self):
        super().__init__()
        self.entries, self.replayed = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # An operator that makes room or a view gives the same tensor in a graph.
        if func.overloadpacket.__name__ in ("embedding", "mm", "addmm", "addmm_", "copy_"):
            self.entries.append((func, args, kwargs or {}, result))
        return result

    def __call__(self, run):
        self.entries = entries = []
        with pytest.MonkeyPatch.context() as patch, self:
            for name, kernel in vars(triton_ops).items():
                if name.endswith("_kernel"):
                    launch = partial(type(kernel).run, kernel)
                    keep = lambda *args, launch=launch, **named: entries.append((launch, args, named, None))  # noqa: E731
                    patch.setattr(kernel, "run", keep, raising=False)
            run()

        def replay():
            self.replayed += 1
            for launch, args, named, out in entries:
                result = launch(*args, **named)
                if out is not None and result is not out:
                    out.copy_(result)

        return replay


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{}, {"top_k": 9}])
def test_steps_that_are_replayed_draw_the_same(tmp_path, cut):
    """Rows end, enter, get pages and are padded: all of it in the buffers that a graph has seen."""
    folder = make_tiny_model(tmp_path, "qwen2", seed=1, scale=0.2, num_hidden_layers=1)
    tape, drawn = Tape(), []
    for ops in (triton_ops.TritonOps(read_spec(model_config_only(str(folder), False))), PlainOps()):
        options = EngineOptions(torch.float32, DEVICE.type, max_concurrent_completions=3)
        engine = NativeEngine.from_pretrained(str(folder), AutoTokenizer.from_pretrained(folder), options, ops=ops)
        engine.batch.graphs.capture = tape if ops.draws else None
        prompts, requests = prompts_of(range(5, 35), (7, 8)), []
        for prompt, most in zip(prompts, (3, 10), strict=True):
            sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=most, ignore_eos=True, **cut)
            requests += requests_of(prompt, sampling)
        engine.submit(requests)
        outputs = {}
        while engine.held:
            outputs |= {output.request_id: output for output in engine.poll()}
        drawn.append(outputs)
    mine, theirs = drawn
    assert tape.replayed > 5
    for name, output in mine.items():
        assert [part.token_ids for part in output.segments] == [part.token_ids for part in theirs[name].segments]
        assert output.segments[0].logprobs == pytest.approx(theirs[name].segments[0].logprobs, abs=1e-5)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("shape", [(320, 96), (64, 48), (192, 200)])
def test_kernels_for_nf4_are_bitsandbytes_and_pytorch(shape, rows):
    """Rows of a wider matrix, with the columns of adapters behind them; rows and outputs that fill no block."""
    pytest.importorskip("bitsandbytes")
    from atomrl.models import nf4_kernels
    from atomrl.models.quantized import QuantizedLinear

    inputs, outputs = shape
    layer = QuantizedLinear(torch.nn.Linear(inputs, outputs, bias=False).to(DEVICE, torch.float16), "nf4")
    wide = torch.randn(outputs, inputs + 32).to(DEVICE, torch.float16)
    nf4_kernels.dequantize(layer, wide[:, :inputs])
    assert torch.equal(wide[:, :inputs], layer.weight)
    x, out = (torch.randn(rows, width).to(DEVICE, torch.float16) for width in (inputs + 32, outputs + 5))
    behind = out[:, outputs:].clone()
    for start in (None, torch.randn(rows, outputs), torch.randn(1, outputs)):
        start = start if start is None else start.to(DEVICE, torch.float16)
        nf4_kernels.multiply(x, layer, wide[:, inputs:], start, out[:, :outputs])
        right = x.float() @ wide.float().t() + (0 if start is None else start.float())
        assert float((out[:, :outputs] - right).norm() / right.norm()) < 5e-4
    assert torch.equal(out[:, outputs:], behind)
