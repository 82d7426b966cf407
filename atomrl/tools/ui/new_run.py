"""Edit a config's text: read its keys and their lines, and change values without touching the rest of the text.

Nothing here imports the schema, so that a page gets its answer at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import atomrl
from atomrl.common.files import write_text
from atomrl.tracking.reading import Run
from atomrl.tracking.reading.lines import flat_tree, parse_yaml
from atomrl.tracking.reading.lock import lock_owner
from atomrl.tracking.reading.state import Home, home_of

# --------------------------------------------------------------------------------------------------------------------
# Problems of a config, by the key at which a page shows them.

KEYS = Path(__file__).parent / "static" / "keys.json"
WORD = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z0-9_]+)*(?![\w.]*\w)")
TRADE = re.compile(r"^  ([a-z_.]+)=(\S+) +(.+)$", re.MULTILINE)
"""A line of a plan: a setting with which the run needs less memory."""


@cache
def all_keys() -> frozenset[str]:
    """Return all keys of a config, including sections."""
    keys = [item["key"] for item in json.loads(KEYS.read_text(encoding="utf-8"))]
    return frozenset(".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 2))


def problems(lines: Iterable[str]) -> list[dict[str, str | None]]:
    """Return each line as `message`, with the `key` that it is about; None if it names none.

    Example:
        >>> problems(["train.steps: must be positive (got 0)"])
        [{'key': 'train.steps', 'message': 'must be positive (got 0)'}]
        >>> problems(["unknown key 'train.stepz'; did you mean 'train.steps'?"])[0]["key"]
        'train.stepz'
        >>> problems(["reward.functions.0.weight: no number", "it is odd"])[0]["key"]
        'reward.functions'
    """
    messages = []
    for line in filter(None, map(str.strip, lines)):
        key, colon, rest = line.partition(": ")
        messages.append({"key": key_in(line), "message": rest if colon and key in all_keys() else line})
    return messages


def key_in(line: str) -> str | None:
    """Return the first key in a message, or None; also the key of an `unknown key` error."""
    if unknown := re.match(r"\s*unknown key '([^']+)'", line):
        return unknown[1]
    for word in WORD.findall(line):
        parts = word.split(".")
        for depth in range(len(parts), 0, -1):
            key = ".".join(parts[:depth])
            # A single word may be plain English: it counts as a section only before a colon or an equals sign.
            if key in all_keys() and ("." in key or re.search(rf"(?<![\w.]){key}[:=]", line)):
                return key
    return None


def plan_problems(text: str) -> list[dict[str, str | None]]:
    """Extract from a plan that does not fit the settings with which the run needs less memory.

    Example:
        >>> plan_problems("  train.rows_per_micro_batch=1      2.0 GiB, fits: slower")
        [{'key': 'train.rows_per_micro_batch', 'message': 'does not fit; with 1: 2.0 GiB, fits: slower'}]
    """
    trades = [
        (key, f"does not fit; with {value}: {' '.join(rest.split())}") for key, value, rest in TRADE.findall(text)
    ]
    return [{"key": key, "message": message} for key, message in trades if key in all_keys()] or [
        {"key": "model.path", "message": "does not fit, and no single setting is enough: use a smaller model"}
    ]


# --------------------------------------------------------------------------------------------------------------------
# Starting points of a new run: a template, config files, or an earlier run.

TEMPLATE = """# GRPO on a built-in task, with the model of `atomrl train configs/quickstart_sft.yaml`.
run_name: my-run
output_dir: runs
model:
  path: runs/quickstart-warm-start/model
data:
  train: chain
  train_size: 20000
  eval: chain
  eval_size: 500
rollout:
  prompts_per_step: 64
  completions_per_prompt: 8
  max_completion_tokens: 48
reward:
  functions: [strict_math]
algorithm:
  name: grpo
train:
  steps: 60
  learning_rate: 1.0e-3
