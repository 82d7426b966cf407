"""The pages of docs/algorithms/ say what the code does: equations, axes, configs, and the figures of the benchmark in
docs/benchmarks/algorithms.json. To write those parts anew:

python -m tests.algorithms.test_pages
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from atomrl.algorithms.table import ALGORITHMS
from atomrl.config import read_yaml
from atomrl.objective import Objective, with_limit
from atomrl.objective.explain import in_use, latex, terms

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "algorithms"
RESULTS = json.loads((ROOT / "docs" / "benchmarks" / "algorithms.json").read_text(encoding="utf-8"))
"""Of benchmarks/algorithms.py."""
MODULES = {
    "gspo_token": "gspo",
    "reinforce_pp_baseline": "reinforce_pp",
    "clip_cov": "entropy_mechanism",
    "kl_cov": "entropy_mechanism",
}
"""Algorithm -> its file and page, where they have another name."""
COLUMNS = ("advantage", "ratio", "clip", "kl", "aggregate", "selection", "shaping", "accept_group", "value", "entropy")


def module(name: str) -> str:
    return MODULES.get(name, name)


def cell(objective: Objective, axis: str) -> str:
    """A choice in the table: its type, and the parameters that are not the type's defaults."""
    if not in_use(objective, axis):
        return "-"
    found = terms(objective)[axis]
    changed = ", ".join(f"{key}={found.parameters[key]}" for key in found.parameters if key in found.changed)
    return f"{found.type}{f' ({changed})' if changed else ''}" if axis != "shaping" else changed


def accuracy(figure: list[float]) -> str:
    return f"{figure[0]:.3f} ± {figure[1]:.3f}"


def gain(name: str) -> str:
    """What the benchmark saw, for the table."""
    if name not in RESULTS:
        return "not measured"
    mean, error = RESULTS[name]["gain"]
    return f"{mean:+.2f} ± {error:.2f}"


def measured(name: str) -> str:
    """What the benchmark saw, for a page."""
    if name not in RESULTS:
        return f"No curve yet: `python benchmarks/algorithms.py {name}` makes one.\n"
    result = RESULTS[name]
    start, end = accuracy(result["accuracy_before"]), accuracy(result["accuracy_after"])
    seeds = len(result["steps"])
    return f"""![Learning curves of {name}](../images/algorithms/{name}.svg)

From the same start with the same {result["budget"]:,} sampled tokens as [all others](../benchmarks/algorithms.md):
accuracy on held-out problems {start} to **{end}**, a gain of {result["gain_in_standard_errors"]:.0f} standard errors
({result["problems"]} problems, {seeds} seed{"s" * (seeds > 1)}, in colours; grey is grpo).
"""


def axes_table() -> str:
    rows = [f"| name | {' | '.join(COLUMNS)} | gain in accuracy |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, objective in ALGORITHMS.items():
        cells = [cell(objective, axis) for axis in COLUMNS]
        rows.append(f"| [{name}]({module(name)}.md) | {' | '.join(cells)} | {gain(name)} |")
    return "\n".join(rows)


def generated(name: str) -> str:
    """The part of a page that is one algorithm's: equation, config, how to run it."""
    objective = with_limit(ALGORITHMS[name], 48)
    path = ROOT / "atomrl" / "algorithms" / f"{module(name)}.py"
    symbol = name.upper()
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.startswith(f"{symbol} = "))
    config = (ROOT / "configs" / "algorithms" / f"{name}.yaml").read_text(encoding="utf-8")
    block = re.search(r"^algorithm:\n(?:  .*\n)+", config, re.MULTILINE)
    assert block is not None
    return f"""## `{name}`

```math
{latex(objective)}
```

[`{symbol}`](../../atomrl/algorithms/{path.name}#L{line}) is the record. From
[`configs/algorithms/{name}.yaml`](../../configs/algorithms/{name}.yaml):

```yaml
{block[0].rstrip()}
```

    atomrl explain configs/algorithms/{name}.yaml
    atomrl train configs/algorithms/{name}.yaml

{measured(name)}"""


def opening(stem: str) -> str:
    """What a module's docstring says, as a page begins with it."""
    doc = inspect.getdoc(importlib.import_module(f"atomrl.algorithms.{stem}")) or ""
    title, _, body = doc.partition("\n")
    body = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", body.strip("\n"))
    return f"# {title.rstrip('.')}\n\n{body}\n\n"


def page(stem: str) -> str:
    """A whole page: what its module's docstring says, then each of its algorithms."""
    names = [name for name in ALGORITHMS if module(name) == stem]
    return opening(stem) + "\n".join(generated(name) for name in names)


@pytest.mark.parametrize("stem", sorted({module(name) for name in ALGORITHMS}))
def test_pages_say_what_the_code_says(stem):
    text = (DOCS / f"{stem}.md").read_text(encoding="utf-8")
    assert text.startswith(page(stem)), "write it anew: python -m tests.algorithms.test_pages"


def test_the_table_has_the_axes_of_every_algorithm():
    assert axes_table() in (DOCS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RESULTS)
def test_figures_are_those_of_the_curves(name):
    """The summary that pages show was made of the runs whose curves are beside it, and their picture is there."""
    result = RESULTS[name]
    ends = [curve["held_out"][-1][1] for curve in result["curves"]]
    assert result["accuracy_after_by_seed"] == ends
    assert result["accuracy_after"][0] == pytest.approx(sum(ends) / len(ends), abs=1e-3)
    # Curves have four digits, so the last step but one may show the budget itself.
    assert all(curve["tokens"][-2] <= result["budget"] <= curve["tokens"][-1] for curve in result["curves"])
    picture = ROOT / "docs" / "images" / "algorithms" / f"{name}.svg"
    assert picture.stat().st_size < 40_000


@pytest.mark.parametrize("name", ALGORITHMS)
def test_four_hops_from_a_config_to_the_line_of_the_equation(name):
    """config -> record -> function of the axis -> atom."""
    config = read_yaml(ROOT / "configs" / "algorithms" / f"{name}.yaml")
    record = importlib.import_module(f"atomrl.algorithms.{module(name)}")
    objective = vars(record)[config["algorithm"]["name"].upper()]
    assert objective is ALGORITHMS[name]
    assert terms(objective)["clip"].atoms[0].place.startswith("atomrl/atoms/")


def write() -> None:
    for stem in {module(name) for name in ALGORITHMS}:
        path = DOCS / f"{stem}.md"
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        own = old.partition("\n## Notes\n")
        path.write_text(page(stem) + "".join(own[1:]), encoding="utf-8")
    index = DOCS / "README.md"
    text = index.read_text(encoding="utf-8")
    index.write_text(re.sub(r"\| name \|.*?\n(?=\n|\Z)", lambda _: axes_table() + "\n", text, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    write()
