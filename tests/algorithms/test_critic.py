"""Algorithms with a critic, against loops written from their definitions: GAE over what the model wrote, the value
loss, the bonus for entropy, and what a step says of its critic."""

from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.batches import RowBatch, TrainingBatch, select_rows
from atomrl.common.metrics import merge, values
from atomrl.objectives import PolicyObjective
from atomrl.objectives.policy import COEFFICIENT
from atomrl.protocols import ModelOutputs
from atomrl.trainer.report.metrics import critic_metrics
from tests.algorithms.batches import training_batch

KL = {"type": "k1", "coefficient": 0.1, "apply_to": "reward", "target": None}


def make(**axes):
    return PolicyObjective().override({"advantage": "gae"}).override(axes).resolved(max_completion_tokens=20)


def turns(gap: int = 3) -> RowBatch:
    """Rows of which the model wrote two turns with `gap` tokens of somebody else between them; the last one wrote
    one turn. What is off the mask is NaN."""
    generator = torch.Generator().manual_seed(0)
    count, written = 5, 4
    first, between, second = torch.ones(written), torch.zeros(gap), torch.ones(written - 1)
    mask = torch.cat([torch.zeros(2), first, between, second, torch.zeros(1)]).bool().repeat(count, 1)
    mask[-1, 2 + written :] = False

    def numbers() -> torch.Tensor:
        drawn = torch.rand(count, 2 * written - 1, generator=generator, dtype=torch.float64)
        whole = torch.full(mask.shape, torch.nan, dtype=torch.float64)
        whole[:, mask[0]] = drawn
        return whole.masked_fill(~mask, torch.nan)

    return RowBatch(
        tokens=torch.ones(mask.shape, dtype=torch.long),
        loss_mask=mask,
        lengths=torch.full((count,), mask.shape[1]),
        prompt_lengths=torch.full((count,), 2),
        group_ids=torch.arange(count),
        rewards=torch.rand(count, generator=generator, dtype=torch.float64),
        truncated=torch.zeros(count, dtype=torch.bool),
        old_logprobs=-numbers(),
        ref_logprobs=-numbers(),
        values=numbers(),
    )


def slow_gae(rows: RowBatch, row: int, gamma: float, lam: float, beta: float) -> list[float]:
    """The sum of the definition, over the tokens that the model wrote and nothing else."""
    at = rows.loss_mask[row].nonzero()[:, 0].tolist()
    kl = [float(rows.old_logprobs[row, t] - rows.ref_logprobs[row, t]) for t in at]
    rewards = [-beta * k for k in kl]
    rewards[-1] += float(rows.rewards[row])
    expected = [float(rows.values[row, t]) for t in at] + [0.0]
    deltas = [rewards[i] + gamma * expected[i + 1] - expected[i] for i in range(len(at))]
    return [sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(at))) for i in range(len(at))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.5, 0.0)])
def test_gae_skips_what_the_model_did_not_write(gamma, lam):
    rows = turns()
    credited = make(advantage={"gamma": gamma, "lam": lam, "whiten": False}, kl=KL).advantages(rows)
    for row in range(rows.rows):
        own = rows.loss_mask[row]
        expected = torch.tensor(slow_gae(rows, row, gamma, lam, 0.1), dtype=torch.float64)
        torch.testing.assert_close(credited.advantages[row][own], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(credited.returns[row][own], expected + rows.values[row][own], rtol=1e-12, atol=1e-12)
    assert not credited.advantages[~rows.loss_mask].any() and not credited.returns[~rows.loss_mask].any()


def test_the_length_of_what_others_wrote_changes_nothing():
    algorithm = objective_of({"name": "ppo", "kl": {"coefficient": 0.0}}).resolved()
    short, long = algorithm.advantages(turns(1)), algorithm.advantages(turns(40))
    for name in ("advantages", "returns"):
        own, other = (getattr(item, name)[item.loss_mask] for item in (short, long))
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)  # whitening adds up in another order


def test_whitening_is_over_the_step_and_leaves_returns():
    rows = turns()
    plain, white = (make(advantage={"whiten": whiten}).advantages(rows) for whiten in (False, True))
    own = plain.advantages[rows.loss_mask]
    torch.testing.assert_close(white.advantages[rows.loss_mask], (own - own.mean()) / (own.var() + 1e-8).sqrt())
    assert torch.equal(plain.returns, white.returns)


