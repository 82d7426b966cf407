"""Lines of JSON in a file that another process may be writing."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml

from atomrl.files import open_file

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
