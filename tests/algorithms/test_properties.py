"""Properties of every algorithm of the table, and of choices on axes that no algorithm makes."""

from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import ALGORITHMS, objective_of
from atomrl.batches import flat_fields, select_rows
from atomrl.objectives import PolicyObjective
from atomrl.objectives.overrides import choices_of
from tests.algorithms.batches import GROUP, LIMIT, changed, loss_gradient, make_rows, moved_logprobs, training_batch


def choices(axis):
    return [name for name in choices_of(PolicyObjective.model_fields[axis].annotation) if name != "custom"]


EXTRA = {
    **{f"rollout_is {name}": ("grpo", {"rollout_is": name}) for name in choices("rollout_is")},
    **{f"token_filter {name}": ("gspo", {"token_filter": name}) for name in choices("token_filter")},
    "random tokens by number": ("grpo", {"token_filter": {"type": "random", "tokens": 7}}),
    "entropy by budget": ("grpo", {"token_filter": {"type": "high_entropy", "tokens": 7}}),
    "loose rejection": ("grpo", {"rollout_is": {"type": "kl_rejection", "bound": 0.003, "level": "max"}}),
    "normalised weights": ("grpo", {"rollout_is": {"type": "token_tis", "normalised": True, "high": 1.01}}),
    "normalised weights of rows": ("gspo", {"rollout_is": {"type": "sequence_tis", "normalised": True}}),
    "tight second moment": ("grpo", {"rollout_is": {"type": "second_moment", "bound": 0.001}}),
    "weights and rejections": (
        "dapo",
        {"rollout_is": ["token_tis", {"type": "kl_rejection", "bound": 3e-3}, {"type": "second_moment"}]},
    ),
    "rollouts as the old policy": ("grpo", {"old_policy": "rollout", "rollout_is": "sequence_tis"}),
    "baseline by position": ("grpo", {"advantage": "optimal_token_baseline", "clip": "reinforce"}),
    "prompt mean": ("grpo", {"loss_agg": "prompt_mean", "kl": {"coefficient": 0.1, "type": "k2"}}),
    "adaptive KL in the loss": ("rloo", {"kl": {"apply_to": "loss", "target": 0.1}}),
    "adaptive KL in the reward": ("reinforce_pp", {"kl": {"target": 0.1}}),
    "overlong filtering": ("dapo", {"shaping": {"mask_truncated": True, "repetition_ngram_tokens": 2}}),
    "distillation beside rewards": ("grpo", {"distillation": {"coefficient": 0.3, "beta": 0.1}}),
    "credit by turn": ("grpo", {"advantage": {"type": "turn_grpo", "gamma": 0.9}}),
    "credit of the last turn": ("rloo", {"advantage": {"type": "last_turn", "divide_by_std": False}}),
    "dppo by kl": ("dppo", {"clip": "dppo_kl"}),
    "dual clip of sequences": ("gspo", {"clip": {"dual": 1.001}}),
    "gmpo of opo with straight-through k1": ("gmpo", {"advantage": "opo", "kl": {"type": "k1", "k2_gradient": True,
                                                      "coefficient": 0.1}}),
}  # fmt: skip
EXTRA |= {
    "a critic and half of everything else": ("ppo", {
        "advantage": {"gamma": 0.9, "length_alpha": 0.3}, "entropy": {"coefficient": 0.1}, "ratio": "sequence_token",
        "token_filter": "high_entropy", "rollout_is": "token_tis", "value": {"coefficient": 0.3, "clip": 0.05},
        "shaping": {"mask_truncated": True}}),
    "entropy without a critic": ("grpo", {"entropy": {"coefficient": 0.1}, "kl": {"coefficient": 0.1}}),
}  # fmt: skip
CASES = {name: (name, {}) for name in ALGORITHMS} | EXTRA
CASES["pass_at_k"] = ("pass_at_k", {"advantage": {"k": 2}})  # of 4, the size of the groups here, there is one subset
OTHERS = ("raw", "remax", "reinforce_pp", "gae", "reverse_kl", "none")
GROUP_BASELINES = [n for n, o in ALGORITHMS.items() if o.advantage.type not in OTHERS]


def build(case):
    name, axes = CASES[case]
    return objective_of({"name": name, **axes}).resolved(max_completion_tokens=LIMIT)


@pytest.mark.parametrize("case", CASES)
def test_any_split_into_micro_batches_gives_the_same_gradient(case):
    algorithm, rows = build(case), make_rows()
    batch, logprobs = training_batch(algorithm, rows), moved_logprobs(rows)
    total, whole = loss_gradient(algorithm, batch, logprobs)
    assert whole.abs().max() > 0 and whole.isfinite().all()
    count = rows.rows
    for parts in ([[i] for i in range(count)], [[7, 0, 3], [11, 1, 2], [6, 5, 4, 10], [8, 9]]):
        split_total, split = loss_gradient(algorithm, batch, logprobs, parts)
        assert (split - whole).abs().max() <= 1e-12
        assert abs(split_total - total) <= 1e-12 * max(1, abs(total))