def test_lambda_by_length():
    """VAPO's: 7 and 4 written tokens with an alpha of a half give 1 - 1/3.5 and 1 - 1/2."""
    rows = turns()
    credited = make(advantage={"length_alpha": 0.5, "whiten": False}).advantages(rows)
    for row, lam in ((0, 1 - 1 / 3.5), (4, 0.5)):
        expected = torch.tensor(slow_gae(rows, row, 1.0, lam, 0.0), dtype=torch.float64)
        torch.testing.assert_close(credited.advantages[row][rows.loss_mask[row]], expected)


def test_truncated_completions_give_returns_before_they_are_left_out():
    rows = turns()
    rows = replace(rows, truncated=torch.tensor([True, False, False, False, False]))
    axes = {"advantage": {"type": "gae", "whiten": False}}
    kept, cut = make(**axes), make(**axes, shaping={"mask_truncated": True})
    whole, filtered = kept.advantages(rows), cut.advantages(rows)
    assert not filtered.loss_mask[0].any() and torch.equal(filtered.returns[1:], whole.returns[1:])
    batch = training_batch(cut, rows)
    given = torch.zeros(batch.tokens.shape, dtype=torch.float64, requires_grad=True)
    cut.loss(ModelOutputs(logprobs=rows.old_logprobs, values=given), batch).loss.backward()
    assert not given.grad[0].any() and given.grad[1:][batch.loss_mask[1:]].all()


def value_batch(algorithm) -> TrainingBatch:
    """One row of three tokens, values 0 and returns 1, 1 and -1."""
    mask = torch.tensor([[False, True, True, True]])
    zeros = torch.zeros(1, 4)
    return TrainingBatch(
        tokens=torch.ones(1, 4, dtype=torch.long), loss_mask=mask, lengths=torch.tensor([4]),
        prompt_lengths=torch.tensor([1]), group_ids=torch.tensor([0]), rewards=torch.tensor([1.0]),
        truncated=torch.tensor([False]), values=zeros, old_logprobs=zeros, advantages=zeros,
        returns=torch.tensor([[0.0, 1.0, 1.0, -1.0]]),
        loss_weights=algorithm.loss_weights(mask, torch.arange(len(mask))),
    )  # fmt: skip


def test_the_value_loss_by_hand():
    """The first has moved past the clip towards its return, the second not, the third past it but away."""
    given = torch.tensor([[9.0, 0.5, 0.1, 0.5]], requires_grad=True)
    for value, losses, gradient, clipped in (
        ("squared", (0.25, 0.81, 2.25), (-0.5, -0.9, 1.5), 0),
        ({"type": "clipped", "clip": 0.2}, (0.64, 0.81, 2.25), (0.0, -0.9, 1.5), 1 / 3),
        ({"coefficient": 0.5, "clip": 0.2}, (0.64, 0.81, 2.25), (0.0, -0.45, 0.75), 1 / 3),
    ):
        algorithm = make(value=value)
        given.grad = None
        result = algorithm.loss(ModelOutputs(logprobs=torch.zeros(1, 4), values=given), value_batch(algorithm))
        result.loss.backward()
        assert given.grad[0].tolist() == pytest.approx([0.0, *(g / 3 for g in gradient)])
        seen = values(result.metrics)
        assert seen["critic/vf_loss"] == pytest.approx(sum(losses) / 6)  # as verl's: without the coefficient
        assert seen["critic/vf_clipfrac"] == pytest.approx(clipped)
        assert seen["critic/vpred_mean"] == pytest.approx(1.1 / 3)


def test_the_bonus_for_entropy_by_hand():
    for axes, gradient in (({}, None), ({"entropy": {"coefficient": 0.3}}, -0.1)):
        algorithm = make(**axes)
        assert ("entropy" in algorithm.outputs) is bool(axes)
        entropy = torch.tensor([[7.0, 1.0, 2.0, 3.0]], requires_grad=True)
        outputs = ModelOutputs(logprobs=torch.zeros(1, 4), values=torch.zeros(1, 4), entropy=entropy)
        result = algorithm.loss(outputs, value_batch(algorithm))
        if gradient is None:
            assert "actor/entropy_loss" not in result.metrics
            continue
        result.loss.backward()
        assert entropy.grad[0].tolist() == pytest.approx([0.0, gradient, gradient, gradient])
        assert values(result.metrics)["actor/entropy_loss"] == pytest.approx(2.0)