"""
MAX_CONFIGS = 300


class Configs:
    """The YAML files of the working directory, of its folder `configs`, and of the `configs` of a checkout."""

    def __init__(self) -> None:
        here, shipped = Path.cwd(), Path(atomrl.__file__).parents[1] / "configs"
        paths = [
            *sorted(here.glob("*.yaml")),
            *sorted((here / "configs").rglob("*.yaml")),
            *sorted(shipped.rglob("*.yaml")),
        ]
        self._files: dict[str, tuple[str, Path]] = {}
        for path in dict.fromkeys(path.resolve() for path in paths if path.is_file() and not path.is_symlink()):
            base = here if path.is_relative_to(here) else shipped.parent
            name = path.relative_to(base).as_posix()
            self._files.setdefault(hashlib.sha256(str(path).encode()).hexdigest()[:12], (name, path))

    def listed(self) -> list[dict[str, str]]:
        """Return `id`, `name` and `about` (the first comment) of each file."""
        return [
            {"id": own, "name": name, "about": _comment(path)}
            for own, (name, path) in list(self._files.items())[:MAX_CONFIGS]
        ]

    def text(self, config_id: str) -> str:
        """Return the text of a file.

        Raises:
            LookupError: there is none with this id.
        """
        if config_id not in self._files:
            raise LookupError("no such config")
        return self._files[config_id][1].read_text(encoding="utf-8", errors="replace")


def _comment(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline(400)
    except OSError:
        return ""
    return first.strip("# \n") if first.startswith("#") else ""


def started_from(text: str, root: Path) -> dict[str, Any]:
    """Make a draft from a config: in the folder of the runs, with an unused name.

    Returns:
        `yaml`, and the result of `read` for it.
    """
    try:
        values = read(text)["given"]
        name = str(values.get("run_name") or "my-run")
        free, count = name, 2
        while (root / free).exists():
            free, count = f"{name}-{count}", count + 1
        if free != values.get("run_name"):
            text = edited(text, "run_name", yaml.safe_dump(free).partition("\n")[0])
        if values.get("output_dir") != str(root):
            text = edited(text, "output_dir", yaml.safe_dump(str(root)).partition("\n")[0])
        return {"yaml": text, **read(text)}
    except DraftError as error:
        return {"yaml": text, "given": {}, "lines": {}, "errors": [str(error)]}


# --------------------------------------------------------------------------------------------------------------------
# Reading and editing the text.

MAX_TEXT = 200_000
Tree = dict[str, Any]


class DraftError(ValueError):
    """The text is not a config. `line` is the line of the error, from 0, or None."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def read(text: str) -> dict[str, Any]:
    """Read a config's text.

    Returns:
        `given`: dotted key -> value; `lines`: dotted key -> its line, from 0, including sections.

    Raises:
        DraftError: invalid YAML, not a mapping, or too long.

    Example:
        >>> read("train:\\n  steps: 3\\n")
        {'given': {'train.steps': 3}, 'lines': {'train': 0, 'train.steps': 1}}
    """
    return {"given": flat_tree(_tree(text)), "lines": dict(_lines(_root(text), ""))}


def edited(text: str, key: str, value: str | None) -> str:
    """Set one key in a config's text. Comments and the order of keys are preserved if the text can be edited in place;
    else it is dumped anew.

    Args:
        key: dotted key.
        value: the value as YAML; None removes the key, and its section if that becomes empty.

    Raises:
        DraftError: the text is not a config.

    Example:
        >>> print(edited("train:\\n  steps: 3  # few\\nseed: 1\\n", "train.learning_rate", "1e-3"), end="")
        train:
          steps: 3  # few
          learning_rate: 0.001
        seed: 1
        >>> print(edited("model: {path: m}  # mine\\n", "model.lora.rank", "8"), end="")
        model: {path: m, lora: {rank: 8}}  # mine
        >>> print(edited("train:\\n  steps: 3\\nseed: 1\\n", "train.steps", None), end="")
        seed: 1
    """
    parts, tree = key.split("."), _tree(text)
    new = _changed(tree, parts, None if value is None else _value(value), value is None)
    try:
        changed = _in_place(text, parts, None if value is None else _written(_value(value)))
        if _tree(changed) == new:
            return changed
    except (DraftError, LookupError):
        pass
    return yaml.safe_dump(new, sort_keys=False, allow_unicode=True) if new else ""


