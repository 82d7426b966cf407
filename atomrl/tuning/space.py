"""What is searched: keys of a config with their ranges or choices, from a YAML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ConfigDict, Field, RootModel, ValidationError, model_validator

from atomrl.config import ConfigError, RunConfig, build_config, merge_trees, read_yaml
from atomrl.config.base import Section
from atomrl.config.files import nest

if TYPE_CHECKING:
    from optuna.trial import Trial

FORMS = "a range ({low: 1.0e-5, high: 1.0e-3, log: true}) or several choices ([0.0, 0.1])"
Value = bool | int | float | str | None


class Range(Section):
    """Numbers from `low` to `high`; whole ones where both are."""

    model_config = ConfigDict(strict=True)

    low: int | float
    high: int | float
    log: bool = False
    """Evenly by their logarithms, as for a learning rate."""
    step: int | None = Field(None, ge=1)
    """Of whole numbers."""

    @model_validator(mode="after")
    def _some_numbers(self) -> Self:
        if self.low >= self.high or (self.log and self.low <= 0):
            raise ValueError(f"low={self.low} must be below high={self.high}{' and above 0' if self.log else ''}")
        if self.step is not None and (self.log or not self.whole):
            raise ValueError("step is of whole numbers that are not taken by their logarithms")
        return self

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


class Space(RootModel[dict[str, Range | list[Value]]]):
    """Key with dots -> what it may be."""

    def suggest(self, trial: Trial) -> dict[str, Value]:
        """A value for each key; of a trial that has them already, those."""
        found: dict[str, Value] = {}
        for key, given in self.root.items():
            if isinstance(given, list):
                # Optuna's choices are of one kind of value; YAML's need not be.
                place = {json.dumps(value): value for value in given}
                found[key] = place[trial.suggest_categorical(key, list(place))]
            elif given.whole:
                found[key] = trial.suggest_int(
                    key, int(given.low), int(given.high), step=given.step or 1, log=given.log
                )
            else:
                found[key] = trial.suggest_float(key, given.low, given.high, log=given.log)
        return found

    def values_of(self, params: Mapping[str, Any]) -> dict[str, Value]:
        """What a finished trial had, as `suggest` gave it."""
        return {key: json.loads(v) if isinstance(self.root[key], list) else v for key, v in params.items()}

    def ends(self) -> list[dict[str, Value]]:
        """Each key's choices or ends, the other keys as they are in the config: what has to be valid."""
        pairs = [
            (key, given if isinstance(given, list) else (given.low, given.high)) for key, given in self.root.items()
        ]
        return [{key: value} for key, values in pairs for value in values]


def read_space(path: str | Path, config: RunConfig) -> Space:
    """The space of a file.

    Raises:
        ConfigError: what is wrong in it, or a key or value that the config does not take.
    """
    given = read_yaml(path)
    if not given:
        raise ConfigError(f"{path}: name keys, each with {FORMS}")
    space = Space({str(key): _checked(f"{path}: {key}", value) for key, value in given.items()})
    for values in space.ends():
        try:
            with_values(config, values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return space


def _checked(where: str, given: Any) -> Range | list[Value]:
    values = given if isinstance(given, list) else []
    if len(values) > 1 and all(value is None or isinstance(value, bool | int | float | str) for value in values):
        return values
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given}: write {FORMS}")
    try:
        return Range.model_validate(given)
    except ValidationError as error:
        found = [(item["loc"], item["msg"].removeprefix("Value error, ")) for item in error.errors()]
        wrong = dict.fromkeys(str(place[0]) if place else message for place, message in found)
        raise ConfigError(f"{where}={given}: {', '.join(wrong)}: write {FORMS}") from None


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A config with other values of some keys. Another type of a choice comes with its own defaults, not with the
    settings of the type before."""
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
    return build_config(tree)
