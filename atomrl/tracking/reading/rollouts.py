"""The completions of a run, indexed for filtering and sorting."""

from __future__ import annotations

import json
import os
import string
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atomrl.common.files import open_file
from atomrl.tracking.reading.lines import loads
from atomrl.tracking.reading.metrics import as_float
from atomrl.tracking.reading.token_records import MAX_DIGITS

Order = Literal["step", "reward", "advantage", "length"]
Word = Literal["data_source", "finish_reason", "prompt_id"]
SPLITS = ("train", "eval")
NUMBERS = ("reward", "advantage", "completion_tokens", "prompt_tokens")
WORDS: tuple[Word, ...] = ("prompt_id", "data_source", "finish_reason")
TEXTS = ("prompt", "ground_truth", "completion")
"""Columns that a search for a text reads."""
AMBIGUOUS = frozenset(b'":,{}[]\\')
"""Bytes of JSON's syntax, and of escapes: a match with one of them may be outside of a text."""
KEYS = b"prompt ground_truth completion role content null"
"""Words of the JSON between a row's texts: a match that is one of them may be a key."""
ESCAPE = 6
"""Bytes of the longest escaped character."""
LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
MAX_PROBLEMS = 20
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RolloutFilter:
    """Conditions on rollouts; None means any.

    Example:
        >>> wrong_and_long = RolloutFilter(split="train", max_reward=0.0, min_length=40)
    """

    first_step: int | None = None
    last_step: int | None = None
    split: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_advantage: float | None = None
    max_advantage: float | None = None
    min_length: int | None = None
    """Minimum length in tokens."""
    max_length: int | None = None
    finish_reason: str | None = None
    data_source: str | None = None
    text: str | None = None
    """Text that occurs in the prompt, the ground truth or the completion; ASCII case is ignored."""
    mixed: bool | None = None
    """True: only groups with different rewards; False: only groups with equal ones."""
    prompt: str | None = None
    """The hash of a prompt's text (`RolloutIndex.prompt_of`): the same prompt in all epochs."""


@dataclass
class _File:
    """The indexed columns of one `rollouts/step_N/SPLIT.jsonl`."""

    step: int
    split: str
    path: Path
    identity: tuple[int, ...]
    starts: Ints
    ends: Ints
    text_starts: Ints
    text_ends: Ints
    texts_only: Bools
    """True if no other column is between `text_starts` and `text_ends`."""
    numbers: dict[str, NDArray[np.float64]]
    words: dict[Word, list[str]]
    prompts: list[str]
    faults: list[str]

    def __len__(self) -> int:
        return len(self.starts)


