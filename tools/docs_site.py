"""MkDocs hooks: folders in the navigation, links to files outside of docs/, and examples in docstrings."""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe

from atomrl.atoms.catalog import parsed_source

LINK = re.compile(r"\[(?P<text>[^\]\n]*(?:\n[^\]\n]*)?)\]\((?P<target>[^)\s]+)\)")
log = logging.getLogger("mkdocs.plugins.docs_site")


def on_config(config: Any) -> Any:
    """Replace each folder in the navigation by its pages, README first."""
    config.nav = [_expanded(entry, Path(config.docs_dir)) for entry in config.nav]
    return config


def _expanded(entry: Any, docs: Path) -> Any:
    if isinstance(entry, list):
        return [_expanded(item, docs) for item in entry]
    if isinstance(entry, dict):
        return {title: _expanded(item, docs) for title, item in entry.items()}
    if not (docs / entry).is_dir():
        return entry
    pages = sorted((docs / entry).glob("*.md"), key=lambda page: (page.stem != "README", page.stem))
    return [page.relative_to(docs).as_posix() for page in pages]


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links to source files lead to the repository, or be plain text where mkdocs.yml has no `repo_url`."""
    root = Path(config.config_file_path).parent

    def replaced(match: re.Match[str]) -> str:
        path, _, anchor = match["target"].partition("#")
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), path))
        if "://" in path or not path or place.startswith("docs/"):
            return match[0]
        if not (root / place).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, match["target"])
        if not config.repo_url:
            return match["text"]
        return f"[{match['text']}]({config.repo_url.rstrip('/')}/blob/main/{place}{'#' + anchor if anchor else ''})"

    return LINK.sub(replaced, markdown)


class Examples(griffe.Extension):
    """Add equation and paper to docstrings of atoms, and rename `Example:` to griffe's `Examples:`."""

    def on_function_instance(self, *, node: Any, func: griffe.Function, **_: Any) -> None:
        if isinstance(node, ast.FunctionDef) and func.docstring and (source := parsed_source(node)):
            func.docstring.value = source.insert(func.docstring.value)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
