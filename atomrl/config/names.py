"""What an unknown key may mean: the nearest key, or the one that other libraries' users know by that name."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from atomrl.hints import nearest


@cache
def foreign_table() -> dict[str, Any]:
    """What `foreign_names.yaml` says: `sections` of verl's, and `keys` with their names elsewhere."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("foreign_names.yaml").read_text(encoding="utf-8"))
    return table


def foreign_names() -> dict[str, tuple[str, str]]:
    """A name in TRL, verl or OpenRLHF -> the key here, and what it counts where that is not plain."""
    return {name: key.partition(" ")[::2] for key, names in foreign_table()["keys"].items() for name in names}


def suggestion(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """What to say of an unknown key.

    Args:
        path: its parts.
        keys: all valid keys with dots.

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
    beside = _key_beside(path, keys, cutoff=0.8)
    foreign = leaf if leaf in names or beside or takes_args else nearest(leaf, names, cutoff=0.8)
    if foreign in names:
        key, unit = names[foreign]
        own_leaf = key.rpartition(".")[2]
        beneath = (".".join([*path[:depth], own_leaf]) for depth in range(len(path) - 1, 0, -1))
        key = next((own for own in beneath if own in keys), key)  # the critic has a learning rate too
        return f"did you mean {key!r}{f' {unit}' if unit else ''}?"
    near = nearest_key(path, keys)
    if takes_args and (near is None or near.rpartition(".")[0] != ".".join(parents)):
        near = ".".join([*parents, "args", leaf])  # of the function that is named there
    return None if near is None else f"did you mean {near!r}?"


def known_elsewhere(path: Sequence[str], value: Any) -> list[list[str]]:
    """The keys in what an unknown key was given that other libraries' users know by name.

    Example:
        >>> known_elsewhere(["critic", "optim"], {"lr": 1e-5, "zzz": {"lr": 1e-6}})
        [['critic', 'optim', 'lr'], ['critic', 'optim', 'zzz', 'lr']]
    """
    if not isinstance(value, Mapping):
        return [[*path]] if path[-1] in foreign_names() else []
    return [found for key, inner in value.items() for found in known_elsewhere([*path, str(key)], inner)]


def nearest_key(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """The valid key most like `path`: in the same section first, then by its last part anywhere."""
    parts = {key.rpartition(".")[0] for key in keys} if len(path) > 1 else set()  # a section is no key of another
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys) if key not in parts}  # the first section counts
    elsewhere = leaves.get(nearest(path[-1], leaves, cutoff=0.8) or "")
    return _key_beside(path, keys, cutoff=0.8) or elsewhere or _key_beside(path, keys, cutoff=0.65 if parts else 0.7)


def _key_beside(path: Sequence[str], keys: Sequence[str], cutoff: float) -> str | None:
    """The key of the same section that is like the last part of `path`, or begins like it."""
    section = ".".join(part for part in path[:-1] if not part.isdigit())  # a place in a list is in no key
    names = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
    first_words = {name.partition("_")[0]: name for name in reversed(names)}
    near = (
        nearest(path[-1], names, cutoff)
        or next((name for name in names if len(path[-1]) > 2 and name.startswith(path[-1])), None)
        or first_words.get(nearest(path[-1], first_words, cutoff=0.8) or "")
    )
    return ".".join([*path[:-1], near]) if near else None


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message about a config with the keys called as where the values were given.

    Example:
        >>> renamed("train.steps: must be positive; see train.steps_", {"train.steps": "max_steps"})
        'max_steps: must be positive; see train.steps_'
    """
    keys = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{keys})(?!\w)", lambda found: names[found.group()], message)
