"""The recorded numbers of tokens, as a page gets them."""

import pytest

from atomrl.reading import load_run
from atomrl.ui.rollouts import tokens
from tests.ui.made import make_run, record_tokens


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
    assert numbers["scales"]["ratio"] == pytest.approx(2.718281828**0.5 - 1)
    assert tokens(run, 1, "train", 2)["numbers"]["masked"] == [1]
    assert tokens(run, 1, "train", 3)["numbers"]["columns"]["gap"][2] is None  # the row was cut
    assert tokens(run, 1, "train", 1)["prompt"]["ids"] == [0, 1, 2, 3]


def test_what_is_not_recorded_has_none(run):
    assert tokens(run, 1, "train", 4)["numbers"] is None  # of another group
    assert tokens(run, 2, "train", 0)["numbers"] is None  # of another step


def test_a_record_of_other_tokens_is_not_shown(tmp_path):
    folder = make_run(tmp_path / "one", steps=1)
    record_tokens(folder, 1)
    path = folder / "rollouts" / "step_000001" / "train.jsonl"
    path.write_text(path.read_text().replace("[5, 6, 7]", "[5, 9, 7]"))
    assert tokens(load_run(folder), 1, "train", 0)["numbers"] is None


def test_a_damaged_record_is_named(tmp_path):
    folder = make_run(tmp_path / "one", steps=1)
    (folder / "rollouts" / "step_000001" / "tokens.safetensors").write_bytes(b"x" * 99)
    found = tokens(load_run(folder), 1, "train", 0)
    assert found["numbers"] is None and "holds no recorded tokens" in found["why"]
