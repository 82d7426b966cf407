"""A long run: does its memory grow, and what do trackers cost that raise, hang or are offline?

    python benchmarks/soak.py [--steps 500] [--out FOLDER]
    python benchmarks/soak.py trackers [--steps 200]

The real loop on a tiny model on the CPU: native engine, rewards in worker processes, two updates a step, completions
kept, a checkpoint every 50 steps. `soak` prints resident memory (VmRSS) every 25 steps and its growth in 100 steps
after the first 100, by a line through the points; it exits with 1 where that is 1 MB or more. `trackers` runs steps
in turn without a sink, with one that raises, one that hangs and one that waits a second for a server that does not
answer, so that all meet the same load, and prints each one's time of a step beside that of none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
EVERY, WARM_UP = 25, 100


def resident_mb() -> float:
    """Resident memory of this process, in MB (10^6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no VmRSS in /proc/self/status")


def slope(points: list[tuple[int, float]]) -> float:
    """Return the slope of the least-squares line, per 100 steps."""
    return 100 * statistics.linear_regression(*zip(*points, strict=True)).slope


def prepare(folder: Path, steps: int) -> Path:
    """Model, data and config."""
    import yaml

    from benchmarks.kills import config
    from benchmarks.kills import prepare as prepare_kills

    prepare_kills(folder)
    tree = config(folder)
    tree["reward"]["functions"][0]["args"] = {"seconds": 0.0}
    tree["train"] |= {"steps": steps, "schedule": "constant", "warmup_ratio": 0.0, "learning_rate": 1e-5}
    tree["eval"] = {"every_steps": 100}
    tree["checkpoint"] = {"every_steps": 50, "keep": 2}
    (folder / "c.yaml").write_text(yaml.safe_dump(tree))
    return folder / "c.yaml"


def soak(folder: Path, steps: int) -> int:
    """Train, watching memory."""
    from atomrl.cli.main import main as atomrl
    from atomrl.tracking.recorder import Recorder

    points: list[tuple[int, float]] = []
    log = Recorder.log

    def watched(self: Recorder, step: int, metrics: Mapping[str, float]) -> None:
        log(self, step, metrics)
        if step % EVERY == 0:
            points.append((step, resident_mb()))
            print(f"step {step:5d}  {points[-1][1]:8.2f} MB", file=sys.stdout, flush=True)

    Recorder.log = watched  # type: ignore[method-assign]
    code = atomrl(["train", str(prepare(folder, steps)), f"output_dir={folder}"])
    after = [point for point in points if point[0] >= WARM_UP]
    growth = slope(after)
    print(f"growth {growth:+.3f} MB in 100 steps (a line through {len(after)} points from step {WARM_UP} on)")
    result = {"series_mb": points, "growth_mb_per_100_steps": growth, "steps": steps}
    (folder / "soak.json").write_text(json.dumps(result, indent=1))
    return 0 if code == 0 and growth < 1 else 1


class Raises:
    def __init__(self, config: Any, run: Any) -> None:
        pass

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise ConnectionError("the server is down")

    log_samples = log

    def close(self) -> None:
        pass


class Hangs(Raises):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        time.sleep(10**6)

    log_samples = log


class Offline(Raises):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        time.sleep(1)  # a connection that times out, after which a tracker goes on

    log_samples = log


def trackers(folder: Path, steps: int) -> int:
    """Steps with each kind of sink in turn, in one run."""
    from atomrl.cli.main import main as atomrl
    from atomrl.tracking import sinks
    from atomrl.tracking.recorder import Recorder

    kinds = {"none": None, "raises": Raises, "hangs": Hangs, "offline": Offline}
    names = list(kinds)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sinks.PATIENCE_S = 0.5
    inside: dict[str, list[float]] = {name: [] for name in names}
    log, put = Recorder.log, sinks.BackgroundSink.put
    made: dict[str, Any] = {}
    last: list[float] = []

    def timed_put(self: sinks.BackgroundSink, action: Any) -> None:
        started = time.perf_counter()
        put(self, action)
        inside[self.name].append(time.perf_counter() - started)

    def choose(self: Recorder, step: int) -> None:
        name = names[step % len(names)]
        kind = kinds[name]
        if kind is not None and name not in made:
            made[name] = sinks.BackgroundSink(name, kind(None, None))
        self.sinks = [made[name]] if kind is not None else []

    def timed_log(self: Recorder, step: int, metrics: Mapping[str, float]) -> None:
        log(self, step, metrics)
        now = time.perf_counter()
        if last and step > len(names):
            seconds[names[step % len(names)]].append(now - last[0])
        last[:] = [now]
        choose(self, step + 1)

    Recorder.log, sinks.BackgroundSink.put = timed_log, timed_put  # type: ignore[method-assign]
    code = atomrl(
        ["train", str(prepare(folder, steps)), f"output_dir={folder}", "checkpoint.every_steps=0", "eval.every_steps=0"]
    )
    Recorder.log = log  # type: ignore[method-assign]
    for sink in made.values():
        sink.close()
    base = statistics.median(seconds["none"])
    shares = {name: statistics.median(values) / base - 1 for name, values in seconds.items()}
    for name in names:
        calls = 1e6 * statistics.mean(inside[name] or [0.0])
        step_ms = 1000 * statistics.median(seconds[name])
        print(f"{name:8s} {step_ms:8.2f} ms a step  {100 * shares[name]:+.1f} %; {calls:.1f} us in a call of the sink")
    return 0 if code == 0 and all(share < 0.05 for share in shares.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["soak", "trackers"], default="soak")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, help="where to work; a temporary folder unless given")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="soak_"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)

    import torch

    torch.set_num_threads(1)
    if arguments.what == "trackers":
        return trackers(folder, arguments.steps or 200)
    return soak(folder, arguments.steps or 500)


if __name__ == "__main__":
    sys.exit(main())
