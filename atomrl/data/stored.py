"""Rows of large data sets, kept as bytes (`StoredProblems`), and the lengths of their prompts in the run's folder.

A problem as Python objects takes about 1.5 KB besides its text, so 2 million of them would fill the memory.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, overload

import numpy as np

from atomrl.common.errors import reraise_as
from atomrl.data.files import DataError
from atomrl.types import Image, Problem

IN_MEMORY = 256 << 20
"""Bytes of a data set that are kept in memory; more go to a temporary file."""
HEAD = 32
"""Bytes of the hash at the start of a file of lengths."""
PLAIN = (str, int, float, bool, type(None))


class Records:
    """Byte strings in order, of which the file system keeps those beyond `IN_MEMORY`.

    Example:
        >>> records = Records()
        >>> records.append(b"ab"), records.append(b"c"), records[0], len(records)
        (None, None, b'ab', 2)
    """

    def __init__(self) -> None:
        self._starts = array("Q", [0])
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - it lives as long as the object
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def append(self, record: bytes) -> None:
        """Add a record.

        Raises:
            DataError: the disk is full.
        """
        with self._lock, reraise_as(DataError, f"rows cannot be written to {tempfile.gettempdir()} (TMPDIR)", OSError):
            self._file.seek(self._starts[-1])
            self._file.write(record)
            self._starts.append(self._starts[-1] + len(record))

    def __getitem__(self, place: int) -> bytes:
        start, end = self._starts[place], self._starts[place + 1]
        with self._lock:
            self._file.seek(start)
            return self._file.read(end - start)


def repeated(problems: Sequence[Problem], key: Callable[[Problem], Hashable]) -> list[tuple[str, str]]:
    """Return (place, place of the first problem with the same key) of every repeated problem; a key of None is skipped.

    Example:
        >>> problems = [Problem(problem_id=f"a:{n}", prompt=text, ground_truth="") for n, text in enumerate("xyx")]
        >>> repeated(problems, lambda problem: problem.prompt)
        [('a:2', 'a:0')]
    """
    first: dict[Hashable, str] = {}
    pairs = [
        (problem.problem_id, first.setdefault(key(problem), problem.problem_id)) for problem in alike(problems, key)
    ]
    return [(place, there) for place, there in pairs if place != there]


def alike(problems: Sequence[Problem], key: Callable[[Problem], Hashable]) -> Iterator[Problem]:
    """Yield the problems, in order, whose key has the hash of another's; a key of None is skipped.

    The keys of 2 million rows would take over 1 GB, their hashes take 16 MB.
    """
    none = -1  # a value that `hash` never returns
    keys = map(key, problems)
    hashes = np.fromiter((none if each is None else hash(each) for each in keys), np.int64, len(problems))
    order = np.argsort(hashes, kind="stable")
    equal = np.flatnonzero((np.diff(hashes[order]) == 0) & (hashes[order][1:] != none))
    return (problems[place] for place in np.union1d(order[equal], order[equal + 1]).tolist())


class StoredProblems(Sequence[Problem]):
    """Problems in order, each built anew when it is read. All have the columns of all.

    Example:
        >>> problems = StoredProblems([Problem(problem_id=f"a:{n}", prompt="2+2=", ground_truth=4) for n in (1, 2)])
        >>> problems[1].problem_id, len(problems), len(problems.select([1]))
        ('a:2', 2, 1)
    """

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        self._records, self._digest = Records(), hashlib.blake2b(digest_size=16)
        self._objects: dict[int, Problem] = {}
        """Problems with other values than those of JSON, such as dates of Parquet files."""
        self._columns: dict[str, None] = {}
        self._lengths: set[int] = set()
        self._chosen: Sequence[int] | None = None
        """Places of a selection in the records; None for all."""
        for problem in problems:
            self._append(problem)

    def _append(self, problem: Problem) -> None:
        prompt = problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt)
        content = [problem.problem_id, prompt, problem.ground_truth, problem.data_source, dict(problem.columns)]
        content += [[asdict(image) for image in problem.images]] if problem.images else []
        record = json.dumps(content, separators=(",", ":")).encode() if _is_plain(content) else b""
        if not record:
            self._objects[len(self._records)] = problem
        self._digest.update(record or repr(problem).encode(errors="surrogatepass"))
        self._records.append(record)
        self._columns |= dict.fromkeys(problem.columns)
        self._lengths.add(len(problem.columns))

    @property
    def digest(self) -> str:
        """Hash of the problems and their order."""
        chosen = b"" if self._chosen is None else array("Q", self._chosen).tobytes()
        return hashlib.blake2b(self._digest.digest() + chosen, digest_size=16).hexdigest()

    def select(self, places: Iterable[int]) -> StoredProblems:
        """Return some of the problems, which share the memory of all."""
        selection = StoredProblems()
        selection.__dict__ |= self.__dict__
        selection._chosen = array("Q", (places if self._chosen is None else (self._chosen[place] for place in places)))
        return selection

    def __len__(self) -> int:
        return len(self._records if self._chosen is None else self._chosen)

    @overload
    def __getitem__(self, place: int) -> Problem: ...
    @overload
    def __getitem__(self, place: slice) -> StoredProblems: ...
    def __getitem__(self, place: int | slice) -> Problem | StoredProblems:
        within = range(len(self))[place]
        if isinstance(within, range):
            return self if len(within) == len(self) and within.step == 1 else self.select(within)
        at = within if self._chosen is None else self._chosen[within]
        problem = self._objects.get(at) or _problem(self._records[at])
        if len(self._lengths) > 1 or len(problem.columns) < len(self._columns):
            columns = {name: problem.columns.get(name) for name in self._columns}
            return Problem(
                problem_id=problem.problem_id, prompt=problem.prompt, ground_truth=problem.ground_truth,
                data_source=problem.data_source, columns=columns, images=problem.images,
            )  # fmt: skip
        return problem

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]


def _problem(record: bytes) -> Problem:
    name, prompt, truth, source, columns, *rest = json.loads(record)
    prompt = prompt if isinstance(prompt, str) else tuple(prompt)
    images = tuple(Image(**fields) for fields in rest[0]) if rest else ()
    return Problem(
        problem_id=name, prompt=prompt, ground_truth=truth, data_source=source, columns=columns, images=images
    )


def _is_plain(value: Any) -> bool:
    """Return True if JSON gives back exactly the same value (of a subclass or a tuple it gives another type)."""
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return kind is list and all(map(_is_plain, value))
