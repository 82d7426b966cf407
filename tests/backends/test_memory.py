"""Memory that runs out: smaller micro-batches with the same gradient, or the setting to change."""

import gc
import weakref
from typing import ClassVar

import pytest
import torch

from atomrl.backends.base import OutOfMemory
from atomrl.backends.collective import Collective
from atomrl.backends.local import LocalBackend
from atomrl.batches import micro_batches
from atomrl.common.metrics import values
from atomrl.config import ConfigError, LoraConfig, ModelConfig, TrainConfig
from tests.backends.batches import follow_outputs, make_algorithm, make_batch, weights_of
from tests.models.gpt2 import save_gpt2
from tests.tiny import make_tiny_model

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
    MemoryError(),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("memory") / "base"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return str(save_gpt2(tmp_path_factory.mktemp("memory") / "gpt2"))


class SmallMemory(LocalBackend):
    """Runs out of it in the backward pass, when half of the gradient is there, over `limit` padded tokens."""

    limit, error = 10**9, ERRORS[0]

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        follow_outputs(self, self.check_limit)

    def check_limit(self, micro, outputs):
        if micro.tokens.numel() > self.limit:
            if not torch.is_grad_enabled():
                raise self.error
            next(reversed(list(self.policy.model.parameters()))).sum().backward()
            raise self.error
        return outputs


def make(folder, limit=10**9, error=ERRORS[0], model=(), **train):
    backend = SmallMemory(
        ModelConfig(path=folder, dtype="float32", **dict(model)),
        TrainConfig(**({"learning_rate": 0.01} | train)),
        make_algorithm(),
        total_updates=10,
    )
    backend.limit, backend.error = limit, error
    return backend


def gradient(backend, batch, algorithm):
    """Return the gradient of one step, and the step's metrics."""
    backend.gradients(batch, algorithm)
    kept = {name: weight.grad.clone() for name, weight in backend.policy.model.named_parameters()}
    backend.policy.optimizer.zero_grad()
    return kept, values(backend.train_step(batch, algorithm))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("unit", ["row", "group"])
def test_the_gradient_is_that_of_enough_memory(folder, error, unit, caplog):
    batch, algorithm = make_batch(rows=12), make_algorithm(row_unit=unit)
    expected, plain = gradient(make(folder), batch, algorithm)
    small = make(folder, limit=45, error=error)
    grads, metrics = gradient(small, batch, algorithm)
    for name, tensor in expected.items():
        torch.testing.assert_close(grads[name], tensor, atol=1e-6, rtol=1e-4)
    assert metrics.pop("actor/out_of_memory") >= 1 and metrics == pytest.approx(plain, rel=1e-4)
    assert "train.tokens_per_micro_batch=" in caplog.text
    budget = small.tokens_per_micro_batch
    assert "actor/out_of_memory" not in small.train_step(batch, algorithm), "what was learned is kept"
    assert small.tokens_per_micro_batch == budget <= 45 * 2


def test_rows_per_micro_batch_is_halved_too(folder):
    """Where it, and not the token budget, is what makes the micro-batches."""
    batch = make_batch(rows=12)
    expected, _ = gradient(make(folder), batch, make_algorithm())
    grads, metrics = gradient(make(folder, limit=30, rows_per_micro_batch=6), batch, make_algorithm())
    for name, tensor in expected.items():
        torch.testing.assert_close(grads[name], tensor, atol=1e-6, rtol=1e-4)
    assert metrics["actor/out_of_memory"] >= 1


def test_log_probs_come_out_of_small_memory_as_of_large(folder):
    batch, needs = make_batch(rows=12), frozenset({"old_logprobs"})
    small = make(folder, limit=30)
    torch.testing.assert_close(
        small.forward_only(batch, needs).old_logprobs, make(folder).forward_only(batch, needs).old_logprobs
    )
    assert values(small.train_step(batch, make_algorithm()))["actor/out_of_memory"] >= 1, "counted with the next update"


class Checkpointing(SmallMemory):
    """A row fits only if its layers are computed twice."""

    def check_limit(self, micro, outputs):
        self.limit = 10**9 if self.policy.model.gradient_checkpointing else 5
        return super().check_limit(micro, outputs)


def test_auto_turns_checkpointing_on_where_a_row_does_not_fit(folder, caplog):
    batch = make_batch(rows=6)
    expected, plain = gradient(make(folder), batch, make_algorithm())
    model, train = ModelConfig(path=folder, dtype="float32"), TrainConfig(learning_rate=0.01)
    grads, metrics = gradient(Checkpointing(model, train, make_algorithm(), total_updates=10), batch, make_algorithm())
    for name, tensor in expected.items():
        torch.testing.assert_close(grads[name], tensor, atol=1e-6, rtol=1e-4)
    assert metrics.pop("actor/out_of_memory") >= 1 and metrics == pytest.approx(plain, rel=1e-4)
    assert "gradient_checkpointing=true" in caplog.text
    off = ModelConfig(path=folder, dtype="float32", gradient_checkpointing=False)
    with pytest.raises(ConfigError, match="gradient_checkpointing"):
        Checkpointing(off, train, make_algorithm(), total_updates=10).train_step(batch, make_algorithm())


