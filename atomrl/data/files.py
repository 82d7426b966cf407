"""Read rows from data files and the Hugging Face hub, with the place of every error.

Files: JSONL, CSV, JSON arrays, Parquet, and folders written by `datasets.Dataset.save_to_disk`; the first three also
as `.gz`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atomrl.common.errors import reraise_as

BOM = b"\xef\xbb\xbf"
SHOWN = 20
"""Reasons listed in an error message."""


class DataError(ValueError):
    """Invalid data, or a wrong name of a data source; the message says where, and what to do."""


class DataNotHere(DataError):
    """A data file does not exist, or a hub data set can be neither downloaded nor read from the cache."""


def error_list(errors: Sequence[str], shown: int = SHOWN) -> str:
    """Format errors (`PLACE: REASON`), one indented line for each reason, and count the rest.

    Example:
        >>> print(error_list(["a.jsonl:1: no prompt", "a.jsonl:7: no prompt", "a.jsonl:9: no answer"], shown=1))
          a.jsonl:1: no prompt (and 1 more, such as a.jsonl:7)
          ... and 1 more
    """
    places = dict[str, list[str]]()
    for error in errors:
        place, colon, reason = error.partition(": ")
        places.setdefault(colon + reason if colon else error, []).append(place)
    lines = []
    for reason, (first, *others) in [*places.items()][:shown]:
        line = f"  {first}{reason}" if reason.startswith(": ") else f"  {reason}"
        lines.append(f"{line} (and {len(others)} more, such as {others[0]})" if others else line)
    if rest := sum(map(len, [*places.values()][shown:])):
        lines.append(f"  ... and {rest} more")
    return "\n".join(lines)


@dataclass(frozen=True)
class RawRow:
    """A row of a file, or the reason why it is invalid."""

    place: str
    """`train.jsonl:3`: file and first line of the row, with `:column` for a further row on the same line of a JSON
    array; in Parquet and Arrow files the number of the row."""
    row: dict[str, Any] | None
    error: str | None = None
    """Why the row is invalid; None if it is valid."""
    folder: str = ""
    """Folder of its file, from which relative paths in it are read."""


def read_rows(path: str | Path) -> Iterator[RawRow]:
    """Read the rows of a file in order, skipping blank lines. The suffix selects the format; the default is JSONL.

    A byte-order mark and Windows line ends are accepted. Each line must be one JSON object in UTF-8, without duplicate
    keys (which would hide a value), NaN, infinite numbers or half a surrogate pair (which no tokenizer accepts); other
    lines give a row with an `error`. All values of a CSV file are text; its first line names the columns.

    Raises:
        DataNotHere: the file does not exist.
        DataError: it cannot be read at all.
    """
    path = Path(path)
    if not path.exists():
        raise DataNotHere(f"data file {path} does not exist")
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if path.is_dir() or path.suffix == ".parquet":
        yield from _arrow_rows(path)
        return
    with _opened(path) as file:
        start = file.peek(1)  # what is buffered, some KiB
        if suffix == ".csv":
            yield from _csv_rows(path, file)
            return
        if suffix == ".json" and start.removeprefix(BOM).lstrip().startswith(b"["):  # otherwise it is read as JSONL
            yield from _array_rows(path, file.read())
            return
        # Another format under the name of JSONL is named at once, instead of an error for each line.
        for mark, kind in _FOREIGN.items():
            if start.startswith(mark):
                raise DataError(f"{path}:1: not JSONL but {kind}")
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{path.name}:{number}"
            if number == 1:
                line = line.removeprefix(BOM)
            # Skip the rest of a line that is too long.
            if len(line) > MAX_LINE_BYTES:
                while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
                    pass
                yield RawRow(place, None, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
            elif line.strip():
                try:
                    yield RawRow(place, parse_line(line))
                except DataError as error:
                    yield RawRow(place, None, str(error))


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    try:
        with path.open("rb") as file, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file as content:
            yield content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line of a JSONL file.

    Raises:
        DataError: the line is invalid; without the place.

    Example:
        >>> parse_line(b'{"prompt": "2+2=", "ground_truth": 4}')
        {'prompt': '2+2=', 'ground_truth': 4}
    """
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"not valid UTF-8 (byte {error.start + 1} of the line)") from None
    if "\0" in text:
        raise DataError("contains NUL bytes: the file is UTF-16 (save it as UTF-8), or was truncated by a crash")
    if text in ("{", "["):
        raise DataError("not valid JSON: the object spans several lines; JSONL needs one object per line")
    row, end = _decode(text, 0)
    if end < len(text):
        raise DataError(f"not valid JSON: Extra data (column {end + 1})")
    if isinstance(row, list):
        raise DataError("a JSON list; JSONL needs one object per line (name a file that is one list .json)")
    if not isinstance(row, dict):
        raise DataError(f"not a JSON object but {type(row).__name__}")
    return row


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value at `start`. Return it with the position behind it."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if "\\u" in text[start:end]:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except DataError:
        raise
    except UnicodeEncodeError:
        raise DataError("contains a lone surrogate (\\ud800 to \\udfff), which is not a valid character") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise DataError(f"not valid JSON: {error.msg} ({line}column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        raise DataError(f"cannot parse JSON: {error}") from None
    return value, end


def _array_rows(path: Path, content: bytes) -> Iterator[RawRow]:
    """Read a JSON array of objects.

    After invalid JSON the next row cannot be located, so the whole file is refused.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not valid UTF-8") from None
    line_ends = [match.start() for match in re.finditer("\n", text)]
    position = _skip_space(text, text.index("[") + 1)
    mark, before = "]" if text.startswith("]", position) else ",", 0
    while mark == ",":
        line = bisect(line_ends, position) + 1
        # Of several rows on a line, as where the whole array is on one, all but the first have a column too.
        column = f":{position - (line_ends[line - 2] if line > 1 else -1)}" if line == before else ""
        with reraise_as(DataError, f"{path}:{line}", DataError):
            value, end = _decode(text, position)
            end = _skip_space(text, end)
            mark = text[end : end + 1]
            if mark not in (",", "]"):
                raise DataError(
                    "not valid JSON: a comma or the end of the list is missing after the row that begins here"
                )
        problem = None if isinstance(value, dict) else f"not a JSON object but {type(value).__name__}"
        yield RawRow(f"{path.name}:{line}{column}", None if problem else value, problem)
        position, before = _skip_space(text, end + 1), line


def _skip_space(text: str, position: int) -> int:
    match = re.compile(r"\s*").match(text, position)
    assert match is not None
    return match.end()


def _csv_rows(path: Path, file: io.BufferedReader | gzip.GzipFile) -> Iterator[RawRow]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        reader = csv.reader(text, strict=True)
        names: list[str] = []
        while True:
            place = f"{path.name}:{reader.line_num + 1}"
            problem = None
            try:
                fields = next(reader)
                if len(names) not in (0, len(fields)) and fields:
                    problem = f"{len(fields)} fields, but the header has {len(names)}"
                "".join(fields).encode("utf-8")
                if any("\0" in field for field in fields):
                    problem = "contains NUL bytes"
            except StopIteration:
                return
            except csv.Error as error:
                problem = f"not valid CSV: {error}"
            except UnicodeEncodeError:
                problem = "not valid UTF-8"
            if names:
                if problem or fields:
                    yield RawRow(place, None if problem else dict(zip(names, fields, strict=True)), problem)
            elif problem is None and len(set(fields)) == len(fields):
                names = fields
            else:
                raise DataError(f"{path}:1: {problem or 'two columns have the same name'}")


MAX_LINE_BYTES = 64 << 20
"""Longest row: a file without line ends must not be read into memory at once."""
_FOREIGN = {
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
    b"\x1f\x8b": "gzip; name it .jsonl.gz",
    b"PK\x03\x04": "a ZIP archive; unpack it",
    b"\x28\xb5\x2f\xfd": "zstd; unpack it (unzstd)",
    b"PAR1": "Parquet; name it .parquet",
}
"""First bytes of formats that are often named .jsonl, and what to do."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise DataError(f"key {twice!r} appears twice")
    return row


def _no_constant(name: str) -> None:
    raise DataError(f"{name} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise DataError(f"number {text} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _arrow_rows(path: Path) -> Iterator[RawRow]:
    """Read a Parquet file, or a folder saved by `datasets`."""
    with reraise_as(DataError, f"{path}: reading Parquet and Arrow needs pyarrow: pip install pyarrow", ImportError):
        from pyarrow import ArrowException
    number, kind = 0, "folder of save_to_disk" if path.is_dir() else "Parquet file"
    with reraise_as(DataError, f"{path} is not a readable {kind}", ArrowException, OSError):
        for batch in _record_batches(path):
            names = batch.schema.names
            if len(set(names)) < len(names):
                raise DataError(f"{path} has duplicate column names: {', '.join(names)}")
            for row, problem in batch_rows(batch):
                number += 1
                yield RawRow(f"{path.name}:{number}", row, problem)


def _record_batches(path: Path) -> Iterator[Any]:
    from pyarrow import ipc, parquet

    if path.is_dir():
        for part in _saved_files(path):
            with part.open("rb") as file, ipc.open_stream(file) as reader:
                yield from reader
    else:
        with parquet.ParquetFile(path) as reader:
            # As Python objects 65,536 rows, its default, take 300 MB.
            yield from reader.iter_batches(_FEW if _has_bytes(reader.schema_arrow) else _MANY)


def _has_bytes(schema: Any) -> bool:
    """Return True if rows of an Arrow schema have bytes, such as those of pictures."""
    return "binary" in str(schema)


def batch_rows(batch: Any) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """Yield (row, None) or (None, reason) for each row of an Arrow batch or table."""
    try:
        yield from [({name: _as_written(value) for name, value in row.items()}, None) for row in batch.to_pylist()]
    except UnicodeDecodeError:  # in some rows: convert one by one, which is many times slower
        if batch.num_rows == 1:
            yield None, "contains text that is not valid UTF-8"
        else:
            for index in range(batch.num_rows):
                yield from batch_rows(batch.slice(index, 1))


def _as_written(value: Any) -> Any:
    """Remove nulls from messages and tools: Arrow gives each object of a column all keys that any of them has."""
    first = value[0] if isinstance(value, list) and value else value
    is_message = isinstance(first, dict) and (
        {"role", "from", "function"} & first.keys() or {"name", "parameters"} <= first.keys()
    )
    return _without_null(value) if is_message else value


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder saved by `datasets`, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
        raise DataError(f"{folder} has the splits {', '.join(splits)}; give one, as in {folder / splits[0]}")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / str(item["filename"]) for item in state["_data_files"]]
    except FileNotFoundError:
        raise DataError(f"{folder} is not a file or a folder written by datasets' save_to_disk") from None
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder / 'state.json'} was not written by save_to_disk: {error!r}") from None


