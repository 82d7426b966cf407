"""A config file of another library as one of ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atomrl.config import ConfigError, RunConfig, build_config
from atomrl.importers import openrlhf, trl, verl
from atomrl.importers.translation import Translation

LIBRARIES = ("verl", "trl", "openrlhf")


@dataclass(frozen=True)
class Imported:
    """A config, and what became of every key of the other library's."""

    library: str
    source: str
    tree: dict[str, Any]
    config: RunConfig
    carried: tuple[str, ...]
    by_default: tuple[str, ...]
    """The other library's defaults, which are written out."""
    approximated: tuple[str, ...]
    without_counterpart: tuple[str, ...]

    def report(self) -> str:
        """The four lists, for people."""
        lists = {
            "carried": self.carried,
            f"defaults of {self.library}, written out": self.by_default,
            "approximated": self.approximated,
            "no counterpart": self.without_counterpart,
        }
        lines = []
        for title, items in lists.items():
            lines += [f"{title} ({len(items)}):", *(f"  {' '.join(item.split())}" for item in items)]
        return "\n".join(lines)

    def yaml(self) -> str:
        """The config as a file, with what is not as in the source in front."""
        notes = [f"# From {self.library}'s {self.source}, by atomrl import config."]
        for title, items in (("Approximated", self.approximated), ("No counterpart", self.without_counterpart)):
            notes += [f"# {title}:"] * bool(items) + [f"#   {' '.join(item.split())}" for item in items]
        return "\n".join([*notes, yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True, width=110)])


def import_config(path: str | Path, library: str, processes: int | None = None, trainer: str | None = None) -> Imported:
    """Read a YAML file, shell script or Python file of verl, TRL or OpenRLHF. Nothing in it is executed.

    Args:
        library: one of `LIBRARIES`.
        processes: of TRL, whose batch sizes are of one process, where the file does not say how many there are.
        trainer: of TRL, whose config it is (`grpo`, `sft`, `dpo`, `reward`), where the file does not say.

    Raises:
        ConfigError: the file cannot be read, a choice of the objective has no counterpart, or what it says is no valid
            config here either.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    if trainer is not None and library != "trl":
        raise ConfigError(f"--trainer is of TRL; {library} has one")
    if processes is not None and library != "trl":
        raise ConfigError(f"--processes is of TRL, whose batches are of one process; {library}'s are of all")
    try:
        t = (
            trl.translate(path, processes, trainer)
            if library == "trl"
            else {"verl": verl, "openrlhf": openrlhf}[library].translate(path)
        )
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path} says what cannot be read as {library}'s: {error}") from error
    return _imported(t, path)


def _imported(t: Translation, path: Path) -> Imported:
    tree = {key: t.tree[key] for key in RunConfig.model_fields if key in t.tree}  # in the order of a config
    config = build_config(tree, f"{path} (as AtomRL's config)")
    lists = (t.carried, t.by_default, t.approximated, t.without_counterpart)
    return Imported(t.library, path.name, tree, config, *map(tuple, lists))
