"""The reward `code`: the share of tests that the completion's program passes in a sandbox.

It runs in worker processes and starts a fresh sandbox for every program.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from atomrl.rewards.code_blocks import last_block
from atomrl.rewards.errors import NoScore, RewardError
from atomrl.rewards.program_tests import Case, called_by, cases_of
from atomrl.sandbox import Limits, Sandbox, SandboxError, check, run
from atomrl.sandbox.judging import Verdict, judge

_TOLERANCE = 1e-6
_NUMERAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def same_output(output: str, expected: str) -> bool:
    """Return True if two outputs have the same words on the same lines. White space is ignored; a number with a decimal
    point may differ by 1e-6.

    Example:
        >>> same_output("1  2\\n0.3333333\\n", "1 2\\n0.333333333"), same_output("1\\n2", "1 2")
        (True, False)
    """
    mine, theirs = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
    if [len(line) for line in mine] != [len(line) for line in theirs]:
        return False
    words = zip((word for line in mine for word in line), (word for line in theirs for word in line), strict=True)
    return all(one == other or _near(one, other) for one, other in words)


def _near(output: str, expected: str) -> bool:
    if "." not in expected or max(len(output), len(expected)) > 40:
        return False
    if not (_NUMERAL.fullmatch(output) and _NUMERAL.fullmatch(expected)):  # float() takes 2_0.0 for 20
        return False
    return math.isclose(float(output), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


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
    """Return the share of tests that the completion's program (`last_block`) passes; 0.0 without a program.

    Outputs are compared in this process. Assertions are evaluated in a process that the program cannot reach
    (`atomrl.sandbox.judging.judge`). If a test passes the program a function or an object of a class, which is not
    possible there, the completion gets no score.

    Args:
        test_column: the column with the tests, in any format of `cases_of`.
        all_or_nothing: return 1.0 if all tests pass, else 0.0.
        case_s: CPU seconds per test.
        total_s: wall-clock seconds for all tests of a completion. After them the remaining tests have failed if a test
            timed out; otherwise there is no score, and `total_s` should be larger. `timeout_s` must be larger still.
        memory_mb: memory of the program.
        sandbox: `none` runs programs with your permissions and without any protection.

    Raises:
        RewardError: the sandbox is not available.
    """
    check_sandbox({"sandbox": sandbox})
    limits = Limits(cpu_s=math.ceil(case_s), wall_s=2 * case_s + 1, memory_mb=memory_mb)
    rows = {**columns, "ground_truth": ground_truth}
    if test_column not in rows:
        raise ValueError(f"test_column: there is no column {test_column!r}; columns: {', '.join(rows)}")
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
    """Check that the sandbox in the reward's args is available.

    Raises:
        RewardError: it is not.
    """
    try:
        check(args.get("sandbox", "bubblewrap"))
    except SandboxError as error:
        raise RewardError(f"reward 'code': {error}") from error


def _run(
    program: str, cases: Sequence[Case], entry: str, limits: Limits, total_s: float, stop: bool, sandbox: Sandbox
) -> list[Verdict]:
    """Run the tests until `total_s` is over: those of stdin and stdout first, then those that call functions.

    With `stop`, tests of stdin and stdout end at the first that does not pass.
    """
    end = time.monotonic() + total_s
    verdicts: list[Verdict] = []
    for case in [case for case in cases if case.source is None]:
        left = end - time.monotonic()
        if left > 0 and not (stop and any(one.kind != "passed" for one in verdicts)):
            short = Limits(**{**vars(limits), "wall_s": min(limits.wall_s, left)})
            result = run(program, stdin=case.stdin, limits=short, sandbox=sandbox)
            if result.ended == "timeout" and left < limits.wall_s / 2:
                break  # `total_s` is over, and this test had too little time to be called slow
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
        more = "raise total_s and timeout_s"
        return NoScore("timeout", f"{cases} tests took over {total_s:g} s, though none was slow ({more})")
    return kinds.count("passed") / cases