class RolloutIndex:
    """All rollouts of a run, numbered by step, split and line.

    A number is valid until a `refresh` returns True; `place` is valid for longer.

    Args:
        folder: the run's folder `rollouts`. It need not exist.

    Attributes:
        steps, splits, prompts, groups: per rollout its step, the index of its split in `SPLITS`, the code of its
            prompt (in the order of first appearance), and the number of the first rollout of its group; [n] each.
        mixed: per rollout, True if its group has different rewards; [n].
        numbers: the columns `NUMBERS`, by name; NaN where a rollout has no value.

    Example:
        >>> index = load_run("runs/quickstart").rollouts  # doctest: +SKIP
        >>> numbers = index.select(RolloutFilter(first_step=30, max_reward=0.0), order="length")  # doctest: +SKIP
        >>> [row["completion"] for row in index.rows(numbers[:10])]  # doctest: +SKIP
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[tuple[int, str], _File] = {}
        self._join()
        self.refresh()

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows([number])[0]

    @property
    def problems(self) -> list[str]:
        """Lines and files that could not be read, with the reason."""
        return [fault for file in self._ordered for fault in file.faults][:MAX_PROBLEMS]

    def refresh(self) -> bool:
        """Index files that are new or changed, and drop those that are gone. Returns whether there were any."""
        files = dict(_files_in(self.folder))
        removed = self._files.keys() - files.keys()
        for key in removed:
            del self._files[key]
        new = [key for key, (_, identity) in files.items() if self._identity(key) != identity]
        for key in new:
            path, identity = files[key]
            self._files[key] = _read_file(*key, path, identity)
        if removed or new:
            self._join()
        return bool(removed or new)

    def select(self, conditions: RolloutFilter, order: Order = "step", descending: bool = False) -> Ints:
        """Return the numbers of the rollouts that pass a filter, sorted by `order`; those without a value come last."""
        passed = np.ones(len(self), np.bool_)
        bounds = [
            (self.steps, conditions.first_step, conditions.last_step),
            (self.numbers["reward"], conditions.min_reward, conditions.max_reward),
            (self.numbers["advantage"], conditions.min_advantage, conditions.max_advantage),
            (self.numbers["completion_tokens"], conditions.min_length, conditions.max_length),
        ]
        for values, low, high in bounds:
            if low is not None:
                passed &= values >= low
            if high is not None:
                passed &= values <= high
        if conditions.mixed is not None:
            passed &= self.mixed == conditions.mixed
        words: dict[Word, str | None] = {
            "finish_reason": conditions.finish_reason,
            "data_source": conditions.data_source,
        }
        for name, word in words.items():
            if word is not None:
                passed &= self._codes[name] == self._coded[name].get(word, -1)
        if conditions.split is not None:
            passed &= self.splits == (SPLITS.index(conditions.split) if conditions.split in SPLITS else -1)
        if conditions.prompt is not None:
            passed &= self.prompts == self._prompt_codes.get(conditions.prompt, -1)
        if conditions.text:
            passed &= self._with_text(conditions.text, passed)
        numbers = np.flatnonzero(passed)
        if order != "step":
            values = self.numbers["completion_tokens" if order == "length" else order][numbers]
            return numbers[np.argsort(-values if descending else values, kind="stable")]  # NaN is sorted to the end
        return numbers[::-1] if descending else numbers

    def rows(self, numbers: Sequence[int] | Ints) -> list[dict[str, Any]]:
        """Read rollouts by number. One whose file has changed since the last `refresh`, or can no longer be read, is an
        empty dict."""
        rows: list[dict[str, Any]] = [{}] * len(numbers)
        by_file: dict[int, list[tuple[int, int]]] = {}
        for place, number in enumerate(map(int, numbers)):
            index = bisect_right(self._firsts, number) - 1
            by_file.setdefault(index, []).append((place, number - self._firsts[index]))
        for index, places in by_file.items():
            file = self._ordered[index]
            try:
                with open_file(file.path) as opened:
                    if _identity(os.fstat(opened.fileno())) != file.identity:
                        continue
                    for place, line in places:
                        opened.seek(int(file.starts[line]))
                        rows[place] = loads(opened.read(int(file.ends[line] - file.starts[line])))
            except (OSError, ValueError):
                continue
        return rows

    def group(self, number: int) -> Ints:
        """Return the numbers of the rollout's group: the completions of its prompt in its step, itself included."""
        return np.flatnonzero(self.groups == self.groups[number])

    def place(self, number: int) -> tuple[int, str, int]:
        """Return (step, split, line) of a rollout, which a `refresh` does not change."""
        index = bisect_right(self._firsts, number) - 1
        file = self._ordered[index]
        return file.step, file.split, number - self._firsts[index]

    def number_at(self, step: int, split: str, place: int) -> int:
        """Return the number of the rollout at a `place`.

        Raises:
            LookupError: there is none.
        """
        for first, file in zip(self._firsts, self._ordered, strict=True):
            if (file.step, file.split) == (step, split) and 0 <= place < len(file):
                return first + place
        raise LookupError(f"no rollout {place} of {split} in step {step}")

    def prompt_of(self, number: int) -> str:
        """Return the hash of a rollout's prompt: 16 hexadecimal digits."""
        return self._prompt_names[int(self.prompts[number])]

    def values(self, name: Word) -> list[str]:
        """Return the distinct values of a text column."""
        return list(self._coded[name])

    def words(self, name: Word) -> list[str]:
        """Return a text column, one value per rollout."""
        names = list(self._coded[name])
        return [names[code] for code in self._codes[name]]

    def _identity(self, key: tuple[int, str]) -> tuple[int, ...]:
        return self._files[key].identity if key in self._files else ()

    def _join(self) -> None:
        """Concatenate the columns of all files."""
        self._ordered = [self._files[key] for key in sorted(self._files, key=lambda key: (key[0], key[1] != "train"))]
        lengths = [len(file) for file in self._ordered]
        self._firsts: list[int] = [0, *np.cumsum(lengths).tolist()][: len(lengths)]
        self.steps: Ints = np.repeat(np.array([file.step for file in self._ordered], np.int64), lengths)
        splits = np.array([SPLITS.index(file.split) for file in self._ordered], np.int8)
        self.splits: NDArray[np.int8] = np.repeat(splits, lengths)
        self.numbers = {
            name: np.concatenate([np.zeros(0), *(file.numbers[name] for file in self._ordered)]) for name in NUMBERS
        }
        self._coded: dict[Word, dict[str, int]] = {}
        self._codes: dict[Word, Ints] = {}
        for name in WORDS:
            self._coded[name], self._codes[name] = _as_codes(file.words[name] for file in self._ordered)
        self._prompt_codes, self.prompts = _as_codes(file.prompts for file in self._ordered)
        self._prompt_names = list(self._prompt_codes)
        # A group is what has the same prompt id in the same file.
        files = np.repeat(np.arange(len(lengths)), lengths)
        keys = files * (len(self._coded["prompt_id"]) + 1) + self._codes["prompt_id"]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        self.groups: Ints = first[inverse] if len(keys) else keys
        self.mixed = self._mixed_groups()

    def _mixed_groups(self) -> Bools:
        # The extremes of a group's rewards are stored at its first rollout, whose number is the group's.
        reward = self.numbers["reward"]
        low, high = np.full(len(reward), np.inf), np.full(len(reward), -np.inf)
        scored = ~np.isnan(reward)
        np.minimum.at(low, self.groups[scored], reward[scored])
        np.maximum.at(high, self.groups[scored], reward[scored])
        mixed: Bools = (high > low)[self.groups]
        return mixed

    def _with_text(self, text: str, among: Bools) -> Bools:
        """Return a mask of the rollouts in `among` that contain a text. Most are decided by a search in the bytes of
        the file; only ambiguous matches are parsed."""
        matches = np.zeros(len(self), np.bool_)
        needle = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass").lower()
        for first, file in zip(self._firsts, self._ordered, strict=True):
            if among[first : first + len(file)].any():
                sure, perhaps = _lines_with(needle, file)
                matches[first + np.array(sure, np.int64)] = True
                places = first + np.array(perhaps, np.int64)
                matches[places] = [_has_text(row, text.translate(LOWER)) for row in self.rows(places)]
        return matches


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _files_in(folder: Path) -> Iterator[tuple[tuple[int, str], tuple[Path, tuple[int, ...]]]]:
    """Yield ((step, split), (path, identity)) of all files of rollouts. Symbolic links are not followed."""
    try:
        entries = [] if folder.is_symlink() else list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        digits = entry.name.removeprefix("step_")
        known = digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS
        if not (known and entry.is_dir(follow_symlinks=False)):
            continue
        for split in SPLITS:
            path = Path(entry.path, f"{split}.jsonl")
            try:
                status = path.lstat()
            except OSError:
                continue
            yield (int(digits), split), (path, _identity(status))


