"""The trainer's step on episodes: what an environment wrote is read, and never predicted."""

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.backends.local import LocalBackend
from atomrl.config import CriticConfig, ModelConfig, TrainConfig
from atomrl.data.rows import to_rows, to_training_batches
from atomrl.types import Episode, Problem, Segment, Trajectory, Turn
from tests.backends.batches import weights_of
from tests.tiny import make_tiny_model

SAMPLE = Problem(problem_id="a", prompt="", ground_truth="")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.2))


def episode(index, generator, last_reply, reply):
    """Two turns with a reply between them, and another after the last, as tokens."""

    def ids(count):
        return tuple(torch.randint(3, 90, (count,), generator=generator).tolist())

    parts = [("model", ids(2 + index)), ("environment", reply), ("model", ids(4)), ("environment", tuple(last_reply))]
    segments = [Segment(origin="prompt", token_ids=(5, 6, 7))]
    for origin, tokens in parts:
        own = {"logprobs": (-1.0,) * len(tokens), "policy_version": 0} if origin == "model" else {}
        segments.append(Segment(origin=origin, token_ids=tokens, **own))
    turns = (Turn(model_tokens=2 + index, reply_tokens=3, reward=0.25 * index), Turn(model_tokens=4, reply_tokens=3))
    made = Episode(turns=turns, ended="turns")
    return Trajectory(
        prompt_id="0:a", index=index, problem=SAMPLE, segments=tuple(segments), text="", finish_reason="length",
        episode=made, token_rewards=tuple((3 + place, reward) for place, reward in made.turn_rewards),
        reward=float(index % 2),
    )  # fmt: skip


def trained(folder, name, last_reply, reply=(20, 21, 22)):
    generator = torch.Generator().manual_seed(4)
    rows = to_rows([episode(index, generator, last_reply, reply) for index in range(4)])
    algorithm = objective_of({"name": name, "kl": {"coefficient": 0.0}}).resolved(max_completion_tokens=20)
    model, train = ModelConfig(path=folder, dtype="float32"), TrainConfig(steps=1, learning_rate=1e-2)
    backend = LocalBackend(model, train, algorithm, total_updates=2, critic=CriticConfig())
    for _ in range(2):
        rows_now = backend.forward_only(rows, algorithm.needs)
        for batch in to_training_batches(
            algorithm.advantages(rows_now), algorithm, updates=1, epochs=1, seed=0, step=1
        ):
            backend.train_step(batch, algorithm)
    return rows, {name: tensor.clone() for name, tensor in weights_of(backend).items()}


@pytest.mark.parametrize("name", ["grpo", "ppo", "gigpo", "rloo"])
def test_other_targets_under_the_mask_change_no_bit_of_the_weights(folder, name):
    """The tokens of a last reply are targets alone: nothing that is trained comes after them."""
    one, weights = trained(folder, name, (8, 9, 10))
    other, same = trained(folder, name, (70, 71, 72))
    assert not torch.equal(one.tokens, other.tokens) and torch.equal(one.loss_mask, other.loss_mask)
    assert all(torch.equal(weights[key], same[key]) for key in weights)
    start = trained_nothing(folder)
    assert any(not torch.equal(weights[key], start[key]) for key in weights), "nothing was learned"


def trained_nothing(folder):
    model, train = ModelConfig(path=folder, dtype="float32"), TrainConfig(steps=1, learning_rate=1e-2)
    return weights_of(LocalBackend(model, train, objective_of({"name": "grpo"}).resolved(), total_updates=2))


def test_a_reply_that_is_read_does_change_them(folder):
    """So that the test above can fail: what stands before a turn is its context."""
    weights, other = (trained(folder, "grpo", (8, 9, 10), read)[1] for read in ((20, 21, 22), (30, 31, 32)))
    assert any(not torch.equal(weights[key], other[key]) for key in weights)
