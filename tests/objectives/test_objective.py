"""Policy objectives: any split has the same gradient, and an override changes its axis alone."""

from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.batches import RowBatch, TrainingBatch, select_rows
from atomrl.common.metrics import merge, values
from atomrl.objectives import PolicyObjective
from atomrl.objectives.policy import rollout_gap
from atomrl.objectives.policy_loss import CISPOClip, PPOClip
from atomrl.protocols import ModelOutputs
from tests.algorithms.batches import flat_rows


def rows(count: int = 8, tokens: int = 9, seed: int = 0) -> RowBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, tokens + 1, (count,), generator=generator)
    prompts = torch.randint(1, 4, (count,), generator=generator)
    position = torch.arange(tokens)[None]
    mask = (position >= prompts[:, None]) & (position < lengths[:, None])
    return flat_rows(
        tokens=torch.randint(0, 20, (count, tokens), generator=generator),
        loss_mask=mask,
        lengths=lengths,
        prompt_lengths=prompts,
        group_ids=torch.arange(count) // 4,
        rewards=torch.randint(0, 2, (count,), generator=generator).float(),
        truncated=torch.zeros(count, dtype=torch.bool),
        old_logprobs=-torch.rand(count, tokens, generator=generator),
        ref_logprobs=-torch.rand(count, tokens, generator=generator),
        rollout_logprobs=-torch.rand(count, tokens, generator=generator),
    )


def gradient(algorithm, batch: TrainingBatch, logprobs: torch.Tensor, parts: list[list[int]]):
    """The gradient of the log-probs when the batch goes through the loss in parts."""
    logprobs = logprobs.clone().requires_grad_()
    metrics = []
    for part in parts:
        index = torch.tensor(part)
        micro = select_rows(batch, index)
        outputs = ModelOutputs(logprobs=logprobs[index, : micro.tokens.shape[1]])
        result = algorithm.loss(outputs, micro)
        result.loss.backward()
        metrics.append(result.metrics)
    return logprobs.grad, values(merge(metrics))


CASES = [
    {},
    {"advantage": "grpo_no_std", "loss_agg": "sequence_mean"},
    {"advantage": "raw", "kl": {"type": "k2", "coefficient": 0.1}, "clip": {"high": 0.28}},
    {"loss_agg": {"type": "constant_length", "length": 16}, "kl": {"coefficient": 0.04}},
]


@pytest.mark.parametrize("axes", CASES)
def test_any_split_into_micro_batches_gives_the_same_gradient_and_metrics(axes):
    algorithm = objective_of({"name": "grpo", **axes}).resolved()
    credited = algorithm.advantages(rows())
    batch = TrainingBatch(**vars(credited), loss_weights=algorithm.loss_weights(credited.loss_mask, credited.group_ids))
    logprobs = -torch.rand(8, 9, generator=torch.Generator().manual_seed(1))
    whole, whole_metrics = gradient(algorithm, batch, logprobs, [list(range(8))])
    for parts in ([[i] for i in range(8)], [[7, 0, 3], [1, 2], [6, 5, 4]]):
        split, metrics = gradient(algorithm, batch, logprobs, parts)
        torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-8)
        assert metrics == pytest.approx(whole_metrics, rel=1e-5)


