"""Lines of JSON in a file that another process may be writing."""

import fcntl
import json
import logging
import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml

from atomrl.common.files import open_file

MAX_NESTING, MAX_VALUES = 100, 100_000
"""Of a file with one mapping: levels, and values with those that aliases repeat."""
BLOCK = 2**19
"""Bytes that are read at once: with all that is made of them they should fit in a cache."""
MARK = 64
"""Bytes before the place that was read up to, by which a file that was written anew is told from one that grew: its
inode may be the old one's again."""


class ReadError(ValueError):
    """A file of a run cannot be read; the message says which, where and why."""


def json_reader() -> Callable[[bytes], Any]:
    """`json.loads`, or orjson's where it is installed: three times as fast. What is nested too deep is a ValueError."""

    def plain(line: bytes) -> Any:
        try:
            return json.loads(line)
        except RecursionError:
            raise ValueError("nested too deep") from None

    try:
        import orjson
    except ImportError:
        return plain

    def loads(line: bytes) -> Any:
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:  # NaN and infinities, which `json` writes and reads
            return plain(line)

    return loads


loads = json_reader()


def read_mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON or YAML file that holds one mapping; empty where it is not there or cannot be read, which is noted.

    Args:
        problems: gets a line that says what is wrong.
    """
    try:
        with open_file(path) as file:
            text = file.read().decode("utf-8", errors="replace")
        value = (_parse_json if path.suffix == ".json" else parse_yaml)(text)
    except FileNotFoundError:
        return {}
    except RecursionError:
        problems.append(f"{path.name} is nested without end")
        return {}
    # The others are PyYAML's, of a tag whose value is none of its kind: `!!bool maybe`, `!!int ''`, `!!timestamp x`.
    except (OSError, ValueError, LookupError, AttributeError, TypeError, yaml.YAMLError) as error:
        problems.append(f"{path.name} cannot be read: {(str(error) or repr(error)).splitlines()[0]}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds no mapping")
        return {}
    return cast(dict[str, Any], value)


def _parse_json(text: str) -> Any:
    value = json.loads(text)
    _check_size(value)
    return value


def parse_yaml(text: str) -> Any:
    """Read the values of a YAML text.

    Raises:
        yaml.YAMLError: it is none.
        RecursionError: it is nested too deep, or holds itself.
        ValueError: it has too many values.
    """
    # The loader in C is ten times as fast, and equally safe; but what its stack is too small for ends the process.
    kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, kind):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise RecursionError
    loader = kind(text)
    node = loader.get_single_node()
    _check_size(node)  # before aliases and merges make many of few
    return None if node is None else loader.construct_document(node)


def _check_size(value: Any) -> None:
    """Refuse what would have no end: a list that holds itself, aliases that double with each level.

    Raises:
        RecursionError: it is nested too deep.
        ValueError: it has too many values.
    """
    left, count = [(value, 0)], 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > MAX_NESTING:
            raise RecursionError
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values")
        if isinstance(value, yaml.MappingNode):
            inside: Iterable[Any] = chain.from_iterable(value.value)
        elif isinstance(value, yaml.SequenceNode):
            inside = value.value
        else:
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        left += [(one, depth + 1) for one in inside]


class GrowingFile:
    """The whole lines of a file, as they come. A last line without its end is left for later.

    Attributes:
        offset: bytes read so far.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> file = GrowingFile(path)
        >>> _ = path.write_text('{"step": 1}\\n{"st')
        >>> file.read()
        (True, [b'{"step": 1}'])
        >>> _ = path.open("a").write('ep": 2}\\n')
        >>> file.read(), file.read()
        ((False, [b'{"step": 2}']), (False, []))
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0
        self._identity: tuple[int, int] | None = None
        self._mark = b""

    def read(self) -> tuple[bool, list[bytes]]:
        """The lines that are new, of at most `BLOCK` bytes; and whether they are the first ones of a file that was
        made or written anew, so that what was read before is void."""
        try:
            with open_file(self.path) as file:
                anew = self._is_new(file)
                if anew:
                    self.offset = 0
                file.seek(self.offset)
                data = file.read(BLOCK)
                while b"\n" not in data and (more := file.read(BLOCK)):
                    data += more
        except OSError:
            gone, self._identity, self.offset = self._identity is not None, None, 0
            return gone, []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        self._mark = whole[-MARK:] or self._mark
        return anew, whole.splitlines()

    def _is_new(self, file: BinaryIO) -> bool:
        status = os.fstat(file.fileno())
        identity = status.st_dev, status.st_ino
        if identity == self._identity and status.st_size >= self.offset:
            file.seek(max(0, self.offset - len(self._mark)))
            if not self.offset or file.read(len(self._mark)) == self._mark:
                return False
        self._identity, self._mark = identity, b""
        return True


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, none where it is not there; a last line that a kill tore is left out.

    Raises:
        ReadError: a line before the last is not JSON.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ReadError(f"{path}:{number} is not JSON; repair or remove that line") from None
    return rows


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run's folder.

    Raises:
        ReadError: there are none.
    """
    rows = read_metrics(run / "metrics.jsonl")
    if not rows:
        raise ReadError(f"no metrics in {run} (looked for metrics.jsonl); is it the folder of a run?")
    return rows


def flat_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict with dotted keys.

    Example:
        >>> flat_tree({"a": {"b": 1}, "c": [2]})
        {'a.b': 1, 'c': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        flat.update(flat_tree(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return flat


# --------------------------------------------------------------------------------------------------------------------
# The lock of a run's folder: held by the process that writes it, asked after by those that read it.

LOCK = ".lock"
FLOCK = "hhqqi4x"
LOCKS_ANSWER = sys.platform.startswith("linux")
"""Whether the kernel can be asked who holds a lock: `FLOCK` is Linux's."""
log = logging.getLogger(__name__)
_held: dict[Path, list[int]] = {}
"""Folders that this process holds, with their open files: to close one of them lets go of the lock (POSIX)."""


