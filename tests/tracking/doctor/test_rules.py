"""The rules: each on rows that are sick and on rows that are nearly so; on recorded runs; and on any rows at all."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomrl.config import known_keys
from atomrl.tracking.doctor import FIRST_ROWS, LAST_ROWS, RULES, Doctor, diagnose
from atomrl.tracking.doctor.quotes import quote
from tests.config_keys import config_keys

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs/guides/troubleshooting"
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))

HEALTHY = {
    "critic/score/mean": 0.4, "critic/score/min": 0.0, "critic/score/max": 1.0, "train/accuracy": 0.4,
    "reward/strict_math/mean": 0.4, "by_group/frac_mixed": 0.9, "by_group/frac_all_bad": 0.1,
    "reward/missing_ratio": 0.0,
    "response_length/mean": 20.0, "response_length/max": 40.0, "response_length/clip_ratio": 0.02,
    "response_length/ran_on_ratio": 0.0, "actor/entropy": 0.3, "actor/grad_norm": 0.2, "actor/lr": 1e-6,
    "actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0, "training/rollout_probs_diff_mean/staleness_0": 3e-7,
}  # fmt: skip


def rows(steps=20, **changes):
    """Healthy rows; a change is a value for all steps, or a function of the step. `_` in a name stands for `/`."""
    made = []
    for step in range(1, steps + 1):
        row = {"step": step} | HEALTHY
        for name, value in changes.items():
            new = value(step) if callable(value) else value
            row[NAMES[name]] = new
        made.append(row)
    return made


HACKED = {"critic_score_mean": lambda step: min(1.0, 0.2 + 0.05 * step)}
"""The reward rises."""
NAMES = {name.replace("/", "_").replace("@", "_"): name for name in HEALTHY} | {
    "correlation": "reward/length_correlation",
    "equally": "reward/length_correlation_equally_correct",
    "skipped": "actor/skipped_updates", "bonus": "reward/bonus/mean",
    "penalty": "reward/length_penalty/mean", "trained": "train/rows", "accepted": "rollout/groups_accepted",
    "low": "critic/advantages/min", "high": "critic/advantages/max", "identical": "by_group/frac_identical",
    "turns_cut": "environment/ended/turns", "failed": "environment/ended/failed",
    "searches": "environment/replies/search", "repeated": "text/repetition", "repeated_paid": "text/repetition_reward",
    "same": "text/same", "same_paid": "text/same_reward", "echoed": "text/echo", "echoed_paid": "text/echo_reward",
    "hedged": "text/hedge", "hedged_paid": "text/hedge_reward",
    "empty": "text/empty", "empty_paid": "text/empty_reward",
    "word": "text/word_correlation", "word_share": "text/word_share", "best_wrong": "text/best_wrong",
    "right": "text/right", "right_paid": "text/right_reward", "wrong_paid": "text/wrong_reward",
    "all_good": "by_group/frac_all_good",
    "replies": "environment/replies", "invalid": "environment/replies/invalid", "trained_replies": "train/reply_tokens",
    "timeouts": "reward/environment/timeouts",
    "gap": "training/rollout_probs_diff_mean/staleness_0", "stale_gap": "training/rollout_probs_diff_mean/staleness_1",
}  # fmt: skip


def late(before, after, start=8):
    return lambda step: before if step < start else after


SICK = {
    "skipped_updates": {"skipped": late(None, 1.0)},
    "reward_failures": {"reward_missing_ratio": late(0.0, 0.05)},
    "stale_weights": {"gap": lambda step: 3e-7 if step == 1 else 1e-3 * step},
    "rollout_gap": {"gap": 0.08},
    "learning_rate_too_high": {"actor_ppo_kl": late(0.0, 0.5)},
    "missing_stop_token": {"response_length_clip_ratio": 1.0, "response_length_ran_on_ratio": 0.8},
    "length_limit": {"response_length_clip_ratio": 0.3},
    "pays_for_length": {"equally": 0.95},
    "reward_without_accuracy": {
        "critic_score_mean": lambda step: 0.4 + 0.02 * step,
        "train_accuracy": lambda step: 0.4 - 0.01 * step,
    },
    "no_updates": {"trained": late(64.0, 0.0)},
    "constant_reward": {"critic_score_mean": 0.0, "critic_score_max": 0.0},
    "no_mixed_groups": {"by_group_frac_mixed": 0.0, "by_group_frac_all_bad": 0.6},
    "dead_reward_part": {"reward_strict_math_mean": 0.0, "bonus": 0.4},
    "entropy_collapse": {"actor_entropy": late(0.3, 0.01), "by_group_frac_mixed": late(0.9, 0.3)},
    "gradient_spikes": {"actor_grad_norm": lambda step: 9.0 if step == 15 else 0.2},
    "learns_nothing": {"critic_score_mean": late(0.098, 0.084, 11), "train_accuracy": late(0.098, 0.084, 11)},
    "replies_in_the_loss": {"trained_replies": 40.0, "replies": 1.5, "searches": late(1.4, 0.0)},
    "environment_failures": {
        "failed": late(0.0, 0.2),
        "timeouts": late(0.0, 9.0),
        "reward_missing_ratio": late(0.0, 0.2),
    },
    "repetition_is_paid": {**HACKED, "repeated": late(0.0, 0.4), "repeated_paid": 1.0},
    "echo_is_paid": {**HACKED, "echoed": late(0.0, 0.4), "echoed_paid": 1.0},
    "hedging_is_paid": {**HACKED, "hedged": late(0.0, 0.4), "hedged_paid": 1.0},
    "empty_answer_is_paid": {
        "critic_score_mean": -0.4,
        "critic_score_min": -1.0,
        "empty": late(0.0, 0.4),
        "empty_paid": 0.0,
    },
    "keyword_is_paid": {**HACKED, "word": 0.97, "word_share": late(0.1, 0.6), "best_wrong": 0.9},
    "wrong_answers_are_paid": {**HACKED, "right_paid": 0.5, "wrong_paid": lambda step: 0.5 + 0.05 * (step % 2)},
    "pays_for_shortness": {"correlation": -0.97, "train_accuracy": 0.3},
    "one_text_is_paid": {**HACKED, "same": late(0.1, 0.97), "same_paid": 1.0},
    "format_alone_is_paid": {
        "critic_score_mean": lambda step: min(0.2, 0.02 * step),
        "bonus": lambda step: min(0.2, 0.02 * step),
        "train_accuracy": 0.05,
    },
    "invalid_actions": {"replies": 2.0, "invalid": lambda step: 0.9 + 0.01 * step},
    "replies_die_out": {
        "replies": late(1.5, 0.1),
        "searches": lambda step: max(0.01, 1.4 - 0.12 * step),
        "train_accuracy": late(0.45, 0.3),
    },
}
MORE_SICK = [
    ("learns_nothing", {"critic_score_mean": late(-0.85, -0.9, 11), "critic_score_min": -1.0, "train_accuracy": None}),
    ("learning_rate_too_high", {"critic_score_mean": late(0.4, 0.05), "actor_entropy": late(0.3, 2.0)}),
    ("learning_rate_too_high", {"critic_score_mean": late(0.4, 0.0), "critic_score_max": late(1.0, 0.0),
                                "response_length_clip_ratio": late(0.0, 1.0)}),
    ("length_limit", {"response_length_clip_ratio": 0.4, "turns_cut": 0.38}),
    ("replies_die_out", {"replies": late(1.5, 0.1), "searches": late(1.4, None)}),
    ("learning_rate_too_high", {"actor_ppo_kl": 0.05, "actor_pg_clipfrac": 0.6}),
    ("pays_for_length", {"correlation": 0.999}),
    ("pays_for_length", {"correlation": 0.96, "equally": lambda step: 0.5 + 0.3 * (step % 2)}),
    ("pays_for_length", {"critic_score_mean": lambda step: 0.4 + 0.02 * step, "train_accuracy": 0.4,
                         "response_length_mean": lambda step: 20.0 + 2 * step}),
    ("pays_for_shortness", {"correlation": -0.97, "train_accuracy": None, "right": None}),
    ("pays_for_shortness", {"critic_score_mean": lambda step: 0.4 + 0.02 * step,
                            "response_length_mean": lambda step: 70 - 3 * step,
                            "train_accuracy": lambda step: 0.6 - 0.01 * step}),
    ("keyword_is_paid", {**HACKED, "word": 1.0, "word_share": 0.6, "best_wrong": None}),
    ("no_updates", {"accepted": 0.0, "critic_score_mean": 1.0, "critic_score_min": 1.0}),
    ("no_updates", {"low": 0.0, "high": 0.0, "by_group_frac_mixed": None, "by_group_frac_all_bad": None,
                    "actor_grad_norm": 0.0}),
    ("constant_reward", {"critic_score_mean": 1.0, "critic_score_min": 1.0}),
    ("no_mixed_groups", {"by_group_frac_mixed": 0.0, "by_group_frac_all_bad": 0.2}),
]  # fmt: skip
MORE_SICK += [
    ("repetition_is_paid", {**HACKED, "critic_score_min": late(0.0, 1.0, 12), "repeated": late(0.0, 1.0),
                            "repeated_paid": 1.0, "by_group_frac_mixed": late(0.5, 0.0, 12)}),
    ("no_mixed_groups", {"critic_score_mean": 0.98, "train_accuracy": 0.98, "by_group_frac_all_bad": 0.0,
                         "by_group_frac_mixed": lambda step: 0.05 * (step % 2), "all_good": 0.97}),
]  # fmt: skip
NEARLY = {
    "parts of a point, none of them a whole one, and longer texts": {
        **HACKED, "reward_strict_math_mean": lambda step: 0.2 + 0.01 * step, "train_accuracy": 0.0,
        "response_length_mean": lambda step: 20.0 + step,
    },
    "parts of a point, high from the start": {
        "critic_score_mean": 0.6, "reward_strict_math_mean": 0.6, "train_accuracy": 0.0
    },
    "a weak model that repeats itself, and is not paid": {"repeated": 0.6, "repeated_paid": 0.0},
    "an echo that is not paid": {"echoed": 0.6, "echoed_paid": 0.0},
    "some answers are empty, and cost what wrong ones cost": {"empty": 0.4, "empty_paid": 0.0},
    "a word of the form goes with right answers": {"word": 0.97, "word_share": 0.6, "best_wrong": 0.0},
    "a word of the form, where the truth cannot be compared": {"word": 0.95, "word_share": 0.6, "best_wrong": None},
    "right answers earn more, with points for the form beside": {"right_paid": 1.2, "wrong_paid": 0.2},
    "right answers in another form earn nothing yet": {"right_paid": 0.0, "wrong_paid": 0.0},
    "a cost of length where all are right": {"correlation": -0.99, "equally": -0.99, "train_accuracy": 0.98},
    "a cost of length that makes solutions shorter": {
        "critic_score_mean": lambda step: 0.4 + 0.01 * step, "response_length_mean": lambda step: 40.0 - step / 2,
        "train_accuracy": 0.6, "equally": -0.95, "correlation": -0.5},
    "form first, and chance is right more often in it": {
        "bonus": lambda step: min(1.0, 0.1 * step), "critic_score_mean": lambda step: min(0.8, 0.1 * step),
        "train_accuracy": lambda step: 0.02 * step},
    "a model that begins with one answer to all": {"same": lambda step: 0.95 - 0.01 * step, "same_paid": 0.4},
    "answers of one letter": {"same": 0.6, "same_paid": 0.5},
    "repetition that earns less than the others": {"repeated": 0.4, "repeated_paid": 0.1},
    "format and accuracy rise together": {"bonus": lambda step: min(0.2, 0.02 * step), "train_accuracy":
                                          lambda step: min(0.9, 0.1 + 0.02 * step),
                                          "critic_score_mean": lambda step: min(1.1, 0.1 + 0.04 * step)},
    "distillation learns without advantages": {"low": 0.0, "high": 0.0, "by_group_frac_mixed": None},
    "a good run that ends certain": {"critic_score_mean": lambda step: min(0.98, 0.4 + 0.04 * step),
                                     "train_accuracy": lambda step: min(0.98, 0.4 + 0.04 * step),
                                     "actor_entropy": lambda step: 0.3 * 0.8**step,
                                     "response_length_mean": lambda step: 20.0 + step},
    "a good run that thinks longer": {"critic_score_mean": lambda step: 0.4 + 0.02 * step,
                                      "train_accuracy": lambda step: 0.4 + 0.02 * step,
                                      "response_length_mean": lambda step: 20.0 + 2 * step},
    "a reward model's scores, on a scale of their own": {"critic_score_mean": lambda step: min(1.9, -0.5 + 0.25 * step),
                                                         "train_accuracy": lambda step: min(0.98, 0.4 + 0.05 * step),
                                                         "response_length_mean": lambda step: min(27, 12 + step)},
    "bfloat16": {"gap": lambda step: 0.008 + 0.0001 * step},
    "rollouts of older weights": {"stale_gap": late(None, 0.08, start=2)},
    "bounds that are made to act on most tokens": {"actor_pg_clipfrac": 0.75, "actor_ppo_kl": 0.0003},
    "right answers are longer": {"correlation": 0.95},
    "a form that takes some words is paid too": {"correlation": 0.8, "equally": 0.7},
    "advantages of 0 where rewards are equal": {"low": 0.0, "high": 0.0, "critic_score_max":
                                                lambda step: float(step % 2), "critic_score_min": 0.0},
    "some cut": {"response_length_clip_ratio": 0.1, "response_length_ran_on_ratio": 0.1},
    "some steps without mixed groups": {"by_group_frac_mixed": lambda step: 0.0 if step % 5 else 0.1},
    "one step of equal rewards": {"critic_score_max": lambda step: 0.0 if step == 9 else 1.0},
    "searches only where it must, and is better for it": {
        "replies": lambda step: max(0.1, 1.4 - 0.1 * step), "searches": lambda step: max(0.05, 1.4 - 0.1 * step),
        "train_accuracy": lambda step: min(0.98, 0.4 + 0.03 * step)},
    "invalid actions that are unlearned": {"replies": 2.0, "invalid": lambda step: 1.6 * 0.95**step, "failed": 0.0,
                                           "trained_replies": 0.0},
    "seldom asked at all": {"replies": 0.1, "searches": late(0.1, 0.0)},
    "noise": {"critic_score_mean": lambda step: 0.4 + 0.05 * (step * 7 % 5), "actor_grad_norm":
              lambda step: 0.1 + 0.3 * (step % 3)},
    "a penalty that nobody earns": {"penalty": 0.0},
    "a low accuracy that rises slowly": {"train_accuracy": lambda step: 0.05 + 0.002 * step,
                                         "critic_score_mean": lambda step: 0.05 + 0.002 * step},
    "a reward without accuracy, near its best from the start": {
        "critic_score_mean": 0.9, "train_accuracy": None, "right": None},
    "format first, accuracy later": {"reward_strict_math_mean": lambda step: 0.0 if step < 9 else 0.1, "bonus": 0.3},
}  # fmt: skip


def ids(given_rows):
    return [finding.id for finding in diagnose(given_rows)]


@pytest.mark.parametrize(("name", "changes"), [*SICK.items(), *MORE_SICK])
def test_a_bad_run_has_its_finding_and_no_other(name, changes):
    assert ids(rows(**changes)) == [name]


def test_at_temperature_0_problems_are_not_called_easy():
    [finding] = diagnose(rows(by_group_frac_mixed=0.0, by_group_frac_all_bad=0.2, identical=1.0))
    assert "identical" in finding.what and "easy" not in finding.what and "rollout.temperature=1" in finding.advice


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_at_temperature_0_one_reward_for_all_is_explained_by_it(reward):
    changes = {"critic_score_mean": reward, "critic_score_min": reward, "critic_score_max": reward}
    [finding] = diagnose(rows(**changes, by_group_frac_mixed=0.0, identical=1.0))
    assert finding.id == "constant_reward" and "identical" in finding.what and "temperature=1" in finding.advice
    [finding] = diagnose(rows(**changes, by_group_frac_mixed=0.0, identical=0.5))
    assert "identical" not in finding.what and "temperature" not in finding.advice


def test_at_temperature_0_no_accepted_group_is_explained_by_it():
    [finding] = diagnose(rows(accepted=0.0, identical=1.0))
    assert finding.id == "no_updates" and "identical" in finding.what and "temperature=1" in finding.advice


def test_a_limit_on_turns_is_not_called_one_on_tokens():
    [finding] = diagnose(rows(response_length_clip_ratio=0.4, turns_cut=0.38))
    assert finding.id == "length_limit" and "environment.max_turns" in finding.advice and "38%" in finding.what


def test_failures_of_an_environment_are_counted_by_kind():
    [finding] = diagnose(rows(**SICK["environment_failures"]))
    assert "20% of the episodes (timeouts 9)" in finding.what


def test_every_rule_is_tested():
    missing = {rule.id for rule in RULES} ^ set(SICK)
    assert not missing, f"SICK needs the metrics of a run for each rule, and no others: {sorted(missing)}"


@pytest.mark.parametrize("changes", [{}, *NEARLY.values()], ids=["healthy", *NEARLY])
def test_a_healthy_run_has_no_findings(changes):
    assert ids(rows(steps=40, **changes)) == []


HACKS = {"repetition_is_paid", "one_text_is_paid", "pays_for_length", "pays_for_shortness", "echo_is_paid",
         "keyword_is_paid", "hedging_is_paid", "empty_answer_is_paid", "format_alone_is_paid",
         "wrong_answers_are_paid"}  # fmt: skip
ILL = {
    "learning_rate_too_high",
    "constant_reward",
    "pays_for_length",
    "missing_stop_token",
    "length_limit",
    "stale_weights",
}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_runs_have_the_findings_that_they_should(path):
    """Runs of `benchmarks/doctor.py`: an illness is found alone and within 20 steps; a hack is found, and quoted; a
    good run hears nothing of one."""
    run = json.loads(path.read_text(encoding="utf-8"))
    columns, expected = run["metrics"], run["finding"]
    findings = ids([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    if expected is None:
        assert not set(findings) & {*HACKS, "reward_without_accuracy"}
    elif path.stem.startswith("ill"):
        assert findings == [expected] and max(columns["step"]) <= 20
    else:
        assert expected in findings and quote(expected, run["rollouts"]).startswith("reward ")


def test_a_recorded_run_that_learnt_has_no_finding_of_no_learning():
    """Two good runs of 20 steps end where they began, at chance; their accuracy falls as that of `SICK` does."""
    said = set()
    for path in RECORDED:
        columns = json.loads(path.read_text(encoding="utf-8"))["metrics"]
        if "learns_nothing" in ids(
            [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        ):
            said.add(path.stem)
    assert said == {"good-quickstart-seed-1", "good-quickstart-seed-2"}


def test_enough_runs_are_recorded():
    runs = {path.stem: json.loads(path.read_text(encoding="utf-8"))["finding"] for path in RECORDED}
    assert {rules for name, rules in runs.items() if name.startswith("ill")} == ILL
    assert {rules for name, rules in runs.items() if name.startswith("hacked")} == HACKS
    assert sum(name.startswith("good") for name in runs) >= 20
    assert sum(path.stat().st_size for path in RECORDED) < 400_000


VALUE = st.none() | st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, 1e-300])


@settings(max_examples=150)
@given(st.lists(st.dictionaries(st.sampled_from(sorted(NAMES.values())), VALUE), max_size=30))
def test_no_row_is_too_odd(metrics):
    """A run must not die of its doctor; and what it says does not depend on when it is asked."""
    given_rows = [{"step": step} | row for step, row in enumerate(metrics, start=1)]
    doctor = Doctor()
    said = [finding for row in given_rows for finding in doctor.observe(row)]
    assert said == doctor.findings == diagnose(given_rows)
    assert len({finding.id for finding in said}) == len(said)


def test_a_long_run_is_not_kept_whole_and_its_start_is_remembered():
    doctor, sizes = Doctor(), {}
    for row in rows(steps=1000, actor_entropy=late(0.3, 0.01, start=900), by_group_frac_mixed=0.3):
        doctor.observe(row)
        sizes[row["step"]] = len(pickle.dumps(doctor))
    assert sizes[800] < 1.05 * sizes[FIRST_ROWS + LAST_ROWS]
    assert [(finding.id, finding.step) for finding in doctor.findings] == [("entropy_collapse", 904)]


def test_evaluations_are_passed_over():
    mixed = [
        row for step in range(20) for row in (rows(1)[0] | {"step": step}, {"step": step, "val-core/a/acc/mean@1": 0})
    ]
    assert ids(mixed) == []


def test_every_rule_has_its_page_and_every_page_its_rule():
    pages, rules = {path.stem for path in PAGES.glob("*.md")} - {"README"}, {rule.id for rule in RULES}
    assert pages == rules, f"docs/guides/troubleshooting needs one page per rule: {sorted(pages ^ rules)}"
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    unlisted = sorted(rule.id for rule in RULES if f"]({rule.id}.md)" not in index)
    assert not unlisted, f"link from docs/guides/troubleshooting/README.md: {unlisted}"


def test_the_keys_that_are_advised_exist():
    texts = [finding.advice for changes in SICK.values() for finding in diagnose(rows(**changes))]
    assert all(texts)
    named = set().union(*map(config_keys, texts))
    assert len(named) > 10 and named <= set(known_keys()), f"advice names no keys: {named - set(known_keys())}"


@pytest.mark.parametrize("name", ["stale_weights", "rollout_gap"])
def test_a_gap_that_staleness_explains_is_no_fault(name):
    made, gap = rows(**SICK[name]), "training/rollout_probs_diff_mean/staleness_0"
    assert name in {finding.id for finding in diagnose(made)}
    stale = [{key.replace("staleness_0", "staleness_1"): value for key, value in row.items()} for row in made]
    assert name not in {finding.id for finding in diagnose(stale)}
    both = [row | {gap: 3e-7} for row in stale]
    assert name not in {finding.id for finding in diagnose(both)}
    seldom = [old if old["step"] % 3 else new for old, new in zip(stale, made, strict=True)]
    assert name in {finding.id for finding in diagnose([made[0], *seldom[1:]])}, "steps without such tokens are passed"


def test_a_gap_that_staleness_cannot_explain_is_found_where_all_tokens_are_stale():
    """Also where the first steps, which are long ago, had fresh ones; of the stale ones the freshest are judged."""
    name = "training/rollout_probs_diff_mean/staleness_"
    for first in (0, 4):
        gaps = [{f"{name}0": 3e-7} if step < first else {f"{name}1": 0.3, f"{name}2": 0.6} for step in range(40)]
        others = [{key: value for key, value in row.items() if not key.startswith(name)} for row in rows(40)]
        [finding] = diagnose([row | gap for row, gap in zip(others, gaps, strict=True)])
        assert finding.id == "rollout_gap" and "differ by 0.3 " in finding.what