# --------------------------------------------------------------------------------------------------------------------
# Data sets of the Hugging Face hub, read with the `datasets` library: `openai/gsm8k:main:train@REVISION`.

FORM = "OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]"
_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<config>[^:@]*)(?::(?P<split>[^@]+))?)?(?:@(?P<revision>\S+))?"
)
_FILES = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow|txt|ya?ml|gz|zst|zip|tar|xz|bz2|pkl|pt|bin)$", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_BATCH, _MANY, _FEW = 1000, 4096, 50
"""Rows that are read at once: of the hub, of a Parquet file, and with bytes, which are large."""
REACH_S = 10.0
_pinned: dict[HubSource, str] = {}
"""Sources that this process has read, with their commit."""


@dataclass(frozen=True)
class HubSource:
    """A split of a hub data set, as a config names it.

    Example:
        >>> find_hub_source("openai/gsm8k:main:train")
        HubSource(name='openai/gsm8k', config='main', split='train', revision=None)
        >>> find_hub_source("openai/gsm8k::test@v1.0").split, find_hub_source("data/train.jsonl")
        ('test', None)
    """

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        parts = f":{self.config or ''}" * (self.config is not None or self.split is not None)
        parts += f":{self.split}" * (self.split is not None)
        return f"{self.name}{parts}" + f"@{self.revision}" * (self.revision is not None)


