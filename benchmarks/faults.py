"""Kill, freeze and stop runs whose trainer and engines are Ray actors, and check the result.

    python benchmarks/faults.py                                      20 kills, 20 freezes, 10 of each signal
    python benchmarks/faults.py --kills 1 --freezes 0 --signals 0 --out FOLDER

A tiny model on the CPU, the native engine, two replicas. A rollout actor is killed at a random point: the run has to
end well, with the weights of a run that was left alone, bit for bit. An actor, one of Ray's own processes or a worker
that computes rewards is frozen with SIGSTOP: the run has to end with an error that names it within its time limit and
15 s (a frozen reward worker is replaced). The run itself gets SIGINT, SIGTERM or SIGKILL: its own processes have to be
gone within 3 s of its end, Ray's within 70 s. Prints a line for each, writes `results.json`, and exits with 1 unless
all is as said.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
MARK = "ATOMRL_FAULTS"
STEPS = 24
TIMEOUT_S = 10.0
FROZEN = ("rollout", "trainer", "reference", "reward", "raylet", "gcs_server")


def config(folder: Path, timeout_s: float) -> dict[str, Any]:
    reward = {"function": "tests.light_rewards.letter_reward", "args": {"seconds": 0.02}, "timeout_s": 2.0}
    roles = ("rollout", "trainer", "reference")
    return {
        "run_name": "run",
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": "arithmetic", "train_size": 64},
        "rollout": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_completion_tokens": 48},
        "reward": {"functions": [reward], "workers": 1},
        "algorithm": {"name": "grpo", "kl": {"type": "k3", "coefficient": 0.01}},
        "train": {"steps": STEPS, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 4},
        "cluster": {"replicas": 2, "resources": {r: {"num_cpus": 0.1} for r in roles}, "timeout_s": timeout_s},
    }


def prepare(folder: Path) -> None:
    """The model of all runs, and their config."""
    import yaml

    from tests.tiny import make_tiny_model

    make_tiny_model(folder / "model", "qwen2", scale=0.2)
    for name, timeout_s in (("c.yaml", 120.0), ("hasty.yaml", TIMEOUT_S)):
        (folder / name).write_text(yaml.safe_dump(config(folder, timeout_s)))


class TrainingRun:
    """A run under way, in a process of its own as a user would start it."""

    def __init__(self, folder: Path, name: str, *more: str, file: str = "c.yaml") -> None:
        self.out, self.log = folder / name, folder / f"{name}.log"
        command = [
            sys.executable,
            "-m",
            "atomrl.cli.main",
            "train",
            str(folder / file),
            f"output_dir={self.out}",
            *more,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: str(self.out)}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def processes(self) -> dict[int, str]:
        """Return the run's living processes: id -> name."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (place / "stat").read_text().rpartition(")")[2].split()[:4]
                own = f"{MARK}={self.out}\0".encode() in (place / "environ").read_bytes()
                if state != "Z" and (own or int(session) == self.process.pid):
                    found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
            except OSError:  # gone in between
                continue
        return found

    def ours(self) -> dict[int, str]:
        """The run itself, its actors and its reward workers; not what belongs to Ray."""
        names = re.compile(r"^ray::(rollout|trainer|reference)|atomrl\.(cli|rewards)")
        return {pid: name for pid, name in self.processes().items() if names.search(name)}

    def actors(self, role: str) -> list[int]:
        """Process ids of a role; of `reward`, the workers; of one of Ray's own processes."""
        if role in ("raylet", "gcs_server"):
            return [pid for pid, name in self.processes().items() if name.partition(" ")[0].endswith(f"/{role}")]
        wanted = "atomrl.rewards.workers" if role == "reward" else f"ray::{role}"
        return sorted(pid for pid, name in self.ours().items() if wanted in name)

    @property
    def steps(self) -> int:
        """Return the number of steps done."""
        path = self.out / "run" / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def until_step(self, number: int, patience_s: float = 600.0) -> None:
        """Wait for a step to end."""
        deadline = time.monotonic() + patience_s
        while self.steps < number and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.steps >= number, f"step {number} never came: see {self.log}"

    def gone_after(self, which: str, patience_s: float) -> float:
        """Seconds until none of `ours`, or of all `processes`, is there."""
        began = time.monotonic()
        while getattr(self, which)() and time.monotonic() - began < patience_s:
            time.sleep(0.05)
        return time.monotonic() - began

    def weights(self) -> bytes:
        return (self.out / "run" / "model" / "model.safetensors").read_bytes()

    def end(self) -> None:
        """Leave nothing behind."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def undisturbed(folder: Path) -> tuple[TrainingRun, float]:
    """A run that is left alone, and how long it trains."""
    run = TrainingRun(folder, "whole")
    run.until_step(1)
    began = time.monotonic()
    assert run.process.wait(900) == 0, f"the undisturbed run failed: see {run.log}"
    return run, time.monotonic() - began


def kill(folder: Path, name: str, whole: TrainingRun, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Kill a rollout actor at a random point of a random step."""
    run = TrainingRun(folder, name)
    try:
        run.until_step(rng.randint(1, STEPS - 4))
        time.sleep(rng.uniform(0, seconds / STEPS))
        at, pid = run.steps, rng.choice(run.actors("rollout"))
        os.kill(pid, signal.SIGKILL)
        code = run.process.wait(900)
        text = run.log.read_text()
        back = [float(number) for number in re.findall(r"is back after ([\d.]+) s", text)]
        same = code == 0 and run.weights() == whole.weights()
        good = same and f"(pid {pid} on" in text and len(back) == 1
        return {
            "good": good,
            "in_time": max(back, default=0.0) < 20,
            "step": at,
            "code": code,
            "same": same,
            "back_s": back,
            "pid": pid,
        }
    finally:
        run.end()


