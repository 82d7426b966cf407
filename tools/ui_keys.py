"""Write what the page New run knows of each key of a config: its type, bounds, choices, default and description.

python tools/ui_keys.py

The page opens with it at once, where the schema itself needs torch. Descriptions are the docstrings of the schema and,
where a key has none, its comment in docs/reference/config.md.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from atomrl.algorithms import ALGORITHMS, PREFERENCES
from atomrl.config import RewardItem, RunConfig
from atomrl.objectives import PolicyObjective, PreferenceObjective
from atomrl.objectives.base import choices_of

ROOT = Path(__file__).parents[1]
FILE = ROOT / "atomrl" / "tools" / "ui" / "static" / "keys.json"
VALUES = {
    "null", "true", "auto", "truncate", "error", "kept", "colocated", "native", "llama", "tensorboard", "runs", "max",
}  # fmt: skip
"""Words with which a description begins that are a key's value, and stay as they are."""
BOUNDS = {"ge": "least", "gt": "above", "le": "most", "lt": "below"}
KINDS = {bool: "boolean", int: "integer", float: "number", str: "text"}


def keys() -> list[dict[str, Any]]:
    """All keys of a config in the order of its schema, and those of an algorithm's axes."""
    comments = documented((ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8"))
    found = [*_section(RunConfig, "", comments), *_axes(comments)]
    order = list(RunConfig.model_fields)
    return sorted(found, key=lambda item: order.index(item["key"].partition(".")[0]))


def _section(section: type[BaseModel], prefix: str, comments: dict[str, str]) -> list[dict[str, Any]]:
    found, said = [], docstrings(section)
    for name, field in section.model_fields.items():
        key = prefix + name
        if key == "algorithm":
            continue
        parts = [field.annotation, *(get_args(field.annotation) if get_origin(field.annotation) is not dict else ())]
        inner = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        if inner and get_origin(field.annotation) not in (list, tuple):
            off = {"off": True} if field.default is None else {}
            own = inspect.getdoc(inner[0]) or "" if len(inner) == 1 else said.get(name, "")
            found.append(
                {"key": key, "kind": "section", **off}
                | _about(said.get(name) or own.split("\n\n")[0].replace("\n", " "))
            )
            found += _merged([_section(kind, f"{key}.", comments) for kind in inner])
            continue
        found.append({"key": key, **kind_of(field)} | _about(said.get(name) or comments.get(key)))
    return found


def _merged(kinds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The keys of all kinds of a section; what tells them apart is a choice of all."""
    found: dict[str, dict[str, Any]] = {}
    for item in (item for kind in kinds for item in kind):
        if item["key"] in found and item["kind"] == "choice" and item.get("required"):
            item = item | {"choices": [*found[item["key"]]["choices"], *item["choices"]]}
        found[item["key"]] = found.get(item["key"], {}) | item if item.get("required") else found.get(item["key"], item)
    return sorted(found.values(), key=lambda item: not (item.get("required") and item["kind"] == "choice"))


def _axes(comments: dict[str, str]) -> list[dict[str, Any]]:
    """The name of the algorithm, and the axes of both kinds of objectives with the fields of all their types."""
    about = "Name of the algorithm; further keys change its axes (docs/reference/algorithms/README.md)"
    names = sorted([*ALGORITHMS, *PREFERENCES])
    section = {"key": "algorithm", "kind": "section", "about": "The objective, and its axes"}
    found = [section, {"key": "algorithm.name", "kind": "choice", "choices": names, "default": "grpo", "about": about}]
    for objective in (PolicyObjective, PreferenceObjective):
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
                found.append({"key": f"{key}.type", "kind": "choice", **choices})
            fields = {field: (kind, info) for kind in kinds.values() for field, info in kind.model_fields.items()}
            for field_name, (kind, info) in fields.items():
                of = [one for one, choice in kinds.items() if field_name in choice.model_fields]
                said = docstrings(kind).get(field_name) or comments.get(f"{key}.{field_name}")
                shown = {name: value for name, value in kind_of(info).items() if name not in ("default", "required")}
                found.append({"key": f"{key}.{field_name}", **shown, "of": of} | _about(said))
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
    """What stands below each field of a class, on a line."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for one, following in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
                continue
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found[one.target.id] = " ".join(str(following.value.value).split())
    return found


def documented(page: str) -> dict[str, str]:
    """The comment of each key in the blocks of docs/reference/config.md, with the lines on which it goes on."""
    found: dict[str, str] = {}
    for block in page.split("```yaml\n")[1:]:
        text = block.split("```")[0]
        lines = text.splitlines()
        for key, line in places(yaml.compose(text), ""):
            said = re.search(r"\s# ?(.*)$", lines[line])
            words = [said[1]] if said else []
            for more in lines[line + 1 :]:
                if not words or not more.lstrip().startswith("#"):
                    break
                words.append(more.strip(" #"))
            if words:
                found.setdefault(key, " ".join(words))
    return found


def places(node: Any, prefix: str) -> list[tuple[str, int]]:
    """Every key of a YAML document with dots, and its line."""
    found = []
    block = isinstance(node, yaml.MappingNode) and not node.flow_style  # a line of several keys is about none of them
    for key, value in node.value if block else ():
        name = f"{prefix}{key.value}"
        found += [(name, key.start_mark.line), *places(value, f"{name}.")]
    return found


def _about(text: str | None) -> dict[str, str]:
    """As a sentence without its end; null is what YAML calls None."""
    plain = re.sub(r"\bNone\b", "null", (text or "").replace("`", "")).strip().removesuffix(".")
    word = re.match(r"[a-z]+", plain)
    named = word is None or word[0] in VALUES
    return {"about": plain if named else plain[:1].upper() + plain[1:]} if plain else {}


def main() -> None:
    """Write the file."""
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in keys())
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
