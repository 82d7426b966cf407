"""`pytest tests/parity --parity DIR` runs the files of another folder of the same format."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.harness import GOLDEN


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity", type=Path, default=None, help="folder of golden numbers, instead of the one here")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_file" not in metafunc.fixturenames:
        return
    # The option is unknown where this file is collected as part of the whole suite.
    folder = metafunc.config.getoption("parity", default=None) or GOLDEN
    files = sorted(folder.glob("*.json"))
    if not files:
        raise pytest.UsageError(f"--parity {folder}: no *.json files there")
    metafunc.parametrize("golden_file", files, ids=[path.stem for path in files])
