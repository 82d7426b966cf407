"""`atomrl reward`: a file of completions in, the same rows with rewards out."""

from __future__ import annotations

import json

import pytest

from atomrl.cli.main import main


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(completion, truth="18", **more):
    return {"prompt": "p", "completion": completion, "ground_truth": truth, **more}


def test_each_row_comes_out_with_its_reward(tmp_path, capsys):
    rows = [row("#### 18", level=1), row("#### 17"), row("18", completion_tokens=600), row("no")]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out" / "scored.jsonl"
    assert main(["reward", "gsm8k,length_penalty", source, "--out", str(out)]) == 0
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    parts = [{"gsm8k": float(n in (0, 2)), "length_penalty": -(600 - 512) / 512 if n == 2 else 0.0} for n in range(4)]
    assert [item["reward_parts"] for item in scored] == parts
    assert [item["reward"] for item in scored] == [sum(part.values()) for part in parts]
    assert scored[0]["level"] == 1 and "reward_failures" not in scored[0]
    printed = capsys.readouterr().out
    assert "4 completions in" in printed and "gsm8k: 4 values, mean 0.5000" in printed
    assert "gsm8k and length_penalty differ on 2 of 4: in.jsonl:1, in.jsonl:3" in printed
    assert main(["reward", "gsm8k", str(out)]) == 0, "without --out"
    assert "gsm8k: 4 values, mean 0.5000" in capsys.readouterr().out
    again = tmp_path / "again.jsonl"
    assert main(["reward", "exact_match", str(out), "--out", str(again), "format_score=0.25"]) == 0, "its own output"
    assert [json.loads(line)["reward"] for line in again.read_text().splitlines()] == [1.0, 0.25, 1.0, 0.0]


def test_the_prefix_opened_by_the_prompt_counts(tmp_path):
    text = "9+9</think><answer>18</answer>"
    rows = [row(text, opening="<think>"), row(text), row(text) | {"prompt": "p\n<think>\n"}]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "scored.jsonl"
    assert main(["reward", "strict_math", source, "--out", str(out)]) == 0
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [item["reward"] for item in scored] == [1.0, 0.0, 1.0] and scored[0]["opening"] == "<think>"


@pytest.mark.parametrize(
    "truth",
    [
        {"ground_truth": {"target": ["Paris", "Lutetia"]}},
        {"ground_truth": {"target": "Paris"}},
        {"reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}}},
        {"reward_model": {"ground_truth": "Paris"}},
    ],
)
def test_the_ground_truth_of_other_frameworks_files(truth, tmp_path):
    rows = [{"prompt": "p", "completion": f"<answer>{city}</answer>"} | truth for city in ("Paris", "Rome")]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "scored.jsonl"
    assert main(["reward", "search_r1_em", source, "--out", str(out)]) == 0
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [1.0, 0.0]


def test_a_row_that_fails_says_so(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [row("1", truth="words"), row("18")])
    assert main(["reward", "gsm8k", source, "--out", str(tmp_path / "o.jsonl")]) == 0
    first, second = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert first["reward"] is None and first["reward_failures"]["gsm8k"].startswith("error: ValueError: ground_truth")
    assert second["reward"] == 1.0
    printed = capsys.readouterr().out
    assert "no usable value: 1 error" in printed and "in.jsonl:1: error: ValueError" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k", "BAD", "--out", "OUT"], "in.jsonl:2: 'completion' must be text\n  in.jsonl:3: not valid JSON"),
        (["gsm9k", "IN", "--out", "OUT"], "unknown reward 'gsm9k'; did you mean 'gsm8k'"),
        (["gsm8k", "IN", "--out", "IN"], "is also the input"),
        (["gsm8k", "absent.jsonl", "--out", "OUT"], "absent.jsonl does not exist"),
        (["exact_match", "IN", "--out", "OUT", "format_scor=1"], "has no argument 'format_scor'"),
        (["exact_match,gsm8k", "IN", "--out", "OUT", "format_score=1"], "arguments need a single reward"),
        (["gsm8k", "IN", "--out", "FOLDER"], "is a folder; name a file"),
        (["gsm8k", "IN", "--out", "UNDER"], "cannot be written: "),
        (["gsm8k", "IN", "--out", "OUT", "--workers", "0"], "reward.workers"),
    ],
)
def test_mistakes_are_named(arguments, message, tmp_path, capsys):
    paths = {
        "IN": write(tmp_path / "good.jsonl", [row("18")]),
        "BAD": write(tmp_path / "in.jsonl", [row("18"), {"prompt": "p"}, "{\n"]),
        "OUT": str(tmp_path / "out.jsonl"),
        "FOLDER": str(tmp_path),
        "UNDER": str(tmp_path / "good.jsonl" / "out.jsonl"),
    }
    assert main(["reward", *(paths.get(argument, argument) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_the_summary_as_json(tmp_path, capsys):
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "1+1", "completion": "it is 2", "ground_truth": "2"}\n' * 2)
    assert main(["reward", "gsm8k,strict_format", str(file), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    one = {"values": 2, "mean": 1.0, "min": 1.0, "max": 1.0, "failures": {}}
    assert summary["completions"] == 2 and summary["rewards"]["reward/gsm8k"] == one
    assert summary["rewards"]["reward/strict_format"]["mean"] == 0.0
    assert main(["reward", "gsm8k", str(tmp_path), "--json"]) == 2
