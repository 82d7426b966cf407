"""The pages of `docs/` in a checkout, parsed to trees from which the browser builds its elements.

An installed package has none of them; requests then answer where they are.

A tree is a text, or `[tag, attributes, children]`. Tags are those of `TAGS`; the only attributes are `href` (to another
page or an http address) and the `id` of a heading or an anchor `<a id="...">`. Other HTML is dropped.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

import atomrl

TAGS = {
    "paragraph": "p", "bullet_list": "ul", "ordered_list": "ol", "list_item": "li", "blockquote": "blockquote",
    "strong": "strong", "em": "em", "hr": "hr", "table": "table", "thead": "thead", "tbody": "tbody", "tr": "tr",
    "th": "th", "td": "td", "hardbreak": "br",
}  # fmt: skip
TEXTS = {"fence": "pre", "code_block": "pre", "code_inline": "code"}
"""Tags that contain only text."""
DEEPEST = 4
"""Deepest level of headings."""
SECTIONS = ("", "start", "guides", "concepts", "reference", "development")
"""Folders in the order of the site; others come last."""
GENERATED = "reference/api/"
"""Pages that the site's generator writes from docstrings; they are left out."""
CHECKOUT = Path(atomrl.__file__).parents[1]
ABSENT = "the installed package has no documentation: see docs/ in the repository of AtomRL"
Tree = str | list[Any]


class Manual:
    """The pages by name, such as `guides/troubleshooting/length_limit`.

    Example:
        >>> manual = Manual()
        >>> manual.title("guides/troubleshooting/length_limit")
        'Completions are cut at the limit'
        >>> manual.tree("guides/troubleshooting/length_limit")[0]
        ['h1', {'id': 'completions-are-cut-at-the-limit'}, ['Completions are cut at the limit']]
    """

    def __init__(self, checkout: Path = CHECKOUT) -> None:
        folder = checkout / "docs"
        paths = folder.rglob("*.md") if (checkout / "mkdocs.yml").is_file() else ()
        pages = {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}
        self.pages = {name: path for name, path in pages.items() if not name.startswith(GENERATED)}

    def titles(self) -> dict[str, str]:
        """Return the title of each page, by name; a folder's pages follow its `README`."""
        return {name: self.title(name) for name in sorted(self.pages, key=_order)}

    def title(self, name: str) -> str:
        """Return a page's first heading."""
        name = name if name in self.pages else f"{name}/README"
        first = next((line for line in self._text(name).splitlines() if line.startswith("# ")), f"# {name}")
        return first[2:].replace("`", "")

    def tree(self, name: str) -> list[Tree]:
        """Return the trees of a page; a folder's page is its `README`.

        Raises:
            LookupError: no such page.
        """
        name = name if name in self.pages else f"{name}/README"
        parsed = MarkdownIt("commonmark").enable("table").parse(self._text(name))
        return list(self._children(SyntaxTreeNode(parsed), name))

    def _text(self, name: str) -> str:
        if name not in self.pages:
            raise LookupError("no such page" if self.pages else ABSENT)
        return self.pages[name].read_text(encoding="utf-8")

    def _children(self, node: SyntaxTreeNode, page: str) -> Iterator[Tree]:
        for child in node.children:
            yield from self._drawn(child, page)

    def _drawn(self, node: SyntaxTreeNode, page: str) -> Iterator[Tree]:
        kind = node.type
        if kind == "text":
            yield node.content
        elif kind == "softbreak":
            yield " "
        elif kind in TEXTS:
            yield [TEXTS[kind], {}, [node.content.rstrip("\n")]]
        elif kind == "inline":
            yield from self._children(node, page)
        elif kind == "heading":
            within = list(self._children(node, page))
            yield [f"h{min(DEEPEST, int(node.tag[1:]))}", {"id": anchor(_plain(within))}, within]
        elif kind == "link":
            target = self._target(str(node.attrs.get("href", "")), page)
            within = list(self._children(node, page))
            yield from within if target is None else [["a", {"href": target}, within]]
        elif kind == "html_inline" and (match := re.fullmatch(r'<a id="([\w-]+)">', node.content)):
            yield ["a", {"id": match[1]}, []]
        elif kind == "image":
            yield node.content
        elif kind in TAGS:
            yield [TAGS[kind], {}, list(self._children(node, page))]

    def _target(self, link: str, page: str) -> str | None:
        """Return the browser's address of a link; None if it leads neither to a page nor to http."""
        if link.startswith(("https://", "http://")):
            return link
        path, _, at = link.partition("#")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), path.removesuffix(".md"))) if path else page
        if name not in self.pages or ":" in link:
            return None
        return f"#/docs/{name}" + (f"?at={at}" if re.fullmatch(r"[\w-]+", at) else "")


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it.

    Example:
        >>> anchor("Gradients that are not finite"), anchor("`atomrl eval`, again")
        ('gradients-that-are-not-finite', 'atomrl-eval-again')
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _plain(trees: list[Tree]) -> str:
    return "".join(tree if isinstance(tree, str) else _plain(tree[2]) for tree in trees)


def _order(name: str) -> tuple[int, str, bool, str]:
    folder, _, last = name.rpartition("/")
    section = folder.partition("/")[0]
    return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS), folder, last != "README", last
