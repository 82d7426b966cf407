"""Fixtures that every part of the suite may use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The optional folder with real data and models: `ATOMRL_SHARED`, or `shared` beside the repository."""
    folder = Path(os.environ.get("ATOMRL_SHARED") or Path(__file__).parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"the folder with real data is absent ({folder}); set ATOMRL_SHARED")
    return folder


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skips a test where programs cannot be run in a sandbox, and says why."""
    from atomrl.sandbox import SandboxError, check

    try:
        check("bubblewrap")
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def working_directory(tmp_path, model, monkeypatch) -> Callable[..., Path]:
    """Makes one with the model, the config `c.yaml`, and files of rows, which are called as the arguments."""

    def make(config: dict[str, Any], **files: Iterable[dict[str, Any]]) -> Path:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "model").symlink_to(model)
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        for name, rows in files.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return make
