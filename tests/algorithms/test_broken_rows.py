"""Trajectories of several rows, where a model no longer saw its oldest turns: they are learned from as one row is."""

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.batches import RowBatch, concat_turns, flat_fields, select_rows, split_turns
from atomrl.config import ConfigError, load_config
from atomrl.data.rows import to_training_batches, with_advantages
from atomrl.trainer.report.metrics import mean_advantages
from tests.algorithms.batches import LIMIT, changed, flat_rows, loss_gradient, make_rows, moved_logprobs, with_turns
from tests.algorithms.test_properties import CASES, build

ROWS = with_turns(make_rows())
ROWS = changed(ROWS, trajectory_index=torch.arange(ROWS.rows), response_lengths=ROWS.lengths - ROWS.prompt_lengths)
DRAWN = {"random", "clip"}
"""In the names of cases that choose tokens at random, with a seed that is what all rows hold."""
BY_TOKEN = [case for case in CASES if not any(p.by_completion for c in build(case).used_axes().values() for p in c)]


def broken(rows: RowBatch) -> tuple[RowBatch, torch.Tensor]:
    """Each trajectory with a row for each turn, which begins with its prompt and the turn before; and of each token the
    place that it had, in all rows of [B, T] one behind the other, -1 where an earlier row has it, too."""
    made = []
    for row, turns in enumerate(rows.rollout.turn_ids.tolist()):
        length, prompt = int(rows.lengths[row]), int(rows.prompt_lengths[row])
        starts = [turns.index(turn) for turn in range(max(turns) + 1)] or [0]
        starts[0] = 0
        for turn, start in enumerate(starts):
            end = starts[turn + 1] if turn + 1 < len(starts) else length
            shown = [*range(prompt), *range(max(prompt, starts[turn - 1]), start)] if turn else []
            made.append((row, shown, [*range(start, end)]))
    width = max(len(shown) + len(own) for _, shown, own in made)
    columns, own_places = torch.zeros(2, len(made), width, dtype=torch.long)
    for number, (row, shown, own) in enumerate(made):
        columns[number, : len(shown) + len(own)] = torch.tensor([*shown, *own])
        hidden = [-1] * len(shown) + [row * rows.tokens.shape[1] + place for place in own]
        own_places[number] = torch.tensor(hidden + [-1] * (width - len(hidden)))
    source, others = torch.tensor([row for row, _, _ in made]), own_places < 0
    changes = {}
    for name, value in flat_fields(rows).items():
        if isinstance(value, torch.Tensor):
            changes[name] = value[source].gather(1, columns) if value.dim() == 2 else value[source]
    changes["lengths"] = torch.tensor([len(shown) + len(own) for _, shown, own in made])
    for name, nothing in (("loss_mask", False), ("turn_ids", -1), ("state_ids", -1), ("token_rewards", 0.0)):
        changes[name] = changes[name].masked_fill(others, nothing)
    return flat_rows(**changes), own_places


BROKEN, PLACES = broken(ROWS)


def test_rows_are_laid_end_to_end_and_taken_apart():
    whole = concat_turns(BROKEN)
    assert BROKEN.rows > ROWS.rows + 6 and whole.rows == ROWS.rows
    assert torch.equal(whole.trajectory_index, ROWS.trajectory_index) and torch.equal(whole.rewards, ROWS.rewards)
    for name in ("tokens", "values", "token_rewards", "turn_ids"):
        for row in range(ROWS.rows):
            mine = flat_fields(whole)[name][row][whole.loss_mask[row]]
            assert torch.equal(mine, flat_fields(ROWS)[name][row][ROWS.loss_mask[row]])
    inside = torch.arange(BROKEN.tokens.shape[1]) < BROKEN.lengths[:, None]
    assert torch.equal(split_turns(whole.tokens, BROKEN), BROKEN.tokens * inside)
    assert concat_turns(ROWS) is ROWS and split_turns(ROWS.values, ROWS) is ROWS.values


@pytest.mark.parametrize("order", ["as made", "torn apart"])
def test_in_any_order_of_trajectories(order):
    index = torch.arange(BROKEN.rows)
    if order == "torn apart":  # the rows of a trajectory stay in their order
        keys = torch.rand(BROKEN.rows, generator=torch.Generator().manual_seed(0))
        for one in range(ROWS.rows):
            mine = BROKEN.trajectory_index == one
            keys[mine] = keys[mine].sort().values
        index = keys.argsort()
    rows = select_rows(BROKEN, index)
    assert torch.equal(concat_turns(rows).tokens, concat_turns(BROKEN).tokens)


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_those_of_an_unbroken_row(case):
    algorithm = build(case)
    whole, apart = with_advantages(algorithm, ROWS), with_advantages(algorithm, BROKEN)
    own = apart.loss_mask
    assert torch.equal(own, BROKEN.loss_mask & whole.loss_mask.flatten()[PLACES])
    names = ["advantages", *(["returns"] if whole.returns is not None else [])]
    for name in names:
        wanted = getattr(whole, name).flatten()[PLACES[own]]
        assert torch.allclose(getattr(apart, name)[own], wanted, atol=1e-12, rtol=1e-12)
    assert not apart.advantages[~own].any()
    assert mean_advantages(apart) == pytest.approx(mean_advantages(whole), abs=1e-9)
    assert apart.state == pytest.approx(whole.state)


