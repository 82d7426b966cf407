"""Episodes: exact tokens, masks, rewards, ends; forced tokens and rounds; and what a trainer makes of them."""

import math
import random
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from atomrl.config import DataConfig, EnvironmentConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.rows import to_rows
from atomrl.engines.episodes import EpisodeEngine
from atomrl.engines.generation import generate
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.requests import EngineOptions
from atomrl.types import Problem, SamplingParams, Segment
from tests.data.templates import family_tokenizer
from tests.episodes import SAMPLING, make_prompts
from tests.tiny import make_tiny_model


def tokens_by_origin(trajectory, origin):
    return [segment.token_ids for segment in trajectory.segments if segment.origin == origin]


def test_an_episode_is_what_was_sampled_and_what_was_answered(played, tokenizer):
    trajectories = played("echo")
    assert len(trajectories) == 24 and {item.finish_reason for item in trajectories} == {"environment"}
    for item in trajectories:
        episode = item.episode
        assert episode.ended == "environment" and episode.outcome == 3.0 and len(episode.turns) == 4
        assert all(turn.labels == ("echo",) and turn.reward == 0.5 for turn in episode.turns[:3])
        assert episode.turns[3].reply_tokens == 0 and episode.turns[3].reward is None
        replies = tokens_by_origin(item, "environment")
        assert [len(reply) for reply in replies] == [turn.reply_tokens for turn in episode.turns[:3]]
        for reply in replies:
            assert tuple(tokenizer.encode(tokenizer.decode(reply), add_special_tokens=False)) == reply
        origins = [segment.origin for segment in item.segments]
        assert origins == ["prompt"] + ["model", "environment"] * 3 + ["model"]
        places = [place for place, _ in item.token_rewards]
        ends, at = [], 0
        for segment in item.segments:
            at += len(segment.token_ids)
            ends.append(at - 1)
        assert places == [ends[1], ends[3], ends[5]] and {reward for _, reward in item.token_rewards} == {0.5}
        own = [part[:-1] if part[-1] == tokenizer.eos_token_id else part for part in tokens_by_origin(item, "model")]
        assert item.text == "".join(tokenizer.decode(part) for part in own), "with special tokens, but for the end"
    assert len({item.token_ids for item in trajectories}) > 12, "seeds make no difference"


@pytest.mark.parametrize("function, settings", [
    ("echo", {}), ("opening", {}), ("silent", {}), ("waiting", {}), ("Steps", {}), ("cut_short", {"max_turns": 5}),
])  # fmt: skip
@pytest.mark.parametrize("engine", ["native", "pytorch"])
def test_tokens_fed_to_the_cache_and_rounds_are_the_same(played, function, settings, engine):
    fed, rounds, again = (
        played(function, engine, by_rounds=by_rounds, **settings) for by_rounds in (False, True, False)
    )
    assert [item.token_ids for item in fed] == [item.token_ids for item in rounds]
    for one, other in zip(fed, rounds, strict=True):
        for mine, theirs in zip(one.segments, other.segments, strict=True):
            # Batches depend on the speed of environments, and change rounding: 8e-6 on a quiet machine.
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-5) if mine.logprobs else not theirs.logprobs
    assert [(item.token_ids, item.text) for item in fed] == [(item.token_ids, item.text) for item in again]


def test_the_same_tokens_from_transformers(played):
    ours, theirs = played("echo"), played("echo", engine="hf")
    same = sum(one.token_ids == other.token_ids for one, other in zip(ours, theirs, strict=True))
    assert same >= 23  # a draw may fall between two roundings


def test_how_many_share_the_batch_changes_nothing(played):
    many, few = played("echo"), played("echo", concurrent=3)
    assert [item.token_ids for item in many] == [item.token_ids for item in few]


