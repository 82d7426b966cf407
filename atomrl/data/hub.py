"""Data sets of the Hugging Face hub, read by the `datasets` library: `openai/gsm8k:main:train@REVISION`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atomrl.data.files import RawRow, batch_rows
from atomrl.data.problems import DataError, DataNotHere
from atomrl.hints import said_as

FORM = "OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]"
_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<config>[^:@]*)(?::(?P<split>[^@]+))?)?(?:@(?P<revision>\S+))?"
)
_FILES = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow|txt|ya?ml|gz|zst|zip|tar|xz|bz2|pkl|pt|bin)$", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_BATCH = 1000
REACH_S = 10.0
_pinned: dict[HubSource, str] = {}
"""What was read in this process, and the commit that it was read of."""


@dataclass(frozen=True)
class HubSource:
    """A split of a data set, as a config names it.

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
    """What a source names on the hub; None where it is a path.

    It is a path where there is such a file or folder, where it has the suffix of a file, or where a plain `a/b` begins
    with a folder that is there: a typo in a path is asked of nobody.
    """
    match = _NAME.fullmatch(source)
    if match is None or _FILES.search(match["name"]) or Path(source).exists():
        return None
    if source == match["name"] and Path(source).parent.is_dir():
        return None
    return HubSource(match["name"], match["config"] or None, match["split"], match["revision"])


def pinned(source: str | list[str] | None) -> str | list[str] | None:
    """A source with the commits that were read in this process, so that the same rows are read again whatever the hub
    has by then."""
    if source is None or isinstance(source, list):
        return source and [str(pinned(one)) for one in source]
    found = find_hub_source(source)
    commit = _pinned.get(found) if found else None
    return str(HubSource(found.name, found.config, found.split, commit)) if found and commit else source


def hub_rows(source: HubSource, default_split: str | None, streamed: bool) -> Iterator[RawRow]:
    """The rows of a split; its cache is that of `datasets`, and without a network what is there is read.

    Args:
        default_split: where the source names none; None: it has to, unless there is one alone.
        streamed: rows are downloaded as they are read and not kept, for readers that stop early.

    Raises:
        DataError: `datasets` is not installed, hub and cache do not have it, or there is no such configuration or
            split.
    """
    builder, commit = _builder(source)
    _pinned[source] = commit
    with said_as(DataError, f"{source} cannot be read from the Hugging Face hub", Exception):
        if not streamed:
            builder.download_and_prepare()
        splits = builder.as_streaming_dataset() if streamed or not builder.info.splits else builder.info.splits
        there = list(splits)
    split = _split(source, there, default_split)
    place = str(HubSource(source.name, source.config, split))
    with said_as(DataError, f"{source} cannot be read from the Hugging Face hub", Exception):
        rows = builder.as_streaming_dataset(split) if streamed and split in there else _prepared(builder, split)
        number = 0
        for batch in rows.with_format("arrow").iter(_BATCH):  # images and sounds stay bytes
            for row, problem in batch_rows(batch):
                number += 1
                yield RawRow(f"{place}:{number}", row, problem)


def _prepared(builder: Any, split: str) -> Any:
    builder.download_and_prepare()
    return builder.as_dataset(split)


def _split(source: HubSource, there: list[str], default: str | None) -> str:
    """The split to read; `train[:10%]` is a part of one, as `datasets` has it."""
    known = f"it has {', '.join(there)}"
    if source.split is None:
        if default in there or len(there) == 1:
            return default if default in there else there[0]
        example = HubSource(source.name, source.config, there[0], source.revision)
        raise DataError(f"{source} names no split, and {known}; name one, as in {example}")
    if any(part.partition("[")[0] not in there for part in source.split.split("+")):
        raise DataError(f"{source} has no split {source.split!r}; {known} ({FORM})")
    return source.split


