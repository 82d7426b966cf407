"""Write the pages that describe the keys of a config from the docstrings of its schema.

make keys

It writes the tables of docs/reference/config.md, and keys.json, with which the page New run opens at once (the schema
itself needs torch). It also removes Chinese texts of keys that are gone, and lists the keys that have none: the page
shows these in English.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from atomrl.algorithms import ALGORITHMS, PREFERENCES, objective_of
from atomrl.config import RewardItem, RunConfig
from atomrl.objectives import PolicyObjective, PreferenceObjective
from atomrl.objectives.overrides import choices_of

ROOT = Path(__file__).parents[1]
FILE = ROOT / "atomrl" / "tools" / "ui" / "static" / "keys.json"
CHINESE = FILE.with_name("keys_zh.json")
PAGE = ROOT / "docs" / "reference" / "config.md"
BEGIN = "<!-- generated from atomrl/config/schema.py by `make keys` -->"
END = "<!-- end of the generated part -->"
HEAD = ["| key | default | meaning |", "|---|---|---|"]
VALUES = {
    "null", "true", "auto", "truncate", "error", "kept", "colocated", "native", "llama", "tensorboard", "runs", "max",
    "fsdp",
}  # fmt: skip
"""Words with which a description begins that are a key's value, and stay as they are."""
BOUNDS = {"ge": "least", "gt": "above", "le": "most", "lt": "below"}
KINDS = {bool: "boolean", int: "integer", float: "number", str: "text"}
Item = dict[str, Any]
"""A key: its name, kind, default, choices, bounds and `about`, its docstring."""


def all_keys() -> list[Item]:
    """All keys of a config in the order of its schema, and those of an algorithm's axes."""
    found = [*_section(RunConfig, ""), *_axes()]
    order = list(RunConfig.model_fields)
    return sorted(found, key=lambda item: order.index(item["key"].partition(".")[0]))


def _section(section: type[BaseModel], prefix: str) -> list[Item]:
    found, said = [], docstrings(section)
    for name, field in section.model_fields.items():
        key = prefix + name
        if key == "algorithm":
            continue
        inner = _sections_in(field)
        if inner and get_origin(field.annotation) not in (list, tuple, dict):
            off = {"off": True} if field.default is None else {}
            own = inspect.getdoc(inner[0]) or "" if len(inner) == 1 else said.get(name, "")
            about = said.get(name) or own.split("\n\n")[0].replace("\n", " ")
            found.append({"key": key, "kind": "section", **off, "about": about})
            found += _merged([_section(kind, f"{key}.") for kind in inner])
        else:
            items = _merged([_section(kind, f"{key}.{_of_each(field)}") for kind in inner]) if inner else []
            found.append({"key": key, **kind_of(field), "about": said.get(name, ""), "items": items})
    return found


def _of_each(field: FieldInfo) -> str:
    """Part of a key that the user chooses, in a section with one section per name."""
    return "NAME." if get_origin(field.annotation) is dict else ""


def _sections_in(field: FieldInfo) -> list[type[BaseModel]]:
    """Sections that a field, or an item of it, can be."""
    parts = [field.annotation, *get_args(field.annotation)]
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _merged(kinds: list[list[Item]]) -> list[Item]:
    """The keys of all kinds of a section, which `type` tells apart; `only` names the one type that has a key."""
    if len(kinds) == 1:
        return kinds[0]
    types = {item["choices"][0]: kind for kind in kinds for item in kind if item["key"].endswith(".type")}
    found: dict[str, Item] = {}
    for item in (item for kind in kinds for item in kind):
        if item["key"] in found and item["key"].endswith(".type"):
            item = item | {"choices": [*found[item["key"]]["choices"], *item["choices"]]}
        having = {name: one["about"] for name, kind in types.items() for one in kind if one["key"] == item["key"]}
        about = item["about"]
        if len({*having.values()}) > 1:
            about = " ".join(f"`{name}`: {own[:1].lower()}{own[1:]}" for name, own in having.items())
        found[item["key"]] = item | {"about": about} | ({"only": min(having)} if len(having) == 1 else {})
    return sorted(found.values(), key=lambda item: not item["key"].endswith(".type"))


