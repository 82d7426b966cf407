"""Log-probs over the tokens that top-p and top-k keep: the same in the engine that samples and the trainer."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from atomrl import assembly
from atomrl.algorithms.table import build_algorithm
from atomrl.atoms.logprobs import kept_token_logprobs, row_logprobs
from atomrl.config import ConfigError, ModelConfig, TrainConfig, build_config
from atomrl.data.rows import to_rows, to_training_batches
from atomrl.loop import sync
from atomrl.metrics import values
from atomrl.models.loading import load_tokenizer
from atomrl.rollout.hf import HFEngine
from atomrl.rollout.native import NativeEngine
from atomrl.rollout.sampling import sample, sample_kept
from atomrl.stages import Completion, RewardBatch, SamplingParams, select_rows
from atomrl.training.local import LocalBackend
from tests.conformance.test_engines import batch, random_prompts
from tests.models.test_loading import save_gpt2
from tests.rollout.test_sampling import seeds_of
from tests.tiny import make_tiny_model

CUTS = [{"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.8, "top_k": 20}, {"top_k": 1}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.2)


def rolled_out(folder, **sampling):
    settings = {"dtype": torch.float32, "device": "cpu", "max_concurrent_completions": 7}
    engine = NativeEngine.from_pretrained(str(folder), load_tokenizer(folder), **settings)
    params = SamplingParams(
        completions_per_prompt=4, max_completion_tokens=12, temperature=0.8, logprobs_over="kept", **sampling
    )
    rollouts = engine.generate(batch(*random_prompts(3)), params)
    engine.close()
    rewards = tuple(tuple(float(index % 2) for index in range(len(group))) for group in rollouts.completions)
    return RewardBatch(**vars(rollouts), rewards=rewards, reward_parts={})


def backend(folder, **train):
    return LocalBackend(
        ModelConfig(path=str(folder), dtype="float32"),
        TrainConfig(steps=1, learning_rate=1e-3, **train),
        total_updates=9,
        temperature=0.8,
        needs_reference=True,
    )


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_engine_and_trainer_agree(folder, cut):
    rewarded = rolled_out(folder, **cut)
    rows = to_rows(rewarded)
    ours = backend(folder, rows_per_micro_batch=5).annotate(rows, frozenset({"old_logprobs", "ref_logprobs"}))
    torch.testing.assert_close(ours.old_logprobs, rows.rollout_logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.ref_logprobs, rows.rollout_logprobs, atol=1e-4, rtol=0)
    plain = backend(folder).annotate(replace(rows, kept_ids=None), frozenset({"old_logprobs"}))
    higher = (ours.old_logprobs - plain.old_logprobs)[rows.loss_mask]
    assert (higher > 0).all(), "what is left out has no share any more"
    kept = (rows.kept_ids >= 0).sum(-1)[rows.loss_mask]
    assert kept.max() <= cut.get("top_k", 102) and kept.min() >= 1
    assert (rows.kept_ids == rows.tokens[..., None]).any(-1)[rows.loss_mask].all(), "a token is among its own"
    assert (rows.kept_ids[~rows.loss_mask] == -1).all()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_same_tokens_are_drawn(cut):
    logits = 2 * torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    positions, banned = torch.zeros(300).long(), torch.zeros(300, 40, dtype=torch.bool)
    banned[:, 3] = True
    params = SamplingParams(temperature=0.8, logprobs_over="kept", **cut)
    tokens, logprobs, kept = sample_kept(logits, params, seeds_of(300), positions, banned)
    assert torch.equal(tokens, sample(logits, params, seeds_of(300), positions, banned)[0])
    assert not (kept == 3).any()
    dense = torch.full((300, 41), -torch.inf).scatter(1, torch.where(kept < 0, 40, kept).long(), 0.0)[:, :40]
    expected = (logits / 0.8 + dense).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    greedy = sample_kept(logits, replace(params, temperature=0.0), seeds_of(300), positions)
    assert torch.equal(greedy[0], logits.argmax(-1)) and not greedy[1].any() and torch.equal(greedy[2][:, 0], greedy[0])


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_gradient_is_that_of_a_dense_masked_softmax(chunk, with_entropy):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 6, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(23, 6, generator=generator, dtype=torch.float64).requires_grad_()
    kept = torch.stack([torch.randperm(23, generator=generator)[:5] for _ in range(9)]).int()
    tokens = kept[:, 1].long()
    kept[4, 2:] = -1
    kept[5, 0], kept[5, 2:] = -1, -1  # a token of its own
    dense = torch.full((9, 24), -torch.inf, dtype=torch.float64)
    dense = dense.scatter(1, torch.where(kept < 0, 23, kept).long(), 0.0)[:, :23]
    logs = (F.linear(hidden, head) / 0.7 + dense).log_softmax(-1)
    wanted = logs.gather(1, tokens[:, None])[:, 0]
    entropy = -(logs.exp() * logs.masked_fill(logs.isinf(), 0.0)).sum(-1)
    found, own = kept_token_logprobs(hidden, head, tokens, kept, 0.7, chunk, with_entropy)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    theirs, ours = (wanted * weights[0]).sum(), (found * weights[0]).sum()
    if with_entropy:
        torch.testing.assert_close(own, entropy)
        theirs, ours = theirs + (entropy * weights[1]).sum(), ours + (own * weights[1]).sum()
    for mine, other in zip(*(torch.autograd.grad(total, (hidden, head)) for total in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other)
    assert found[5] == 0
    elsewhere = tokens.clone()
    elsewhere[2] = next(v for v in range(23) if v not in kept[2])
    lost, _ = kept_token_logprobs(hidden, head, elsewhere, kept)
    assert lost[2] == -torch.inf and lost[[0, 1, 3]].isfinite().all(), (
        "a token that was not kept cannot have been drawn"
    )
    assert kept_token_logprobs(hidden[:0], head, tokens[:0], kept[:0], with_entropy=True)[1].shape == (0,)


def test_rows_take_the_kept_tokens_of_their_own():
    hidden, head = torch.randn(2, 4, 6), torch.randn(9, 6)
    tokens = torch.randint(0, 9, (2, 4))
    mask = torch.tensor([[False, False, True, True], [False, True, False, False]])
    kept = torch.full((2, 4, 3), -1, dtype=torch.int32)
    kept[mask] = torch.stack([tokens[mask], (tokens[mask] + 1) % 9, torch.full((3,), -1)], 1).int()
    found, _ = row_logprobs(hidden, head, tokens, mask, kept_ids=kept)
    for i, t in mask.nonzero().tolist():
        two = (head @ hidden[i, t - 1])[kept[i, t, :2].long()]
        assert found[i, t] == pytest.approx(two.log_softmax(0)[0].item(), abs=1e-5)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_trains_on_policy_and_no_split_changes_it(folder, updates):
    algorithm = build_algorithm("grpo", {"kl": {"coefficient": 0.1}}, report_entropy=True)
    rows, results = to_rows(rolled_out(folder, top_p=0.7)), []
    for limit in (1, 12):
        trainer = backend(folder, rows_per_micro_batch=limit)
        needs = algorithm.needs if updates > 1 else algorithm.needs - {"old_logprobs"}
        credited = algorithm.advantages(trainer.annotate(rows, needs))
        batches = to_training_batches(credited, algorithm, updates=updates, epochs=1, seed=0, step=1)
        seen = [values(trainer.train_step(part, algorithm)) for part in batches]
        assert seen[0]["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
        assert seen[0]["training/rollout_probs_diff_max"] < 1e-4 and seen[0]["actor/kl_loss"] < 1e-6
        assert seen[0]["actor/grad_norm"] > 0
        results.append((dict(trainer.weights()), seen[0]["actor/entropy"]))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
    kept_alone = (rows.kept_ids >= 0).sum(-1)[rows.loss_mask].log().mean()
    assert results[0][1] < kept_alone, "the entropy is that of what is kept"
    for name, tensor in results[0][0].items():
        torch.testing.assert_close(tensor, results[1][0][name], atol=3e-5, rtol=0)


def test_rows_are_cut_and_chosen_with_what_was_kept(folder):
    rewarded = rolled_out(folder, top_k=5)
    rows = to_rows(rewarded)
    index = torch.tensor([7, 2])
    part = select_rows(rows, index)
    width = int(rows.lengths[index].max())
    assert torch.equal(part.kept_ids, rows.kept_ids[index, :width])
    limit = int(rows.lengths.max()) - 3
    cut = to_rows(rewarded, max_row_tokens=limit)
    assert cut.tokens.shape[1] == limit and torch.equal(cut.kept_ids, rows.kept_ids[:, :limit])
    first = rewarded.completions[0][0]
    mixed = (replace(first, kept_ids=None), *rewarded.completions[0][1:])
    assert to_rows(replace(rewarded, completions=(mixed, *rewarded.completions[1:]))).kept_ids is None
    with pytest.raises(ValueError, match="must have the same length"):
        Completion(token_ids=(1, 2), text="", logprobs=None, finish_reason="stop", kept_ids=((1,),))


def config(model, folder, **rollout):
    tree = {
        "run_name": "r",
        "output_dir": str(folder),
        "model": {"path": str(model), "device": "cpu", "dtype": "float32"},
        "data": {"train": "chain", "train_size": 8},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 8, **rollout},
        "reward": {"functions": [{"function": "tests.letters.letter_reward"}]},
        "algorithm": {"name": "remax"},
        "train": {"steps": 4, "learning_rate": 1e-2},
        "eval": {"every_steps": 0, "before": False, "after": False},
        "checkpoint": {"every_steps": 2},
        "tracking": {"save_rollouts": False},
    }
    return build_config(tree)


def test_a_resumed_run_is_the_whole_one(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("atomrl.tracking.curves.draw_curves", lambda *args: None)
    kept = {"logprobs_over": "kept", "top_p": 0.9, "temperature": 0.8}
    whole = assembly.train(config(folder, tmp_path / "whole", **kept))
    short = config(folder, tmp_path / "short", **kept)
    real = sync.run_step

    def interrupted(parts, schedule, step):
        if step == 3:
            raise RuntimeError("stopped")
        return real(parts, schedule, step)

    monkeypatch.setattr(sync, "run_step", interrupted)
    with pytest.raises(RuntimeError, match="stopped"):
        assembly.train(short)
    monkeypatch.setattr(sync, "run_step", real)
    resumed = assembly.train(short, resume=True)
    one, other = (load_file(f"{summary['model']}/model.safetensors") for summary in (whole, resumed))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_what_cannot_be_done_is_said_before_there_is_a_run(folder, tmp_path):
    for rollout in ({}, {"top_p": 0.9, "temperature": 0.0}):
        with pytest.raises(ConfigError, match="logprobs_over=kept needs a temperature above 0, and top_p below 1"):
            config(folder, tmp_path, logprobs_over="kept", **rollout)
    with pytest.raises(
        ConfigError, match=r"rollout\.logprobs_over=kept: HFEngine does not tell which tokens were kept"
    ):
        assembly.train(config(folder, tmp_path / "runs", logprobs_over="kept", top_k=5, engine="hf"))
    gpt2 = save_gpt2(tmp_path)
    with pytest.raises(ConfigError, match="HFEngine does not tell"):
        assembly.check_kept(config(gpt2, tmp_path, logprobs_over="kept", top_k=5), str(gpt2))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match="neither top_p nor top_k cuts anything"):
        SamplingParams(logprobs_over="kept")
    engine = HFEngine.from_pretrained(
        str(folder), load_tokenizer(folder), dtype=torch.float32, device="cpu", max_concurrent_completions=4
    )
    with pytest.raises(ValueError, match="does not tell which tokens"):
        engine.generate(batch([5]), SamplingParams(logprobs_over="kept", top_k=5))
