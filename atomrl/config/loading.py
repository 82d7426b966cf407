"""Make a `RunConfig` from a YAML file (of either layout), a dict and `key=value` overrides, and word its errors."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atomrl.common.errors import ConfigError, nearest
from atomrl.common.files import open_file
from atomrl.common.functions import search_in
from atomrl.common.secrets import mask_secrets
from atomrl.common.yaml_files import config_file, read_yaml
from atomrl.config.run import RunConfig
from atomrl.config.schema import FORMS, BackendConfig, GateConfig, ResourceConfig, RolloutConfig, SamplerConfig
from atomrl.objectives.base import Choice

# --------------------------------------------------------------------------------------------------------------------
# Load a config


def load_config(
    source: str | Path | RunConfig | Mapping[str, Any], overrides: Sequence[str] = (), name: str = "config"
) -> RunConfig:
    """Load a config, apply overrides, and validate it.

    Args:
        source: a YAML file, in AtomRL's own or the six-section layout (told apart by their sections); a run's folder,
            whose `config.yaml` is read; a config; or a dict with the content of a file in AtomRL's own layout.
        overrides: `key=value`, as on the command line.
        name: of a dict or a config, for messages.

    Raises:
        ConfigError: lists all errors, one per line, each with its key and, for an unknown key, the nearest valid one.

    Example:
        >>> tree = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "chain", "train_size": 10}}
        >>> load_config(tree, ["train.steps=3"]).train.steps
        3
    """
    changes = parse_overrides(overrides)
    if isinstance(source, str | Path):
        name = str(config_file(source))
        tree = read_tree(name, changes)
    elif isinstance(source, RunConfig):
        if not overrides:
            return source
        tree = merge_trees(source.to_tree(secrets=True), changes)
    elif isinstance(source, Mapping):
        tree = merge_trees(source, changes)
    elif source is None:
        config_file(source)
    else:
        raise ConfigError(f"config={source!r}: give the path of a YAML file, a RunConfig, or a dict of a config's keys")
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise config_error(error, name) from None


def read_tree(path: str | Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config file, apply changes, and return a dict in AtomRL's own layout.

    Adds the file's folder to the folders in which the config's functions (rewards, environments) are searched; for the
    `config.yaml` in a run's folder, which is a copy, also the folders in which that run searched.

    Changes to a six-section file may use its own keys (`train_config.learning_rate`), and AtomRL's keys for settings
    that the layout does not have (`data.prompt_field`). Notes about keys without effect go to stderr.

    Raises:
        ConfigError: the file cannot be read, or (six sections) a key is wrong.
    """
    folder = Path(os.path.realpath(path)).parent  # `resolve` raises RuntimeError in a loop of links
    environment: Any = None
    with suppress(OSError, ValueError, RecursionError), open_file(folder / "env.json") as file:
        environment = json.load(file)
    folders = environment.get("functions_in") if isinstance(environment, dict) else None
    for each in [str(folder), *(folders if isinstance(folders, list) else ())]:
        if each:
            search_in(str(each))
    tree = read_yaml(path, mark_texts)
    # The six-section layout: overrides of its own keys apply before the translation, those of AtomRL's keys after it.
    if is_alternative_layout(tree):
        own = {key: value for key, value in changes.items() if key in SECTIONS}
        tree, notes = translate(merge_trees(tree, own), str(path), default_run_name=Path(path).stem)
        changes = {key: value for key, value in changes.items() if key not in SECTIONS}
        for note in notes:
            print(note, file=sys.stderr)
    return merge_trees(tree, changes)


def dump_config(config: RunConfig) -> str:
    """Dump the resolved config as YAML, without secrets; loading it gives the same config."""
    return yaml.safe_dump(config.to_tree(), sort_keys=False, allow_unicode=True)


# --------------------------------------------------------------------------------------------------------------------
# YAML files, overrides and plain dicts


