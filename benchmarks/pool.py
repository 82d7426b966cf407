"""The rollout pool under kills, and what it costs beside generation.

    python benchmarks/pool.py                    60 s: 8 writers, 4 readers, one of them killed every 0.3 s
    python benchmarks/pool.py --seconds 5 --no-engine
    python benchmarks/pool.py --seconds 0 --sizes quickstart

Every group carries a hash of its tokens and log-probs. Writers note in a file of their own what they are about to write
and what they have written; readers, which work in steps as a trainer does, note what a step has (their checkpoint)
before they finish it in the pool. SIGKILL may come at any instant. Of the killed readers every second one comes back
under its name and goes on with its step, and the others are never heard of again, so that leases run out. At the end
all notes are put together:

    lost           written, neither finished nor in the pool
    doubled        finished twice
    torn           content that is not what its hash says
    half_written   of groups that were written together, some are there and some are not

The second half draws groups with the native engine, at the quickstart's size and larger, and takes the time of drawing,
writing and reading them. Exits with 1 if anything was lost, doubled, torn or half-written.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from atomrl.config import PoolConfig  # noqa: E402
from atomrl.data.rows import by_group  # noqa: E402
from atomrl.pool.store import Held, RolloutPool  # noqa: E402
from atomrl.types import Problem, Prompt, SamplingParams, Segment, Trajectory  # noqa: E402

LEASE_S = 5.0
SETTINGS = PoolConfig(capacity=10**9, lease_s=LEASE_S, max_staleness=10**6)
COMPLETIONS = 4
BAD = ("lost", "doubled", "torn", "half_written", "unknown", "thrown_away")


def fingerprint(group: list[Trajectory]) -> str:
    """A hash of all numbers of a group, apart from its name."""
    content = [[part.token_ids, part.logprobs] for item in group for part in item.segments]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def make_group(draw: random.Random, name: str) -> list[Trajectory]:
    """A group whose sample says what its content is."""

    def segment(origin: Any, size: int) -> Segment:
        ids = tuple(draw.randrange(50_000) for _ in range(size))
        written = origin == "model"
        logprobs = tuple(-draw.randrange(1, 2**12) / 2**8 for _ in ids) if written else None
        return Segment(origin=origin, token_ids=ids, logprobs=logprobs, policy_version=0 if written else None)

    prompt = segment("prompt", draw.randint(5, 60))
    answers = [segment("model", draw.randint(1, 200)) for _ in range(COMPLETIONS)]

    def trajectories(problem: Problem) -> list[Trajectory]:
        shared: dict[str, Any] = {"prompt_id": name, "problem": problem, "finish_reason": "stop"}
        return [
            Trajectory(index=n, segments=(prompt, answer), text="", reward=float(n), **shared)
            for n, answer in enumerate(answers)
        ]

    plain = Problem(problem_id=name, prompt="", ground_truth="")
    return trajectories(Problem(problem_id=name, prompt="", ground_truth=fingerprint(trajectories(plain))))


class Notes:
    """Lines of JSON that outlive a kill: what is written has gone to the kernel."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *values: Any) -> None:
        os.write(self.file, json.dumps(values).encode() + b"\n")


def write_groups(path: Path, notes: Path, seed: str) -> None:
    """Until it is killed."""
    pool, draw, note, number = RolloutPool(path, SETTINGS), random.Random(seed), Notes(notes), 0
    while True:
        batch = [make_group(draw, f"{seed}.{number + n}") for n in range(draw.randint(1, 8))]
        number += len(batch)
        note.write("begin", [group[0].prompt_id for group in batch])
        pool.put(batch)
        note.write("done", len(batch))


def read_groups(path: Path, notes: Path, name: str) -> None:
    """Until it is killed. It begins where its notes end."""
    pool, note = RolloutPool(path, SETTINGS), Notes(notes)
    step = last_step(notes)
    pool.finish(name, step)
    while True:
        step += 1
        held = pool.held(name, step)
        while not held:
            held = pool.claim(name, step, 8, version=0)
            time.sleep(0 if held else 0.005)
        torn = [item.group[0].prompt_id for item in held if is_torn(item)]
        time.sleep(random.random() * 0.01)
        note.write("trained", step, [item.group[0].prompt_id for item in held], torn)
        pool.finish(name, step, expected=len(held))
        note.write("finished", step)


def is_torn(held: Held) -> bool:
    return len(held.group) != COMPLETIONS or fingerprint(held.group) != held.group[0].problem.ground_truth


