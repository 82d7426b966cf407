"""Data sets of the Hugging Face hub, read with the `datasets` library: `openai/gsm8k:main:train@REVISION`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.data.files import FEW, DataError, DataNotHere, RawRow, batch_rows, has_bytes

FORM = "OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]"
_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<config>[^:@]*)(?::(?P<split>[^@]+))?)?(?:@(?P<revision>\S+))?"
)
_FILES = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow|txt|ya?ml|gz|zst|zip|tar|xz|bz2|pkl|pt|bin)$", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_BATCH = 1000
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
        size = FEW if rows.features and has_bytes(rows.features.arrow_schema) else _BATCH
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