def test_the_loss_is_the_equation():
    algorithm = objective_of(
        {"name": "grpo", "kl": {"type": "k3", "coefficient": 0.5}, "clip": {"low": 0.1, "high": 0.3}}
    ).resolved()
    credited = algorithm.advantages(rows(4))
    batch = TrainingBatch(**vars(credited), loss_weights=algorithm.loss_weights(credited.loss_mask, credited.group_ids))
    logprobs = -torch.rand(4, 9, generator=torch.Generator().manual_seed(2))
    expected, tokens = 0.0, int(batch.loss_mask.sum())
    for i, t in batch.loss_mask.nonzero().tolist():
        ratio = float((logprobs[i, t] - batch.old_logprobs[i, t]).exp())
        advantage = float(batch.advantages[i, t])
        surrogate = min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
        d = float(batch.ref_logprobs[i, t] - logprobs[i, t])
        expected -= (surrogate - 0.5 * (float(torch.tensor(d).exp()) - 1 - d)) / tokens
    assert algorithm.loss(ModelOutputs(logprobs=logprobs), batch).loss.item() == pytest.approx(expected, rel=1e-5)


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_reinforce():
    algorithm = objective_of({"name": "grpo"}).resolved()
    credited = replace(algorithm.advantages(rows()), old_logprobs=None)
    batch = TrainingBatch(**vars(credited), loss_weights=algorithm.loss_weights(credited.loss_mask, credited.group_ids))
    grad, metrics = gradient(algorithm, batch, -torch.rand(8, 9), [list(range(8))])
    torch.testing.assert_close(grad, -batch.loss_weights * batch.advantages)
    assert metrics["actor/ppo_kl"] == 0 and metrics["actor/pg_clipfrac"] == 0


def test_needs_follow_the_axes():
    assert objective_of({"name": "grpo"}).resolved().needs == {"old_logprobs"}
    assert objective_of({"name": "grpo", "kl": {"coefficient": 0.1}}).resolved().needs == {
        "old_logprobs",
        "ref_logprobs",
    }
    assert "entropy" in objective_of({"name": "grpo"}).resolved(report_entropy=True).outputs


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"clp": {}}, "did you mean 'clip'"),
        ({"clip": {"hihg": 1}}, "did you mean 'high'"),
        ({"advantage": "grop"}, "did you mean 'grpo'"),
        ({"kl": {"type": "k9"}}, "algorithm.kl.type"),
        ({"clip": 0.2}, "must be a type or a mapping"),
        ({"clip": {"low": -1}}, "greater than or equal to 0"),
        ({"clip": {"low": "a"}}, "algorithm.clip.low: should be a valid number, got 'a'"),
        ({"loss_agg": "constant_length"}, "needs a length"),
        ({"shaping": {"soft_overlong": True}}, "shaping.max_completion_tokens"),
        ({"clip": {"type": "sapo", "low": 0.2}}, "algorithm.clip of type sapo: unknown name 'low'"),
        (
            {"kl": {"type": "k3", "beta": 0.1}},
            "algorithm.kl of type k3: unknown name 'beta'; valid: coefficient, apply_to",
        ),
        ({"kl": {"type": "k3", "place": "reward"}}, "unknown name 'place'; valid: coefficient, apply_to"),
        ({"clip": {"low": True}}, "should be a valid number, got True"),
        ({"kl": {"apply_to": "los"}}, "did you mean 'loss'"),
        ({"kl": {"k2_gradient": 1}}, "algorithm.kl.k2_gradient: should be a valid boolean"),
        ({"token_filter": {"type": "high_entropy", "tokens": 1.5}}, "should be a valid integer"),
        ({"rollout_is": "token_tsi"}, "did you mean 'token_tis'"),
        ({"rollout_is": ["token_tsi"]}, "did you mean 'token_tis'"),
        ({"rollout_is": ["icepop", {"type": "kl_rejection", "bnd": 1}]}, "did you mean 'bound'"),
        ({"rollout_is": [2.0]}, "algorithm.rollout_is must be a type or a mapping of parameters, got 2.0"),
        ({"clip": ["ppo"]}, "algorithm.clip must be a type or a mapping of parameters, got"),
        ({"group_filter": "mixed"}, "did you mean 'mixed_outcomes'"),
        ({"advantage": {"type": "raw", "eps": 1.0}}, "it has no parameters"),
        ({"loss_agg": {"type": "constant_length", "length": 0}}, "algorithm.loss_agg.length: should be greater than 0"),
        (
            {"token_filter": {"type": "high_entropy", "fraction": 1.5}},
            "token_filter.fraction: should be less than or eq",
        ),
        ({"clip": {"type": "sapo", "tau_positive": 0.0}}, "algorithm.clip.tau_positive: should be greater than 0"),
        ({"shaping": {"lowest": 1.0, "highest": -1.0}}, "is above high"),
        ({"shaping": {"soft_overlong": True, "max_completion_tokens": 4, "overlong_buffer_tokens": 5}}, "within 1 to"),
        ({"advantage": {"type": "gpg", "normaliser": 0}}, "algorithm.advantage.normaliser: should be greater than 0"),
        ({"advantage": {"type": "reinforce_pp", "gamma": 2.0}}, "gamma"),
    ],
)
def test_bad_axes_are_named(axes, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective().override(axes).resolved()


def test_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="'grpo'"):
        objective_of({"name": "grpoo"}).resolved()