def _axes() -> list[Item]:
    """The name of the algorithm, and the axes of both kinds of objectives with the fields of all their types."""
    about = "Name of the algorithm; further keys change its axes (docs/reference/algorithms/README.md)."
    names = sorted([*ALGORITHMS, *PREFERENCES])
    section = {"key": "algorithm", "kind": "section", "about": "The objective, and its axes."}
    found = [section, {"key": "algorithm.name", "kind": "choice", "choices": names, "default": "grpo", "about": about}]
    for objective, name in ((PolicyObjective, "grpo"), (PreferenceObjective, "dpo")):
        tree = objective_of({"name": name}).model_dump(by_alias=True)
        for name, field in objective.model_fields.items():
            kinds = choices_of(field.annotation)
            if not kinds:
                continue
            key = f"algorithm.{field.alias or name}"
            off = next((item.name for item in field.metadata if hasattr(item, "name")), None)
            if len(kinds) > 1 or off:
                types = {
                    kind: [(inspect.getdoc(c) or "").partition("\n")[0].replace("`", ""), c.text]
                    for kind, c in kinds.items()
                }
                choices = {"choices": [*([off] if off else []), *types], "types": types}
                value = tree[field.alias or name]
                value = value[0] if isinstance(value, list | tuple) and value else value  # a sum of losses
                default = value["type"] if isinstance(value, dict) and "type" in value else off
                found.append({"key": f"{key}.type", "kind": "choice", **choices, "of_default": default, "about": ""})
            fields = {field: (kind, info) for kind in kinds.values() for field, info in kind.model_fields.items()}
            for field_name, (kind, info) in fields.items():
                of = [one for one, choice in kinds.items() if field_name in choice.model_fields]
                item = {"key": f"{key}.{field_name}", **kind_of(info), "of": of}
                if len({repr(kinds[one].model_fields[field_name].default) for one in of}) > 1:
                    del item["default"]  # each type has its own
                found.append(item | {"about": docstrings(kind).get(field_name, "")})
    return list({item["key"]: item for item in found}.values())


def kind_of(field: FieldInfo) -> dict[str, Any]:
    """Kind, choices, bounds and default of a field, as the page takes them."""
    own = get_origin(field.annotation) in (list, tuple, dict, Literal)
    parts = [field.annotation] if own else [*(get_args(field.annotation) or [field.annotation])]
    parts = [part for part in parts if part is not NoneType]
    words = [word for part in parts if len(parts) > 1 and get_origin(part) is Literal for word in get_args(part)]
    parts = [part for part in parts if not words or get_origin(part) is not Literal]
    whole, bounds = parts[0], list(field.metadata)
    if get_origin(whole) is Annotated:  # a number with bounds, or null
        whole, *more = get_args(whole)
        bounds += more
    found: dict[str, Any]
    if get_origin(whole) is Literal:
        found = {"kind": "choice", "choices": list(get_args(whole))}
    elif len(parts) > 1:
        found = {"kind": "yaml"}
    else:
        found = {"kind": KINDS.get(whole, "list" if get_origin(whole) in (list, tuple) else "yaml")}
    if words and found["kind"] == "boolean":
        found = {"kind": "choice", "choices": [*words, "true", "false"]}
    elif words:
        found["words"] = words
    for item in bounds:
        found |= {name: getattr(item, bound) for bound, name in BOUNDS.items() if hasattr(item, bound)}
        if getattr(item, "pattern", None):
            found["pattern"] = item.pattern
    if field.default is PydanticUndefined:
        found["required"] = True
    else:
        default = field.default
        found["default"] = list(default) if isinstance(default, tuple) else default
    if isinstance(found.get("default"), list):  # of rewards
        found["default"] = [item.function if isinstance(item, RewardItem) else item for item in found["default"]]
    return found


