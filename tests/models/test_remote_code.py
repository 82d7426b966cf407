"""A model with code of its own beside its weights: trained, saved, resumed, exported, and fetched from a hub."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from atomrl.cli.main import main
from atomrl.config import ConfigError
from atomrl.models import loading
from atomrl.models.loading import load_policy
from atomrl.models.transformers_model import HFModel
from tests.tiny import make_tiny_model

FILES = {
    "configuration_own.py": """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "modeling_own.py": """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
from .names_own import GREETING
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    greeting = GREETING
""",
    "names_own.py": "GREETING = 'hello'\n",
}
CONFIG = {
    "run_name": "own",
    "model": {"path": "own_base", "dtype": "float32", "trust_remote_code": True},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 4},
    "reward": {"functions": [{"function": "tests.light_rewards.letter_reward"}]},
    "train": {"steps": 1, "learning_rate": 1e-3},
    "checkpoint": {"every_steps": 1},
}


def make_own(folder):
    make_tiny_model(folder)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    named = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "own", "auto_map": named}))
    return folder


@pytest.fixture
def folder(working_directory):
    folder = working_directory(CONFIG, train=[{"prompt": f"{k}+1=", "ground_truth": str(k + 1)} for k in range(6)])
    make_own(folder / "own_base")
    return folder


def loaded(path):
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)


def test_what_a_run_writes_of_such_a_model_loads(folder):
    assert main(["train", "c.yaml"]) == 0
    shutil.rmtree(folder / "own_base")  # what was written needs nothing of it
    for place in ("checkpoints/step_000001", "model"):
        again = loaded(folder / "runs" / "own" / place)
        assert type(again).__name__ == "OwnForCausalLM" and again.greeting == "hello"
    assert main(["export", "runs/own/checkpoints/step_000001", "plain"]) == 0
    for theirs, ours in zip(loaded(folder / "plain").parameters(), again.parameters(), strict=True):
        assert torch.equal(theirs, ours)


def test_adapters_on_such_a_model_are_merged_where_its_code_is_trusted(folder, capsys):
    assert main(["train", "c.yaml", "model.lora={rank: 2, alpha: 4}"]) == 0
    checkpoint = "runs/own/checkpoints/step_000001"
    capsys.readouterr()
    assert main(["export", checkpoint, "merged"]) == 2
    assert "trust_remote_code" in capsys.readouterr().err
    assert main(["export", checkpoint, "merged", "--trust-remote-code"]) == 0
    weights = dict(loading.read_weights(checkpoint, trust_remote_code=True))
    merged = dict(loaded(folder / "merged").named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in merged.items() if name in weights)
    assert loaded(folder / "merged").greeting == "hello"
    with pytest.raises(ConfigError, match="trust_remote_code"):
        loading.read_weights(checkpoint)


def test_code_of_a_hub_model_is_fetched_with_it(tmp_path, monkeypatch):
    whole, snapshot = make_own(tmp_path / "whole"), tmp_path / "snapshot"

    def snapshot_download(name, revision, allow_patterns):
        snapshot.mkdir(exist_ok=True)
        for file in whole.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, snapshot)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_policy("someone/own", dtype="float32")
    policy = load_policy("someone/own", dtype="float32", trust_remote_code=True)
    assert isinstance(policy, HFModel) and policy.inner.greeting == "hello"
