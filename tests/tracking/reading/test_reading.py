"""Run folders of every kind are read: finished, growing, torn, rewritten, gone, of another version."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from atomrl import load_run
from atomrl.common.files import write_text
from atomrl.tracking.reading import MetricTable, find_runs
from atomrl.tracking.reading.lines import GrowingFile, ReadError, read_metrics
from atomrl.tracking.reading.lock import acquire_lock, is_locked
from atomrl.tracking.reading.rollouts import LOWER, TEXTS, RolloutFilter, RolloutIndex
from atomrl.tracking.reading.run import config_differences


def rollout(index=0, **given):
    row = {
        "step": 1, "prompt_id": "0:a", "completion_index": index, "data_source": "sums", "prompt": "1 + 1 = ",
        "ground_truth": "2", "completion": f"it is {index}", "prompt_tokens": 4, "completion_tokens": 3 + index,
        "token_ids": [1, 2, 3], "reward": float(index % 2), "advantage": index - 0.5, "finish_reason": "stop",
    }  # fmt: skip
    return row | given


def write_rollouts(run: Path, step: int, rows, split="train") -> Path:
    path = run / "rollouts" / f"step_{step:06d}" / f"{split}.jsonl"
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def make_run(folder: Path, steps=3, **config) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": 0, "val-core/sums/acc/mean@1": 0.25})]
    lines += [json.dumps({"step": n, "critic/score/mean": n / 10, "timing_s/step": 2.0}) for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(json.dumps({"train": {"steps": 10}, "run_name": folder.name} | config))
    return folder


def test_a_run_is_read(tmp_path):
    folder = make_run(tmp_path / "one")
    write_rollouts(folder, 1, [rollout(0), rollout(1)])
    run = load_run(folder)
    assert run.config["train"]["steps"] == 10 and run.problems == [] and run.findings == []
    assert run.metrics.steps.tolist() == [1, 2, 3] and run.metrics["critic/score/mean"].tolist() == [0.1, 0.2, 0.3]
    assert run.evaluations.steps.tolist() == [0] and run.evaluations.last("val-core/sums/acc/mean@1") == 0.25
    assert len(run.rollouts) == 2 and run.rollouts[1]["completion"] == "it is 1"
    assert (run.state.status, run.state.step, run.state.steps, run.state.progress) == ("failed", 3, 10, 0.3)
    (folder / "summary.json").write_text('{"finished": false}')
    assert load_run(folder).state.status == "stopped"
    (folder / "summary.json").write_text('{"finished": true}')
    assert load_run(folder).state.status == "finished"


def test_a_folder_without_a_run_is_refused_and_the_runs_below_it_are_named(tmp_path):
    make_run(tmp_path / "group" / "one")
    with pytest.raises(ReadError, match=r"folder.*group/one"):
        load_run(tmp_path)
    with pytest.raises(ReadError, match="does not exist"):
        load_run(tmp_path / "nothing")


def test_metrics_are_read_on_while_they_are_written(tmp_path):
    folder = make_run(tmp_path / "one")
    run = load_run(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "critic/sc')
        file.flush()
        run.refresh()
        assert run.metrics.steps.tolist() == [1, 2, 3] and run.problems == []
        file.write('ore/mean": 0.5, "new": 1.5}\n')
    assert run.refresh() and not run.refresh()
    assert run.metrics["critic/score/mean"].tolist() == [0.1, 0.2, 0.3, 0.5]
    assert np.isnan(run.metrics["new"][:3]).all() and run.metrics["new"][3] == 1.5


@pytest.mark.parametrize("in_place", [False, True])
def test_a_resumed_run_is_read_again(tmp_path, in_place):
    folder = make_run(tmp_path / "one", steps=6)
    run, path = load_run(folder), folder / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)[:3]
    text = "".join(kept) + "".join(f'{{"step": {n}, "critic/score/mean": 9.0, "other": 1}}\n' for n in range(3, 9))
    if in_place:  # the same inode, and larger: only the content says so
        path.write_text(text)
    else:
        write_text(path, text)
    assert run.refresh()
    assert run.metrics.steps.tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and run.metrics["critic/score/mean"][2] == 9.0


def test_a_removed_run_becomes_empty(tmp_path):
    folder = make_run(tmp_path / "one")
    write_rollouts(folder, 1, [rollout()])
    run = load_run(folder)
    assert len(run.rollouts) == 1
    subprocess.run(["rm", "-r", folder], check=True)
    run.refresh()
    assert len(run.metrics.steps) == len(run.rollouts) == 0 and run.config == {} and run.state.status == "failed"


def test_steps_that_were_done_again_replace_the_earlier_ones():
    table = MetricTable()
    table.extend([{"step": n, "a": float(n)} for n in (1, 2, 3, 4)])
    table.extend([{"step": 3, "b": 7.0}])
    assert table.steps.tolist() == [1, 2, 3] and table["a"].tolist() == [1.0, 2.0, 3.0] and table["b"][2] == 7.0
    table.extend([{"step": 2, "a": 5.0}, {"step": 3, "a": 6.0}, {"step": 2, "a": 8.0}])
    assert table.steps.tolist() == [1, 2] and table["a"].tolist() == [1.0, 8.0]


def test_rows_of_other_versions_are_read_as_far_as_they_can_be(tmp_path):
    folder = make_run(tmp_path / "one")
    odd = [
        '["a"]',
        "no json",
        '{"step": "4"}',
        '{"step": 4, "a": "text", "b": [1], "critic/score/mean": NaN, "c": 1e400}',
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join([*odd, '{"step": 5, "a": 2.5}']) + "\n")
    run = load_run(folder)
    assert run.metrics.steps.tolist() == [1, 2, 3, 4, 5]
    assert (
        run.metrics["a"][4] == 2.5 and np.isnan(run.metrics["a"][3]) and np.isnan(run.metrics["critic/score/mean"][3])
    )
    assert [line.split(" is")[0] for line in run.problems] == [f"metrics.jsonl:{n}" for n in (5, 6, 7)]
    (folder / "config.yaml").write_text("a: [1")
    assert load_run(folder).config == {} and "config.yaml cannot be read" in load_run(folder).problems[0]


def test_strict_reading_names_the_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(ReadError, match="2 is not valid JSON"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_findings_of_other_forms_are_left_out(tmp_path):
    folder = make_run(tmp_path / "one")
    good = {"id": "length_limit", "severity": "warning", "step": 5, "what": "w", "advice": "a", "page": "p", "more": 1}
    (folder / "findings.jsonl").write_text("\n".join([json.dumps(good), '{"id": 1}', "x", '{"id": "torn']))
    assert [finding.id for finding in load_run(folder).findings] == ["length_limit"]


def test_rollouts_are_filtered_sorted_and_grouped(tmp_path):
    write_rollouts(
        tmp_path, 1, [rollout(n) for n in range(4)] + [rollout(n, prompt_id="0:b", reward=1.0) for n in (0, 1)]
    )
    write_rollouts(tmp_path, 2, [rollout(n, completion='say "ÄÖ"\nNOW', finish_reason="length") for n in (0, 1)])
    write_rollouts(tmp_path, 2, [rollout(0, reward=None, advantage=None, data_source="other")], "eval")
    index = RolloutIndex(tmp_path / "rollouts")

    def select(order="step", descending=False, **wanted):
        return index.select(RolloutFilter(**wanted), order, descending).tolist()

    assert len(index) == 9 and select() == list(range(9)) and select(descending=True) == list(range(8, -1, -1))
    assert select(split="eval") == [8] == select(data_source="other") and select(finish_reason="length") == [6, 7]
    assert select(first_step=2) == [6, 7, 8] and select(max_reward=0.0) == [0, 2, 6] and select(min_length=5) == [2, 3]
    assert select(mixed=False) == [4, 5, 8] and select(mixed=True, last_step=1) == [0, 1, 2, 3]
    assert select("length", True, last_step=1)[:2] == [3, 2] and select("reward")[-1] == 8  # without a reward: last
    assert (
        select(text='SAY "ÄÖ"\nnow') == [6, 7] and select(text="it is 1") == [1, 5] and select(text="token_ids") == []
    )
    assert select(text="completion") == select(text="prompt_id") == select(text="0:b") == []  # keys, and other columns
    assert index.group(2).tolist() == [0, 1, 2, 3] and index.group(7).tolist() == [6, 7]
    assert index.prompt_of(0) == index.prompt_of(8) and select(prompt=index.prompt_of(0)) == list(range(9))
    assert select(data_source="nowhere") == select(split="nowhere") == select(prompt="nothing") == []
    assert [row["completion_index"] for row in index.rows([3, 8, 0])] == [3, 0, 0]


def test_rollouts_that_come_change_and_go(tmp_path):
    write_rollouts(tmp_path, 1, [rollout(0)])
    index = RolloutIndex(tmp_path / "rollouts")
    path = write_rollouts(tmp_path, 2, [rollout(0), rollout(1)])
    assert index.refresh() and not index.refresh() and len(index) == 3
    write_rollouts(tmp_path, 2, [rollout(5, completion="done again")])
    assert index.rows([1]) == [{}]  # the file is another one
    assert index.refresh() and len(index) == 2 and index[1]["completion"] == "done again"
    path.unlink()
    assert index.refresh() and len(index) == 1


def test_torn_and_foreign_rollouts(tmp_path):
    path = write_rollouts(tmp_path, 1, [rollout(0), {"completion": "bare"}, rollout(1, prompt=[{"role": "user"}])])
    path.write_text(path.read_text() + '[1]\n{"step": 1, "comp')
    index = RolloutIndex(tmp_path / "rollouts")
    assert len(index) == 3 and index[1] == {"completion": "bare"} and np.isnan(index.numbers["reward"][1])
    assert [line.split(" is")[0] for line in index.problems] == [
        "step_000001/train.jsonl:4",
        "step_000001/train.jsonl:5",
    ]


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    secret = make_run(tmp_path / "secret", run_name="secret")
    write_rollouts(secret, 1, [rollout()])
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml", "rollouts"):
        (folder / name).symlink_to(secret / name)
    run = load_run(folder)
    assert run.config == {} and len(run.metrics.steps) == 0 and len(run.rollouts) == 0
    (tmp_path / "runs" / "two").symlink_to(secret)
    assert list(find_runs(tmp_path / "runs")) == [folder]


def test_runs_are_found_and_what_is_inside_them_is_not(tmp_path):
    make_run(tmp_path / "b")
    make_run(tmp_path / "b" / "checkpoints" / "c")
    make_run(tmp_path / "a" / "deep")
    assert [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)] == ["a/deep", "b"]


def test_the_lock_tells_whether_a_run_is_running(tmp_path):
    folder = make_run(tmp_path / "one")
    code = "from atomrl.tracking.reading.lock import acquire_lock; from pathlib import Path; "
    code += f"acquire_lock(Path({str(folder)!r}))"
    code += "; print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        state = load_run(folder).state
        assert (state.status, state.eta_s) == ("running", 7 * 2.0)
        process.kill()
    assert load_run(folder).state.status == "failed"


def test_rows_nested_too_deep_are_skipped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2.0}\n' + "[" * 100_000 + '\n{"step": 2, "a": 3.0}\n')
    (tmp_path / "config.yaml").write_text("train: &a {steps: 3, own: *a}\n")
    (tmp_path / "env.json").write_text("[" * 100_000)
    run = load_run(tmp_path)
    assert run.metrics["a"].tolist() == [2.0, 3.0] and run.config == run.environment == {}
    assert [line.partition(" is ")[0] for line in run.problems] == ["config.yaml", "env.json", "metrics.jsonl:2"]


def test_without_locks_a_run_counts_as_running_until_it_is_silent(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("train: {steps: 9}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename}\n")
    assert load_run(tmp_path).state.status == "failed"
    monkeypatch.setattr("atomrl.tracking.reading.state.LOCKS_ANSWER", False)
    assert load_run(tmp_path).state.status == "running"


def test_a_run_on_another_machine_runs_until_it_is_silent(tmp_path):
    folder = make_run(tmp_path / "one")
    (folder / ".lock").write_text("process 12 on elsewhere\n")
    assert load_run(folder).state.status == "running"
    for name in ("metrics.jsonl", "config.yaml"):
        os.utime(folder / name, (1e9, 1e9))
    assert load_run(folder).state.status == "failed"


def test_reading_does_not_release_its_own_lock(tmp_path):
    folder = make_run(tmp_path / "one")
    code = f"from atomrl import load_run; print(load_run({str(folder)!r}).state.status)"
    acquire_lock(folder)
    assert is_locked(folder) and load_run(folder).state.status == "running"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert seen == "running\n"


def test_reading_needs_no_torch(tmp_path):
    folder = make_run(tmp_path / "one")
    code = (
        f"import sys; from atomrl import load_run; load_run({str(folder)!r}).state; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_table_for_pandas(tmp_path):
    pytest.importorskip("pandas")
    frame = load_run(make_run(tmp_path / "one")).metrics.frame()
    assert frame.index.name == "step" and frame["critic/score/mean"].tolist() == [0.1, 0.2, 0.3]


def test_a_large_file_comes_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("atomrl.tracking.reading.lines.BLOCK", 40)
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": n, "x" * (3 * n): n}) for n in range(30)]
    path.write_text("\n".join(lines) + "\n" + "{")
    file, blocks = GrowingFile(path), []
    while new := file.read()[1]:
        blocks += new
    assert [line.decode() for line in blocks] == lines


def test_configs_that_differ():
    assert config_differences({"a": {"b": 1}, "c": 1}, {"a": {"b": 2}, "d": 0, "c": 1}) == {
        "a.b": (1, 2),
        "d": (None, 0),
    }


def test_asking_after_a_lock_never_stands_in_its_way(tmp_path):
    folder = make_run(tmp_path / "one")
    asking = "from atomrl.tracking.reading.lock import is_locked; from pathlib import Path\nprint(flush=True)\n"
    asking += f"while True: is_locked(Path({str(folder)!r}))"
    taking = "import fcntl, os, time\nend = time.monotonic() + 2\nwhile time.monotonic() < end:\n"
    taking += f"    handle = os.open({str(folder / '.lock')!r}, os.O_RDWR | os.O_CREAT)\n"
    taking += "    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB); os.close(handle)"
    with subprocess.Popen([sys.executable, "-c", asking], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        taken = subprocess.run([sys.executable, "-c", taking], capture_output=True, text=True)
        process.kill()
    assert taken.returncode == 0, taken.stderr


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_text_is_found_in_texts_alone(tmp_path, shuffled):
    """As by parsing each row, whatever the texts hold (keys, escapes, other columns, numbers), in any order of keys."""
    rng = random.Random(0)
    parts = ["a", "b\n", "É", "completion", "\\", '"', "null", "7", "n", " ", "\x1b", "prompt", "\t", "A, b: {c}"]

    def text() -> str:
        return "".join(rng.choices(parts, k=4))

    rows = [
        {
            "step": 1, "prompt_id": text(), "data_source": text(),
            "prompt": text() if number % 2 else [{"role": "user", "content": text()}],
            "ground_truth": rng.choice([7, text(), True]), "completion": text(), "prompt_tokens": 3,
            "token_ids": [1, 2], "reward": 1.0, "reward_parts": {text(): 1}, "finish_reason": "completion",
        }
        for number in range(120)
    ]  # fmt: skip
    if shuffled:
        rows = [dict(rng.sample(list(row.items()), len(row))) for row in rows]
    path = tmp_path / "step_000001" / "train.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    index = RolloutIndex(tmp_path)
    for wanted in (*parts, "ab", "a\nb", "user", "role", "true", "001b", "tion", '"b', "x7", ", ", "É7", "c}b"):
        matches = set(index.select(RolloutFilter(text=wanted)).tolist())
        lower = wanted.translate(LOWER)
        assert matches == {number for number, row in enumerate(rows) if has_text(row, lower)}, wanted


def has_text(row, text):
    return any(text in joined(row.get(column)).translate(LOWER) for column in TEXTS)


def joined(value):
    parts = list(value.values()) if isinstance(value, dict) else value
    return "\n".join(map(joined, parts)) if isinstance(parts, list) else str(parts)
