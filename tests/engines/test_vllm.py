"""vLLM in process, with a stub that records calls. (`tests/distributed` runs the real one.)"""

import os
import random
import sys
from contextlib import closing
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from atomrl.config import ConfigError
from atomrl.engines import requests
from atomrl.engines.generation import requests_of
from atomrl.engines.requests import EngineOptions
from atomrl.engines.sglang import SGLangEngine
from atomrl.engines.vllm import VLLMEngine
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.models.loading import read_weights
from atomrl.protocols import Adapter, WeightUpdate
from atomrl.types import SamplingParams
from atomrl.weight_sync.files import ADAPTERS, WEIGHTS
from tests.prompts import prompts_of
from tests.tiny import make_tiny_model


@pytest.fixture
def vllm(monkeypatch):
    """A stand-in that seeds the process, as vLLM's worker does, joins whatever group the environment tells of, and
    records its calls."""
    recorded = SimpleNamespace(environment=None, arguments=None, calls=[], files=[])

    class LLMEngine:
        def __init__(self, arguments):
            self.engine_core = SimpleNamespace(shutdown=lambda: None)
            cut = arguments.tensor_parallel_size > 1
            self.vllm_config = SimpleNamespace(
                model_config=SimpleNamespace(
                    max_model_len=512, enable_sleep_mode=True, dtype=torch.float32, get_vocab_size=lambda: 102
                ),
                parallel_config=SimpleNamespace(distributed_executor_backend="mp" if cut else "uni"),
            )

        @classmethod
        def from_engine_args(cls, arguments):
            recorded.environment, recorded.arguments = dict(os.environ), vars(arguments)
            random.seed(0), np.random.seed(0), torch.manual_seed(0)
            return cls(arguments)

        def collective_rpc(self, method, args):
            recorded.calls.append(method)
            if isinstance(args[0], str):
                recorded.files.append(sorted(os.listdir(args[0])))

        def add_lora(self, request):
            recorded.calls.append("add_lora")
            recorded.files.append(sorted(os.listdir(request.path)))

        def sleep(self, level):
            recorded.calls.append(f"sleep {level}")

        def wake_up(self):
            recorded.calls.append("wake_up")

        def reset_prefix_cache(self, reset_running_requests):
            recorded.calls.append("reset_prefix_cache")

    def lora_request(name, number, path, load_inplace=False):
        return SimpleNamespace(path=path)

    fields = [
        ("model", str, "-"),
        ("swap_space", Any, 4),
        ("max_num_seqs", int, 256),
        ("enable_sleep_mode", bool, False),
    ]
    made = {
        "vllm": {"EngineArgs": SimpleNamespace, "LLMEngine": LLMEngine},
        "vllm.config": {},
        "vllm.config.lora": {"MaxLoRARanks": Literal[8, 16]},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": make_dataclass("EngineArgs", fields)},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": lora_request},
    }
    for name, content in made.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return recorded


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


@pytest.fixture
def start(tmp_path, vllm):
    make_tiny_model(tmp_path)

    def make(**options):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        return closing(
            VLLMEngine.from_pretrained(str(tmp_path), tokenizer, EngineOptions(torch.float32, "cpu", 4, **options))
        )

    return make


def test_new_weights_sleep_and_waking_are_vllms_own_in_the_order_of_a_step(start, vllm):
    """Adapters alone; its weights and cache are given back once, and nothing is drawn meanwhile."""
    with start(lora_rank=2) as engine:
        engine.submit(requests_of(prompts_of([5])[0], SamplingParams()))
        with pytest.raises(RuntimeError, match="has 1 unfinished"):
            engine.sleep()
        engine.held.clear(), engine.waiting.clear()
        engine.sleep()
        assert engine.poll() == []
        engine.wake()
        adapter = Adapter(torch.ones(2, 32), torch.ones(32, 2), 1.0)
        engine.update_weights(WeightUpdate(1, (), {"model.layers.0.self_attn.q_proj.weight": adapter}))
    assert vllm.calls == ["sleep 1", "wake_up", "add_lora", "reset_prefix_cache"]
    assert ADAPTERS in vllm.files[0] and WEIGHTS not in vllm.files[0]