def _tree(text: str) -> Tree:
    if len(text) > MAX_TEXT:
        raise DraftError(f"the config has more than {MAX_TEXT:,} characters")
    try:
        tree = parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise DraftError(f"not valid YAML: {error.problem}", mark.line if mark else None) from None
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise DraftError(f"not valid YAML: {str(error) or 'nested too deep'}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise DraftError(f"a config must be a mapping of sections, not {type(tree).__name__}")
    return tree


def _root(text: str) -> Any:
    return yaml.compose(text, yaml.SafeLoader)


def _lines(node: Any, prefix: str) -> list[tuple[str, int]]:
    lines = []
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{prefix}{key.value}"
        lines += [(name, key.start_mark.line), *_lines(value, f"{name}.")]
    return lines


def _value(text: str) -> Any:
    """Parse a typed value as YAML; `1e-6`, a string in YAML, becomes a number."""
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError):
        return text
    if isinstance(value, str) and text.strip()[:1] not in ("'", '"'):
        with suppress(ValueError):
            return float(value)
    return value


def _written(value: Any) -> str:
    """Dump a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _changed(tree: Tree, parts: list[str], value: Any, remove: bool) -> Tree:
    first, *rest = parts
    tree = dict(tree)
    if rest:
        old = tree.get(first)
        section = old if isinstance(old, dict) else {"type": old} if isinstance(old, str) and not remove else {}
        inner = _changed(section, rest, value, remove)
        if inner or not remove:
            tree[first] = inner
        elif first in tree:
            del tree[first]
    elif remove:
        tree.pop(first, None)
    else:
        tree[first] = value
    return tree


def _in_place(text: str, parts: list[str], value: str | None) -> str:
    """Set a key by replacing or inserting text.

    Raises:
        LookupError: the text's layout does not allow it.
    """
    if text and not text.endswith("\n"):
        text += "\n"
    node = _root(text)
    if node is None:
        if value is None:
            raise LookupError(parts)
        return text + _nested(parts, value, 0)
    path: list[tuple[Any, Any, Any]] = []
    for part in parts:
        pair = next((pair for pair in node.value if pair[0].value == part), None)
        if pair is None:
            break
        path.append((node, *pair))
        if not isinstance(pair[1], yaml.MappingNode):
            break
        node = pair[1]
    missing = parts[len(path) :]
    if value is None:
        return text if missing else _without(text, path)
    if not missing:
        old = path[-1][2]
        if not isinstance(old, yaml.ScalarNode) and not old.flow_style:
            raise LookupError(parts)  # the marks of a block do not say where it ends
        space = " " if text[old.start_mark.index - 1] == ":" else ""
        return text[: old.start_mark.index] + space + value + text[old.end_mark.index :]
    if path and not isinstance(path[-1][2], yaml.MappingNode):
        raise LookupError(parts)
    if node.flow_style:
        end = text.rindex("}", 0, node.end_mark.index)
        flow = "".join(f"{part}: {{" for part in missing[:-1]) + f"{missing[-1]}: {value}" + "}" * (len(missing) - 1)
        return text[:end] + (", " if node.value else "") + flow + text[end:]
    at = text.index("\n", _end(node)) + 1
    return text[:at] + _nested(missing, value, node.value[0][0].start_mark.column) + text[at:]


def _without(text: str, path: list[tuple[Any, Any, Any]]) -> str:
    while len(path) > 1 and len(path[-1][0].value) == 1:  # a section that would be empty goes as well
        path = path[:-1]
    node, key, value = path[-1]
    if node.flow_style:
        raise LookupError(key.value)
    start = text.rindex("\n", 0, key.start_mark.index) + 1 if "\n" in text[: key.start_mark.index] else 0
    return text[:start] + text[text.index("\n", max(_end(value), key.end_mark.index)) + 1 :]


def _end(node: Any) -> int:
    """Return the offset at which the last value in a node ends."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return max(_end(last[1]), last[0].end_mark.index) if isinstance(node, yaml.MappingNode) else _end(last)
    return int(node.end_mark.index)