@pytest.mark.parametrize("case", [case for case in BY_TOKEN if not DRAWN & set(case.replace("_", " ").split())])
def test_the_gradient_is_that_of_an_unbroken_row(case):
    algorithm, logprobs, gradients = build(case), moved_logprobs(ROWS), []
    for rows in (ROWS, BROKEN):
        (batch,) = to_training_batches(with_advantages(algorithm, rows), algorithm, updates=1, epochs=1, seed=0, step=1)
        given = logprobs if rows is ROWS else torch.where(PLACES < 0, -1.0, logprobs.flatten()[PLACES])
        gradients.append(loss_gradient(algorithm, batch, given))
    (loss, gradient), (other, parts) = gradients
    assert other == pytest.approx(loss, abs=1e-12) and gradient.any()
    shape = [*gradient.shape[2:]]
    back = torch.zeros([gradient.shape[0] * gradient.shape[1], *shape], dtype=gradient.dtype)
    back.index_add_(0, PLACES[PLACES >= 0], parts[PLACES >= 0])
    assert torch.allclose(back.view_as(gradient), gradient, atol=1e-12, rtol=0) and not parts[PLACES < 0].any()


@pytest.mark.parametrize("loss_agg", ["token_mean", "sequence_mean", "constant_length", "prompt_mean"])
def test_the_rows_of_a_trajectory_are_in_one_update_and_weigh_as_one(loss_agg):
    algorithm = objective_of({"name": "grpo", "loss_agg": loss_agg}).resolved(max_completion_tokens=LIMIT)
    parts = list(
        to_training_batches(with_advantages(algorithm, BROKEN), algorithm, updates=3, epochs=1, seed=0, step=1)
    )
    seen = [set(part.trajectory_index.tolist()) for part in parts]
    assert len(parts) == 3 and sum(map(len, seen)) == ROWS.rows == len(set.union(*seen))
    for part in parts:
        index = torch.tensor(sorted(set(part.trajectory_index.tolist())))
        alone = select_rows(ROWS, index)
        weights = algorithm.loss_weights(alone.loss_mask, alone.group_ids)
        own = torch.zeros(len(index), dtype=weights.dtype)
        own.index_add_(0, torch.searchsorted(index, part.trajectory_index), part.loss_weights.sum(1))
        assert torch.allclose(own, weights.sum(1))


CONFIG = {
    "run_name": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "rollout": {"max_completion_tokens": 100},
    "environment": {"function": "f.py:f", "when_full": "drop_oldest", "max_turn_tokens": 50},
}  # fmt: skip


@pytest.mark.parametrize("changes, words", [
    ({"environment": {"max_turn_tokens": None}}, "environment.max_turn_tokens of at most 50"),
    ({"environment": {"max_turn_tokens": 51}}, "environment.max_turn_tokens of at most 50"),
    ({"eval": {"max_completion_tokens": 60}}, "environment.max_turn_tokens of at most 30"),
    ({"environment": {"when_full": "summarise"}}, "'end' or 'drop_oldest'"),
    ({"algorithm": {"name": "online_dpo"}}, "algorithm.name=online_dpo needs completions of one row each"),
    ({"algorithm": {"name": "gspo"}}, "algorithm.ratio=sequence needs all tokens of a completion in one row"),
    ({"algorithm": {"name": "gmpo"}}, "algorithm.clip=gmpo needs all tokens"),
    ({"algorithm": {"name": "grpo", "rollout_is": ["token_tis", "sequence_mask"]}}, "algorithm.rollout_is=sequence_ma"),
    ({"algorithm": {"name": "grpo", "rollout_is": ["sequence_tis"]}}, "algorithm.rollout_is=sequence_tis"),
    ({"algorithm": {"name": "grpo", "rollout_is": ["kl_rejection"]}}, "algorithm.rollout_is=kl_rejection"),
])  # fmt: skip
def test_objectives_that_need_one_row_per_completion_are_refused(changes, words):
    load_config(CONFIG)
    tree = CONFIG | {key: {**CONFIG.get(key, {}), **value} for key, value in changes.items()}
    with pytest.raises(ConfigError, match=words):
        load_config(tree)


@pytest.mark.parametrize("axes", [
    {"rollout_is": [{"type": "sequence_tis", "normalised": True}]}, {"rollout_is": ["second_moment"]},
    {"rollout_is": [{"type": "kl_rejection", "level": "token"}]},
])  # fmt: skip
def test_statistics_of_the_whole_step_are_accepted(axes):
    load_config(CONFIG | {"algorithm": {"name": "grpo", **axes}})
    algorithm = objective_of({"name": "grpo", **axes}).resolved()
    whole, apart = with_advantages(algorithm, ROWS), with_advantages(algorithm, BROKEN)
    if whole.rollout_is_weights is not None:
        wanted = whole.rollout_is_weights.flatten()[PLACES[BROKEN.loss_mask]]
        assert torch.allclose(apart.rollout_is_weights[BROKEN.loss_mask], wanted)
