"""On a CUDA device the same parts give the same numbers as on the CPU, and a run goes through."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig

from atomrl.algorithms import objective_of
from atomrl.cli.main import main
from atomrl.common.metrics import values
from atomrl.engines.generation import generate
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.requests import EngineOptions
from atomrl.models.loading import load_policy
from atomrl.models.stream import states_before
from atomrl.trainer.auto import free_bytes
from atomrl.types import SamplingParams
from tests.backends.batches import make_algorithm, make_batch, weights_of
from tests.conformance.test_backends import make_local
from tests.prompts import logprobs_of, prompts_of, response
from tests.tiny import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model", "qwen2")


def test_updates_are_those_of_the_cpu(folder):
    batch, algorithm = make_batch(), make_algorithm()
    on_cpu, on_gpu = (make_local(folder, device=device) for device in ("cpu", "cuda"))
    for _ in range(3):
        expected = values(on_cpu.train_step(batch, algorithm))
        assert values(on_gpu.train_step(batch, algorithm)) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    trained = weights_of(on_gpu)
    for name, weight in weights_of(on_cpu).items():
        torch.testing.assert_close(trained[name].cpu(), weight, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_rows_end_to_end_are_padded_rows(tmp_path, kind):
    """By attention of variable length, in bfloat16; beside padded rows in float32, which says what rounding is."""
    if kind == "qwen2":
        folder = make_tiny_model(tmp_path / "model", "qwen2", scale=0.1)
    else:
        folder = tmp_path / "model"
        shape = {"vocab_size": 102, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = MistralConfig(**shape, num_key_value_heads=2, intermediate_size=64, initializer_range=0.1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    batch = make_batch(rows=8, longest=40)
    batch.tokens[1::2, :3] = batch.tokens[::2, :3]
    given = [part.cuda() for part in (batch.tokens, batch.loss_mask, batch.prompt_lengths)]

    def logprobs_of(dtype, pack_rows):
        model = load_policy(folder, dtype=dtype, device="cuda")
        model.pack_rows = pack_rows
        assert model.shares_prompts == pack_rows
        states, _ = states_before(model, *given)
        states.float().square().sum().backward()
        norm = torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None]).norm()
        return states.float(), norm

    exact, rounded, packed = (
        logprobs_of(*how) for how in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    )
    for mine, theirs, right in zip(packed, rounded, exact, strict=True):
        assert (mine - right).norm() <= 2 * (theirs - right).norm() + 5e-3 * right.norm()


def test_no_micro_batch_waits_for_the_device(folder):
    """`tests/backends/test_no_waits.py` has more models and algorithms, without a GPU."""
    batch, algorithm = make_batch(), objective_of({"name": "grpo"}).resolved(max_completion_tokens=16)
    backend = make_local(folder, algorithm, device="cuda", train={"rows_per_micro_batch": 2})
    backend.train_step(batch, algorithm)  # what is made once: tables of positions
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.gradients(batch, algorithm)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("engine", [NativeEngine, HFEngine])
def test_rollouts_and_trainer_agree(folder, engine):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = {"dtype": torch.float32, "device": "cuda", "max_concurrent_completions": 8}
    rollout = engine.from_pretrained(str(folder), tokenizer, EngineOptions(**settings))
    prompts = prompts_of((7, 8, 9), (20,), (30, 31, 32, 33, 34, 35))
    drawn = generate(rollout, prompts, SamplingParams(completions_per_prompt=4, max_completion_tokens=20))
    backend = make_local(folder, device="cuda")
    for trajectory in drawn:
        tokens = torch.tensor([trajectory.token_ids], device="cuda")
        logits = backend.policy.model.forward(tokens)[0, trajectory.prompt_tokens - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(len(logits)), list(response(trajectory))]
        torch.testing.assert_close(logprobs.cpu(), torch.tensor(logprobs_of(trajectory)), atol=1e-4, rtol=1e-4)


def test_the_native_engine_decodes_by_its_kernels_in_graphs(tmp_path, caplog):
    """In bfloat16, without a warning, and with the log-probs of the trainer but for rounding."""
    from atomrl.engines.native.triton_ops import TritonOps, check_ops

    folder = make_tiny_model(tmp_path / "model", "qwen3", scale=0.1, hidden_size=64, head_dim=32)
    options = EngineOptions(torch.bfloat16, "cuda", max_concurrent_completions=8)
    engine = NativeEngine.from_pretrained(str(folder), AutoTokenizer.from_pretrained(folder), options)
    sampling = SamplingParams(completions_per_prompt=4, max_completion_tokens=60)
    drawn = generate(engine, prompts_of((7, 8, 9), (20,), tuple(range(30, 75))), sampling)
    assert isinstance(engine.batch.step.ops, TritonOps)
    assert engine.batch.graphs.capture is not None and any(engine.batch.graphs.seen.values())
    assert not [record.message for record in caplog.records if "native engine" in record.message]
    for dtype in (torch.float32, torch.bfloat16):
        check_ops(TritonOps(engine.model.spec), engine.model.spec, dtype, engine.model.device)
    exact = load_policy(folder, dtype="float32", device="cuda")
    errors = []
    for trajectory in drawn:
        logits = exact.forward(torch.tensor([trajectory.token_ids], device="cuda"))[
            0, trajectory.prompt_tokens - 1 : -1
        ]
        logprobs = logits.log_softmax(-1)[torch.arange(len(logits)), list(response(trajectory))]
        errors.append((logprobs.cpu() - torch.tensor(logprobs_of(trajectory))).abs())
    assert torch.cat(errors).mean() < 0.02


def test_a_whole_run(folder, tmp_path):
    options = [
        f"model.path={folder}",
        f"output_dir={tmp_path}",
        "data.train=arithmetic",
        "data.train_size=8",
        "model.device=cuda",
    ]
    options += ["train.steps=2", "rollout.prompts_per_step=2", "rollout.completions_per_prompt=4"]
    config = tmp_path / "run.yaml"
    config.write_text("run_name: on-gpu\nreward: {functions: [{function: exact_match}]}\n", encoding="utf-8")
    assert main(["train", str(config), *options, "rollout.max_completion_tokens=8"]) == 0
    assert (tmp_path / "on-gpu/summary.json").is_file()


def test_the_free_memory_of_ranks_is_that_of_the_fullest_gpu():
    """With one GPU it is that of this GPU, also while another process holds some of it."""
    alone, several = free_bytes("cuda", 1), free_bytes("cuda", torch.cuda.device_count() + 1)
    assert 0 < several <= alone
