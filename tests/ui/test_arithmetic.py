"""The arithmetic of a group is the one that its algorithm does, or is said not to be known."""

import pytest
import torch

from atomrl.atoms.advantages import group_zscore, leave_one_out_baseline
from atomrl.ui.rollouts import arithmetic, prompt_text

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
def test_formulas_are_told_apart(advantages, formula):
    found = arithmetic(REWARDS, advantages)
    assert found["formula"] == formula and found["mean"] == 0.375


def test_groups_without_rewards_or_with_one():
    assert arithmetic([None, None], [None, None]) == {"mean": None, "std": None, "formula": None}
    assert arithmetic([1.0], [0.0])["std"] == 0.0


def test_prompts_of_every_form():
    assert prompt_text([{"role": "user", "content": "hi"}]) == "user: hi\n"
    assert prompt_text(None) == "" and prompt_text(["a"]) == "['a']" and prompt_text("a") == "a"
