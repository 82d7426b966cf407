"""Statements of the documentation and of docstrings that the code can answer: keys, file names, members."""

import re
from pathlib import Path
from typing import Protocol

from atomrl.config import known_keys
from atomrl.objectives import PolicyObjective, PreferenceObjective
from atomrl.protocols import Algorithm

ROOT = Path(__file__).parents[2]
PAGES = [page for page in ROOT.glob("docs/**/*.md") if page.name != "log.md"]
KEY = re.compile(r"`((?:[a-z_]+\.)+[a-z_0-9]+)(?:=[^`]*)?`")
LINK = re.compile(r"\[`?([\w/.-]+\.(?:py|yaml|md|json|ipynb))`?\]\(([^)#]+)")


def test_keys_in_the_pages_of_algorithms_are_keys_of_a_config():
    known, axes = {*known_keys()}, {*PolicyObjective.model_fields, *PreferenceObjective.model_fields}
    sections = {key.partition(".")[0] for key in known}
    sources = [*ROOT.glob("atomrl/algorithms/*.py"), *ROOT.glob("docs/reference/algorithms/*.md")]
    wrong = [
        (source.name, key)
        for source in sources
        for key in KEY.findall(source.read_text(encoding="utf-8"))
        if key.partition(".")[0] in sections | axes and not {key, f"algorithm.{key}"} & known
    ]
    assert not wrong, f"mend these in the page or the docstring; `atomrl explain` has the fields of an axis: {wrong}"


def test_links_are_named_as_the_files_that_they_lead_to():
    links = [(page.name, *link) for page in PAGES for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert len(links) > 20
    wrong = [link for link in links if Path(link[1]).name != Path(link[2]).name]
    assert not wrong, f"name each link as the file that it leads to (page, name, target): {wrong}"


def test_the_design_lists_the_members_of_an_algorithm():
    table = (ROOT / "docs/development/design.md").read_text(encoding="utf-8").partition("| member of an algorithm ")[2]
    listed = re.findall(r"^\| `(\w+)", table.partition("\n\n")[0], re.MULTILINE)
    members = [name for name in vars(Algorithm) if not name.startswith("_") and name not in vars(Protocol)]
    differing = sorted({*listed} ^ {*members})
    assert not differing, f"mend the table of members in docs/development/design.md: {differing}"