def read_notes(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_step(path: Path) -> int:
    return max((line[1] for line in read_notes(path) if line[0] == "trained"), default=0)


class Processes:
    """Writers and readers, killed and started again."""

    def __init__(self, folder: Path, writers: int, readers: int, seed: int) -> None:
        self.folder, self.path, self.draw = folder, folder / "p.sqlite", random.Random(seed)
        self.running: dict[int, tuple[str, int, int]] = {}
        """process -> (kind, place, life)"""
        self.finished: dict[str, int] = {}
        """Readers that were killed for good -> the last step that they finished."""
        self.kills = 0
        for kind, count in (("writer", writers), ("reader", readers)):
            for place in range(count):
                self.start(kind, place, 0)

    def start(self, kind: str, place: int, life: int) -> None:
        name = f"{kind}-{place}-{life}"
        if not (child := os.fork()):
            try:
                if kind == "writer":
                    write_groups(self.path, self.folder / name, name)
                else:
                    read_groups(self.path, self.folder / name, name)
            finally:
                import traceback

                traceback.print_exc()
                os._exit(1)
        self.running[child] = (kind, place, life)

    def kill(self, child: int, again: bool = True) -> None:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kind, place, life = self.running.pop(child)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"{kind} {place} ended by itself, see above")
        self.kills += again
        name = f"{kind}-{place}-{life}"
        back = again and kind == "reader" and self.draw.random() < 0.5
        if kind == "reader" and not back:
            self.finished[name] = self.finished_step(name)
        if again:
            self.start(kind, place, life if back else life + 1)

    def finished_step(self, name: str) -> int:
        """The last step that a dead reader finished, by what the pool still has of its last one: less than a lease
        after its death nobody can have taken that away."""
        step = last_step(self.folder / name)
        with sqlite3.connect(self.path, timeout=60) as db:
            claims = db.execute("SELECT count(*) FROM claims WHERE reader = ? AND step = ?", (name, step)).fetchone()
        return step - 1 if claims[0] else step


def stress(seconds: float, writers: int, readers: int, every_s: float, seed: int) -> dict[str, Any]:
    """Run, kill, and count."""
    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        folder = Path(name)
        processes = Processes(folder, writers, readers, seed)
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            time.sleep(min(every_s * 2 * processes.draw.random(), seconds - elapsed))
            processes.kill(processes.draw.choice(sorted(processes.running)))
        for child in sorted(processes.running):
            processes.kill(child, again=False)
        elapsed = time.perf_counter() - started
        time.sleep(LEASE_S)
        return (
            count(folder, processes) | {"seconds": round(elapsed, 1), "kills": processes.kills} | rates(folder, elapsed)
        )


