"""Whole preference objectives, from rows to loss and gradient, give the numbers of TRL's golden files."""

from __future__ import annotations

import json

import pytest
import torch

from atomrl.atoms.policy_losses import sequence_mean
from atomrl.batches import RowBatch, TrainingBatch
from atomrl.objectives import PreferenceObjective
from atomrl.objectives.preference_loss import BcoLoss, LogprobScore, LogRatioScore, OddsRatioLoss, TokenMeanNll
from atomrl.protocols import ModelOutputs
from tests.algorithms.batches import flat_rows
from tests.parity.harness import GOLDEN

PER_TOKEN = {"ipo", "sigmoid_norm"}
"""Losses for which TRL divides scores by the length."""


def cases(stem):
    return json.loads((GOLDEN / f"preference.{stem}.trl.json").read_text())["cases"]


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def rows(mask, old, ref, labels, pair_ids) -> RowBatch:
    """Rows of what a golden file has; log-probs are indexed by the token itself."""
    count, length = mask.shape
    return flat_rows(
        tokens=torch.arange(count * length).view(count, length),
        loss_mask=mask,
        lengths=torch.full((count,), length),
        prompt_lengths=torch.ones(count, dtype=torch.long),
        group_ids=pair_ids,
        rewards=torch.zeros(count),
        truncated=torch.zeros(count, dtype=torch.bool),
        old_logprobs=old,
        ref_logprobs=ref,
        labels=torch.tensor(labels),
        pair_ids=pair_ids,
        mismatched=torch.tensor(labels) == 0,
    )


@pytest.fixture(autouse=True)
def loss_weights_in_float64():
    """They are made of masks alone, and so have the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def run(objective, batch: RowBatch, logprobs):
    """Loss, gradient of the log-probs (of the rows that are trained on) and metrics of one optimizer step."""
    credited = objective.advantages(batch)
    weights = objective.loss_weights(credited.loss_mask, credited.group_ids)
    assert torch.equal(weights, sequence_mean(credited.loss_mask))
    step = TrainingBatch(**vars(credited), loss_weights=weights)
    leaf = logprobs[: step.rows].clone().requires_grad_()
    result = objective.loss(ModelOutputs(logprobs=leaf), step)
    result.loss.backward()
    return result.loss.item(), leaf.grad, result.metrics


def dpo_objective(params) -> PreferenceObjective | None:
    """TRL's parameters as axes; None where it takes scores of two kinds at once, or weights that need the logits."""
    names, weights = list(params["loss_types"]), params.get("loss_weights")
    weights = [1.0] * len(names) if weights is None else list(weights)
    kinds = [name for name in names if name != "sft"]
    if params.get("use_weighting") or (set(kinds) & PER_TOKEN and len(kinds) > 1):
        return None
    if len(kinds) > 1 and set(kinds) & {"aot", "aot_unpaired"}:
        return None
    smoothing = params.get("label_smoothing") or 0.0
    losses = []
    for name in kinds:
        own = {"beta": params["beta"]}
        if name in ("robust", "exo_pair", "aot", "aot_unpaired"):
            own["label_smoothing"] = smoothing
        if name == "discopop":
            own["tau"] = params["discopop_tau"]
        weight = weights[names.index(name)]
        losses.append({"type": "sigmoid" if name == "sigmoid_norm" else name, "weight": weight, **own})
    alpha = params.get("f_alpha_divergence_coef")
    ld_alpha = params.get("ld_alpha")
    return PreferenceObjective(
        score=LogRatioScore(
            divergence=params.get("f_divergence_type") or "reverse_kl",
            alpha=1.0 if alpha is None else alpha,
            ld_alpha=1.0 if ld_alpha is None else ld_alpha,
            length_normalised=bool(set(kinds) & PER_TOKEN),
        ),
        nll=TokenMeanNll(coefficient=sum(w for w, name in zip(weights, names, strict=True) if name == "sft")),
    ).override({"loss": losses or {"type": "sigmoid", "weight": 0.0}})


