"""The course of a translation: which of the other library's keys were read, and what became of them."""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from atomrl.common.errors import nearest
from atomrl.config import ConfigError
from atomrl.config.files import merge_trees, nest, scalar
from atomrl.tools.importers.sources import Given, text_of


def same(value: Any) -> Any:
    """The value as it is."""
    return value


ON, OFF = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")
TEMPLATE = (
    "the chat template is the tokenizer's: save it beside the model as chat_template.jinja, and leave the key out"
)
"""Why a key that names another chat template is refused."""


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one is with a letter or two wrong; None where it is another name.

    Example:
        >>> misspelt("lrr", ["lr", "n"]), misspelt("image_patch_size", ["gen_batch_size"])
        ('lr', None)
    """
    return nearest(name, known, max(0.5, 1 - 1.5 / len(name)))


Moves = Mapping[str, tuple[str | tuple[str, ...], Callable[[Any], Any]]]
"""Our key -> theirs (the first that is given counts), and what makes our value of it."""


class Translation:
    """Keys of another library on their way to ours.

    Args:
        library: its name, for messages.
        given: what the file says.
        defaults: what the library takes for what the file does not say.
        path: of the file, for messages.

    Example:
        >>> t = Translation("verl", {"rollout.n": 8}, {"lr": 1e-6})
        >>> t.move({"rollout.completions_per_prompt": ("rollout.n", int), "train.learning_rate": ("lr", float)})
        >>> t.tree
        {'rollout': {'completions_per_prompt': 8}, 'train': {'learning_rate': 1e-06}}
        >>> t.carried, t.by_default
        (['rollout.n=8 -> rollout.completions_per_prompt: 8'], ['lr=1e-06 -> train.learning_rate: 1e-06'])
    """

    def __init__(self, library: str, given: Given, defaults: Mapping[str, Any], path: Path | None = None) -> None:
        self.library, self.path = library, path
        self.places: dict[str, str] = {}
        """Key -> the file and line that give it, of a Python script."""
        self.sources: dict[str, list[str]] = {}
        """Our key -> the keys that were given for it."""
        self.given, self.defaults = given, defaults
        self.tree: dict[str, Any] = {}
        self.carried: list[str] = []
        self.by_default: list[str] = []
        self.approximated: list[str] = []
        self.differences: list[str] = []
        """Numbers in which the run differs from the library's, each with both values."""
        self.to_do: list[str] = []
        """Steps that are left to the user, with their lines."""
        self.files: dict[str, str] = {}
        """Files to write beside the config: name -> text."""
        self.gpus: tuple[int, str] | None = None
        """How many GPUs the script trains on, and what says so; None: it does not say."""
        self.machines = 1
        self.rows_are_put = False
        """`data.train` is what a Python script makes of its rows."""
        self.reasons: dict[str, str] = {}
        """Why keys have no counterpart, by a key or by the beginning of keys, which ends in a dot or an underscore."""
        self._left: list[str] = []
        self._read: set[str] = set()

    def name_of(self, names: Iterable[str]) -> str | None:
        """The first of some names of a key that is given, else the first that has a default."""
        names = tuple(names)
        self._read |= set(names)
        return next((name for kind in (self.given, self.defaults) for name in names if name in kind), None)

    def __call__(self, *names: str) -> Any:
        """The value of a key that has these names: as given, else the library's default, else None."""
        name = self.name_of(names)
        return None if name is None else self.given.get(name, self.defaults.get(name))

    def named(self, name: str) -> str:
        """A key of the library's, for an error, with the file and line that give it: `grpo.py:12: TRL's beta`."""
        place = self.place(name)
        return f"{place}: {self.library}'s {name}" if place else f"{self.library}'s {name}"

    def place(self, name: str) -> str:
        """The file and line that give a key; without a line where several might, and "" for the library's default.

        A Python script says the places of its arguments (`places`); of flags and YAML it is the line with the key.
        """
        name = name if name in self.given else name.partition(".")[0]
        if name not in self.given or self.path is None:
            return ""
        if name in self.places or self.path.suffix == ".py":
            return self.places.get(name, str(self.path))
        for word in (name, name.rpartition(".")[2]):
            pattern = rf"^[^#]*(?<![\w.-])(--)?\+*{re.escape(word).replace('_', '[-_]')}(?![\w.-])"
            lines = text_of(self.path).splitlines()
            found = [number for number, line in enumerate(lines, start=1) if re.search(pattern, line)]
            if len(found) == 1:
                return f"{self.path}:{found[0]}"
        return str(self.path)

    def number(self, name: str) -> float:
        """The value of a key that is a number.

        Raises:
            ConfigError: it is none, with the key.
        """
        return self.numbers(name, 1)[0]

    def whole(self, name: str) -> int:
        """Likewise a whole number."""
        found = self.number(name)
        if found % 1:  # which of infinity is none either
            raise ConfigError(f"{self.named(name)}={found:g} is no whole number")
        return int(found)

    def count(self, name: str) -> int:
        """Likewise a whole number that is 1 at least."""
        if (found := self.whole(name)) < 1:
            raise ConfigError(f"{self.named(name)}={found} is not 1 at least")
        return found

    def flag(self, *names: str) -> bool:
        """Whether a key that has these names is on; null is off.

        Raises:
            ConfigError: it is neither on nor off, such as a variable that the file does not set.
        """
        value = self(*names)
        if value is None or isinstance(value, bool):
            return bool(value)
        word = str(value).lower()
        if word not in (*ON, *OFF):
            raise ConfigError(f"{self.named(str(self.name_of(names)))}={value} is neither true nor false: write which")
        return word in ON

    def mapping(self, name: str) -> dict[str, Any]:
        """The value of a key that is a mapping, or JSON; empty where it is not given.

        Raises:
            ConfigError: it is neither.
        """
        value = self(name)
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            value = name
        if not isinstance(value, Mapping | None):
            raise ConfigError(f"{self.named(name)}={self(name)} is no mapping")
        return dict(value or {})

    def numbers(self, name: str, count: int) -> list[float]:
        """The value of a key that is so many numbers."""
        value = self(name)
        try:
            items = value if isinstance(value, list | tuple) else [value]
            found = [] if any(isinstance(item, bool) for item in items) else [float(item) for item in items]
        except (TypeError, ValueError):
            found = []
        if len(found) != count:
            raise ConfigError(f"{self.named(name)}={value} is not {'a number' if count == 1 else f'{count} numbers'}")
        return found

    def is_given(self, *names: str) -> bool:
        """Whether the file says it."""
        return any(self.given.get(name) is not None for name in names)

    def put(self, key: str, value: Any, *names: str, because: str = "") -> None:
        """Our key and its value, made of theirs.

        Args:
            names: theirs; those that are given are said, else that it is the library's default.
            because: where the two do not mean quite the same: what is other.
        """
        self.tree = merge_trees(self.tree, nest(key, value))
        self._read |= set(names)
        said = [f"{name}={self.given[name]}" for name in names if name in self.given]
        self.sources[key] = [name for name in names if name in self.given]
        defaults = [f"{name}={self.defaults[name]}" for name in names if name in self.defaults]
        line = f"{', '.join(said or defaults) or self.library} -> {key}: {value}"
        if because:
            self.approximated.append(f"{line} ({because})")
        else:
            (self.carried if said else self.by_default).append(line)

    def move(self, moves: Moves) -> None:
        """Move keys by name alone; one that is neither given nor has a default, or is null, keeps our default."""
        readers: dict[Any, Callable[[str], Any]] = {int: self.whole, float: self.number, bool: self.flag}
        for key, (names, make) in moves.items():
            name = self.name_of((names,) if isinstance(names, str) else names)
            if name is not None and (value := self(name)) is not None:
                try:
                    made = readers[make](name) if make in readers else make(value)
                except ConfigError:
                    raise
                except (TypeError, ValueError, IndexError) as error:
                    raise ConfigError(f"{self.named(name)}={value!r}: {error}") from None
                self.put(key, made, name)

    def chat_template_kwargs(self, *names: str) -> None:
        """Variables of the chat template, whose key has these names: a mapping, JSON, or a key for each of them.

        Raises:
            ConfigError: it is none of these.
        """
        for name in names:
            given, inside = self(name), {key for key in self.given if key.startswith(f"{name}.")}
            found = {key.removeprefix(f"{name}."): self.given[key] for key in inside}
            if isinstance(given, Mapping):
                # Hydra writes {key:value}, which YAML reads as a key without a value.
                pairs = [str(key).partition(":") if value is None else (key, "", value) for key, value in given.items()]
                found |= {str(key): scalar(value) if colon else value for key, colon, value in pairs}
            elif given is not None:
                raise ConfigError(f"{self.named(name)}={given} cannot be read: write it as JSON, in the file itself")
            if found:
                self.put("data.chat_template_kwargs", found, *([name] if name in self.given else []), *sorted(inside))

    def nearly(self, line: str) -> None:
        """Say what is not quite the same."""
        self.approximated.append(line)

    def nearly_all(self, lines: Iterable[str]) -> None:
        """Say several such things, each once."""
        self.approximated += [line for line in lines if line not in self.approximated]

    def put_engine(self, *names: str, engine: str = "vLLM") -> None:
        """`rollout.engine`, where the library draws with an engine apart from the trainer: SGLang and hf are kept, and
        vLLM is `auto`."""
        kept = engine in ("sglang", "hf")
        self.put("rollout.engine", engine if kept else "auto", *names)
        here = f"{engine}'s" if kept else "the trainer's own with the native engine, else vLLM's (rollout.engine=auto)"
        self.differ("log-probs of the engine", f"{engine}'s, apart from the trainer's", here)

    def differ(self, what: str, theirs: str, here: str) -> None:
        """Say a number of the run that is another here, with both values."""
        self.differences.append(f"{what}: {self.library} {theirs}; here {here}")

    def leave(self, name: str, why: str) -> None:
        """A key without a counterpart, with what to say of it."""
        self._read.add(name)
        if name in self.given:
            self._left.append(f"{name}={self.given[name]} ({why})")

    def leave_said(self, said: str, why: str) -> None:
        """Likewise of what is no key, as it is to be said."""
        self._left.append(f"{said} ({why})" if why else said)

    def refuse(self, name: str, value: Any, why: str) -> ConfigError:
        """The error for a key that decides what is trained and has no counterpart: a config without it would lie."""
        return ConfigError(f"{self.named(name)}={value} has no counterpart, and decides what is trained: {why}")

    def refuse_given(self, reasons: Mapping[str, str]) -> None:
        """Refuse keys that decide what is trained, where they are on: name -> why there is no counterpart."""
        for name, why in reasons.items():
            if value := self(name):
                raise self.refuse(name, value, why)

    def choice(self, name: str, value: Any, table: Mapping[Any, Any]) -> Any:
        """The value's entry in a table; all else is refused."""
        if not isinstance(value, Hashable) or value not in table:
            raise self.refuse(name, value, f"those that have one are {', '.join(map(str, table))}")
        return table[value]

    @property
    def known(self) -> frozenset[str]:
        """Keys that were asked for, given or not."""
        return frozenset(self._read)

    @property
    def left(self) -> list[str]:
        """Keys without a counterpart, each with what is said of it."""
        return list(self._left)

    @property
    def unread(self) -> list[str]:
        """Keys that are given, were not asked for, and of which no reason says why."""
        return [name for name in self.given if name not in self._read and self.reason(name) is None]

    def reason(self, name: str) -> str | None:
        """Why a key has no counterpart; None: nothing is known of it."""
        fits = [key for key in self.reasons if key == name or (key.endswith((".", "_")) and name.startswith(key))]
        return self.reasons[max(fits, key=len)] if fits else None

    @property
    def without_counterpart(self) -> list[str]:
        """Keys that were given and not read, with the reason."""
        found = list(self._left)
        for name, value in self.given.items():
            if name not in self._read:
                reason = self.reason(name)
                found.append(f"{name}={value} ({reason or f'AtomRL knows no such key of {self.library}'})")
        return found


