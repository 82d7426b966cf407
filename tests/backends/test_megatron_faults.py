"""The fault of one Megatron rank ends all ranks, and the error names it, for all parallel sizes."""

from contextlib import closing

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")

from atomrl.common.metrics import values
from atomrl.config import MegatronConfig
from benchmarks.rank_faults import Outcome, distance, prepare
from tests.backends.batches import make_algorithm, make_batch, weights_of
from tests.backends.misbehaving import ranked
from tests.backends.test_rank_faults import FAULTS, ended, fails_soon, gradients
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow
CUTS = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "copies": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("ranks") / "base")


@pytest.mark.parametrize(("fault", "said"), FAULTS.items())
@pytest.mark.parametrize("cut", CUTS)
def test_all_end_and_name_the_rank(folder, fault, said, cut):
    stopped = fault == "SIGSTOP"
    settings = {"timeout_s": 10 if stopped else 300, "cut": CUTS[cut], "rows_per_micro_batch": 2}
    with closing(ranked(folder, fault, 2, MegatronConfig, **settings)) as both:
        pids = fails_soon(both, said)
    assert all(map(ended, pids))


@pytest.mark.parametrize("cut", CUTS)
def test_a_non_finite_gradient_on_one_rank_is_skipped_on_all(folder, cut):
    with closing(ranked(folder, "not finite", 1, MegatronConfig, cut=CUTS[cut])) as both:
        before = {name: tensor.clone() for name, tensor in weights_of(both).items()}
        metrics = values(both.train_step(make_batch(), make_algorithm()))
        assert metrics["actor/skipped_updates"] == 1.0
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(both).items())
        assert "actor/skipped_updates" not in values(both.train_step(make_batch(), make_algorithm()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    prepare(folder, 2, type="megatron", tensor=2)
    run = Outcome(folder, "alone", "none", 10**9)
    assert run.code == 0, run.said
    return folder, run


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_after_a_loss_a_new_group_continues_bit_for_bit(alone, fault):
    folder, untouched = alone
    run = Outcome(folder, fault, fault, 13)
    assert run.code == 0 and run.struck and not run.left(), run.said
    assert "new ranks continue from the newest checkpoint (1 of backend.restarts=2)" in run.said
    assert distance(run.weights(), untouched.weights()) == 0 and gradients(run) == gradients(untouched)
