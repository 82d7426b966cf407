"""Executes the notebooks of the docs, each in a folder of its own, and writes what they showed into them.

python tools/notebooks.py                     all of docs/notebooks; needs nbclient and ipykernel
python tools/notebooks.py docs/notebooks/first_grpo.ipynb
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"
TIMEOUT_S = 600
"""For a cell."""


def executed(path: Path, folder: Path) -> Any:
    """A notebook with what its cells showed.

    Args:
        folder: that it is executed in.

    Raises:
        CellExecutionError: a cell failed.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of this machine
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main() -> None:
    import nbformat

    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)
        print(path)


if __name__ == "__main__":
    main()
