"""The pages of the methods that learn from preferences say what the code does. To write their generated parts anew:

python -m tests.algorithms.test_preference_pages
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from atomrl.algorithms import PREFERENCES
from atomrl.cli.main import main
from atomrl.config import read_yaml
from atomrl.objectives import PreferenceObjective, Setting
from atomrl.objectives.explain import equation, latex
from tests.algorithms.test_pages import cell, opening

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "reference" / "algorithms"
WRITE = "python -m tests.algorithms.test_preference_pages"
MODULES = {
    **dict.fromkeys(("cdpo", "robust_dpo", "dpo_norm", "ld_dpo", "rpo", "mpo"), "dpo"),
    **dict.fromkeys(("hinge_dpo", "ipo", "exo", "nca", "sppo", "bco_pair", "aot", "aot_unpaired"), "dpo_losses"),
    **dict.fromkeys(("apo_zero", "apo_down", "discopop"), "dpo_losses"),
    **dict.fromkeys(("bco", "apo_zero_unpaired"), "kto"),
    "cpo": "simpo",
}
"""Algorithm -> its file and page, where they have another name."""


def module(name: str) -> str:
    return MODULES.get(name, name)


def axes_table() -> str:
    rows = ["| method | score | loss | nll | learns from |", "|---|---|---|---|---|"]
    for name, objective in PREFERENCES.items():
        losses = ", ".join(cell((loss,)) for loss in objective.losses)
        data = "rollouts" if objective.online else "labels, pairs" if objective.unpaired else "pairs"
        nll = cell(objective.used_axes()["nll"])
        rows.append(f"| [{name}]({module(name)}.md) | {cell((objective.score,))} | {losses} | {nll} | {data} |")
    return "\n".join(rows)


def generated(name: str) -> str:
    """The part of a page that is one method's: equation, config, how to run it."""
    config = (ROOT / "configs" / "algorithms" / f"{name}.yaml").read_text(encoding="utf-8")
    block = re.search(r"^algorithm:\n(?:  .*\n)+", config, re.MULTILINE)
    assert block is not None
    return f"""## `{name}`

```math
{latex(PREFERENCES[name])}
```

Defined as [`{name.upper()}`](../../../atomrl/algorithms/{module(name)}.py) and used in
[`configs/algorithms/{name}.yaml`](../../../configs/algorithms/{name}.yaml):

```yaml
{block[0].rstrip()}
```

    atomrl explain configs/algorithms/{name}.yaml
    atomrl train configs/algorithms/{name}.yaml
"""


def page(stem: str) -> str:
    names = [name for name in PREFERENCES if module(name) == stem]
    measured = "Results: [benchmarks](../../development/benchmarks.md#learning-from-preferences). Data and commands:\n"
    measured += "[preference optimization](../../guides/preference_optimization.md).\n"
    return opening(stem) + "\n".join(generated(name) for name in names) + f"\n{measured}"


@pytest.mark.parametrize("stem", sorted({module(name) for name in PREFERENCES}))
def test_pages_say_what_the_code_says(stem):
    text = (DOCS / f"{stem}.md").read_text(encoding="utf-8")
    assert text.startswith(page(stem)), f"run: {WRITE} (it writes {stem}.md)"


def test_the_table_has_every_method():
    shown = axes_table() in (DOCS / "README.md").read_text(encoding="utf-8")
    assert shown, f"run: {WRITE} (it writes the table in README.md)"


@pytest.mark.parametrize("name", PREFERENCES)
def test_four_hops_from_a_config_to_the_line_of_the_equation(name):
    """config -> record -> function of the axis -> atom."""
    config = read_yaml(ROOT / "configs" / "algorithms" / f"{name}.yaml")
    record = importlib.import_module(f"atomrl.algorithms.{module(name)}")
    objective = vars(record)[config["algorithm"]["name"].upper()]
    assert objective is PREFERENCES[name] and config["run_name"] == name
    atoms = objective.losses[0].atoms()
    assert atoms and all(atom.__module__.startswith("atomrl.atoms.") for atom in atoms)


def test_an_equation_of_several_losses():
    objective = PREFERENCES["mpo"].override({"score": {"length_normalised": True, "divergence": "js_divergence"}})
    assert equation(objective).splitlines()[0] == "minimise  mean over pairs of [ 0.8 L1 + 0.2 L2 + 1 NLL ]"
    assert "  L2 = -log sigmoid(beta s_c - delta) - log sigmoid(delta - beta s_r)" in equation(objective)
    assert "  s <- f'(exp(s)) of the js_divergence\n  s <- s / |y|" in equation(objective)
    assert latex(objective).count(r"\\") == 6


CASES = {
    "note: only margins count": {},
    "no effect: with label_smoothing=0.5": {"loss": {"label_smoothing": 0.5}},
    "biased: label_smoothing above 0.5": {"loss": {"label_smoothing": 0.7}},
    "no effect: with beta=0": {"loss": {"beta": 0.0}},
    "biased: the sum of log-probs": {"score": "logprob"},
    "unstable: no reference": {"score": {"type": "logprob", "length_normalised": True}},
    "note: target_margin is from SimPO": {"loss": {"target_margin": 0.5}},
    "partly without effect: margins per token": {"score": {"length_normalised": True}},
    "note: ranks are computed per step": {"loss": "aot"},
    "note: a frozen copy of the start": {},
}


def warnings(objective):
    return list(objective.warnings(Setting(axes=objective.axes)))


@pytest.mark.parametrize("said", CASES)
def test_each_warning_is_of_its_case_and_not_of_a_sound_objective(said):
    messages = warnings(PreferenceObjective().override(CASES[said]))
    assert sum(message.startswith(said) for message in messages) == 1, messages
    assert warnings(PREFERENCES["orpo"]) == []


def test_explain_prints_equation_sources_and_warnings(capsys):
    config = str(ROOT / "configs" / "algorithms" / "dpo.yaml")
    assert main(["explain", config, "algorithm.loss.label_smoothing=0.5"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("dpo: minimise  mean over pairs of L") and "label_smoothing=0.5*" in shown
    assert "dpo_loss  atomrl/atoms/preference_losses.py:" in shown and "! no effect: with label_smoothing" in shown
    assert main(["explain", config, "--latex"]) == 0
    assert capsys.readouterr().out.startswith("\\begin{aligned}")
    assert main(["explain", config, "algorithm.loss.bta=1"]) == 2
    assert "did you mean 'beta'" in capsys.readouterr().err


def write() -> None:
    for stem in {module(name) for name in PREFERENCES}:
        path = DOCS / f"{stem}.md"
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        own = old.partition("\n## Notes\n")
        path.write_text(page(stem) + "".join(own[1:]), encoding="utf-8")
    index = DOCS / "README.md"
    text = index.read_text(encoding="utf-8")
    new = axes_table() + "\n"
    index.write_text(re.sub(r"\| method \|.*?\n(?=\n|\Z)", lambda _: new, text, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    write()