def test_workers_in_other_processes_get_weights_as_files(start, vllm, tmp_path):
    with start(tensor_parallel=2) as engine:
        assert vllm.arguments["tensor_parallel_size"] == 2
        engine.update_weights(WeightUpdate(1, list(read_weights(tmp_path))))
    assert vllm.calls == ["load_published", "reset_prefix_cache"] and vllm.files == [[WEIGHTS]]


def test_further_arguments_reach_vllm_as_they_are(start, vllm):
    VLLMEngine.check_arguments({"swap_space": 8})
    with start(engine_args={"swap_space": 8, "enable_prefix_caching": False}):
        assert vllm.arguments["swap_space"] == 8 and vllm.arguments["enable_prefix_caching"] is False
    with start():
        assert vllm.arguments["enable_prefix_caching"] is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_seqs", "max_num_seqs: set rollout.max_concurrent_completions"),
        ("tensor_parallel_size", "tensor_parallel_size: set rollout.tensor_parallel"),
        ("enable_sleep_mode", "enable_sleep_mode: AtomRL sets it itself"),
        ("swap_spice", "swap_spice: .* has no argument .*did you mean 'swap_space'"),
    ],
)
def test_arguments_that_are_atomrls_or_nobodys_are_refused_by_name(vllm, name, message):
    for engine in (VLLMEngine, VLLMServerEngine):
        with pytest.raises(ConfigError, match=rf"rollout\.engine_args\.{message}"):
            engine.check_arguments({name: 1})


@pytest.mark.parametrize("engine", [VLLMEngine, VLLMServerEngine, SGLangEngine])
def test_every_argument_that_the_package_is_given_is_refused_in_engine_args(engine):
    """Those whose values a config decides elsewhere; what is left may be overridden."""
    with pytest.raises(ConfigError, match="engine_args"):
        engine.check_arguments({next(iter(engine.own_arguments)): 1})


@pytest.mark.parametrize(("version", "fits"), [("0.21.0", False), ("0.22.1", True), ("0.33.1.dev4+g1", True)])
def test_a_vllm_that_is_too_old_is_refused_at_start(start, monkeypatch, version, fits):
    monkeypatch.setattr(requests, "installed_version", lambda name: version if name == "vllm" else None)
    if fits:
        VLLMEngine.check_version()
        return
    with pytest.raises(ImportError, match=r"0\.21\.0 .*0\.22\.1"), start():
        pass


CUT = {"top_k": 5}, {"top_p": 0.5}, {"min_completion_tokens": 3}


@pytest.mark.parametrize("cut", CUT, ids=str)
def test_logprobs_over_the_vocabulary_are_to_be_had_at_temperature_1(start, vllm, cut):
    """vLLM takes them before anything is cut, and before the temperature."""
    sampling = SamplingParams(**cut)
    assert VLLMEngine.refusal(sampling) is None
    assert "temperature" in VLLMEngine.refusal(SamplingParams(**cut, temperature=0.7))
    with start(whole_logprobs=True) as engine:
        assert vllm.arguments["logprobs_mode"] == "raw_logprobs" and engine.refused(sampling) is None
        assert engine.refused(SamplingParams(temperature=0.7)) and engine.refused(
            SamplingParams(top_k=5, logprobs_over="kept")
        )
        assert engine.refused(SamplingParams(temperature=0.7, logprobs_over="none")) is None  # an evaluation
        assert engine.refused(SamplingParams(temperature=0)) is None  # a greedy baseline
    with start() as engine:
        assert vllm.arguments["logprobs_mode"] == "processed_logprobs" and engine.refused(sampling)
        assert engine.refused(SamplingParams(temperature=0.7)) is None
