"""Torn files and full disks: what was good stays good, and the message says what happened."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atomrl.cli.main import main
from atomrl.config import ConfigError
from atomrl.tracking import checkpoints
from atomrl.tracking.checkpoints import checkpoint_fault, step_folders
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.run_directory import RunDirectory
from benchmarks import kills
from tests.tracking.helpers import make_config

DAMAGES = ("deleted", "truncated", "flipped")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps with the checkpoints of steps 3 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    kills.prepare(folder)
    assert main(["train", str(folder / "c.yaml"), f"output_dir={folder}", *SHORT, "train.steps=4"]) == 0
    assert [step for step, _ in step_folders(folder / "run" / "checkpoints")] == [3, 4]
    return folder


SHORT = ["checkpoint.every_steps=1", "eval.every_steps=0", "eval.before=false", "eval.after=false",
         "train.schedule=constant", "train.warmup_ratio=0"]  # fmt: skip


def damage(path, how):
    content = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def test_every_file_of_a_checkpoint_is_guarded(trained, tmp_path, capsys):
    config = make_config(tmp_path)
    run = RunDirectory.create(config)
    newest = run.checkpoint_folder(4)
    shutil.copytree(trained / "run" / "checkpoints", run.path / "checkpoints")
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) >= 8 and {"MANIFEST.json", "model.safetensors", "optimizer.safetensors", "progress.json"} <= {
        path.name for path in files
    }
    for path in files:
        content = path.read_bytes()
        name = str(path.relative_to(newest))
        for how in DAMAGES:
            damage(path, how)
            assert run.latest_checkpoint() == (3, run.checkpoint_folder(3)), (name, how)
            said = capsys.readouterr().err
            # A byte of the manifest may be one of a file's hash: then it is that file that does not fit.
            assert (
                "skipping corrupted checkpoint" in said
                and "step_000004" in said
                and (name in said or name == "MANIFEST.json")
            ), (name, how, said)
            assert name == "MANIFEST.json" or ("missing" in said) == (how == "deleted"), (name, how, said)
            path.write_bytes(content)
    assert run.latest_checkpoint() == (4, newest)


def test_every_seventh_byte_of_the_manifest_counts(trained, tmp_path):
    folder = tmp_path / "step_000004"
    shutil.copytree(trained / "run" / "checkpoints" / "step_000004", folder)
    content = (folder / "MANIFEST.json").read_bytes()
    for at in range(0, len(content), 7):
        for bit in (0x01, 0x20, 0x2A):  # 0x2A makes a line's end of a space
            (folder / "MANIFEST.json").write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            assert checkpoint_fault(folder), (at, content[at : at + 1])


def all_files(folder):
    return {
        str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"
    }


def no_manifests(run):
    for path in run.glob("checkpoints/step_*/MANIFEST.json"):
        path.unlink()


def truncated(run):
    for path in run.glob("checkpoints/step_*/model.safetensors"):
        damage(path, "truncated")


def set_aside(run):
    for path in list(run.glob("checkpoints/step_*")):
        path.rename(path.with_name(f"{path.name}.damaged"))


def no_folder(run):
    shutil.rmtree(run / "checkpoints")


def newer_format(run):
    path = run / "checkpoints" / "step_000004" / "MANIFEST.json"
    path.write_text(checkpoints.manifest_text(json.loads(path.read_text())["sha256"], 99))


def unreadable(run):
    def broken(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    return broken


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (no_manifests, "no checkpoint of"),
        (truncated, "no checkpoint of"),
        (set_aside, "no checkpoint of"),
        (no_folder, "no checkpoint of"),
        (newer_format, "is a checkpoint of format 99"),
        (unreadable, "cannot be read (Input/output error)"),
    ],
)
def test_a_resume_that_finds_nothing_to_continue_from_changes_nothing(
    trained, tmp_path, monkeypatch, capsys, fault, message
):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run, symlinks=True)
    if (broken := fault(run)) is not None:
        monkeypatch.setattr(checkpoints, "sha256", broken)
    before = all_files(run)
    command = ["train", str(trained / "c.yaml"), f"output_dir={tmp_path}", *SHORT, "train.steps=4", "--resume"]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert all_files(run) == before


def test_a_checkpoint_of_the_first_format_is_read(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    path = tmp_path / "run" / "checkpoints" / "step_000004" / "MANIFEST.json"
    path.write_text(json.dumps({"sha256": json.loads(path.read_text())["sha256"]}, indent=1) + "\n")
    command = ["train", str(trained / "c.yaml"), f"output_dir={tmp_path}", *SHORT, "train.steps=4", "--resume"]
    assert checkpoint_fault(path.parent) is None and main(command) == 0


def test_a_changed_config_is_refused_before_the_first_checkpoint_too(tmp_path):
    RunDirectory.create(make_config(tmp_path)).log(1, {"a": 1.0})
    with pytest.raises(ConfigError, match=r"train\.learning_rate: "):
        RunDirectory.create(make_config(tmp_path, train={"learning_rate": 0.5}), resume=True)


@pytest.mark.parametrize("how", ["renamed", "deleted", "replaced"])
def test_a_run_whose_folder_is_taken_away_stops(trained, tmp_path, capsys, how):
    run = tmp_path / "run"

    def take_away(step, metrics):
        if step == 2:
            if how == "deleted":
                shutil.rmtree(run)
            else:
                run.rename(tmp_path / "other")
            if how == "replaced":
                run.mkdir()
                (run / ".lock").write_text("process 1 on elsewhere\n")

    from atomrl.config import load_config
    from atomrl.trainer import Options, prepare_run

    config = load_config(trained / "c.yaml", [f"output_dir={tmp_path}", *SHORT, "train.steps=4"])
    with pytest.raises(FileNotFoundError, match="renamed, deleted or replaced"):
        prepare_run(config).execute(Options(callbacks=[take_away]))
    left = {path.name for path in run.iterdir()} if run.exists() else set()
    assert left == ({".lock"} if how == "replaced" else set())
    if how != "deleted":
        assert [row["step"] for row in read_metrics(tmp_path / "other" / "metrics.jsonl")] == [1]
        (tmp_path / "other").rename(tmp_path / "back")
        shutil.rmtree(run, ignore_errors=True)
        (tmp_path / "back").rename(run)
        command = ["train", str(trained / "c.yaml"), f"output_dir={tmp_path}", *SHORT, "train.steps=4", "--resume"]
        assert main(command) == 0


def test_training_continues_from_the_one_before_and_the_damaged_one_is_kept_aside(trained, tmp_path, capsys):
    shutil.copytree(trained / "run", tmp_path / "run")  # a copy follows links: `model` is a folder
    whole = tmp_path / "run" / "checkpoints" / "step_000004"
    expected = hashlib.sha256((whole / "model.safetensors").read_bytes()).hexdigest()
    damage(whole / "model.safetensors", "flipped")
    command = ["train", str(trained / "c.yaml"), f"output_dir={tmp_path}", *SHORT, "train.steps=4", "--resume"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "model.safetensors has changed" in said and "continues after step 3" in said
    assert hashlib.sha256((whole / "model.safetensors").read_bytes()).hexdigest() == expected
    assert sorted(path.name for path in whole.parent.iterdir()) == ["step_000003", "step_000004"]
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "model").resolve() == whole and len([*(tmp_path / "run").glob("model_copied_*")]) == 1


@pytest.mark.parametrize("point", ["mkdir", "model", "optimizer", "manifest", "rename"])
def test_a_full_disk_leaves_the_last_good_checkpoint(trained, tmp_path, monkeypatch, capsys, point):
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    owner, name = {
        "mkdir": (Path, "mkdir"),
        "model": (__import__("atomrl.backends.roles", fromlist=["x"]), "save_model"),
        "optimizer": (__import__("safetensors.torch", fromlist=["x"]), "save_file"),
        "manifest": (checkpoints, "sha256"),
        "rename": (Path, "rename"),
    }[point]
    inner = getattr(owner, name)

    def full(*arguments, **named):
        if ".partial" in str(arguments) or point in ("model", "optimizer"):
            if point == "optimizer":  # as the library says it
                raise type("SafetensorError", (Exception,), {})("I/O error: No space left on device (os error 28)")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return inner(*arguments, **named)

    monkeypatch.setattr(owner, name, full)
    command = ["train", str(trained / "c.yaml"), f"output_dir={tmp_path}", *SHORT, "train.steps=6", "--resume"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "the disk is full" in said and str(tmp_path / "run" / "checkpoints") in said and "Free space" in said
    root = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["step_000003", "step_000004"]
    assert checkpoint_fault(root / "step_000004") is None
    monkeypatch.undo()
    assert main(command) == 0, "with room again, the run goes on"
    assert checkpoint_fault(root / "step_000006") is None


@pytest.mark.slow
def test_a_disk_that_is_really_full(trained, tmp_path):
    """A file system of its own, which has no room for a second checkpoint beside the first."""
    kib = 450
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a small file system needs rights that this user has not")
    try:
        command = [sys.executable, "-m", "atomrl.cli.main", "train", str(trained / "c.yaml"), f"output_dir={disk}",
                   *SHORT, "train.steps=6", "tracking.save_rollouts=false"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=kills.ROOT)
        assert done.returncode == 2, done.stderr
        assert f"error: the disk is full: {disk}" in done.stderr and "Free space" in done.stderr
        assert "Traceback" not in done.stderr
        whole = [step for step, path in step_folders(disk / "run" / "checkpoints") if checkpoint_fault(path) is None]
        assert whole and whole == [step for step, _ in step_folders(disk / "run" / "checkpoints")]
        assert not list((disk / "run" / "checkpoints").glob(".*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_named_by_metrics_too(tmp_path, monkeypatch):
    run = RunDirectory.create(make_config(tmp_path))

    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", lambda *a, **k: Full())
    with pytest.raises(OSError, match=f"disk is full: {run.path}.*step 3"):
        run.log(3, {"a": 1.0})


def test_the_best_checkpoint_stays(tmp_path):
    run = RunDirectory.create(make_config(tmp_path, checkpoint={"keep": 1, "keep_best": "val-core/sums/acc/mean@1"}))
    for step, value in enumerate([0.2, 0.7, 0.5, 0.7, 0.1, 0.3], start=1):
        run.log(step, {"val-core/sums/acc/mean@1": value})
        run.log(step, {"actor/lr": 0.1})
        with run.checkpoint(step) as folder:
            (folder / "w").write_text(str(step))
    names = sorted(path.name for path in (run.path / "checkpoints").iterdir())
    assert names == ["step_000004", "step_000006"], "of equals the later"
    assert (run.path / "best" / "w").read_text() == "4" and (run.path / "model" / "w").read_text() == "6"


def test_the_best_may_be_the_lowest_and_a_misspelt_metric_is_named(tmp_path, caplog):
    settings = {"keep": 1, "keep_best": "response_length/mean", "best_is": "min"}
    run = RunDirectory.create(make_config(tmp_path, checkpoint=settings))
    for step, value in enumerate([4.0, 2.0, 3.0], start=1):
        run.log(step, {"response_length/mean": value})
        with run.checkpoint(step) as folder:
            (folder / "w").write_text("x")
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    other = RunDirectory.create(make_config(tmp_path, run_name="s", checkpoint={"keep_best": "response_lenght/mean"}))
    other.log(1, {"response_length/mean": 1.0})
    with other.checkpoint(1) as folder:
        (folder / "w").write_text("x")
    assert "did you mean 'response_length/mean'?" in caplog.text


def test_a_second_process_is_refused_while_the_first_writes(tmp_path):
    script = (
        "import sys\nfrom tests.tracking.helpers import make_config\n"
        "from atomrl.tracking.run_directory import RunDirectory\n"
        f"run = RunDirectory.create(make_config({str(tmp_path)!r}))\n"
        "run.log(1, {'a': 1.0})\nprint('ready', flush=True)\nsys.stdin.read()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], cwd=kills.ROOT, stdin=-1, stdout=-1, text=True)
    try:
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid}"):
            RunDirectory.create(make_config(tmp_path), resume=True)
    finally:
        holder.kill()
        holder.wait()
    assert RunDirectory.create(make_config(tmp_path), resume=True).first_step == 1, "a kill frees it"


def test_a_start_that_was_killed_at_once_can_be_resumed(tmp_path):
    for present in ([".lock"], [".lock", ".config.yaml.partial"], [".lock", "config.yaml"]):
        run = RunDirectory.create(make_config(tmp_path))
        for path in run.path.iterdir():
            if path.name not in present:
                path.unlink()
        resumed = RunDirectory.create(make_config(tmp_path), resume=True)
        assert resumed.first_step == 1 and json.loads((resumed.path / "env.json").read_text())
        shutil.rmtree(run.path)
