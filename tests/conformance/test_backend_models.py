"""Conformance of back ends with models beside the policy: critic, teacher, and a reward model in its
place."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from atomrl.common.metrics import Mean, Sum, values
from atomrl.config import ConfigError, CriticConfig, LoraConfig
from atomrl.models.loading import load_tokenizer
from atomrl.models.scalar import load_scalar, save_scalar
from atomrl.protocols import LossOutput
from tests.backends.batches import make_algorithm, make_batch, weights_of, written
from tests.conformance.test_backends import make, snapshot  # noqa: F401 (make is a fixture)
from tests.tiny import make_tiny_model

CRITIC = CriticConfig(learning_rate=0.005)


def value_loss(outputs, batch):
    loss = (batch.loss_weights * (outputs.values - batch.advantages) ** 2).sum()
    return LossOutput(loss=loss, metrics={"critic/vf_loss": Sum(loss.item())})


def actor_critic_loss(outputs, batch):
    policy, critic = make_algorithm().loss(outputs, batch), value_loss(outputs, batch)
    return LossOutput(loss=policy.loss + critic.loss, metrics={**policy.metrics, **critic.metrics})


ACTOR_CRITIC = make_algorithm(loss=actor_critic_loss, outputs=frozenset({"logprobs", "values"}))


def test_a_fresh_critic_expects_nothing_and_learns(make):  # noqa: F811
    backend, batch = make(ACTOR_CRITIC, critic=CRITIC, train={"rows_per_micro_batch": 4}), make_batch()
    assert torch.equal(backend.forward_only(batch, frozenset({"values"})).values, torch.zeros(batch.tokens.shape))
    losses = [values(backend.train_step(batch, ACTOR_CRITIC))["critic/vf_loss"] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]
    annotated = backend.forward_only(batch, frozenset({"values"})).values
    assert not annotated.requires_grad and not annotated[~batch.loss_mask].any() and annotated[batch.loss_mask].all()


READS = ("item", "tolist", "__bool__", "__float__", "__int__")


def test_a_step_waits_for_the_device_once_for_each_optimizer(make, monkeypatch):  # noqa: F811
    """However many micro-batches there are: for the norm of the gradient. Metrics stay tensors until they are read."""

    def loss(outputs, batch):
        policy = -(batch.loss_weights * batch.advantages * outputs.logprobs).sum()
        value = (batch.loss_weights * (outputs.values - batch.advantages) ** 2).sum()
        entropy = (batch.loss_weights * outputs.entropy).sum().detach()
        metrics = {"actor/pg_loss": Sum(policy.detach()), "actor/entropy": Mean(entropy, batch.loss_weights.sum())}
        return LossOutput(loss=policy + value, metrics=metrics)

    algorithm = make_algorithm(loss=loss, outputs=frozenset({"logprobs", "entropy", "values"}))
    backend, batch = make(ACTOR_CRITIC, critic=CRITIC, train={"rows_per_micro_batch": 2}), make_batch()
    reads = []
    for name in READS:
        real = getattr(torch.Tensor, name)

        def counted(tensor, name=name, real=real):
            if tensor.is_floating_point():  # lengths, ids and masks are the host's
                reads.append(name)
            return real(tensor)

        monkeypatch.setattr(torch.Tensor, name, counted)
    metrics = backend.train_step(batch, algorithm)
    assert reads == ["item", "item"]
    assert metrics["actor/pg_loss"].total.shape == ()


def test_actor_and_critic_are_stepped_apart(make):  # noqa: F811
    """The policy moves as without a critic, clipped by its own gradient; the critic has its own rate."""
    batch, settings = make_batch(), {"max_grad_norm": 0.05}
    alone, both = make(train=settings), make(ACTOR_CRITIC, critic=CRITIC, train=settings)
    expected = values(alone.train_step(batch, make_algorithm()))
    metrics = values(both.train_step(batch, ACTOR_CRITIC))
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    assert metrics["actor/lr"] == 0.01 and metrics["critic/lr"] == 0.005 and metrics["critic/grad_norm"] > 0
    theirs = weights_of(both)
    assert all(torch.allclose(tensor, theirs[name], atol=1e-6) for name, tensor in weights_of(alone).items())


def test_a_critics_bad_gradient_leaves_the_policys_step(make):  # noqa: F811
    def poisoned(outputs, batch):
        policy, critic = make_algorithm().loss(outputs, batch), value_loss(outputs, batch)
        return LossOutput(loss=policy.loss + critic.loss * float("nan"), metrics=policy.metrics)

    backend = make(ACTOR_CRITIC, critic=CRITIC)
    before = snapshot(backend)
    algorithm = make_algorithm(loss=poisoned, outputs=frozenset({"logprobs", "values"}))
    metrics = values(backend.train_step(make_batch(), algorithm))
    assert metrics["critic/skipped_updates"] == 1.0 and "actor/skipped_updates" not in metrics
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights_of(backend).items())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_continues_bit_for_bit_with_a_critic(make, tmp_path, lora):  # noqa: F811
    settings = {"critic": CRITIC, "lora": lora, "train": {"schedule": "cosine", "learning_rate": 0.01}}
    batches = [make_batch(seed=seed) for seed in range(4)]
    straight = make(ACTOR_CRITIC, **settings)
    for batch in batches[:2]:
        straight.train_step(batch, ACTOR_CRITIC)
    written(straight.save(tmp_path / "checkpoint"))
    expected = [values(straight.train_step(batch, ACTOR_CRITIC)) for batch in batches[2:]]
    resumed = make(ACTOR_CRITIC, **settings)
    resumed.train_step(batches[3], ACTOR_CRITIC)
    resumed.load(tmp_path / "checkpoint")
    assert [values(resumed.train_step(batch, ACTOR_CRITIC)) for batch in batches[2:]] == expected
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint" / "critic")
    assert theirs.config.num_labels == 1


def test_a_checkpoint_without_its_critic_is_refused(make, tmp_path):  # noqa: F811
    plain = make()
    written(plain.save(tmp_path / "checkpoint"))
    with pytest.raises(ConfigError, match="critic"):
        make(ACTOR_CRITIC, critic=CRITIC).load(tmp_path / "checkpoint")


def test_a_critic_starts_from_a_reward_model(make, tmp_path):  # noqa: F811
    model = load_scalar(make.folder, dtype="float32")
    torch.nn.init.normal_(model.score.weight)
    save_scalar(model, load_tokenizer(make.folder), tmp_path / "reward")
    batch = make_batch()
    backend = make(ACTOR_CRITIC, critic=CriticConfig(path=str(tmp_path / "reward")))
    expected = model.values(batch.tokens, batch.loss_mask, batch.prompt_lengths).detach()
    torch.testing.assert_close(
        backend.forward_only(batch, frozenset({"values"})).values, expected, atol=1e-5, rtol=1e-5
    )


def pair_loss(outputs, batch):
    chosen, rejected = outputs.scores[0::2], outputs.scores[1::2]
    loss = -F.logsigmoid(chosen - rejected).sum() / 3
    return LossOutput(loss=loss, metrics={"rewards/loss": Sum(loss.item())})


REWARD = make_algorithm(loss=pair_loss, outputs=frozenset({"scores"}), row_unit="pair")


def test_a_reward_model_learns_and_continues_exactly(make, tmp_path):  # noqa: F811
    lengths = torch.full((6,), 10)  # of one length, so that micro-batches leave the rows in order
    batch = make_batch(lengths=lengths, longest=10)
    backend = make(REWARD)
    losses = [values(backend.train_step(batch, REWARD))["rewards/loss"] for _ in range(10)]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.3 * losses[0]
    written(backend.save(tmp_path / "checkpoint"))
    expected = values(backend.train_step(batch, REWARD))
    resumed = make(REWARD, seed=3)
    resumed.load(tmp_path / "checkpoint")
    assert values(resumed.train_step(batch, REWARD)) == expected
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint").config.num_labels == 1


def test_scores_are_annotated_by_row(make, tmp_path):  # noqa: F811
    batch, backend = make_batch(), make(REWARD, train={"rows_per_micro_batch": 4})
    backend.train_step(batch, REWARD)
    scores = backend.forward_only(batch, frozenset({"scores"})).scores
    written(backend.save(tmp_path / "checkpoint"))
    model = load_scalar(tmp_path / "checkpoint", dtype="float32")
    expected = model.scores(batch.tokens, batch.lengths).detach()
    assert scores.shape == (6,) and not scores.requires_grad and scores.abs().max() > 0
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_a_reward_model_is_no_policy(make):  # noqa: F811
    with pytest.raises(ValueError, match="logprobs"):
        make(REWARD).forward_only(make_batch(), frozenset({"old_logprobs"}))
    with pytest.raises(ValueError, match="scores"):
        make().train_step(make_batch(), REWARD)


def test_squared_probabilities_are_those_of_the_whole_vocabulary(make):  # noqa: F811
    batch, theirs = make_batch(), AutoModelForCausalLM.from_pretrained(make.folder)
    probs = (theirs(batch.tokens).logits[:, :-1] / 0.7).softmax(-1)
    expected = F.pad((probs**2).sum(-1), (1, 0)) * batch.loss_mask
    rows = make(temperature=0.7).forward_only(batch, frozenset({"old_squared_probs"}))
    torch.testing.assert_close(rows.old_squared_probs, expected.detach(), atol=1e-5, rtol=1e-4)


def test_the_teacher_gives_log_probs_and_distributions(make, tmp_path):  # noqa: F811
    folder, batch = make_tiny_model(tmp_path / "teacher", "llama", seed=1), make_batch()
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    expected = F.log_softmax(theirs(batch.tokens).logits[:, :-1] / 0.7, dim=-1).detach()
    seen = []

    def loss(outputs, batch):
        mine, theirs = outputs.distributions, outputs.teacher_distributions
        assert mine.hidden.requires_grad and not theirs.hidden.requires_grad
        seen.append((batch, theirs.logprobs()))
        return LossOutput(loss=mine.logprobs().sum() * 0.0, metrics={})

    algorithm = make_algorithm(loss=loss, outputs=frozenset({"distributions", "teacher_distributions"}))
    backend = make(algorithm, teacher=str(folder), temperature=0.7)
    backend.train_step(batch, algorithm)
    ((micro, teacher_outputs),) = seen
    at = micro.loss_mask[:, 1:]
    order = torch.stack(
        [(batch.tokens[:, : micro.tokens.shape[1]] == row).all(1).nonzero()[0, 0] for row in micro.tokens]
    )
    wanted = expected[order][:, : at.shape[1]][at]
    torch.testing.assert_close(teacher_outputs, wanted, atol=1e-4, rtol=1e-4)
    picked = wanted.gather(1, micro.tokens[:, 1:][at][:, None])[:, 0]
    annotated = backend.forward_only(micro, frozenset({"teacher_logprobs"})).teacher_logprobs
    torch.testing.assert_close(annotated[micro.loss_mask], picked, atol=1e-4, rtol=1e-4)


def test_missing_models_are_named(make):  # noqa: F811
    with pytest.raises(ValueError, match="without a teacher"):
        make().forward_only(make_batch(), frozenset({"teacher_logprobs"}))
