"""Metrics of episodes, against numbers counted by hand."""

from dataclasses import replace

import pytest
import torch

from atomrl.batches import AdvantageBatch
from atomrl.data.rows import to_rows
from atomrl.tracking.run_directory import rollout_rows
from atomrl.trainer.report.episodes import episode_metrics
from atomrl.trainer.report.metrics import rollout_metrics
from atomrl.trainer.sources import with_baselines
from atomrl.types import Episode, Problem, Segment, Trajectory, Turn

SAMPLE = Problem(problem_id="a", prompt="", ground_truth="")


def episode(*turns, ended="environment", **changes):
    """A trajectory whose tokens are those of its turns: (tokens of the model, of the reply, label, seconds)."""
    segments, made = [Segment(origin="prompt", token_ids=(1, 2))], []
    for own, reply, label, seconds in turns:
        segments.append(Segment(origin="model", token_ids=(5,) * own, logprobs=(-1.0,) * own, policy_version=0))
        if reply:
            segments.append(Segment(origin="environment", token_ids=(6,) * reply))
        made.append(Turn(model_tokens=own, reply_tokens=reply, labels=(label,) if reply else (), seconds=seconds))
    return Trajectory(
        prompt_id="0:a", index=0, problem=SAMPLE, segments=tuple(segments), text="", finish_reason="environment",
        episode=Episode(turns=tuple(made), ended=ended, **changes), reward=1.0,
    )  # fmt: skip


STEP = [
    episode((2, 3, "search", 0.5), (4, 1, "invalid", 0.1), (1, 0, "", 0.0)),
    episode((1, 2, "search", 0.2), (2, 0, "", 0.2), ended="turns"),
    episode((4, 0, "", 0.0), ended="failed", failure="timeout"),
    episode((1, 1, "", 1.0), (1, 0, "", 0.0), ended="length"),
]


def test_metrics_of_episodes_are_those_counted_by_hand():
    metrics = episode_metrics(STEP, to_rows(STEP))
    assert metrics == pytest.approx({
        "environment/turns/mean": 2.0, "environment/turns/max": 3.0, "environment/turns/min": 1.0,
        "environment/replies": 1.0, "environment/replies/search": 0.5, "environment/replies/invalid": 0.25,
        "perf/environment_seconds/mean": 2.0 / 8, "perf/environment_seconds/max": 1.0,
        "environment/token_share": 7 / 23,
        "environment/dropped_turns": 0.0, "environment/turn_rewards": 0.0,
        "environment/ended/environment": 0.25, "environment/ended/turns": 0.25, "environment/ended/length": 0.25,
        "environment/ended/abort": 0.0, "environment/ended/failed": 0.25, "train/reply_tokens": 0.0,
    })  # fmt: skip


def test_a_reply_that_passes_for_the_models_words_is_counted():
    """The episode says how long the turns are, and the mask is of what the segments say."""
    segments = tuple(
        replace(part, origin="model", policy_version=0) if part.origin == "environment" else part
        for part in STEP[0].segments
    )
    wrong = [replace(STEP[0], segments=segments), *STEP[1:]]
    assert episode_metrics(wrong, to_rows(wrong))["train/reply_tokens"] == 4.0


def test_without_an_environment_there_is_nothing():
    plain = [replace(item, episode=None) for item in STEP]
    assert episode_metrics(plain, to_rows(plain)) == {}


def test_turns_and_states_of_rows():
    """States are equal where the environment showed the same tokens, within a group alone."""
    other = replace(STEP[0], prompt_id="0:b")
    rows = to_rows([*STEP, other])
    assert rows.rollout.turn_ids[0].tolist() == [-1, -1, 0, 0, -1, -1, -1, 1, 1, 1, 1, -1, 2]
    turns, states = rows.rollout.turn_ids, rows.rollout.state_ids
    assert torch.equal(states >= 0, turns >= 0) and torch.equal(turns >= 0, rows.loss_mask)
    first = {int(states[row, 2]) for row in range(4)}
    assert len(first) == 1, "all of a prompt begin in one state"
    assert int(states[4, 2]) not in first, "another prompt is another state"
    shown = {"666": states[0, 7], "6": states[0, 12], "66": states[1, 5], "6 again": states[3, 4]}
    assert shown["6"] == shown["6 again"] and len({int(value) for value in shown.values()}) == 3
    without = [replace(item, episode=None) for item in STEP]
    assert torch.equal(to_rows(without).rollout.turn_ids, turns[:4]), "segments tell the same"
    cut = to_rows(STEP, max_row_tokens=8)
    assert torch.equal(cut.rollout.turn_ids, turns[:4, :8])
    assert torch.equal(cut.rollout.state_ids >= 0, cut.rollout.turn_ids >= 0)
    single = to_rows([STEP[2]])
    assert single.rollout.turn_ids is None and single.rollout.state_ids is None


def test_groups_are_mixed_by_what_turns_earn():
    """Equal outcomes with different rewards of turns: there is something to learn, and the metrics say so."""
    group = [replace(STEP[0], index=index, token_rewards=((3, 0.5 * index),)) for index in range(2)]
    rows = to_rows(group)
    metrics = rollout_metrics(group, AdvantageBatch(**vars(rows), advantages=torch.zeros(rows.tokens.shape)))
    assert metrics["by_group/frac_mixed"] == 1.0
    assert (metrics["critic/score/min"], metrics["critic/score/max"]) == (1.0, 1.5)
    assert [row["reward"] for row in rollout_rows(1, group, {})] == [1.0, 1.5]
    assert [item.baseline_reward for item in with_baselines(group, group)] == [1.25, 1.25]
