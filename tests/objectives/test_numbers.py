"""Choices on the axes against numbers worked out by hand, or loops written from their definitions."""

import math
from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.batches import RowBatch
from atomrl.objectives import AdvantageInputs, PolicyObjective
from atomrl.objectives.policy import COEFFICIENT
from tests.algorithms.batches import changed, flat_rows, loss_gradient, make_rows, moved_logprobs, training_batch


def two_rows(**changes) -> RowBatch:
    """One prompt token; completions of 2 and 3 tokens; rewards 1 and 0."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]]).bool()
    rows = flat_rows(
        tokens=torch.tensor([[3, 4, 5, 0], [3, 6, 6, 6]]),
        loss_mask=mask,
        lengths=torch.tensor([3, 4]),
        prompt_lengths=torch.tensor([1, 1]),
        group_ids=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        truncated=torch.tensor([False, True]),
        old_logprobs=torch.tensor([[0, -1.0, -2.0, 0], [0, -1.0, -1.0, -1.0]], dtype=torch.float64),
        ref_logprobs=torch.tensor([[0, -1.5, -2.0, 0], [0, -1.0, -2.0, -1.0]], dtype=torch.float64),
        rollout_logprobs=torch.tensor([[0, -1.0, -3.0, 0], [0, -1.0, -1.1, -0.9]], dtype=torch.float64),
        old_entropy=torch.tensor([[9.0, 0.1, 2.0, 9], [9, 0.3, 1.0, 0.2]], dtype=torch.float64),
    )
    return changed(rows, **changes)


def make(**axes):
    return PolicyObjective(name="test").override(axes).resolved(max_completion_tokens=3)


def credit(rows=None, **axes):
    """The advantage of each row's first trained token."""
    return make(**axes).advantages(two_rows() if rows is None else rows).advantages[:, 1].tolist()


def test_advantages_by_hand():
    assert credit(advantage="raw") == [1, 0]
    assert credit(advantage="grpo_no_std") == [0.5, -0.5]
    assert credit(advantage={"type": "grpo", "eps": 0.0}) == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert credit(advantage={"type": "grpo_batch_std", "eps": 0.0}) == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert credit(advantage="rloo") == [1, -1]
    assert credit(advantage="opo") == pytest.approx([1 - 2 / 5, -2 / 5])
    assert credit(advantage="gpg") == [0.5, -0.5]  # the one group is mixed
    assert credit(advantage={"type": "gpg", "alpha": "verl"}) == [1, -1]  # alpha = 2 rows / 1 with a reward
    assert credit(advantage="pass_at_k") == [1, 0]
    assert credit(advantage={"type": "pass_at_k_analytic", "k": 1}) == pytest.approx([1, -1])
    assert credit(advantage="maxrl") == [1, -1]
    assert credit(two_rows(baseline_rewards=torch.tensor([0.25, 0.25])), advantage="remax") == [0.75, -0.25]
    missing = two_rows(baseline_rewards=torch.tensor([torch.nan, 0.25]))
    assert credit(missing, advantage="remax") == [0, -0.25], "a greedy completion without a reward gives no signal"
    white = [0.6 / 0.3**0.5, -0.4 / 0.3**0.5]
    assert credit(advantage={"type": "reinforce_pp", "eps": 0.0}) == pytest.approx(white)
    assert credit(advantage={"type": "reinforce_pp_baseline", "eps": 0.0}) == pytest.approx(white)


