"""Tests of the sandbox need one."""

from __future__ import annotations

import pytest

from atomrl.sandbox import SandboxError, check


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skips a test where there is none, and says why."""
    try:
        check("bubblewrap")
    except SandboxError as error:
        pytest.skip(str(error))
