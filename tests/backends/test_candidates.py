"""Log-probs over the tokens that top-p and top-k keep: the same in the engine that samples and the trainer."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from atomrl.algorithms import objective_of
from atomrl.backends.local import LocalBackend
from atomrl.batches import RolloutFields, select_rows
from atomrl.common.metrics import values
from atomrl.config import ConfigError, ModelConfig, TrainConfig, load_config
from atomrl.data.rows import to_rows, to_training_batches
from atomrl.engines.generation import generate
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.requests import EngineOptions
from atomrl.models.loading import load_tokenizer
from atomrl.trainer import Options, prepare_run
from atomrl.trainer.checks.engine import check_engine
from atomrl.trainer.rollout_training import RolloutTraining
from atomrl.types import RaggedIds, SamplingParams, Segment
from tests.backends.batches import make_algorithm, weights_of
from tests.models.gpt2 import save_gpt2
from tests.prompts import prompts_of
from tests.tiny import make_tiny_model

CUTS = [{"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.8, "top_k": 20}, {"top_k": 1}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.2)


def rolled_out(folder, **sampling):
    settings = {"dtype": torch.float32, "device": "cpu", "max_concurrent_completions": 7}
    engine = NativeEngine.from_pretrained(str(folder), load_tokenizer(folder), EngineOptions(**settings))
    params = SamplingParams(
        completions_per_prompt=4, max_completion_tokens=12, temperature=0.8, logprobs_over="kept", **sampling
    )
    trajectories = generate(engine, prompts_of((5, 6, 7), (20, 21), (40, 41, 42, 43)), params)
    engine.close()
    return [replace(trajectory, reward=float(trajectory.index % 2)) for trajectory in trajectories]


def backend(folder, **train):
    return LocalBackend(
        ModelConfig(path=str(folder), dtype="float32"),
        TrainConfig(steps=1, learning_rate=1e-3, **train),
        make_algorithm(needs=frozenset({"ref_logprobs"})),
        total_updates=9,
        temperature=0.8,
    )


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_engine_and_trainer_agree(folder, cut):
    rewarded = rolled_out(folder, **cut)
    rows = to_rows(rewarded)
    ours = backend(folder, rows_per_micro_batch=5).forward_only(rows, frozenset({"old_logprobs", "ref_logprobs"}))
    torch.testing.assert_close(ours.old_logprobs, rows.rollout.logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.ref_logprobs, rows.rollout.logprobs, atol=1e-4, rtol=0)
    plain = backend(folder).forward_only(replace(rows, rollout=RolloutFields()), frozenset({"old_logprobs"}))
    higher = (ours.old_logprobs - plain.old_logprobs)[rows.loss_mask]
    assert (higher > 0).all(), "what is left out has no share any more"
    counts = rows.rollout.candidates.counts
    kept = counts[rows.loss_mask]
    assert kept.max() <= cut.get("top_k", 102) and kept.min() >= 1
    drawn = zip(rows.rollout.candidates.ids.split(kept.tolist()), rows.tokens[rows.loss_mask].tolist(), strict=True)
    assert all(token in ids for ids, token in drawn), "a token is among its own"
    assert not counts[~rows.loss_mask].any()


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_trains_on_policy_and_no_split_changes_it(folder, updates):
    algorithm = objective_of({"name": "grpo", "kl": {"coefficient": 0.1}}).resolved(report_entropy=True)
    rows, results = to_rows(rolled_out(folder, top_p=0.7)), []
    for limit in (1, 12):
        trainer = backend(folder, rows_per_micro_batch=limit)
        needs = algorithm.needs if updates > 1 else algorithm.needs - {"old_logprobs"}
        credited = algorithm.advantages(trainer.forward_only(rows, needs))
        batches = to_training_batches(credited, algorithm, updates=updates, epochs=1, seed=0, step=1)
        seen = [values(trainer.train_step(part, algorithm)) for part in batches]
        assert seen[0]["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
        assert seen[0]["training/rollout_probs_diff_max"] < 1e-4 and seen[0]["actor/kl_loss"] < 1e-6
        assert seen[0]["actor/grad_norm"] > 0
        results.append((weights_of(trainer), seen[0]["actor/entropy"]))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
    kept_alone = rows.rollout.candidates.counts[rows.loss_mask].log().mean()
    assert results[0][1] < kept_alone, "the entropy is that of what is kept"
    for name, tensor in results[0][0].items():
        torch.testing.assert_close(tensor, results[1][0][name], atol=3e-5, rtol=0)


def test_rows_are_cut_and_chosen_with_their_candidates(folder):
    trajectories = rolled_out(folder, top_k=5)
    rows = to_rows(trajectories)
    index = torch.tensor([7, 2])
    part, width = select_rows(rows, index).rollout.candidates, int(rows.lengths[index].max())
    assert torch.equal(part.counts, rows.rollout.candidates.counts[index, :width])
    by_row = rows.rollout.candidates.ids.split(rows.rollout.candidates.counts.sum(1).tolist())
    assert torch.equal(part.ids, torch.cat([by_row[7], by_row[2]]))
    limit = int(rows.lengths.max()) - 3
    cut = to_rows(trajectories, max_row_tokens=limit)
    assert cut.tokens.shape[1] == limit
    assert torch.equal(cut.rollout.candidates.counts, rows.rollout.candidates.counts[:, :limit])
    prompt, model = trajectories[0].segments
    mixed = replace(trajectories[0], segments=(prompt, replace(model, candidates=None)))
    assert to_rows([mixed, *trajectories[1:]]).rollout.candidates is None
    with pytest.raises(ValueError, match="2 tokens has 1 candidates"):
        Segment(origin="model", token_ids=(1, 2), candidates=RaggedIds(torch.tensor([1]), torch.tensor([1])))


def config(model, folder, **rollout):
    tree = {
        "run_name": "r",
        "output_dir": str(folder),
        "model": {"path": str(model), "device": "cpu", "dtype": "float32"},
        "data": {"train": "chain", "train_size": 8},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 8, **rollout},
        "reward": {"functions": [{"function": "tests.light_rewards.letter_reward"}]},
        "algorithm": {"name": "remax"},
        "train": {"steps": 4, "learning_rate": 1e-2},
        "eval": {"every_steps": 0, "before": False, "after": False},
        "checkpoint": {"every_steps": 2},
        "tracking": {"save_rollouts": False},
    }
    return load_config(tree)


def test_a_resumed_run_is_the_whole_one(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("atomrl.tracking.reading.plots.draw_curves", lambda *args: None)
    kept = {"logprobs_over": "kept", "top_p": 0.9, "temperature": 0.8}
    whole = prepare_run(config(folder, tmp_path / "whole", **kept)).execute()
    short = config(folder, tmp_path / "short", **kept)
    real = RolloutTraining.sync_weights

    def interrupted(self, step, watch):
        if step == 3:
            raise RuntimeError("stopped")
        real(self, step, watch)

    monkeypatch.setattr(RolloutTraining, "sync_weights", interrupted)
    with pytest.raises(RuntimeError, match="stopped"):
        prepare_run(short).execute()
    monkeypatch.setattr(RolloutTraining, "sync_weights", real)
    resumed = prepare_run(short).execute(Options(resume=True))
    one, other = (load_file(f"{summary['model']}/model.safetensors") for summary in (whole, resumed))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_unsupported_combinations_are_refused_before_a_run(folder, tmp_path):
    for rollout in ({}, {"top_p": 0.9, "temperature": 0.0}):
        with pytest.raises(ConfigError, match="logprobs_over=kept"):
            config(folder, tmp_path, logprobs_over="kept", **rollout)
    with pytest.raises(ConfigError, match=r"logprobs_over=kept.*HFEngine"):
        prepare_run(config(folder, tmp_path / "runs", logprobs_over="kept", top_k=5, engine="hf"))
    gpt2 = save_gpt2(tmp_path)
    with pytest.raises(ConfigError, match="HFEngine"):
        check_engine(config(gpt2, tmp_path / "runs", logprobs_over="kept", top_k=5), str(gpt2))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match="needs top_p"):
        SamplingParams(logprobs_over="kept")
    engine = HFEngine.from_pretrained(
        str(folder), load_tokenizer(folder), EngineOptions(torch.float32, "cpu", max_concurrent_completions=4)
    )
    with pytest.raises(ValueError, match="which tokens"):
        generate(engine, prompts_of((5,)), SamplingParams(logprobs_over="kept", top_k=5))
