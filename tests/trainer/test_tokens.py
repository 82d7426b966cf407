"""Records of tokens: what the updates saw, without changing them."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from atomrl.algorithms import objective_of
from atomrl.batches import map_fields
from atomrl.config import ConfigError, load_config
from atomrl.tracking.reading.token_records import TOKENS, read_tokens
from atomrl.tracking.run_directory import RunDirectory
from atomrl.trainer.loop import Progress
from atomrl.trainer.report.tokens import TokenRecord, mark_recorded
from tests.algorithms.batches import make_rows
from tests.tiny import make_tiny_model
from tests.trainer.scripted import train
from tests.trainer.test_sync import make_parts, saver, weights

ALL = 0.999999


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2"))


def run(model, folder, tokens, algorithm=None, **schedule):
    parts, plan = make_parts(model, folder, steps=2, algorithm=algorithm, **schedule)
    plan = plan.model_copy(update={"tracking": plan.tracking.model_copy(update={"tokens": tokens})})
    train(parts, plan, Progress(), saver(parts))
    return parts


def test_whole_groups_are_chosen_by_their_prompt():
    rows = make_rows(groups=8)
    for wanted, groups in ((1, 1), (3, 3), (99, 8)):
        recorded = mark_recorded(rows, wanted).recorded
        assert sorted(recorded[recorded >= 0].tolist()) == list(range(4 * groups))
        assert len(set(rows.group_ids[recorded >= 0].tolist())) == groups
    assert mark_recorded(rows, 0) is rows and mark_recorded(rows, 1e-9) is rows
    # a share has the same prompts wherever they stand, and in whatever company
    rows = replace(rows, tokens=rows.tokens.index_copy(1, torch.arange(3), rows.group_ids[:, None].expand(-1, 3)))
    order = torch.arange(rows.rows).flip(0)
    turned = map_fields(rows, lambda name, value: value[order])
    halves = [mark_recorded(one, 0.5) for one in (rows, turned)]
    chosen, again = ({tuple(row) for row in one.tokens[one.recorded >= 0].tolist()} for one in halves)
    assert chosen == again and 0 < len(chosen) < rows.rows


@pytest.mark.parametrize("updates, epochs", [(1, 1), (2, 1), (2, 2)])
def test_a_record_changes_nothing_and_adds_up(model, tmp_path, updates, epochs):
    algorithm = objective_of({"name": "grpo", "kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}}).resolved()
    schedule = {"algorithm": algorithm, "updates_per_epoch": updates, "epochs_per_step": epochs}
    without = run(model, tmp_path / "a", 0, **schedule)
    parts = run(model, tmp_path / "b", ALL, **schedule)
    assert without.record.tokens == {}
    assert all(torch.equal(tensor, weights(parts)[name]) for name, tensor in weights(without).items())
    for step in (1, 2):
        tokens, metrics = parts.record.tokens[step], parts.record.rows[step - 1]
        mask = tokens["token/loss_mask"]
        assert len(tokens["row/rewards"]) == 12 and mask.sum() == len(mask)
        assert tokens["token/tokens"].shape == mask.shape and tokens["token/tokens"].dtype == torch.int32
        assert sorted(set(tokens["row/update"].tolist())) == list(range(updates * (epochs - 1), updates * epochs))
        for name in ("advantages", "logprobs", "rollout_logprobs", "entropy", "ref_logprobs", "loss", "gradient"):
            assert tokens[f"token/{name}"].abs().sum() > 0, name
        assert tokens["token/gap"].abs().max() < 1e-4
        if updates == epochs == 1:
            whole = metrics["actor/pg_loss"] + 0.1 * kl_loss(tokens) - 0.01 * metrics["actor/entropy_loss"]
            assert tokens["token/loss"].sum() == pytest.approx(whole, abs=1e-6)
            assert tokens["token/log_ratio"].abs().max() == 0 and not tokens["token/clipped"].any()
        else:
            assert tokens["token/log_ratio"].abs().max() > 0


def kl_loss(tokens):
    """K3 with the weights of the record."""
    away = tokens["token/ref_logprobs"] - tokens["token/logprobs"]
    return float((tokens["token/loss_weights"] * (away.exp() - away - 1)).sum())


def test_the_gradient_of_a_token_is_its_weight_times_its_advantage(model, tmp_path):
    parts = run(model, tmp_path, 1, updates_per_epoch=1)
    tokens = parts.record.tokens[1]
    assert len(tokens["row/rewards"]) == 4 and len(tokens["prompt_sizes"]) == 1
    expected = -tokens["token/advantages"] * tokens["token/loss_weights"]
    assert torch.allclose(tokens["token/gradient"], expected, atol=1e-8)


def test_a_file_is_read_as_it_was_written(tmp_path):
    tree = {"run_name": "r", "output_dir": str(tmp_path), "model": {"path": "-"}, "data": {"train": "-"}}
    directory = RunDirectory.create(load_config(tree | {"reward": {"functions": [{"function": "exact_match"}]}}))
    record, batch = TokenRecord(), training_batch(make_rows(groups=3))
    record.add(batch, {"logprobs": batch.old_logprobs[batch.recorded >= 0]})
    directory.write_tokens(3, record.tensors(), {"kl": 0.5})
    path, written = directory.path / "rollouts" / "step_000003" / TOKENS, set()
    for _ in range(20):  # the order of several entries of metadata would be random
        directory.write_tokens(3, record.tensors(), {"kl": 0.5})
        written.add(path.read_bytes())
    assert len(written) == 1
    table = read_tokens(path)
    assert table.step == 3 and table.state == {"kl": 0.5} and len(table) == 8
    kept = (batch.recorded >= 0).nonzero()[:, 0].tolist()
    for row, index in enumerate(kept):
        own = slice(int(batch.prompt_lengths[index]), int(batch.lengths[index]))
        assert table.tokens["tokens"][table.span(row)].tolist() == batch.tokens[index, own].tolist()
        prompt = batch.tokens[index, : own.start].tolist()
        assert table.prompts[table.rows["prompt"][row]].tolist() == prompt
    assert read_tokens(directory.path / "rollouts" / "step_000004" / TOKENS) is None


def training_batch(rows):
    from atomrl.data.rows import to_training_batches

    algorithm = objective_of({"name": "grpo"}).resolved()
    rows = replace(rows, trajectory_index=torch.arange(rows.rows))
    (batch,) = to_training_batches(
        algorithm.advantages(mark_recorded(rows, 2)), algorithm, updates=1, epochs=1, seed=0, step=1
    )
    return batch


@pytest.mark.parametrize("damage", [b"", b"x" * 40, b"\xff" * 40])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / TOKENS
    path.write_bytes(damage)
    with pytest.raises(ValueError, match="no recorded tokens"):
        read_tokens(path)


def test_a_file_without_what_every_record_has_is_refused(tmp_path):
    path = tmp_path / "step_000001" / TOKENS
    path.parent.mkdir()
    save_file({"row/lengths": torch.ones(1), "prompt_sizes": torch.ones(1), "prompt_tokens": torch.ones(1)},
              path, {"state": "{}"})  # fmt: skip
    with pytest.raises(ValueError, match="advantages, group_ids"):
        read_tokens(path)


def test_groups_with_different_rewards_are_recorded_first():
    rows = make_rows(groups=8)
    rewards = torch.ones(rows.rows)
    mixed = rows.group_ids.unique()[[2, 5, 6]]
    for group in mixed:
        rewards[(rows.group_ids == group).nonzero()[0, 0]] = 0.0
    rows = replace(rows, rewards=rewards)

    def chosen(wanted):
        return set(rows.group_ids[mark_recorded(rows, wanted).recorded >= 0].tolist())

    assert chosen(3) == set(mixed.tolist()) and len(chosen(5)) == 5 and chosen(3) < chosen(5)


def test_without_rollouts_no_tokens_are_kept(model, tmp_path):
    parts, plan = make_parts(model, tmp_path, steps=1)
    plan = plan.model_copy(update={"tracking": plan.tracking.model_copy(update={"tokens": 2, "save_rollouts": False})})
    train(parts, plan, Progress(), saver(parts))
    assert parts.record.tokens == {}


def test_a_number_of_groups_is_whole():
    tree = {"run_name": "r", "model": {"path": "-"}, "data": {"train": "-"}}
    with pytest.raises(ConfigError, match="fraction below 1"):
        load_config(tree | {"tracking": {"tokens": 1.5}})
