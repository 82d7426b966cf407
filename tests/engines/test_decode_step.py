"""The decode step over pages: launches, CUDA graphs and fallbacks."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from atomrl.engines.native.cuda_graphs import CUDACapture, StepGraphs, padded
from atomrl.engines.native.decode_step import DecodeStep
from atomrl.engines.native.engine import choose_ops
from atomrl.engines.native.step_ops import PlainOps, StepRows
from atomrl.engines.sampling import sample_candidates
from atomrl.models.decoder_spec import DecoderSpec
from atomrl.types import SamplingParams

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "decode_step.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("decode_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_of_28_layers_launches_at_most_285_kernels(bench):
    """1,650 on a GPU before. Each operator but the products, an embedding and views is a kernel of ours."""
    operators, kernels = bench.count_step()
    launching = {name: count for name, count in operators.items() if name not in bench.LAUNCH_NOTHING}
    assert launching == {"embedding": 1, "addmm": 28, "addmm_": 56, "mm": 29}
    assert kernels == {"rms_norm_kernel": 57, "rotate_kernel": 28, "attend_kernel": 28, "merge_kernel": 28,
                       "silu_mul_kernel": 28, "vocabulary_kernel": 1, "draw_kernel": 1}  # fmt: skip
    assert sum(launching.values()) + kernels.total() <= 285


def test_adapters_add_one_product_to_each_of_four(bench):
    (without, _), (operators, _) = bench.count_step(), bench.count_step(adapters=8)
    added = {name: count - without[name] for name, count in operators.items() if name not in bench.LAUNCH_NOTHING}
    assert added == {"embedding": 0, "addmm": 0, "addmm_": 0, "mm": 4 * 28}  # 285 + 112 launches


@pytest.mark.parametrize("rows", [1, 16, 512])
def test_the_number_of_launches_does_not_depend_on_the_rows(bench, rows):
    assert bench.count_step(rows=rows) == bench.count_step(rows=256)


def test_operations_that_wait_for_the_host_are_refused(bench):
    """So that the tests above can fail."""
    logits, sampling = torch.zeros(2, 9), SamplingParams(top_k=3, logprobs_over="kept")
    at = torch.zeros(2, dtype=torch.int64)
    for waits in (lambda: logits.sum().item(), lambda: logits[logits > 0], lambda: torch.tensor([1.0]).to("meta"),
                  lambda: logits.to(torch.bfloat16), lambda: sample_candidates(logits, sampling, at, at)):  # fmt: skip
        with bench.Operators(bench.STEP), pytest.raises(RuntimeError, match="no place"):
            waits()


def test_the_step_is_one_graph(bench, tmp_path):
    """torch.compile finds nothing in it that Python has to decide on values."""
    engine = bench.tiny_engine(tmp_path, PlainOps())
    batch = engine.batch
    with torch.inference_mode():
        batch.cache.reserve(4, 1, 64)
        batch.cache.reserve_prompts(2, 64)
        batch.cache.allocate_prompts({0: 40, 1: 5})
        batch.cache.allocate(dict.fromkeys(range(4), 33))
        rows = bench.example_rows(batch.cache)
        step = DecodeStep(engine.model, batch.cache, PlainOps())
        expected = step(rows, None)
        compiled = torch.compile(
            lambda state: step(StepRows(state, *parts(rows)), None), fullgraph=True, backend="eager"
        )
        assert torch.allclose(compiled(rows.state), expected, atol=1e-5)


def parts(rows):
    return rows.tiles, rows.own, rows.prompts, rows.batch


def test_sizes_of_graphs():
    assert [padded(rows) for rows in (1, 2, 3, 5, 16, 17, 128, 130, 255, 257, 512)] == [
        1, 2, 4, 8, 16, 32, 128, 160, 256, 320, 512,
    ]  # fmt: skip
    assert len({padded(rows) for rows in range(1, 513)}) == 20
    assert all(
        rows <= padded(rows) <= max(2 * rows, 16) and padded(padded(rows)) == padded(rows) for rows in range(1, 513)
    )


class Recorder:
    """Captures a function as its number, and fails from the `fails`-th on."""

    def __init__(self, fails=100):
        self.captured, self.replayed, self.fails = 0, 0, fails

    def __call__(self, run):
        if self.captured >= self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1

        def replay():
            self.replayed += 1
            return run()

        return replay


def test_a_step_is_captured_when_repeated_and_again_when_a_tensor_was_replaced():
    recorder = Recorder()
    graphs, ran = StepGraphs(recorder), []
    for size, addresses in ((4, 0), (4, 0), (4, 0), (2, 0), (2, 0), (4, 0), (4, 1), (4, 1), (4, 1)):
        graphs((size,), (addresses,), lambda size=size: ran.append(size))
    assert ran == [4, 4, 4, 2, 2, 4, 4, 4, 4]
    assert (recorder.captured, recorder.replayed) == (3, 6)  # the first of each ran as it is


def test_a_step_that_cannot_be_captured_runs_and_a_warning_says_why(caplog):
    graphs, ran = StepGraphs(Recorder(fails=1)), []
    for size in (4, 4, 2, 2, 2, 4):
        graphs((size,), (), lambda size=size: ran.append(size))
    assert ran == [4, 4, 2, 2, 2, 4]
    (message,) = [record.message for record in caplog.records]
    assert "no CUDA graphs" in message and "not permitted when stream is capturing" in message


def test_memory_that_runs_out_in_a_capture_is_no_reason_to_go_without_graphs(caplog):
    """Fewer rows take less: the batch halves them (`test_native`)."""

    def capture(run):
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = StepGraphs(capture)
    graphs((4,), (), lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        graphs((4,), (), lambda: None)
    assert graphs.capture is capture and not caplog.records


class FakeGraph:
    """As PyTorch's in what matters here: a pool ends with its last graph, and may then not be captured into."""

    alive: ClassVar[Counter] = Counter()
    emptied = 0

    def capture_begin(self, pool=None, capture_error_mode=None):
        assert pool is None or self.alive[pool], "use_count > 0 INTERNAL ASSERT FAILED"
        self.number = pool or max(self.alive, default=0) + 1
        self.alive[self.number] += 1
        self.ended = False

    def capture_end(self):
        self.ended = True

    def pool(self):
        return self.number

    def replay(self):
        assert self.ended

    def __del__(self):
        self.alive[self.number] -= 1


