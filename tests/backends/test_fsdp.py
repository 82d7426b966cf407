"""Two and four ranks make the step of one process, of every algorithm."""

from functools import partial

import pytest

from tests.backends.comparison import RELATIVE, compare
from tests.backends.equality import CASES, HYBRID, ON_FOUR, all_cases, locally, make_models, run_ranks

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


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_make_the_steps_of_one_process(folder, two, case):
    compare([rank[case] for rank in two], locally(CASES[case], folder), LOOSER.get(case, RELATIVE))


@pytest.mark.parametrize("case", [*ON_FOUR, *HYBRID])
def test_four_ranks_make_the_steps_of_one_process(folder, four, case):
    compare([rank[case] for rank in four], locally({**CASES, **HYBRID}[case], folder))
