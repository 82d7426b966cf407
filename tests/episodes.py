"""Fixtures for the tests of engines and of environments: a tiny model, engines over it, and episodes on them."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

from atomrl.config import EnvironmentConfig
from atomrl.engines.episodes import EpisodeEngine
from atomrl.engines.generation import generate
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.requests import EngineOptions
from atomrl.types import Problem, Prompt, SamplingParams
from tests.tiny import make_tiny_model

ENGINES = {
    "native": NativeEngine.from_pretrained,
    "pytorch": partial(NativeEngine.from_pretrained, use_kernel=False),
    "hf": HFEngine.from_pretrained,
}
"""`pytorch` is the native engine as it is on a GPU: without the kernels for CPUs, which never move a row."""
SAMPLING = SamplingParams(completions_per_prompt=4, max_completion_tokens=96, seed=7)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("episodes") / "model"))


@pytest.fixture(scope="session")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def make_prompts(tokenizer, count: int = 6, bad: int = 0) -> list[Prompt]:
    names = [f"bad{index}" if index < bad else f"s{index}" for index in range(count)]
    return [
        Prompt(
            prompt_id=name,
            problem=Problem(problem_id=name, prompt=name, ground_truth=None),
            token_ids=tuple(tokenizer.encode(f"prompt number {index}")),
        )
        for index, name in enumerate(names)
    ]


@pytest.fixture
def played(folder, tokenizer):
    """Episodes of a function of `played.py`."""

    def play(function, engine="native", sampling=SAMPLING, prompts=None, by_rounds=False, concurrent=32, **settings):
        options = EngineOptions(settings.pop("dtype", torch.float32), "cpu", concurrent)
        made = ENGINES[engine](folder, tokenizer, options)
        if by_rounds:
            made.batch.retained.claim = lambda state: False
        settings = {"function": f"tests.environments.played.{function}", "max_turn_tokens": 12, **settings}
        with closing(EpisodeEngine(made, tokenizer, EnvironmentConfig(**settings))) as episodes:
            trajectories = generate(episodes, prompts or make_prompts(tokenizer), sampling)
            assert not episodes.held and not episodes.by_turn and not episodes.by_key
            if engine != "hf":
                assert not made.batch.groups and not made.batch.retained.slots and not made.held
            return trajectories

    return play
