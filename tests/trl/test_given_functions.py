"""`atomrl.train` with functions of the script: they are what is trained by."""

import json

import pytest
import torch
import yaml

import atomrl
from atomrl.atoms.advantages import group_mean_baseline
from atomrl.config import ConfigError, load_config
from tests.tiny import make_tiny_model

CONFIG = {
    "run_name": "first",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 6},
    "train": {"steps": 2, "learning_rate": 1e-3},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1)} for k in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rollouts(folder, run="first"):
    text = (folder / "runs" / run / "rollouts" / "step_000001" / "train.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_reward_advantage_and_callbacks_of_a_script(folder):
    seen, calls = [], []

    def length(prompts, completions, **columns):
        return [len(text) / 10 for text in completions]

    def doubled(inputs):
        calls.append(inputs.rewards.shape)
        return 2 * group_mean_baseline(inputs.rewards, inputs.group_ids)

    atomrl.train("c.yaml", reward=length, advantage=doubled, callbacks=[lambda step, metrics: seen.append(step)])
    assert seen == [1, 2] and calls[-2:] == [torch.Size([4])] * 2
    rows = rollouts(folder)
    assert [row["reward"] for row in rows] == [pytest.approx(len(row["completion"]) / 10) for row in rows]
    first, second = rows[:2]
    assert first["advantage"] == pytest.approx(first["reward"] - second["reward"], abs=1e-6)  # twice half of it
    config = yaml.safe_load((folder / "runs/first/config.yaml").read_text())
    assert config["reward"]["functions"][0]["function"] == "length"
    assert config["algorithm"]["advantage"] == {
        "type": "custom",
        "function": "_given_:doubled",
        "args": {},
        "reads": [],
    }


def test_a_name_that_is_given_again_is_the_new_function(folder):
    for run, factor in (("one", 1.0), ("three", 3.0)):
        atomrl.train(
            "c.yaml",
            ["train.steps=1", f"run_name={run}"],
            reward=lambda prompts, completions, **columns: [float(len(text)) for text in completions],
            advantage=lambda inputs, factor=factor: factor * torch.ones_like(inputs.rewards),
        )
        assert {row["advantage"] for row in rollouts(folder, run)} == {factor}


def test_a_run_is_resumed_by_a_script_that_gives_them_again(folder):
    def reward(prompts, completions, **columns):
        return [float(len(text)) for text in completions]

    def advantage(inputs):
        return group_mean_baseline(inputs.rewards, inputs.group_ids)

    atomrl.train("c.yaml", ["train.steps=1"], reward=reward, advantage=advantage)
    steps = []
    again = {"reward": reward, "advantage": advantage, "callbacks": [lambda step, metrics: steps.append(step)]}
    atomrl.train("c.yaml", ["train.steps=2"], resume=True, **again)
    assert steps == [2]


def test_objectives_without_an_advantage_say_so(folder):
    with pytest.raises(ConfigError, match="preference run"):
        atomrl.train("c.yaml", ["algorithm={name: dpo}"], advantage=lambda inputs: inputs.rewards)
    with pytest.raises(ConfigError, match="takes"):
        atomrl.train("c.yaml", advantage=lambda: None, reward=lambda **columns: [])


def test_a_reward_and_an_advantage_by_their_paths(folder):
    (folder / "mine.py").write_text(
        "def length(prompts, completions, **columns):\n    return [len(text) / 10 for text in completions]\n"
        "def twice(inputs):\n    return 2 * inputs.rewards\n"
    )
    atomrl.train("c.yaml", ["train.steps=1"], reward="./mine.py:length", advantage="./mine.py:twice")
    for row in rollouts(folder):
        assert row["reward"] == pytest.approx(len(row["completion"]) / 10)
        assert row["advantage"] == pytest.approx(2 * row["reward"])


@pytest.mark.parametrize("make", [dict, load_config])
def test_overrides_of_a_config_that_is_no_file(folder, make):
    atomrl.train(
        make(CONFIG), ["train.steps=1", "run_name=other"], reward=lambda prompts, **columns: [1.0] * len(prompts)
    )
    assert len((folder / "runs/other/metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": 3}, "reward=3: must be a function"),
        ({"reward": "./nowhere.py:f"}, "no file ./nowhere.py"),
        ({"advantage": ["f"]}, "advantage=.*: must be a function"),
        ({"advantage": "./nowhere.py:f"}, "no file ./nowhere.py"),
        ({"rewards": len}, "rewards=.*: must be a dict"),
        ({"rewards": {"exact": 1}}, "rewards=.*: must be a dict"),
        ({"callbacks": ["x"]}, "callbacks=.*: must be a list"),
        ({"callbacks": 3}, "callbacks=3: must be a list"),
        ({"config": 3}, "config=3: give the path"),
    ],
)
def test_objects_that_are_not_functions_are_refused_before_loading(folder, given, message):
    with pytest.raises(ValueError, match=message):
        atomrl.train(**{"config": "c.yaml"} | given)
    assert not (folder / "runs").exists()