def test_a_new_type_starts_from_its_own_defaults_and_the_same_one_keeps_the_others():
    objective = PolicyObjective().override({"clip": {"high": 0.3}})
    assert objective.override({"clip": {"low": 0.1}}).clip == PPOClip(low=0.1, high=0.3)
    assert objective.override({"clip": "cispo"}).clip == CISPOClip(low=1.0, high=4.0)
    with pytest.raises(ValueError, match="frozen"):
        objective.clip.low = 1.0


def test_the_rollouts_limit_is_taken_where_the_axis_has_none():
    objective = PolicyObjective().override({"loss_agg": "constant_length", "shaping": {"soft_overlong": True}})
    limited = objective.resolved(max_completion_tokens=64)
    assert limited.loss_agg.length == 64 and limited.shaping.max_completion_tokens == 64
    own = objective.override({"loss_agg": {"length": 9}, "shaping": {"max_completion_tokens": 7}})
    assert own.resolved(max_completion_tokens=64) == own


def test_another_kl_estimator_keeps_where_and_how_much():
    kl = objective_of({"name": "ppo", "kl": "k2"}).kl
    assert (kl.type, kl.coefficient, kl.apply_to, kl.target) == ("k2", 0.02, "reward", 0.25)


def test_another_type_starts_from_its_own_defaults():
    robust = objective_of({"name": "dpo", "loss": "robust"}).losses[0]
    assert robust.label_smoothing == 0.1, "and not sigmoid's 0"
    kept = objective_of({"name": "ppo", "kl": {"type": "k3"}}).kl
    assert (kept.coefficient, kept.apply_to) == (0.02, "reward"), "all estimators have the same fields"


def test_the_gap_is_told_by_the_staleness_of_tokens():
    old = torch.tensor([[0.9, 0.5, 0.5, 0.5, 0.5], [0.1, 0.5, 0.5, 0.5, 0.5]]).log()
    rollout = torch.tensor([[0.2, 0.5, 0.4, 0.5, 0.2], [0.2, 0.3, 0.5, 0.4, 0.5]]).log()
    mask = torch.tensor([[False, True, True, True, True], [False, True, True, True, False]])
    staleness = torch.tensor([[0, 0, 0, 1, 1], [0, 7, 4, 0, 1]], dtype=torch.int32)
    whole = rollout_gap(old, rollout, mask, staleness)
    parts = (rollout_gap(*(item[row : row + 1] for item in (old, rollout, mask, staleness))) for row in range(2))
    name = "training/rollout_probs_diff_mean"
    for metrics in (values(whole), values(merge(parts))):
        assert metrics[name] == pytest.approx(0.7 / 7, abs=1e-6)
        by_staleness = [metrics.get(f"{name}/staleness_{versions}") for versions in (0, 1, 4)]
        assert by_staleness == pytest.approx([0.2 / 3, 0.3 / 2, 0.2 / 2], abs=1e-6)
    assert whole[f"{name}/staleness_2"].weight == 0  # which leaves it out of a step
    assert rollout_gap(old, rollout, mask).keys() == {name, "training/rollout_probs_diff_max"}
