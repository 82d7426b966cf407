"""`Translation` collects a config from another library's keys, and records how each key was translated."""

import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from atomrl.common.errors import did_you_mean, nearest
from atomrl.config import ConfigError
from atomrl.config.overrides import scalar
from atomrl.config.trees import merge_trees, nest
from atomrl.tools.importers.sources import Settings, scripts_of, text_of


def same(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def at_least_zero(value: Any) -> int:
    """Return the value as an integer; 0 for a negative one, by which other libraries turn a key off."""
    return max(0, int(value))


def files_of(value: Any) -> Any:
    """Return a list of one file as that file; other values unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def run_name(name: Any) -> str:
    """Return a name that can be that of a folder."""
    return str(name).replace("/", "-").lstrip(".")


ON, OFF = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")
EARLIER_ANSWERS = (
    "line break of ChatML behind an answer that another turn follows",
    "trained",
    "not trained; behind the last answer it is (data.row_end=template)",
)
"""A difference of rows with several answers."""
TEMPLATE = (
    "the chat template is read from the tokenizer: save it with the model as chat_template.jinja, and remove the key"
)
"""Reason for refusing a key that names another chat template."""
NO_PICTURES = "pictures are not translated for this kind of script"


def misspelt(name: str, names: Iterable[str]) -> str | None:
    """Return the name of which an unknown one is a misspelling by a letter or two, or None.

    Example:
        >>> misspelt("lrr", ["lr", "n"]), misspelt("image_patch_size", ["gen_batch_size"])
        ('lr', None)
    """
    return nearest(name, names, max(0.5, 1 - 1.5 / len(name)))


Moves = Mapping[str, tuple[str | tuple[str, ...], Callable[[Any], Any]]]
"""Our key -> their keys (the first one that is set counts), and a function that converts the value."""


class Translation:
    """The translation of another library's config.

    Args:
        library: its name, for messages.
        settings: the keys of the file.
        defaults: the library's defaults.
        path: the file, for messages.

    Example:
        >>> t = Translation("verl", {"rollout.n": 8}, {"lr": 1e-6})
        >>> t.move({"rollout.completions_per_prompt": ("rollout.n", int), "train.learning_rate": ("lr", float)})
        >>> t.tree
        {'rollout': {'completions_per_prompt': 8}, 'train': {'learning_rate': 1e-06}}
        >>> t.carried, t.by_default
        (['rollout.n=8 -> rollout.completions_per_prompt: 8'], ['lr=1e-06 -> train.learning_rate: 1e-06'])
    """

    def __init__(self, library: str, settings: Settings, defaults: Mapping[str, Any], path: Path | None = None) -> None:
        self.library, self.path = library, path
        self.sources: dict[str, list[str]] = {}
        """Our key -> their keys from which it was made."""
        self.settings, self.defaults = settings, defaults
        self.tree: dict[str, Any] = {}
        self.carried: list[str] = []
        self.by_default: list[str] = []
        self.approximated: list[str] = []
        self.differences: list[str] = []
        """Numbers in which the run differs from the library's, with both values."""
        self.to_do: list[str] = []
        """Steps that are left to the user, with their lines in the source."""
        self.files: dict[str, str] = {}
        """Files to write next to the config: name -> text."""
        self.gpus: tuple[int, str] | None = None
        """Number of GPUs, and the setting that says so; None if the script does not say."""
        self.machines = 1
        self.version = library
        """Name and version of the library whose defaults are written out."""
        self.reasons: dict[str, str] = {}
        """Key, or prefix of keys (ends in a dot or underscore) -> reason why it has no counterpart."""
        self.own: dict[str, tuple[str, Any]] = {}
        """Key of `settings` -> its name and value in the file, if the file has another name for it."""
        self._left: list[str] = []
        self._read: set[str] = set()

    def name_of(self, names: Iterable[str]) -> str | None:
        """Return the first of a key's names that the file has, else the first that has a default."""
        names = tuple(names)
        self._read |= set(names)
        return next((name for kind in (self.settings, self.defaults) for name in names if name in kind), None)

    def __call__(self, *names: str) -> Any:
        """Return the value of a key that has these names: that of the file, else the library's default, else None."""
        name = self.name_of(names)
        return None if name is None else self.settings.get(name, self.defaults.get(name))

    def given(self, name: str) -> str:
        """Return a key of the file and its value, as the file has them: `beta=0.1`."""
        own, value = self.own.get(name, (name, self.settings.get(name)))
        return f"{own}={value}"

    def named(self, name: str) -> str:
        """Name a key for an error, with file and line: `grpo.py:12: TRL's beta`."""
        place, own = self.place(name), self.own.get(name, (name,))[0]
        return f"{place}: {self.library}'s {own}" if place else f"{self.library}'s {own}"

    def place(self, name: str) -> str:
        """Return file and line of a key; without a line if several contain it, "" for a default of the library."""
        name = name if name in self.settings else name.partition(".")[0]
        if name not in self.settings or self.path is None:
            return ""
        name = self.own.get(name, (name,))[0]
        for word in (name, name.rpartition(".")[2]):
            pattern = rf"^[^#]*(?<![\w.-])(--)?\+*{re.escape(word).replace('_', '[-_]')}(?![\w.-])"
            for path in scripts_of(self.path):
                lines = text_of(path).splitlines()
                matches = [number for number, line in enumerate(lines, start=1) if re.search(pattern, line)]
                if len(matches) == 1:
                    return f"{path}:{matches[0]}"
        return str(self.path)

    def number(self, name: str) -> float:
        """Return the value of a key as a float.

        Raises:
            ConfigError: it is not a number.
        """
        return self.numbers(name, 1)[0]

    def integer(self, name: str) -> int:
        """Return the value of a key as an integer, which it has to be."""
        number = self.number(name)
        if number % 1:  # also NaN, for infinity
            raise ConfigError(f"{self.named(name)}={number:g} is not a whole number")
        return int(number)

    def count(self, name: str) -> int:
        """Return the value of a key as an integer >= 1."""
        if (number := self.integer(name)) < 1:
            raise ConfigError(f"{self.named(name)}={number} is not at least 1")
        return number

    def flag(self, *names: str) -> bool:
        """Return the value of a boolean key; null is False.

        Raises:
            ConfigError: it is not a boolean, for example a variable that the file does not set.
        """
        value = self(*names)
        if value is None or isinstance(value, bool):
            return bool(value)
        word = str(value).lower()
        if word not in (*ON, *OFF):
            raise ConfigError(f"{self.named(str(self.name_of(names)))}={value} is neither true nor false")
        return word in ON

    def mapping(self, name: str) -> dict[str, Any]:
        """Return the value of a key that is a mapping or JSON; empty if it is not set.

        Raises:
            ConfigError: it is neither.
        """
        value = self(name)
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            value = name
        if not isinstance(value, Mapping | None):
            raise ConfigError(f"{self.named(name)}={self(name)} is not a mapping")
        return dict(value or {})

    def numbers(self, name: str, count: int) -> list[float]:
        """Return the value of a key that is a list of `count` numbers."""
        value = self(name)
        try:
            items = value if isinstance(value, list | tuple) else [value]
            numbers = [] if any(isinstance(item, bool) for item in items) else [float(item) for item in items]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != count:
            raise ConfigError(f"{self.named(name)}={value} is not {'a number' if count == 1 else f'{count} numbers'}")
        return numbers

    def is_set(self, *names: str) -> bool:
        """Return whether the file has a key with one of these names."""
        return any(self.settings.get(name) is not None for name in names)

    def put(self, key: str, value: Any, *names: str, because: str = "") -> None:
        """Set one of our keys.

        Args:
            names: their keys from which the value was made, for the report.
            because: the difference, if the two keys do not mean exactly the same.
        """
        self.tree = merge_trees(self.tree, nest(key, value))
        self._read |= set(names)
        values = [self.given(name) for name in names if name in self.settings]
        self.sources[key] = [name for name in names if name in self.settings]
        defaults = [f"{name}={self.defaults[name]}" for name in names if name in self.defaults]
        line = f"{', '.join(values or defaults) or self.library} -> {key}: {value}"
        if because:
            self.approximated.append(f"{line} ({because})")
        else:
            (self.carried if values else self.by_default).append(line)

    def move(self, moves: Moves) -> None:
        """Translate keys that only have another name. A key without a value and default, or null, keeps our default."""
        readers: dict[Any, Callable[[str], Any]] = {int: self.integer, float: self.number, bool: self.flag}
        for key, (names, make) in moves.items():
            name = self.name_of((names,) if isinstance(names, str) else names)
            if name is not None and (value := self(name)) is not None:
                try:
                    converted = readers[make](name) if make in readers else make(value)
                except ConfigError:
                    raise
                except (TypeError, ValueError, IndexError) as error:
                    raise ConfigError(f"{self.named(name)}={value!r}: {error}") from None
                self.put(key, converted, name)

    def chat_template_kwargs(self, *names: str) -> None:
        """Translate the variables of the chat template: a mapping, or a key per variable (`NAME.variable`).

        Raises:
            ConfigError: it is neither.
        """
        for name in names:
            value, inside = self(name), {key for key in self.settings if key.startswith(f"{name}.")}
            variables = {key.removeprefix(f"{name}."): self.settings[key] for key in inside}
            if isinstance(value, Mapping):
                # Hydra writes {key:value}, which YAML reads as a key without a value.
                pairs = [str(key).partition(":") if item is None else (key, "", item) for key, item in value.items()]
                variables |= {str(key): scalar(item) if colon else item for key, colon, item in pairs}
            elif value is not None:
                raise ConfigError(f"{self.named(name)}={value} cannot be read: write it as JSON, in the file itself")
            if variables:
                self.put(
                    "data.chat_template_kwargs", variables, *([name] if name in self.settings else []), *sorted(inside)
                )

    def put_pictures(self, column: str, frozen: str = "", most: str = "") -> bool:
        """Set the column of pictures, and whether the vision tower is trained, if the file sets one of these keys.

        Call it after `model.lora` is set.

        Args:
            column: their key for the column.
            frozen: their key that leaves the tower as it is; "": it is trained.
            most: their limit for the pictures of a prompt; "": there is none.

        Returns:
            True if the run has pictures.
        """
        names = [name for name in (column, frozen, most) if name]
        self.name_of(names)
        if not self.is_set(*names):
            return False
        self.put("data.images_field", str(self(column) or "images"), column)
        if most:
            self.leave(most, "a prompt may have any number of pictures")
        trained = not (frozen and self.flag(frozen))
        if trained and self.tree["model"].get("lora"):
            self.differ("adapters", "of the vision tower too", "of the language model alone")
        else:
            self.put("model.freeze_vision", not trained, frozen)
        return True

    def approximate(self, *lines: str) -> None:
        """Report what is not exactly the same; each line once."""
        self.approximated += [line for line in lines if line not in self.approximated]

    def put_engine(self, *names: str, engine: str = "vLLM") -> None:
        """Set `rollout.engine` for a library with a separate engine: `sglang` and `hf` stay, vLLM becomes `auto`."""
        supported = engine in ("sglang", "hf")
        self.put("rollout.engine", engine if supported else "auto", *names)
        auto = "the trainer's with the native engine, else vLLM's (rollout.engine=auto)"
        here = f"{engine}'s" if supported else auto
        self.differ("log-probs of the engine", f"those of {engine}, separate from the trainer's", here)

    def differ(self, what: str, theirs: str, here: str) -> None:
        """Report a number that differs here, with both values."""
        self.differences.append(f"{what}: {self.library} {theirs}; here {here}")

    def leave(self, name: str, why: str) -> None:
        """Report a key without a counterpart, with the reason."""
        self._read.add(name)
        if name in self.settings:
            self._left.append(f"{self.given(name)} ({why})")

    def leave_text(self, text: str, why: str) -> None:
        """Report something without a counterpart that is not a key."""
        self._left.append(f"{text} ({why})" if why else text)

    def refuse(self, name: str, value: Any, why: str) -> ConfigError:
        """Return the error for a key that affects training and has no counterpart, so that it cannot be left out."""
        return ConfigError(f"{self.named(name)}={value} has no counterpart and affects training: {why}")

    def refuse_set(self, reasons: Mapping[str, str]) -> None:
        """Refuse keys that affect training, if they are on: name -> reason why there is no counterpart."""
        for name, why in reasons.items():
            if value := self(name):
                raise self.refuse(name, value, why)

    def choice(self, name: str, value: Any, table: Mapping[Any, Any]) -> Any:
        """Look up a value in a table; other values are refused."""
        if not isinstance(value, Hashable) or value not in table:
            raise self.refuse(name, value, f"supported: {', '.join(map(str, table))}")
        return table[value]

    @property
    def read_keys(self) -> frozenset[str]:
        """Keys that the translation has read, set or not."""
        return frozenset(self._read)

    @property
    def left(self) -> list[str]:
        """Reported keys without a counterpart, with the reason."""
        return list(self._left)

    @property
    def unread(self) -> list[str]:
        """Set keys that were not read, that have no default, and for which there is no reason."""
        known = self._read | self.defaults.keys()
        return [name for name in self.settings if name not in known and self.reason(name) is None]

    def reason(self, name: str) -> str | None:
        """Return why a key has no counterpart; None for an unknown key."""
        fits = [key for key in self.reasons if key == name or (key.endswith((".", "_")) and name.startswith(key))]
        return self.reasons[max(fits, key=len)] if fits else None

    @property
    def without_counterpart(self) -> list[str]:
        """Set keys that are in no other list, with the reason."""
        said = "\n".join([*self.carried, *self.approximated, *self.differences, *self.to_do, *self._left])
        lines = list(self._left)
        for name in self.settings:
            own = self.own.get(name, (name,))[0]
            if not re.search(rf"(?<![\w.])(?:{re.escape(name)}|{re.escape(own)})[=:]", said):
                reason = self.reason(name) or "no effect with the other settings of the file"
                lines.append(f"{self.given(name)} ({reason})")
        return lines

    def check_names(self, names: Collection[str] = (), sections: Collection[str] = ()) -> None:
        """Refuse a key that the library does not have.

        Args:
            names: all keys of the library; one that ends in a dot stands for all keys under it. Without them, only a
                key is refused that is a misspelling of one that was read, or of a section that is not known.
            sections: the library's sections, if `names` is not given.

        Raises:
            ConfigError: there is such a key; the message names the nearest one.
        """
        under = tuple(name for name in names if name.endswith("."))
        for name in self.settings if names else self.unread:
            near = None if names else self._meant(name, sections)
            if name not in names and not name.startswith(under) if names else near is not None:
                hint = did_you_mean(name, names) if names else f"did you mean {near!r}?"
                raise ConfigError(f"{self.place(name) or self.path}: {self.library} has no key {name!r}; {hint}")

    def _meant(self, name: str, sections: Collection[str]) -> str | None:
        """Return the key that was read, or has a reason, of which a name is a misspelling; None if there is none."""
        known = [key.split(".") for key in self.read_keys | self.reasons.keys()]
        parts = name.split(".")
        near: str | None = None
        for place, part in enumerate(parts):
            rest = [*parts[:place], *parts[place + 1 :]]
            like = [key[place] for key in known if len(key) == len(parts) and [*key[:place], *key[place + 1 :]] == rest]
            if (meant := misspelt(part, like)) is not None:
                near = ".".join([*parts[:place], meant, *parts[place + 1 :]])
        if near is None and parts[0] not in sections:
            near = nearest(name, [".".join(key) for key in known])
        return near

    def leave_unknown(self) -> None:
        """Leave each key that is neither read nor known to the user: it may affect the training."""
        for name in self.unread:
            self.to_do.append(
                f"{self.given(name)}: not a key of {self.library} that AtomRL knows; it was not translated"
            )
            self._read.add(name)


def put_template(t: Translation, key: str, out: Path) -> None:
    """Translate a chat template that a key contains: it is written to a file next to the config.

    Args:
        key: their key.
        out: path of the config.

    Raises:
        ConfigError: the value is not a template.
    """
    if (template := t(key)) is None:
        return
    if "{" not in str(template):
        raise t.refuse(key, template, TEMPLATE)
    name = f"{out.stem}.jinja"
    t.files[name] = str(template)
    t.put("data.chat_template", str(out.parent / name), because="the template is written to that file")
    t.carried.append(f"{key}: the template -> data.chat_template: {name}")


def put_trackers(t: Translation) -> None:
    """Translate the trackers of `trainer.logger`; those without a counterpart are reported."""
    loggers = t("trainer.logger")
    loggers = [loggers] if isinstance(loggers, str) else list(loggers or [])
    known = [name for name in loggers if name in ("wandb", "tensorboard", "mlflow", "trackio")]
    t.put("tracking.sinks", known, "trainer.logger")
    if unknown := [name for name in loggers if name not in (*known, "console")]:
        t.approximate(f"trainer.logger: {', '.join(unknown)} has no counterpart; metrics.jsonl has every step")


# --------------------------------------------------------------------------------------------------------------------
# The GPUs of a script.

ONE = "for a single card use --gpus 1 --memory 24GiB"


def put_gpus(t: Translation, gpus: int, setting: str, machines: int = 1) -> None:
    """Set the back end: FSDP, on as many GPUs as the run is started on, if the script has several.

    Args:
        gpus: total number of training GPUs.
        setting: the setting that says so, for the report.
        machines: number of machines.
    """
    t.gpus = (gpus, setting)
    if gpus > 1:
        t.tree["backend"] = {"type": "fsdp"}
    t.machines = machines


def gpu_line(t: Translation, rows_per_update: int | None, draws: bool) -> str:
    """Return the first line of the report: how the script's GPUs are translated."""
    if t.gpus is None:
        return "1 GPU: the script does not set the number; the config is for one process"
    count, setting = t.gpus
    if count == 1:
        return f"1 GPU ({setting}): the config is for one process"
    batch = f", {rows_per_update} rows per optimizer step" if rows_per_update else ""
    parts = [
        f"{count} GPUs ({setting}): the config has backend.type=fsdp, which shards weights, gradients and Adam over "
        f"as many GPUs as the run is started on, and its batches are those of all {count} together{batch}: the numbers "
        "are the same on any number of GPUs"
    ]
    if draws:
        several = "or on several with cluster.replicas (docs/guides/distributed_rollout.md)"
        parts.append(f"completions are sampled on the first GPU, {several}")
    if t.machines > 1:
        parts.append(f"on {t.machines} machines start it on each with torchrun (docs/guides/multi_gpu.md)")
    return "; ".join([*parts, ONE])
