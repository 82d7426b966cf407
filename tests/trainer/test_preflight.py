"""Runs that could make no update are refused before they begin."""

import logging

import pytest

from atomrl.algorithms import objective_of
from atomrl.config import ConfigError, load_config
from atomrl.trainer.checks.data import check_group_size, check_row_limit, check_temperature

COMPARING = ("grpo", "dr_grpo", "dapo", "maxrl", "opo", "gpg")
NOT_COMPARING = ("ppo", "remax", "reinforce_pp", "a2c")


@pytest.mark.parametrize("name", COMPARING)
def test_groups_of_one_are_refused_where_completions_are_compared(name):
    algorithm = objective_of({"name": name}).resolved(max_completion_tokens=8)
    with pytest.raises(ConfigError, match=f"completions_per_prompt=1.*{name}"):
        check_group_size(algorithm, 1)
    check_group_size(algorithm, 2)


@pytest.mark.parametrize("name", NOT_COMPARING)
def test_groups_of_one_are_taken_where_nothing_is_compared(name):
    check_group_size(objective_of({"name": name}).resolved(max_completion_tokens=8), 1)


def test_prompts_that_fill_the_row(caplog):
    check_row_limit([5, 9], None)
    check_row_limit([5, 9], 10)
    with caplog.at_level(logging.WARNING):
        check_row_limit([5, 9], 9)
    assert "1 of 2 prompts are at least this long" in caplog.text
    with pytest.raises(ConfigError, match="max_row_tokens=5"):
        check_row_limit([5, 9], 5)


@pytest.mark.parametrize(("temperature", "completions", "heard"), [(0.0, 4, True), (0.0, 1, False), (0.1, 4, False)])
def test_groups_of_the_likeliest_completion_alone_are_said(temperature, completions, heard, caplog):
    rollout = {"temperature": temperature, "completions_per_prompt": completions, "prompts_per_step": 4}
    tree = {"run_name": "a", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "rollout": rollout}
    check_temperature(load_config(tree))
    assert ("rollout.temperature=0: all 4 completions of a prompt will be the same" in caplog.text) == heard
