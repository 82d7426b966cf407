"""The examples in the pages of docs/ run, and what the pages link to is there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
WITH_EXAMPLES = [page for page in PAGES if ">>>" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_of_pages_print_what_they_show(page):
    options = torch._tensor_str.PRINT_OPTS.__dict__.copy()
    try:
        result = doctest.testfile(str(page), module_relative=False)  # prints what it got instead
    finally:
        torch._tensor_str.PRINT_OPTS.__dict__.update(options)
    assert result.attempted > 0 and result.failed == 0, f"mend the examples of {page.relative_to(ROOT)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}, which is not there"