def test_metrics_do_not_depend_on_the_split():
    algorithm, rows = objective_of({"name": "a2c"}).resolved(), turns()
    batch = training_batch(algorithm, rows)
    logprobs, predicted = rows.old_logprobs.nan_to_num(), torch.rand(rows.tokens.shape, dtype=torch.float64)

    def seen(parts):
        metrics = []
        for part in parts:
            index = torch.tensor(part)
            outputs = ModelOutputs(logprobs=logprobs[index], values=predicted[index], entropy=logprobs[index])
            metrics.append(algorithm.loss(outputs, select_rows(batch, index)).metrics)
        return values(merge(metrics))

    whole = seen([[0, 1, 2, 3, 4]])
    assert {"critic/vf_loss", "critic/vpred_mean", "actor/entropy_loss", "actor/entropy"} <= whole.keys()
    assert seen([[4], [2, 0], [1, 3]]) == pytest.approx(whole)


def test_explained_variance_is_1_for_a_critic_that_knew_and_below_0_for_a_bad_one():
    """1 for a critic that knew, 0 for one that says the mean, below 0 for one that is worse than that."""
    credited = make(advantage={"whiten": False}).advantages(turns())
    own = credited.loss_mask
    for guess, expected in (
        (credited.returns, 1.0),
        (torch.full_like(credited.returns, 0.25), 0.0),
        (-credited.returns, -3.0),
        (0.5 * credited.returns, 0.75),
    ):
        assert critic_metrics(replace(credited, values=guess))["critic/vf_explained_var"] == pytest.approx(expected)
    seen = critic_metrics(credited)
    assert seen["critic/values/mean"] == pytest.approx(credited.values[own].mean().item())
    assert seen["critic/returns/max"] == pytest.approx(credited.returns[own].max().item())
    assert "critic/vf_explained_var" not in critic_metrics(replace(credited, returns=1 + 1e-7 * credited.returns))
    assert critic_metrics(replace(credited, returns=None)) == {}


def test_the_adaptive_coefficient_of_ppo_follows_a_slow_loop():
    """Ziegler et al., section 2.2, on the KL of each step's tokens; the reward pays what held when it was earned."""
    algorithm = objective_of(
        {"name": "ppo", "kl": {"target": 0.1, "horizon": 20.0}, "advantage": {"whiten": False}}
    ).resolved()
    beta, state = 0.02, {}
    for scale in (0.0, 0.5, 2.0, -1.0, 2.0):
        rows = turns()
        rows = replace(rows, ref_logprobs=rows.old_logprobs - scale * rows.values)
        credited = algorithm.advantages(rows, state)
        expected = torch.tensor(slow_gae(rows, 0, 1.0, 0.95, beta), dtype=torch.float64)
        torch.testing.assert_close(credited.advantages[0][rows.loss_mask[0]], expected)
        measured = scale * float(rows.values[rows.loss_mask].mean())
        beta *= 1 + max(-0.2, min(0.2, measured / 0.1 - 1)) * rows.rows / 20
        state = credited.state
        assert state[COEFFICIENT] == pytest.approx(beta)


def test_the_needs_of_ppo_and_a2c():
    ppo, a2c = objective_of({"name": "ppo"}).resolved(), objective_of({"name": "a2c"}).resolved()
    assert ppo.needs == ppo.advantage_inputs == {"values", "old_logprobs", "ref_logprobs"}
    assert ppo.outputs == {"logprobs", "values"} and ppo.row_unit == "row"
    assert a2c.advantage_inputs == {"values"} and a2c.outputs == {"logprobs", "values", "entropy"}
    assert "values" not in objective_of({"name": "grpo", "value": {"clip": 0.1}}).resolved().needs


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"advantage": {"gamma": 1.5}}, "algorithm.advantage.gamma: should be less than or equal to 1"),
        ({"advantage": {"length_alpha": 0.0}}, "algorithm.advantage.length_alpha: should be greater than 0"),
        ({"value": {"clp": 0.1}}, "did you mean 'clip'"),
        ({"entropy": {"coefficient": -0.1}}, "greater than or equal to 0"),
        ({"value": "clip"}, "did you mean 'clipped'"),
    ],
)
def test_bad_parameters_stop_a_run_before_it_begins(axes, said):
    with pytest.raises(ValueError, match=said):
        objective_of({"name": "ppo", **axes}).resolved()
