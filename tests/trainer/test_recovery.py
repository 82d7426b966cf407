"""Whole runs that are resumed: everywhere, after errors, after changes; and runs that are told to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import yaml

from atomrl.backends.local import LocalBackend
from atomrl.cli.main import main
from atomrl.engines.native.engine import NativeEngine
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.recorder import Recorder
from atomrl.trainer import rollout_training
from benchmarks import kills
from tests.tiny import make_tiny_model

STEPS, PROBLEMS = 12, 18  # three a step: two epochs


def write_problems(tmp_path):
    """A tiny model, and problems in a file."""
    make_tiny_model(tmp_path / "model", "qwen2")
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1), "data_source": "sums"} for k in range(PROBLEMS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_problems(tmp_path)
    config = {
        "run_name": "run",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
        "rollout": {"prompts_per_step": 3, "completions_per_prompt": 2, "max_completion_tokens": 6},
        "train": {"steps": STEPS, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 0},
    }
    config["reward"] = {"functions": [{"function": "exact_match"}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def stop_after(monkeypatch, step):
    log = Recorder.log

    def then_stop(self, now, metrics):
        log(self, now, metrics)
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Recorder, "log", then_stop)
    return log


def seen(run):
    """How often each problem was trained on, from the completions that were kept."""
    counts = Counter()
    for path in run.glob("rollouts/*/train.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        prompts = {row["prompt_id"] for row in rows}  # of one problem there may be two, of two epochs
        counts.update(name.partition(":")[2] for name in prompts)
    return counts


def fails(capsys, *arguments):
    capsys.readouterr()
    assert main(["train", "c.yaml", *arguments]) == 2
    return capsys.readouterr().err


def test_resumed_at_every_step_each_problem_is_seen_exactly_twice(folder, monkeypatch):
    log = Recorder.log
    for step in range(1, STEPS):
        stop_after(monkeypatch, step)
        assert main(["train", "c.yaml", *(["--resume"] if step > 1 else [])]) == 130
        monkeypatch.setattr(Recorder, "log", log)
    assert main(["train", "c.yaml", "--resume"]) == 0
    run = folder / "runs" / "run"
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(row["training/updates"] for row in rows) == STEPS
    trainer = run / "checkpoints" / f"step_{STEPS:06d}" / "training_state" / "trainer.json"
    assert json.loads(trainer.read_text())["updates"] == STEPS
    counts = seen(run)
    assert len(counts) == PROBLEMS and set(counts.values()) == {2}, counts
    assert len(json.loads((run / "env.json").read_text())["resumed"]) == STEPS - 1


def test_resuming_a_finished_run_evaluates_it_once(folder):
    given = ["train", "c.yaml", "data.eval=train.jsonl", "train.steps=2"]
    assert main(given) == 0
    run = folder / "runs" / "run"
    first = (run / "metrics.jsonl").read_text(), json.loads((run / "summary.json").read_text())
    assert main([*given, "--resume"]) == 0
    again = (run / "metrics.jsonl").read_text(), json.loads((run / "summary.json").read_text())
    assert [json.loads(line)["step"] for line in again[0].splitlines()] == [0, 1, 2, 2]
    assert again[0] == first[0]
    assert {**again[1], "wall_s": 0} == {**first[1], "wall_s": 0}
    assert main([*given[:-1], "train.steps=3", "--resume"]) == 0
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 2, 3, 3]


def test_an_error_before_the_first_update_of_a_step_saves_the_steps_before(folder, monkeypatch, capsys):
    submit = NativeEngine.submit

    def broken(self, requests):
        if requests[0].sampling.step == 4:
            raise ValueError("the engine broke")
        return submit(self, requests)

    monkeypatch.setattr(NativeEngine, "submit", broken)
    assert "the engine broke" in fails(capsys)
    run = folder / "runs" / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000003"]
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert main(["train", "c.yaml", "--resume"]) == 0
    assert set(seen(run).values()) == {2}


def test_an_error_in_an_update_saves_nothing_because_the_weights_may_be_between(folder, monkeypatch, capsys):
    step = LocalBackend.train_step

    def broken(self, batch, algorithm):
        result = step(self, batch, algorithm)
        if self.updates == 3:
            raise ValueError("the trainer broke")
        return result

    monkeypatch.setattr(LocalBackend, "train_step", broken)
    assert "the trainer broke" in fails(capsys)
    assert not (folder / "runs" / "run" / "checkpoints").exists()


def test_by_default_a_checkpoint_is_written_before_the_end(folder):
    from atomrl.config import CheckpointConfig

    assert 0 < CheckpointConfig().every_steps < 100


@pytest.fixture
def begun(folder, monkeypatch):
    """A run with a checkpoint at step 2 of 12."""
    log = stop_after(monkeypatch, 2)
    assert main(["train", "c.yaml"]) == 130
    monkeypatch.setattr(Recorder, "log", log)
    return folder


def test_changes_that_decide_a_run_stop_its_resumption(begun, capsys):
    run = begun / "runs" / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    changes = ["train.learning_rate=0.5", "rollout.temperature=0.7", "seed=1", "algorithm.clip={high: 0.3}",
               "train.schedule=cosine", "rollout.prompts_per_step=2"]  # fmt: skip
    for change in changes:
        said = fails(capsys, "--resume", change)
        assert f"{change.partition('=')[0].partition('{')[0]}" in said and "--allow-changes" in said, said
        assert "-> " in said and "run_name=NEW_NAME" in said
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before, "a refusal changes nothing"
    assert main(["train", "c.yaml", "--resume", "train.steps=3", "train.learning_rate=0.5", "--allow-changes"]) == 0
    assert read_metrics(run / "metrics.jsonl")[-1]["actor/lr"] == 0.5
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["learning_rate"] == 0.5


def test_changes_that_decide_nothing_do_not(begun):
    free = ["train.steps=3", "checkpoint.keep=5", "checkpoint.every_steps=1", "tracking.log_every_steps=2",
            "train.tokens_per_micro_batch=100", "rollout.max_concurrent_completions=2", "eval.after=false"]  # fmt: skip
    assert main(["train", "c.yaml", "--resume", *free]) == 0


def test_more_steps_stop_where_the_learning_rate_depends_on_them(begun, capsys):
    given = ["run_name=c", "train.schedule=cosine", "train.steps=2"]
    assert main(["train", "c.yaml", *given]) == 0
    assert "train.steps: 2 -> 3" in fails(capsys, *given[:-1], "train.steps=3", "--resume")


def test_another_data_file_is_named(begun, capsys):
    rows = (begun / "train.jsonl").read_text().replace("3+1=", "3+2=")
    (begun / "train.jsonl").write_text(rows)
    assert "data (data.train): changed since the run was started" in fails(capsys, "--resume")
    assert main(["train", "c.yaml", "--resume", "--allow-changes", "train.steps=3"]) == 0


def test_another_model_and_tokenizer_are_named_and_a_moved_one_is_the_same(begun, capsys):
    (begun / "model").rename(begun / "moved")
    assert main(["train", "c.yaml", "--resume", "model.path=moved", "train.steps=3"]) == 0
    make_tiny_model(begun / "other", "qwen2", seed=1)
    said = fails(capsys, "--resume", "model.path=other")
    assert "model (model.path): changed since the run was started" in said and "tokenizer" not in said
    template = begun / "moved" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|", "<||", 1))
    said = fails(capsys, "--resume", "model.path=moved")
    assert "tokenizer" in said and "prompts (chat template, system prompt)" in said and "model (model" not in said


def test_a_run_without_a_checkpoint_starts_over_if_its_config_is_the_same_or_may_change(folder, monkeypatch, capsys):
    monkeypatch.setattr(NativeEngine, "submit", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "c.yaml"])
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    changed = ["train", "c.yaml", "--resume", "train.steps=1", "train.learning_rate=0.01"]
    assert main(changed) == 2
    assert main([*changed, "--allow-changes"]) == 0
    assert "from the start: no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_no_process(tmp_path, number):
    kills.prepare(tmp_path)
    command = [sys.executable, "-m", "atomrl.cli.main", "train", str(tmp_path / "c.yaml"), f"output_dir={tmp_path}"]
    given = ["checkpoint.every_steps=0", "train.steps=100000", "eval.every_steps=0"]
    process = subprocess.Popen(
        [*command, *given], cwd=kills.ROOT, start_new_session=True, stdout=-1, stderr=subprocess.STDOUT, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("training/updates") >= 2):
        time.sleep(0.05)
    os.killpg(process.pid, number)  # as a terminal does: workers get it too
    output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "continue with: atomrl train" in output
    assert not kills.left_behind(process.pid)
    steps = [row["step"] for row in read_metrics(metrics) if "training/updates" in row]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{steps[-1]:06d}"]


def test_a_signal_before_the_first_step_ends_at_once(folder, monkeypatch, capsys):
    monkeypatch.setattr(rollout_training, "evaluate", lambda *a, **k: os.kill(os.getpid(), signal.SIGTERM))
    handler = signal.getsignal(signal.SIGTERM)
    assert main(["train", "c.yaml", "data.eval=train.jsonl"]) == 130
    assert "no checkpoint yet" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is handler


SFT = {
    "run_name": "sft",
    "data": {"train": "shown.jsonl", "answer_field": None, "max_prompt_tokens": 40},
    "sft": {"gpt": {"layers": 1, "hidden": 32, "heads": 1, "max_tokens": 64}},
    "train": {"steps": 3, "rows_per_update": 2},
}


def test_demonstrations_that_pass_the_context_are_left_out_and_counted(folder, caplog, capsys):
    rows = [{"prompt": "1+1=", "completion": "2" * n} for n in (1, 2, 3, 100)]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.yaml").write_text(yaml.safe_dump(SFT))
    assert main(["train", "sft.yaml"]) == 0
    assert "1 of 4 demonstrations are longer than 64 tokens, the model's context" in caplog.text
    (folder / "shown.jsonl").write_text(json.dumps(rows[3]) + "\n")
    assert main(["train", "sft.yaml", "run_name=x"]) == 2
    assert "sft.gpt.max_tokens" in capsys.readouterr().err


def test_sft_resumes_bit_for_bit(folder, monkeypatch):
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(5)]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.yaml").write_text(yaml.safe_dump(SFT))
    assert main(["train", "sft.yaml", "run_name=whole"]) == 0
    log = stop_after(monkeypatch, 1)
    assert main(["train", "sft.yaml"]) == 130
    monkeypatch.setattr(Recorder, "log", log)
    assert main(["train", "sft.yaml", "--resume"]) == 0
    files = ["model.safetensors", "training_state/optimizer.safetensors"]
    for name in files:
        saved = [folder / "runs" / run / "checkpoints" / "step_000003" / name for run in ("sft", "whole")]
        assert saved[0].read_bytes() == saved[1].read_bytes()


def test_a_config_of_an_older_version_counts_with_its_defaults():
    from atomrl.tracking.resuming import config_changes, stopping_changes
    from tests.tracking.helpers import make_config

    now = make_config("x")
    tree = now.model_dump(mode="json")
    del tree["checkpoint"]["keep_best"], tree["train"]["adam_eps"]
    assert config_changes(tree, now) == []
    tree["train"]["adam_eps"], tree["train"]["momentum"] = 1e-5, 0.5
    changes = config_changes(tree, now)
    assert "train.adam_eps: 1e-05 -> 1e-08" in changes and "train.momentum: 0.5 -> None" in changes
    assert "train.momentum: 0.5 -> None" in stopping_changes(changes, now)
