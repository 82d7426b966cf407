"""Working directories for commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
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
