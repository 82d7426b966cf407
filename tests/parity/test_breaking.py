"""The numbers come from the atoms: with any one of them broken, every file that uses it turns red."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import harness


@pytest.fixture(scope="module")
def files_by_atom() -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted(harness.GOLDEN.glob("*.json")):
        if path.stem in harness.all_adapters():
            for atom in harness.atoms_used(path):
                files.setdefault(atom, []).append(path)
    return files


def broken(atom: Callable[..., Any], size: float) -> Callable[..., Any]:
    return lambda *args, **kwargs: moved(atom(*args, **kwargs), size)


def moved(value: Any, size: float) -> Any:
    """A result that differs at every place, gradient included, and unevenly: whitening would undo a shift or factor."""
    if isinstance(value, dict):
        return {key: moved(item, size) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(item, size) for item in value)
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return torch.logical_not(torch.as_tensor(value))
    if isinstance(value, Tensor) and value.is_floating_point():
        uneven = size * (1 + torch.arange(value.numel()) % 3).to(value).reshape(value.shape)
        return value * (1 + uneven) + uneven
    if isinstance(value, Tensor):  # unevenly too: equal ids must not stay equal
        return value + 1 + (torch.arange(value.numel()) % 2).reshape(value.shape)
    return None if value is None else value + 1


@pytest.mark.parametrize("atom", sorted(harness.all_atoms()))
def test_breaking_an_atom_turns_its_files_red(atom, files_by_atom):
    if atom not in files_by_atom:
        pytest.skip("no file of golden numbers uses it")
    green = files_by_atom[atom]
    for size in (0.05, -2.0, 2.0):  # what only decides on which side of a threshold a token is, takes a large one
        with harness.replaced({atom: broken(harness.all_atoms()[atom], size)}):
            green = [path for path in green if not harness.check_file(path, stop_at_first=True).faults]
    assert not green, f"these do not depend on {atom}, though they call it: {[path.stem for path in green]}"


def test_atoms_are_put_back():
    before = harness.all_atoms()
    replacement = {"policy_losses.token_ratio": broken(before["policy_losses.token_ratio"], 1.0)}
    with pytest.raises(ZeroDivisionError), harness.replaced(replacement):
        assert harness.all_atoms() != before
        raise ZeroDivisionError
    assert harness.all_atoms() == before
