"""Import configs and scripts of verl, TRL, OpenRLHF, LLaMA-Factory and SkyRL. Nothing in them is executed.

`import_config` returns a config and a report of every key. A module translates the keys of one library;
`translation.py` is what they fill, `sources.py` reads the files.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atomrl.config import ConfigError, RunConfig, load_config, read_yaml
from atomrl.tools.importers import llamafactory, openrlhf, skyrl, trl, verl
from atomrl.tools.importers.sources import text_of
from atomrl.tools.importers.translation import Translation, gpu_line

LIBRARIES = ("verl", "trl", "openrlhf", "llamafactory", "skyrl")
SUPPORTED = "supported are verl, TRL, OpenRLHF, LLaMA-Factory and SkyRL, and Python scripts of TRL with atomrl run"
KEYS: Sequence[tuple[str, set[str]]] = (
    ("verl", {"actor_rollout_ref"}),
    ("llamafactory", {"stage", "finetuning_type"}),
    ("LLaMA-Factory v1", {"model_class"}),
    ("SkyRL's YAML", {"trainer", "generator"}),
    ("axolotl", {"base_model"}),
    ("ms-swift", {"rlhf_type"}),
    ("prime-rl", {"orchestrator"}),
    *(("NeMo-RL", {key}) for key in ("policy", "cluster", "grpo", "defaults", "checkpointing")),
)
"""Library, and keys that are together at the top of its YAML files."""
CALLS: Mapping[str, str] = {
    "openrlhf": r"openrlhf|train_ppo_ray",
    "skyrl": r"\bskyrl|\btrainer\.(policy|algorithm)\.",
    "verl": r"\b(verl\.|main_ppo|actor_rollout_ref\.)",
    "ms-swift": r"\b(swift|megatron)\s+(rlhf|sft|pt)\b|swift/cli|--rlhf_type",
    "axolotl": r"\baxolotl\b",
    "llamafactory": r"\b(llamafactory-cli|llamafactory)\b",
    "NeMo-RL": r"\bnemo[_-]rl\b|NeMo-RL|examples/run_(grpo|dpo|sft|rm)",
    "prime-rl": r"\bprime[_-]rl\b|^\s*\[(orchestrator|trainer|inference|model|deployment)[\].]|\brl\s+@",
    "trl": r"(^|[\s/])trl\s+\w|trl\.scripts|\.py\b",
}
"""Library -> what its scripts call."""


@dataclass(frozen=True)
class Imported:
    """An imported config, and how each key of the other library was translated."""

    library: str
    source: str
    tree: dict[str, Any]
    config: RunConfig
    gpus: int
    """Number of GPUs that the script trains on; 1 if it does not say."""
    hardware: str
    """How the GPUs are translated."""
    version: str
    """Name and version of the library whose defaults are written out."""
    to_do: tuple[str, ...]
    """Steps that are left to the user."""
    carried: tuple[str, ...]
    by_default: tuple[str, ...]
    """Defaults of the other library that were written into the config."""
    approximated: tuple[str, ...]
    differences: tuple[str, ...]
    """Numbers in which the run will differ from the other library's own, each with both values."""
    without_counterpart: tuple[str, ...]
    files: Mapping[str, str]
    """Files to write next to the config: name -> text."""
    planned: tuple[str, ...] = ()
    """Changes for other hardware, each with what it saves and costs."""

    def _first_line(self) -> str:
        return f"{self.hardware}; what the file does not set is the default of {self.version}"

    def report(self) -> str:
        """Return the report as text: GPUs, steps left to the user, and the lists of keys."""
        lists = {
            **({"changed for the hardware": self.planned} if self.planned else {}),
            "left to you": self.to_do,
            f"numbers that differ from {self.library}'s run": self.differences,
            "approximated": self.approximated,
            "no counterpart": self.without_counterpart,
            "carried": self.carried,
            f"defaults of {self.library}, written out": self.by_default,
        }
        lines = [self._first_line()]
        for title, items in lists.items():
            lines += [f"{title} ({len(items)}):", *(f"  {' '.join(item.split())}" for item in items)]
        return "\n".join(lines)

    def yaml(self) -> str:
        """Return the config as YAML, with the differences to the source as comments at the top."""
        notes = [f"# From {self.library}'s {self.source}, by atomrl import.", f"# {self._first_line()}"]
        for title, items in (
            ("Changed for the hardware", self.planned),
            ("Left to you", self.to_do),
            ("Numbers that differ", self.differences),
            ("Approximated", self.approximated),
            ("No counterpart", self.without_counterpart),
        ):
            notes += [f"# {title}:"] * bool(items) + [f"#   {' '.join(item.split())}" for item in items]
        return "\n".join([*notes, yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True, width=110)])


