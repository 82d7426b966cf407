"""What a person wants to know of a data file before a run: `atomrl data check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.data.files import read_rows
from atomrl.data.generators import normalise_content
from atomrl.data.problems import DataError, problem_list
from atomrl.data.sources import to_samples
from atomrl.stages import Sample

if TYPE_CHECKING:
    from atomrl.config import DataConfig


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """The result of `check_data`."""

    path: str
    rows: int
    """With and without problems."""
    problems: list[str]
    """One line each: file, line and reason."""
    duplicates: list[tuple[str, str]]
    """(place, place of the first row with the same normalised prompt)."""
    same_id: list[tuple[str, str]]
    """The same of the column `id`, where there is one. AtomRL does not use it."""
    prompt_chars: list[int]
    """The length of every usable prompt in characters, sorted."""
    data_sources: dict[str, int]
    columns: list[str]
    first: Sample | None
    """The first usable row, as a run sees it."""
    against: str | None = None
    overlap: tuple[tuple[str, str], ...] = ()
    """(place here, place in `against`) of equal normalised prompts."""

    @property
    def ok(self) -> bool:
        """No problem and no overlap; duplicates are reported but may be meant."""
        return not self.problems and not self.overlap

    def text(self) -> str:
        """The report for a terminal."""
        found = f"{len(self.problems)} problems, {len(self.prompt_chars)} usable" if self.problems else "no problems"
        lines = [f"{self.path}: {self.rows} rows, {found}"]
        if self.first is not None:
            lines.append(f"first prompt: {str(self.first.prompt)[:200]!r}")
            lines.append(f"first ground truth: {str(self.first.ground_truth)[:200]!r}")
        if self.prompt_chars:
            at = {q: self.prompt_chars[min(len(self.prompt_chars) * q // 100, len(self.prompt_chars) - 1)]
                  for q in (0, 50, 90, 99, 100)}  # fmt: skip
            lines.append("prompt characters: " + ", ".join(f"{_QUANTILES[q]} {chars}" for q, chars in at.items()))
        if self.data_sources:
            lines.append("data sources: " + ", ".join(f"{name} {n}" for name, n in self.data_sources.items()))
        lines.append("columns: " + (", ".join(self.columns) or "none beside prompt and ground truth"))
        lines += _section("duplicates by normalised prompt", self.duplicates, "is the same as")
        lines += _section("rows with the same id", self.same_id, "is the same as") if self.same_id else []
        if self.against is not None:
            lines += _section(f"prompts that are also in {self.against}", self.overlap, "is the same as")
        if self.problems:
            lines += ["problems:", problem_list(self.problems)]
        return "\n".join(lines)


_QUANTILES = {0: "shortest", 50: "median", 90: "90%", 99: "99%", 100: "longest"}


def _section(title: str, pairs: Sequence[tuple[str, str]], verb: str) -> list[str]:
    lines = [f"{title}: {len(pairs)}"]
    return [*lines, problem_list([f"{here} {verb} {there}" for here, there in pairs])] if pairs else lines


def repeated(samples: Sequence[Sample], key: Callable[[Sample], Any]) -> list[tuple[str, str]]:
    """(place, place of the first with the same key) of every sample whose key was there before; None is no key.

    Example:
        >>> samples = [Sample(sample_id=f"a:{line}", prompt=text, ground_truth="") for line, text in enumerate("xyx")]
        >>> repeated(samples, lambda sample: sample.prompt)
        [('a:2', 'a:0')]
    """
    first: dict[Any, str] = {}
    pairs = []
    for sample in samples:
        value = key(sample)
        if value in first:
            pairs.append((sample.sample_id, first[value]))
        elif value is not None:
            first[value] = sample.sample_id
    return pairs


def repetitions(samples: Sequence[Sample]) -> list[str]:
    """Lines that name the rows that occur twice, by prompt or by id; none where none does."""
    by_prompt, by_id = repeated(samples, lambda sample: normalise_content(sample.prompt)), repeated(samples, _own_id)
    lines = _section("duplicates by normalised prompt", by_prompt, "is the same as") if by_prompt else []
    return lines + (_section("rows with the same id", by_id, "is the same as") if by_id else [])


def _own_id(sample: Sample) -> str | None:
    own = sample.columns.get("id")
    return None if own is None else repr(own)


def check_data(path: str | Path, config: DataConfig | None = None, against: str | Path | None = None) -> DataReport:
    """Check a JSONL or Parquet file as a run would read it, and count what is in it.

    Args:
        config: its field names and answer pattern; None takes the default ones.
        against: a second file that should not share a prompt with the first (the evaluation set, say); read with
            the same config.

    Raises:
        DataError: a file cannot be read at all, or is empty.
    """
    if config is None:
        from atomrl.config import DataConfig

        config = DataConfig(train=str(path))
    samples, problems, rows = _load(path, config)
    overlap = []
    if against is not None:
        first = {normalise_content(sample.prompt): sample.sample_id for sample in reversed(samples)}
        for sample in _load(against, config)[0]:
            here = first.get(normalise_content(sample.prompt))
            if here is not None:
                overlap.append((here, sample.sample_id))
    return DataReport(
        path=str(path),
        rows=rows,
        problems=problems,
        duplicates=repeated(samples, lambda sample: normalise_content(sample.prompt)),
        same_id=repeated(samples, _own_id),
        prompt_chars=sorted(_chars(sample) for sample in samples),
        data_sources=dict(Counter(sample.data_source for sample in samples).most_common()),
        columns=sorted(samples[0].columns) if samples else [],
        first=samples[0] if samples else None,
        against=None if against is None else str(against),
        overlap=tuple(overlap),
    )


def _load(path: str | Path, config: DataConfig) -> tuple[list[Sample], list[str], int]:
    raw = list(read_rows(path))
    if not raw:
        raise DataError(f"{path} is empty: it holds no usable row")
    return *to_samples(raw, config), len(raw)


def _chars(sample: Sample) -> int:
    prompt = sample.prompt
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)