def test_the_optimal_token_baseline_by_hand():
    """Rewards 1 and 0 over 2 and 3 tokens, with energies 0.5, 1 and 0.25, 0.5, 0.75: baselines of 2/3, 2/3 and, in the
    tail of the longer one, 0."""
    half, quarter = math.log(0.5), math.log(0.25)
    rows = two_rows(
        old_logprobs=torch.tensor([[0, half, half, 0], [0, quarter, quarter, quarter]], dtype=torch.float64),
        old_squared_probs=torch.tensor([[9, 0.5, 0.5, 9], [9, -0.25, -0.25, -0.25]], dtype=torch.float64),
    )
    algorithm = make(advantage={"type": "optimal_token_baseline", "eps": 0.0})
    assert algorithm.advantage_inputs == {"old_logprobs", "old_squared_probs"}
    first, second = algorithm.advantages(rows).advantages.tolist()
    assert first == pytest.approx([0, 1 / 3, 1 / 3, 0]) and second == pytest.approx([0, -2 / 3, -2 / 3, 0])
    # The longer one is right: in its tail its own return is the baseline, unless that is 0.
    rows = changed(rows, rewards=torch.tensor([0.0, 1.0], dtype=torch.float64))
    for zero_tail, tail in ((True, 1), (False, 0)):
        algorithm = make(advantage={"type": "optimal_token_baseline", "eps": 0.0, "zero_tail": zero_tail})
        assert algorithm.advantages(rows).advantages[1].tolist() == pytest.approx([0, 2 / 3, 2 / 3, tail])


def test_gdpo_standardises_each_part_and_keeps_its_weight():
    """A part of tiny scale counts as much as its weight says; GRPO's sum drowns it."""
    values = torch.tensor([[1.0, 0.0], [0.0, 0.001], [0.0, 0.0], [1.0, 0.001]])
    parts = torch.stack([values, torch.tensor([[1.0, 2.0]]).expand(4, 2)], -1)
    scores = AdvantageInputs(values @ torch.tensor([1.0, 2.0]), torch.zeros(4, dtype=torch.long), parts=parts)
    advantage = PolicyObjective().override({"advantage": {"type": "gdpo", "eps": 0.0}}).advantage(scores)
    own = torch.tensor([1.0 - 2.0, -1.0 + 2.0, -1.0 - 2.0, 1.0 + 2.0])  # both parts have the same z-scores
    assert torch.allclose(advantage, own / own.std())
    missing = parts.clone()
    missing[0, 1, 0] = torch.nan
    scores = replace(scores, parts=missing)
    assert PolicyObjective().override({"advantage": "gdpo"}).advantage(scores).isfinite().all()


def test_kl_in_the_reward_is_taken_off_before_the_baseline():
    """k1 of the rows: 0.5 and 1. Once per completion for a group, token by token for returns."""
    kl = {"type": "k1", "coefficient": 0.1, "apply_to": "reward"}
    assert credit(advantage="raw", kl=kl) == pytest.approx([0.95, -0.1])
    assert credit(advantage="rloo", kl=kl) == pytest.approx([1.05, -1.05])
    algorithm = make(advantage={"type": "reinforce_pp", "eps": 0.0}, kl=kl)
    returns = torch.tensor([0.95, 1.0, -0.1, -0.1, 0.0], dtype=torch.float64)
    expected = (returns - returns.mean()) / returns.std()
    rows = two_rows()
    actual = algorithm.advantages(rows).advantages[rows.loss_mask]
    torch.testing.assert_close(actual, expected)
    assert algorithm.needs == algorithm.advantage_inputs == {"old_logprobs", "ref_logprobs"}


def test_an_adaptive_coefficient_follows_its_target():
    """k1 is 0.3 a token: with a target of 0.1 the error is bounded by 0.2, and 2 completions of a horizon of 10."""
    kl = {"type": "k1", "coefficient": 0.5, "target": 0.1, "horizon": 10.0}
    algorithm = make(kl=kl)
    batch = training_batch(algorithm, two_rows())
    assert batch.state[COEFFICIENT] == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))
    later = algorithm.advantages(two_rows(), batch.state).state
    assert later[COEFFICIENT] == pytest.approx(batch.state[COEFFICIENT] * (1 + 0.2 * 2 / 10))
    fixed = make(kl={"type": "k1", "coefficient": batch.state[COEFFICIENT]})
    logprobs = two_rows().old_logprobs
    assert loss_gradient(algorithm, batch, logprobs)[0] == pytest.approx(loss_gradient(fixed, batch, logprobs)[0])
    inside = make(kl=kl | {"apply_to": "reward"})
    assert (
        inside.advantages(two_rows()).advantages.tolist()
        == make(kl={"type": "k1", "coefficient": 0.5, "apply_to": "reward"}).advantages(two_rows()).advantages.tolist()
    ), "the reward is charged what held while it was earned"


