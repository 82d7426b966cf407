"""Replies of environments with pictures: what the model sees in each turn is what its rows have."""

import re
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from atomrl.batches import select_rows
from atomrl.config import EnvironmentConfig
from atomrl.data.rows import to_rows
from atomrl.engines.episodes import EpisodeEngine
from atomrl.engines.generation import generate
from atomrl.engines.hf import HFEngine
from atomrl.environments.worker import EpisodeError
from atomrl.models.vision import Vision
from atomrl.pool.codec import decode, encode
from atomrl.pool.exports import export_rows, trajectory_of
from atomrl.types import Problem, Prompt, Reply, SamplingParams
from tests.tiny_vision import FAMILIES, IMAGE, START, STOP
from tests.vision.test_conformance import Case

SAMPLING = SamplingParams(completions_per_prompt=2, max_completion_tokens=200, ignore_eos=True)
PLAYED = "tests.vision.played"


class Played(Case):
    """Episodes on the engine of a `Case`, over its prompts: with a picture, with two, without."""

    def play(self, function="screen", sampling=SAMPLING, prompts=None, images=True, **settings):
        settings = {"function": f"{PLAYED}.{function}", "max_turn_tokens": 5, "images": images} | settings
        reader = self.reader if images else None
        episodes = EpisodeEngine(self.engine, self.tokenizer, EnvironmentConfig(**settings), images=reader)
        with closing(episodes.pool):
            return generate(episodes, self.prompts if prompts is None else prompts, sampling)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return Played(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def asked(monkeypatch):
    """The requests of every turn, by their ids."""
    seen, submit = {}, HFEngine.submit

    def spied(self, requests):
        seen.update((request.request_id, request) for request in requests)
        submit(self, requests)

    monkeypatch.setattr(HFEngine, "submit", spied)
    return seen


def rewarded(trajectories):
    return [replace(item, reward=float(place % 3)) for place, item in enumerate(trajectories)]


SHORT = {"sampling": replace(SAMPLING, max_completion_tokens=60), "when_full": "drop_oldest", "max_turns": 8}
KINDS = {
    "messages": {},
    "text": {"args": {"role": ""}},
    "opening": {"opening": True, "args": {"opening": True}},
    "dropping": SHORT | {"args": {"turns": 6, "wide": 56}},
    "dropping_with_opening": SHORT | {"args": {"turns": 6, "wide": 56, "opening": True, "role": ""}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_tokens_and_pictures_that_each_turn_was_sampled_after(case, asked, kind):
    trajectories = rewarded(case.play(**KINDS[kind]))
    rows = to_rows(trajectories)
    assert all(item.episode.ended == "environment" for item in trajectories), trajectories[0].episode
    assert (rows.rows > len(trajectories)) == ("dropping" in kind)
    # Linear attention is computed in chunks by the trainer, and token by token in generation.
    close = 2e-4 if "qwen3_5" in str(case.path) else 1e-5
    assert case.difference(rows) < close
    assert case.difference(rows, rows_per_micro_batch=1) < close
    assert not (rows.loss_mask & torch.isin(rows.tokens, torch.tensor([IMAGE, START, STOP]))).any()
    turns = 0
    for row, index in enumerate(rows.trajectory_index.tolist()):
        item = trajectories[index]
        for turn in {*rows.rollout.turn_ids[row].tolist()} - {-1}:
            begin = int((rows.rollout.turn_ids[row] == turn).nonzero()[0])
            request = asked[f"{item.prompt_id}/{item.index}#{turn}"]
            assert request.prompt_token_ids == tuple(rows.tokens[row][:begin].tolist())
            assert request.images == rows.images.rows[row][: len(request.images)]
            turns += 1
        # Nothing but the last reply of a row is behind its last turn.
        assert (rows.tokens[row] == IMAGE).sum() == sum(case.reader.tokens(image) for image in rows.images.rows[row])
    assert turns == sum(len(item.episode.turns) for item in trajectories)


def test_a_reply_is_what_the_template_writes_for_its_parts(case):
    [first, *_] = case.play(prompts=case.prompts[2:3], sampling=replace(SAMPLING, completions_per_prompt=1))
    _, turn, last = first.episode.turns
    assert turn.reply == "first<image>then<image>!" and last.reply == "" and first.images == first.episode.images
    segment = [part for part in first.segments if part.origin == "environment"][1]
    parts = [{"type": "text", "text": "first"}, {"type": "image"}, {"type": "text", "text": "then"}, {"type": "image"},
             {"type": "text", "text": "!"}]  # fmt: skip
    words = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "WORDS"}]
    whole = case.tokenizer.apply_chat_template(
        [*words, {"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    ids = case.tokenizer.encode(whole.partition("WORDS")[2], add_special_tokens=False)
    assert list(segment.token_ids) == case.reader.expanded(ids, turn.images)


@pytest.mark.parametrize("mistake", ["another_turn", "prompt_alone"])
def test_a_mistake_with_pictures_of_replies_shows_in_the_log_probs(case, monkeypatch, mistake):
    rows = to_rows(rewarded(case.play(args={"turns": 4, "wide": 56})))
    real = Vision.inputs

    def wrong(vision, tokens, images):
        if mistake == "prompt_alone":
            return {}
        return real(vision, tokens, [[*row[:-1], row[0]] if row[-1].width == row[0].width else row for row in images])

    close = case.difference(rows)
    monkeypatch.setattr(Vision, "inputs", wrong)
    rows = select_rows(rows, torch.tensor([4, 5]))  # without a picture in the prompt
    if mistake == "another_turn":
        assert rows.images.rows[0][0].width == rows.images.rows[0][-1].width
    try:
        assert case.difference(rows) > 1e-3 > close
    except ValueError:
        assert mistake == "prompt_alone"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return Played("qwen2_5_vl", tmp_path_factory.mktemp("one"))


def test_pictures_are_stored_once_and_travel_through_a_pool(one, tmp_path):
    trajectories = one.play(args={"turns": 3, "opening": True, "role": ""})
    stored = {file.name for file in one.reader.folder.glob("*.png")}
    assert stored == {image.name for item in (*trajectories, *one.trajectories) for image in item.images}
    again = one.play(args={"turns": 3, "opening": True, "role": ""})
    assert {file.name for file in one.reader.folder.glob("*.png")} == stored
    assert [item.images for item in again] == [item.images for item in trajectories]
    group = rewarded(trajectories[:2])
    assert decode(encode(group)[0]) == group
    pool = type("Pool", (), {"identity": lambda self: {}, "groups": lambda self: [(about, group)]})()
    about = {"id": 1, "uses": 0, "written": 0.0, "run": "a"}
    assert [trajectory_of(row) for row in export_rows(pool)] == group


@pytest.mark.parametrize("limit", range(40, 150, 7))
def test_a_cut_row_ends_outside_of_pictures(one, limit):
    trajectories = rewarded(one.play(args={"turns": 4}))
    rows, whole = to_rows(trajectories, max_row_tokens=limit), to_rows(trajectories)
    assert rows.cut is not None
    for row, (index, length) in enumerate(zip(rows.trajectory_index.tolist(), rows.lengths.tolist(), strict=True)):
        assert length <= limit
        tokens = rows.tokens[row, :length]
        assert int((tokens == IMAGE).sum()) == sum(one.reader.tokens(image) for image in rows.images.rows[row])
        assert torch.equal(tokens, whole.tokens[index, :length])
        assert torch.equal(rows.loss_mask[row, :length], whole.loss_mask[index, :length])
        assert rows.loss_mask[row].sum() == whole.loss_mask[index, :limit].sum()


def test_turns_after_replies_with_other_pictures_begin_in_other_states(one):
    """The tokens of the replies are the same."""
    rows = to_rows(rewarded(one.play(prompts=one.prompts[2:3], args={"turns": 1})))
    first = rows.rollout.turn_ids == 1
    states = [int(rows.rollout.state_ids[row][first[row]][0]) for row in (0, 1)]
    names = [rows.images.rows[row][0].name for row in (0, 1)]
    assert names[0] != names[1] and states[0] != states[1]


def test_of_two_messages_one_has_a_picture(one):
    [item] = one.play("calls", prompts=one.prompts[2:3], sampling=replace(SAMPLING, completions_per_prompt=1))
    assert item.episode.turns[0].reply == "a<image>\n<image>b" and len(item.images) == 1
    [segment] = [part for part in item.segments if part.origin == "environment"]
    assert "<tool>a<image>" in one.tokenizer.decode(segment.token_ids)
    assert segment.token_ids.count(IMAGE) == one.reader.tokens(item.images[0])


def test_text_that_spells_the_token_of_a_picture_is_text(one):
    with closing(one_engine(one)) as episodes:
        reply = Reply(text="<|image_pad|><image>", role="user", images=(b"",))
        ids = episodes.replies.encode(reply, None, 100, one.prompts[0].problem.images)
        assert ids.count(IMAGE) == one.reader.tokens(one.prompts[0].problem.images[0])


def one_engine(one):
    settings = EnvironmentConfig(function=f"{PLAYED}.screen", images=True)
    made = EpisodeEngine(one.engine, one.tokenizer, settings, images=one.reader)
    made.close = made.pool.close
    return made


BROKEN = {
    "cut": "the picture is damaged or cut short|not a picture that can be read",
    "empty": r"the picture is empty \(0 bytes\)",
    "gone": "a picture of a Reply: .*No such file.*nowhere.png",
    "web": "https://example.com/a.png is on the web: download the pictures",
    "number": "a picture of a Reply: must be a path, bytes, base64 or an image of Pillow, not int",
    "bare": "the images of a Reply must be a list, not Image",
    "places": "a Reply has 2 pictures, but its text 1 places",
    "narrow": "environment tests.vision.played.broken: 2 x 2000 pixels: absolute aspect ratio",
    "frames": "the picture is animated or has pages",
    "long": r"a reply with pictures of \d+ tokens, more than environment.max_reply_tokens=512, which is not truncated",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_picture_that_cannot_be_read_fails_its_episode(one, case):
    problem = Problem(problem_id="1", prompt=case, ground_truth="")
    prompt = Prompt(prompt_id="1", problem=problem, token_ids=(30, 31))
    files = {*one.reader.folder.iterdir()}
    [item, _] = one.play("broken", prompts=[prompt])
    assert item.episode.failure == "invalid" and {*one.reader.folder.iterdir()} == files
    assert re.search(BROKEN[case], item.episode.message)


def test_a_picture_without_the_key_ends_the_run_with_its_name(one):
    with pytest.raises(EpisodeError, match=r"tests.vision.played.screen' replied with a picture: set environment.imag"):
        one.play(images=False)
