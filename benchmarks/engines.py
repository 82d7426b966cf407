"""Rollouts in the loop: native beside vLLM, here, in Ray actors and behind its server, turn by turn in one run.

    python benchmarks/engines.py [--sizes 3M 80M] [--dtypes float32 bfloat16] [--engines NAME ...] [--repeats 3]
        [--out FILE.json]
    python benchmarks/engines.py --quick        3M parameters in float32, one turn

A step is what it is in training: new weights come to the engine and are read back (`InProcessTransfer`), then
`generate` draws all completions of the step's prompts. Speed is tokens drawn per second, of the drawing alone and of
the whole step; `of native` and `of its one` are medians, over the turns, of the ratio of whole steps to those of the
same turn by the native engine in process, and by one replica of the same engine with all threads (`all`), or with as
many as each of the two has (`half`).

Everyone has the same prompts, weights and number of threads: one engine has `--threads`, each of two replicas half of
them. `cores` is what that comes to: seconds of processor time, of the engine with all its processes and of who asks it,
per second of a step; `idle` is what all the others took meanwhile, which should be next to nothing.

`fixed`: all completions have the same length. `ragged`: the model itself ends each with probability 1/63 per token (see
`rollout.make_model`), so lengths are Exp(63), cut at 256 tokens (at 80M at 128). No engine is told them. Native and
vLLM draw other tokens from the same seeds, hence other lengths; tokens per second allow for that.

Each engine has a process of its own, as in a run, and stays open between its turns. Needs vLLM and Ray; an engine whose
package is not here is left out with a word, and so is bfloat16 where the CPU has no instructions for it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Kind:
    """Placement of an engine: process, replicas, threads."""

    engine: str
    replicas: int = 0
    """In Ray actors; 0: in the process itself."""
    share: float = 1.0
    """Share of the threads that each replica has."""
    needs: tuple[str, ...] = ()


KINDS = {
    "native": Kind("native"),
    "native, actor": Kind("native", 1, needs=("ray",)),
    "native, actor, half": Kind("native", 1, 0.5, ("ray",)),
    "native, two actors": Kind("native", 2, 0.5, ("ray",)),
    "vllm": Kind("vllm", needs=("vllm",)),
    "vllm, server": Kind("vllm-server", needs=("vllm", "httpx")),
    "vllm, actor": Kind("vllm", 1, needs=("vllm", "ray")),
    "vllm, actor, half": Kind("vllm", 1, 0.5, ("vllm", "ray")),
    "vllm, two actors": Kind("vllm", 2, 0.5, ("vllm", "ray")),
}
ONES = {"two actors": {"all": "actor", "half": "actor, half"}}
WORK = {"3M": {"prompts": 16, "fixed": 64, "ragged": 256}, "80M": {"prompts": 16, "fixed": 48, "ragged": 128}}
"""Prompts of a step, and the longest completion of each workload."""
BAR = 1.2


@dataclass(frozen=True)
class Turn:
    """Times and tokens of a step."""

    tokens: int
    update_s: float
    draw_s: float
    cores: float
    idle: float

    @property
    def step_rate(self) -> float:
        """Tokens per second of update and drawing."""
        return self.tokens / (self.update_s + self.draw_s)


class Source:
    """Gives the weights of a folder, as a trainer does."""

    def __init__(self, folders: dict[str, str]) -> None:
        from atomrl.models.loading import read_weights

        self.weights = {name: dict(read_weights(folder)) for name, folder in folders.items()}
        self.workload = next(iter(folders))

    def weight_update(self, version: int, adapters_alone: bool = False) -> Any:
        from atomrl.protocols import WeightUpdate

        return WeightUpdate(version, self.weights[self.workload].items())


def tell(line: Connection, what: Any) -> None:
    """As JSON: nothing here is unpickled."""
    line.send_bytes(json.dumps(what).encode())


def serve(line: Connection, kind: Kind, folders: dict[str, str], dtype: str, threads: int, rows: int) -> None:
    """The process of an engine: it says when it is there, then answers jobs (workload, version, prompts, completions of
    each, longest) with (tokens drawn, seconds of the update, seconds of the drawing), until it is told None."""
    import torch

    torch.set_num_threads(threads)
    from atomrl.cluster.ray_cluster import RayCluster
    from atomrl.config import RunConfig
    from atomrl.engines.generation import generate
    from atomrl.models.loading import load_tokenizer
    from atomrl.trainer.build import build_engine
    from atomrl.types import SamplingParams
    from atomrl.weight_sync import InProcessTransfer
    from tests.prompts import prompts_of

    path = next(iter(folders.values()))
    tree: dict[str, Any] = {
        "run_name": "engines",
        "model": {"path": path, "dtype": dtype, "device": "cpu"},
        "data": {"train": "arithmetic"},
        "rollout": {"engine": kind.engine, "max_concurrent_completions": rows},
        "reward": {"functions": [{"function": "strict_math"}]},
    }
    if kind.replicas:
        own = {"rollout": {"num_cpus": max(1, int(threads * kind.share))}}
        tree["cluster"] = {"replicas": kind.replicas, "resources": own}
    config = RunConfig(**tree)
    cluster = RayCluster(config.cluster, ["rollout"], "cpu") if config.cluster else None
    engine: Any = None
    try:
        engine = build_engine(config, path, load_tokenizer(path), cluster)
        source = Source(folders)
        transfer = InProcessTransfer(source, engine)  # type: ignore[arg-type]
        tell(line, "ready")
        while job := json.loads(line.recv_bytes()):
            source.workload, version, prompts, members, longest = job
            named = prompts_of(*prompts, ids=[f"{version}/{index}" for index in range(len(prompts))])
            sampling = SamplingParams(
                completions_per_prompt=members,
                max_completion_tokens=longest,
                ignore_eos=source.workload == "fixed",
                seed=version,
            )
            begin = time.perf_counter()
            transfer(version)
            middle = time.perf_counter()
            found = generate(engine, named, sampling)
            end = time.perf_counter()
            tell(line, (sum(trajectory.response_tokens for trajectory in found), middle - begin, end - middle))
    finally:
        if engine is not None:
            engine.close()
        if cluster is not None:
            cluster.close()


class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, folders: dict[str, str], dtype: str, threads: int, rows: int) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.line, there = context.Pipe()
        self.process = context.Process(target=serve, args=(there, KINDS[name], folders, dtype, threads, rows))
        self.process.start()
        there.close()

    def answer(self) -> Any:
        """Return the next answer of the process."""
        try:
            return json.loads(self.line.recv_bytes())
        except EOFError:
            raise SystemExit(f"the process of {self.name!r} ended; what it said is above") from None

    def close(self) -> None:
        with suppress(OSError):
            tell(self.line, None)
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()


def processor_seconds() -> dict[int, float]:
    """Return the CPU time of each child process, its descendants included."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone
            continue
        pid = int(stat.parent.name)
        parents[pid], seconds[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    found: dict[int, float] = {}
    for pid, spent in seconds.items():
        child = pid
        while (parent := parents.get(child)) and parent != os.getpid():
            child = parent
        if parent:
            found[child] = found.get(child, 0.0) + spent
    return found


def one_turn(worker: Worker, workload: str, version: int, prompts: list[list[int]], members: int, longest: int) -> Turn:
    """A step by one engine."""
    before, begin = processor_seconds(), time.perf_counter()
    tell(worker.line, (workload, version, prompts, members, longest))
    tokens, update_s, draw_s = worker.answer()
    seconds = time.perf_counter() - begin
    spent = {pid: used - before.get(pid, 0.0) for pid, used in processor_seconds().items()}
    own = spent.pop(worker.process.pid or 0)
    return Turn(tokens, update_s, draw_s, own / seconds, max(0.0, sum(spent.values())) / seconds)


@contextmanager
def environment(threads: int) -> Iterator[None]:
    """Set the environment variables that engine processes inherit."""
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS=str(threads), VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before.get("PYTHONPATH")])])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measured(size: str, dtype: str, names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All engines with a model, both workloads."""
    import torch

    from benchmarks.rollout import MEMBERS, PROMPT_TOKENS, VOCAB, make_model

    work, rows = WORK[size], []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folders = {
            name: str(make_model(Path(scratch) / name, ragged=name == "ragged", size=size))
            for name in options.workloads
        }
        began, workers = time.monotonic(), []
        # No more at once than there are cores: Ray waits 30 s for its own processes, and no longer.
        for first in range(0, len(names), options.threads):
            together = names[first : first + options.threads]
            for name in together:
                workers.append(Worker(name, folders, dtype, options.threads, work["prompts"] * MEMBERS))
                stack.callback(workers[-1].close)
            for worker in workers[-len(together) :]:
                assert worker.answer() == "ready"
        print(f"{size} {dtype}: {len(workers)} engines are there after {time.monotonic() - began:.0f} s", flush=True)
        turns: dict[tuple[str, str], list[Turn]] = {}
        for turn in range(options.repeats + 1):
            shape = (work["prompts"], PROMPT_TOKENS)
            prompts = torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(turn)).tolist()
            for place, workload in enumerate(options.workloads):
                version = 1 + turn * len(options.workloads) + place
                # Whoever comes first in one turn is not first in the next.
                for worker in workers[turn % len(workers) :] + workers[: turn % len(workers)]:
                    done = one_turn(worker, workload, version, prompts, MEMBERS, work[workload])
                    print(
                        f"{size} {dtype} {workload}, turn {turn}, {worker.name}: {done.tokens} tokens in "
                        f"{done.draw_s:.2f} s after {done.update_s:.2f} s of weights",
                        flush=True,
                    )
                    if turn:
                        turns.setdefault((workload, worker.name), []).append(done)
        for workload in options.workloads:
            for name in names:
                found = [vars(turn) | {"step_rate": turn.step_rate} for turn in turns[workload, name]]
                rows.append({"size": size, "dtype": dtype, "workload": workload, "engine": name, "turns": found})
    return rows


def ratio(rows: Sequence[dict[str, Any]], row: dict[str, Any], base: str) -> float | None:
    """The median over turns of the step rate over that of another engine; None where it was not measured."""
    keys = ("size", "dtype", "workload")
    (other,) = [r for r in rows if r["engine"] == base and all(r[k] == row[k] for k in keys)] or [None]
    if other is None:
        return None
    pairs = zip(row["turns"], other["turns"], strict=True)
    return median(mine["step_rate"] / its["step_rate"] for mine, its in pairs)


def report(rows: list[dict[str, Any]]) -> None:
    """Add what is compared to the rows, and print the table."""
    print(
        f"\n{'model':20}{'workload':9}{'engine':21}{'drawing':>9}{'step':>9}{'update s':>9}{'of native':>10}"
        f"{'of its one: all, half':>23}{'cores':>7}{'idle':>6}"
    )
    for row in rows:
        family, _, way = row["engine"].partition(", ")
        row["of_native"] = ratio(rows, row, "native")
        row["of_one"] = {name: ratio(rows, row, f"{family}, {one}") for name, one in ONES.get(way, {}).items()}
        turns = row["turns"]
        row["draw_rate"] = median(turn["tokens"] / turn["draw_s"] for turn in turns)
        row["step_rate"] = median(turn["step_rate"] for turn in turns)
        of_one = ", ".join("-" if value is None else f"{value:.2f}" for value in row["of_one"].values())
        model = f"{row['size']} {row['dtype']}"
        of_native = "-" if row["of_native"] is None else f"{row['of_native']:.2f}"
        shown = [median(turn[key] for turn in turns) for key in ("update_s", "cores", "idle")]
        print(
            f"{model:20}{row['workload']:9}{row['engine']:21}{row['draw_rate']:9.0f}{row['step_rate']:9.0f}"
            f"{shown[0]:9.3f}{of_native:>10}{of_one:>23}{shown[1]:7.2f}{shown[2]:6.2f}"
        )
    found = [row["of_one"]["all"] for row in rows if row["of_one"].get("all") is not None]
    if found:
        reached = sum(value >= BAR for value in found)
        print(f"two replicas at least {BAR} times one with as many threads in all: {reached} of {len(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=WORK)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    parser.add_argument("--workloads", nargs="+", choices=["fixed", "ragged"], default=["fixed", "ragged"])
    named = {"choices": KINDS, "default": list(KINDS), "metavar": "NAME", "help": "; ".join(KINDS)}
    parser.add_argument("--engines", nargs="+", **named)
    parser.add_argument("--repeats", type=int, help="turns of each engine; one more warms up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="3M in float32, one turn, unless said otherwise")
    parser.add_argument("--out", type=Path, help="write all of it here as JSON")
    options = parser.parse_args()
    options.sizes = options.sizes or (["3M"] if options.quick else list(WORK))
    options.dtypes = options.dtypes or (["float32"] if options.quick else ["float32", "bfloat16"])
    options.repeats = options.repeats or (1 if options.quick else 3)
    from atomrl.models.loading import has_bfloat16

    names, dtypes = [], []
    for name in options.engines:
        missing = [package for package in KINDS[name].needs if find_spec(package) is None]
        if KINDS[name].share < 1 and options.threads < 2:
            print(f"{name} is left out: one thread has no half")
        elif missing:
            print(f"{name} is left out: {', '.join(missing)} not installed")
        else:
            names.append(name)
    for dtype in options.dtypes:
        if dtype == "bfloat16" and not has_bfloat16("cpu"):
            print("bfloat16 is left out: this CPU has no instructions for it")
        else:
            dtypes.append(dtype)
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with environment(options.threads):
        for size in options.sizes:
            for dtype in dtypes:
                rows += measured(size, dtype, names, options)
    print(f"\n{options.threads} threads, {options.repeats} turns, {time.monotonic() - began:.0f} s in all")
    report(rows)
    if options.out:
        found = {"threads": options.threads, "repeats": options.repeats, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
