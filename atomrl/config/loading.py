"""Load a run's config from a YAML file (of either layout), a dict or a `RunConfig`, and apply overrides."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atomrl.common.files import open_file
from atomrl.common.functions import may_import, search_in
from atomrl.common.secrets import check_unmasked
from atomrl.config.run import RunConfig, build_config, config_error, nearest_key, renamed
from atomrl.config.schema import ConfigError, RolloutConfig

# --------------------------------------------------------------------------------------------------------------------
# Read YAML files and `key=value` overrides into plain dicts, merge them, and translate the six-section layout.
#
# Nothing here is validated against the schema yet; `build_config` does that.


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse overrides such as `a.b=1` into a nested dict; values are YAML.

    Raises:
        ConfigError: one is not `key=value`, or sets a key below another that has a value.

    Example:
        >>> parse_overrides(["train.steps=3", "model.path=m"])
        {'train': {'steps': 3}, 'model': {'path': 'm'}}
    """
    tree: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is no override; write key=value, as in train.steps=100")
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {argument!r}: {parent} was already given a value")
        node[leaf] = scalar(text)
    return tree


def scalar(text: str) -> Any:
    """Parse a value as YAML; unquoted floats that YAML takes for text, such as `1e-6`, become numbers.

    Example:
        >>> scalar("1e-6"), scalar("[1, a]"), scalar("null"), scalar("a: b: c"), scalar('"7"')
        (1e-06, [1, 'a'], None, 'a: b: c', '7')
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and text.strip()[:1] not in ("'", '"'):  # YAML 1.1 reads 1e-6 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def merge_trees(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `base` recursively. A name (`clip: cispo`) whose fields are changed becomes the `type`.

    Example:
        >>> merge_trees({"clip": "cispo", "ratio": {"clamp": 9.0}}, {"clip": {"high": 4.0}, "ratio": "sequence"})
        {'clip': {'type': 'cispo', 'high': 4.0}, 'ratio': 'sequence'}
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, str) and isinstance(value, Mapping):
            old = {"type": old}  # replacing the name would reset the type to its default
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


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys; YAML itself would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if key in seen:
                raise yaml.YAMLError(f"{key!r} is given twice, in lines {seen[key]} and {line}")
            seen[key] = line
        return cast(dict[Any, Any], super().construct_mapping(node, deep))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file into a dict.

    Raises:
        ConfigError: the file is missing, not valid YAML (with the line), not a mapping, or has a key twice.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} {'is not a file' if path.exists() else 'does not exist'}")
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Parse the text of a YAML file into a dict; as `read_yaml`.

    Args:
        source: name of the file, for messages.
    """
    try:
        tree: Any = _UniqueKeyLoader(text).get_single_data()
    except yaml.YAMLError as error:
        message = str(error).replace('in "<unicode string>"', f"in {source}")
        raise ConfigError(f"{source} is not valid YAML: {message}") from None
    if tree is None:
        raise ConfigError(f"{source} is empty; a config has at least run_name, model and data (configs/ has examples)")
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{source} must hold a mapping of sections (run_name, model, data, ...), not {type(tree).__name__}"
        )
    return tree


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
    """Translate the six sections into a dict for `build_config`.

    Args:
        tree: the file's content with overrides of its own keys.
        source: name of the file, for messages.
        default_run_name: used if `wandb_config.run_name` is absent.

    Returns:
        The dict, and notes for the user about keys that have no effect here.

    Raises:
        ConfigError: lists all problems, one per line; an unknown key with the nearest valid one.
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
        build_config(result, source)
    except ConfigError as error:
        raise ConfigError(renamed(str(error), {target: key for key, target in TABLE.items() if target})) from None
    ignored = any(getattr(converted, name) for name in PLACEMENT) and not torch.cuda.device_count()
    keys = " and ".join(f"model_config.{name}" for name in PLACEMENT)
    note = f"note: {keys}: this machine has no GPU, so trainer and rollout engine share its processors"
    return result, [note] if ignored else []


def _values(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values that are not null, by dotted key; raise ConfigError for unknown and missing keys."""
    problems, values = [], {}
    for section, keys in tree.items():
        if section in SECTIONS and not isinstance(keys, Mapping | None):
            problems.append(f"{section}: must be a mapping of keys (got {keys!r})")
            continue
        for path in [[section, str(key)] for key in keys or ()] if section in SECTIONS else [[section]]:
            if (key := ".".join(path)) not in TABLE:
                near = nearest_key(path, [*SECTIONS, *TABLE])
                problems.append(f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
            elif keys[path[1]] is not None:
                values[key] = keys[path[1]]
    required = ("model_config.model_name_or_path", "train_config.train_dataset")
    problems += [f"{key}: is required" for key in required if key not in values]
    if problems:
        raise ConfigError("\n  ".join([f"{source}:", *problems]))
    return values


def _conversions(converted: _Converted, source: str) -> Iterator[tuple[str, Any]]:
    """Yield (key here, value) for the keys that are converted."""
    rows, group, longest = converted.rollout_batch_size, converted.group_size, converted.truncate_max_length
    if rows is not None:
        if rows % group:
            raise ConfigError(
                f"{source}: train_config.rollout_batch_size={rows} (completions) is no multiple of "
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


def load_config(source: str | Path | RunConfig | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config, and apply overrides.

    Args:
        source: a YAML file, in AtomRL's own or the six-section layout (told apart by their sections); a config; or a
            dict with the content of a file.
        overrides: `key=value`, as on the command line.

    Raises:
        ConfigError: lists all mistakes, each with its key.

    Example:
        >>> tree = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "chain", "train_size": 10}}
        >>> load_config(tree, ["train.steps=3"]).train.steps
        3
    """
    if isinstance(source, str | Path):
        return _with_secrets(build_config(read_tree(source, parse_overrides(overrides)), str(source)))
    if isinstance(source, RunConfig) and not overrides:
        return source
    if not isinstance(source, RunConfig | Mapping):
        raise ConfigError(f"config={source!r}: give the path of a YAML file, a RunConfig, or a dict of a config's keys")
    tree = source.to_tree(secrets=True) if isinstance(source, RunConfig) else dict(source)
    return _with_secrets(build_config(merge_trees(tree, parse_overrides(overrides))))


def read_tree(path: str | Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config file, apply changes, and return a dict in AtomRL's own layout.

    Adds the file's folder to the folders in which the config's functions (rewards, environments) are searched; for the
    `config.yaml` in a run's folder, which is a copy, also the folders in which that run searched.

    Changes to a six-section file may use its own keys (`train_config.learning_rate`), and AtomRL's keys for settings
    that the layout does not have (`data.prompt_field`). Notes about keys without effect go to stderr.

    Raises:
        ConfigError: the file cannot be read, or (six sections) a key is wrong.
    """
    folder = Path(path).resolve().parent
    for each in (str(folder), *_function_folders(folder)):
        search_in(each)
    tree = read_yaml(path)
    if is_alternative_layout(tree):
        own = {key: value for key, value in changes.items() if key in SECTIONS}
        tree, notes = translate(merge_trees(tree, own), str(path), default_run_name=Path(path).stem)
        changes = {key: value for key, value in changes.items() if key not in SECTIONS}
        for note in notes:
            print(note, file=sys.stderr)
    return merge_trees(tree, changes)


def _function_folders(folder: Path) -> list[str]:
    """Read from a run's `env.json` the folders in which it searched functions; empty for other folders."""
    try:
        with open_file(folder / "env.json") as file:
            environment = json.load(file)
    except (OSError, ValueError, RecursionError):
        return []
    folders = environment.get("functions_in") if isinstance(environment, dict) else None
    return [str(each) for each in folders if each] if isinstance(folders, list) else []


def _with_secrets(config: RunConfig) -> RunConfig:
    """Return the config if it still has its secrets, or is only read; a run's `config.yaml` is without them."""
    if may_import():
        try:
            check_unmasked(config.to_tree(secrets=True))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return config
