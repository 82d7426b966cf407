"""`atomrl explain`: what it prints is what the objective is, and each rule speaks when it should."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from atomrl.algorithms.table import ALGORITHMS, objective_of
from atomrl.cli.main import main
from atomrl.objective import Objective, override, with_limit
from atomrl.objective.cautions import RULES, Facts, cautions
from atomrl.objective.explain import equation, in_use, latex, table, term

ROOT = Path(__file__).parents[2]
WITHOUT_EQUATION = {"all", "none", "optimizer", "penalties"}
CHOICES = [
    (item.name, kind)
    for item in fields(Objective)
    for kind in getattr(Objective(), item.name).kinds
]  # fmt: skip


@pytest.mark.parametrize(("axis", "kind"), CHOICES)
def test_every_choice_has_its_equation_and_its_atoms(axis, kind):
    found = term(override(Objective(), {axis: kind}).__getattribute__(axis))
    assert found.summary.endswith(".")
    if axis != "accept_group" and (kind not in WITHOUT_EQUATION or axis == "clip"):
        assert found.text and found.latex and found.atoms, found
    assert found.latex.count("{") == found.latex.count("}") and "Example" not in found.latex
    for atom in found.atoms:
        path, _, line = atom.place.partition(":")
        assert f"def {atom.name}(" in (ROOT / path).read_text().splitlines()[int(line) - 1]
        assert not atom.paper.endswith(("Dr", "et al", "("))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_equation_has_all_terms_that_are_in_use(name):
    objective = with_limit(objective_of(name, {"kl": {"coefficient": 0.1}}), 32)
    text, printed, lines = equation(objective), latex(objective), table(objective)
    for axis in ("clip", "advantage", "distillation"):
        assert not in_use(objective, axis) or term(getattr(objective, axis)).text in text
    assert "KL_{i,t} = " in text and r"\beta" in printed
    assert printed.startswith("\\begin{aligned}") and printed.count(r"\Big[") == printed.count(r"\Big]")
    assert lines.count("atomrl/atoms/") >= 3
    without = equation(override(objective, {"kl": {"coefficient": 0.0}}))
    assert "KL" not in without.replace("KL_binary", "").replace("KL(pi_before", "").replace(
        term(objective.distillation).text, ""
    )


def test_a_combination_that_no_algorithm_is():
    axes = {
        "ratio": "sequence",
        "correction": "icepop",
        "selection": {"type": "high_entropy", "tokens": 9},
        "kl": {"coefficient": 0.01},
        "clip": {"dual": 3},
        "shaping": {"mask_truncated": True, "highest": 1.0},
    }
    assert equation(override(Objective(), axes)).splitlines() == [
        "maximise  sum_{i,t} w_{i,t} [ c_{i,t} s_{i,t} min(rho A, clip(rho, 1 - low, 1 + high) A) - beta KL_{i,t} ]",
        "where",
        "  w_{i,t} = 1 / sum_j |o_j|",
        "  s_{i,t} = [H_{i,t} >= quantile_{1 - fraction}(H)]",
        "  c_{i,t} = w [low <= w <= high],   w = pi_old(a_t) / mu(a_t)",
        "  rho_{i,t} = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)",
        "  A_i = (r_i - mean_group r) / (std_group r + eps)",
        "  KL_{i,t} = k3 = pi_ref / pi - 1 - log(pi_ref / pi)",
        "  r_i <- clip(r_i)",
        "  the minimum is at least dual A where A < 0",
        "  w_{i,t} = 0 where cut off",
    ]


def test_several_corrections_are_a_product():
    objective = override(Objective(), {"correction": ["token_tis", {"type": "kl_rejection", "bound": 0.02}]})
    assert "  c_{i,t} = (min(pi_old(a_t) / mu(a_t), high)) * ([KL(mu, pi_old) <= bound])" in equation(objective)
    assert r"}, c\Big) \cdot \mathbb{1}[" in latex(objective)
    shown = table(objective)
    assert "correction: token_tis + kl_rejection (token_tis.high=2.0," in shown and "kl_rejection.bound=0.02*" in shown
    assert "truncated_weights  atomrl" in shown and "k3_kl  atomrl" in shown
    assert "truncated_weights" not in table(override(objective, {"correction": []}))


CASES = {
    "length_bias": ({"aggregate": "sequence_mean"}, {}),
    "std_normalisation": ({}, {}),
    "group_of_one": ({"advantage": "rloo"}, {"completions_per_prompt": 1}),
    "k_of_group": ({"advantage": "pass_at_k_analytic"}, {"completions_per_prompt": 4}),
    "group_never_mixed": ({"accept_group": "mixed_outcomes"}, {"completions_per_prompt": 1}),
    "zero_kl": ({"kl": {"target": 0.1}}, {}),
    "nothing_to_learn": ({"advantage": "none"}, {}),
    "kl_gradient": ({"kl": {"type": "k1", "coefficient": 0.1}}, {}),
    "truncated_sampling": ({"correction": "token_tis"}, {"top_p": 0.9}),
    "clip_without_effect": ({"clip": "gmpo"}, {}),
    "reinforce_off_policy": ({"clip": "reinforce"}, {"updates_per_step": 4}),
    "unbounded_ratio": ({"clip": "none"}, {"updates_per_step": 2}),
    "unbounded_below": ({"clip": {"dual": 1.0}}, {}),
    "width_of_clip": ({"ratio": "sequence_token"}, {"updates_per_step": 2}),
    "missing_rollout_logprobs": ({"correction": "token_tis"}, {"rollout_logprobs": False}),
    "mixed_levels": ({"ratio": "sequence", "correction": "icepop"}, {}),
    "one_number_per_row": ({"ratio": "sequence"}, {}),
    "masked_penalty": ({"shaping": {"mask_truncated": True, "soft_overlong": True}}, {}),
    "selected_share": ({"selection": "random"}, {}),
    "one_part": ({"advantage": "gdpo"}, {}),
    "negative_mean": ({"advantage": "maxrl", "shaping": {"repetition_ngram_tokens": 3}}, {}),
    "greedy_sampling": ({}, {"temperature": 0.0}),
    "discounted_away": ({"advantage": {"type": "reinforce_pp", "gamma": 0.99}}, {"max_completion_tokens": 1000}),
    "critic_far_away": ({"advantage": "gae"}, {"max_completion_tokens": 100}),
    "value_without_critic": ({"value": {"clip": 0.5}}, {}),
    "untrained_critic": ({"advantage": "gae", "value": {"coefficient": 0.0}}, {}),
    "value_clip_without_effect": ({"advantage": "gae"}, {}),
    "entropy_explosion": ({"entropy": {"coefficient": 0.01}}, {}),
    "standardised_without_groups": ({"advantage": "raw", "accept_group": "mixed_outcomes"}, {}),
}
QUIET = override(Objective(), {"advantage": "grpo_no_std"})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_speaks_of_its_case_and_not_of_a_sound_objective(rule):
    axes, facts = CASES[rule.__name__]
    message = rule(override(Objective(), axes), Facts(**facts))
    assert re.match(r"(biased|unstable|no effect|partly without effect|note|an error when it runs): ", message)
    assert rule(QUIET, Facts(updates_per_step=4)) is None


def test_a_sound_objective_has_nothing_against_it():
    assert cautions(QUIET, Facts(updates_per_step=4)) == []


def test_log_probs_over_what_is_kept_are_not_biased():
    assert any("logprobs_over=kept" in found for found in cautions(QUIET, Facts(top_p=0.9)))
    kept = Facts(updates_per_step=4, top_p=0.9, top_k=20, logprobs_over_kept=True)
    assert cautions(QUIET, kept) == []


def test_a_narrow_clip_on_tokens_is_unstable():
    narrow = override(QUIET, {"clip": {"low": 3e-4, "high": 4e-4}})
    assert cautions(narrow, Facts(updates_per_step=2))[0].startswith("unstable: token ratios")


def test_the_command(capsys):
    config = str(ROOT / "configs/algorithms/dapo.yaml")
    assert main(["explain", config, "algorithm.clip.high=0.5", "rollout.top_p=0.9"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("dapo: maximise  sum") and "high=0.5*" in shown and "overlong_buffer_tokens=8*" in shown
    assert "clipped_policy_loss  atomrl/atoms/policy_losses.py:" in shown and "! biased: top_p=0.9" in shown
    assert main(["explain", config, "rollout.top_p=0.9", "rollout.logprobs_over=kept"]) == 0
    assert "top_p=0.9" not in capsys.readouterr().out
    assert main(["explain", config, "--latex"]) == 0
    assert capsys.readouterr().out.startswith("\\begin{aligned}")
    assert main(["explain", config, "algorithm.clip.hgh=1"]) == 2
    assert "did you mean 'high'" in capsys.readouterr().err