DPO_CASES = [(stem, case) for stem in ("dpo", "dpo_f_divergence", "dpo_wpo_ld") for case in cases(stem)]
WHOLE = [item for item in DPO_CASES if dpo_objective(item[1]["params"]) is not None]


def test_most_cases_are_whole_objectives():
    assert len(DPO_CASES) == 62 and len(WHOLE) >= 55, len(WHOLE)


@pytest.mark.parametrize(("stem", "case"), WHOLE, ids=[f"{stem}-{case['name']}" for stem, case in WHOLE])
def test_dpo_has_the_loss_and_gradient_of_trl(stem, case):
    given, expected = case["inputs"], case["expected"]
    mask = numbers(given["completion_mask"]) > 0
    mask[:, 0] = False
    logprobs, ref = (torch.nn.functional.pad(numbers(given[name]), (1, 0)) for name in ("log_probs", "ref_log_probs"))
    pairs = len(mask) // 2
    groups = torch.arange(pairs).repeat(2)
    batch = rows(mask, logprobs, ref, [1] * pairs + [-1] * pairs, groups)
    loss, gradient, metrics = run(dpo_objective(case["params"]), batch, logprobs)
    exact = {"rel": 1e-6, "abs": 1e-7} if case.get("dtype") == "float32" else {"rel": 1e-9, "abs": 1e-10}
    assert loss == pytest.approx(expected["loss"], **exact)
    torch.testing.assert_close(
        gradient[:, 1:], numbers(expected["grad_log_probs"]), rtol=exact["rel"], atol=exact["abs"]
    )
    names = case["params"]["loss_types"]
    plain = case["params"].get("f_divergence_type", "reverse_kl") == "reverse_kl" and not set(names) & PER_TOKEN
    if plain and names not in (["aot"], ["aot_unpaired"], ["sft"]):  # where TRL's metrics are not of what it trains
        for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen"):
            assert metrics[name].value == pytest.approx(expected["metrics"][name], abs=1e-6), name


def single_tokens(*columns):
    """Rows with one trained token that has the whole completion's log-prob."""
    values = torch.cat([numbers(column) for column in columns])
    return torch.stack([torch.zeros_like(values), values], 1)


def pairs_of(case, chosen, rejected):
    logprobs = single_tokens(case["inputs"][chosen], case["inputs"][rejected])
    pairs = len(logprobs) // 2
    mask = torch.tensor([[False, True]]).repeat(2 * pairs, 1)
    return rows(mask, None, None, [1] * pairs + [-1] * pairs, torch.arange(pairs).repeat(2)), logprobs


@pytest.mark.parametrize("case", cases("cpo_simpo"), ids=lambda case: case["name"])
def test_cpo_and_simpo_have_the_loss_and_gradient_of_trl(case):
    params = case["params"]
    kind = {"simpo": "sigmoid"}.get(params["loss_type"], params["loss_type"])
    own = {"beta": params["beta"]}
    if kind == "sigmoid":
        own["label_smoothing"] = params["label_smoothing"]
        own["target_margin"] = params["simpo_gamma"] if params["loss_type"] == "simpo" else 0.0
    batch, logprobs = pairs_of(case, "chosen_log_probs", "rejected_log_probs")
    objective = PreferenceObjective(score=LogprobScore(shape=params["alpha"])).override({"loss": {"type": kind, **own}})
    loss, gradient, metrics = run(objective, batch, logprobs)
    expected = case["expected"]
    assert loss == pytest.approx(expected["loss"], rel=1e-9)
    wanted = numbers(expected["grad_chosen"] + expected["grad_rejected"])
    torch.testing.assert_close(gradient[:, 1], wanted, rtol=1e-9, atol=1e-12)
    mean = sum(expected["chosen_rewards"]) / len(expected["chosen_rewards"])
    assert metrics["rewards/chosen"].value == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("case", cases("orpo"), ids=lambda case: case["name"])
