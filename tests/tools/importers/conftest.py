"""Scripts and configs as text."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from atomrl.tools.importers import Imported, import_config

Read = Callable[..., Imported]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Write a text to a file, YAML if it begins with a key and a colon, and import it."""

    def read(text: str, name: str = "", library: str = "", **more: object) -> Imported:
        path = tmp_path / (name or ("a.yaml" if re.match(r"\w+:", text) else "a.sh"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return import_config(path, library or None, **more)  # type: ignore[arg-type]

    return read
