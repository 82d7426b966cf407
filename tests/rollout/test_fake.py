"""The scripted engine."""

import torch

from atomrl.protocols import RolloutEngine
from atomrl.rollout.fake import FakeEngine
from atomrl.stages import PromptBatch, Sample, SamplingParams
from tests.tiny import make_tiny_tokenizer


def test_completions_are_the_script():
    tokenizer = make_tiny_tokenizer()
    engine = FakeEngine(lambda prompt, index: tokenizer("abcdef").input_ids[: len(prompt) + index], tokenizer)
    assert isinstance(engine, RolloutEngine)
    prompts = PromptBatch(
        samples=(Sample(sample_id="a", prompt="", ground_truth=""),), prompt_ids=("a",), prompt_token_ids=((5, 6),)
    )
    engine.load_weights([("w", torch.zeros(1))], version=3)
    rollouts = engine.generate(prompts, SamplingParams(completions_per_prompt=3, max_completion_tokens=3))
    assert rollouts.policy_version == 3
    assert engine.loaded == [(["w"], 3)]
    assert [(c.text, c.finish_reason) for c in rollouts.completions[0]] == [
        ("ab", "stop"),
        ("abc", "stop"),
        ("abc", "length"),
    ]
