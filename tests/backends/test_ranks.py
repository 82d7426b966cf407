"""Two ranks run the back end that one process runs: same gradients, same decisions, one set of metrics."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from atomrl.backends.collective import Collective
from atomrl.backends.local import LocalBackend
from atomrl.common.metrics import merge, values
from atomrl.config import ConfigError, CriticConfig, ModelConfig, TrainConfig
from atomrl.protocols import UpdateOutput
from tests.backends.batches import follow_outputs, make_algorithm, make_batch, weights_of
from tests.tiny import make_tiny_model

NEEDS = frozenset({"old_logprobs", "old_entropy", "old_squared_probs", "ref_logprobs", "values"})
ENTROPY = frozenset({"logprobs", "entropy"})


class TorchCollective(Collective):
    """The collective operations of a `torch.distributed` process group."""

    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def max(self, number):
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def total(self, tensor):
        dist.all_reduce(tensor)
        return tensor

    def sum(self, metrics):
        parts = [{} for _ in range(self.world)]
        dist.all_gather_object(parts, metrics)
        return merge(parts)


class Replica(LocalBackend):
    """A model on every rank, gradients summed. Memory ends over `limit` padded tokens, in the backward pass."""

    limit, spoiled = 10**9, False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        follow_outputs(self, self.check_limit)

    def check_limit(self, micro, outputs):
        if micro.tokens.numel() > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        return outputs

    def gradients(self, batch, algorithm, of=None):
        metrics = super().gradients(batch, algorithm, of)
        for optimizer in self.trained.values():
            for weight in optimizer.weights.values():
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                self.collective.total(weight.grad)
                if self.spoiled:
                    weight.grad.fill_(float("nan"))
        return metrics


def make(folder, collective=None, **train):
    return Replica(
        ModelConfig(path=str(folder), dtype="float32"),
        TrainConfig(**({"learning_rate": 0.01} | train)),
        make_algorithm(needs=frozenset({"ref_logprobs", "values"})),
        total_updates=9,
        critic=CriticConfig(learning_rate=0.01),
        collective=collective,
    )


def whole_step(folder, collective, rows, unit="row", **train):
    """Two steps, and what is computed without gradient between them."""
    backend, algorithm = make(folder, collective, **train), make_algorithm(outputs=ENTROPY, row_unit=unit)
    every_second = torch.where(torch.arange(rows) % 2 == 0, torch.arange(rows) // 2, -1)
    batch = make_batch(rows=rows, recorded=every_second)
    metrics = [values(backend.train_step(batch, algorithm)) for _ in range(2)]
    tokens = backend.token_numbers()
    annotated = backend.forward_only(batch, NEEDS)
    return {
        "metrics": metrics,
        "weights": {name: tensor.clone() for name, tensor in weights_of(backend).items()},
        "outputs": {name: getattr(annotated, name) for name in NEEDS} | tokens,
    }


def short_of_memory(folder, collective, limit):
    backend = make(folder, collective)
    backend.limit = limit if collective.rank == 1 else 10**9
    try:
        metrics = values(backend.train_step(make_batch(rows=12), make_algorithm()))
    except ConfigError as error:
        return {"error": str(error)}
    return {
        "metrics": metrics,
        "budget": backend.tokens_per_micro_batch,
        "weights": {name: tensor.clone() for name, tensor in weights_of(backend).items()},
    }


def spoiled_on_one(folder, collective):
    backend = make(folder, collective)
    before = {name: tensor.clone() for name, tensor in weights_of(backend).items()}
    backend.spoiled = collective.rank == 1
    metrics = values(backend.train_step(make_batch(), make_algorithm()))
    same = all(torch.equal(tensor, before[name]) for name, tensor in weights_of(backend).items())
    return {"skipped": metrics.get("actor/skipped_updates"), "same": same}


def own_update(folder, collective):
    with pytest.raises(ConfigError, match="in one process"):
        make(folder, collective).train_step(make_batch(), make_algorithm(update=lambda *_: UpdateOutput({})))
    return True


CASES = {
    "uneven": lambda folder, ranks: whole_step(folder, ranks, 7),
    "small micro-batches": lambda folder, ranks: whole_step(folder, ranks, 9, tokens_per_micro_batch=20),
    "groups": lambda folder, ranks: whole_step(folder, ranks, 6, "group", rows_per_micro_batch=2),
    "a rank without rows": lambda folder, ranks: whole_step(folder, ranks, 1),
}
ALONE = {
    "little memory on one": lambda folder, ranks: short_of_memory(folder, ranks, limit=30),
    "no memory on one": lambda folder, ranks: short_of_memory(folder, ranks, limit=3),
    "not finite on one": spoiled_on_one,
    "own update": own_update,
}


def run_rank(rank, folder, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{results}/meet", rank=rank, world_size=2)
    ranks = TorchCollective()
    torch.save({name: case(folder, ranks) for name, case in {**CASES, **ALONE}.items()}, f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("ranks") / "base")


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory):
    """Return the results of each of two processes."""
    results = tmp_path_factory.mktemp("results")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_rank, args=(rank, folder, results)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(results / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_make_the_step_of_one_process(folder, ranks, case):
    expected = CASES[case](folder, Collective())
    for result in (rank[case] for rank in ranks):
        for mine, theirs in zip(result["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
        for name, tensor in expected["outputs"].items():
            torch.testing.assert_close(result["outputs"][name], tensor, atol=1e-3, rtol=1e-3)
        for name, tensor in expected["weights"].items():  # AdamW's first steps are nearly the sign of the gradient
            assert ((tensor - result["weights"][name]).abs() > 1e-4).float().mean() < 0.002, name
    one, other = (rank[case] for rank in ranks)
    assert one["metrics"] == other["metrics"]
    assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    assert all(torch.equal(tensor, other["outputs"][name]) for name, tensor in one["outputs"].items())


def test_both_take_smaller_micro_batches_where_one_runs_out_of_memory(folder, ranks):
    one, other = (rank["little memory on one"] for rank in ranks)
    assert one["budget"] == other["budget"] < 6 * 14, "what six rows take, half of all"
    assert one["metrics"] == other["metrics"] and one["metrics"]["actor/out_of_memory"] >= 1
    assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    expected = make(folder, tokens_per_micro_batch=one["budget"])
    metrics = values(expected.train_step(make_batch(rows=12), make_algorithm()))
    assert one["metrics"]["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)


def test_both_end_where_a_row_does_not_fit_on_one(ranks):
    one, other = (rank["no memory on one"]["error"] for rank in ranks)
    assert "a single row" in one and "(on another rank)" in one and "(out of memory)" in other


def test_both_leave_out_an_update_whose_gradient_is_not_finite_on_one(ranks):
    assert [rank["not finite on one"] for rank in ranks] == [{"skipped": 1.0, "same": True}] * 2


def test_a_launchers_processes_hear_that_the_back_end_is_a_single_one(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="launcher started 2"):
        make(folder)
