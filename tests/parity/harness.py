"""Runs files of golden numbers against our atoms. The files' format is in `golden/README.md`.

What an adapter is given (`as_inputs`):

- a list of numbers, nested or not, becomes a tensor: of the case's dtype if any is a float, else int64; bools become a
  bool tensor; the string "NaN" (a missing value) becomes NaN;
- inputs named `mask` or `*_mask` become bool tensors (their values are 0 and 1);
- a ragged list becomes a list of such tensors, one per row;
- anything else (None, strings, numbers, dicts) stays as it is. Parameters always do; a case without any has {}.

What it gives back: every name of `expected`, except those that start with `grad_`. Extra names are ignored. Numbers,
tensors, lists and dicts (`metrics`) will do.

Gradients are taken here, so that no adapter can hide one. `grad_X` is the gradient with respect to the input `X`, or
the only one that begins so and has all its words (`grad_chosen`: `chosen_log_probs`). That input then requires grad.
The scalar is what the adapter returns as `objective`, or `loss` where it returns none; `grad_X_of_Y` is of
`objective["Y"]`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import atomrl.atoms
from tests.parity import adapters

GOLDEN = Path(__file__).parent / "golden"
Adapter = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


@dataclass
class Outcome:
    """Number of cases in one golden file, and their faults."""

    stem: str
    cases: int = 0
    faults: list[str] = field(default_factory=list)
    largest: float = 0.0
    """Largest difference outside `metrics`: absolute, and relative to numbers above 1."""


@functools.cache
def all_adapters() -> dict[str, Adapter]:
    by_name: dict[str, Adapter] = {}
    for info in pkgutil.iter_modules(adapters.__path__):
        table = importlib.import_module(f"{adapters.__name__}.{info.name}").ADAPTERS
        assert not by_name.keys() & table.keys(), f"{info.name}: adapted elsewhere too: {by_name.keys() & table.keys()}"
        by_name |= table
    return by_name


@functools.cache
def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def check_file(path: Path, stop_at_first: bool = False) -> Outcome:
    """Runs every case of a file; a fault is a line of text."""
    golden, adapter = read(path), all_adapters()[path.stem]
    outcome = Outcome(path.stem)
    for case in golden["cases"]:
        outcome.cases += 1
        try:
            check_case(golden, case, adapter, outcome)
        except Exception as error:  # a crash is a fault of the case, and the other cases still run
            outcome.faults.append(f"{case['name']}: {type(error).__name__}: {str(error)[:300]}")
        if stop_at_first and outcome.faults:
            break
    return outcome


def check_case(golden: dict[str, Any], case: dict[str, Any], adapter: Adapter, outcome: Outcome) -> None:
    with default_dtype(getattr(torch, case["dtype"])):
        compare_case(golden, case, adapter, outcome)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype, which is that of loss weights: they are made of masks alone."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compare_case(golden: dict[str, Any], case: dict[str, Any], adapter: Adapter, outcome: Outcome) -> None:
    dtype, expected = getattr(torch, case["dtype"]), case["expected"]
    inputs = {name: as_input(name, value, dtype) for name, value in case["inputs"].items()}
    leaves = {name: gradient_input(name, inputs) for name in expected if name.startswith("grad_")}
    for leaf in leaves.values():
        leaf.requires_grad_()
    torch.manual_seed(0)
    ours = adapter(dict(inputs), dict(case.get("params", {})))
    ours |= {name: gradient(name, leaf, ours) for name, leaf in leaves.items()}
    only_under_mask = golden.get("compare_where_mask", [])
    for name, value in expected.items():
        where = inputs["mask"] if name in only_under_mask else None
        tolerance = tolerance_of(golden, case, name)
        if name not in ours:
            outcome.faults.append(f"{case['name']}: the adapter returns no {name!r}")
            continue
        for place, got, want in pairs(name, ours[name], value):
            fault, difference = compare(got, want, where, *tolerance)
            if name != "metrics":
                outcome.largest = max(outcome.largest, difference)
            if fault:
                outcome.faults.append(f"{case['name']}: {place}: {fault}")


def as_input(name: str, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, list):
        return value
    kinds = {type(leaf) for leaf in leaves_of(value)}
    if not kinds <= {int, float, bool} and not all(leaf == "NaN" for leaf in leaves_of(value) if isinstance(leaf, str)):
        return value
    if kinds & {dict, type(None)}:
        return value
    if is_ragged(value):
        return [as_input(name, row, dtype) for row in value]
    numbers = torch.tensor(with_nan(value), dtype=torch.float64)
    if name == "mask" or name.endswith("_mask"):
        assert ((numbers == 0) | (numbers == 1)).all(), f"{name} has values other than 0 and 1"
        return numbers.bool()
    if kinds == {bool}:
        return numbers.bool()
    return numbers.to(torch.int64 if kinds == {int} else dtype)


def leaves_of(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def is_ragged(value: list[Any]) -> bool:
    """Rows of unequal length: a row of numbers beside a row of lists does not occur."""
    rows = [item for item in value if isinstance(item, list)]
    return len({len(row) for row in rows}) > 1 or any(is_ragged(row) for row in rows)


def with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    return float(value) if isinstance(value, str) else value


def gradient_input(name: str, inputs: dict[str, Any]) -> Tensor:
    words = name.removeprefix("grad_").split("_of_")[0].split("_")
    matches = [key for key in inputs if key.split("_") == words] or [key for key in inputs if leads_to(words, key)]
    assert len(matches) == 1, f"{name}: the gradient with respect to which of {matches or sorted(inputs)}?"
    return inputs[matches[0]]


def leads_to(words: list[str], key: str) -> bool:
    """The key begins with the first word and has the others in their order: chosen -> chosen_log_probs."""
    first, *rest = key.split("_")
    remaining = iter(rest)
    return first == words[0] and all(word in remaining for word in words[1:])


def gradient(name: str, leaf: Tensor, ours: dict[str, Any]) -> Tensor:
    objective = ours.get("objective", ours.get("loss"))
    if isinstance(objective, dict):
        objective = objective[name.split("_of_", 1)[1]]
    assert isinstance(objective, Tensor) and objective.ndim == 0, f"{name}: there is no scalar to take it of"
    if not objective.requires_grad:  # a loss that is constant, say of an empty mask
        return torch.zeros_like(leaf)
    (grad,) = torch.autograd.grad(objective, leaf, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if grad is None else grad


def tolerance_of(golden: dict[str, Any], case: dict[str, Any], name: str) -> tuple[float, float]:
    """(rtol, atol): the file's; `float32` for a case of another dtype; for metrics the looser of that and `metrics`."""
    table = golden["tolerance"]
    base = table.get("float32", table) if case["dtype"] != golden["dtype"] else table
    used = [base] + ([table["metrics"]] if name == "metrics" and "metrics" in table else [])
    return max(t["rtol"] for t in used), max(t["atol"] for t in used)


