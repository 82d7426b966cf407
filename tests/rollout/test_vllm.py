"""vLLM in this process: what it does to the process while it starts. (`tests/distributed` has the real one.)"""

import os
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from atomrl.rollout.requests import EngineOptions
from atomrl.rollout.vllm import VLLMEngine
from tests.tiny import make_tiny_model


@pytest.fixture
def vllm(monkeypatch):
    """A stand-in that seeds the process, as vLLM's worker does, and joins whatever group the environment tells of."""
    found = SimpleNamespace(environment=None)

    class LLMEngine:
        vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
        engine_core = SimpleNamespace(shutdown=lambda: None)

        @classmethod
        def from_engine_args(cls, arguments):
            found.environment = dict(os.environ)
            random.seed(0), np.random.seed(0), torch.manual_seed(0)
            return cls()

    made = {
        "vllm": {"EngineArgs": SimpleNamespace, "LLMEngine": LLMEngine},
        "vllm.config": {},
        "vllm.config.lora": {"MaxLoRARanks": Literal[8, 16]},
    }
    for name, content in made.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def states():
    return [str(random.getstate()), str(np.random.get_state()), str(torch.get_rng_state().tolist())]


def test_it_leaves_random_states_as_they_are_and_takes_no_launchers_place(tmp_path, monkeypatch, vllm):
    make_tiny_model(tmp_path)
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    tokenizer, before = AutoTokenizer.from_pretrained(tmp_path), states()
    engine = VLLMEngine.from_pretrained(str(tmp_path), tokenizer, EngineOptions(torch.float32, "cpu", 4))
    assert states() == before
    assert not given.keys() & vllm.environment.keys()
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    engine.close()
