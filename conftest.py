"""Names that doctests may use without importing them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict) -> None:
    doctest_namespace["torch"] = torch
