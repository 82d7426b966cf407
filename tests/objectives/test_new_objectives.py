"""The objectives of examples/objectives/ compose and train, and docs/reference/new_objectives.md says what they and the
benchmark say. To write that part of the page anew:

python -m tests.objectives.test_new_objectives
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from atomrl.algorithms import ALGORITHMS, objective_of
from atomrl.config import read_yaml
from atomrl.objectives.explain import equation
from atomrl.trainer import prepare_run
from tests.algorithms.test_loop import small
from tests.algorithms.test_pages import RESULTS, ROOT, accuracy
from tests.tiny import make_tiny_model

CONFIGS = sorted((ROOT / "examples" / "objectives").glob("*.yaml"))
PAGE = ROOT / "docs" / "reference" / "new_objectives.md"
INTRODUCTION = """# Three new objectives

Combine choices on the axes of an objective in a config, and you get objectives that no paper has described. This page
has three, which as far as we know no other library has. Each is compared with its parents, with the same start, the
same number of sampled tokens and the same held-out problems ([method](../development/benchmarks/algorithms.md)). In the
pictures each colour is a seed; the parents are grey.

<!-- not run (python benchmarks/algorithms.py): takes minutes -->

    atomrl explain examples/objectives/rare_first.yaml
    atomrl train examples/objectives/rare_first.yaml
    python benchmarks/algorithms.py examples/objectives/*.yaml
"""


def section(path: Path) -> str:
    """Return a section of the page: a config's comment, the equation of `atomrl explain`, and the measured numbers."""
    text = path.read_text(encoding="utf-8")
    comment = re.match(r"(?:#.*\n)+", text)
    block = re.search(r"^algorithm:\n(?:  .*\n)+", text, re.MULTILINE)
    assert comment is not None and block is not None
    title, _, body = re.sub(r"^# ?", "", comment[0], flags=re.MULTILINE).partition("\n")
    tree = read_yaml(path)
    name = tree["run_name"]
    objective = objective_of(tree["algorithm"]).resolved(max_completion_tokens=tree["rollout"]["max_completion_tokens"])
    lines = "\n".join(f"    {line}" for line in equation(objective).splitlines())
    body = re.sub(r"\n*Parents: .*", "", body).strip()
    return f"""## `{name}`: {title.rstrip(".")[0].lower()}{title.rstrip(".")[1:]}

{body}

{lines}

From [`examples/objectives/{path.name}`](../../examples/objectives/{path.name}):

```yaml
{block[0].rstrip()}
```

![Learning curves of {name} and its parents](../images/algorithms/{name}.svg)

{comparison(name)}
"""


def comparison(name: str) -> str:
    """The objective and its parents, a row each."""
    lines = ["| | accuracy before | after | by seed | gain in s.e. |", "|---|---|---|---|---|"]
    for row in (name, *RESULTS[name]["parents"]):
        result = RESULTS[row]
        seeds = ", ".join(f"{value:.3f}" for value in result["accuracy_after_by_seed"])
        before, after = accuracy(result["accuracy_before"]), accuracy(result["accuracy_after"])
        shown = f"**{row}**" if row == name else f"[{row}](algorithms/README.md)"
        lines.append(f"| {shown} | {before} | {after} | {seeds} | {result['gain_in_standard_errors']:.0f} |")
    return "\n".join(lines)


def page() -> str:
    return INTRODUCTION + "\n" + "\n".join(section(path) for path in CONFIGS)


def test_the_page_says_what_configs_and_results_say():
    assert PAGE.read_text(encoding="utf-8").startswith(page()), "run: python -m tests.objectives.test_new_objectives"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_is_no_algorithm_of_the_table_and_trains_a_step(path, tmp_path, monkeypatch):
    monkeypatch.setattr("atomrl.tracking.reading.plots.draw_curves", lambda *args: None)
    tree = read_yaml(path)
    assert tree["run_name"] == path.stem
    objective = objective_of(tree["algorithm"])
    assert all(objective.axes != known.axes for known in ALGORITHMS.values())
    config = small(str(make_tiny_model(tmp_path / "model", "llama")), tmp_path, tree)
    assert prepare_run(config).execute()["finished"]
    (row,) = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert row["actor/grad_norm"] > 0 and row["training/updates"] == 2


if __name__ == "__main__":
    own = PAGE.read_text(encoding="utf-8").partition("\n## What was seen\n") if PAGE.exists() else ("", "", "")
    PAGE.write_text(page() + "".join(own[1:]), encoding="utf-8")