# --------------------------------------------------------------------------------------------------------------------
# The GPUs of a script: the first line of a report says what becomes of them.

ONE = "--gpus 1 --memory 24GiB plans it for one card"


def put_gpus(t: Translation, gpus: int, said: str, machines: int = 1) -> None:
    """Train on as many GPUs as the run is started on, where the script has several.

    Args:
        gpus: of all machines that train.
        said: what of the script says so.
        machines: that they are in.
    """
    t.gpus = (gpus, said)
    if gpus > 1:
        t.tree["backend"] = {"type": "fsdp"}
    t.machines = machines


def gpu_line(t: Translation, rows_per_update: int | None, draws: bool) -> str:
    """Return the first line of the report: what becomes of the script's GPUs."""
    if t.gpus is None:
        return "1 GPU: the script does not say on how many it runs; the config is for one process"
    count, said = t.gpus
    if count == 1:
        return f"1 GPU ({said}): the config is for one process"
    batch = f", {rows_per_update} rows an optimizer step" if rows_per_update else ""
    parts = [
        f"{count} GPUs ({said}): the config has backend.type=fsdp, which shards weights, gradients and Adam "
        "over as many "
        f"GPUs as the run is started on, and its batches are those of all {count} together{batch}: the same "
        "numbers on any"
    ]
    if draws:
        several = "on several with cluster.replicas (docs/guides/distributed_rollout.md)"
        parts.append(f"completions are drawn on the first GPU, {several}")
    if t.machines > 1:
        parts.append(f"on {t.machines} machines torchrun starts it on each (docs/guides/multi_gpu.md)")
    return "; ".join([*parts, ONE])
