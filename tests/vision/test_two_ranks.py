"""Two ranks train on pictures as one process does, also where a rank has none; the tower is frozen or trained."""

from functools import partial

import pytest
import torch

from atomrl.algorithms.grpo import GRPO
from atomrl.backends.fsdp import FSDPBackend
from atomrl.batches import select_rows
from atomrl.common.metrics import values
from atomrl.config import FSDPConfig, ModelConfig, TrainConfig
from tests.backends.batches import weights_of
from tests.backends.equality import run_ranks
from tests.vision.test_conformance import Case

TRAINED = {"frozen": True, "trained": False}
TRAIN = {"steps": 1, "learning_rate": 0.01, "rows_per_micro_batch": 1}


def stepped(backend, batch):
    """Return metrics and weights of a step."""
    metrics = values(backend.train_step(batch, GRPO))
    return metrics, {name: weight.clone() for name, weight in weights_of(backend).items()}


def work(path, reader, batch, ranks):
    results = {}
    for name, frozen in TRAINED.items():
        backend = FSDPBackend(
            FSDPConfig(type="fsdp"), ModelConfig(path=path, dtype="float32", freeze_vision=frozen),
            TrainConfig(**TRAIN), GRPO, total_updates=1, images=reader, collective=ranks, device="cpu",
        )  # fmt: skip
        results[name] = stepped(backend, batch)
        backend.close()
    return results


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case("qwen3_vl", tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def batch(case):
    """Three rows, of which one has a picture: a rank has none, and one micro-batch less."""
    batch = select_rows(case.batch(), torch.tensor([0, 4, 5]))
    assert [len(row) for row in batch.images.rows] == [1, 0, 0]
    return batch


@pytest.fixture(scope="module")
def ranks(case, batch, tmp_path_factory):
    return run_ranks(partial(work, str(case.path), case.reader, batch), 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_make_the_step_of_one_process(case, batch, ranks, name):
    metrics, weights = stepped(case.backend(model={"freeze_vision": TRAINED[name]}, **TRAIN), batch)
    theirs, sent = ranks[0][name]
    assert theirs["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-5)
    assert sent.keys() == weights.keys()
    before = weights_of(case.backend())
    moved = {each for each in weights if not torch.equal(weights[each], before[each])}
    assert any("visual" in each for each in moved) != TRAINED[name]
    for each, weight in weights.items():
        assert (weight - sent[each]).abs().max() < 1e-4, each
