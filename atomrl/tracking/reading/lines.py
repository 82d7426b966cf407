"""Read files that another process may be writing: JSON lines, JSON and YAML."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml

from atomrl.common.files import open_file

MAX_NESTING, MAX_VALUES = 100, 100_000
"""Limits of a JSON or YAML file: levels, and values including those that aliases repeat."""
BLOCK = 2**19
"""Bytes per read: they and what is parsed from them should fit into the CPU's cache."""
MARK = 64
"""Bytes before the offset that are compared, to tell a file that was rewritten from one that grew: the new file may get
the same inode."""


class ReadError(ValueError):
    """A file of a run cannot be read; the message says which, where and why."""


def json_reader() -> Callable[[bytes | str], Any]:
    """Return `orjson.loads` if installed (3x as fast), else `json.loads`. Too deep nesting is a ValueError."""

    def plain(line: bytes | str) -> Any:
        try:
            return json.loads(line)
        except RecursionError:
            raise ValueError("nested too deep") from None

    try:
        import orjson
    except ImportError:
        return plain

    def loads(line: bytes | str) -> Any:
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:  # NaN and infinities, which `json` writes and reads
            return plain(line)

    return loads


loads = json_reader()


def read_mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a JSON or YAML file with one mapping; empty if it does not exist or cannot be read.

    Args:
        problems: list to which the reason is appended if the file cannot be read.
    """
    try:
        with open_file(path) as file:
            text = file.read().decode("utf-8", errors="replace")
        value = (_parse_json if path.suffix == ".json" else parse_yaml)(text)
    except FileNotFoundError:
        return {}
    except RecursionError:
        problems.append(f"{path.name} is nested too deep")
        return {}
    # PyYAML raises the others for a value that does not match its tag: `!!bool maybe`, `!!int ''`, `!!timestamp x`.
    except (OSError, ValueError, LookupError, AttributeError, TypeError, yaml.YAMLError) as error:
        problems.append(f"{path.name} cannot be read: {(str(error) or repr(error)).splitlines()[0]}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a mapping")
        return {}
    return cast(dict[str, Any], value)


def _parse_json(text: str) -> Any:
    value = json.loads(text)
    _check_size(value)
    return value


def parse_yaml(text: str) -> Any:
    """Load a YAML text.

    Raises:
        yaml.YAMLError: invalid YAML.
        RecursionError: nested too deep, or a list that contains itself.
        ValueError: too many values.
    """
    # The C loader is 10x as fast and equally safe, but a stack overflow would end the process: check the depth first.
    kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, kind):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise RecursionError
    loader = kind(text)
    node = loader.get_single_node()
    _check_size(node)  # before aliases and merges are expanded
    return None if node is None else loader.construct_document(node)


def _check_size(value: Any) -> None:
    """Refuse a list that contains itself, and aliases that expand exponentially.

    Raises:
        RecursionError: nested too deep.
        ValueError: too many values.
    """
    stack, count = [(value, 0)], 0
    while stack:
        value, depth = stack.pop()
        count += 1
        if depth > MAX_NESTING:
            raise RecursionError
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values")
        if isinstance(value, yaml.MappingNode):
            children: Iterable[Any] = chain.from_iterable(value.value)
        elif isinstance(value, yaml.SequenceNode):
            children = value.value
        else:
            children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        stack += [(child, depth + 1) for child in children]


class GrowingFile:
    """Incremental reader of the complete lines of a file. An unfinished last line is left for the next call.

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
        """Return (restarted, lines): the next lines, of at most `BLOCK` bytes (or one longer line). `restarted` is True
        if the file is new or was rewritten, so that the lines before are void."""
        try:
            with open_file(self.path) as file:
                restarted = self._is_new(file)
                if restarted:
                    self.offset = 0
                file.seek(self.offset)
                data = file.read(BLOCK)
                while b"\n" not in data and (more := file.read(BLOCK)):
                    data += more
        except OSError:
            gone, self._identity, self.offset = self._identity is not None, None, 0
            return gone, []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        self._mark = complete[-MARK:] or self._mark
        return restarted, complete.splitlines()

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
    """Read the rows of a `metrics.jsonl`; empty if it does not exist. A truncated last line is ignored.

    Raises:
        ReadError: a line before the last is not JSON.
    """
    rows, invalid = list[dict[str, Any]](), 0
    with path.open("rb") if path.is_file() else nullcontext(()) as lines:
        for number, line in enumerate(lines, start=1):
            if invalid:
                raise ReadError(f"{path}:{invalid} is not valid JSON; repair or remove the line")
            try:
                rows.append(loads(line if line.isascii() else line.decode(errors="replace")))
            except ValueError:
                invalid = number
    return rows


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run's folder.

    Raises:
        ReadError: there are none.
    """
    rows = read_metrics(run / "metrics.jsonl")
    if not rows:
        raise ReadError(f"no metrics in {run} (looked for metrics.jsonl); is it the folder of a run?")
    return rows


def flat_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dict to dotted keys.

    Example:
        >>> flat_tree({"a": {"b": 1}, "c": [2]})
        {'a.b': 1, 'c': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        flat.update(flat_tree(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return flat