class Locked(Exception):
    """Another process writes the run; the message says which."""


def hold(folder: Path) -> None:
    """Hold the run's lock until `let_go`, or until this process ends, however it ends: the kernel lets go of it.

    A lock of the process (`lockf`), not of the open file: workers that it forks do not keep it.

    Raises:
        Locked: another process holds it.
        OSError: the file cannot be made.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.read(handle, 100).decode(errors="replace").strip()
        os.close(handle)
        raise Locked(holder or "unknown") from None
    except OSError as error:  # some network file systems have no locks
        log.warning("%s cannot be locked (%s): see to it that no other process writes this run", folder, error.strerror)
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    _held.setdefault(folder.resolve(), []).append(handle)


def let_go(folder: Path) -> None:
    """Let go of the run's lock, where this process holds it."""
    for handle in _held.pop(folder.resolve(), ()):
        os.close(handle)


def is_held(folder: Path) -> bool:
    """Whether a process on this machine holds the run's lock."""
    return owner(folder) is not None


def owner(folder: Path) -> int | None:
    """The process on this machine that holds the run's lock, if one does; 0 where it is one that is not seen from here
    (of another container). The kernel is asked, the lock is not tried: that could make a run that is just starting
    fail."""
    if folder.resolve() in _held:
        return os.getpid()
    if not LOCKS_ANSWER:
        return None
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # type, whence, start, length, pid; the kernel puts F_UNLCK where no one's lock would stand in the way.
        question = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, process = struct.unpack(FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, question))
        return max(0, int(process)) if kind != fcntl.F_UNLCK else None
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)


def holder(folder: Path) -> tuple[int, str] | None:
    """Process id and machine of the last process that held the run's lock."""
    try:
        words = (folder / LOCK).read_text(errors="replace").split() if folder.resolve() not in _held else []
    except OSError:
        return None
    if len(words) == 4 and words[1].isdigit():
        return int(words[1]), words[3]
    return (os.getpid(), os.uname().nodename) if folder.resolve() in _held else None
