"""For all tests: the names that doctests use, and one thread each, because tiny models gain nothing from more."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict) -> None:
    doctest_namespace["torch"] = torch
