"""Dynamic sampling, rows, reports and ends of a run, on scripted completions."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.batches import AdvantageBatch, TrainingBatch
from atomrl.data.rows import to_rows
from atomrl.objectives.preference_loss import best_and_worst
from atomrl.protocols import LossOutput, ModelOutputs
from atomrl.rewards.errors import RewardError
from atomrl.trainer.loop import MAX_IDLE_STEPS, Progress, compute_advantages, update_policy
from atomrl.trainer.report.metrics import answer_end, rollout_metrics, runs_on
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.rollout_training import RolloutTraining
from atomrl.types import Problem, RaggedIds, Segment, Trajectory
from tests.trainer.scripted import make_parts, planned, run_step, train

DAPO = objective_of({"name": "dapo"}).resolved(max_completion_tokens=12)


def by_quarters(wrong_every):
    """Out of each 10 prompts, those below `wrong_every` have one wrong completion of four."""

    def reward(item):
        return 0.0 if int(item.problem.problem_id) % 10 < wrong_every and item.index == 0 else 1.0

    return reward


def test_dynamic_sampling_reports_on_all_that_was_drawn(tmp_path):
    """A third of the groups is mixed, and three quarters right: accuracy 0.917, of the accepted alone 0.75."""
    parts = make_parts(tmp_path, lambda problem, index: "x" * 3, by_quarters(2), DAPO)
    metrics = run_step(parts, planned(prompts_per_step=4), Progress())
    assert metrics["rollout/groups_drawn"] == 12 and metrics["rollout/groups_accepted"] == 4
    assert metrics["rollout/acceptance_rate"] == pytest.approx(4 / 12) and metrics["rollout/groups_missing"] == 0
    drawn = parts.record.rollouts[0][1]
    assert metrics["train/accuracy"] == sum(item.reward for item in drawn) / len(drawn) == 44 / 48
    assert metrics["critic/score/mean"] == metrics["train/accuracy"] and metrics[
        "by_group/frac_mixed"
    ] == pytest.approx(1 / 3)
    tokens = sum(len(item.token_ids) for item in drawn)
    assert metrics["perf/total_num_tokens"] == tokens and len(drawn) == 48
    assert metrics["train/rows"] == 16 and parts.trainer.batches[0].rows == 16


def test_accuracy_is_not_that_of_the_accepted_groups(tmp_path):
    """A fifth of the groups is mixed, and three quarters right: 0.95 of all, 0.75 of what is trained on."""
    parts = make_parts(tmp_path, lambda problem, index: "x", by_quarters(2), DAPO)
    accepted, refused = parts.source.collect(8, 1, Stopwatch())
    drawn = [item for group in accepted + refused for item in group]
    rows = to_rows([item for group in accepted for item in group])
    batch = AdvantageBatch(**vars(rows), advantages=torch.zeros(rows.tokens.shape))
    metrics = rollout_metrics(drawn, batch)
    assert metrics["train/accuracy"] == pytest.approx(1 - 8 / (4 * 32)) and len(drawn) == 4 * 32
    assert rows.rewards.mean().item() == 0.75


def test_a_refill_draws_what_is_missing(tmp_path):
    asked = []
    parts = make_parts(tmp_path, lambda problem, index: "x", by_quarters(9), DAPO)
    take = parts.source.curriculum.take
    parts.source.curriculum.take = lambda count, step: asked.append(count) or take(count, step)
    accepted, refused = parts.source.collect(10, 1, Stopwatch())
    assert asked == [10, 1] and len(accepted) == 10 and len(refused) == 1
    assert parts.source.curriculum.state().position == 11
    assert [group[0].prompt_id for group in (accepted[-1], *refused)] == ["0:10", "0:9"]


def test_groups_kept_so_far_are_trained_on_when_refills_end(tmp_path, caplog):
    parts = make_parts(tmp_path, lambda problem, index: "x", by_quarters(1), DAPO)
    with caplog.at_level(logging.WARNING):
        metrics = run_step(parts, planned(prompts_per_step=30), Progress())
    accepted = metrics["rollout/groups_accepted"]
    assert 0 < accepted < 30 and metrics["rollout/groups_missing"] == 30 - accepted
    assert parts.trainer.batches[0].rows == 4 * accepted
    assert f"dapo accepted {accepted:.0f} of " in caplog.text


@pytest.mark.parametrize("score", [1.0, 0.0])
def test_a_model_that_became_too_good_ends_its_run_well(tmp_path, caplog, score):
    parts = make_parts(tmp_path, lambda problem, index: "x", lambda item: score, DAPO)
    saved = []
    progress = Progress()
    assert train(parts, planned(steps=9), progress, lambda folder, now: saved.append(now.step)) is True
    assert progress.step == MAX_IDLE_STEPS == saved[-1] and not parts.trainer.batches
    row = parts.record.rows[-1]
    assert row["training/updates"] == 0 and row["rollout/acceptance_rate"] == 0 and row["train/accuracy"] == score
    assert "the run ends after step 3: no group was accepted in 3 steps in a row" in caplog.text
    again = make_parts(tmp_path / "again", lambda problem, index: "x", by_quarters(5), DAPO)
    assert train(again, planned(steps=5), progress, lambda folder, now: None) and progress.step == 5


def test_weights_go_to_the_engine_once_a_step(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x" * (index + 1), by_quarters(10))
    train(parts, planned(steps=2), Progress(), lambda folder, now: None)
    assert parts.transfer.versions == [1, 2], "not before the first step: the engine was made with these weights"
    versions = [{s.policy_version for t in drawn for s in t.segments[1:]} for _, drawn, _ in parts.record.rollouts]
    assert versions == [{0}, {1}]
    resumed = make_parts(tmp_path, lambda problem, index: "x", by_quarters(10))
    train(resumed, planned(), Progress(step=3, position=9), lambda folder, now: None)
    assert resumed.transfer.versions == [3, 4]


def test_extra_rollouts_are_baselines_and_not_trained_on(tmp_path):
    parts = make_parts(
        tmp_path,
        lambda problem, index: "x" * (index + 1),
        lambda item: float(len(item.text)),
        objective_of({"name": "remax"}).resolved(),
    )
    accepted, _ = parts.source.collect(3, 1, Stopwatch())
    drawn = [item for group in accepted for item in group]
    assert [item.baseline_reward for item in drawn] == [1.0] * 12
    assert to_rows(drawn).rollout.baseline_rewards.tolist() == [1.0] * 12


def test_baselines_that_have_no_reward_leave_a_step_without_advantages(tmp_path):
    def reward(item):
        return None if item.text.startswith("greedy") else float(item.index)

    def write(problem, index):
        return "greedy" if index == 0 else "x"

    parts = make_parts(tmp_path, write, reward, objective_of({"name": "remax", "kl": {"coefficient": 0.0}}).resolved())
    run_step(parts, planned(), Progress())
    (batch,) = parts.trainer.batches
    assert batch.rows and batch.rollout.baseline_rewards.isnan().all() and not batch.advantages.any()


def test_rewards_of_an_environment_tell_completions_apart(tmp_path):
    """Their outcomes are the same."""
    parts = make_parts(tmp_path, lambda problem, index: "x", lambda item: 1.0, DAPO)
    (drawn,) = parts.source.draw(1, 1, Stopwatch())
    assert not parts.source.accepts(drawn)
    paid = [replace(item, token_rewards=((item.prompt_tokens, float(item.index)),)) for item in drawn]
    assert parts.source.accepts(paid)
    assert best_and_worst(to_rows(paid)).tolist() == [-1, 0, 0, 1]


@pytest.mark.parametrize(("place", "saved"), [("collect", [2]), ("sync_weights", [])])
def test_an_error_before_the_updates_saves_the_steps_before_it(tmp_path, monkeypatch, place, saved):
    real = getattr(RolloutTraining, place)

    def fail_at_3(self, step, watch):
        if step == 3:
            raise KeyError(place)
        return real(self, step, watch)

    monkeypatch.setattr(RolloutTraining, place, fail_at_3)
    parts, written = make_parts(tmp_path, lambda problem, index: "x", by_quarters(1)), []
    with pytest.raises(KeyError, match=place):
        train(parts, planned(), Progress(), lambda folder, now: written.append(now.step))
    assert written == saved


SAMPLE = Problem(problem_id="a", prompt="", ground_truth="")


def made(*segments, reward=1.0, index=0, prompt_id="p", **fields):
    """Make a trajectory from ("prompt", tokens), ("model", tokens, version), ("environment", tokens)."""
    parts = [
        Segment(
            origin=origin,
            token_ids=tuple(tokens),
            logprobs=tuple(-0.5 for _ in tokens) if origin == "model" else None,
            policy_version=version[0] if version else None,
        )
        for origin, tokens, *version in segments
    ]
    fields = {"text": "x", "finish_reason": "stop"} | fields
    return Trajectory(prompt_id=prompt_id, index=index, problem=SAMPLE, segments=tuple(parts), reward=reward, **fields)


TWO_TURNS = (("prompt", (5, 6)), ("model", (7, 8), 3), ("environment", (9, 9, 9)), ("model", (10, 2), 4))


def test_a_trajectory_of_two_turns_becomes_a_row():
    rows = to_rows([made(*TWO_TURNS, token_rewards=((3, 0.25), (8, 1.0)))], version=5)
    assert rows.tokens.tolist() == [[5, 6, 7, 8, 9, 9, 9, 10, 2]]
    assert rows.loss_mask.int().tolist() == [[0, 0, 1, 1, 0, 0, 0, 1, 1]]
    assert rows.rollout.staleness.tolist() == [[0, 0, 2, 2, 0, 0, 0, 1, 1]]
    assert rows.rollout.logprobs.tolist() == [[0, 0, -0.5, -0.5, 0, 0, 0, -0.5, -0.5]]
    assert rows.rollout.token_rewards.tolist() == [[0, 0, 0, 0.25, 0, 0, 0, 0, 1.0]]
    assert (rows.lengths.tolist(), rows.prompt_lengths.tolist(), rows.sampled_lengths.tolist()) == ([9], [2], [7])


def test_padding_is_masked():
    rows = to_rows([made(*TWO_TURNS), made(("prompt", (5,)), ("model", (7, 2), 5))], version=5)
    assert rows.lengths.tolist() == [9, 3] and not rows.tokens[1, 3:].any()
    assert rows.loss_mask[1].int().tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert not rows.rollout.staleness[1].any()


def test_two_turns_through_rows_advantages_and_loss():
    """Tokens of the environment have no advantage, and do not change the loss by a bit."""
    algorithm = objective_of({"name": "grpo"}).resolved()
    short = made(("prompt", (5, 6)), ("model", (7, 2), 4), reward=0.0, index=1)
    losses = []
    for reply in ((9, 9, 9), (30, 40, 50)):
        other = (*TWO_TURNS[:2], ("environment", reply), TWO_TURNS[3])
        rows = to_rows([made(*other), short])
        batch = algorithm.advantages(rows)
        assert (batch.advantages != 0).tolist() == rows.loss_mask.tolist()
        weights = algorithm.loss_weights(batch.loss_mask, batch.group_ids)
        assert not weights[~batch.loss_mask].any() and weights.sum() == pytest.approx(1.0)
        logprobs = torch.linspace(-1, 0, rows.tokens.numel()).view(rows.tokens.shape)
        logprobs = torch.where(rows.loss_mask, logprobs, float(reply[0])).requires_grad_()
        training = TrainingBatch(**vars(replace(batch, old_logprobs=rows.rollout.logprobs)), loss_weights=weights)
        result: LossOutput = algorithm.loss(ModelOutputs(logprobs=logprobs), training)
        result.loss.backward()
        assert not logprobs.grad[~rows.loss_mask].any() and logprobs.grad[rows.loss_mask].any()
        losses.append((result.loss.item(), logprobs.grad[rows.loss_mask].tolist()))
    assert losses[0] == losses[1]


def test_groups_may_arrive_in_pieces_and_in_any_order():
    mine = [
        made(("prompt", (5,)), ("model", (7, 2), 1), reward=float(n % 3), index=n, prompt_id=f"p{n % 2}")
        for n in range(6)
    ]
    together = sorted(mine, key=lambda item: item.prompt_id)
    algorithm = objective_of({"name": "grpo"}).resolved()
    groups = [
        {items[int(batch.trajectory_index[i])].trajectory_id: row[2].item() for i, row in enumerate(batch.advantages)}
        for items in (mine, together)
        for batch in [algorithm.advantages(to_rows(items))]
    ]
    assert groups[0] == pytest.approx(groups[1]) and len(set(groups[0].values())) > 2


def test_which_trajectories_became_rows_is_told():
    items = [
        made(("prompt", (5,)), ("model", (7, 2), 1), index=0),
        made(("prompt", (5,)), ("model", (7, 2), 1), index=1, reward=None),
        made(("prompt", (5,)), index=2),
        made(("prompt", (5,)), ("environment", (7, 2)), index=3),
        made(("prompt", (5,) * 9), ("model", (7, 2), 1), index=4),
        made(("prompt", (5,)), ("model", (8, 2), 1), index=5),
    ]
    assert to_rows(items, max_row_tokens=9).trajectory_index.tolist() == [0, 5]
    assert to_rows([], 9).rows == 0


def test_a_cut_row_is_truncated_and_keeps_its_sampled_length():
    long = made(("prompt", (5, 6)), ("model", tuple(range(10, 30)), 1), token_rewards=((21, 0.5),))
    rows = to_rows([long, made(("prompt", (5, 6)), ("model", (7, 2), 1), index=1)], max_row_tokens=8)
    assert rows.lengths.tolist() == [8, 4] and rows.truncated.tolist() == [True, False]
    assert rows.sampled_lengths.tolist() == [20, 2] and rows.rewards.tolist() == [1.0, 1.0]
    assert rows.rollout.token_rewards[0].tolist() == [0] * 7 + [0.5]
    batch = AdvantageBatch(**vars(rows), advantages=torch.zeros(rows.tokens.shape))
    assert rollout_metrics([long], batch)["train/cut_rows"] == 1


def test_candidates_are_ragged():
    candidates = RaggedIds(counts=torch.tensor([2, 1, 3], dtype=torch.int32), ids=torch.arange(6, dtype=torch.int32))
    segment = Segment(
        origin="model", token_ids=(7, 8, 9), logprobs=(-1.0,) * 3, policy_version=0, candidates=candidates
    )
    prompt = Segment(origin="prompt", token_ids=(5,))
    item = replace(made(), segments=(prompt, segment))
    rows = to_rows([item, item], max_row_tokens=3)
    candidates = rows.rollout.candidates
    assert candidates.counts.tolist() == [[0, 2, 1]] * 2 and candidates.ids.tolist() == [0, 1, 2] * 2
    plain = replace(made(), segments=(prompt, replace(segment, candidates=None)))
    assert to_rows([item, plain]).rollout.candidates is None


def test_a_step_without_a_row_changes_nothing(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x", lambda item: None)
    state = {"kl": 0.5}
    batch = compute_advantages(parts.trainer, parts.algorithm, to_rows([]), state, planned(), Stopwatch())
    results = update_policy(parts.trainer, parts.algorithm, batch, planned(), 1, Stopwatch())
    assert batch.rows == 0 and results == [] and state == {"kl": 0.5}


def test_a_step_without_a_reward_is_done_with_other_prompts_and_is_none_where_there_is_never_one(tmp_path):
    """It counts as no step, so that a run that is resumed does it again."""
    given = [None] * 12 + [1.0, 0.0] * 12
    parts = make_parts(tmp_path, lambda problem, index: "x", lambda item: given.pop(0))
    run_step(parts, planned(), progress := Progress())
    assert parts.source.curriculum.state().position == 2 * 3 and progress.idle_steps == 0
    assert len(parts.trainer.batches) == 1 and parts.trainer.batches[0].rows == 12
    parts = make_parts(tmp_path / "never", lambda problem, index: "x", lambda item: None)
    with pytest.raises(RewardError, match="in 3 attempts") as caught:
        run_step(parts, planned(), Progress())
    assert not parts.trainer.batches and len(caught.value.scored) == 3 * 12, "they are written, to be read"


def test_completions_that_run_on():
    cut = made(("prompt", (5,)), ("model", (7, 8), 1), finish_reason="length")
    assert runs_on(replace(cut, text="#### 18 and then some"), ())
    assert runs_on(replace(cut, text="\\boxed{1} and then some"), ())
    assert not runs_on(replace(cut, text="#### 18 and"), ()) and not runs_on(replace(cut, text="####" * 9), ())
    assert runs_on(cut, {7}) and not runs_on(cut, {8}), "the last token may end it"
    assert not runs_on(replace(made(*TWO_TURNS, finish_reason="length"), text="#### 18 and then some"), {7})
    assert answer_end("a</answer> #### 1 ") == 10 and answer_end("####  \n18\n") == 10


def test_a_special_token_that_ends_nothing_is_no_end(tmp_path):
    """`<|user|>` of the tokenizer is special, and the model may write it within its words, as it does `<think>`."""
    for text, ran_on in (("a<|user|>b" * 9, 0.0), ("a</s>b" * 9, 1.0)):
        parts = make_parts(
            tmp_path / str(ran_on), lambda problem, index, text=text: text, by_quarters(5), max_completion_tokens=12
        )
        assert run_step(parts, planned(), Progress())["response_length/ran_on_ratio"] == ran_on


def test_reports_take_linear_time():
    started = time.process_time()
    for text in ("#" * 10**6, "#### " * 200_000, "\\boxed{" * 150_000, "</answer" * 125_000, "####" + " " * 10**6):
        runs_on(made(("prompt", (5,)), ("model", (7,), 1), finish_reason="length", text=text), ())
    assert time.process_time() - started < 5


def test_an_engine_wakes_when_the_trainer_has_given_back_its_memory(tmp_path, monkeypatch):
    """On one GPU it would find none otherwise; the new weights come afterwards."""
    parts = make_parts(tmp_path, lambda problem, index: "x" * 3, by_quarters(2))
    engine, order = parts.source.engine, []
    owners = {
        engine: ("sleep", "wake"),
        parts.trainer: ("train_step", "free_memory"),
        type(parts.transfer): ("__call__",),
    }
    for owner, names in owners.items():
        for name in names:
            own = getattr(owner, name)
            noted = lambda *given, name=name, own=own: order.append(name) or own(*given)  # noqa: E731
            monkeypatch.setattr(owner, name, noted)
    run_step(replace(parts, sleeper=engine), planned(), Progress())
    assert order == ["sleep", "train_step", "free_memory", "wake", "__call__"]