def find_hub_source(source: str) -> HubSource | None:
    """Parse the name of a hub data set; None for a path.

    It is a path if the file or folder exists, if it has a file suffix, or if a plain `a/b` starts with an existing
    folder: a typo in a path is not looked up on the hub.
    """
    match = _NAME.fullmatch(source)
    if match is None or _FILES.search(match["name"]) or Path(source).exists():
        return None
    if source == match["name"] and Path(source).parent.is_dir():
        return None
    return HubSource(match["name"], match["config"] or None, match["split"], match["revision"])


def pinned(source: str | list[str] | None) -> str | list[str] | None:
    """Return a source with the commit that this process read, so that a resumed run reads the same rows."""
    if source is None or isinstance(source, list):
        return source and [str(pinned(one)) for one in source]
    hub_source = find_hub_source(source)
    commit = _pinned.get(hub_source) if hub_source else None
    if hub_source is None or commit is None:
        return source
    return str(HubSource(hub_source.name, hub_source.config, hub_source.split, commit))


def hub_rows(source: HubSource, default_split: str | None, streamed: bool) -> Iterator[RawRow]:
    """Read the rows of a split, from the cache of `datasets` without a network.

    Args:
        default_split: used if the source names no split; None requires one, unless the data set has a single split.
        streamed: download rows as they are read, without caching them, for readers that stop early.

    Raises:
        DataError: `datasets` is not installed, neither hub nor cache have the data set, or it has no such
            configuration or split.
    """
    builder, commit = _builder(source)
    _pinned[source] = commit
    with reraise_as(DataError, f"{source} cannot be read from the Hugging Face hub", Exception):
        if not streamed:
            builder.download_and_prepare()
        splits = builder.as_streaming_dataset() if streamed or not builder.info.splits else builder.info.splits
        available = list(splits)
    split = _split(source, available, default_split)
    place = str(HubSource(source.name, source.config, split))
    with reraise_as(DataError, f"{source} cannot be read from the Hugging Face hub", Exception):
        rows = builder.as_streaming_dataset(split) if streamed and split in available else _prepared(builder, split)
        number = 0
        size = _FEW if rows.features and _has_bytes(rows.features.arrow_schema) else _BATCH
        for batch in rows.with_format("arrow").iter(size):  # Arrow leaves images and audio as bytes
            for row, problem in batch_rows(batch):
                number += 1
                yield RawRow(f"{place}:{number}", row, problem)


