"""Loading: field mapping, real layouts, sizes, and every kind of dirt with its file and line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atomrl.common.files import write_jsonl
from atomrl.config import DataConfig
from atomrl.data.files import DataError, read_rows
from atomrl.data.problems import load_problems

GOOD = b'{"prompt": "1+1=", "ground_truth": "2"}'


def write(folder: Path, *lines: bytes, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def write_rows(folder: Path, *rows: Any) -> str:
    return write(folder, *(json.dumps(row).encode() for row in rows))


def test_plain_rows_and_columns(tmp_path):
    path = write_rows(
        tmp_path,
        {"prompt": "1+1=", "ground_truth": "2", "data_source": "sums", "level": 1},
        {"prompt": "2+2=", "ground_truth": 4, "tags": ["a", {"b": None}]},
    )
    report = load_problems(DataConfig(train=path))
    first, second = report.problems
    assert (first.problem_id, first.prompt, first.ground_truth, first.data_source) == (
        "data.jsonl:1",
        "1+1=",
        "2",
        "sums",
    )
    assert first.columns == {"level": 1, "tags": None}
    assert (second.ground_truth, second.data_source) == (4, "default")
    assert second.columns == {"level": None, "tags": ["a", {"b": None}]}
    assert not report.errors


def test_gsm8k_by_configuration_alone(shared_dir):
    config = DataConfig(
        train=str(shared_dir / "data/gsm8k/train.jsonl"),
        eval=str(shared_dir / "data/gsm8k/test.jsonl"),
        prompt_field="question",
        answer_field="answer",
        answer_pattern=r"####\s*(.+)",
        eval_size=100,
    )
    train, evaluation = load_problems(config, "train"), load_problems(config, "eval")
    assert (len(train.problems), len(evaluation.problems)) == (7473, 100)
    assert evaluation.problems[0].ground_truth == "18" and "####" in evaluation.problems[0].columns["answer"]
    assert all(re.fullmatch(r"-?[\d,.]+", sample.ground_truth) for sample in train.problems)


def test_the_layout_of_trl_is_read(tmp_path):
    row = {"prompt": [{"role": "user", "content": "1+1="}], "solution": "2", "difficulty": "easy"}
    [sample] = load_problems(DataConfig(train=write_rows(tmp_path, row), answer_field="solution")).problems
    assert sample.prompt == ({"role": "user", "content": "1+1="},)
    assert sample.ground_truth == "2" and sample.columns == {"difficulty": "easy", "solution": "2"}


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


def check_verl(problem: Any) -> None:
    assert (problem.ground_truth, problem.data_source) == ("2", "openai/gsm8k")
    assert problem.columns["extra_info"] == {"split": "train", "index": 0}
    assert problem.columns["reward_model"]["style"] == "rule" and problem.columns["ability"] == "math"


def test_the_layout_of_verl_is_read(tmp_path):
    config = DataConfig(train=write_rows(tmp_path, VERL_ROW), answer_field="reward_model.ground_truth")
    check_verl(load_problems(config).problems[0])


def test_parquet_is_read_and_a_damaged_file_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([VERL_ROW] * 3), path)
    samples = load_problems(DataConfig(train=str(path), answer_field="reward_model.ground_truth")).problems
    assert [sample.problem_id for sample in samples] == ["train.parquet:1", "train.parquet:2", "train.parquet:3"]
    check_verl(samples[2])
    path.write_bytes(b"PAR1 this is none")
    with pytest.raises(DataError, match="Parquet"):
        load_problems(DataConfig(train=str(path)))


def test_a_key_with_a_dot_comes_before_a_nested_one(tmp_path):
    path = write_rows(tmp_path, {"prompt": "p", "a.b": "whole", "a": {"b": "nested"}})
    assert load_problems(DataConfig(train=path, answer_field="a.b")).problems[0].ground_truth == "whole"


def test_blank_lines_windows_line_ends_and_byte_order_mark(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n   \n" + GOOD)
    assert [sample.problem_id for sample in load_problems(DataConfig(train=str(path))).problems] == [
        "data.jsonl:1",
        "data.jsonl:4",
    ]


ROW_PROBLEMS = [
    (b"{", "not valid JSON"),
    (b'{"prompt": "a", "ground_truth": "b"', "not valid JSON"),
    (b'{"prompt": "a", "ground_truth": "b",}', "not valid JSON"),
    (b"{'prompt': 'a', 'ground_truth': 'b'}", "not valid JSON"),
    (GOOD + GOOD, "not valid JSON: Extra data"),
    (b'{"prompt": "a\tb", "ground_truth": "b"}', "not valid JSON: Invalid control character"),
    (b'[{"prompt": "a", "ground_truth": "b"}]', "a JSON list"),
    (b'"prompt"', "not a JSON object but str"),
    (b"null", "not a JSON object but NoneType"),
    (b'{"prompt": "caf\xe9", "ground_truth": "b"}', "not valid UTF-8"),
    (b'{"prompt": "a", "prompt": "b", "ground_truth": "c"}', "key 'prompt' appears twice"),
    (b'{"prompt": "a", "ground_truth": "b", "x": {"y": 1, "y": 2}}', "key 'y' appears twice"),
    (b'{"prompt": "a", "ground_truth": NaN}', "NaN is not valid JSON"),
    (b'{"prompt": "a", "ground_truth": "b", "x": -Infinity}', "-Infinity is not valid JSON"),
    (b'{"prompt": "a", "ground_truth": 1e999}', "number 1e999 is too large"),
    (b'{"prompt": "a", "ground_truth": ' + b"9" * 5000 + b"}", "cannot parse JSON"),
    (b'{"prompt": "a", "ground_truth": ' + b"[" * 200_000 + b"}", "cannot parse JSON"),
    (b'{"prompt": "a\\ud800", "ground_truth": "b"}', "a lone surrogate"),
    (b'{"ground_truth": "b"}', "field 'prompt' is missing"),
    (b'{"prompt": "a"}', "field 'ground_truth' is missing"),
    (b"{}", "has no keys"),
    (b'{"prompt": "", "ground_truth": "b"}', "prompt is empty"),
    (b'{"prompt": " \\n", "ground_truth": "b"}', "prompt is empty"),
    (b'{"prompt": null, "ground_truth": "b"}', "must be text or a list of messages, not NoneType"),
    (b'{"prompt": 7, "ground_truth": "b"}', "must be text or a list of messages, not int"),
    (b'{"prompt": [], "ground_truth": "b"}', "empty list of messages"),
    (b'{"prompt": ["hi"], "ground_truth": "b"}', "message 1 must be an object"),
    (b'{"prompt": [{"content": "hi"}], "ground_truth": "b"}', "message 1: 'role' must be text"),
    (b'{"prompt": [{"role": "user", "content": ["hi"]}], "ground_truth": "b"}', "message 1: 'content' must be text"),
    (b'{"prompt": [{"role": "usr", "content": "hi"}], "ground_truth": "b"}', "unknown role 'usr'"),
    (b'{"prompt": [{"role": "user", "content": " "}], "ground_truth": "b"}', "all messages are empty"),
    (b'{"prompt": "a", "ground_truth": null}', "field 'ground_truth' is empty"),
    (b'{"prompt": "a", "ground_truth": " "}', "field 'ground_truth' is empty"),
    (b'{"prompt": "a", "ground_truth": "b", "data_source": 3}', "field 'data_source' must be text"),
    (b'{"prompt": "a", "ground_truth": "b", "completions": []}', "column 'completions' has a name"),
]


@pytest.mark.parametrize(("line", "reason"), ROW_PROBLEMS, ids=[reason for _, reason in ROW_PROBLEMS])
def test_a_bad_row_is_named_with_file_and_line(tmp_path, line, reason):
    path = write(tmp_path, GOOD, b"", line, GOOD)
    with pytest.raises(DataError) as caught:
        load_problems(DataConfig(train=path))
    [problem] = str(caught.value).split("\n")[1:]
    assert problem.startswith("  data.jsonl:3: ") and reason in problem and len(problem) < 300
    report = load_problems(DataConfig(train=path, on_bad_row="skip"))
    assert [sample.problem_id for sample in report.problems] == ["data.jsonl:1", "data.jsonl:4"]
    assert len(report.errors) == 1 and reason in report.errors[0]


def test_all_problems_are_listed_up_to_twenty(tmp_path):
    path = write(tmp_path, *[line for n in range(25) for line in (GOOD, b'{"a%d": 1}' % n)])
    with pytest.raises(DataError) as caught:
        load_problems(DataConfig(train=path))
    lines = str(caught.value).split("\n")
    assert "25 rows have problems" in lines[0] and len(lines) == 22 and lines[-1].strip() == "... and 5 more"
    assert lines[1].startswith("  data.jsonl:2: ") and lines[20].startswith("  data.jsonl:40: ")


def test_answer_pattern_problems(tmp_path):
    path = write_rows(tmp_path, {"prompt": "a", "ground_truth": "#### 1"}, {"prompt": "b", "ground_truth": "none"},
                      {"prompt": "c", "ground_truth": 3})  # fmt: skip
    with pytest.raises(DataError, match=r"data.jsonl:2:(.|\n)*data.jsonl:3:"):
        load_problems(DataConfig(train=path, answer_pattern=r"####\s*(.+)"))
    with pytest.raises(DataError, match="regular expression"):
        load_problems(DataConfig(train=path, answer_pattern="("))
    with pytest.raises(DataError, match="no capture group"):
        load_problems(DataConfig(train=path, answer_pattern="####"))
    good = load_problems(DataConfig(train=path, answer_pattern=r"####\s*(.+)", on_bad_row="skip"))
    assert good.problems[0].ground_truth == "1" and good.problems[0].columns == {}


def test_rows_without_a_ground_truth(tmp_path):
    path = write_rows(tmp_path, {"prompt": "a", "completion": "b"})
    [sample] = load_problems(DataConfig(train=path, answer_field=None)).problems
    assert sample.ground_truth is None and sample.columns == {"completion": "b"}
    with pytest.raises(DataError, match=r"data.answer_pattern needs data.answer_field"):
        load_problems(DataConfig(train=path, answer_field=None, answer_pattern="(.*)"))


def test_a_mapped_field_does_not_hide_another(tmp_path):
    path = write_rows(tmp_path, {"prompt": "a", "answer": "1", "ground_truth": "2"})
    with pytest.raises(DataError, match="column 'ground_truth'"):
        load_problems(DataConfig(train=path, answer_field="answer"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has no usable row"),
        (b"\n \n", "has no usable row"),
        ("{}".encode("utf-16"), "UTF-16; save it as UTF-8"),
        (b"\x00\x01\x02\xff", "not valid UTF-8"),
    ],
)
def test_files_without_rows(tmp_path, content, reason):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load_problems(DataConfig(train=str(path)))


def test_files_that_are_none(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_problems(DataConfig(train=str(tmp_path / "absent.jsonl")))
    with pytest.raises(DataError, match="not a file"):
        load_problems(DataConfig(train=str(tmp_path)))
    with pytest.raises(DataError, match="'countdown'"):
        load_problems(DataConfig(train="countdwn"))


def test_sizes_take_the_first_rows(tmp_path, caplog):
    path = write(tmp_path, *[GOOD] * 5)
    config = DataConfig(train=path, train_size=3, eval=path, eval_size=2)
    assert [sample.problem_id for sample in load_problems(config).problems] == [f"data.jsonl:{n}" for n in (1, 2, 3)]
    assert len(load_problems(config, "eval").problems) == 2
    assert load_problems(DataConfig(train=path), "eval").problems == []
    assert not caplog.records
    assert len(load_problems(DataConfig(train=path, train_size=6)).problems) == 5  # a config made for a generator, say
    assert re.search(r"data.train_size=6, but .*data.jsonl has only 5 usable rows: all are used", caplog.text)
    with pytest.raises(DataError, match="train_size is required"):
        load_problems(DataConfig(train="arithmetic"))


def test_generator_as_source():
    config = DataConfig(train="arithmetic", train_size=20, eval="arithmetic", eval_size=10, generator_args={"steps": 2})
    train, evaluation = load_problems(config, seed=3).problems, load_problems(config, "eval", seed=3).problems
    assert (len(train), len(evaluation)) == (20, 10)
    assert train[0].problem_id == "arithmetic:train:1" and train[0].data_source == "arithmetic"
    assert not {sample.prompt for sample in train} & {sample.prompt for sample in evaluation}
    assert load_problems(config, seed=3).problems == train and load_problems(config, seed=4).problems != train


def test_write_then_read_gives_the_same_rows(tmp_path):
    rows = [{"prompt": 'naïve ∑ \u2028 "quote" 😀', "ground_truth": 0.1, "x": [None, True]}, {"prompt": "b\n"}]
    path = tmp_path / "folder" / "out.jsonl"
    assert write_jsonl(rows, path) == 2
    assert [raw.row for raw in read_rows(path)] == rows
    with pytest.raises(ValueError):
        write_jsonl([{"prompt": float("nan")}], path)
    assert [raw.row for raw in read_rows(path)] == rows  # the old file is whole, and nothing lies beside it
    assert [file.name for file in path.parent.iterdir()] == ["out.jsonl"]


def test_data_modules_do_not_import_torch():
    names = "checks curriculum files given hub image_reader images problems tasks tokenized"
    code = "import sys; import " + ", ".join(f"atomrl.data.{name}" for name in names.split())
    code += ", atomrl.rewards.compute; sys.exit(bool({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