def test_a_row_that_does_not_fit_names_the_settings(folder):
    backend, before = make(folder, limit=5, model={"gradient_checkpointing": False}), None
    before = {name: tensor.clone() for name, tensor in weights_of(backend).items()}
    with pytest.raises(ConfigError, match="gradient_checkpointing=true"):
        backend.train_step(make_batch(), make_algorithm())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(backend).items())
    with pytest.raises(ConfigError, match="stay together"):
        unit = make_algorithm(row_unit="group")
        make(folder, limit=5, model={"gradient_checkpointing": False}).train_step(make_batch(), unit)


class OneOfFour(SmallMemory):
    """The last of four ranks, which wait for each other inside of a layer."""

    retries_out_of_memory = False


class Fourth(Collective):
    rank, world = 3, 4

    def max(self, number):
        return max(number, 1)  # micro-batches of the others


def test_a_rank_without_rows_asks_for_smaller_micro_batches_too(folder):
    train = TrainConfig(learning_rate=0.01)
    model = ModelConfig(path=folder, dtype="float32")
    backend = OneOfFour(model, train, make_algorithm(), total_updates=10, collective=Fourth())
    backend.limit = 5
    batch = make_batch(rows=5, lengths=torch.full((5,), 14), group_ids=torch.arange(5))
    assert len(micro_batches(batch.lengths, None, backend.tokens_per_micro_batch, ranks=4)) == 3
    with pytest.raises(OutOfMemory, match=r"tokens_per_micro_batch=14"):
        backend.train_step(batch, make_algorithm())


def test_passes_without_gradient_have_larger_micro_batches_of_their_own(folder, caplog):
    batch, needs = make_batch(rows=12), {"old_logprobs"}
    backend = make(folder, limit=60, tokens_per_micro_batch=28)
    assert backend.tokens_without_gradient is None, "on a CPU they are as large as others"
    expected = backend.forward_only(batch, needs).old_logprobs
    sizes = []
    follow_outputs(backend, lambda micro, outputs: (sizes.append(micro.rows), outputs)[1])
    backend.tokens_without_gradient = 112
    logprobs = backend.forward_only(batch, needs).old_logprobs
    torch.testing.assert_close(logprobs, expected)
    assert (backend.tokens_without_gradient, backend.tokens_per_micro_batch) == (56, 28)
    assert "out of memory in a pass without gradient" in caplog.text
    assert max(sizes[1:]) > 28 // 14, "more rows than an update's"
    assert values(backend.train_step(batch, make_algorithm())).get("actor/out_of_memory") is None


def test_other_errors_are_not_taken_for_want_of_memory(folder):
    with pytest.raises(RuntimeError, match="shapes"):
        make(folder, limit=5, error=RuntimeError("shapes do not fit")).train_step(make_batch(), make_algorithm())


class FullAfterForward(LocalBackend):
    """Runs out of it where the log-probs are computed, with the whole graph of the model there."""

    limit = 45

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        follow_outputs(self, self.check_limit)

    def check_limit(self, micro, outputs):
        if torch.is_grad_enabled() and micro.tokens.numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")  # a new one: an error holds its frames
        return outputs


class Mark:
    """Lives as long as the graph that holds it."""


class Marked(torch.autograd.Function):
    marks: ClassVar = []  # weak references, one of each forward pass

    @staticmethod
    def forward(ctx, x):
        ctx.mark = Mark()
        Marked.marks.append(weakref.ref(ctx.mark))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("model", ["ours", "transformers"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"activation_offload": True},
        {"dtype": "bfloat16", "activation_offload": True, "gradient_checkpointing": True},
        {"dtype": "bfloat16", "lora": LoraConfig(rank=2)},
    ],
    ids="-".join,
)
def test_activations_are_freed_after_running_out_of_memory(folder, gpt2, model, settings, monkeypatch):
    monkeypatch.setattr("atomrl.models.loading.has_bfloat16", lambda device: True)
    given = ModelConfig(**{"path": folder if model == "ours" else gpt2, "dtype": "float32"} | settings)
    algorithm = make_algorithm()
    backend = FullAfterForward(given, TrainConfig(learning_rate=1e-3), algorithm, total_updates=4)
    layers = [module for module in backend.policy.model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers[0][0].register_forward_pre_hook(
        lambda module, given: (Marked.apply(given[0].requires_grad_()), *given[1:]) if torch.is_grad_enabled() else None
    )
    Marked.marks.clear()
    metrics = values(backend.train_step(make_batch(rows=12, vocabulary=60), algorithm))
    gc.collect()
    assert metrics["actor/out_of_memory"] >= 1 and len(Marked.marks) > 2
    assert not [mark for mark in Marked.marks if mark() is not None]


def test_a_model_is_whole_where_memory_runs_out_while_its_weights_are_rounded(gpt2, monkeypatch):
    monkeypatch.setattr("atomrl.models.loading.has_bfloat16", lambda device: True)
    algorithm, batch = make_algorithm(), make_batch(rows=4, vocabulary=60)
    backend = LocalBackend(ModelConfig(path=gpt2, dtype="bfloat16"), TrainConfig(), algorithm, total_updates=4)
    names = [name for name, _ in backend.policy.model.named_parameters()]
    left, to = [7], torch.Tensor.to

    def full_once(tensor, *arguments, **named):
        if isinstance(tensor, torch.nn.Parameter) and arguments == (torch.bfloat16,):
            left[0] -= 1
            if left[0] == 0:
                raise ERRORS[0]
        return to(tensor, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "to", full_once)
    assert values(backend.train_step(batch, algorithm))["actor/out_of_memory"] == 1
    assert [name for name, _ in backend.policy.model.named_parameters()] == names
