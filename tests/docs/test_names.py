"""Names on pages exist: config keys, and definitions that they link to, [`symbol`](path.py)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from atomrl.config import known_keys
from tests.config_keys import config_keys

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[`(\w+)`\]\(([^)#]+\.py)(?:#L\d+)?\)")
PAGES = [page for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if LINK.search(page.read_text("utf-8"))]


def definitions(path: Path) -> set[str]:
    """The names that a module defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(ast.unparse(target) for target in targets)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_definitions_lead_to_the_module_that_has_them(page):
    links = [(symbol, page.parent / path) for symbol, path in LINK.findall(page.read_text(encoding="utf-8"))]
    gone = [f"{path} is not there" for _, path in links if not path.is_file()]
    gone += [f"{path} has no {symbol}" for symbol, path in links if path.is_file() and symbol not in definitions(path)]
    assert not gone, f"mend the links of {page.relative_to(ROOT)}:\n" + "\n".join(gone)


def test_pages_that_the_code_names_exist():
    """In messages, docstrings and comments."""
    gone = [
        f"{path.relative_to(ROOT)}: {page}"
        for place in ("atomrl", "examples", "configs")
        for path in (ROOT / place).rglob("*")
        if path.suffix in (".py", ".yaml", ".js")
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8"))
        if not (ROOT / page).is_file()
    ]
    assert not gone, "name another page, or none:\n" + "\n".join(gone)


def test_pages_written_by_hand_link_to_no_line():
    """Lines move with every edit."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*/*.md")]
    linking = [
        str(page.relative_to(ROOT)) for page in pages if re.search(r"\.py#L\d", page.read_text(encoding="utf-8"))
    ]
    assert not linking, f"link to the file, [`symbol`](path.py), without #L: {linking}"


def test_there_are_such_links_and_they_can_be_wrong():
    assert {"customize.md", "training_loop.md"} <= {page.name for page in PAGES}
    there, absent = (definitions(ROOT / path) for path in ("atomrl/trainer/loop.py", "atomrl/types.py"))
    assert "fit" in there and "fit" not in absent


WITH_KEYS = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "docs/guides/customize.md",
    *(ROOT / "docs/guides/troubleshooting").glob("*.md"),
]


@pytest.mark.parametrize("page", WITH_KEYS, ids=lambda page: page.name)
def test_config_keys_that_pages_name_exist(page):
    text = page.read_text(encoding="utf-8").replace("train.jsonl", "").replace("train.py", "")
    wrong = config_keys(text) - set(known_keys())
    assert not wrong, (
        f"{page.relative_to(ROOT)} names keys that docs/reference/config.md does not have: {sorted(wrong)}"
    )


def test_the_chinese_readme_says_the_same():
    """The same commands, links and figures."""
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    for part in (
        r"(?m)^    ((?:\S+ )*?\S+)(?:  +.*)?$",
        r"\]\((docs/[^)]*|examples/[^)]*)\)",
        r"(?m)^\|.*?(\d[\d.]*) \|$",
    ):
        matches = re.findall(part, english)
        assert matches and matches == re.findall(part, chinese), "change README.md and README.zh-CN.md together"
    figures = r"\d+\.\d+|151,936"
    same = sorted(re.findall(figures, english)) == sorted(re.findall(figures, chinese))
    assert same, "change the figures of README.md and README.zh-CN.md together"
