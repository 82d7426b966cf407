"""`atomrl explain`: what it prints is what the objective is, and each choice warns where it should."""

import re
from pathlib import Path
from types import new_class

import pytest

from atomrl.algorithms import ALGORITHMS, PREFERENCES, objective_of
from atomrl.algorithms.sft import SFT
from atomrl.cli.main import main
from atomrl.objectives import PolicyObjective, PreferenceObjective, Setting
from atomrl.objectives.choice import Choice, Custom
from atomrl.objectives.explain import atom_place, equation, latex, summary, table
from atomrl.objectives.overrides import choices_of

ROOT = Path(__file__).parents[2]
WITHOUT_EQUATION = {"none", "penalties"}
WITHOUT_ATOMS = ("mixed_outcomes", "bonus", "rollout")
CHOICES = [
    (kind, name)
    for objective in (PolicyObjective, PreferenceObjective)
    for field in objective.model_fields.values()
    for name, kind in choices_of(field.annotation).items()
    if not issubclass(kind, Custom)
]


def warnings(axes=None, **facts):
    objective = PolicyObjective().override(axes or {})
    return list(objective.warnings(Setting(axes=objective.axes, **facts)))


@pytest.mark.parametrize(("kind", "name"), CHOICES)
def test_every_choice_has_its_equation_and_its_atoms(kind, name):
    choice = kind()
    text, printed = choice.equation()
    assert summary(choice).endswith(".") and printed.count("{") == printed.count("}") and "Example" not in printed
    if name not in WITHOUT_EQUATION or "Clip" in kind.__name__:
        assert text and printed and (choice.atoms() or name in WITHOUT_ATOMS)
    for atom in choice.atoms():
        name, place, paper = atom_place(atom)
        path, _, line = place.partition(":")
        start = (ROOT / path).read_text().splitlines()[int(line) - 1 :]
        assert start[0].startswith(("@atom(", f"def {name}(")) and f"\ndef {name}(" in "\n".join(["", *start[:15]])
        assert not paper.endswith(".") and bool(paper) == ("Paper: " in atom.__doc__)


def test_a_choice_without_an_equation_cannot_be_defined():
    def half(rewards):
        return rewards / 2

    for fields in ({}, {"atom": staticmethod(half)}):
        with pytest.raises(TypeError, match="Half has no equation"):
            new_class("Half", (Choice,), {"type": "half"}, lambda body, fields=fields: body.update(fields))
    for fields in ({"text": "A_i = r_i / 2"}, {"text": ""}, {"atom": staticmethod(half), "text": "A_i = r_i / 2"}):
        kind = new_class("Half", (Choice,), {"type": "half"}, lambda body, fields=fields: body.update(fields))
        assert kind().equation().text == fields["text"]