def _nested(parts: list[str], value: str, column: int) -> str:
    lines = [f"{' ' * (column + 2 * depth)}{part}:" for depth, part in enumerate(parts)]
    return "\n".join(lines) + f" {value}\n"


# --------------------------------------------------------------------------------------------------------------------
# Start, stop, resume and plan runs from a page. Each run is a process in a session of its own, so it continues if the
# page or the server is closed.

FOLDER = ".launches"
"""Subfolder with configs, logs and records of started runs. They cannot be in the run's own folder, which must be empty
at its start."""
ENDING_S = 60.0
"""Seconds that a run may take to exit after it wrote its summary."""
PLAN_S = 120.0

RUN = """
import json, sys
from atomrl.common.functions import search_in
sys.argv[0] = "atomrl"
for folder in json.loads(sys.argv.pop(1)):
    search_in(folder)
from atomrl.cli.main import main; sys.exit(main())
"""


class LaunchError(ValueError):
    """A run cannot be started, stopped or resumed; the message says why."""


class Launcher:
    """Starts, stops and resumes runs.

    Args:
        root: the folder that is served; runs are only started in it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._planned: tuple[tuple[str, str], dict[str, Any]] | None = None

    def refusal(self, run_dir: str) -> tuple[str, str] | None:
        """Return (config key, reason) if no run can be started in a folder, else None."""
        folder = Path(run_dir).resolve()
        if not folder.is_relative_to(self.root) or folder == self.root:
            return "output_dir", f"{folder} is not in {self.root}, which this page shows; set output_dir={self.root}"
        if (folder / "metrics.jsonl").exists():
            return "run_name", f"the run {folder.name} already exists; use another run_name"
        if folder.is_dir() and any(folder.iterdir()):
            return "run_name", f"the folder {folder} already exists and is not empty; use another run_name"
        return None

    def start(self, text: str, run_dir: str, home: Home) -> dict[str, Any]:
        """Start a run.

        Args:
            text: its config, already validated and planned.
            run_dir: its folder, by the config.
            home: where the run was started that it is a variant of.

        Raises:
            LaunchError: the folder is outside of `root`, or the run exists.
        """
        folder = Path(run_dir).resolve()
        if refused := self.refusal(run_dir):
            raise LaunchError(refused[1])
        config = Path(f"{self._stem(folder.name)}.yaml")
        write_text(config, text)
        config.chmod(0o600)  # it may contain secrets, unlike the run's own folder
        return self.spawn(["train", str(config), *_where(folder)], folder, home)

    def resume(self, folder: Path) -> dict[str, Any]:
        """Resume a run from its newest checkpoint.

        Raises:
            LaunchError: it is running.
        """
        end = time.monotonic() + ENDING_S
        while lock_owner(folder) is not None:  # a finished run may still be shutting down
            if not (folder / "summary.json").exists() or time.monotonic() > end:
                raise LaunchError("the run is still running")
            time.sleep(0.1)
        config, place = folder / "config.yaml", folder.resolve()
        if not config.is_file() or config.is_symlink():
            raise LaunchError("the run has no config.yaml")
        home = home_of(Run(folder).environment)
        return self.spawn(["train", str(config.resolve()), *_where(place), "--resume"], place, home)

    def plan(self, text: str, home: Home) -> dict[str, Any]:
        """Run `atomrl plan` for a config: it loads data and rewards, but no weights.

        The newest result is cached, since a run is started after its plan was shown.

        Returns:
            `text`; `fits`, None without a plan; `late`, True after a timeout; `problems`, the reasons not to start the
            run, by key; `rows`, the first rows of the data.
        """
        key = text, str(home)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._plan(text, home)
        return self._planned[1]

    def _plan(self, text: str, home: Home) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as place:
            config = Path(place, "config.yaml")
            config.write_text(text, encoding="utf-8")
            command = [sys.executable, "-P", "-c", RUN, json.dumps(home.functions_in), "plan", str(config), "--json"]
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=home.folder,
                    timeout=PLAN_S,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                message = f"no plan within {PLAN_S:.0f} s; run atomrl plan in a terminal"
                return {"text": message, "fits": None, "late": True, "problems": [], "rows": []}
        planned = json.loads(done.stdout) if done.stdout else {"text": []}  # nothing after an error
        output, fits = "\n".join([*planned["text"], done.stderr]).strip(), {0: True, 1: False}.get(done.returncode)
        if fits is None:
            reasons = problems(refusals(done.stderr, str(config)))
        else:
            reasons = [] if fits else plan_problems(output)
        return {"text": output, "fits": fits, "late": False, "problems": reasons, "rows": planned.get("rows", [])}

    def stop(self, folder: Path) -> dict[str, Any]:
        """Ask a run to end after its current step.

        Raises:
            LaunchError: no process on this machine runs it.
        """
        process = lock_owner(folder)
        if not process or process == os.getpid():
            raise LaunchError("no process on this machine runs it")
        try:
            os.kill(process, signal.SIGTERM)
        except OSError as error:
            raise LaunchError(f"cannot signal process {process}: {error.strerror}") from None
        return {"process": process}

    def log_of(self, folder: Path) -> Path | None:
        """Return the log of the newest start of a run from a page, or None."""
        path, newest = str(folder.resolve()), None
        for record in sorted((self.root / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
            try:
                if json.loads(record.read_text(encoding="utf-8")).get("run") == path:
                    newest = record.with_suffix(".log")
            except (OSError, ValueError, AttributeError):
                continue
        return newest if newest is not None and newest.is_file() and not newest.is_symlink() else None

    def _stem(self, name: str) -> Path:
        safe = re.sub(r"[^\w.-]", "_", name)[:60]
        return self.root / FOLDER / f"{safe}.{time.strftime('%Y%m%d-%H%M%S')}.{secrets.token_hex(3)}"

    def spawn(self, arguments: Sequence[str], folder: Path, home: Home) -> dict[str, Any]:
        """Start `atomrl` with these arguments in a process of its own, and record it.

        Args:
            folder: folder of the run.
            home: its working directory and the folders of its functions.
        """
        command = [sys.executable, "-P", "-c", RUN, json.dumps(home.functions_in), *arguments]
        with self._lock:
            stem = self._stem(folder.name)
            stem.parent.mkdir(parents=True, exist_ok=True)
            with Path(f"{stem}.log").open("ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    cwd=home.folder,
                )  # fmt: skip
        threading.Thread(target=process.wait, daemon=True).start()  # reap it, so that it does not become a zombie
        record = {"run": str(folder), "command": ["atomrl", *arguments], "process": process.pid, "time": time.time()}
        write_text(Path(f"{stem}.json"), json.dumps(record) + "\n")
        return record | {"name": folder.relative_to(self.root).as_posix()}


def refusals(stderr: str, config: str) -> list[str]:
    """Return the lines of a command's error, without `error:` and the path of the config.

    Example:
        >>> refusals("error: c.yaml:\\n  train.steps: must be positive", "c.yaml")
        ['train.steps: must be positive']
    """
    lines = [line.strip().removeprefix("error: ").removeprefix(f"{config}:").strip() for line in stderr.splitlines()]
    return [line for line in lines if line]


def _where(folder: Path) -> list[str]:
    """Return the overrides that place a run in a folder; quoted, since a folder may be called 7."""
    return [f"output_dir={json.dumps(str(folder.parent))}", f"run_name={json.dumps(folder.name)}"]