def _read_file(step: int, split: str, path: Path, identity: tuple[int, ...]) -> _File:
    faults = list[str]()
    try:
        with open_file(path) as file:
            identity = _identity(os.fstat(file.fileno()))
            data = file.read()
    except OSError as error:
        data = b""
        faults.append(f"{path.parent.name}/{path.name} cannot be read: {error.strerror}")
    spans, rows, start = list[tuple[int, int, int, int, bool]](), list[dict[str, Any]](), 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        end = start + len(line)
        row = row_of(line)
        if row is not None and isinstance(row.get("rewards"), list):
            pass  # a pair of an evaluation of preferences, no completion
        elif row is not None:
            text_start, text_end, texts_only = _text_span(line, row)
            spans.append((start, end, start + text_start, start + text_end, texts_only))
            rows.append(row)
        elif line and len(faults) < MAX_PROBLEMS:
            faults.append(f"{path.parent.name}/{path.name}:{number} is not a rollout; skipped")
        start = end + 1
    places = np.array(spans, np.int64).reshape(-1, 5)
    return _File(
        step=step,
        split=split,
        path=path,
        identity=identity,
        starts=places[:, 0],
        ends=places[:, 1],
        text_starts=places[:, 2],
        text_ends=places[:, 3],
        texts_only=places[:, 4].astype(np.bool_),
        numbers={name: np.array([as_float(row.get(name)) for row in rows], np.float64) for name in NUMBERS},
        words={name: [sys.intern(str(row.get(name, ""))) for row in rows] for name in WORDS},  # few are different
        prompts=_prompt_hashes([_prompt_of(row) for row in rows]),
        faults=faults,
    )