def pairs(place: str, ours: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """Walks dicts, and lists of dicts, down to what is compared as a whole."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            yield from pairs(f"{place}[{key}]", ours[key], value)
    elif isinstance(expected, list) and (is_ragged(expected) or any(isinstance(item, dict) for item in expected)):
        assert len(ours) == len(expected), f"{place} has {len(ours)} rows instead of {len(expected)}"
        for index, value in enumerate(expected):
            yield from pairs(f"{place}[{index}]", ours[index], value)
    else:
        yield place, ours, expected


def compare(ours: Any, expected: Any, where: Tensor | None, rtol: float, atol: float) -> tuple[str, float]:
    """A fault ('' if there is none) and the largest |ours - expected| / max(1, |expected|).

    Integers and bools must be equal.
    """
    if expected is None or (isinstance(expected, str) and expected != "NaN"):
        return ("" if ours == expected else f"{ours!r} instead of {expected!r}"), 0.0
    want = torch.tensor(with_nan(expected), dtype=torch.float64)
    got = torch.as_tensor(ours).detach().to(torch.float64)
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(want.shape)}", float("inf")
    if where is not None:
        got, want = got[where], want[where]
    if not any(isinstance(leaf, float | str) for leaf in leaves_of(expected)):
        rtol = atol = 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    difference = (got - want).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"))
    bad = difference > atol + rtol * want.abs().nan_to_num(posinf=0.0)
    largest = float((difference / want.abs().clamp(min=1.0)).max()) if difference.numel() else 0.0
    if not bad.any():
        return "", largest
    index = tuple(bad.nonzero()[0].tolist())
    return f"{int(bad.sum())} of {bad.numel()} differ, first at {index}: {got[index]} instead of {want[index]}", largest


def atom_modules() -> list[ModuleType]:
    return [
        importlib.import_module(f"atomrl.atoms.{info.name}") for info in pkgutil.iter_modules(atomrl.atoms.__path__)
    ]


def all_atoms() -> dict[str, Callable[..., Any]]:
    """Every public function of `atomrl.atoms`, as "module.function"."""
    return {
        f"{module.__name__.rsplit('.', 1)[1]}.{name}": value
        for module in atom_modules()
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


@contextmanager
def replaced(replacements: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Puts other functions in the place of atoms, in every atom module that knows them."""
    originals = all_atoms()
    by_function = {originals[name]: new for name, new in replacements.items()}
    undo: list[tuple[ModuleType, str, Any]] = []
    for module in atom_modules():
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in by_function:
                undo.append((module, name, value))
                setattr(module, name, by_function[value])
    try:
        yield
    finally:
        for module, name, value in undo:
            setattr(module, name, value)


def atoms_used(path: Path) -> set[str]:
    """The atoms that a file's adapter calls, directly or through another atom."""
    used: set[str] = set()

    def recorded(name: str, atom: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(atom)
        def call(*args: Any, **kwargs: Any) -> Any:
            used.add(name)
            return atom(*args, **kwargs)

        return call

    with replaced({name: recorded(name, atom) for name, atom in all_atoms().items()}):
        check_file(path)
    return used
