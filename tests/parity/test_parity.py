"""Our atoms give the numbers of the libraries that people trust: one test per file of golden numbers."""

import pytest

from tests.parity import harness
from tests.parity.not_covered import NOT_COVERED


def test_atoms_give_the_numbers_of_a_golden_file(golden_file):
    stem = golden_file.stem
    if stem not in harness.all_adapters():
        assert stem in NOT_COVERED, "write an adapter in tests/parity/adapters, or the reason in not_covered.py"
        pytest.skip(NOT_COVERED[stem])
    outcome = harness.check_file(golden_file)
    assert outcome.cases
    if outcome.faults:
        pytest.fail("\n".join(outcome.faults), pytrace=False)


def test_every_adapter_and_every_reason_has_a_file():
    stems = {path.stem for path in harness.GOLDEN.glob("*.json")}
    gone = {*harness.all_adapters(), *NOT_COVERED} - stems
    assert not gone, f"remove the adapters or reasons of files that are gone: {sorted(gone)}"


def test_the_page_names_every_file_and_the_present_atoms():
    page = (harness.GOLDEN.parents[2] / "docs" / "development" / "parity.md").read_text(encoding="utf-8")
    missing = [path.stem for path in sorted(harness.GOLDEN.glob("*.json")) if f"| `{path.stem}` |" not in page]
    by_atom, _, by_file = page.partition("## Atom by library")[2].partition("## File by file")
    rows = {line.split("`")[1] for line in by_atom.splitlines() if line.startswith("| `")}
    listed = {atom for line in by_file.splitlines() if line.startswith("| `") for atom in line.split("`")[3::2]}
    assert rows, "run: python -m tests.parity.report (the page has no table of atoms)"
    assert not missing and rows == listed <= set(harness.all_atoms()), (
        "run: python -m tests.parity.report (it writes docs/development/parity.md)"
    )