def _prepared(builder: Any, split: str) -> Any:
    builder.download_and_prepare()
    return builder.as_dataset(split)


def _split(source: HubSource, available: list[str], default: str | None) -> str:
    """Return the split to read, which may be a slice such as `train[:10%]`."""
    splits = f"it has {', '.join(available)}"
    if source.split is None:
        if default in available or len(available) == 1:
            return default if default in available else available[0]
        example = HubSource(source.name, source.config, available[0], source.revision)
        raise DataError(f"{source} has no split in its name, and {splits}; add one, as in {example}")
    if any(part.partition("[")[0] not in available for part in source.split.split("+")):
        raise DataError(f"{source} has no split {source.split!r}; {splits} ({FORM})")
    return source.split


def _builder(source: HubSource) -> tuple[Any, str]:
    """Return the builder of a data set, and the commit that it reads."""
    datasets = _library(source)
    datasets.disable_progress_bars()
    if unreachable := _unreachable():
        datasets.config.HF_HUB_OFFLINE = True  # otherwise it retries for half a minute
    try:
        builder = datasets.load_dataset_builder(source.name, source.config, revision=source.revision)
        if not _is_cache(builder) or source.revision is None:
            return builder, str(builder.hash)
        reason = unreachable or "it does not exist there"
    except Exception as error:  # there are many: of the hub's client, of HTTP, of `datasets`
        if _is_answer(error):
            raise DataError(f"{source}: {_first_lines(error)}{_without_config(source, error)}") from None
        reason = unreachable or f"{type(error).__name__}: {_first_lines(error)}"
    try:
        if commit := _commit_of(source):
            return _cached_rows(source, commit) or (
                _cached_files(source, commit, datasets.load_dataset_builder),
                commit,
            )
    except OSError:
        pass
    except ValueError as error:
        raise DataError(f"{source}: {_first_lines(error)}{_without_config(source, error)}") from None
    raise DataNotHere(_away(source, reason))