def parse_overrides(arguments: Sequence[str], section: type[BaseModel] | None = RunConfig) -> dict[str, Any]:
    """Parse overrides such as `a.b=1` into a nested dict; values are YAML. A number where the key takes text is text.

    Args:
        section: the section whose keys they are; None: arguments of a function, whose types are unknown.

    Raises:
        ConfigError: one is not `key=value`, or sets a key below another that has a value.

    Example:
        >>> parse_overrides(["train.steps=3", "model.path=m", "run_name=007", "algorithm=dapo"])
        {'train': {'steps': 3}, 'model': {'path': 'm'}, 'run_name': '007', 'algorithm': {'name': 'dapo'}}
    """
    tree: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is not an override; write key=value, as in train.steps=100")
        node = tree
        *parents, leaf = key.split(".")
        kinds: Sequence[Any] = (section,)
        for parent in parents:
            node, kinds = node.setdefault(parent, {}), _kinds_at(kinds, parent)
            if not isinstance(node, dict):
                raise ConfigError(f"override {argument!r}: {parent} already has a value")
        value = scalar(text, _kinds_at(kinds, leaf))
        if key == "algorithm" and section is RunConfig and isinstance(value, str):
            value = {**node.get(leaf, {}), "name": value}
        node[leaf] = value
    return tree


def scalar(text: str, kinds: Sequence[Any] = ()) -> Any:
    """Parse a value as YAML; unquoted floats that YAML takes for text, such as `1e-6`, become numbers.

    Args:
        kinds: types of the key; where all of them are text, a value without quotes is text, whatever it looks like.

    Example:
        >>> scalar("1e-6"), scalar("[1, a]"), scalar("null"), scalar("a: b: c"), scalar('"7"'), scalar("7", [str])
        (1e-06, [1, 'a'], None, 'a: b: c', '7', '7')
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _mark(node, kinds)
        value = loader.construct_document(node)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and text.strip()[:1] not in ("'", '"') and not _are_text(kinds):  # as text by YAML 1.1
        try:
            return float(value)
        except ValueError:
            return value
    return value


# A name that looks like a number (`run_name: 2024`) is text: the types of the keys decide, not the rules of YAML.

_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "timestamp"))


def mark_texts(node: yaml.Node) -> None:
    """Mark the values of text keys as text in the parsed YAML of a config of either layout."""
    _mark(node, (RunConfig,))
    for key, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        for name, value in inner.value if key.value in SECTIONS and isinstance(inner, yaml.MappingNode) else ():
            kinds: Sequence[Any] = (RunConfig,)
            for part in (SECTIONS[key.value].get(name.value) or "").split("."):
                kinds = _kinds_at(kinds, part)
            _mark(value, kinds)


def _mark(node: yaml.Node, kinds: Sequence[Any]) -> None:
    """Mark scalars as text where all types of a key are text, also in lists and mappings.

    Args:
        kinds: the types, without unions.
    """
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.tag in _PLAIN and _are_text(kinds):
            node.tag = "tag:yaml.org,2002:str"
    elif isinstance(node, yaml.SequenceNode):
        items = [item for kind in kinds for item in get_args(kind) if get_origin(kind) in (list, tuple)]
        for item in node.value if items else ():
            _mark(item, _united(items))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if inner := _kinds_at(kinds, key.value):
                _mark(value, inner)


def _are_text(kinds: Sequence[Any]) -> bool:
    """Return True if a scalar of these types is text, or null. A scalar is no list and no section."""
    given = [kind for kind in kinds if kind is not type(None) and get_origin(kind) not in (list, tuple, dict)
             and not (isinstance(kind, type) and issubclass(kind, BaseModel))]  # fmt: skip
    names = [each for kind in given if get_origin(kind) is Literal for each in get_args(kind)]
    texts = [kind is str or kind is Path or get_origin(kind) is Literal for kind in given]
    return bool(texts) and all(texts) and all(isinstance(each, str) for each in names)


def _kinds_at(kinds: Sequence[Any], key: Any) -> list[Any]:
    """Return the types of a key of a section or a dict; [] if they are unknown."""
    found = []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields:
            found.append(kind.model_fields[key].annotation)
        elif get_origin(kind) is dict:
            found.append(get_args(kind)[1])
    return _united(found)


def _united(kinds: Sequence[Any]) -> list[Any]:
    """Return the parts of unions and of annotated types."""
    parts: list[Any] = []
    for kind in kinds:
        if get_origin(kind) in (Union, UnionType):
            parts += _united(get_args(kind))
        else:
            parts += _united(get_args(kind)[:1]) if get_origin(kind) is Annotated else [kind]
    return [part for part in parts if part is not Ellipsis]


def merge_trees(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `base` recursively. A name (`clip: cispo`) whose fields are changed becomes the `type`.

    Example:
        >>> merge_trees({"clip": "cispo", "ratio": {"clamp": 9.0}}, {"clip": {"high": 4.0}, "ratio": "sequence"})
        {'clip': {'type': 'cispo', 'high': 4.0}, 'ratio': 'sequence'}
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        name = "name" if key == "algorithm" else "type"
        if isinstance(old, str) and isinstance(value, Mapping):
            old = {name: old}  # replacing the name would reset the type to its default
        merged[key] = merge_trees(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def nest(key: str, value: Any) -> dict[str, Any]:
    """Convert a dotted key and its value into a nested dict.

    Example:
        >>> nest("a.b", 1)
        {'a': {'b': 1}}
    """
    first, _, rest = key.partition(".")
    return {first: nest(rest, value) if rest else value}


# --------------------------------------------------------------------------------------------------------------------
# The six-section layout
#
# Its sections are `model_config`, `generation_config`, `advantage_config`, `train_config`, `loss_config` and
# `wandb_config`. `six_sections.yaml` maps each key to its key here, `docs/reference/config.md` describes the mapping. A
# key that is absent or null keeps AtomRL's own default.

SECTIONS: dict[str, dict[str, str | None]] = read_yaml(Path(__file__).with_name("six_sections.yaml"))
TABLE = {f"{section}.{name}": target for section, keys in SECTIONS.items() for name, target in keys.items()}
"""Key of the layout -> key here that takes the value unchanged; None: the value is converted (`_Converted`)."""
PLACEMENT = ("model_num_gpus", "rollout_num_gpus")


class _Converted(BaseModel):
    """Keys whose values have to be converted, and keys that a conversion depends on."""

    model_config = ConfigDict(alias_generator={key.partition(".")[2]: key for key in TABLE}.__getitem__, frozen=True)

    use_lora: bool = False
    model_num_gpus: int | None = Field(None, ge=0)
    """GPUs of the trainer, one rank on each; null: 1."""
    rollout_num_gpus: int | None = Field(None, ge=0)
    """GPUs of the engines, one engine on each; null or 0: the engine shares the trainer's GPU."""
    group_size: int = Field(RolloutConfig().completions_per_prompt, ge=1)
    stop_tokens: list[str] | list[int] = []
    """Texts, or token ids."""
    mode: Literal["raw", "grpo", "grpo_no_std"] = "grpo"
    truncate_max_length: int | None = Field(None, ge=2)
    rollout_batch_size: int | None = Field(None, ge=1)
    """Completions per step: prompts times `group_size`."""
    micro_train_batch_size: int | None = Field(None, ge=1)
    """Completions per forward pass."""
    loss_level: Literal["token", "sequence"] = "token"
    enabled: bool = False