def test_logprobs_are_the_trainers(played, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for item in played("echo")[:12]:
        tokens = torch.tensor([item.token_ids])
        with torch.no_grad():
            logprobs = model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        at = 0
        for segment in item.segments:
            places = range(at, at + len(segment.token_ids))
            at += len(segment.token_ids)
            if (
                segment.origin == "model"
            ):  # within float32's rounding, which depends on what shares a batch: up to 1.02e-5
                assert segment.logprobs == pytest.approx([logprobs[place - 1].item() for place in places], abs=1.5e-5)


@pytest.mark.parametrize("engine", ["native", "pytorch"])
def test_in_bfloat16_replies_that_are_fed_are_as_near_to_exact_as_rounds(played, folder, engine):
    """Log-probs of the two differ by up to 0.1 and more: each rounds in its own way. So each is measured against exact
    sums with the weights as bfloat16 has them, and beside what transformers' forward pass rounds."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for _ in range(2)]
    exact, rounded = models[0].double(), models[1]
    errors = {}
    for by_rounds in (False, True):
        settings = {"args": {"turns": 6}, "max_turns": 8, "sampling": replace(SAMPLING, max_completion_tokens=150)}
        rows = to_rows([
            replace(item, reward=0.0)
            for item in played("echo", engine, by_rounds=by_rounds, dtype=torch.bfloat16, **settings)
        ])  # fmt: skip
        with torch.no_grad():
            true, theirs = (
                model(rows.tokens).logits[:, :-1].double().log_softmax(-1).gather(2, rows.tokens[:, 1:, None])[:, :, 0]
                for model in (exact, rounded)
            )
        mask = rows.loss_mask[:, 1:]
        for name, logprobs in ((f"rounds={by_rounds}", rows.rollout.logprobs[:, 1:]), ("transformers", theirs)):
            errors[name] = (logprobs - true)[mask].square().mean().sqrt().item()
    assert errors["rounds=False"] < 1.3 * errors["rounds=True"], errors
    assert max(errors["rounds=False"], errors["rounds=True"]) < 1.25 * errors["transformers"] < 0.1, errors


def test_only_the_models_tokens_are_trained(played):
    trajectories = [replace(item, reward=float(index)) for index, item in enumerate(played("echo"))]
    rows = to_rows(trajectories)
    for row, item in enumerate(trajectories):
        origins = [segment.origin for segment in item.segments for _ in segment.token_ids]
        assert rows.loss_mask[row, : len(origins)].tolist() == [origin == "model" for origin in origins]
        assert rows.rollout.token_rewards[row].nonzero()[:, 0].tolist() == [place for place, _ in item.token_rewards]
    assert not rows.truncated.any()


def test_episodes_end_at_their_limits(played):
    turns = played("cut_short", max_turns=3)
    assert {(t.finish_reason, t.episode.ended, t.episode.outcome, len(t.episode.turns)) for t in turns} == {
        ("length", "turns", 0.75, 3)
    }
    assert all(turn.episode.turns[-1].reply_tokens == 0 for turn in turns)
    full = played("echo", sampling=replace(SAMPLING, max_completion_tokens=20))
    assert {(t.finish_reason, t.episode.ended, t.episode.outcome) for t in full} <= {
        ("length", "length", 0.0), ("environment", "environment", 3.0)
    }  # fmt: skip
    assert any(t.episode.ended == "length" for t in full) and all(t.response_tokens <= 20 for t in full)
    assert to_rows([replace(t, reward=0.0) for t in turns]).truncated.all()


def test_a_long_reply_is_cut(played):
    trajectories = played("echo", max_reply_tokens=2)
    assert {len(part) for item in trajectories for part in tokens_by_origin(item, "environment")} <= {1, 2}


def test_an_environment_may_begin(played, tokenizer):
    for item in played("opening"):
        assert item.segments[1] == Segment(origin="environment", token_ids=tuple(tokenizer.encode("go!")))
        assert item.episode.opening_tokens == 3 and item.segments[2].origin == "model"


def test_a_turn_ends_with_a_stop_string_which_is_read_and_kept(played, tokenizer):
    endless = replace(SAMPLING, max_completion_tokens=400, ignore_eos=True)
    trajectories = played("echo", stop=("#", "%"), max_turn_tokens=60, sampling=endless)
    parts = [tokenizer.decode(part) for item in trajectories for part in tokens_by_origin(item, "model")]
    stopped = [part for part in parts if part.endswith(("#", "%"))]
    assert len(stopped) > len(parts) / 2
    assert all(part.count("#") + part.count("%") == (part in stopped) for part in parts)


def test_roles_are_written_as_the_template_writes_them(played, tokenizer):
    trajectories = played("chatting", sampling=replace(SAMPLING, max_completion_tokens=200))
    for item in trajectories:
        replies = tokens_by_origin(item, "environment")
        wanted = tuple(tokenizer.encode("<|user|>Go on, please.<|assistant|>"))
        assert replies and all(reply == wanted for reply in replies)


def test_new_weights_come_between_two_turns(folder, tokenizer, monkeypatch):
    from contextlib import closing

    from atomrl.config import EnvironmentConfig
    from atomrl.engines.episodes import EpisodeEngine
    from atomrl.engines.generation import requests_of
    from atomrl.engines.native.engine import NativeEngine
    from atomrl.engines.requests import EngineOptions
    from atomrl.models.loading import read_weights
    from atomrl.protocols import WeightUpdate

    made = NativeEngine.from_pretrained(folder, tokenizer, EngineOptions(torch.float32, "cpu", 32))
    weights = {name: tensor for name, tensor in read_weights(folder) if name in made.weight_shapes()}
    settings = EnvironmentConfig(function="tests.environments.played.echo", max_turn_tokens=12)
    outputs, turns, poll = [], [], made.poll
    monkeypatch.setattr(made, "poll", lambda wait_s: turns.extend(outputs := poll(wait_s)) or outputs)
    with closing(EpisodeEngine(made, tokenizer, settings)) as episodes:
        for prompt in make_prompts(tokenizer):
            episodes.submit(requests_of(prompt, SAMPLING))
        while len(outputs) < 24:
            outputs += episodes.poll(0.0)
            if episodes.version < 6 and len(turns) >= 12:  # so that some turns end with each version
                turns.clear()
                update = {name: tensor * (1 + 0.01 * (episodes.version + 1)) for name, tensor in weights.items()}
                episodes.update_weights(WeightUpdate(version=episodes.version + 1, tensors=list(update.items())))
        assert not made.batch.groups and not made.batch.retained.slots
    by_name = {prompt.prompt_id: prompt for prompt in make_prompts(tokenizer)}
    seen = set()
    for output in outputs:
        row = list(by_name[output.request_id.partition("/")[0]].token_ids)
        for segment in output.segments:
            if segment.origin == "model":
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter *= 1 + 0.01 * segment.policy_version
                    tokens = torch.tensor([row + list(segment.token_ids)])
                    logprobs = model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
                wanted = logprobs[len(row) - 1 :].tolist()
                assert segment.logprobs == pytest.approx(wanted, abs=5e-5)
                seen.add(segment.policy_version)
            row += segment.token_ids
    assert len(seen) > 2


def test_episodes_are_given_up_at_any_time(folder, tokenizer):
    from contextlib import closing

    from atomrl.config import EnvironmentConfig
    from atomrl.engines.episodes import EpisodeEngine
    from atomrl.engines.generation import requests_of
    from atomrl.engines.native.engine import NativeEngine
    from atomrl.engines.requests import EngineOptions

    made = NativeEngine.from_pretrained(folder, tokenizer, EngineOptions(torch.float32, "cpu", 8))
    settings = EnvironmentConfig(function="tests.environments.played.echo", max_turn_tokens=12, args={"turns": 6})
    rng = random.Random(5)
    with closing(EpisodeEngine(made, tokenizer, settings)) as episodes:
        for round_ in range(20):
            names = []
            for prompt in make_prompts(tokenizer):
                prompt = replace(prompt, prompt_id=f"{prompt.prompt_id}-{round_}")
                requests = requests_of(prompt, replace(SAMPLING, max_completion_tokens=200))
                names += [request.request_id for request in requests]
                episodes.submit(requests)
            done = {output.request_id for output in episodes.poll(rng.random() * 0.05)}
            chosen = rng.sample(names, 12)
            given_up = episodes.abort(chosen)
            assert {output.request_id for output in given_up} == set(chosen) - done
            assert all(output.episode.ended == "abort" for output in given_up)
            while len(done) < len(names) - len(given_up):
                done |= {output.request_id for output in episodes.poll()}
            assert not made.batch.groups and not made.batch.retained.slots and not episodes.pool.episodes
        assert math.isfinite(sum(made.batch.cache.values[0].sum(dtype=torch.float64)[None]))


def test_a_thought_that_the_template_opens_is_of_the_turn_in_every_turn(tmp_path):
    tokenizer = family_tokenizer("qwen3-thinking")
    folder = make_tiny_model(tmp_path, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    engine = NativeEngine.from_pretrained(str(folder), tokenizer, EngineOptions(torch.float32, "cpu", 4))
    settings = EnvironmentConfig(function="tests.environments.played.chatting", max_turn_tokens=5)
    problem = Problem(problem_id="a", prompt="2+2=", ground_truth="4")
    prompts = DataProcessor(tokenizer, DataConfig(train="-")).to_prompts([("a", problem)])
    with closing(EpisodeEngine(engine, tokenizer, settings)) as episodes:
        (item,) = generate(episodes, prompts, SamplingParams(max_completion_tokens=200, seed=1))
    turns = [turn.text for turn in item.episode.turns]
    assert len(turns) > 1 and item.turn == "".join(f"<think>\n{text}" for text in turns)
