"""The recorded numbers of tokens, as a page gets them."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from atomrl.data.rows import to_rows
from atomrl.tools.ui.rollouts import group, token_numbers, token_places, tokens
from atomrl.tracking.reading import load_run
from atomrl.tracking.reading.token_records import TokenTable
from atomrl.types import Episode, Problem, Segment, Trajectory, Turn
from tests.tools.ui.made import make_run, record_tokens


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "one", steps=2)
    record_tokens(folder, 1)
    return load_run(folder)


def test_the_numbers_of_each_token(run):
    numbers = tokens(run, 1, "train", 1)["numbers"]
    assert numbers["clipped"] == [2] and numbers["masked"] == []
    columns = numbers["columns"]
    assert columns["advantage"] == [-1, -1, -1] and columns["reference"] == [0.5] * 3
    assert columns["share"] == pytest.approx([0.1] * 3)
    assert columns["ratio"] == pytest.approx([2.718281828 ** (x / 10 - 0.5) for x in (3, 4, 5)])
    assert 0.3 < numbers["scales"]["ratio"] < 2.718281828**0.5 - 1, "the furthest of few hides no other"
    assert set(numbers["same"]) == {"advantage", "logprob", "ref_logprob", "reference", "gap", "loss", "share"}
    assert tokens(run, 1, "train", 2)["numbers"]["masked"] == [1]
    assert tokens(run, 1, "train", 3)["numbers"]["columns"]["gap"][2] is None  # the row was cut
    assert tokens(run, 1, "train", 1)["prompt"]["ids"] == [0, 1, 2, 3]


def test_unrecorded_completions_have_no_numbers(run):
    table = tokens(run, 1, "train", 4)
    assert table["numbers"] is None and table["recorded"] == [0]  # of another group
    assert tokens(run, 2, "train", 0)["numbers"] is None  # of another step


@pytest.mark.parametrize(
    "episode", [[1], {"turns": [7]}, {"turns": [{"sees_from": "x"}]}, {"turns": [{}, {"sees_from": 9}]}]
)
def test_an_episode_of_another_form_is_none(tmp_path, episode):
    folder = make_run(tmp_path / "one", steps=1)
    record_tokens(folder, 1)
    path = folder / "rollouts" / "step_000001" / "train.jsonl"
    path.write_text("".join(json.dumps(json.loads(line) | {"episode": episode}) + "\n" for line in path.open()))
    run = load_run(folder)
    assert tokens(run, 1, "train", 1)["numbers"]["clipped"] == [2]
    shown = group(run.rollouts, 1, "train", 1)["members"][1]["episode"]
    assert shown is None or all(isinstance(turn, dict) for turn in shown["turns"])


def test_a_record_of_other_tokens_is_not_shown(tmp_path):
    folder = make_run(tmp_path / "one", steps=1)
    record_tokens(folder, 1)
    path = folder / "rollouts" / "step_000001" / "train.jsonl"
    path.write_text(path.read_text().replace("[5, 6, 7]", "[5, 9, 7]"))
    assert tokens(load_run(folder), 1, "train", 0)["numbers"] is None


def test_a_damaged_record_is_named(tmp_path):
    folder = make_run(tmp_path / "one", steps=1)
    (folder / "rollouts" / "step_000001" / "tokens.safetensors").write_bytes(b"x" * 99)
    reply = tokens(load_run(folder), 1, "train", 0)
    assert reply["numbers"] is None and "has no recorded tokens" in reply["why"]


def dropping(sizes=((2, 1), (1, 0), (1, 2), (2, 0)), sees=(0, 0, 1, 3)) -> Episode:
    turns = [Turn(model_tokens=m, reply_tokens=r, sees_from=s) for (m, r), s in zip(sizes, sees, strict=True)]
    return Episode(opening_tokens=1, turns=tuple(turns), ended="answered")


def test_rows_of_dropped_turns_are_where_they_were_trained():
    """The page's arithmetic of rows is the batch's own."""
    episode = dropping()
    segments = [Segment(origin="prompt", token_ids=(90, 91)), Segment(origin="environment", token_ids=(50,))]
    at = 51
    for turn in episode.turns:
        for origin, size in (("model", turn.model_tokens), ("environment", turn.reply_tokens)):
            if size:
                ids = tuple(range(at, at + size))
                more = {"logprobs": (0.0,) * size, "policy_version": 0} if origin == "model" else {}
                segments.append(Segment(origin=origin, token_ids=ids, **more))
                at += size
    problem = Problem(problem_id="a", prompt="", ground_truth="")
    item = Trajectory(
        prompt_id="0:a", index=0, problem=problem, segments=tuple(segments), text="", finish_reason="stop",
        episode=episode, reward=1.0,
    )  # fmt: skip
    rows = to_rows([item])
    ids = [token for segment in segments[1:] for token in segment.token_ids]
    places = token_places(asdict(episode), len(ids))
    recorded = [
        rows.tokens[n, int(rows.prompt_lengths[n]) : int(rows.lengths[n])].tolist() for n in range(len(rows.tokens))
    ]
    assert len(recorded) == 3 and [[ids[place] for place in row] for row in places] == recorded


def test_tokens_of_several_rows_have_the_numbers_of_the_row_that_trained_them():
    ids = np.array([9, 5, 6, 8, 7, 4])
    rows = [[0, 1, 2, 3, 4], [0, 4, 5]]
    masks = [[0, 1, 1, 0, 1], [0, 0, 1]]
    table = TokenTable(
        step=1, prompts=[np.array([1, 2])], state={},
        rows={
            "trajectory_index": np.array([3, 3]), "group_ids": np.array([0, 0]), "lengths": np.array([7, 5]),
            "prompt_lengths": np.array([2, 2]), "prompt": np.array([0, 0]), "update": np.array([0, 0]),
        },
        tokens={
            "tokens": np.concatenate([ids[row] for row in rows]), "loss_mask": np.array([*masks[0], *masks[1]], bool),
            "advantages": np.array([0, 1, 1, 0, 1, 0, 0, 2], np.float32),
        },
    )  # fmt: skip
    turns = [{"model_tokens": 2, "reply_tokens": 1}, {"model_tokens": 1}, {"model_tokens": 1, "sees_from": 1}]
    numbers = token_numbers(table, 3, ids.tolist(), {"opening_tokens": 1, "turns": turns})
    assert numbers is not None and numbers["columns"]["advantage"] == [0, 1, 1, 0, 1, 2] and numbers["masked"] == [0, 3]
    assert token_numbers(table, 3, [*ids[:5], 77], {"opening_tokens": 1, "turns": turns}) is None