def is_alternative_layout(tree: Mapping[str, Any]) -> bool:
    """Return True if a config is in the six-section layout: any top-level key is one of its sections.

    Example:
        >>> is_alternative_layout({"train_config": {}}), is_alternative_layout({"train": {}})
        (True, False)
    """
    return any(key in SECTIONS for key in tree)


def translate(tree: Mapping[str, Any], source: str, default_run_name: str) -> tuple[dict[str, Any], list[str]]:
    """Translate the six sections into a dict for `load_config`.

    Args:
        tree: the file's content with overrides of its own keys.
        source: name of the file, for messages.
        default_run_name: used if `wandb_config.run_name` is absent.

    Returns:
        The dict, and notes for the user about keys that have no effect here.

    Raises:
        ConfigError: lists all errors, one per line; an unknown key with the nearest valid one.
    """
    source = f"{source} (six-section layout)"
    values = _values(tree, source)
    try:
        converted = _Converted.model_validate(values)
    except ValidationError as error:
        raise config_error(error, source) from None
    result: dict[str, Any] = {"run_name": default_run_name}
    for key, target in TABLE.items():
        if target is not None and key in values:
            result = merge_trees(result, nest(target, values[key]))
    if not converted.use_lora:
        result["model"].pop("lora", None)
    if converted.mode != "grpo":  # the other modes do not divide by a standard deviation
        result["algorithm"]["advantage"].pop("eps", None)
    for key, value in _conversions(converted, source):
        result = merge_trees(result, nest(key, value))
    try:
        load_config(result, name=source)
    except ConfigError as error:
        raise ConfigError(renamed(str(error), {target: key for key, target in TABLE.items() if target})) from None
    ignored = any(getattr(converted, name) for name in PLACEMENT) and not torch.cuda.device_count()
    keys = " and ".join(f"model_config.{name}" for name in PLACEMENT)
    note = f"note: {keys}: this machine has no GPU, so trainer and rollout engine share its CPU"
    return result, [note] if ignored else []


