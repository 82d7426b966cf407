"""Mixtures of experts spread over ranks make the step of transformers' model in one process."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")

from atomrl.backends.local import LocalBackend
from atomrl.backends.megatron.backend import MegatronBackend
from atomrl.backends.megatron.shapes import check_shape, dense
from atomrl.config import ConfigError, MegatronConfig
from atomrl.data.rows import to_training_batches
from atomrl.models.loading import model_config_only
from tests.backends.comparison import compare
from tests.backends.continuing import alike
from tests.backends.equality import STEPS, UPDATES, alone_by_pytorch, case, compared, drawn, run_ranks, settings_of
from tests.backends.one_rank import one_rank
from tests.backends.test_megatron import NORM, load_and_go_on, on_ranks, save_and_go_on
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow
MODEL = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "pad_token_id": None,  # which transformers does not train, and rows here have it among their tokens
}  # fmt: skip
BALANCE = ("moe/load_balancing_loss", "moe/max_load", "moe/idle_experts")
CASES = {
    "grpo": case("grpo", model="moe"), "untied, weights as they are": case("grpo", model="plain"),
    "dpo": case("dpo", compared, model="moe"),
}  # fmt: skip
CUTS = {
    "experts": (2, {"expert": 2}), "copies": (2, {}), "tensor and experts": (2, {"tensor": 2, "expert": 2}),
    "tensor, experts of two copies": (4, {"tensor": 2, "expert": 4}),
    "tensor, experts and stages": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "moe", "qwen3_moe", **MODEL)
    more = {"tie_word_embeddings": False, "norm_topk_prob": False}
    make_tiny_model(folder / "plain", "qwen3_moe", **(MODEL | more))
    return folder


def apart(results):
    """Return the results of `train`, and the metrics of experts separately."""
    balance = [{name: metrics.pop(name) for name in BALANCE} for metrics in results["metrics"]]
    return results, balance


SHORT = "tensor and experts"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.short if name == SHORT else ()) for name in CUTS]
)
def ranks(request, folder, tmp_path_factory):
    world, cut = CUTS[request.param]
    results = run_ranks(partial(on_ranks, CASES, cut, folder), world, tmp_path_factory.mktemp("ranks"))
    return [{name: apart(part) for name, part in rank.items()} for rank in results]


@pytest.fixture(scope="module")
def alone(folder):
    return {name: alone_by_pytorch(given, folder) for name, given in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_ranks_make_the_steps_of_one_process(ranks, alone, name):
    compare([rank[name][0] for rank in ranks], alone[name], NORM)


@torch.no_grad()
def expected_balance(path, rows):
    """Compute the metrics from the router logits of transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(path)
    real = rows.loss_mask.flip(1).cumsum(1).flip(1).roll(-1, 1) > 0  # before the last one that is masked
    real[:, -1] = False
    losses, loads, idle = [], [], []
    for logits in model(rows.tokens, output_router_logits=True).router_logits:
        logits = logits.view(-1, MODEL["num_experts"])[real.flatten()]
        counts = logits.topk(MODEL["num_experts_per_tok"]).indices.flatten().bincount(minlength=MODEL["num_experts"])
        share = counts / counts.sum()
        losses.append(MODEL["num_experts"] * (share * logits.softmax(-1).mean(0)).sum())
        loads.append(MODEL["num_experts"] * share.max())
        idle.append((counts == 0).float().mean())
    return dict(zip(BALANCE, (torch.stack(part).mean().item() for part in (losses, loads, idle)), strict=True))


def test_how_evenly_tokens_are_spread_is_logged(folder, ranks):
    """Counted are the tokens that the loss of an update depends on, for any parallel sizes."""
    settings = settings_of(CASES["grpo"], folder)
    rows = first_part(settings)
    for rank in ranks:
        assert rank["grpo"][1][0] == pytest.approx(expected_balance(folder / "moe", rows), rel=1e-5)
        assert len(rank["grpo"][1]) == STEPS * UPDATES


def first_part(settings):
    """The rows of the first update that `train` makes."""
    made = LocalBackend(**settings).forward_only(drawn(0), settings["algorithm"].needs)
    credited = settings["algorithm"].advantages(made, {})
    return next(iter(to_training_batches(credited, settings["algorithm"], updates=UPDATES, epochs=1, seed=0, step=0)))


def test_a_mixture_continues_bit_for_bit_and_with_its_experts_elsewhere(folder, tmp_path):
    (tmp_path / "ran").mkdir(), (tmp_path / "other").mkdir()
    cuts = CUTS["tensor, experts of two copies"][1], CUTS["experts"][1]
    work = partial(save_and_go_on, "megatron", cuts[0], CASES["grpo"], folder, tmp_path / "saved")
    first, *_ = run_ranks(work, 4, tmp_path / "ran")
    (metrics, weights), (same_metrics, same_weights) = first
    assert metrics == same_metrics
    assert all(torch.equal(tensor, same_weights[name]) for name, tensor in weights.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.num_experts == MODEL["num_experts"]
    work = partial(load_and_go_on, "megatron", cuts[1], CASES["grpo"], folder, tmp_path / "saved")
    alike(run_ranks(work, 2, tmp_path / "other")[0], first[0])


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        ({"expert": 3}, {}, "expert=3 does not divide the 4 experts"),
        ({"tensor": 2}, {}, "a multiple of backend.tensor"),
        ({"tensor": 2, "pipeline": 2, "expert": 4}, {}, "it is backend.tensor"),
        ({}, {"mlp_only_layers": [0]}, "layers without experts"),
        ({"expert": 2}, {"model_type": "qwen3"}, "has no experts"),
    ],
    ids=str,
)
def test_unsupported_roles_of_experts_are_refused(folder, settings, changed, message):
    config = model_config_only(folder / "moe")
    config = dense(config) if changed.pop("model_type", None) else config
    for name, value in changed.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        check_shape(config, MegatronConfig(type="megatron", **settings), "model")


def test_a_critic_with_experts_is_refused(folder):
    with one_rank() as ranks, pytest.raises(ConfigError, match="critic"):
        settings = settings_of(case("ppo", model="moe"), folder)
        MegatronBackend(MegatronConfig(type="megatron"), collective=ranks, device="cpu", **settings)
