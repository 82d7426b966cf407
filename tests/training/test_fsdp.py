"""Two and four ranks make the step of one process, of every algorithm."""

from functools import partial

import pytest
import torch

from tests.training.equality import CASES, HYBRID, ON_FOUR, all_cases, locally, make_models, run_ranks

RELATIVE = 1e-5
LOOSER = {"dpo_norm": 1e-4, "discopop": 2e-4}
"""Gradients that cancel: their norm in one process with other micro-batches is off by up to 8e-5."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory):
    return run_ranks(partial(all_cases, CASES, folder), 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(folder, tmp_path_factory):
    cases = {name: CASES[name] for name in ON_FOUR} | HYBRID
    return run_ranks(partial(all_cases, cases, folder), 4, tmp_path_factory.mktemp("four"))


def without_ties(metrics):
    """Without the share of pairs that are told apart where that is a matter of rounding: before the first update."""
    ties = abs(metrics.get("rewards/margins", 1.0)) < RELATIVE
    return {name: number for name, number in metrics.items() if not (ties and name == "rewards/accuracies")}


def compare(ranks, expected, relative=RELATIVE):
    first = ranks[0]
    assert all(rank["metrics"] == first["metrics"] for rank in ranks), "all ranks say the same"
    for mine, theirs in zip(first["metrics"], expected["metrics"], strict=True):
        assert without_ties(mine) == pytest.approx(without_ties(theirs), rel=relative, abs=RELATIVE, nan_ok=True)
    for mine, theirs in zip(first["outputs"], expected["outputs"], strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, atol=1e-5, rtol=1e-5)
    assert first["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        assert (tensor - first["weights"][name]).abs().max() <= RELATIVE * tensor.abs().max(), name


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_make_the_steps_of_one_process(folder, two, case):
    compare([rank[case] for rank in two], locally(CASES[case], folder), LOOSER.get(case, RELATIVE))


@pytest.mark.parametrize("case", [*ON_FOUR, *HYBRID])
def test_four_ranks_make_the_steps_of_one_process(folder, four, case):
    compare([rank[case] for rank in four], locally({**CASES, **HYBRID}[case], folder))
