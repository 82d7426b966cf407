"""The pages of docs/reference/algorithms/ say what the code does: equations, axes, configs, and the figures of the
benchmark in docs/development/benchmarks/algorithms.json. To write those parts anew:

python -m tests.algorithms.test_pages
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from atomrl.algorithms import ALGORITHMS, objective_of
from atomrl.config import read_yaml
from atomrl.objectives.choice import Choice
from atomrl.objectives.explain import changed_fields, latex

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "reference" / "algorithms"
RESULTS = json.loads((ROOT / "docs" / "development" / "benchmarks" / "algorithms.json").read_text(encoding="utf-8"))
"""Results of benchmarks/algorithms.py."""
MODULES = {
    "gspo_token": "gspo",
    "reinforce_pp_baseline": "reinforce_pp",
    "clip_cov": "entropy_mechanism",
    "kl_cov": "entropy_mechanism",
}
"""Algorithm -> its file and page, where they have another name."""
COLUMNS = (
    "advantage", "ratio", "clip", "kl", "loss_agg", "token_filter", "shaping", "group_filter", "value", "entropy",
)  # fmt: skip


def module(name: str) -> str:
    return MODULES.get(name, name)


def cell(choices: tuple[Choice, ...]) -> str:
    """A choice in the table: its type, and the fields that are not the type's defaults."""
    if not choices:
        return "-"
    changed = ", ".join(f"{key}={value}" for key, value in changed_fields(choices[0]).items())
    name = choices[0].type
    return changed if name == "penalties" else f"{name}{f' ({changed})' if changed else ''}"


def accuracy(figure: list[float]) -> str:
    return f"{figure[0]:.3f} ± {figure[1]:.3f}"


def gain(name: str) -> str:
    """Return the benchmark's results for the table."""
    if name not in RESULTS:
        return "not measured"
    mean, error = RESULTS[name]["gain"]
    return f"{mean:+.2f} ± {error:.2f}"


def measured(name: str) -> str:
    """Return the benchmark's results for a page."""
    if name not in RESULTS:
        return f"Not measured yet: run `python benchmarks/algorithms.py {name}`.\n"
    result = RESULTS[name]
    start, end = accuracy(result["accuracy_before"]), accuracy(result["accuracy_after"])
    seeds = len(result["steps"])
    return f"""![Learning curves of {name}](../../images/algorithms/{name}.svg)

Held-out accuracy goes from {start} to **{end}**, a gain of {result["gain_in_standard_errors"]:.0f} standard errors.
The start and the budget of {result["budget"]:,} sampled tokens are those of
[all algorithms](../../development/benchmarks/algorithms.md). {result["problems"]} problems,
{seeds} seed{"s" * (seeds > 1)} (in color); grey: grpo.
"""


def axes_table() -> str:
    rows = [f"| name | {' | '.join(COLUMNS)} | gain in accuracy |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, objective in ALGORITHMS.items():
        cells = [cell(objective.used_axes()[axis]) for axis in COLUMNS]
        rows.append(f"| [{name}]({module(name)}.md) | {' | '.join(cells)} | {gain(name)} |")
    return "\n".join(rows)


def generated(name: str) -> str:
    """The part of a page that is one algorithm's: equation, config, how to run it."""
    config_path = ROOT / "configs" / "algorithms" / f"{name}.yaml"
    objective = objective_of(read_yaml(config_path)["algorithm"]).resolved(max_completion_tokens=48)
    config = config_path.read_text(encoding="utf-8")
    block = re.search(r"^algorithm:\n(?:  .*\n)+", config, re.MULTILINE)
    assert block is not None
    return f"""## `{name}`

```math
{latex(objective)}
```

This is the objective of [`configs/algorithms/{name}.yaml`](../../../configs/algorithms/{name}.yaml), which starts from
`{name.upper()}` in [`{module(name)}.py`](../../../atomrl/algorithms/{module(name)}.py):

```yaml
{block[0].rstrip()}
```

    atomrl explain configs/algorithms/{name}.yaml
    atomrl train configs/algorithms/{name}.yaml

{measured(name)}"""


def opening(stem: str) -> str:
    """Return a module's docstring as the start of a page."""
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
    assert text.startswith(page(stem)), f"run: python -m tests.algorithms.test_pages (it writes {stem}.md)"


def test_the_table_has_the_axes_of_every_algorithm():
    shown = axes_table() in (DOCS / "README.md").read_text(encoding="utf-8")
    assert shown, "run: python -m tests.algorithms.test_pages (it writes the table of axes in README.md)"


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
    """config -> record -> class of the axis -> atom."""
    config = read_yaml(ROOT / "configs" / "algorithms" / f"{name}.yaml")
    record = importlib.import_module(f"atomrl.algorithms.{module(name)}")
    objective = vars(record)[config["algorithm"]["name"].upper()]
    assert objective is ALGORITHMS[name]
    assert type(objective.clip).__module__ == "atomrl.objectives.policy_loss"
    atoms = objective.clip.atoms()
    assert atoms and all(atom.__module__.startswith("atomrl.atoms.") for atom in atoms)


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
