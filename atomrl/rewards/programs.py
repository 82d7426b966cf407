"""The reward for programs: the share of tests that they pass, in a sandbox.

It runs in worker processes, each of which starts a fresh sandbox for every program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from atomrl.rewards.blocks import last_block
from atomrl.rewards.errors import NoScore, RewardError
from atomrl.rewards.program_tests import Case, called_by, cases_of, same_output
from atomrl.sandbox import Limits, Sandbox, SandboxError, check, run
from atomrl.sandbox.served import Verdict, judge


def code(
    prompts: list[Any],
    completions: list[str],
    ground_truth: list[Any],
    test_column: str = "ground_truth",
    all_or_nothing: bool = False,
    case_s: float = 4.0,
    total_s: float = 8.0,
    memory_mb: int = 512,
    sandbox: Sandbox = "bubblewrap",
    **columns: Any,
) -> list[float | NoScore]:
    """The share of its tests that the program in its blocks of code (`blocks.last_block`) passes; 0.0 without one.

    What a program writes is compared here. Assertions are evaluated in a process that the program cannot reach
    (`atomrl.sandbox.served.judge`); one that gives the program a function or an object of a class cannot be, and the
    completion then has no score.

    Args:
        test_column: the column that has the tests, in any layout of `program_tests.cases_of`.
        all_or_nothing: 1.0 where all pass, else 0.0.
        case_s: seconds of the processor for one test.
        total_s: by the clock for all tests of a completion. When it is over, what is left has failed if a test was too
            slow; else there is no score, and it should be longer. `timeout_s` has to be longer still.
        memory_mb: of the program.
        sandbox: `none` runs programs as you, with no safety at all.

    Raises:
        RewardError: there is no sandbox here.
    """
    check_sandbox({"sandbox": sandbox})
    limits = Limits(cpu_s=math.ceil(case_s), wall_s=2 * case_s + 1, memory_mb=memory_mb)
    rows = {**columns, "ground_truth": ground_truth}
    if test_column not in rows:
        raise ValueError(f"test_column: there is no column {test_column!r}; there are {', '.join(rows)}")
    scores: list[float | NoScore] = []
    for index, completion in enumerate(completions):
        row = {name: column[index] for name, column in rows.items()}
        cases = cases_of(row[test_column], row)
        program = last_block(completion, called_by(cases))
        if program is None:
            scores.append(0.0)
        else:
            verdicts = _run(program, cases, str(row.get("entry_point") or ""), limits, total_s, all_or_nothing, sandbox)
            scores.append(_score(verdicts, len(cases), all_or_nothing, total_s))
    return scores


def check_sandbox(args: Mapping[str, Any]) -> None:
    """
    Raises:
        RewardError: programs cannot be run in a sandbox here, and the args do not say that they need none.
    """
    try:
        check(args.get("sandbox", "bubblewrap"))
    except SandboxError as error:
        raise RewardError(f"reward 'code': {error}") from error


def _run(
    program: str, cases: Sequence[Case], entry: str, limits: Limits, total_s: float, stop: bool, sandbox: Sandbox
) -> list[Verdict]:
    """The verdicts on the tests, first those of the program as a whole, as far as time allows; with `stop` up to the
    first that did not pass."""
    end = time.monotonic() + total_s
    verdicts: list[Verdict] = []
    for case in [case for case in cases if case.source is None]:
        left = end - time.monotonic()
        if left > 0 and not (stop and any(one.kind != "passed" for one in verdicts)):
            short = Limits(**{**vars(limits), "wall_s": min(limits.wall_s, left)})
            result = run(program, stdin=case.stdin, limits=short, sandbox=sandbox)
            if result.ended == "timeout" and left < limits.wall_s / 2:
                break  # for want of time for all
            right = result.ended == "exit" and same_output(result.stdout, case.stdout)
            verdicts.append(Verdict("timeout" if result.ended == "timeout" else "passed" if right else "failed"))
    sources = [case.source for case in cases if case.source is not None]
    left = end - time.monotonic()
    if sources and left > 0:
        together = Limits(**{**vars(limits), "cpu_s": math.ceil(max(limits.cpu_s, total_s))})
        verdicts += judge(program, sources, entries=[entry], limits=together, total_s=left, sandbox=sandbox)
    return verdicts


def _score(verdicts: Sequence[Verdict], cases: int, all_or_nothing: bool, total_s: float) -> float | NoScore:
    kinds = [verdict.kind for verdict in verdicts]
    if "unserved" in kinds:
        number = kinds.index("unserved")
        return NoScore("invalid", f"test {number + 1}: {verdicts[number].message}")
    if all_or_nothing and any(kind != "passed" for kind in kinds):
        return 0.0
    if len(kinds) < cases and "timeout" not in kinds:
        more = "a larger total_s, and timeout_s, allow more"
        return NoScore("timeout", f"{cases} tests took over {total_s:g} s, though none was slow ({more})")
    return kinds.count("passed") / cases
