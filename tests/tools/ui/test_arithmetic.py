"""The arithmetic of a group is the one that its algorithm does, or is said not to be known."""

import json
from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import ALGORITHMS
from atomrl.atoms.advantages import group_zscore, leave_one_out_baseline
from atomrl.config.objective import objective_in
from atomrl.data.rows import to_rows, with_advantages
from atomrl.tools.ui.answers import advantages, answer, line_through
from atomrl.tools.ui.rollouts import arithmetic, prompt_text, trained_on
from atomrl.tracking.reading import Run
from atomrl.tracking.run_directory import rollout_rows
from atomrl.trainer.report.metrics import mean_advantages
from atomrl.types import Problem, Segment, Trajectory
from tests.tools.ui.made import make_run
from tests.tracking.helpers import make_config

REWARDS = [1.0, 0.0, 0.0, 0.5]


def test_grpo_s_own_advantages_are_explained():
    rewards, groups = torch.tensor(REWARDS), torch.zeros(4, dtype=torch.long)
    assert arithmetic(REWARDS, group_zscore(rewards, groups).tolist())["formula"] == "z"
    assert arithmetic(REWARDS, leave_one_out_baseline(rewards, groups).tolist())["formula"] == "others"


@pytest.mark.parametrize(
    ("advantages", "formula"),
    [
        ([0.625, -0.375, -0.375, 0.125], "centred"),
        ([0.8333, -0.5, -0.5, 0.1667], "others"),
        (REWARDS, "reward"),
        ([0.625, -0.375, -0.375, 0.2], None),
        ([None, -0.375, -0.375, 0.125], None),
    ],
)
def test_formulas_are_distinguished(advantages, formula):
    result = arithmetic(REWARDS, advantages)
    assert result["formula"] == formula and result["mean"] == 0.375


def test_rewards_that_are_the_same_deviate_by_nothing():
    formula = arithmetic([0.1, 0.1, 0.1], [0.0, 0.0, 0.0])  # of which numpy's deviation is 1.7e-17
    assert (formula["mean"], formula["std"]) == (0.1, 0.0)


def test_formulas_of_small_rewards_are_distinguished():
    assert arithmetic([8e-4, 0.0], [8e-4, -8e-4])["formula"] == "others"
    assert arithmetic([8e-4, 0.0], [4e-4, -4e-4])["formula"] == "centred"
    assert line_through([8e-4, 0.0, 4e-4], [4e-4, -4e-4, 3e-4]) == {}


def test_small_advantages_are_not_taken_for_others(tmp_path):
    items, config = drawn(False), make_config(tmp_path, algorithm={"name": "dr_grpo"})
    items = [replace(item, reward=item.reward * 1e-4, part_weights={"a": 2e-4, "b": 1e-4}) for item in items]
    recorded = mean_advantages(with_advantages(objective_in(config), to_rows(items)))
    lines = rollout_rows(1, items, recorded)
    assert "computed" in advantages(config, lines, [0, 1, 2, 3])
    twice = [line | {"advantage": 2 * line["advantage"]} for line in lines]
    assert "differ from the recorded" in advantages(config, twice, [0, 1, 2, 3])["why"]


def test_groups_without_rewards_or_with_one():
    assert arithmetic([None, None], [None, None]) == {"mean": None, "std": None, "formula": None}
    assert arithmetic([1.0], [0.0])["std"] == 0.0


def test_prompts_of_every_form():
    assert prompt_text([{"role": "user", "content": "hi"}]) == "user: hi\n"
    assert prompt_text(None) == "" and prompt_text(["a"]) == "['a']" and prompt_text("a") == "a"


UNKNOWN = {"ppo", "gkd", "on_policy_distillation", "trpo", "reinforce_pp", "a2c", "remax", "rloo"}
"""Algorithms whose advantages are made of what is not recorded of every completion: values, log-probs, a KL."""