def test_shaping_by_hand():
    """Limit 3, buffer 2: a completion of 2 pays a half, one of 3 all."""
    soft = {"soft_overlong": True, "max_completion_tokens": 3, "overlong_buffer_tokens": 2, "overlong_penalty": 0.5}
    assert credit(advantage="raw", shaping=soft) == [0.75, -0.5]
    assert credit(advantage="raw", shaping={"repetition_ngram_tokens": 1}) == pytest.approx([1, -2 / 3])
    assert credit(advantage="raw", shaping={"lowest": 0.25, "highest": 0.5}) == [0.5, 0.25]
    filtered = make(advantage="grpo_no_std", shaping={"mask_truncated": True}).advantages(two_rows())
    assert filtered.loss_mask.tolist() == [[False, True, True, False], [False] * 4]
    assert filtered.advantages.tolist() == [[0, 0.5, 0.5, 0], [0] * 4]


def test_aggregates_by_hand():
    rows = two_rows(group_ids=torch.tensor([0, 1]))
    for axes, expected in (
        ({"loss_agg": "token_mean"}, [0.2, 0.2]),
        ({"loss_agg": "sequence_mean"}, [0.25, 1 / 6]),
        ({"loss_agg": "constant_length"}, [1 / 6, 1 / 6]),
        ({"loss_agg": "prompt_mean"}, [0.25, 1 / 6]),
    ):
        assert training_batch(make(**axes), rows).loss_weights[:, 1].tolist() == pytest.approx(expected)
    one_group = training_batch(make(loss_agg="prompt_mean"), two_rows())
    assert one_group.loss_weights[:, 1].tolist() == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ("token_tis", [[1, 2], [1, math.exp(0.1), math.exp(-0.1)]]),
        ("sequence_tis", [[2, 2], [1, 1, 1]]),
        ({"type": "token_mis", "high": 2.0}, [[1, 0], [1, math.exp(0.1), math.exp(-0.1)]]),
        ({"type": "icepop", "low": 0.95}, [[1, math.e], [1, math.exp(0.1), 0]]),
        ("sequence_mis", [[0, 0], [1, 1, 1]]),
        ("sequence_mask", [[0, 0], [1, 1, 1]]),
        ({"type": "sequence_mask", "weighted": True}, [[0, 0], [1, math.exp(0.1), math.exp(-0.1)]]),
        ({"type": "kl_rejection", "bound": 0.01}, [[0, 0], [1, 1, 1]]),
        ({"type": "kl_rejection", "bound": 0.01, "level": "token"}, [[1, 0], [1, 1, 1]]),
        ({"type": "kl_rejection", "bound": 0.05, "level": "sum", "estimator": "k1"}, [[1, 1], [1, 1, 1]]),
        # log mu - log pi_old is 0, -1 and 0, -0.1, 0.1; half its square 0, 0.5 and 0, 0.005, 0.005.
        (
            {"type": "kl_rejection", "bound": 0.05, "low": -0.5, "level": "token", "estimator": "k1"},
            [[1, 0], [1, 1, 0]],
        ),
        ({"type": "kl_rejection", "bound": 0.05, "low": -0.5, "level": "sum", "estimator": "k1"}, [[0, 0], [1, 1, 1]]),
        ({"type": "kl_rejection", "bound": 0.45, "level": "max", "estimator": "k2"}, [[0, 0], [1, 1, 1]]),
        ({"type": "kl_rejection", "bound": 0.51, "level": "max", "estimator": "k2"}, [[1, 1], [1, 1, 1]]),
        # Weights 1 2 1 e^0.1 e^-0.1 by token; by completion 2 2 1 1 1, the mean of whose rows is 1.5.
        (
            {"type": "token_tis", "normalised": True},
            [[1 / 1.20200167, 2 / 1.20200167], [w / 1.20200167 for w in (1, math.exp(0.1), math.exp(-0.1))]],
        ),
        ({"type": "sequence_tis", "normalised": True}, [[4 / 3, 4 / 3], [2 / 3] * 3]),
        # Squares 1 for the second token and 0.01 for the last two: without the first their mean is 0.005.
        ({"type": "second_moment", "bound": 0.006}, [[1, 0], [1, 1, 1]]),
        ({"type": "second_moment", "bound": 0.3}, [[1, 1], [1, 1, 1]]),
        (
            ["token_tis", {"type": "kl_rejection", "bound": 0.01, "level": "token"}],
            [[1, 0], [1, math.exp(0.1), math.exp(-0.1)]],
        ),
        (["second_moment", {"type": "token_mis", "low": 0.95}], [[1, 0], [1, math.exp(0.1), 0]]),
        (["icepop"], [[1, math.e], [1, math.exp(0.1), math.exp(-0.1)]]),
        ([], [[1, 1], [1, 1, 1]]),
    ],
)
def test_corrections_by_hand(axes, expected):
    """The engine found the second token e times less likely than the trainer; two more off by 0.1 either way. The
    gradient of REINFORCE with an advantage of 1 is the weight times the factor."""
    rows = two_rows(rewards=torch.ones(2, dtype=torch.float64))
    algorithm = make(advantage="raw", clip="reinforce", rollout_is=axes)
    batch = training_batch(algorithm, rows)
    _, gradient = loss_gradient(algorithm, batch, rows.old_logprobs)
    factors = (-gradient / 0.2)[rows.loss_mask]
    assert factors.tolist() == pytest.approx([x for row in expected for x in row], abs=1e-6)