def test_orpo_has_the_loss_and_gradient_of_trl(case):
    objective = PreferenceObjective(
        score=LogprobScore(length_normalised=True), loss=(OddsRatioLoss(beta=case["params"]["beta"]),)
    )
    batch, logprobs = pairs_of(case, "chosen_avg_log_probs", "rejected_avg_log_probs")
    loss, gradient, _ = run(objective, batch, logprobs)
    expected = case["expected"]
    assert loss == pytest.approx(expected["or_loss"], rel=1e-4)
    wanted = numbers(expected["grad_chosen"] + expected["grad_rejected"])
    torch.testing.assert_close(gradient[:, 1], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", cases("kto"), ids=lambda case: case["name"])
def test_kto_has_the_loss_and_gradient_of_trl(case):
    given, params = case["inputs"], case["params"]
    weights = {name: params[name] for name in ("beta", "desirable_weight", "undesirable_weight")}
    others = given.get("kl_log_probs") or []
    logprobs = single_tokens(given["log_probs"], others)
    ref = single_tokens(given["ref_log_probs"], given.get("ref_kl_log_probs") or [])
    count = len(logprobs)
    labels = [1 if label else -1 for label in given["labels"]] + [0] * len(others)
    mask = torch.tensor([[False, True]]).repeat(count, 1)
    batch = rows(mask, logprobs, ref, labels, torch.arange(count))
    objective = PreferenceObjective().override({"loss": {"type": params["loss_type"], **weights}})
    loss, gradient, metrics = run(objective, batch, logprobs)
    expected = case["expected"]
    assert loss == pytest.approx(expected["loss"], rel=1e-9)
    labelled = len(given["labels"])
    torch.testing.assert_close(gradient[:labelled, 1], numbers(expected["grad_log_probs"]), rtol=1e-9, atol=1e-12)
    assert metrics["preference/reference"].value == pytest.approx(expected["kl"], abs=1e-9)
    if all(name in expected["metrics"] for name in ("rewards/chosen", "rewards/rejected")) and min(labels) < 0:
        assert metrics["rewards/rejected"].value == pytest.approx(expected["metrics"]["rewards/rejected"], abs=1e-9)


def test_bco_over_two_steps():
    (case,) = [case for case in cases("bco") if "prob_desirable" not in case["inputs"]]
    algorithm, state = PreferenceObjective(loss=(BcoLoss(beta=case["params"]["beta"]),)), {}
    for given, expected in zip(case["inputs"]["steps"], case["expected"]["steps"], strict=True):
        logprobs = single_tokens(given["chosen_log_probs"], given["rejected_log_probs"])
        ref = single_tokens(given["ref_chosen_log_probs"], given["ref_rejected_log_probs"])
        pairs, mask = len(given["chosen_log_probs"]), torch.tensor([[False, True]]).repeat(len(logprobs), 1)
        labels = [1] * pairs + [-1] * (len(logprobs) - pairs)
        credited = algorithm.advantages(rows(mask, logprobs, ref, labels, torch.arange(len(logprobs))), state)
        state = credited.state
        step = TrainingBatch(
            **vars(credited), loss_weights=algorithm.loss_weights(credited.loss_mask, credited.group_ids)
        )
        leaf = logprobs.clone().requires_grad_()
        result = algorithm.loss(ModelOutputs(logprobs=leaf), step)
        result.loss.backward()
        assert result.loss.item() == pytest.approx(expected["loss"], rel=1e-5)
        assert state["reference"] == pytest.approx(expected["delta"], rel=1e-5)
        wanted = numbers(expected["grad_chosen"] + expected["grad_rejected"])
        torch.testing.assert_close(leaf.grad[:, 1], wanted, rtol=1e-4, atol=1e-6)
