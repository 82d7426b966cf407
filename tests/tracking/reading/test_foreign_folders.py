"""Folders of other people's runs: no file makes a command fail with a traceback, and no text commands the terminal."""

import json
import re

import pytest

from atomrl.cli.main import main
from atomrl.common.terminal import printable

EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x07\u202egnp\x9b31m"
ROW = {"step": 1, "critic/score/mean": 0.5}


def put(run, name, text):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(text)


FAULTS = {
    "huge rollout step": lambda run: put(run, "rollouts/step_9999999999999999999999/train.jsonl", '{"reward": 1}\n'),
    "huge checkpoint step": lambda run: put(run, "checkpoints/step_9999999999999999999999/x", ""),
    "strange checkpoint step": lambda run: put(run, "checkpoints/step_x9/MANIFEST.json", ""),
    "huge metrics step": lambda run: put(run, "metrics.jsonl", f'{{"step": {10**30}, "a": 1}}\n'),
    "infinite reward": lambda run: put(run, "metrics.jsonl", '{"step": 1, "critic/score/mean": 1e400}\n' * 12),
    "huge integer": lambda run: put(run, "metrics.jsonl", f'{{"step": 1, "critic/score/mean": {10**400}}}\n' * 12),
    "reward in rollouts": lambda run: put(
        run, "rollouts/step_000001/train.jsonl",
        '{"reward": 1e400, "step": 1, "prompt": "p", "completion": "c", "ground_truth": "1", "prompt_id": "a"}\n' * 2,
    ),
    "deep metrics": lambda run: put(run, "metrics.jsonl", json.dumps(ROW) + "\n" + "[" * 100_000 + "\n"),
    "deep config": lambda run: put(run, "config.yaml", "a: " + "[" * 50_000),
    "deep summary": lambda run: put(run, "summary.json", "[" * 100_000),
    "deep rollouts": lambda run: put(run, "rollouts/step_000001/train.jsonl", "[" * 100_000 + "\n"),
    "types in rollouts": lambda run: put(
        run, "rollouts/step_000001/train.jsonl",
        '{"step": null}\n'
        '{"step": 1, "advantage": [], "reward": "x", "prompt": [{"role": 1}], "episode": {"turns": 1}}\n',
    ),
    "deep findings": lambda run: put(run, "findings.jsonl", "[" * 100_000 + "\n"),
    "a loop of links": lambda run: [(run / "config.yaml").unlink(), (run / "config.yaml").symlink_to("config.yaml")],
    "halves of pairs": lambda run: put(run, "failure.json", '{"error": "\\ud800", "where": "\\udfff"}'),
    "aliases": lambda run: put(
        run, "config.yaml", "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    ),
    "binary config": lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe\x00\x01"),
    "list config": lambda run: put(run, "config.yaml", "[1, 2]"),
    "text steps": lambda run: put(run, "config.yaml", "train: {steps: many}\nseed: {a: 1}\n"),
    "escapes in error": lambda run: put(run, "failure.json", json.dumps({"error": EVIL, "where": EVIL})),
    "escapes in config": lambda run: put(run, "config.yaml", json.dumps({"run_name": EVIL, "model": {"path": EVIL}})),
    "escapes in metrics": lambda run: put(run, "metrics.jsonl", json.dumps({**ROW, f"reward/{EVIL}/mean": 1}) + "\n"),
    "escapes in findings": lambda run: put(
        run, "findings.jsonl",
        json.dumps({"id": EVIL, "severity": "error", "step": 1, "what": EVIL, "advice": EVIL, "quote": EVIL}) + "\n",
    ),
    "escapes in rollouts": lambda run: put(
        run, "rollouts/step_000001/train.jsonl", json.dumps({"step": 1, "prompt": EVIL, "completion": EVIL}) + "\n"
    ),
    "escapes in functions": lambda run: put(run, "functions/x.py", EVIL),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_command_reads_or_refuses_it_and_prints_no_control_character(tmp_path, capsys, fault):
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        put(folder, "config.yaml", "run_name: r\ntrain: {steps: 2}\n")
        put(folder, "metrics.jsonl", json.dumps(ROW) + "\n")
    FAULTS[fault](run)
    for command in (
        ["doctor", str(run)],
        ["compare", str(run), str(other)],
        ["compare", str(run), str(other), "--diff"],
        ["compare", str(run), "--plot", str(tmp_path / "p.png")],
        ["rollouts", str(run)],
        ["rollouts", str(run), "--full"],
        ["reward", "exact_match", str(run)],
        ["explain", str(run)],
        ["generate", str(run), "--prompt", "a"],
    ):
        assert main(command) in (0, 1, 2), command
        printed = "".join(capsys.readouterr())
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", printed), (command, printed)


def test_json_keeps_its_values():
    value = {"text": "a\u202eb\x1b\x85\r\n"}
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value