def test_the_rollout_policy_as_the_old_policy():
    """log pi - log mu is 0.1, 1 and 0.1, 0.2, 0: PPO clips the second token, and corrections weigh by the policy of the
    update, whatever the old log-probs are."""
    rows = two_rows(rewards=torch.ones(2, dtype=torch.float64))
    moved = rows.old_logprobs + torch.tensor([[0, 0.1, 0.0, 0], [0, 0.1, 0.1, 0.1]], dtype=torch.float64)
    for axes, factors in (
        ({"clip": "ppo"}, [math.exp(0.1), 0, math.exp(0.1), 0, 1]),
        ({"clip": "none"}, [math.exp(0.1), math.e, math.exp(0.1), math.exp(0.2), 1]),
        ({"clip": "reinforce", "rollout_is": "token_tis"}, [math.exp(0.1), 2, math.exp(0.1), math.exp(0.2), 1]),
        (
            {"clip": "none", "rollout_is": {"type": "kl_rejection", "bound": 0.4, "level": "max", "estimator": "k2"}},
            [0, 0, math.exp(0.1), math.exp(0.2), 1],
        ),
    ):
        # PPO's second and fourth token are beyond 1.2, where the gradient is 0: e^0.2 is 1.22.
        algorithm = make(advantage="raw", old_policy="rollout", **axes)
        assert algorithm.needs == set()
        for old in (rows.old_logprobs, None):
            batch = replace(training_batch(algorithm, rows), old_logprobs=old)
            _, gradient = loss_gradient(algorithm, batch, moved)
            assert (-gradient / 0.2)[rows.loss_mask].tolist() == pytest.approx(factors, abs=1e-6)
    assert make(old_policy="rollout", kl={"coefficient": 0.1}).needs == {"ref_logprobs"}
    assert make(old_policy="trainer").needs == {"old_logprobs"}
    with pytest.raises(ValueError, match=r"old_policy: rollout .* token_tis is computed once per step"):
        make(old_policy="rollout", rollout_is={"type": "token_tis", "normalised": True})
    with pytest.raises(ValueError, match="old_policy=rollout needs log-probs, which this engine does not return"):
        make(old_policy="rollout").advantages(two_rows(rollout_logprobs=None))


def test_corrections_over_a_whole_step_need_old_logprobs():
    for axes, reads in (
        ("token_tis", set()),
        ({"type": "token_tis", "normalised": True}, {"old_logprobs"}),
        (["icepop", "second_moment"], {"old_logprobs"}),
    ):
        assert make(rollout_is=axes).advantage_inputs == reads


def test_off_policy_sequences_are_masked_where_the_advantage_is_negative():
    rows = two_rows()
    algorithm = make(advantage="grpo_no_std", clip="reinforce", rollout_is="off_policy_sequences")
    far = rows.old_logprobs - 1.0
    _, gradient = loss_gradient(algorithm, training_batch(algorithm, rows), far)
    assert gradient[0, 1] == pytest.approx(-0.1) and not gradient[1].any()