def _builder(source: HubSource) -> tuple[Any, str]:
    """What reads a data set, and the commit that it reads."""
    datasets = _library(source)
    datasets.disable_progress_bars()
    if unreachable := _unreachable():
        datasets.config.HF_HUB_OFFLINE = True  # it would try again for half a minute
    try:
        builder = datasets.load_dataset_builder(source.name, source.config, revision=source.revision)
        if not _is_cache(builder) or source.revision is None:
            return builder, str(builder.hash)
        reason = unreachable or "it was not found there"
    except Exception as error:  # of the hub's client, of HTTP, of `datasets`: there are many
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
    if version < (4,):  # which run code of data sets
        raise DataError(
            f"{str(source)!r} is no file here but the name of a data set of the Hugging Face hub, and reading those "
            "needs: pip install 'datasets>=4'"
        )
    return datasets


@cache
def _unreachable() -> str:
    """Why the hub cannot be reached, which is asked once; nothing where it can."""
    from datasets import config
    from huggingface_hub import constants, get_session

    if config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_S)
    except Exception as error:  # of whichever client it has
        return f"{constants.ENDPOINT}: {_first_lines(error) or type(error).__name__}"
    return ""


def _is_cache(builder: Any) -> bool:
    return type(builder).__module__.endswith("packaged_modules.cache.cache")


def _is_answer(error: Exception) -> bool:
    """Whether the hub, or its cache, has said that there is no such thing."""
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return "find cache for" not in str(error)  # of another configuration or revision: its files may be there
    return type(error).__name__ in (
        "DatasetNotFoundError", "DataFilesNotFoundError", "EmptyDatasetError", "RevisionNotFoundError",
    )  # fmt: skip


def _without_config(source: HubSource, error: Exception) -> str:
    if "onfig" in str(error) and source.split is None:
        return f" (a source is named {FORM}; a split alone is {source.name}::SPLIT)"
    if "NotFound" in type(error).__name__ and source.revision is None:
        return " (a private or gated one needs: hf auth login)"
    return ""


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _commit_of(source: HubSource) -> str | None:
    """The commit of a revision, as far as it is known without a network."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    revision = source.revision or "main"
    folder = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=source.name, repo_type="dataset")
    with suppress(OSError):
        return (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    return revision if _COMMIT.fullmatch(revision) else None


def _cached_rows(source: HubSource, commit: str) -> tuple[Any, str] | None:
    """What `datasets` has read before of the commit that is asked for."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    owner, _, name = source.name.partition("/")
    root = Path(config.HF_DATASETS_CACHE) / f"{owner}___{camelcase_to_snakecase(name)}"
    found = [path for path in root.glob(f"{source.config or '*'}/*/{commit}*") if path.is_dir()]
    if len(found) != 1:
        return None
    kind, version, digest = found[0].parts[-3:]
    return Cache(repo_id=source.name, dataset_name=name, config_name=kind, version=version, hash=digest), digest


def _cached_files(source: HubSource, commit: str, load: Callable[..., Any]) -> Any:
    """Reads the files that `hf download --repo-type dataset` has put into the hub's cache."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(source.name, repo_type="dataset", revision=commit, local_files_only=True)
    return load(folder, source.config)


def _away(source: HubSource, reason: str) -> str:
    given = [repr(source.name), *([repr(source.config)] if source.config else []), f"split={source.split or 'train'!r}"]
    given += [f"revision={source.revision!r}"] if source.revision else []
    file = source.name.partition("/")[2] + ".parquet"
    return (
        f"{str(source)!r} is no file or folder here, and as a data set of the Hugging Face hub it cannot be had: the "
        f"hub cannot be reached ({reason}), and its cache on this machine does not have it. If a file was meant, "
        f"correct its path. Else, where there is a network, let `atomrl data check {source}` fill the cache (HF_HOME "
        f"may be copied), or write a file and name that: datasets.load_dataset({', '.join(given)})"
        f".to_parquet({file!r})"
    )