def drawn(with_baseline: bool) -> list[Trajectory]:
    """Two groups of four, of different lengths and rewards of two parts, and one of which all earn the same."""
    made = []
    for group in range(3):
        problem = Problem(problem_id=f"s{group}", prompt="1+1=", ground_truth=2)
        for index in range(4):
            first, second = float(index < 2 or group == 2), 0.5 * (index % 2) * (group != 2)
            length = 2 + (group + 2 * index) % 5
            written = Segment(
                origin="model", token_ids=tuple(range(3, 3 + length)), logprobs=(-0.5,) * length, policy_version=0
            )
            made.append(
                Trajectory(
                    prompt_id=f"0:{group}", index=index, problem=problem, text="x", finish_reason="stop",
                    segments=(Segment(origin="prompt", token_ids=(1, 2)), written),
                    reward=2 * first + second, reward_parts={"a": first, "b": second},
                    part_weights={"a": 2.0, "b": 1.0}, baseline_reward=0.75 if with_baseline else None,
                )
            )  # fmt: skip
    return made


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_gives_the_advantages_again_that_it_recorded_or_says_why_not(tmp_path, name):
    functions = [{"function": "exact_match", "weight": 2.0}, {"function": "strict_math"}]
    config = make_config(tmp_path, algorithm={"name": name}, reward={"functions": functions})
    objective = objective_in(config)
    items = drawn(bool(objective.extra_rollouts))
    rows = to_rows(items)
    if name in UNKNOWN:
        recorded = dict.fromkeys(range(len(items)), 0.5)
    else:
        noise = {"old_logprobs": rows.rollout.logprobs, "old_entropy": rows.rollout.logprobs}
        recorded = mean_advantages(with_advantages(objective, replace(rows, **noise)))
    lines = json.loads(json.dumps(rollout_rows(1, items, recorded)))
    for group in (range(4), range(4, 8), range(8, 12)):
        told = advantages(config, lines, list(group))
        if name in UNKNOWN:
            words = "computes no advantages from rewards" if name == "gkd" else "not all recorded"
            assert words in told["why"] and "computed" not in told
            continue
        assert "why" not in told and "A" in told["equation"]
        expected = [lines[place]["advantage"] for place in group]
        assert told["computed"] == pytest.approx(expected, abs=1e-4)
        if "scale" in told:
            spelled = [(lines[place]["reward"] - told["baseline"]) / told["scale"] for place in group]
            assert spelled == pytest.approx(expected, abs=1e-3)
        else:
            assert name in {"gdpo", "pass_at_k"} or max(expected) - min(expected) < 1e-5


def test_the_baseline_and_the_scale_are_the_equation_s(tmp_path):
    items = drawn(True)
    for name, baseline, scale in (
        ("rloo", 1.25, 0.75),
        ("maxrl", 1.25, 1.25),
        ("dr_grpo", 1.25, 1.0),
        ("remax", 0.75, 1.0),
    ):
        config = make_config(tmp_path, algorithm={"name": name, "kl": {"coefficient": 0.0}})
        recorded = mean_advantages(with_advantages(objective_in(config), to_rows(items)))
        told = advantages(config, rollout_rows(1, items, recorded), [0, 1, 2, 3])
        assert (told["baseline"], told["scale"]) == pytest.approx((baseline, scale), abs=1e-4), name


def test_a_recorded_step_is_asked_about_whole(tmp_path):
    run = Run(make_run(tmp_path / "one", algorithm={"name": "reinforce_pp_baseline", "kl": {"coefficient": 0.0}}))
    step = trained_on(run.rollouts, 3, "train", 5)
    assert len(step["rows"]) == 8 and step["group"] == [4, 5, 6, 7]
    told = answer({"config": run.config, "step": step})
    assert "whiten_batch" in told["equation"] and "differ from the recorded" in told["why"]
    with pytest.raises(LookupError):
        trained_on(run.rollouts, 3, "train", 99)


def test_unknown_formulas_are_reported(tmp_path):
    items, config = drawn(False), make_config(tmp_path, algorithm={"name": "grpo"})
    lines = rollout_rows(1, items, dict.fromkeys(range(12), 0.5))
    assert "differ from the recorded" in advantages(config, lines, [0, 1, 2, 3])["why"]
    remax = make_config(tmp_path, algorithm={"name": "remax", "kl": {"coefficient": 0.0}})
    assert "greedy completions were not recorded" in advantages(remax, lines, [0])["why"]
    for reward, words in ((None, "differ from the recorded"), (0.0, "an episode's turns")):
        episode = [line | {"episode": {"turns": [{"reward": reward}]}} for line in lines]
        assert words in advantages(config, episode, [0])["why"]
