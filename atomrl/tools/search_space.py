"""The search space: config keys with ranges or choices, from a YAML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ConfigDict, Field, RootModel, ValidationError, model_validator

from atomrl.config import ConfigError, RunConfig, load_config, merge_trees, read_yaml
from atomrl.config.schema import Section
from atomrl.config.trees import nest

if TYPE_CHECKING:
    from optuna.trial import Trial


FORMS = "a range ({low: 1.0e-5, high: 1.0e-3, log: true}) or several choices ([0.0, 0.1])"
Value = bool | int | float | str | None


class Range(Section):
    """A range of numbers from `low` to `high`; integers if both are."""

    model_config = ConfigDict(strict=True)

    low: int | float
    high: int | float
    log: bool = False
    """Sample on a logarithmic scale, as for a learning rate."""
    step: int | None = Field(None, ge=1)
    """Step size; only for integers."""

    @model_validator(mode="after")
    def _some_numbers(self) -> Self:
        if self.low >= self.high or (self.log and self.low <= 0):
            raise ValueError(f"low={self.low} must be below high={self.high}{' and above 0' if self.log else ''}")
        if self.step is not None and (self.log or not self.is_integer):
            raise ValueError("step needs whole numbers without log")
        return self

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


class Space(RootModel[dict[str, Range | list[Value]]]):
    """Dotted config key -> its range or choices."""

    def suggest(self, trial: Trial) -> dict[str, Value]:
        """Return a value for each key; those of a resumed trial stay the same."""
        values: dict[str, Value] = {}
        for key, domain in self.root.items():
            if isinstance(domain, list):
                # As JSON text: Optuna stores choices of one type, YAML lists may mix types.
                choices = {json.dumps(value): value for value in domain}
                values[key] = choices[trial.suggest_categorical(key, list(choices))]
            elif domain.is_integer:
                values[key] = trial.suggest_int(
                    key, int(domain.low), int(domain.high), step=domain.step or 1, log=domain.log
                )
            else:
                values[key] = trial.suggest_float(key, domain.low, domain.high, log=domain.log)
        return values

    def values_of(self, params: Mapping[str, Any]) -> dict[str, Value]:
        """Convert the parameters of a finished trial to the values of `suggest`."""
        return {key: json.loads(v) if isinstance(self.root[key], list) else v for key, v in params.items()}

    def ends(self) -> list[dict[str, Value]]:
        """Return each choice and each end of a range as a change of one key; all of them have to be valid."""
        pairs = [
            (key, domain if isinstance(domain, list) else (domain.low, domain.high))
            for key, domain in self.root.items()
        ]
        return [{key: value} for key, values in pairs for value in values]


def read_space(path: str | Path, config: RunConfig) -> Space:
    """Read a search space from a YAML file, and validate it against a config.

    Raises:
        ConfigError: the file is malformed, or the config does not accept a key or value.
    """
    tree = read_yaml(path)
    if not tree:
        raise ConfigError(f"{path}: must contain keys, each with {FORMS}")
    space = Space({str(key): _domain(f"{path}: {key}", value) for key, value in tree.items()})
    for values in space.ends():
        try:
            with_values(config, values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return space


def _domain(where: str, value: Any) -> Range | list[Value]:
    choices = value if isinstance(value, list) else []
    if len(choices) > 1 and all(one is None or isinstance(one, bool | int | float | str) for one in choices):
        return choices
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value}: write {FORMS}")
    try:
        return Range.model_validate(value)
    except ValidationError as error:
        errors = [(item["loc"], item["msg"].removeprefix("Value error, ")) for item in error.errors()]
        wrong = dict.fromkeys(str(place[0]) if place else message for place, message in errors)
        raise ConfigError(f"{where}={value}: {', '.join(wrong)}: write {FORMS}") from None


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a config with some keys changed. A new `type` of a section resets its other keys to their defaults."""
    tree = config.to_tree(secrets=True)
    for key, value in sorted(values.items(), key=lambda pair: not pair[0].endswith(".type")):  # types first
        section, name = key.rpartition(".")[::2]
        if name == "type":
            before: Any = tree
            for part in section.split("."):
                before = before.get(part) if isinstance(before, Mapping) else None
            if isinstance(before, Mapping) and before.get("type") != value:
                tree = merge_trees(tree, nest(section, None))
        tree = merge_trees(tree, nest(key, value))
    return load_config(tree)
