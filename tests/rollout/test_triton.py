"""The Triton kernels of a decode step are `PlainOps`, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoTokenizer

from atomrl.models.loading import model_config_only
from atomrl.models.spec import DecoderSpec, read_spec
from atomrl.rollout.decode_step import PlainOps
from atomrl.rollout.generate import generate
from atomrl.rollout.native import NativeEngine
from atomrl.rollout.requests import EngineOptions
from atomrl.types import SamplingParams
from tests.engines import logprobs_of, prompts_of, response
from tests.tiny import make_tiny_model

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and Version(np.__version__) >= Version("2.4"):
    pytest.skip("the interpreter of Triton 3.6 needs numpy < 2.4", allow_module_level=True)

from atomrl.rollout import triton_ops  # noqa: E402

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
    monkeypatch.setattr(triton_ops, "_SPLITS", 2)


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
    rows = triton_ops._example_rows(1, DEVICE, torch.Generator().manual_seed(0))
    logits = torch.zeros(8, 300, device=DEVICE)
    logits[0, 7], logits[1, 8], logits[2] = torch.nan, torch.inf, -torch.inf
    one, zero = torch.ones(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    logprobs = torch.zeros(6, 80, device=DEVICE)
    drawing = triton_ops.Drawing(
        False, False, one, zero, torch.zeros(300, dtype=torch.int8, device=DEVICE), logprobs.int(), logprobs
    )
    before = rows.lengths.clone()
    triton_ops.TritonOps(spec_of(vocab=300)).draw(logits, rows, drawing)
    found = logprobs[rows.slots[:4], before[:4]]
    assert found[:3].isnan().all() and found[3] != 0 or found[3] == 0 and rows.given[3] > before[3]


SAMPLINGS = [
    {},
    {"temperature": 0},
    {"min_completion_tokens": 3, "temperature": 0.7},
    {"top_k": 5, "logprobs_over": "kept"},
]


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
