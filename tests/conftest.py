"""Fixtures that every part of the suite may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
