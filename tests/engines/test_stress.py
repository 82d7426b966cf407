"""Random requests, aborts, weight updates and sleeps: every completion is as if it had been generated alone."""

import random

import pytest
import torch
from transformers import AutoTokenizer

from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.native.step_ops import PlainOps
from atomrl.engines.requests import EngineOptions
from atomrl.engines.sampling import sample, sample_candidates
from atomrl.models.loading import load_policy, model_weights
from atomrl.protocols import WeightUpdate
from atomrl.types import GenerationRequest, SamplingParams
from tests.tiny import make_tiny_model

EOS = 2
HOW = {"kernel": {"use_kernel": True}, "slots": {"use_kernel": False}, "pages": {"ops": PlainOps()}}
SAMPLINGS = [
    SamplingParams(max_completion_tokens=1),
    SamplingParams(max_completion_tokens=70),
    SamplingParams(max_completion_tokens=40, temperature=0.7, top_p=0.8, min_completion_tokens=5),
    SamplingParams(max_completion_tokens=9, top_k=7, top_p=0.9, logprobs_over="kept", ignore_eos=True),
    SamplingParams(max_completion_tokens=100, top_k=9, logprobs_over="kept", stop_token_ids=(40,)),
    SamplingParams(max_completion_tokens=60, stop=("a", "}*"), min_completion_tokens=3),
    SamplingParams(max_completion_tokens=35, temperature=0),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two sets of weights of one shape: folder, the trainer's own model."""
    folders = [make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", seed=seed, scale=0.2) for seed in (1, 2)]
    return [(folder, load_policy(folder, dtype="float32", trainable=False)) for folder in folders]


class Caller:
    """Does something at random, and keeps what was asked and what came."""

    def __init__(self, engine, models, random):
        self.engine, self.models, self.random = engine, models, random
        self.requests, self.outputs, self.groups, self.number, self.version = {}, {}, {}, 0, 0

    def submit(self):
        new = []
        for _ in range(self.random.randint(1, 3)):
            # Ids of groups come again, while they are held and after they have ended.
            group = f"g{self.random.randint(0, 5)}"
            held = [state.request for state in self.engine.held.values() if state.request.group_id == group]
            held += [request for request in new if request.group_id == group]
            size = self.random.choice((1, 3, 31, 32, 33, self.random.randint(1, 70)))
            prompt = held[0].prompt_token_ids if held else tuple(self.random.choices(range(5, 102), k=size))
            sampling = self.random.choice(SAMPLINGS)
            for _ in range(self.random.randint(1, 6)):
                self.number += 1
                seed = self.random.randrange(2**62)
                new.append(
                    GenerationRequest(
                        request_id=f"r{self.number}",
                        group_id=group,
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        seed=seed,
                    )
                )
        self.requests |= {request.request_id: request for request in new}
        self.engine.submit(new)

    def keep(self, outputs):
        for output in outputs:
            assert output.request_id not in self.outputs
            self.outputs[output.request_id] = output

    def poll(self):
        held = len(self.engine.held)
        outputs = self.engine.poll()
        assert bool(outputs) == bool(held)
        self.keep(outputs)

    def abort(self):
        names = self.random.sample(list(self.engine.held), self.random.randint(0, len(self.engine.held)))
        self.keep(self.engine.abort([*names, "unknown"]))

    def update(self):
        self.version += 1
        model = self.models[self.version % 2][1]
        self.engine.update_weights(WeightUpdate(self.version, list(model_weights(model))))

    def sleep(self):
        if not self.engine.held:
            self.engine.sleep()
            assert not self.engine.poll()
            self.engine.wake()

    def act(self):
        actions = (self.submit, self.poll, self.abort, self.update, self.sleep)
        self.random.choices(actions, (4, 8, 2, 1, 1))[0]()


@torch.no_grad()
def check(models, tokenizer, request, output):
    """How many tokens of a completion were drawn, and how many are other than when it is drawn alone."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    drawn = [token for segment in output.segments for token in segment.token_ids]
    whole, other, start = torch.tensor([[*prompt, *drawn]]), 0, 0
    versions = [segment.policy_version for segment in output.segments]
    assert versions == sorted(set(versions))
    for segment in output.segments:
        assert segment.token_ids
        size = len(segment.token_ids)
        logits = models[segment.policy_version % 2][1](whole)[0, len(prompt) + start - 1 :][:size]
        positions = torch.arange(start, start + size)
        banned = torch.zeros_like(logits, dtype=torch.bool)
        banned[: max(0, sampling.min_completion_tokens - start), list(stop_tokens(sampling))] = True
        seeds = torch.full((size,), request.seed)
        if sampling.logprobs_over == "kept":
            tokens, logprobs, candidates = sample_candidates(logits, sampling, seeds, positions, banned)
            assert segment.candidates is not None
            assert len(segment.candidates.ids) == int(segment.candidates.counts.sum())
            parts = [ragged.ids.split(ragged.counts.tolist()) for ragged in (candidates, segment.candidates)]
            other += sum(set(a.tolist()) != set(b.tolist()) for a, b in zip(*parts, strict=True))
        else:
            assert segment.candidates is None
            tokens, logprobs = sample(logits, sampling, seeds, positions, banned)
        same = tokens == torch.tensor(segment.token_ids)
        other += int((~same).sum())
        assert torch.allclose(logprobs[same], torch.tensor(segment.logprobs)[same], atol=1e-3)
        start += size
    assert output.finish_reason == "abort" or start == ended_at(sampling, drawn, tokenizer, output.finish_reason)
    if output.finish_reason == "abort":
        assert start < sampling.max_completion_tokens
    return len(drawn), other


def stop_tokens(sampling):
    return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}


def ended_at(sampling, drawn, tokenizer, reason):
    """After how many tokens the completion has to end."""
    stops, text = stop_tokens(sampling), ""
    for count, token in enumerate(drawn, 1):
        before, text = len(text), text + tokenizer.decode([token])
        completed = any(text.rfind(stop) + len(stop) > before for stop in sampling.stop if stop in text)
        if count >= sampling.min_completion_tokens and (token in stops or completed):
            assert reason == "stop"
            return count
    assert reason == "length"
    return sampling.max_completion_tokens


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_completion_is_as_if_drawn_alone(models, how, seed):
    chance, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(models[0][0])
    engine = NativeEngine.from_pretrained(
        str(models[0][0]), tokenizer, EngineOptions(torch.float32, "cpu", chance.choice((1, 2, 5, 9, 40))),
        **HOW[how],
    )  # fmt: skip
    engine.batch.check_every = chance.choice((1, 8))
    caller = Caller(engine, models, chance)
    for _ in range(60):
        caller.act()
    while engine.held:
        caller.poll()
    assert caller.outputs.keys() == caller.requests.keys()
    assert not engine.batch.groups and not engine.batch.rows and not engine.waiting
    checks = [check(models, tokenizer, caller.requests[name], output) for name, output in caller.outputs.items()]
    drawn, other = (sum(column) for column in zip(*checks, strict=True))
    assert drawn > 400
    assert other <= drawn / 1000  # a rounding that lies between two tokens, or between two sets of candidates
