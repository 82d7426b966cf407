"""What pages name is there: config keys, and links to a line of code, [`symbol`](path.py#L12).

A few lines beside a definition will do, so that not every edit breaks a page. To set the links right:
python tests/test_pages.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from atomrl.config import known_keys
from atomrl.objective import Objective

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[`(\w+)`\]\(([^)#]+\.py)#L(\d+)\)")
NEAR = 15
PAGES = [page for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if LINK.search(page.read_text("utf-8"))]


def definition(path: Path, symbol: str) -> int | None:
    """The line where a module defines a name; None where it does not."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [ast.unparse(target) for target in targets]
        if symbol in names:
            return node.lineno
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_lines_lead_to_their_definitions(page):
    wrong = []
    for symbol, target, line in LINK.findall(page.read_text(encoding="utf-8")):
        found = definition(page.parent / target, symbol)
        if found is None or abs(found - int(line)) > NEAR:
            wrong.append(f"{symbol} is at {target}:{found}, not {line}")
    assert not wrong, "\n".join([*wrong, "put right with: python tests/test_pages.py"])


def test_there_are_such_links_and_they_can_be_wrong():
    assert {"change_what.md", "how_it_works.md"} <= {page.name for page in PAGES}
    assert definition(ROOT / "atomrl/loop/sync.py", "run_step") and not definition(
        ROOT / "atomrl/stages.py", "run_step"
    )


def config_keys(text: str) -> set[str]:
    """What looks like a key of a config in a text."""
    sections = r"(?:model|data|rollout|reward|algorithm|train|eval|checkpoint|tracking)"
    return set(re.findall(rf"(?<![\w/.-]){sections}\.[a-z_]+(?:\.[a-z_]+)*(?![\w/])", text))


def valid_keys() -> set[str]:
    """Keys of a config, and the axes of an objective with their parameters."""
    axes = {name: axis for name, axis in vars(Objective()).items() if axis is not None}
    parameters = {f"algorithm.{name}.{key}" for name, axis in axes.items() for key in vars(axis)}
    return {*known_keys(), *(f"algorithm.{name}" for name in axes), *parameters}


WITH_KEYS = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "docs/change_what.md",
    *(ROOT / "docs/failures").glob("*.md"),
]


@pytest.mark.parametrize("page", WITH_KEYS, ids=lambda page: page.name)
def test_config_keys_that_pages_name_exist(page):
    text = page.read_text(encoding="utf-8").replace("train.jsonl", "").replace("train.py", "")
    assert config_keys(text) <= valid_keys(), config_keys(text) - valid_keys()


def test_the_chinese_readme_says_the_same():
    """The same commands, links and figures."""
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    for part in (
        r"(?m)^    ((?:\S+ )*?\S+)(?:  +.*)?$",
        r"\]\((docs/[^)]*|examples/[^)]*)\)",
        r"(?m)^\|.*?(\d[\d.]*) \|$",
    ):
        found = re.findall(part, english)
        assert found and found == re.findall(part, chinese)
    figures = r"\d+\.\d+|151,936"
    assert sorted(re.findall(figures, english)) == sorted(re.findall(figures, chinese))


def put_right(page: Path) -> str:
    """The page's text with the lines as they are now."""

    def line(match: re.Match[str]) -> str:
        symbol, target, old = match.groups()
        return f"[`{symbol}`]({target}#L{definition(page.parent / target, symbol) or old})"

    return LINK.sub(line, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(put_right(page), encoding="utf-8")
