"""Properties of every preference objective, and how pairs, labels and ranks are made."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import PREFERENCES, objective_of
from atomrl.batches import RowBatch, flat_fields, select_rows
from atomrl.objectives.preference_loss import best_and_worst
from atomrl.protocols import ModelOutputs
from tests.algorithms.batches import (
    GROUP,
    changed,
    flat_rows,
    loss_gradient,
    make_rows,
    moved_logprobs,
    training_batch,
)

EXTRA = {
    "ld_dpo by token": ("ld_dpo", {"score": {"length_normalised": True}}),
    "ranked with less of the rest": ("aot", {"score": {"ld_alpha": 0.3}, "loss": {"label_smoothing": 0.1}}),
    "forward KL": ("dpo", {"score": {"divergence": "forward_kl"}}),
    "alpha divergence": ("rpo", {"score": {"divergence": "alpha_divergence", "alpha": 0.5}}),
    "AlphaPO": ("simpo", {"score": {"shape": 0.25}}),
    "three losses": (
        "mpo",
        {"loss": ["hinge", {"type": "ipo", "weight": 2}, {"type": "exo_pair", "beta": 0.2, "weight": 0.5}]},
    ),
}
CASES = {name: (name, {}) for name in PREFERENCES} | EXTRA


def build(case):
    name, axes = CASES[case]
    return objective_of({"name": name, **axes}).resolved()


def step_rows() -> RowBatch:
    """Three groups of four completions, and four completions of other prompts, as KTO wants them."""
    rows, others = make_rows(), make_rows(groups=1, seed=5)
    width = rows.tokens.shape[1]
    changes = {}
    for name, value in flat_fields(rows).items():
        other = flat_fields(others)[name]
        if value is None:
            changes[name] = None
        else:
            other = other[:, :width] if value.dim() == 2 else other
            changes[name] = torch.cat([value, other])
    changes["group_ids"] = torch.cat([rows.group_ids, torch.arange(50, 54)])
    changes["rewards"] = torch.cat([rows.rewards, torch.zeros(GROUP, dtype=torch.float64)])
    changes["mismatched"] = torch.arange(rows.rows + GROUP) >= rows.rows
    return flat_rows(**changes)


def trained(algorithm, rows):
    """The batch, and the log-probs of its rows: what is in no pair is left out, and what is only measured."""
    batch = training_batch(algorithm, replace(rows, trajectory_index=torch.arange(rows.rows)))
    assert torch.equal(batch.tokens, select_rows(rows, batch.trajectory_index).tokens) and batch.preference.labels.all()
    return batch, moved_logprobs(rows)[batch.trajectory_index, : batch.tokens.shape[1]]


@pytest.mark.parametrize("case", CASES)
def test_any_split_that_keeps_pairs_gives_the_same_gradient(case):
    algorithm = build(case)
    batch, logprobs = trained(algorithm, step_rows())
    total, whole = loss_gradient(algorithm, batch, logprobs)
    assert whole.abs().max() > 0 and whole.isfinite().all()
    units = batch.unit_ids(algorithm.row_unit)
    units = torch.arange(batch.rows) if units is None else units
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
    gradients = {}
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
        gradients[place] = {tuple(row.tolist()): grad for row, grad in zip(batch.tokens, gradient, strict=True)}
    assert gradients[0].keys() == gradients[1].keys() and any(grad.any() for grad in gradients[0].values())
    assert all((gradients[0][key] - gradients[1][key]).abs().max() <= 1e-12 for key in gradients[0])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_garbage_off_the_mask_is_harmless(case, garbage):
    rows = step_rows()
    off = ~rows.loss_mask
    dirty = replace(rows, **{n: getattr(rows, n).masked_fill(off, garbage) for n in ("old_logprobs", "ref_logprobs")})
    clean_batch, logprobs = trained(algorithm := build(case), rows)
    clean = loss_gradient(algorithm, clean_batch, logprobs)
    batch, _ = trained(algorithm, dirty)
    gradient = loss_gradient(algorithm, batch, logprobs.masked_fill(~batch.loss_mask, garbage))
    assert gradient[0] == pytest.approx(clean[0], rel=1e-12) and torch.equal(gradient[1], clean[1])


@pytest.mark.parametrize("case", CASES)
def test_completions_without_a_pair_are_not_trained_on(case):
    """Equal rewards, groups of one, and rows without a token; a pair of which one completion has no token."""
    algorithm, rows = build(case), make_rows()
    nothing = select_rows(step_rows(), torch.tensor([], dtype=torch.long))
    assert algorithm.advantages(nothing).rows == 0
    if build(case).unpaired:
        return
    ties = replace(rows, rewards=torch.full_like(rows.rewards, 0.3))
    ones = replace(rows, group_ids=torch.arange(rows.rows))
    empty = replace(rows, loss_mask=torch.zeros_like(rows.loss_mask))
    assert all(algorithm.advantages(without).rows == 0 for without in (ties, ones, empty))
    labels = torch.tensor([1, -1] * 6)
    given = changed(rows, labels=labels, pair_ids=torch.arange(6).repeat_interleave(2))
    assert algorithm.advantages(given).rows == 10, "the last row has no token, so the one before it has no pair"
    with pytest.raises(ValueError, match="pair_ids"):
        algorithm.advantages(changed(rows, labels=labels))


def test_the_best_and_the_worst_make_a_pair():
    rows = make_rows(rewards=torch.tensor([1, 4, 3, 2, 5, 5, 5, 5, 0, 1, 2, 9], dtype=torch.float64))
    assert best_and_worst(rows).tolist() == [-1, 1, 0, 0, 0, 0, 0, 0, -1, 0, 1, 0], "the last has no token"
    credited = build("online_dpo").advantages(replace(rows, trajectory_index=torch.arange(12)))
    assert credited.trajectory_index.tolist() == [0, 1, 8, 10] and credited.preference.labels.tolist() == [-1, 1, -1, 1]
    assert credited.pair_ids.tolist() == [0, 0, 2, 2] and not credited.advantages.any()


def test_what_is_loaded_and_what_is_kept():
    assert build("dpo").needs == {"ref_logprobs"} and not build("simpo").needs and not build("orpo").needs
    assert build("kto").advantage_inputs == {"old_logprobs", "ref_logprobs"} and build("kto").row_unit == "row"
    assert build("dpo").row_unit == "pair"
    bco = build("bco")
    first = bco.advantages(make_rows()).state
    second = bco.advantages(make_rows(seed=9), first).state
    assert second["reference_count"] == 2 * first["reference_count"] > 0
    assert second["reference"] != first["reference"]


def test_the_quality_loss_of_mpo_has_the_running_mean_of_rewards():
    mpo, bco, state, labelled = build("mpo"), build("bco"), {}, {}
    assert mpo.advantage_inputs == {"old_logprobs", "ref_logprobs"}
    for seed in (1, 9):
        state = mpo.advantages(make_rows(seed=seed), state).state
        labelled = bco.advantages(make_rows(seed=seed), labelled).state
        assert state["reference"] == pytest.approx(labelled["reference"]) and state["reference"] != 0
    chosen, rejected = torch.tensor([3.0, -1.0]), torch.tensor([1.0, 2.0])
    shift, sigmoid = torch.tensor(0.25), torch.nn.functional.logsigmoid
    expected = -sigmoid(0.1 * chosen - shift) - sigmoid(shift - 0.1 * rejected)
    torch.testing.assert_close(mpo.losses[1](chosen, rejected, shift), expected)
    rows, weights = make_rows(seed=3), {"loss": "bco_pair_shift", "nll": {"coefficient": 0}}
    batch = training_batch(objective_of({"name": "mpo", **weights}).resolved(), rows)
    far, near = (
        loss_gradient(
            objective_of({"name": "mpo", **weights}).resolved(), replace(batch, state=given), batch.old_logprobs
        )
        for given in (batch.state, {**batch.state, "reference": 0.0})
    )
    assert far[0] != near[0], "the shift is in what is trained"


@pytest.mark.parametrize("case", CASES)
def test_nothing_hides_in_a_field_of_another_name(case):
    """Labels, pairs and margins have fields; what else there is of a row stays as it was."""
    rows = replace(step_rows(), trajectory_index=torch.arange(16))
    before = select_rows(rows, build(case).advantages(rows).trajectory_index)
    after = build(case).advantages(rows)
    for name in ("tokens", "loss_mask", "group_ids", "rewards", "old_logprobs", "ref_logprobs"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    assert not after.advantages.any() and set(after.preference.labels.tolist()) == {1, -1}
    assert (after.pair_ref_margins is not None) == (build(case).losses[0].type == "aot")


def test_an_algorithm_goes_to_another_process_and_gives_the_same_bits(tmp_path):
    script = tmp_path / "there.py"
    script.write_text(
        "import pickle, sys\n"
        "from tests.algorithms.batches import loss_gradient\n"
        "for algorithm, batch, logprobs, total, gradient in pickle.load(open(sys.argv[1], 'rb')):\n"
        "    result = loss_gradient(algorithm, batch, logprobs)\n"
        "    assert result[0] == total and result[1].equal(gradient), algorithm\n"
    )
    sent = []
    for case in CASES:
        batch, logprobs = trained(build(case), step_rows())
        sent.append((build(case), batch, logprobs, *loss_gradient(build(case), batch, logprobs)))
    (tmp_path / "sent.pkl").write_bytes(pickle.dumps(sent))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(script), str(tmp_path / "sent.pkl")], check=True, env=environment)


@pytest.mark.parametrize(
    ("name", "axes", "message"),
    [
        ("dpo", {"los": "hinge"}, "did you mean 'loss'"),
        ("dpo", {"online": True}, "unknown name 'online'"),
        ("dpo", {"loss": {"beta": -1}}, "algorithm.loss.beta: should be greater than or equal to 0, got -1"),
        ("dpo", {"loss": "hing"}, "did you mean 'hinge'"),
        ("dpo", {"score": 3}, "algorithm.score must be a type or a mapping"),
        ("robust_dpo", {"loss": {"label_smoothing": 0.5}}, "loss.label_smoothing: should be less than 0.5"),
        ("exo", {"loss": {"label_smoothing": 0}}, "loss.label_smoothing: should be greater than 0"),
        ("mpo", {"loss": {"beta": 1.0}}, "algorithm.loss is a list"),
        ("dpo", {"loss": []}, "algorithm.loss: .* at least 1"),
        ("dpo", {"loss": ["sigmoid", "aot"]}, "aot cannot be combined"),
        ("kto", {"score": "logprob"}, "score must be log_ratio"),
        ("kto", {"nll": {"coefficient": 1}}, "kto has no pairs"),
        ("orpo", {"score": {"length_normalised": False}}, "needs mean log-probs"),
        ("aot_unpaired", {"score": {"ld_alpha": 0.5}}, "no shared length"),
        ("aot", {"score": {"length_normalised": True}}, "sums of log-ratios"),
        ("aot", {"score": {"divergence": "js_divergence"}}, "sums of log-ratios"),
    ],
)
def test_mistakes_in_axes_are_named(name, axes, message):
    with pytest.raises(ValueError, match=message):
        objective_of({"name": name, **axes})


def test_kto_wants_completions_of_other_prompts():
    with pytest.raises(ValueError, match="kto needs rows"):
        build("kto").advantages(make_rows())


@pytest.mark.parametrize("case", CASES)
def test_the_loss_reads_no_number_on_the_host(case, monkeypatch):
    """Metrics are tensors, which are fetched once: a read in each micro-batch would hold up a GPU."""
    algorithm, reads = build(case), []
    batch, logprobs = trained(algorithm, step_rows())
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, name=name: reads.append(name))
    algorithm.loss(ModelOutputs(logprobs=logprobs), batch)
    assert not reads
