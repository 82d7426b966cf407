"""What holds for every objective of preferences, and how pairs, labels and ranks come about."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atomrl import assembly
from atomrl.algorithms.table import PREFERENCES, build_algorithm, objective_of, preference_objective
from atomrl.objective.pairing import best_and_worst
from atomrl.stages import RowBatch, select_rows
from tests.algorithms.batches import GROUP, loss_gradient, make_rows, moved_logprobs, training_batch

EXTRA = {
    "ld_dpo by token": ("ld_dpo", {"score": {"length_normalised": True}}),
    "ranked with less of the rest": ("aot", {"score": {"ld_alpha": 0.3}, "loss": {"label_smoothing": 0.1}}),
    "forward KL": ("dpo", {"score": {"divergence": "forward_kl"}}),
    "alpha divergence": ("rpo", {"score": {"divergence": "alpha_divergence", "alpha": 0.5}}),
    "AlphaPO": ("simpo", {"score": {"shape": 0.25}}),
    "three losses": ("mpo", {"loss": ["hinge", "ipo", {"type": "exo_pair", "beta": 0.2}], "loss_weights": [1, 2, 0.5]}),
}
CASES = {name: (name, {}) for name in PREFERENCES} | EXTRA


def build(case):
    name, axes = CASES[case]
    return build_algorithm(name, axes)


def step_rows() -> RowBatch:
    """Three groups of four completions, and four completions of other prompts, as KTO wants them."""
    rows, others = make_rows(), make_rows(groups=1, seed=5)
    width = rows.tokens.shape[1]
    changes = {}
    for name, value in vars(rows).items():
        other = getattr(others, name)
        if value is None or name in ("baseline_rewards", "reward_parts"):
            changes[name] = None
        else:
            other = other[:, :width] if value.dim() == 2 else other
            changes[name] = torch.cat([value, other])
    changes["group_ids"] = torch.cat([rows.group_ids, torch.arange(50, 54)])
    changes["rewards"] = torch.cat([rows.rewards, torch.zeros(GROUP, dtype=torch.float64)])
    return RowBatch(**changes)


def trained(algorithm, rows):
    """The batch, and the log-probs of its rows: KTO leaves out the rows that it only measures."""
    batch = training_batch(algorithm, rows)
    if batch.rows < rows.rows:
        keep = torch.arange(batch.rows)
        assert torch.equal(batch.tokens, select_rows(rows, keep).tokens)
        return batch, moved_logprobs(rows)[keep, : batch.tokens.shape[1]]
    return batch, moved_logprobs(rows)


@pytest.mark.parametrize("case", CASES)
def test_any_split_that_keeps_pairs_gives_the_same_gradient(case):
    algorithm = build(case)
    batch, logprobs = trained(algorithm, step_rows())
    total, whole = loss_gradient(algorithm, batch, logprobs)
    assert whole.abs().max() > 0 and whole.isfinite().all()
    units = torch.arange(batch.rows) if algorithm.row_unit == "row" else batch.group_ids
    alone = [(units == unit).nonzero()[:, 0].tolist() for unit in units.unique()]
    assert len(alone) > 2
    for parts in (alone, [alone[-1], [row for part in alone[:-1] for row in reversed(part)]]):
        split_total, split = loss_gradient(algorithm, batch, logprobs, parts)
        assert (split - whole).abs().max() <= 1e-12
        assert abs(split_total - total) <= 1e-12 * max(1, abs(total))


@pytest.mark.parametrize("case", CASES)
def test_any_order_of_rows_gives_the_same_gradient(case):
    rows = step_rows()
    rows = replace(rows, rewards=(2 * rows.rewards).round() / 2)  # with ties
    order = torch.randperm(rows.rows, generator=torch.Generator().manual_seed(3))
    shuffled = select_rows(rows, order)
    found = {}
    for place, batch_rows in enumerate((rows, shuffled)):
        algorithm = build(case)
        batch = training_batch(algorithm, batch_rows)
        by_tokens = {
            tuple(row.tolist()): logprob for row, logprob in zip(rows.tokens, moved_logprobs(rows), strict=True)
        }
        width = batch.tokens.shape[1]
        logprobs = torch.stack(
            [next(v for k, v in by_tokens.items() if k[:width] == tuple(row.tolist())) for row in batch.tokens]
        )[:, :width]
        _, gradient = loss_gradient(algorithm, batch, logprobs)
        found[place] = {tuple(row.tolist()): grad for row, grad in zip(batch.tokens, gradient, strict=True)}
    assert found[0].keys() == found[1].keys() and any(grad.any() for grad in found[0].values())
    assert all((found[0][key] - found[1][key]).abs().max() <= 1e-12 for key in found[0])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_garbage_off_the_mask_is_harmless(case, garbage):
    rows = step_rows()
    off = ~rows.loss_mask
    dirty = replace(rows, **{n: getattr(rows, n).masked_fill(off, garbage) for n in ("old_logprobs", "ref_logprobs")})
    clean_batch, logprobs = trained(algorithm := build(case), rows)
    clean = loss_gradient(algorithm, clean_batch, logprobs)
    batch, _ = trained(algorithm := build(case), dirty)
    found = loss_gradient(algorithm, batch, logprobs.masked_fill(off[: batch.rows, : logprobs.shape[1]], garbage))
    assert found[0] == pytest.approx(clean[0], rel=1e-12) and torch.equal(found[1], clean[1])


@pytest.mark.parametrize("case", CASES)
def test_what_makes_no_pair_gives_no_gradient(case):
    """Equal rewards, groups of one, and rows without a token."""
    algorithm, rows = build(case), make_rows()
    ties = replace(rows, rewards=torch.full_like(rows.rewards, 0.3))
    if not objective_of(*CASES[case]).unpaired:
        ones = replace(rows, group_ids=torch.arange(rows.rows))
        for without in (ties, ones):
            total, gradient = loss_gradient(algorithm, training_batch(algorithm, without), moved_logprobs(rows))
            assert total == 0 and not gradient.any()
        empty = replace(rows, loss_mask=torch.zeros_like(rows.loss_mask))
        assert not algorithm.advantages(empty).advantages.any()
    nothing = select_rows(step_rows(), torch.tensor([], dtype=torch.long))
    assert build(case).advantages(nothing).rows == 0


def test_the_best_and_the_worst_make_a_pair():
    rows = make_rows(rewards=torch.tensor([1, 4, 3, 2, 5, 5, 5, 5, 0, 1, 2, 9], dtype=torch.float64))
    assert best_and_worst(rows).tolist() == [-1, 1, 0, 0, 0, 0, 0, 0, -1, 0, 1, 0], "the last has no token"
    credited = build("online_dpo").advantages(rows)
    assert credited.loss_mask.any(1).tolist() == [True, True, *[False] * 6, True, False, True, False]


def test_what_is_loaded_and_what_is_kept():
    assert build("dpo").needs == {"ref_logprobs"} and not build("simpo").needs and not build("orpo").needs
    assert build("kto").advantages_read == {"old_logprobs", "ref_logprobs"} and build("kto").row_unit == "row"
    assert build("dpo").row_unit == "pair"
    bco = build("bco")
    bco.advantages(make_rows())
    first = dict(bco.state)
    bco.advantages(make_rows(seed=9))
    assert bco.state["reference_count"] == 2 * first["reference_count"] > 0
    assert bco.state["reference"] != first["reference"]


@pytest.mark.parametrize(
    ("name", "axes", "message"),
    [
        ("dpo", {"los": "hinge"}, "did you mean 'loss'"),
        ("dpo", {"online": True}, "unknown name 'online'"),
        ("dpo", {"loss": {"beta": -1}}, "loss.beta must be a number of at least 0"),
        ("dpo", {"loss": "hing"}, "did you mean 'hinge'"),
        ("dpo", {"score": 3}, "algorithm.score takes a mapping"),
        ("robust_dpo", {"loss": {"label_smoothing": 0.5}}, "label_smoothing=0.5 must be"),
        ("exo", {"loss": {"label_smoothing": 0}}, "must be between 0 and 1"),
        ("mpo", {"loss_weights": [1]}, "1 weights for 2 losses"),
        ("dpo", {"loss": ["sigmoid", "aot"]}, "aot cannot be one of several"),
        ("kto", {"score": "logprob"}, "score must be log_ratio"),
        ("kto", {"nll": {"coefficient": 1}}, "kto has no pairs"),
        ("orpo", {"score": {"length_normalised": False}}, "takes mean log-probs"),
        ("aot_unpaired", {"score": {"ld_alpha": 0.5}}, "no length that two share"),
        ("aot", {"score": {"length_normalised": True}}, "sums of log-ratios"),
        ("aot", {"score": {"divergence": "js_divergence"}}, "sums of log-ratios"),
    ],
)
def test_mistakes_in_axes_are_named(name, axes, message):
    with pytest.raises(ValueError, match=message):
        preference_objective(name, axes).algorithm(name)


def test_algorithms_on_the_wrong_data_are_refused(tmp_path):
    from atomrl.config import build_config

    for name in ("grpo", "online_dpo"):
        with pytest.raises(ValueError, match=f"{name} is trained on rollouts, by `atomrl train`"):
            preference_objective(name, {})
    config = build_config(
        {"run_name": "x", "data": {"train": "chain", "train_size": 3}, "model": {"path": "nowhere"},
         "algorithm": {"name": "kto"}, "output_dir": str(tmp_path)}
    )  # fmt: skip
    with pytest.raises(ValueError, match="kto is trained on given preferences, by `atomrl dpo`"):
        assembly.train(config)
    with pytest.raises(ValueError, match="kto needs completions of other prompts"):
        build("kto").advantages(make_rows())