def _library(source: HubSource) -> Any:
    try:
        import datasets

        version = tuple(map(int, datasets.__version__.split(".")[:1]))
    except (ImportError, AttributeError):
        version = (0,)
    if version < (4,):  # older versions run code from data sets
        raise DataError(
            f"{str(source)!r} is not a file, and reading a Hugging Face data set of this name "
            "needs: pip install 'datasets>=4'"
        )
    return datasets


@cache
def _unreachable() -> str:
    """Return why the hub cannot be reached, or "". Checked once per process."""
    from datasets import config
    from huggingface_hub import constants, get_session

    if config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_S)
    except Exception as error:  # depends on the HTTP client
        return f"{constants.ENDPOINT}: {_first_lines(error) or type(error).__name__}"
    return ""


def _is_cache(builder: Any) -> bool:
    return type(builder).__module__.endswith("packaged_modules.cache.cache")


def _is_answer(error: Exception) -> bool:
    """Return True if the hub or its cache answered that the data set does not exist."""
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return "find cache for" not in str(error)  # another configuration or revision may be cached
    return type(error).__name__ in (
        "DatasetNotFoundError", "DataFilesNotFoundError", "EmptyDatasetError", "RevisionNotFoundError",
    )  # fmt: skip


def _without_config(source: HubSource, error: Exception) -> str:
    if "onfig" in str(error) and source.split is None:
        return f" (write a source as {FORM}; for a split alone {source.name}::SPLIT)"
    if "NotFound" in type(error).__name__ and source.revision is None:
        return " (a private or gated one needs: hf auth login)"
    return ""


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _commit_of(source: HubSource) -> str | None:
    """Return the commit of a revision, as far as the cache knows it."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    revision = source.revision or "main"
    folder = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=source.name, repo_type="dataset")
    with suppress(OSError):
        return (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    return revision if _COMMIT.fullmatch(revision) else None


def _cached_rows(source: HubSource, commit: str) -> tuple[Any, str] | None:
    """Return the rows that `datasets` has cached for a commit, with their hash; None if there are none."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    owner, _, name = source.name.partition("/")
    root = Path(config.HF_DATASETS_CACHE) / f"{owner}___{camelcase_to_snakecase(name)}"
    folders = [path for path in root.glob(f"{source.config or '*'}/*/{commit}*") if path.is_dir()]
    if len(folders) != 1:
        return None
    kind, version, digest = folders[0].parts[-3:]
    return Cache(repo_id=source.name, dataset_name=name, config_name=kind, version=version, hash=digest), digest


def _cached_files(source: HubSource, commit: str, load: Callable[..., Any]) -> Any:
    """Load the files that `hf download --repo-type dataset` has put into the hub's cache."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(source.name, repo_type="dataset", revision=commit, local_files_only=True)
    return load(folder, source.config)


def _away(source: HubSource, reason: str) -> str:
    """Return the message for a data set that is neither on this machine nor can be downloaded."""
    args = [repr(source.name), *([repr(source.config)] if source.config else []), f"split={source.split or 'train'!r}"]
    args += [f"revision={source.revision!r}"] if source.revision else []
    file = source.name.partition("/")[2] + ".parquet"
    return (
        f"{str(source)!r} is not a file or folder, and cannot be loaded as a data set of the Hugging Face hub: the "
        f"hub cannot be reached ({reason}), and its cache on this machine does not have it. If a file was meant, "
        f"correct its path. Otherwise, with a network, fill the cache by `atomrl data check {source}` (HF_HOME "
        f"may be copied), or write a file and use that: datasets.load_dataset({', '.join(args)})"
        f".to_parquet({file!r})"
    )
