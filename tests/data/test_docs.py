"""The examples in the pages on data, rewards and tasks run."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["data.md", "rewards.md", "add_a_task.md"])
def test_examples_run(page):
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted > 0 and result.failed == 0
