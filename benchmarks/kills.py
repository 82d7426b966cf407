"""Kill a run with SIGKILL, resume it, and compare it bit for bit with one that was never killed.

    python benchmarks/kills.py                       20 kills over a step's phases, 10 inside a save, 8 awkward ones
    python benchmarks/kills.py --only rollout save:rename first --repeats 1

A tiny model on the CPU, 12 steps of two updates each, a checkpoint every 3. Runs are forked from a process that has
imported everything; `--cli N` more start through the command line, as a user would. Compared are the SHA-256 of weights
and optimizer, the position in the data, and all metric rows but timing_s/* and perf/*. Prints a line for each run,
writes `results.json`, and exits with 1 unless all are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PHASES = ("rollout", "reward", "update", "save")
IN_A_SAVE = [
    "save:fsync:1", "save:fsync:4", "save:fsync:8", "save:fsync:12", "save:manifest", "save:rename", "save:renamed",
    "save:link", "save:remove:0", "save:remove:3",
]  # fmt: skip
AWKWARD = ["first", "metrics:4", "metrics:6", "reopen:1", "reopen:2", "reopen:3", "reopen:4", "evaluation"]
"""Before the first checkpoint; half of a metrics line written; in the middle of resuming; in the last evaluation."""


def config(folder: Path) -> dict[str, Any]:
    reward = {"function": "tests.light_rewards.letter_reward", "args": {"seconds": 0.03}}
    return {
        "run_name": "run",
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_prompt_tokens": 32},
        "rollout": {"prompts_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 24},
        "reward": {"functions": [reward], "workers": 1},
        "algorithm": {"name": "grpo", "kl": {"type": "k3", "coefficient": 0.01}},
        "train": {"steps": 12, "rows_per_update": 6, "learning_rate": 1e-3, "schedule": "cosine", "warmup_ratio": 0.1},
        "eval": {"every_steps": 5},
        "checkpoint": {"every_steps": 3, "keep": 2},
    }


def prepare(folder: Path) -> None:
    """Model, data and config of all runs."""
    import yaml

    from tests.tiny import make_tiny_model

    make_tiny_model(folder / "model", "qwen2")
    for name, count in (("train", 10), ("eval", 3)):
        rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1), "data_source": "sums"} for k in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "c.yaml").write_text(yaml.safe_dump(config(folder)))


def outcome(run: Path) -> dict[str, Any]:
    """Return the results of a run that must not change."""
    last = run / "checkpoints" / "step_000012"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows]
    state = json.loads((last / "progress.json").read_text())
    del state["wall_s"]
    return {
        "weights": hashlib.sha256((last / "model.safetensors").read_bytes()).hexdigest(),
        "optimizer": hashlib.sha256((last / "training_state" / "optimizer.safetensors").read_bytes()).hexdigest(),
        "random": hashlib.sha256((last / "training_state" / "random.safetensors").read_bytes()).hexdigest(),
        "trainer": (last / "training_state" / "trainer.json").read_text(),
        "progress": state,
        "metrics": kept,
        "rollouts": {
            str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((run / "rollouts").rglob("*.jsonl"))
        },
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
    }


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def wrap(owner: Any, name: str, before: Callable[..., None], after: Callable[..., None] = lambda *a: None) -> None:
    """Call something before and after a function or method."""
    inner = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        before(*arguments)
        try:
            return inner(*arguments, **named)
        finally:
            after(*arguments)

    setattr(owner, name, wrapped)


def die_on_call(owner: Any, name: str, number: int, where: Callable[..., bool] = lambda *a: True) -> None:
    """Die as the `number`-th call that `where` accepts begins."""
    calls = []

    def count(*arguments: Any) -> None:
        if where(*arguments):
            calls.append(1)
            if len(calls) == number:
                die()

    wrap(owner, name, count)


def announce_phases(pipe: int) -> None:
    """Write a line to the pipe as each phase begins and ends."""
    from atomrl.backends.local import LocalBackend
    from atomrl.rewards.compute import Rewards
    from atomrl.trainer import loop as sync
    from atomrl.trainer import sources as groups

    def say(phase: str, what: str) -> Callable[..., None]:
        return lambda *arguments: (os.write(pipe, f"{phase} {what}\n".encode()), None)[1]

    wrap(groups, "generate", say("rollout", "begins"), say("rollout", "ends"))
    wrap(LocalBackend, "train_step", say("update", "begins"), say("update", "ends"))
    wrap(sync.Checkpoints, "begin", say("save", "begins"), say("save", "ends"))
    wrap(Rewards, "__call__", say("reward", "begins"), say("reward", "ends"))


def set_trap(point: str, saves: int) -> None:
    """Let this process die at a point; of a save, in the `saves`-th."""
    from atomrl.tracking import checkpoints, run_directory

    kind, _, rest = point.partition(":")
    if kind == "save":
        begun: list[int] = []
        wrap(checkpoints, "writing_checkpoint", lambda *a: begun.append(1))

        def due(*arguments: Any) -> bool:
            return len(begun) == saves

        what, _, number = rest.partition(":")
        if what == "fsync":
            die_on_call(os, "fsync", int(number), due)
        elif what == "manifest":
            die_on_call(checkpoints, "manifest_text", 1, due)
        elif what in ("rename", "renamed"):
            wrap(
                Path, "rename",
                lambda *a: die() if what == "rename" and due() else None,
                lambda *a: die() if what == "renamed" and due() else None,
            )  # fmt: skip
        elif what == "link":
            die_on_call(Path, "symlink_to", 1, due)
        elif what == "remove":
            die_on_call(os, "unlink", int(number) + 1, due)
    elif kind == "metrics":

        def half_a_line(run: Any, step: int, *arguments: Any) -> None:
            if step == int(rest):
                with (run.path / "metrics.jsonl").open("a") as file:
                    file.write(f'{{"step": {step}, "critic/score/mean": 0.1')
                die()

        wrap(run_directory.RunDirectory, "log", half_a_line)
    elif kind == "first":
        die_on_call(run_directory.RunDirectory, "write_rows", 2, lambda run, step, rows, split: split == "train")
    elif kind == "reopen":
        places = [
            (run_directory, "write_durably"),
            (checkpoints, "set_damaged_aside"),
            (run_directory, "write_json_durably"),
        ]
        die_on_call(*[*places, (run_directory, "dump_config")][int(rest) - 1], 1)
    elif kind == "evaluation":
        die_on_call(
            run_directory.RunDirectory, "write_rows", 1, lambda run, step, rows, split: (step, split) == (12, "eval")
        )


def start(folder: Path, out: Path, resume: bool, prepare_child: Callable[[], None] = lambda: None) -> int:
    """Fork a process that trains. Returns its id; it leads a session of its own."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(out.parent / f"{out.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 70
    try:
        prepare_child()
        from atomrl.cli.main import main

        code = main(["train", str(folder / "c.yaml"), f"output_dir={out}", *(["--resume"] if resume else [])])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a process; its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def left_behind(session: int, patience_s: float = 60.0) -> list[str]:
    """Processes of a session that are still there some time after its leader's death."""
    deadline = time.monotonic() + patience_s
    while True:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, fields = stat.read_text().rpartition(")")
            except OSError:
                continue
            if int(fields.split()[3]) == session and fields.split()[0] != "Z":
                found.append(name)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def kill_in_phase(folder: Path, out: Path, phase: str, occurrence: int, delay_s: float) -> str:
    """Train, and kill the process some time after the `occurrence`-th beginning of a phase. Returns where it was."""
    reader, writer = os.pipe()
    pid = start(folder, out, False, lambda: announce_phases(writer))
    os.close(writer)
    text, seen = "", 0
    while seen < occurrence:
        chunk = os.read(reader, 4096).decode()
        if not chunk:
            break
        text += chunk
        seen = text.count(f"{phase} begins\n")
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    while chunk := os.read(reader, 4096).decode():
        text += chunk
    os.close(reader)
    if ended(pid) != -signal.SIGKILL:
        return "ended before the kill"
    assert not left_behind(pid), "worker processes outlived a run that was killed"
    lines = text.splitlines()
    return lines[-1].split()[0] if lines[-1].endswith("begins") else "between"


def seconds_of(folder: Path, out: Path) -> tuple[dict[str, float], dict[str, int]]:
    """An undisturbed run: how long each phase takes, and how often it comes."""
    reader, writer = os.pipe()
    pid = start(folder, out, False, lambda: announce_phases(writer))
    os.close(writer)
    since: dict[str, float] = {}
    spent: dict[str, list[float]] = {}
    with os.fdopen(reader) as lines:
        for line in lines:
            phase, what = line.split()
            if what == "begins":
                since[phase] = time.perf_counter()
            else:
                spent.setdefault(phase, []).append(time.perf_counter() - since[phase])
    code = ended(pid)
    assert code == 0, f"the undisturbed run ended with {code}; see {out}.log"
    return {k: sorted(v)[len(v) // 2] for k, v in spent.items()}, {k: len(v) for k, v in spent.items()}


def first_after_save(phase: str, counts: dict[str, int]) -> int:
    """The first occurrence of a phase that is surely after the first save, which follows step 3 of 12."""
    if phase == "save":
        return 2
    per_step = 2 if phase == "update" else 1
    extra = counts[phase] - 12 * per_step  # of evaluations
    return 3 * per_step + extra + 1


def disturbed(folder: Path, out: Path, point: str, rng: random.Random, timing: Any) -> str:
    """Start a run, kill it as told, resume it to its end. Returns where the kill was."""
    if point in PHASES:
        seconds, counts = timing
        for attempt in range(1, 21):  # noqa: B007
            shutil.rmtree(out, ignore_errors=True)
            occurrence = rng.randint(first_after_save(point, counts), counts[point] - (1 if point != "save" else 0))
            landed = kill_in_phase(folder, out, point, occurrence, rng.uniform(0, 0.9) * seconds[point])
            if landed == point:
                break
        where = f"{landed} (attempt {attempt})" if landed == point else f"missed: {landed}"
    elif point == "cli":
        where = kill_command(folder, out, rng)
    else:
        trap = "metrics:8" if point.startswith("reopen") else point
        if point == "reopen:2":  # there must be a damaged checkpoint to set aside
            trap = "metrics:11"
        pid = start(folder, out, False, lambda: set_trap(trap, saves=3))
        assert ended(pid) == -signal.SIGKILL, f"{trap} was never reached; see {out}.log"
        assert not left_behind(pid), "worker processes outlived a run that was killed"
        if point.startswith("reopen"):
            if point == "reopen:2":
                (out / "run" / "checkpoints" / "step_000009" / "model.safetensors").write_bytes(b"torn")
            pid = start(folder, out, True, lambda: set_trap(point, saves=0))
            assert ended(pid) == -signal.SIGKILL, f"{point} was never reached; see {out}.log"
        where = point
    code = ended(start(folder, out, True))
    assert code == 0, f"resuming ended with {code}; see {out}.log"
    return where


def kill_command(folder: Path, out: Path, rng: random.Random) -> str:
    """The same through `python -m atomrl.cli.main train`, some time after its first checkpoint."""
    command = [sys.executable, "-m", "atomrl.cli.main", "train", str(folder / "c.yaml"), f"output_dir={out}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # as the forked processes
    with (out.parent / f"{out.name}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        while not (out / "run" / "checkpoints" / "step_000003").exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 1.5))
        process.kill()
        code = process.wait()
    assert code == -signal.SIGKILL, f"the command ended by itself with {code}; see {out}.log"
    assert not left_behind(process.pid), "worker processes outlived a run that was killed"
    rows = (out / "run" / "metrics.jsonl").read_text().count("\n")
    return f"a command, after {rows} metric rows"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="these points alone")
    parser.add_argument("--repeats", type=int, default=5, help="kills in each phase of a step")
    parser.add_argument("--cli", type=int, default=3, help="kills of runs that start through the command line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to work; a temporary folder unless given")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="kills_"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)

    import torch

    import atomrl.trainer  # noqa: F401 (what the forked processes need not import again)

    torch.set_num_threads(1)
    prepare(folder)
    points = arguments.only or [*PHASES * arguments.repeats, *IN_A_SAVE, *AWKWARD, *["cli"] * arguments.cli]
    began = time.perf_counter()
    timing = seconds_of(folder, folder / "whole")
    expected = outcome(folder / "whole" / "run")
    steps = [row["step"] for row in expected["metrics"] if "training/updates" in row]
    assert steps == list(range(1, 13)), steps
    rng, results = random.Random(arguments.seed), []
    for number, point in enumerate(points):
        out = folder / f"{number:02d}"
        where = disturbed(folder, out, point, rng, timing)
        found = outcome(out / "run")
        different = [name for name in expected if found[name] != expected[name]]
        same = not different and not where.startswith("missed")
        results.append({"point": point, "killed_in": where, "same": same, "different": different})
        print(
            f"{number:2d}  {point:14s} killed in {where:32s} {'same' if same else f'DIFFERENT: {different}'}",
            flush=True,
        )
        if same:
            shutil.rmtree(out)
    report = {"runs": results, "weights": expected["weights"], "optimizer": expected["optimizer"]}
    (folder / "results.json").write_text(json.dumps(report, indent=1))
    good = sum(result["same"] for result in results)
    print(
        f"{good} of {len(results)} runs ended like the one that was never killed ({time.perf_counter() - began:.0f} s)"
    )
    print(f"weights {expected['weights'][:16]}  optimizer {expected['optimizer'][:16]}  {folder / 'results.json'}")
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