@pytest.fixture
def fake_graphs(monkeypatch):
    monkeypatch.setattr(FakeGraph, "alive", Counter())
    monkeypatch.setattr(FakeGraph, "emptied", 0)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda used: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(FakeGraph, "emptied", FakeGraph.emptied + 1))
    return FakeGraph


def test_graphs_share_a_pool_that_is_not_used_again_once_they_are_gone(fake_graphs):
    graphs = StepGraphs(CUDACapture())
    for address in (0, 0, 0, 1, 1, 1):
        for size in (4, 4, 2, 2):
            graphs((size,), (address,), lambda: None)
    assert +fake_graphs.alive == {2: 2} and graphs.capture is not None
    assert not fake_graphs.emptied, "a capture does not wait for the GPU"


@pytest.mark.parametrize("failures", [1, 2])
def test_a_capture_without_memory_is_tried_again_with_what_the_allocator_keeps(fake_graphs, failures):
    capture, calls = CUDACapture(), []

    def run():
        calls.append(1)
        if len(calls) <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory")

    if failures == 1:
        capture(run)()
    else:
        with pytest.raises(torch.OutOfMemoryError):
            capture(run)
    gc.collect()
    assert len(calls) == 2 and fake_graphs.emptied == 1
    assert sum(fake_graphs.alive.values()) == 0  # a capture that failed has ended


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_triton_or_a_gpu_a_warning_says_why_it_is_pytorch(bench, caplog):
    ops = choose_ops(DecoderSpec(**bench.QWEN), torch.bfloat16, torch.device("cuda"))
    assert isinstance(ops, PlainOps)
    (message,) = [record.message for record in caplog.records]
    assert "plain PyTorch" in message and ("triton" in message or "CUDA" in message or "NVIDIA" in message)


def test_pages_draw_what_slots_draw(bench):
    """Groups, ragged lengths, aborts, continued rows, new weights under way; `benchmarks/decode_step.py` does 1,000."""
    drawn, other, worst = bench.compare_schedules(40)
    assert drawn > 3000 and other == 0 and worst < 2e-5


def test_pages_take_what_tokens_take(bench):
    pages, tokens, slots, unshared = bench.ragged_memory()
    assert tokens <= pages <= 1.08 * tokens and pages < 0.4 * slots < slots < unshared


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_compiles_for_gpus_that_are_not_here():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    capabilities = (80, 86, 90)  # 89 takes the shared memory that 86 takes
    command = [sys.executable, str(SCRIPT), "--parts", "compile", "--json", "--shapes", "2", "--capabilities"]
    command += [str(capability) for capability in capabilities]
    compiled = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert {(each["kernel"], each["sm"]) for each in compiled} >= {
        (f"{name}_kernel", sm)
        for name in ("rms_norm", "rotate", "attend", "merge", "silu_mul", "vocabulary", "draw")
        for sm in capabilities
    }
    # A card of capability 8.6 or 8.9 has 99 KiB of shared memory for a block, the least of all that are supported.
    assert all(each["cubin"] > 0 and each["shared"] <= 99 * 1024 for each in compiled)
    assert all(each["mma"] for each in compiled if each["kernel"] == "attend_kernel")
