"""Cost of the sandbox: milliseconds of a program in it and of the same program in plain Python, in turns.

    python benchmarks/sandbox.py [--runs 200] [--out FILE.json]

Programs take turns, so that what else the machine does falls on all of them. `judged` is a solution with its tests in
two boxes; `calls` are those of one test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from atomrl.sandbox import run
from atomrl.sandbox.judging import judge
from atomrl.sandbox.mounts import interpreter

PROGRAM = "print(6 * 7)"
BAR_MS = 12.0


def plain(*flags: str) -> None:
    done = subprocess.run([interpreter(), "-s", "-B", *flags, "-c", PROGRAM], capture_output=True, check=True)
    assert done.stdout == b"42\n"


def boxed() -> None:
    assert run(PROGRAM).stdout == "42\n"


def judged() -> None:
    assert judge("def f(x): return x", ["assert f(1) == 1"])[0].kind == "passed"


def many_calls() -> None:
    assert judge("def f(x): return x", ["for x in range(1000): assert f(x) == x"])[0].kind == "passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    kinds: dict[str, Callable[[], None]] = {
        # Without `site`, which reads files of installed packages; the box has it, and none to read.
        "plain": lambda: plain("-S"), "boxed": boxed, "judged": judged, "1000 calls": many_calls,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(arguments.runs + 3):
        for name, work in kinds.items():
            began = time.perf_counter()
            work()
            if number >= 3:
                times[name].append((time.perf_counter() - began) * 1e3)
    found = {name: {"median_ms": statistics.median(some), "p95_ms": sorted(some)[int(0.95 * len(some))]}
             for name, some in times.items()}  # fmt: skip
    for name, figures in found.items():
        print(f"{name:10s} median {figures['median_ms']:6.1f} ms, 95% under {figures['p95_ms']:6.1f} ms")
    more = found["boxed"]["median_ms"] - found["plain"]["median_ms"]
    ratio = found["boxed"]["median_ms"] / found["plain"]["median_ms"]
    print(f"a box costs {more:.1f} ms more than plain Python ({ratio:.2f} times as long; at most {BAR_MS:.0f} ms: "
          f"{'yes' if more <= BAR_MS else 'NO'})")  # fmt: skip
    if arguments.out:
        Path(arguments.out).write_text(json.dumps({**found, "more_ms": more, "ratio": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    main()
