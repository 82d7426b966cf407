"""Configs as a page has them are read as a command reads their files."""

import json

import pytest
import yaml

from atomrl.tools.ui.answers import answer, answer_line

OWN = "run_name: x\nmodel: {path: m}\ndata: {train: chain}\nseed: 1\n"
SIX = """
model_config: {model_name_or_path: m, use_lora: false}
generation_config: {group_size: 4}
train_config: {train_dataset: chain, rollout_batch_size: 32, n_grpo_steps: 7}
"""


def test_either_layout_is_read():
    for text, steps in ((OWN + "train: {steps: 3}\n", 3), (SIX, 7)):
        reply = answer({"yaml": text})
        assert reply["errors"] == [] and (reply["kind"], reply["steps"]) == ("rl", steps)


def test_six_sections_are_answered_in_the_own_layout():
    own = answer({"yaml": SIX})["own"]
    assert yaml.safe_load(own)["rollout"]["completions_per_prompt"] == 4
    assert answer({"yaml": own})["steps"] == 7 and "own" not in answer({"yaml": own})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN + "seed: 2\n", "duplicate key 'seed', in lines 4 and 5"),
        ("a: [1", "the config is not valid YAML"),
        ("- 1", "must be a mapping of sections"),
        (SIX.replace("group_size", "group_sise"), "group_size"),
    ],
)
def test_a_config_that_the_command_refuses_is_refused(text, message):
    assert message in "\n".join(answer({"yaml": text})["errors"])


def test_a_question_that_cannot_be_answered_is_answered_by_an_error():
    assert "cannot be read" in json.loads(answer_line("[]"))["errors"][0]
