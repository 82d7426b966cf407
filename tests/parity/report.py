"""`python -m tests.parity.report`: writes docs/development/parity.md from the files of golden numbers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.parity import harness
from tests.parity.not_covered import NOT_COVERED

PAGE = Path(__file__).parents[2] / "docs" / "development" / "parity.md"
PEERS = [
    "verl",
    "trl",
    "openrlhf",
    "skyrl",
    "slime",
    "nemo_rl",
    "roll",
    "areal",
    "prime_rl",
    "verl_agent",
    "multi_turn_rl_agent",
]
NAMES = [
    "verl",
    "TRL",
    "OpenRLHF",
    "SkyRL",
    "slime",
    "NeMo-RL",
    "ROLL",
    "AReaL",
    "prime-rl",
    "verl-agent",
    "Multi-Turn-RL-Agent",
]
INTRODUCTION = """# The same numbers as the libraries that people trust

`tests/parity/golden/` holds inputs and outputs of functions of eleven libraries, recorded by running them. Each file
is one function; what it computes, to the last epsilon, is written in the file. `pytest tests/parity` gives our atoms
the same inputs and compares values, gradients and metrics within the file's own tolerances. Check another folder of
the same format with `pytest tests/parity --parity DIR`. This page is made by `python -m tests.parity.report`.

The adapters in `tests/parity/adapters/` rename, reshape and call atoms, and put together what only one library does (an
epsilon on a count, a bound on an estimate). `tests/parity/test_breaking.py` proves that the numbers come from the atoms
by breaking every one in turn and seeing each file that uses it fail. Where libraries disagree, the atom's docstring
says which convention it has, and why.

Differences are |ours - theirs|, relative to theirs where that is above 1, the largest over all cases and outputs
(logging metrics apart). About 1e-16 is float64; about 1e-7 is a library that computes in float32, wholly or in part.
"""


def cell(differences: list[float]) -> str:
    if not differences:
        return ""
    return "0" if max(differences) == 0 else f"{max(differences):.0e}"


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    by_atom: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    files, passed, cases = [], 0, 0
    for path in sorted(harness.GOLDEN.glob("*.json")):
        total = len(harness.read(path)["cases"])
        if path.stem not in harness.all_adapters():
            files.append(line([f"`{path.stem}`", str(total), "not covered: " + NOT_COVERED[path.stem], ""]))
            continue
        outcome = harness.check_file(path)
        used = sorted(harness.atoms_used(path))
        peer = path.stem.rsplit(".", 1)[1]
        for atom in used:
            by_atom[atom][peer].append(outcome.largest)
        passed, cases = passed + (not outcome.faults), cases + total
        result = f"{len(outcome.faults)} faults" if outcome.faults else cell([outcome.largest])
        files.append(line([f"`{path.stem}`", str(total), result, ", ".join(f"`{atom}`" for atom in used)]))
    atoms = [
        line([f"`{atom}`", *(cell(differences[peer]) for peer in PEERS)])
        for atom, differences in sorted(by_atom.items())
    ]
    return "\n".join(
        [
            INTRODUCTION,
            f"{passed} of {len(files)} files pass, with {cases} cases and {len(by_atom)} atoms.\n",
            "## Atom by library\n",
            line(["atom", *NAMES]),
            line(["---"] * (1 + len(NAMES))),
            *atoms,
            "\n## File by file\n",
            line(["file", "cases", "largest difference", "atoms, also those inside others"]),
            line(["---"] * 4),
            *files,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