def freeze(folder: Path, name: str, role: str, rng: random.Random) -> dict[str, Any]:
    """Stop a process at a random point, without ending it."""
    run = TrainingRun(folder, name, file="hasty.yaml")
    try:
        run.until_step(1)
        time.sleep(rng.uniform(0, 0.5))
        pid, at = rng.choice(run.actors(role)), run.steps
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        code = run.process.wait(900)
        seconds, text = time.monotonic() - began, run.log.read_text()
        if role == "reward":  # it is replaced
            good = code == 0 and pid not in run.processes()
        else:
            rays = role in ("raylet", "gcs_server")
            where, limit = (r"127\.0\.0\.1:\d+", r"\d+") if rays else (rf"pid {pid} on [\d.]+", f"{TIMEOUT_S:g}")
            named = re.search(rf"{role}( \d)? \({where}\)[^\n]* has not answered for {limit} s", text)
            good = code != 0 and named is not None
        left = run.gone_after("ours", 60)
        in_time = left < 3 and (role == "reward" or seconds < TIMEOUT_S + 15)
        return {
            "good": good and not run.ours(),
            "in_time": in_time,
            "role": role,
            "step": at,
            "code": code,
            "seconds": seconds,
            "left_s": left,
        }
    finally:
        run.end()


def stop(folder: Path, name: str, number: signal.Signals, rng: random.Random) -> dict[str, Any]:
    """Send the run a signal at a random point, and wait until all of it is gone."""
    run = TrainingRun(folder, name)
    try:
        run.until_step(1)
        time.sleep(rng.uniform(0, 1.0))
        began = time.monotonic()
        os.kill(run.process.pid, number)
        code = run.process.wait(300)
        ended = time.monotonic() - began
        ours, everything = run.gone_after("ours", 60), run.gone_after("processes", 240)
        sessions = [str(path) for path in Path("/tmp").glob(f"atomrl-run-{run.process.pid}-*")]
        good, in_time = not run.processes(), ours < 3 and ours + everything < 70
        if number != signal.SIGKILL:
            good = good and code == 130 and not sessions
        return {
            "good": good, "in_time": in_time, "signal": number.name, "code": code, "ended_s": ended, "ours_s": ours,
            "ray_s": ours + everything, "sessions": sessions,
        }  # fmt: skip
    finally:
        run.end()


def summary(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A table of what was found."""
    lines = []
    for what, found in results.items():
        good, in_time = (sum(each[name] for each in found) for name in ("good", "in_time"))
        figures = ("back_s", "seconds", "ended_s", "ours_s", "ray_s")
        spread = []
        for figure in figures:
            values = [value for each in found if figure in each for value in _listed(each[figure])]
            if values:
                spread.append(f"{figure} median {median(values):.1f} max {max(values):.1f}")
        spread.append(f"load {min(each['load'] for each in found):g} to {max(each['load'] for each in found):g}")
        lines.append(f"{what:<10} of {len(found)} {good} ended as they should, {in_time} in time; {'; '.join(spread)}")
    return lines


def _listed(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of a rollout actor")
    parser.add_argument("--freezes", type=int, default=20, help="of actors and reward workers, in turn")
    parser.add_argument("--signals", type=int, default=10, help="of each of SIGINT, SIGTERM and SIGKILL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to work; a temporary folder unless given")
    arguments = parser.parse_args()
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="faults_"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    rng, results = random.Random(arguments.seed), dict[str, list[dict[str, Any]]]()

    def report(what: str, found: dict[str, Any], name: str) -> None:
        found["load"] = round(os.getloadavg()[0], 1)
        results.setdefault(what, []).append(found)
        print(
            f"{name:<12} {'good' if found['good'] else 'BAD '} {'in time' if found['in_time'] else 'LATE   '} {found}",
            flush=True,
        )
        if found["good"]:
            shutil.rmtree(folder / name, ignore_errors=True)

    if arguments.kills:
        whole, seconds = undisturbed(folder)
        for number in range(arguments.kills):
            report("kills", kill(folder, f"kill{number}", whole, seconds, rng), f"kill{number}")
    for number in range(arguments.freezes):
        role = FROZEN[number % len(FROZEN)]
        report("freezes", freeze(folder, f"freeze{number}", role, rng), f"freeze{number}")
    for signalled in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL) * arguments.signals:
        name = f"{signalled.name}{len(results.get(signalled.name, []))}"
        report(signalled.name, stop(folder, name, signalled, rng), name)
    print(*summary(results), sep="\n")
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    return 0 if all(each["good"] and each["in_time"] for found in results.values() for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