def count(folder: Path, processes: Processes) -> dict[str, Any]:
    """All notes together, and what is left in the pool."""
    finished: Counter[str] = Counter()
    torn = 0
    for notes in folder.glob("reader-*"):
        for kind, step, *rest in read_notes(notes):
            if kind == "trained" and step <= processes.finished[notes.name]:
                finished.update(rest[0])
                torn += len(rest[1])
    pool = RolloutPool(processes.path, SETTINGS)
    left = pool.claim("end", 1, 10**9, version=0)
    stats = pool.stats()
    pool.close()
    torn += sum(map(is_torn, left))
    there = {*finished, *(item.group[0].prompt_id for item in left)}
    written, half = set[str](), 0
    for notes in folder.glob("writer-*"):
        lines = read_notes(notes)
        for line, after in itertools.zip_longest(lines, lines[1:]):
            if line[0] == "begin":
                found = there.intersection(line[1])
                written |= set(line[1]) if after else found
                half += 0 < len(found) < len(line[1])
    with sqlite3.connect(processes.path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return {
        "written": len(written), "read": finished.total(), "left": len(left), "lost": len(written - there),
        "doubled": sum(times - 1 for times in finished.values()) + len({*finished}.intersection(
            item.group[0].prompt_id for item in left)),
        "torn": torn, "half_written": half, "unknown": len(there - written), "given_back": stats["returned"],
        "thrown_away": stats["evicted"] + stats["expired"] + stats["stale"] + stats["duplicates"],
    }  # fmt: skip


def rates(folder: Path, seconds: float) -> dict[str, float]:
    lines = [line for notes in folder.glob("writer-*") for line in read_notes(notes)]
    rows = COMPLETIONS * sum(line[1] for line in lines if line[0] == "done")
    return {"rows_per_s": round(rows / seconds)}


SIZES = {
    "quickstart": ({"layers": 2, "hidden": 64, "heads": 2, "intermediate": 512}, 64, 16),
    "3M": ({"layers": 4, "hidden": 256, "heads": 4, "intermediate": 768}, 16, 128),
    "25M": ({"layers": 8, "hidden": 512, "heads": 8, "intermediate": 1408}, 4, 64),
}
"""The shape of a model, prompts of a step (8 completions each), and tokens of each. Those of the quickstart
have 13 tokens at its start and 25 at its end."""


def beside_generation(name: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of drawing a step's groups, of writing them, and of claiming and finishing them: medians."""
    from atomrl.engines.generation import generate
    from atomrl.engines.native.engine import NativeEngine
    from atomrl.engines.requests import EngineOptions
    from atomrl.models.gpt import new_gpt
    from atomrl.models.loading import save_model
    from tests.tiny import make_tiny_tokenizer

    shape, prompts, tokens = SIZES[name]
    tokenizer, seconds = make_tiny_tokenizer(), {key: list[float]() for key in ("draw", "write", "read")}
    sampling = SamplingParams(completions_per_prompt=8, max_completion_tokens=tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        save_model(new_gpt(vocab_size=len(tokenizer), **shape), tokenizer, folder)
        engine = NativeEngine.from_pretrained(folder, tokenizer, EngineOptions(torch.float32, "cpu", 512))
        pool = RolloutPool(Path(folder) / "p.sqlite", SETTINGS)
        draw = random.Random(0)
        for repeat in range(repeats + 1):  # the first warms up
            asked = []
            for number in range(prompts):
                ids = tuple(draw.randrange(5, 100) for _ in range(15))
                problem = Problem(
                    problem_id=str(number), prompt="compute 3+4*5-1", ground_truth="22", data_source="chain"
                )
                asked.append(Prompt(prompt_id=f"{repeat}:{number}", problem=problem, token_ids=ids))
            times = [time.perf_counter()]
            drawn = generate(engine, asked, replace(sampling, step=repeat))
            times.append(time.perf_counter())
            parts: dict[str, Any] = {"reward_parts": {"strict_math": 1.0}, "part_weights": {"strict_math": 1.0}}
            groups = list(by_group([replace(item, reward=1.0, **parts) for item in drawn]).values())
            times.append(time.perf_counter())
            assert pool.put(groups) == prompts
            times.append(time.perf_counter())
            assert [held.group for held in pool.claim("me", repeat + 1, prompts, version=0)] == groups
            assert pool.finish("me", repeat + 1) == prompts
            times.append(time.perf_counter())
            if repeat:
                for key, place in (("draw", 0), ("write", 2), ("read", 3)):
                    seconds[key].append(times[place + 1] - times[place])
        pool.close()
        engine.close()
    middle = {f"{key}_ms": round(1000 * statistics.median(values), 2) for key, values in seconds.items()}
    return {"model": name, "completions": 8 * prompts, "tokens": tokens, **middle,
            "write_share": middle["write_ms"] / middle["draw_ms"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=60, help="of the stress; 0 leaves it out")
    add("--writers", type=int, default=8)
    add("--readers", type=int, default=4)
    add("--kill-every", type=float, default=0.3, metavar="S", help="seconds, on average")
    add("--seed", type=int, default=0)
    add("--no-engine", action="store_true", help="leave out the cost beside generation")
    add("--repeats", type=int, default=15)
    add("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    add("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    if given.seconds:
        found["pool"] = stress(given.seconds, given.writers, given.readers, given.kill_every, given.seed)
        print("  ".join(f"{name} {value}" for name, value in found["pool"].items()), flush=True)
    if not given.no_engine:
        found["beside_generation"] = [beside_generation(name, given.repeats) for name in given.sizes]
        print("| model | completions x tokens | drawing ms | writing ms | share of drawing | reading ms |")
        print("|---|---|---|---|---|---|")
        for row in found["beside_generation"]:
            print(
                f"| {row['model']} | {row['completions']} x {row['tokens']} | {row['draw_ms']} | {row['write_ms']} "
                f"| {row['write_share']:.1%} | {row['read_ms']} |"
            )
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    bad = {name: found["pool"][name] for name in BAD if found["pool"][name]} if given.seconds else {}
    if bad:
        raise SystemExit(f"not as it should be: {bad}")


if __name__ == "__main__":
    main()
