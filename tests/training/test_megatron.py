"""Layers and matrices cut over ranks by Megatron make the step of one process."""

from functools import partial

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")

from atomrl.config import MegatronConfig
from atomrl.training.megatron import MegatronBackend
from tests.training.equality import CASES, case, locally, make_models, run_ranks, settings_of, train
from tests.training.test_fsdp import RELATIVE, compare
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow
SHARED = (
    "grpo", "ppo", "dapo", "gspo", "dpo", "kto", "gkd", "reward_model", "one row", "one row and a critic",
    "masked rows", "many micro-batches", "clipped", "untied",
)  # fmt: skip
MORE = {"qwen3": case("grpo", model="qwen3"), "decay": case("ppo", train={"weight_decay": 0.1})}
CUTS = {
    "tensor": (2, {"tensor": 2}), "pipeline": (2, {"pipeline": 2}), "copies": (2, {}),
    "tensor and pipeline": (4, {"tensor": 2, "pipeline": 2}), "tensor and copies": (4, {"tensor": 2}),
    "pipeline and copies": (4, {"pipeline": 2}),
}  # fmt: skip
LOOSER = {"qwen3": 1e-4, "untied": 1e-4}
"""Where the gradient is large for a moment (85000, 550) roundings grow in its norm; weights are as close as others'."""
EVERY = {name: CASES[name] for name in SHARED} | MORE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_models(tmp_path_factory.mktemp("models"))
    make_tiny_model(folder / "qwen3", "qwen3")
    return folder


def on_ranks(cases, cut, folder, ranks):
    """What a rank does: all cases, each with a back end of its own; rank 0 has the weights."""
    found = {}
    for name, given in cases.items():
        settings = settings_of(given, folder)
        backend = MegatronBackend(MegatronConfig(type="megatron", **cut), collective=ranks, device="cpu", **settings)
        found[name] = train(backend, settings["algorithm"], given["rows"])
        backend.close()
    return found


@pytest.fixture(scope="module", params=CUTS)
def ranks(request, folder, tmp_path_factory):
    world, cut = CUTS[request.param]
    return run_ranks(partial(on_ranks, EVERY, cut, folder), world, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", EVERY)
def test_ranks_make_the_steps_of_one_process(folder, ranks, name):
    compare([rank[name] for rank in ranks], locally(EVERY[name], folder), LOOSER.get(name, RELATIVE))
