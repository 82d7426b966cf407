"""The keys of a config, and the valid key that was meant by an unknown one, also by its name in other libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from atomrl.common.errors import nearest
from atomrl.config.run import RunConfig
from atomrl.objectives.choice import Choice


def known_keys(section: type[BaseModel] | None = None, prefix: str = "") -> list[str]:
    """List all dotted keys of a config, each section before its keys."""
    keys = [f"{prefix}type"] if section is not None and issubclass(section, Choice) else []
    for name, info in (section or RunConfig).model_fields.items():
        keys.append(prefix + name)
        parts = () if get_origin(info.annotation) is dict else get_args(info.annotation)  # the user names keys of dicts
        for kind in (info.annotation, *parts):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))  # kinds of a section share some


@cache
def foreign_table() -> dict[str, Any]:
    """Read `foreign_names.yaml`: `sections` of verl, and `keys` with their names in other libraries."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("foreign_names.yaml").read_text(encoding="utf-8"))
    return table


def foreign_names() -> dict[str, tuple[str, str]]:
    """Map names of TRL, verl and OpenRLHF to (key here, note on a different unit or "")."""
    return {name: key.partition(" ")[::2] for key, names in foreign_table()["keys"].items() for name in names}


def suggestion(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """Suggest a valid key for an unknown one; None if no key is similar.

    Args:
        path: parts of the unknown key.
        keys: all valid dotted keys.

    Example:
        >>> suggestion(["data", "train_batch_size"], ["rollout.prompts_per_step", "data.train_size"])
        "did you mean 'rollout.prompts_per_step' (prompts in a step, as in verl; OpenRLHF's is train.rows_per_update)?"
        >>> suggestion(["critic", "lr"], ["train.learning_rate", "critic.learning_rate"])
        "did you mean 'critic.learning_rate'?"
        >>> suggestion(["train", "stepz"], ["train.steps", "eval.every_steps"])
        "did you mean 'train.steps'?"
        >>> suggestion(["reward", "functions", "0", "max_words"], ["reward.functions.args", "sft.gpt.max_tokens"])
        "did you mean 'reward.functions.0.args.max_words'?"
    """
    sections, names = foreign_table()["sections"], foreign_names()
    if len(path) == 1 and path[0] in sections:
        return str(sections[path[0]])
    *parents, leaf = path
    takes_args = ".".join([*(part for part in parents if not part.isdigit()), "args"]) in keys
    # A name of another library, exact or (if no key of the same section is similar) misspelt.
    sibling = _sibling_key(path, keys, cutoff=0.8)
    foreign = leaf if leaf in names or sibling or takes_args else nearest(leaf, names, cutoff=0.8)
    if foreign in names:
        key, unit = names[foreign]
        own_leaf = key.rpartition(".")[2]
        in_section = (".".join([*path[:depth], own_leaf]) for depth in range(len(path) - 1, 0, -1))
        key = next((own for own in in_section if own in keys), key)  # the critic has a learning rate too
        return f"did you mean {key!r}{f' {unit}' if unit else ''}?"
    near = nearest_key(path, keys)
    if takes_args and (near is None or near.rpartition(".")[0] != ".".join(parents)):
        near = ".".join([*parents, "args", leaf])  # an argument of the function that is named there
    return None if near is None else f"did you mean {near!r}?"


def known_elsewhere(path: Sequence[str], value: Any) -> list[list[str]]:
    """List the keys below an unknown key that are names of another library.

    Example:
        >>> known_elsewhere(["critic", "optim"], {"lr": 1e-5, "zzz": {"lr": 1e-6}})
        [['critic', 'optim', 'lr'], ['critic', 'optim', 'zzz', 'lr']]
    """
    if not isinstance(value, Mapping):
        return [[*path]] if path[-1] in foreign_names() else []
    return [name for key, inner in value.items() for name in known_elsewhere([*path, str(key)], inner)]


def nearest_key(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """Return the valid key most similar to `path`: in the same section first, then by its last part in any section."""
    sections = {key.rpartition(".")[0] for key in keys} if len(path) > 1 else set()  # a section is not a key of another
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys) if key not in sections}  # the first section counts
    elsewhere = leaves.get(nearest(path[-1], leaves, cutoff=0.8) or "")
    sibling = _sibling_key(path, keys, cutoff=0.8)
    return sibling or elsewhere or _sibling_key(path, keys, cutoff=0.65 if sections else 0.7)


def _sibling_key(path: Sequence[str], keys: Sequence[str], cutoff: float) -> str | None:
    """Return the key of the same section whose name is similar to the last part of `path`, or begins like it."""
    section = ".".join(part for part in path[:-1] if not part.isdigit())  # indices of lists are in no key
    names = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
    first_words = {name.partition("_")[0]: name for name in reversed(names)}
    near = (
        nearest(path[-1], names, cutoff)
        or next((name for name in names if len(path[-1]) > 2 and name.startswith(path[-1])), None)
        or first_words.get(nearest(path[-1], first_words, cutoff=0.8) or "")
    )
    return ".".join([*path[:-1], near]) if near else None


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Replace keys in an error message by the names under which the user gave the values.

    Example:
        >>> renamed("train.steps: must be positive; see train.steps_", {"train.steps": "max_steps"})
        'max_steps: must be positive; see train.steps_'
        >>> renamed("seed: must be positive", {})
        'seed: must be positive'
    """
    if not names:
        return message
    keys = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{keys})(?!\w)", lambda match: names[match.group()], message)
