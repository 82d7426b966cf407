"""Every text of the pages has a Chinese translation, and curves hold numbers that a browser can draw."""

import re
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest

from atomrl.tracking.doctor import RULES
from atomrl.tracking.reading.metrics import MetricTable


def test_every_rule_has_its_words_in_chinese():
    source = (files("atomrl") / "tools/ui/static/findings.js").read_text(encoding="utf-8")
    entries = re.findall(r'^  (\w+): \[("[^"]+", "[^"]+", "[^"]+")\],$', source, re.MULTILINE)
    differing = {name for name, _ in entries} ^ {rule.id for rule in RULES}
    assert not differing, f"static/findings.js needs an entry per rule of the doctor: {sorted(differing)}"
    assert all(len(re.findall(r"[\u4e00-\u9fff]", words)) > 10 for _, words in entries)


def test_a_value_beyond_float32_is_drawn_at_its_end():
    packed = pytest.importorskip("atomrl.tools.ui.catalog", reason="the extra `ui` is not installed").packed
    table = MetricTable()
    table.extend([{"step": step, "norm": value} for step, value in enumerate((1e300, -1e300, 2.0))])
    about, body = packed(SimpleNamespace(metrics=table), table, ["norm"], 10, 0, 9)
    assert (about["names"], about["count"]) == (["norm"], 3)
    assert np.frombuffer(body, "<f4")[-3:].tolist() == [np.finfo("f4").max, np.finfo("f4").min, 2.0]