def import_config(
    path: str | Path,
    library: str | None = None,
    processes: int | None = None,
    trainer: str | None = None,
    out: str | Path | None = None,
) -> Imported:
    """Read a YAML file or shell script of another library. Nothing in it is executed.

    Args:
        library: one of `LIBRARIES`; None detects it.
        processes: number of processes, for TRL's batch sizes per process, if the file does not say it.
        trainer: TRL's trainer (`grpo`, `rloo`, `sft`, `dpo`, `reward`), if the file does not say it.
        out: path of the config; names the files next to it. None: the source with the suffix `.yaml`.

    Raises:
        ConfigError: the file cannot be read, a choice of the objective has no counterpart, or the result is not a valid
            config.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    out = Path(out) if out is not None else path.with_suffix(".yaml")
    if path.suffix in (".py", ".ipynb"):
        raise ConfigError(f"{path} is Python: atomrl run {path} --config-out {out} converts it, without training")
    library = library or library_of(path)
    if trainer is not None and library != "trl":
        raise ConfigError(f"--trainer is an option for TRL; {library} has only one")
    if processes is not None and library != "trl":
        raise ConfigError(
            f"--processes is an option for TRL, whose batch sizes are per process; those of {library} are for all "
            "processes"
        )
    try:
        if library == "trl":
            t = trl.translate(path, out, processes, trainer)
        else:
            with_files = {"verl": verl.translate, "openrlhf": openrlhf.translate, "skyrl": skyrl.translate}
            t = with_files[library](path, out) if library in with_files else llamafactory.translate(path)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a file of {library}: {error}") from error
    return _imported(t, path)


def library_of(path: Path) -> str:
    """Detect the library of a config or script, by its calls or keys.

    Raises:
        ConfigError: it cannot be detected.
    """
    if path.suffix in (".yaml", ".yml"):
        keys = read_yaml(path).keys()
        if (other := next((name for name, marks in KEYS if marks <= keys), None)) is None:
            return "trl"
    else:
        text = text_of(path)
        other = next((name for name, pattern in CALLS.items() if re.search(pattern, text, re.MULTILINE)), None)
    if other in LIBRARIES:
        return other
    if other is None:
        raise ConfigError(f"{path} calls no library that is known: {SUPPORTED}; --from names one of them")
    raise ConfigError(f"{path} is of {other}, which is not supported: {SUPPORTED}")


def _expanded(value: Any) -> Any:
    """Expand paths that begin with `~/`, recursively."""
    if isinstance(value, dict):
        return {key: _expanded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _unresolved(value: Any, sign: str, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, line of its text) where a line has a sign of what the file alone does not say."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _unresolved(item, sign, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _unresolved(item, sign, key)
    elif isinstance(value, str):
        yield from ((key, line) for line in value.splitlines() if re.search(sign, line))


def _name_known(t: Translation, key: str, value: Any, sign: str) -> Any:
    """Return a name without the parts that the file alone does not say, such as a date, if anything is left of it; the
    report says so."""
    if not isinstance(value, str) or not re.search(sign, value):
        return value
    name = re.sub(r"\$\([^()]*\)|\$\{[^{}]*\}|\$\w+|\$\$|`[^`]*`", "", value)
    name = re.sub(r"([-_./ ])[-_./ ]+", r"\1", name).strip("-_./ ")
    if not name or re.search(sign, name):
        return value
    t.approximate(_with_sources(t, f"{key}: {name!r}, without what is known only when the script runs"))
    return name


def _imported(t: Translation, path: Path) -> Imported:
    tree = {key: _expanded(t.tree[key]) for key in RunConfig.model_fields if key in t.tree}  # in the order of a config
    sign, known_to = (r"\$\{", "OmegaConf") if path.suffix in (".yaml", ".yml") else (r"\$[\w{($]|`", "the shell")
    for section, key in ((tree, "run_name"), (tree.get("tracking", {}), "wandb_project")):
        if key in section:
            section[key] = _name_known(t, "run_name" if section is tree else f"tracking.{key}", section[key], sign)
    try:
        config = load_config(tree, name=f"{path} (as AtomRL's config)")
    except ConfigError as error:
        raise ConfigError("\n".join(_with_sources(t, line) for line in str(error).splitlines())) from error
    rows = config.train.rows_per_update
    for key, text in _unresolved({**tree, **t.files}, sign):
        t.to_do.append(_with_sources(t, f"{key}: {text.strip()!r} is known only to {known_to}: write its value"))
    return Imported(
        library=t.library,
        source=path.name,
        tree=tree,
        config=config,
        gpus=t.gpus[0] if t.gpus else 1,
        hardware=gpu_line(t, rows, config.kind == "rl"),
        version=t.version,
        to_do=_once(t.to_do),
        carried=_once(t.carried),
        by_default=_once(t.by_default),
        approximated=_once(t.approximated),
        differences=_once(t.differences),
        without_counterpart=_once(t.without_counterpart),
        files=dict(t.files),
    )


def _with_sources(t: Translation, line: str) -> str:
    """Add to an error about one of our keys the library's keys from which it was made, with file and line."""
    key = re.match(r"\s*([a-z_]+(?:\.\w+)*)", line)
    names = [] if key is None else [
        name for ours, theirs in t.sources.items() if key[1] == ours or key[1].startswith(f"{ours}.") for name in theirs
    ]  # fmt: skip
    sources = ", ".join(f"{t.named(name)}={t.given(name).partition('=')[2]}" for name in dict.fromkeys(names))
    return f"{line} (from {sources})" if sources else line


def _once(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lines))
