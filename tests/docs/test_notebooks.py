"""The notebooks of the docs run, and what they show is of no machine in particular."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
RUN = [path if path.stem == "reading_a_run" else pytest.param(path, marks=pytest.mark.slow) for path in NOTEBOOKS]
"""One of them in `make test`."""
OF_A_MACHINE = re.compile(r"(?<![\w.:/<+=-])/[A-Za-z][\w.-]*/|site-packages|[A-Z]:\\\\Users")
"""An absolute path, or a part of one."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_in_order_and_names_no_machine(path):
    again = f"execute it anew: python tools/notebooks.py {path.relative_to(ROOT)}"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), again
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"]), again
    assert sum(bool(cell["outputs"]) for cell in cells) >= 4, again
    paths = OF_A_MACHINE.findall(path.read_text(encoding="utf-8"))
    assert not paths, f"print no path of this machine: {paths}"
    assert path.stat().st_size < 250_000, "show less, or smaller pictures"


@pytest.mark.parametrize("path", RUN, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'atomrl[test]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'atomrl[test]'")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from notebooks import executed

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    executed(path, tmp_path)
    assert list(tmp_path.glob("runs/*/summary.json"))
    sys.modules.pop("notebooks")