def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a class, on one line."""
    bases = [base for base in reversed(section.__mro__) if issubclass(base, BaseModel) and base is not BaseModel]
    return {name: about for base in bases for name, about in _own_docstrings(base).items()}


@cache
def _own_docstrings(section: type[BaseModel]) -> dict[str, str]:
    """`docstrings` of the fields that the class itself adds."""
    found: dict[str, str] = {}
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    for one, following in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            continue
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            found[one.target.id] = " ".join(str(following.value.value).split())
    return found


def for_the_page(items: list[Item]) -> list[Item]:
    """Items with descriptions without marks, as keys.json has them."""
    own = {"about", "items", "only", "of_default"}
    hidden = {False: own, True: own | {"default", "required"}}  # a type's form begins empty
    return [{n: item[n] for n in item if n not in hidden["of" in item]} | _plain(item["about"]) for item in items]


def _plain(text: str) -> dict[str, str]:
    """A description as a sentence without its end; null is what YAML calls None."""
    plain = re.sub(r"\bNone\b", "null", text.replace("`", "")).strip().removesuffix(".")
    word = re.match(r"[a-z]+", plain)
    named = word is None or word[0] in VALUES
    return {"about": plain if named else plain[:1].upper() + plain[1:]} if plain else {}


def page() -> str:
    """The reference page: its text with the tables of all keys between the marks."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return head + BEGIN + "\n\n" + "\n".join(_tables()) + "\n" + END + rest.partition(END)[2]


def _tables() -> list[str]:
    """A heading and a table for each section, in the order of the schema."""
    sections: dict[str, list[str]] = {"": ["### Top level", "", *HEAD]}
    for item in all_keys():
        key = item["key"]
        if item["kind"] == "section":
            about = item["about"] + (" Off unless the config has this section." if item.get("off") else "")
            sections[key] = [f"### {key}", "", _linked(about), "", *HEAD]
            continue
        section = max((name for name in sections if key.startswith(f"{name}.")), key=len, default="")
        sections[section].append(_row(item))
        if item.get("items"):
            sections[key] = [f"### {key}", "", f"Keys of each item of `{key}`.", "", *HEAD, *map(_row, item["items"])]
    return [line for lines in sections.values() if lines[-1] != HEAD[-1] for line in [*lines, ""]]


def _row(item: dict[str, Any]) -> str:
    defaults = [f"`{_yaml(item[name])}`" for name in ("default", "of_default") if name in item]
    default = "required" if item.get("required") else "".join(defaults)
    about, values = item["about"], [f"`{value}`" for value in item.get("choices", ())]
    if not all(value in about for value in values):
        about = f"{about} One of {', '.join(values)}.".strip()
    if "of" in item and not item["about"]:
        about = f"{about} Of type {', '.join(f'`{name}`' for name in item['of'])}.".strip()
    about += f" Only `{item['only']}`." if "only" in item else ""
    return f"| `{item['key']}` | {default} | {_linked(about)} |"


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
    return (
        json.dumps(value) if isinstance(value, str) and "\n" in value else text.removesuffix("\n").removesuffix("\n...")
    )


def _linked(text: str) -> str:
    """Text of a docstring for a table of docs/reference, with links to the pages that it names."""

    def link(match: re.Match[str]) -> str:
        *folders, name = match[1].split("/")
        return f"[{(name if name != 'README' else folders[-1]).replace('_', ' ')}](../{match[1]}.md)"

    return re.sub(r"\bdocs/([\w/]+)\.md", link, text).replace("../reference/", "").replace("|", "\\|")


def untranslated() -> tuple[list[str], list[str]]:
    """Descriptions without a Chinese text, and Chinese texts of keys that are gone."""
    described = {item["key"]: item["about"] for item in all_keys()}
    described |= {f"{item['key']}={name}": name for item in all_keys() for name in item.get("types", ())}
    chinese = json.loads(CHINESE.read_text(encoding="utf-8"))
    missing = sorted(key for key, about in described.items() if about and key not in chinese)
    return missing, sorted(chinese.keys() - described.keys())


def _lines(items: Iterator[str], ends: str) -> str:
    return f"{ends[0]}\n" + ",\n".join(items) + f"\n{ends[1]}\n"


def json_text() -> str:
    """The text of keys.json."""
    return _lines((json.dumps(item, ensure_ascii=False) for item in for_the_page(all_keys())), "[]")


def main() -> None:
    """Write the files, and print the keys without a Chinese text."""
    FILE.write_text(json_text(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    missing, gone = untranslated()
    chinese = json.loads(CHINESE.read_text(encoding="utf-8"))
    kept = (key for key in chinese if key not in gone)
    lines = (f"{json.dumps(key)}: {json.dumps(chinese[key], ensure_ascii=False)}" for key in kept)
    CHINESE.write_text(_lines(lines, "{}"), encoding="utf-8")
    if missing:
        print(f"without a Chinese text in {CHINESE.relative_to(ROOT)} (the page shows English):", *missing, sep="\n  ")


if __name__ == "__main__":
    main()