def test_a_correction_without_log_probs_of_the_engine_is_refused():
    for axes in ("token_tis", "second_moment", ["kl_rejection", "token_tis"]):
        with pytest.raises(ValueError, match="needs log-probs"):
            make(rollout_is=axes).advantages(two_rows(rollout_logprobs=None))


def test_selections_by_hand():
    def chosen(**axes):
        return make(token_filter=axes).advantages(two_rows()).token_filter.int().tolist()

    assert chosen(type="high_entropy", fraction=0.4) == [[0, 0, 1, 0], [0, 0, 1, 0]]
    assert chosen(type="high_entropy", tokens=3) == [[0, 0, 1, 0], [0, 1, 1, 0]]
    assert sum(map(sum, chosen(type="random", fraction=0.6))) == 3
    assert chosen(type="random", tokens=2) == chosen(type="random", tokens=2), "a resumed run makes the same choice"
    # Advantages z z -z -z -z and log-probs -1 -2 -1 -1 -1: the first token alone has a positive covariance.
    assert chosen(type="kl_cov", fraction=0.2) == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert chosen(type="clip_cov", low=0.0, high=9.0, fraction=0.2) == [[1, 0, 1, 1], [1, 1, 1, 1]], (
        "all but that of token 1"
    )


def test_kl_cov_pulls_the_chosen_tokens_back():
    rows = two_rows()
    algorithm = make(advantage="grpo_no_std", clip="none", token_filter={"type": "kl_cov", "coefficient": 3.0})
    batch = training_batch(algorithm, rows)
    moved = rows.old_logprobs + 0.5
    total, _ = loss_gradient(algorithm, batch, moved)
    plain = make(advantage="grpo_no_std", clip="none")
    assert total - loss_gradient(plain, training_batch(plain, rows), moved)[0] == pytest.approx(0.2 * 3.0 * 0.5)


def test_gspo_token_has_the_value_and_gradient_of_gspo():
    rows = make_rows()
    logprobs = moved_logprobs(rows)
    results = []
    for name in ("gspo", "gspo_token"):
        algorithm = objective_of({"name": name, "clip": {"low": 0.2, "high": 0.2}}).resolved()
        results.append(loss_gradient(algorithm, training_batch(algorithm, rows), logprobs))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-10, atol=1e-14)


def test_gmpo_is_the_geometric_mean():
    rows = two_rows()
    algorithm = make(advantage="grpo_no_std", clip="gmpo", loss_agg="sequence_mean")
    moved = rows.old_logprobs + torch.tensor([[0, 0.3, 0.9, 0], [0, -0.6, 0.2, 0.1]])
    total, _ = loss_gradient(algorithm, training_batch(algorithm, rows), moved)
    good, bad = 0.5 * math.exp((0.3 + 0.4) / 2), -0.5 * math.exp((-0.4 + 0.2 + 0.1) / 3)
    assert total == pytest.approx(-(good + bad) / 2)


def test_on_policy_every_ratio_rule_has_the_gradient_of_reinforce():
    """At a ratio of 1 the rules differ in nothing; SAPO's sigmoid has a slope of 1 there, and a mean shares it."""
    rows = make_rows()
    aggregate = {"type": "sequence_mean"}
    wanted = None
    for clip in ("reinforce", "none", "ppo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl"):
        algorithm = make(clip=clip, loss_agg=aggregate)
        _, gradient = loss_gradient(algorithm, training_batch(algorithm, rows), rows.old_logprobs)
        wanted = gradient if wanted is None else wanted
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)


def test_a_batchs_deviation_is_that_of_all_rewards():
    """As TRL computes it: not of the centred ones, which groups without a signal would make smaller."""
    rewards, groups = torch.tensor([1.0, 0, 1, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    choice = make(advantage={"type": "grpo_batch_std", "eps": 0.0}).advantage
    inputs = AdvantageInputs(rewards, groups)
    assert choice(inputs).tolist() == pytest.approx([v / rewards.std().item() for v in (0.5, -0.5, 0, 0, 0, 0)])