def _values(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values that are not null, by dotted key; raise ConfigError for unknown and missing keys."""
    errors, values = [], {}
    for section, keys in tree.items():
        if section in SECTIONS and not isinstance(keys, Mapping | None):
            errors.append(f"{section}: must be a mapping of keys (got {keys!r})")
            continue
        for path in [[section, str(key)] for key in keys or ()] if section in SECTIONS else [[section]]:
            if (key := ".".join(path)) not in TABLE:
                near = nearest_key(path, [*SECTIONS, *TABLE])
                errors.append(f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
            elif keys[path[1]] is not None:
                values[key] = keys[path[1]]
    required = ("model_config.model_name_or_path", "train_config.train_dataset")
    errors += [f"{key}: is required" for key in required if key not in values]
    if errors:
        raise ConfigError("\n  ".join([f"{source}:", *errors]))
    return values


def _conversions(converted: _Converted, source: str) -> Iterator[tuple[str, Any]]:
    """Yield (key here, value) for the keys that are converted."""
    rows, group, longest = converted.rollout_batch_size, converted.group_size, converted.truncate_max_length
    if rows is not None:
        if rows % group:
            raise ConfigError(
                f"{source}: train_config.rollout_batch_size={rows} (completions) is not a multiple of "
                f"generation_config.group_size={group}"
            )
        yield "rollout.prompts_per_step", rows // group
    if longest is not None:
        yield "data.max_prompt_tokens", longest - 1  # a longer prompt would leave nothing to train on
        if converted.micro_train_batch_size is not None:
            # This layout limits a forward pass by rows only, so the limit in tokens must never be the tighter one.
            yield "train.tokens_per_micro_batch", converted.micro_train_batch_size * longest
    yield from _placement(converted)
    if converted.use_lora:
        yield "model.lora", {}
    if converted.stop_tokens:
        ids = isinstance(converted.stop_tokens[0], int)
        yield "rollout.stop_token_ids" if ids else "rollout.stop", converted.stop_tokens
    yield "algorithm.loss_agg.type", f"{converted.loss_level}_mean"
    if converted.enabled:
        yield "tracking.sinks", ["wandb"]


def _placement(converted: _Converted) -> Iterator[tuple[str, Any]]:
    """Yield the keys that place trainer and engines on GPUs; none on a machine without GPUs."""
    trainer, engines = converted.model_num_gpus, converted.rollout_num_gpus
    if not torch.cuda.device_count():
        return
    if trainer is not None and trainer > 1:
        yield "backend", {"type": "fsdp", "ranks": trainer}
    if engines:
        yield "cluster.replicas", engines
        yield "cluster.resources", {"trainer": {"num_gpus": 0 if trainer == 0 else 1}, "rollout": {"num_gpus": 1}}
    elif trainer is not None:
        yield "model.device", "cuda" if trainer else "cpu"


# --------------------------------------------------------------------------------------------------------------------
# Error messages


TAGGED: Mapping[str, Any] = {
    "backend": BackendConfig,
    "curriculum.sampler": SamplerConfig,
    "curriculum.gates": GateConfig,
}
"""Sections whose `type` selects one of several kinds -> the union of these."""


def config_error(error: ValidationError, source: str) -> ConfigError:
    """Convert a pydantic error into a ConfigError, with one line per error."""
    return ConfigError("\n  ".join([f"{source}:", *map(_error_line, error.errors())]))


def _error_line(item: Mapping[str, Any]) -> str:
    """Format one error of pydantic's, with its dotted key first; several unknown keys take several lines."""
    path = [str(part) for part in item["loc"]]
    for depth in range(1, len(path) - 1):
        if _key(path[:depth]) in TAGGED and not path[depth].isdigit():
            del path[depth]  # the tag of the union, which is not a key
            break
    if path[-1:] == ["[key]"]:  # pydantic's mark for an invalid key of a dict
        del path[-1]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        valid = known_keys()
        if path[:2] == ["cluster", "resources"]:  # the part after it is a role, so its keys are not in `known_keys`
            valid = [".".join([*path[:3], name]) for name in ResourceConfig.model_fields]
        inner = known_elsewhere(path, item["input"]) if isinstance(item["input"], Mapping) else []
        unknown = [path] if not inner or len(path) == 1 else []
        return "\n  ".join(_unknown(parts, valid) for parts in [*unknown, *inner])
    if item["type"] == "union_tag_invalid":
        return f"{key}.type: {item['ctx']['tag']!r} is not one of {item['ctx']['expected_tags']}"
    if item["type"] == "union_tag_not_found":
        unknown = [[key, str(name)] for name in item["input"] if f"{key}.{name}" not in known_keys()]
        return "\n  ".join([f"{key}.type: is required", *(_unknown(parts, known_keys()) for parts in unknown)])
    if item["type"] == "missing":
        return f"{key}: is required"
    if item["type"] == "model_type":
        first = next((own for own in known_keys() if own.startswith(f"{key}.")), None)
        example = f", such as {first}" if first else ""
        return f"{key}: must be a mapping of keys (got {_shown(path, item['input'])!r}){example}"
    if path == ["algorithm"] and isinstance(item["input"], Mapping):
        # An axis that is a name of another library: give its name here, instead of the nearest axis.
        valid, foreign = known_keys(), foreign_names()
        axes = [str(axis) for axis in item["input"] if str(axis) in foreign and f"algorithm.{axis}" not in valid]
        if axes:
            return "\n  ".join(_unknown([*path, axis], valid) for axis in axes)
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "string_pattern_mismatch":
        message = FORMS.get(item["ctx"]["pattern"], message)
    if not key or item["type"] == "value_error":
        return message
    return f"{key}: {message} (got {_shown(path, item['input'])!r})"


def _shown(path: list[str], value: Any) -> Any:
    """Return a value without secrets, as a message may show it."""
    if path[0] == "tools" and "env" in path:
        return type(value).__name__
    if path[0] in ("tools", "reward", "environment") and isinstance(value, str | list):
        return mask_secrets({"mcp": value})["mcp"]
    return mask_secrets(value, path[-1])


def _unknown(path: list[str], valid: list[str]) -> str:
    """Format the error of an unknown key."""
    *parents, name = path
    if (section := _key(parents)) in TAGGED and _key(path) in valid:
        fields = [kind.model_fields for kind in get_args(TAGGED[section])]
        kinds = [get_args(own["type"].annotation)[0] for own in fields if name in own]
        where = ".".join(parents)
        return f"unknown key '{where}.{name}' for this {where}.type; it is an option of {' and '.join(kinds)}"
    hint = suggestion(path, valid)
    return f"unknown key {'.'.join(path)!r}" + (f"; {hint}" if hint else "")


def _key(path: Sequence[str]) -> str:
    """Return the dotted key of a path, without indices of lists."""
    return ".".join(part for part in path if not part.isdigit())


def known_keys(section: type[BaseModel] | None = None, prefix: str = "") -> list[str]:
    """List all dotted keys of a config, each section before its keys."""
    keys = [f"{prefix}type"] if section is not None and issubclass(section, Choice) else []
    for name, info in (section or RunConfig).model_fields.items():
        keys.append(prefix + name)
        # The user names the keys of dicts.
        for kind in () if get_origin(info.annotation) is dict else sections_in(info.annotation):
            keys += known_keys(kind, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))  # kinds of a section share some


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a field, or an item of it, can be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in sections_in(part)]


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
