"""FakeEngine implements the engine interface."""

import pytest
import torch

from atomrl.engines.fake import FakeEngine
from atomrl.engines.generation import generate, requests_of
from atomrl.engines.requests import RequestEngine
from atomrl.protocols import RolloutEngine, WeightUpdate
from atomrl.types import Problem, Prompt, SamplingParams
from tests.tiny import make_tiny_tokenizer


def prompt(name: str, *tokens: int) -> Prompt:
    return Prompt(prompt_id=name, problem=Problem(problem_id=name, prompt="", ground_truth=""), token_ids=tokens)


def make_engine(**options) -> FakeEngine:
    tokenizer = make_tiny_tokenizer()
    texts = ["ab", "abc", "abcd"]
    return FakeEngine(lambda tokens, index: tokenizer(texts[index]).input_ids, tokenizer, **options)


@pytest.mark.parametrize("method", ["_advance", "_make_rule", "weight_shapes", "update_weights", "weight_hashes"])
def test_an_engine_without_a_required_method_is_refused(method):
    methods = {name: getattr(FakeEngine, name) for name in RequestEngine.__abstractmethods__ - {method}}
    with pytest.raises(TypeError, match=method):
        type("Mine", (RequestEngine,), methods)(make_tiny_tokenizer())


def test_completions_are_the_scripted_ones():
    engine = make_engine()
    assert isinstance(engine, RolloutEngine)
    engine.update_weights(WeightUpdate(version=3, tensors=[("w", torch.zeros(1))]))
    trajectories = generate(
        engine, [prompt("a", 5, 6)], SamplingParams(completions_per_prompt=3, max_completion_tokens=3)
    )
    assert engine.updates == [(["w"], 3)]
    assert [(t.text, t.finish_reason) for t in trajectories] == [("ab", "stop"), ("abc", "stop"), ("abc", "length")]
    assert {t.segments[1].policy_version for t in trajectories} == {3}


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_trajectories_come_in_the_order_of_prompts_and_index(at_once):
    prompts = [prompt("b", 5), prompt("a", 6, 7)]
    trajectories = generate(make_engine(at_once=at_once), prompts, SamplingParams(completions_per_prompt=3))
    assert [t.trajectory_id for t in trajectories] == ["b/0", "b/1", "b/2", "a/0", "a/1", "a/2"]
    assert [t.prompt_tokens for t in trajectories] == [1, 1, 1, 2, 2, 2]


def test_generate_leaves_nothing_behind_when_it_fails():
    engine = make_engine()
    engine.pause()
    with pytest.raises(RuntimeError, match="paused or asleep"):
        generate(engine, [prompt("a", 5)], SamplingParams())
    engine.resume()
    assert engine.abort() == []
    engine.submit(requests_of(prompt("other", 5), SamplingParams()))
    with pytest.raises(RuntimeError, match=r"other/0.*submitted elsewhere"):
        generate(engine, [prompt("a", 5)], SamplingParams())


def test_an_engine_with_requests_does_not_sleep():
    engine = make_engine()
    engine.submit(requests_of(prompt("a", 5), SamplingParams()))
    with pytest.raises(RuntimeError, match="has 1 unfinished"):
        engine.sleep()
    engine.abort()
    engine.sleep()
    engine.submit(requests_of(prompt("a", 5), SamplingParams()))
    assert engine.poll() == []
    engine.wake()
    assert [output.request_id for output in engine.poll()] == ["a/0"]