def _text_span(line: bytes, row: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Return (start, end, exact): the bytes of a line in which to search for a text.

    A parsed row has its keys in the order of the line. If its texts are neighbours, the span reaches from the first of
    them to the key that follows, and holds nothing else (`exact`). Otherwise it is the whole line, and a match has to
    be confirmed in the row.
    """
    keys = list(row)
    places = [place for place, key in enumerate(keys) if key in TEXTS]
    if places and places[-1] - places[0] == len(places) - 1:
        start, end = _key_at(line, keys[places[0]]), len(line)
        if places[-1] + 1 < len(keys):
            end = _key_at(line, keys[places[-1] + 1])
        if 0 <= start < end:
            return start, end, True
    return 0, len(line), False


def _key_at(line: bytes, key: str) -> int:
    """Return the offset of a key in a line of JSON; -1 if it is not unambiguous, as with a nested key of that name."""
    written = json.dumps(key).encode() + b":"
    return line.find(written) if line.count(written) == 1 else -1


def row_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line of `rollouts/`; None if it is not a JSON object."""
    try:
        row = loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _prompt_of(row: Mapping[str, Any]) -> Any:
    """Return what makes a prompt the same as another: its text and, if it has any, its pictures."""
    return [row.get("prompt"), row["images"]] if row.get("images") else row.get("prompt")


def _prompt_hashes(prompts: Sequence[Any]) -> list[str]:
    """Hash each prompt to 16 hexadecimal digits. Groups are contiguous, so equal neighbours are hashed once."""
    hashes, before, digest = list[str](), object(), ""
    for prompt in prompts:
        if prompt != before:
            digest = blake2b(json.dumps(prompt, default=str).encode(), digest_size=8).hexdigest()
            before = prompt
        hashes.append(digest)
    return hashes


def _has_text(row: Mapping[str, Any], text: str) -> bool:
    """Return whether a row has a text in one of the columns `TEXTS`."""
    return any(text in _lowered(row.get(name)) for name in TEXTS)


def _lowered(value: Any) -> str:
    """Return a text, or the joined texts of a list or dict, with ASCII letters in lower case."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return "\n".join(map(_lowered, value))
    return str(value).translate(LOWER)


def _as_codes(parts: Iterable[list[str]]) -> tuple[dict[str, int], Ints]:
    """Encode words as integers; returns the codes by word, and the code of each word."""
    codes: dict[str, int] = {}
    numbers = [codes.setdefault(word, len(codes)) for part in parts for word in part]
    return codes, np.array(numbers, np.int64)


def _lines_with(needle: bytes, file: _File) -> tuple[list[int], list[int]]:
    """Search the bytes of a file. Returns the lines that contain `needle` in a text, and those that may: their rows
    have to be parsed."""
    try:
        with open_file(file.path) as opened:
            if _identity(os.fstat(opened.fileno())) != file.identity:
                return [], []
            data = opened.read()
    except OSError:
        return [], []
    sure, perhaps = list[int](), list[int]()
    plain = not AMBIGUOUS.intersection(needle) and needle not in KEYS
    spans = zip(file.text_starts.tolist(), file.text_ends.tolist(), file.texts_only.tolist(), strict=True)
    for line, (start, end, texts_only) in enumerate(spans):
        text = data[start:end].lower()  # ASCII only: other characters may change their length
        at = text.find(needle)
        if at >= 0:
            escaped = b"\\" in text[max(0, at - ESCAPE) : at]
            (sure if plain and texts_only and not escaped else perhaps).append(line)
    return sure, perhaps