def test_atoms_are_those_that_the_fields_leave_in_use():
    def names(**axes):
        (choice,) = axes
        return {atom.__name__ for atom in getattr(PolicyObjective().override(axes), choice).atoms()}

    assert names(advantage="gae") == {"reward_at_last_token", "gae", "masked_whiten"}
    assert names(advantage={"type": "gae", "whiten": False, "length_alpha": 0.1}) >= {"gae", "length_adaptive_lambda"}
    assert names(advantage="gpg") == {"group_mean_baseline", "group_std", "rescaled_by_share"}
    assert names(kl={"k2_gradient": True}) == {"k3_kl", "k2_gradient"} and names(kl="k1") == {"k1_kl"}
    assert names(token_filter={"type": "high_entropy", "tokens": 3}) == {"highest_entropy_tokens"}
    assert names(clip="dppo_tv") == {"probability_change", "trust_region_tokens", "reinforce_loss"}
    assert names(shaping={"lowest": 0.0}) == {"clipped_reward"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_equation_has_all_terms_that_are_in_use(name):
    objective = objective_of({"name": name, "kl": {"coefficient": 0.1}}).resolved(max_completion_tokens=32)
    text, printed, lines = equation(objective), latex(objective), table(objective)
    for axis in ("clip", "advantage", "distillation"):
        assert all(choice.text in text for choice in objective.used_axes()[axis])
    assert "KL_{i,t} = " in text and r"\beta" in printed
    assert printed.startswith("\\begin{aligned}") and printed.count(r"\Big[") == printed.count(r"\Big]")
    assert lines.count("atomrl/atoms/") >= 3
    assert "KL_{i,t}" not in equation(objective.override({"kl": {"coefficient": 0.0}}))


@pytest.mark.parametrize("name", PREFERENCES)
def test_the_same_explainer_reads_preferences(name):
    objective = PREFERENCES[name]
    text, printed = equation(objective), latex(objective)
    assert text.startswith("minimise  mean over ") and printed.startswith("\\begin{aligned}\n\\min_\\theta")
    for axis, choices in objective.used_axes().items():
        for choice in choices:
            assert choice.equation().text.removeprefix("L ") in text, axis
    assert all(axis in table(objective) for axis in ("score: ", "loss: "))


def test_a_combination_that_no_algorithm_is():
    axes = {
        "ratio": "sequence",
        "rollout_is": "icepop",
        "token_filter": {"type": "high_entropy", "tokens": 9},
        "kl": {"coefficient": 0.01},
        "clip": {"dual": 3},
        "shaping": {"mask_truncated": True, "highest": 1.0},
    }
    assert equation(PolicyObjective().override(axes)).splitlines() == [
        "maximise  sum_{i,t} w_{i,t} [ c_{i,t} s_{i,t} min(rho A, clip(rho, 1 - low, 1 + high) A) - beta KL_{i,t} ]",
        "where",
        "  w_{i,t} = 1 / sum_j |o_j|",
        "  s_{i,t} = [H_{i,t} >= quantile_{1 - fraction}(H)]",
        "  c_{i,t} = w [low <= w <= high],   w = pi_old(a_t) / mu(a_t)",
        "  rho_{i,t} = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)",
        "  A_i = (r_i - mean_group r) / (std_group r + eps)",
        "  KL_{i,t} = k3 = pi_ref / pi - 1 - log(pi_ref / pi)",
        "  r_i <- clip(r_i)",
        "  w_{i,t} = 0 where cut off",
        "  the minimum is at least dual A where A < 0",
    ]


def test_several_corrections_are_a_product():
    objective = PolicyObjective().override({"rollout_is": ["token_tis", {"type": "kl_rejection", "bound": 0.02}]})
    assert "  c_{i,t} = (min(pi_old(a_t) / mu(a_t), high)) * ([KL(mu, pi_old) <= bound])" in equation(objective)
    assert r"}, c\Big) \cdot \mathbb{1}[" in latex(objective)
    shown = table(objective)
    assert "rollout_is: token_tis (clamp=20.0, high=2.0," in shown and "rollout_is: kl_rejection (bound=0.02*," in shown
    assert "truncated_weights  atomrl" in shown and "k3_kl  atomrl" in shown
    assert "truncated_weights" not in table(objective.override({"rollout_is": []}))
    bounded = {"type": "kl_rejection", "low": -0.5, "estimator": "k1"}
    objective = PolicyObjective().override({"old_policy": "rollout", "rollout_is": bounded})
    assert "  c_{i,t} = [low <= KL(mu, pi) <= bound]" in equation(objective)
    assert "  pi_old = mu" in equation(objective)


CASES = {
    "length_bias": ({"loss_agg": "sequence_mean"}, {}),
    "std_normalisation": ({}, {}),
    "group_of_one": ({"advantage": "rloo"}, {"completions_per_prompt": 1}),
    "k_of_group": ({"advantage": "pass_at_k_analytic"}, {"completions_per_prompt": 4}),
    "group_never_mixed": ({"group_filter": "mixed_outcomes"}, {"completions_per_prompt": 1}),
    "zero_kl": ({"kl": {"target": 0.1}}, {}),
    "nothing_to_learn": ({"advantage": "none"}, {}),
    "kl_gradient": ({"kl": {"type": "k1", "coefficient": 0.1}}, {}),
    "truncated_sampling": ({"rollout_is": "token_tis"}, {"top_p": 0.9}),
    "clip_without_effect": ({"clip": "gmpo"}, {}),
    "reinforce_off_policy": ({"clip": "reinforce"}, {"updates_per_step": 4}),
    "unbounded_ratio": ({"clip": "none"}, {"updates_per_step": 2}),
    "unbounded_below": ({"clip": {"dual": 1.0}}, {}),
    "width_of_clip": ({"ratio": "sequence_token"}, {"updates_per_step": 2}),
    "mixed_levels": ({"ratio": "sequence", "rollout_is": "icepop"}, {}),
    "one_number_per_row": ({"ratio": "sequence"}, {}),
    "masked_penalty": ({"shaping": {"mask_truncated": True, "soft_overlong": True}}, {}),
    "selected_share": ({"token_filter": "random"}, {}),
    "one_part": ({"advantage": "gdpo"}, {}),
    "negative_mean": ({"advantage": "maxrl", "shaping": {"repetition_ngram_tokens": 3}}, {}),
    "greedy_sampling": ({}, {"temperature": 0.0}),
    "discounted_away": ({"advantage": {"type": "reinforce_pp", "gamma": 0.99}}, {"max_completion_tokens": 1000}),
    "critic_far_away": ({"advantage": "gae"}, {"max_completion_tokens": 100}),
    "value_without_critic": ({"value": {"clip": 0.5}}, {}),
    "untrained_critic": ({"advantage": "gae", "value": {"coefficient": 0.0}}, {}),
    "value_clip_without_effect": ({"advantage": "gae"}, {}),
    "entropy_explosion": ({"entropy": {"coefficient": 0.01}}, {}),
    "deviation_of_turns": ({"advantage": "gigpo"}, {}),
    "small_rewards_of_turns": ({"advantage": "turn_grpo"}, {}),
    "states_without_weight": ({"advantage": {"type": "gigpo", "omega": 0.0}}, {}),
    "other_turns_untrained": ({"advantage": {"type": "last_turn", "divide_by_std": False}}, {}),
    "squares_of_all_tokens": ({"advantage": "optimal_token_baseline"}, {"logprobs_over": "kept"}),
    "standardised_without_groups": ({"advantage": "raw", "group_filter": "mixed_outcomes"}, {}),
}
QUIET = {"advantage": "grpo_no_std"}
SAYS = {
    "length_bias": "a sequence mean weighs", "std_normalisation": "dividing by the group's std",
    "group_of_one": "one completion per prompt", "k_of_group": "every subset has the same best",
    "group_never_mixed": "groups of one are never mixed", "zero_kl": "kl.coefficient is 0",
    "nothing_to_learn": "ignores rewards", "kl_gradient": "k1 in the loss has a gradient of mean 0",
    "truncated_sampling": "top_p=0.9 truncates sampling", "clip_without_effect": "gmpo is plain REINFORCE",
    "reinforce_off_policy": "4 updates in a step without a ratio", "unbounded_ratio": "nothing bounds the ratio",
    "unbounded_below": "a dual clip of at most 1", "width_of_clip": "far below this clip range",
    "mixed_levels": "a weight per token on a ratio per",
    "one_number_per_row": "counts once per token", "masked_penalty": "only moves baselines",
    "selected_share": "still divided by all tokens", "one_part": "gdpo with one reward is grpo",
    "negative_mean": "maxrl divides by the mean", "greedy_sampling": "at temperature 0",
    "discounted_away": "with gamma=0.99", "critic_far_away": "with lam=0.95",
    "value_without_critic": "no critic uses", "untrained_critic": "value.coefficient is 0",
    "value_clip_without_effect": "never clipped", "entropy_explosion": "nothing bounds the bonus",
    "deviation_of_turns": "dividing by a group's std", "small_rewards_of_turns": "by the std over turns of",
    "states_without_weight": "with omega=0", "other_turns_untrained": "turns before the last are not trained",
    "squares_of_all_tokens": "squared probabilities are over the whole vocabulary",
    "standardised_without_groups": "groups that raw could learn from",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_warning_is_of_its_case_and_not_of_a_sound_objective(case):
    axes, facts = CASES[case]
    (message,) = [warning for warning in warnings(axes, **facts) if SAYS[case] in warning]
    assert re.match(r"(biased|unstable|no effect|partly without effect|note): ", message)


def test_every_warning_has_its_case():
    """As many `yield` of a message as there are in the choices of a policy objective."""
    files = [p for p in (ROOT / "atomrl/objectives").glob("*.py") if not re.search("preference|label", p.name)]
    messages = sum(len(re.findall(r"yield f?\"", path.read_text())) for path in files)
    # Two have tests of their own.
    assert messages == len(CASES) + 2, f"{messages} warnings in atomrl/objectives: add a case to CASES for each new one"


def test_a_sound_objective_has_nothing_against_it():
    assert warnings(QUIET, updates_per_step=4) == []


def test_log_probs_over_what_is_kept_are_not_biased():
    assert any("logprobs_over=kept" in warning for warning in warnings(QUIET, top_p=0.9))
    assert warnings(QUIET, updates_per_step=4, top_p=0.9, top_k=20, logprobs_over="kept") == []


def test_settings_of_a_distillation_that_is_off_do_nothing():
    assert warnings(QUIET | {"distillation": {"beta": 0.1}}, updates_per_step=4) == [
        "no effect: distillation.coefficient is 0, so other settings of distillation are ignored"
    ]


def test_a_narrow_clip_on_tokens_is_unstable():
    narrow = QUIET | {"clip": {"low": 3e-4, "high": 4e-4}}
    assert warnings(narrow, updates_per_step=2)[0].startswith("unstable: token ratios")


def test_explain_prints_equation_sources_and_warnings(capsys):
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


def test_configs_of_other_kinds_of_runs_print_their_own_loss(capsys):
    """`sft:` and `pretrain:` sections and reward models: not GRPO's equation."""
    for config, shown in (
        ("configs/quickstart_sft.yaml", "sft: minimise  mean over tokens of -log pi(y_t)\nwhere"),
        ("configs/pretrain_gpt2.yaml", "pretrain: minimise  mean over tokens"),
        ("configs/rlhf/reward_model.yaml", "reward_model: minimise  mean over pairs of"),
    ):
        assert main(["explain", str(ROOT / config)]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(shown) and "rho" not in printed, printed
    assert SFT.formulation().goals[0].verb.text == "minimise"