@pytest.mark.parametrize("case", CASES)
def test_any_order_of_rows_gives_the_same_gradient(case):
    """Groups torn apart included; the algorithm is built anew, as some have a state."""
    rows = make_rows()
    order = torch.randperm(rows.rows, generator=torch.Generator().manual_seed(3))
    shuffled, logprobs = select_rows(rows, order), moved_logprobs(rows)
    algorithm = build(case)
    _, whole = loss_gradient(algorithm, training_batch(algorithm, rows), logprobs)
    algorithm = build(case)
    width = shuffled.tokens.shape[1]
    _, other = loss_gradient(algorithm, training_batch(algorithm, shuffled), logprobs[order][:, :width])
    assert (other - whole[order][:, :width]).abs().max() <= 1e-12


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_garbage_off_the_mask_is_harmless(case, garbage):
    rows = make_rows()
    off = ~rows.loss_mask
    names = (
        "old_logprobs",
        "ref_logprobs",
        "rollout_logprobs",
        "old_entropy",
        "old_squared_probs",
        "values",
        "teacher_logprobs",
    )
    dirty = changed(rows, **{name: flat_fields(rows)[name].masked_fill(off, garbage) for name in names})
    logprobs = moved_logprobs(rows)
    clean = loss_gradient(algorithm := build(case), training_batch(algorithm, rows), logprobs)
    gradient = loss_gradient(
        algorithm := build(case), training_batch(algorithm, dirty), logprobs.masked_fill(off, garbage)
    )
    assert gradient[0] == pytest.approx(clean[0], rel=1e-12) and torch.equal(gradient[1], clean[1])
    assert not clean[1][off].any()


@pytest.mark.parametrize("case", CASES)
def test_rows_without_a_token_give_a_finite_loss_and_no_gradient(case):
    rows = make_rows()
    masked = replace(rows, loss_mask=torch.zeros_like(rows.loss_mask))
    algorithm = build(case)
    total, gradient = loss_gradient(algorithm, training_batch(algorithm, masked), moved_logprobs(rows))
    assert total == 0 and not gradient.any()
    nothing = select_rows(rows, torch.tensor([], dtype=torch.long))
    assert build(case).advantages(nothing).rows == 0


@pytest.mark.parametrize("name", GROUP_BASELINES)
@pytest.mark.parametrize("groups", ["equal rewards", "groups of one"])
def test_a_group_without_a_signal_has_no_policy_gradient(name, groups):
    """0.3 cannot be written in binary: rounding of a mean must not pass for signal. KL and penalties are taken off."""
    axes = {"kl": {"coefficient": 0.0}, "shaping": {"soft_overlong": False}}
    if getattr(objective_of({"name": name}).token_filter, "type", "") == "kl_cov":
        axes["token_filter"] = "all"  # its penalty is no policy term
    algorithm = objective_of({"name": name, **axes}).resolved(max_completion_tokens=LIMIT)
    rows = make_rows(rewards=torch.full((12,), 0.3, dtype=torch.float64))
    parts = rows.rollout.reward_parts.clone()
    parts[..., 0] = 0.3
    rows = changed(rows, reward_parts=parts)
    if groups == "groups of one":
        rows = replace(make_rows(), group_ids=torch.arange(12))
    assert not algorithm.advantages(rows).advantages.any()
    total, gradient = loss_gradient(algorithm, training_batch(algorithm, rows), moved_logprobs(rows))
    assert total == 0 and not gradient.any()


@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_the_step_whatever_the_number_of_updates(case):
    """The split into updates does not change a row's loss, except through the weights of its update."""
    from atomrl.data.rows import to_training_batches

    algorithm, rows = build(case), make_rows()
    credited = algorithm.advantages(rows)
    seen = []
    for part in to_training_batches(credited, algorithm, updates=3, epochs=1, seed=0, step=1):
        whole = part.group_ids.bincount(minlength=3)
        assert algorithm.row_unit == "row" or set(whole.tolist()) <= {0, GROUP}
        for i in range(part.rows):
            same = (credited.tokens[:, : part.tokens.shape[1]] == part.tokens[i]).all(1)
            seen.append(int(same.nonzero()[0, 0]))
            assert torch.equal(part.advantages[i], credited.advantages[seen[-1], : part.tokens.shape[1]])
            if part.token_filter is not None:
                assert torch.equal(part.token_filter[i], credited.token_filter[seen[-1], : part.tokens.shape[1]])
    assert sorted(seen) == list(range(12))
