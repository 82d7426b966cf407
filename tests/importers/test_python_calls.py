"""What of a Python file is read: literals and what is made of them; nothing that decides the training is lost."""

from pathlib import Path

import pytest

from atomrl.config import ConfigError
from atomrl.importers.translate import import_config


def imported(tmp_path: Path, text: str) -> dict:
    path = tmp_path / "train.py"
    path.write_text(f"{text}\nGRPOTrainer('m')\n")
    return import_config(path, "trl").tree


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("GRPOConfig('out', learning_rate=2e-6 * 2)", 4e-6),
        ("scale = 2\nrate = 2e-6 * scale\nGRPOConfig('out', learning_rate=rate)", 4e-6),
        ("kw = {'learning_rate': 4e-6}\nGRPOConfig('out', **kw)", 4e-6),
        ("GRPOConfig('out', **{'learning_rate': 4e-6})", 4e-6),
        ("a = GRPOConfig('out', learning_rate=1e-6)\na.learning_rate = 4e-6", 4e-6),
        ("def main():\n    a: GRPOConfig = GRPOConfig('out')\n    a.learning_rate = 4e-6", 4e-6),
        ("b = Other()\nb.learning_rate = 1\na = GRPOConfig('out', learning_rate=4e-6)", 4e-6),
        ("def main():\n    GRPOConfig('out', learning_rate=4e-6)\nGRPOConfig('out', learning_rate=1e-6)", 4e-6),
    ],
)
def test_what_is_made_of_literals_is_read(text: str, rate: float, tmp_path: Path) -> None:
    assert imported(tmp_path, text)["train"]["learning_rate"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nGRPOConfig('out', loss_type=os.environ['LOSS'])", r"train.py:2: GRPOConfig\(loss_type=os.environ"),
        ("GRPOConfig('out', num_generations=int(n))", r"train.py:1: GRPOConfig\(num_generations=int\(n\)\)"),
        ("GRPOConfig('out', beta=1 / 0)", r"train.py:1: GRPOConfig\(beta=1 / 0\)"),
        ("GRPOConfig('out', **read())", r"train.py:1: GRPOConfig\(\*\*=\*read\(\)\)"),
        ("a = GRPOConfig('out')\nif x:\n    a.beta = 0.1", "train.py:3: a.beta = 0.1: known only when it runs"),
        ("a = GRPOConfig('out')\na.beta *= 2", r"train.py:2: a.beta \*= 2: known only"),
        ("a = GRPOConfig('out')\nsetattr(a, 'beta', 0.1)", r"train.py:2: setattr\(a, 'beta', 0.1\): known only"),
        ("a = GRPOConfig('out')\nb = dataclasses.replace(a, beta=0.1)", r"train.py:2: dataclasses.replace\(a"),
        ("def f(rate):\n    return GRPOConfig('out', learning_rate=rate)\nrate = 1e-6", "rate=rate is not a number"),
        ("rate = 1e-6\nn, rate = 4, 3e-6\nGRPOConfig('out', learning_rate=rate)", "learning_rate=rate is not a number"),
        ("GRPOConfig('out')\nLoraConfig(r=ranks[0])", r"train.py:2: LoraConfig\(r=ranks\[0\]\)"),
    ],
)  # fmt: skip
def test_what_is_known_only_when_it_runs_is_an_error_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, text)


def test_where_results_go_may_be_known_later(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nGRPOConfig(sys.argv[1], report_to=[t for t in trackers])\nGRPOTrainer('m')")
    said = import_config(path, "trl")
    assert any("train.py:2: GRPOConfig(0=sys.argv[1]) is no literal" in line for line in said.approximated)


def test_files_of_a_data_set_are_its_data(tmp_path: Path) -> None:
    text = "GRPOConfig('out')\nd = load_dataset('json', data_files='rows.jsonl')"
    assert imported(tmp_path, text)["data"]["train"] == "rows.jsonl"
