"""The report of `atomrl data check`."""

from __future__ import annotations

import json

import pytest

from atomrl.config import DataConfig
from atomrl.data.checks import check_data
from atomrl.data.files import DataError


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def row(prompt, **columns):
    return {"prompt": prompt, "ground_truth": "1", **columns}


def test_the_report_has_errors_duplicates_and_overlap(tmp_path):
    train = write(tmp_path / "train.jsonl", row("What is 2+2?", data_source="sums"), "{", row("what is  2+2? "),
                  row("a" * 100, level=3), row("bcd", data_source="sums"))  # fmt: skip
    test = write(tmp_path / "test.jsonl", row("new"), row("BCD"))
    report = check_data(train, against=test)
    assert (report.rows, len(report.errors), report.ok) == (5, 1, False)
    assert report.errors[0].startswith("train.jsonl:2: not valid JSON")
    assert report.duplicates == [("train.jsonl:3", "train.jsonl:1")]
    assert report.overlap == (("train.jsonl:5", "test.jsonl:2"),)
    text = report.text()
    for part in ("5 rows, 1 problems, 4 usable", "shortest 3, median 14", "longest 100", "sums 2, default 2",
                 "columns: level\n",
                 "train.jsonl:3 is a duplicate of train.jsonl:1", "train.jsonl:5 is a duplicate of test.jsonl:2",
                 "problems:\n  train.jsonl:2: not valid JSON", "first prompt: 'What is 2+2?'",
                 "first ground truth: '1'"):  # fmt: skip
        assert part in text


def test_field_mapping_and_a_clean_file(tmp_path):
    path = write(tmp_path / "data.jsonl", {"q": "one", "a": "#### 1"}, {"q": "two", "a": "#### 2"})
    config = DataConfig(train=str(path), prompt_field="q", answer_field="a", answer_pattern="#### (.*)")
    report = check_data(path, config)
    assert report.ok and report.duplicates == [] and "2 rows, no problems" in report.text()
    assert len(check_data(path).errors) == 2


def test_gsm8k_splits_do_not_overlap(shared_dir):
    folder = shared_dir / "data/gsm8k"
    config = DataConfig(train="x", prompt_field="question", answer_field="answer", answer_pattern=r"####\s*(.+)")
    report = check_data(folder / "test.jsonl", config, against=folder / "train.jsonl")
    assert report.ok and report.rows == 1319


def test_an_empty_file_is_an_error_and_one_of_dirt_a_report(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        check_data(write(tmp_path / "empty.jsonl", ""))
    report = check_data(write(tmp_path / "dirt.jsonl", "{", "{"))
    assert (report.rows, len(report.errors), report.problems) == (2, 2, [])
    assert "0 usable" in report.text()


CHAT = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
KINDS = [
    (row("2+2="), "problems", "first ground truth: '1'"),
    ({"prompt": "2+2=", "completion": "4"}, "demonstrations", "first completion: '4'"),
    ({"messages": CHAT}, "demonstrations", "first prompt: '2+2='\nfirst completion: '4'"),
    (
        {"conversations": [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]},
        "demonstrations",
        "first completion: '4'",
    ),
    ({"instruction": "Add.", "input": "2+2", "output": "4"}, "demonstrations", "first prompt: 'Add.\\n\\n2+2'"),
    ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "preferences", "first rejected: '5'"),
    ({"chosen": CHAT, "rejected": [CHAT[0], CHAT[1] | {"content": "5"}]}, "preferences", "first chosen: '4'"),
    (
        {"instruction": "a", "completions": [{"response": r, "overall_score": s} for r, s in (("x", 1), ("y", 2))]},
        "preferences",
        "first chosen: 'y'",
    ),
    ({"prompt": "2+2=", "completion": "5", "label": False}, "preferences", "first completion, bad: '5'"),
    (row("2+2=", completion="4"), "problems", "first ground truth: '1'"),
    ({"prompt": "2+2="}, "problems", "field 'ground_truth' is missing"),
]


@pytest.mark.parametrize(("line", "kind", "shown"), KINDS, ids=[", ".join(line) for line, _, _ in KINDS])
def test_files_for_every_kind_of_run_are_known_by_their_columns(line, kind, shown, tmp_path):
    report = check_data(write(tmp_path / "a.jsonl", line, "{"))
    assert report.kind == kind and f"read as: {kind}, for " in report.text() and shown in report.text()
    assert report.errors[-1].startswith("a.jsonl:2: not valid JSON")


def test_rows_are_checked_as_their_run_would(tmp_path):
    good = {"prompt": "a", "chosen": "x", "rejected": "y"}
    report = check_data(write(tmp_path / "pairs.jsonl", good, good | {"rejected": "x"}, good | {"chosen": "z"}, good))
    assert report.errors == ["pairs.jsonl:2: the chosen and the rejected completion are the same"]
    assert report.duplicates == [("pairs.jsonl:4", "pairs.jsonl:1")]  # one prompt may have several preferences
    turns = [*CHAT, {"role": "user", "content": "and 3?"}]
    report = check_data(write(tmp_path / "sft.jsonl", {"messages": CHAT}, {"messages": turns}))
    [problem] = report.errors
    assert problem.startswith("sft.jsonl:2: field 'messages' must begin and end with an assistant message")
    assert "first ground truth" not in report.text() and "columns" not in report.text()


def test_a_ground_truth_of_null_makes_every_file_one_of_problems(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"})
    assert check_data(path, DataConfig(train="x", answer_field=None)).kind == "problems"


def test_truths_that_a_reward_cannot_read_are_reported_with_their_lines(tmp_path, capsys):
    from atomrl.cli.main import main

    path = tmp_path / "a.jsonl"
    truths = ["4", "five", "x\n####", "$$", "", "\\frac{1"]
    path.write_text(
        "".join(json.dumps({"prompt": f"{n}?", "ground_truth": truth}) + "\n" for n, truth in enumerate(truths))
    )
    for options, lines in (
        ([], [3, 4, 5]),
        (["--reward", "gsm8k"], [2, 3, 4, 5, 6]),
        (["--reward", "boxed"], [4, 5, 6]),
    ):
        assert main(["data", "check", str(path), *options]) == 2
        report = capsys.readouterr().err
        assert [line for line in range(1, 7) if f"a.jsonl:{line}: " in report] == lines
