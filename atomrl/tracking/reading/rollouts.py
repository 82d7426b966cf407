"""The completions of a run: an index of where each stands in its file, with what they are filtered and sorted by.

The texts stay in the files; a page of them is read when it is asked for.
"""

from __future__ import annotations

import json
import os
import string
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atomrl.common.files import open_file
from atomrl.tracking.reading.lines import ReadError, loads
from atomrl.tracking.reading.metrics import as_float

# --------------------------------------------------------------------------------------------------------------------
# The recorded tokens of a step: what the update saw of each (`rollouts/step_N/tokens.safetensors`).

TOKENS = "tokens.safetensors"
Column = NDArray[Any]
ROWS = {"trajectory_index", "group_ids", "lengths", "prompt_lengths", "prompt", "update"}
COLUMNS = {"tokens", "loss_mask", "advantages"}
"""What every record has of each row and of each token."""


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Some groups of a step, whole: a column of each row, and one of each token after the prompt, row by row.

    Example:
        >>> table = load_run("runs/quickstart").tokens(10)  # doctest: +SKIP
        >>> table.rows["rewards"], table.tokens["advantages"][table.span(0)]  # doctest: +SKIP
    """

    step: int
    rows: dict[str, Column]
    """`trajectory_index` (the completion's line in `train.jsonl`), `group_ids`, `rewards`, `update`, ..."""
    tokens: dict[str, Column]
    """`tokens` (their ids), `loss_mask`, `advantages`, `logprobs`, `rollout_logprobs`, `gap` (the trainer's log-prob
    before the update less the engine's), `log_ratio`, `clipped`, `loss` (the token's part of it), `gradient` (of the
    loss in its log-prob), and, where the run had them, `entropy`, `ref_logprobs`, `values`, ..."""
    prompts: list[Column]
    """Token ids; `rows["prompt"]` says which."""
    state: dict[str, float]
    """Of the algorithm."""

    def __len__(self) -> int:
        return len(self.rows["lengths"])

    def span(self, row: int) -> slice:
        """Where the tokens of a row are."""
        sizes = self.rows["lengths"][: row + 1] - self.rows["prompt_lengths"][: row + 1]
        end = int(sizes.sum())
        return slice(end - int(sizes[-1]), end)

    def rows_of(self, place: int) -> list[int]:
        """The rows of a completion, by its line in `train.jsonl`: several where turns were dropped, none where its
        tokens are not recorded."""
        return [int(row) for row in np.flatnonzero(self.rows["trajectory_index"] == place)]

    def ref_gap(self) -> Column | None:
        """Of each token the log-prob less the reference's; None where there is no reference."""
        if "ref_logprobs" not in self.tokens or "logprobs" not in self.tokens:
            return None
        found: Column = (self.tokens["logprobs"] - self.tokens["ref_logprobs"]) * self.tokens["loss_mask"]
        return found


def read_tokens(path: Path) -> TokenTable | None:
    """The recorded tokens in a file; None where it is not there.

    Raises:
        ReadError: it is no such file, or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        with open_file(path) as file:
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReadError(f"{path} cannot be read: {error.strerror}") from None
    try:
        size = int.from_bytes(data[:8], "little")
        about = json.loads(data[8 : 8 + size])["__metadata__"]
        arrays = load(data)
        sizes = np.cumsum(arrays["prompt_sizes"])[:-1]
        table = TokenTable(
            step=int(about["step"]),
            rows={name.removeprefix("row/"): value for name, value in arrays.items() if name.startswith("row/")},
            tokens={name.removeprefix("token/"): value for name, value in arrays.items() if name.startswith("token/")},
            prompts=np.split(arrays["prompt_tokens"], sizes),
            state=json.loads(about["state"]),
        )
        if missing := sorted((ROWS - table.rows.keys()) | (COLUMNS - table.tokens.keys())):
            raise ValueError(f"it lacks {', '.join(missing)}")
        total = table.span(len(table) - 1).stop
        if any(len(column) != total for column in table.tokens.values()):
            raise ValueError("its columns are not equally long")
        if any(len(column) != len(table) for column in table.rows.values()):
            raise ValueError("its rows are not equally many in all columns")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ReadError(f"{path} holds no recorded tokens: {error}") from None
    return table


def recorded_steps(rollouts: Path) -> Iterator[int]:
    """The steps of which there are recorded tokens, in order."""
    for path in sorted(rollouts.glob(f"step_*[0-9]/{TOKENS}")):
        digits = path.parent.name.removeprefix("step_")
        if digits.isascii() and digits.isdigit():
            yield int(digits)


# --------------------------------------------------------------------------------------------------------------------
# Token ids as texts, by the tokenizer of a run's newest checkpoint.


def token_texts(run: Path, ids: Sequence[int]) -> tuple[list[str] | None, str | None]:
    """The text of each token, or None and why there is none."""
    path = _tokenizer_file(run)
    if path is None:
        return None, "the run has no checkpoint with a tokenizer.json yet"
    try:
        return _token_texts(path, path.stat().st_mtime_ns, tuple(ids)), None
    except Exception as error:  # the tokenizers library raises plain Exceptions
        return None, f"tokenizer.json cannot be read: {error}"


def _tokenizer_file(run: Path) -> Path | None:
    """In the newest checkpoint; not where a link leads out of the run."""
    for folder in sorted((run / "checkpoints").glob("step_*[0-9]"), reverse=True):
        path = folder / "tokenizer.json"
        if path.is_file() and path.resolve().is_relative_to(run.resolve()):
            return path
    return None


@lru_cache(maxsize=2)
def _tokenizer(path: Path, modified: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


@lru_cache(maxsize=64)
def _token_texts(path: Path, modified: int, ids: tuple[int, ...]) -> list[str]:
    """The text of each token: what the text grows by when it is added. Where a character ends only with a later
    token, it is that one's."""
    tokenizer = _tokenizer(path, modified)
    texts, start, before = list[str](), 0, ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
        if text.endswith("�") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :] if text.startswith(before) else text)
        # From here on only this token is before the next one: its text may depend on it, as a space before a word.
        start = end - 1
        before = tokenizer.decode([ids[start]], skip_special_tokens=False)
    return texts


Order = Literal["step", "reward", "advantage", "length"]
Word = Literal["data_source", "finish_reason", "prompt_id"]
SPLITS = ("train", "eval")
NUMBERS = ("reward", "advantage", "completion_tokens", "prompt_tokens")
WORDS: tuple[Word, ...] = ("prompt_id", "data_source", "finish_reason")
TEXT_START, TEXT_END = b'"prompt": ', b'"prompt_tokens": '
"""In a row, what stands before and behind its texts."""
AMBIGUOUS = frozenset(b'":,{}[]\\')
"""Bytes that are found in a row outside of texts too, or are written otherwise in them."""
KEYS = b"prompt ground_truth completion role content null"
"""What is between a row's texts."""
ESCAPE = 6
"""Bytes of the longest escaped character."""
LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
MAX_PROBLEMS = 20
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RolloutFilter:
    """Which rollouts; what is None is not asked.

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
    """In tokens."""
    max_length: int | None = None
    finish_reason: str | None = None
    data_source: str | None = None
    text: str | None = None
    """In the prompt, the ground truth or the completion; upper and lower case of ASCII are the same."""
    mixed: bool | None = None
    """Whether the group has different rewards."""
    prompt: str | None = None
    """The hash of a prompt's text (`RolloutIndex.prompt_of`): the same prompt in all epochs."""


@dataclass
class _File:
    """What is known of one `rollouts/step_N/SPLIT.jsonl`."""

    step: int
    split: str
    path: Path
    identity: tuple[int, ...]
    starts: Ints
    ends: Ints
    text_starts: Ints
    text_ends: Ints
    numbers: dict[str, NDArray[np.float64]]
    words: dict[Word, list[str]]
    prompts: list[str]
    faults: list[str]

    def __len__(self) -> int:
        return len(self.starts)


class RolloutIndex:
    """All rollouts of a run, numbered by step, split and place in the file.

    A number is good until the next `refresh` that finds something new.

    Args:
        folder: `rollouts` of the run. It need not be there.

    Example:
        >>> index = load_run("runs/quickstart").rollouts  # doctest: +SKIP
        >>> found = index.select(RolloutFilter(first_step=30, max_reward=0.0), order="length")  # doctest: +SKIP
        >>> [row["completion"] for row in index.rows(found[:10])]  # doctest: +SKIP
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
        """What could not be read."""
        return [fault for file in self._ordered for fault in file.faults][:MAX_PROBLEMS]

    def refresh(self) -> bool:
        """Look for files that are new, were written anew or are gone; whether there were any."""
        there = dict(_files_in(self.folder))
        gone = self._files.keys() - there.keys()
        for key in gone:
            del self._files[key]
        new = [key for key, (_, identity) in there.items() if self._identity(key) != identity]
        for key in new:
            path, identity = there[key]
            self._files[key] = _read_file(*key, path, identity)
        if gone or new:
            self._join()
        return bool(gone or new)

    def select(self, wanted: RolloutFilter, order: Order = "step", descending: bool = False) -> Ints:
        """The numbers of the rollouts that pass a filter, sorted; those that lack the number sorted by come last."""
        passed = np.ones(len(self), np.bool_)
        bounds = [
            (self.steps, wanted.first_step, wanted.last_step),
            (self.numbers["reward"], wanted.min_reward, wanted.max_reward),
            (self.numbers["advantage"], wanted.min_advantage, wanted.max_advantage),
            (self.numbers["completion_tokens"], wanted.min_length, wanted.max_length),
        ]
        for values, low, high in bounds:
            if low is not None:
                passed &= values >= low
            if high is not None:
                passed &= values <= high
        if wanted.mixed is not None:
            passed &= self.mixed == wanted.mixed
        words: dict[Word, str | None] = {"finish_reason": wanted.finish_reason, "data_source": wanted.data_source}
        for name, word in words.items():
            if word is not None:
                passed &= self._codes[name] == self._coded[name].get(word, -1)
        if wanted.split is not None:
            passed &= self.splits == (SPLITS.index(wanted.split) if wanted.split in SPLITS else -1)
        if wanted.prompt is not None:
            passed &= self.prompts == self._prompt_codes.get(wanted.prompt, -1)
        if wanted.text:
            passed &= self._with_text(wanted.text, passed)
        found = np.flatnonzero(passed)
        if order != "step":
            values = self.numbers["completion_tokens" if order == "length" else order][found]
            return found[np.argsort(-values if descending else values, kind="stable")]  # NaN is sorted to the end
        return found[::-1] if descending else found

    def rows(self, numbers: Sequence[int] | Ints) -> list[dict[str, Any]]:
        """The rollouts with these numbers, as they were written. One whose file has changed since the last `refresh`,
        or can no longer be read, is an empty dict."""
        found: list[dict[str, Any]] = [{}] * len(numbers)
        by_file: dict[int, list[tuple[int, int]]] = {}
        for place, number in enumerate(map(int, numbers)):
            index = bisect_right(self._firsts, number) - 1
            by_file.setdefault(index, []).append((place, number - self._firsts[index]))
        for index, wanted in by_file.items():
            file = self._ordered[index]
            try:
                with open_file(file.path) as opened:
                    if _identity(os.fstat(opened.fileno())) != file.identity:
                        continue
                    for place, line in wanted:
                        opened.seek(int(file.starts[line]))
                        found[place] = loads(opened.read(int(file.ends[line] - file.starts[line])))
            except (OSError, ValueError):
                continue
        return found

    def group(self, number: int) -> Ints:
        """The numbers of the completions of the same prompt in the same step, itself among them."""
        return np.flatnonzero(self.groups == self.groups[number])

    def place(self, number: int) -> tuple[int, str, int]:
        """Step, split and place in the file: what names a rollout also after a `refresh`."""
        index = bisect_right(self._firsts, number) - 1
        file = self._ordered[index]
        return file.step, file.split, number - self._firsts[index]

    def number_at(self, step: int, split: str, place: int) -> int:
        """The number of a rollout by its `place`.

        Raises:
            LookupError: there is none.
        """
        for first, file in zip(self._firsts, self._ordered, strict=True):
            if (file.step, file.split) == (step, split) and 0 <= place < len(file):
                return first + place
        raise LookupError(f"there is no rollout {place} of {split} in step {step}")

    def prompt_of(self, number: int) -> str:
        """The hash of a rollout's prompt: 16 hexadecimal digits."""
        return self._prompt_names[int(self.prompts[number])]

    def values(self, name: Word) -> list[str]:
        """The different values of a column of words."""
        return list(self._coded[name])

    def words(self, name: Word) -> list[str]:
        """A column of words, one for each rollout."""
        names = list(self._coded[name])
        return [names[code] for code in self._codes[name]]

    def _identity(self, key: tuple[int, str]) -> tuple[int, ...]:
        return self._files[key].identity if key in self._files else ()

    def _join(self) -> None:
        """The columns of all files, one behind the other."""
        self._ordered = [self._files[key] for key in sorted(self._files, key=lambda key: (key[0], key[1] != "train"))]
        lengths = [len(file) for file in self._ordered]
        self._firsts: list[int] = [0, *np.cumsum(lengths).tolist()][: len(lengths)]
        self.steps: Ints = np.repeat(np.array([file.step for file in self._ordered], np.int64), lengths)
        splits = np.array([SPLITS.index(file.split) for file in self._ordered], np.int8)
        self.splits: NDArray[np.int8] = np.repeat(splits, lengths)
        """Of each rollout its place in `SPLITS`."""
        self.numbers = {
            name: np.concatenate([np.zeros(0), *(file.numbers[name] for file in self._ordered)]) for name in NUMBERS
        }
        """Of each rollout `NUMBERS`, by name; NaN where it has none."""
        self._coded: dict[Word, dict[str, int]] = {}
        self._codes: dict[Word, Ints] = {}
        for name in WORDS:
            self._coded[name], self._codes[name] = _as_codes(file.words[name] for file in self._ordered)
        self._prompt_codes, self.prompts = _as_codes(file.prompts for file in self._ordered)
        """Number of each rollout's prompt, in the order in which prompts were first seen."""
        self._prompt_names = list(self._prompt_codes)
        files = np.repeat(np.arange(len(lengths)), lengths)
        keys = files * (len(self._coded["prompt_id"]) + 1) + self._codes["prompt_id"]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        self.groups: Ints = first[inverse] if len(keys) else keys
        """Of each rollout the number of the first of its group."""
        self.mixed = self._mixed_groups()
        """Of each rollout whether its group has different rewards."""

    def _mixed_groups(self) -> Bools:
        reward = self.numbers["reward"]
        low, high = np.full(len(reward), np.inf), np.full(len(reward), -np.inf)
        given = ~np.isnan(reward)
        np.minimum.at(low, self.groups[given], reward[given])
        np.maximum.at(high, self.groups[given], reward[given])
        mixed: Bools = (high > low)[self.groups]
        return mixed

    def _with_text(self, text: str, among: Bools) -> Bools:
        """Which of some rollouts have this text."""
        found = np.zeros(len(self), np.bool_)
        needle = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass").lower()
        for first, file in zip(self._firsts, self._ordered, strict=True):
            if among[first : first + len(file)].any():
                sure, perhaps = _lines_with(needle, file)
                found[first + np.array(sure, np.int64)] = True
                places = first + np.array(perhaps, np.int64)
                found[places] = [_has_text(row, text.translate(LOWER)) for row in self.rows(places)]
        return found


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _files_in(folder: Path) -> Iterator[tuple[tuple[int, str], tuple[Path, tuple[int, ...]]]]:
    """(step, split) -> path and identity, of all files of rollouts. Links are not followed."""
    try:
        entries = [] if folder.is_symlink() else list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        digits = entry.name.removeprefix("step_")
        if not (digits.isascii() and digits.isdigit() and entry.is_dir(follow_symlinks=False)):
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
    spans, rows, start = list[tuple[int, int, int, int]](), list[dict[str, Any]](), 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        end = start + len(line)
        row = row_of(line)
        if row is not None and isinstance(row.get("rewards"), list):
            pass  # a pair, as an evaluation of preferences keeps it: no completion
        elif row is not None:
            text_start, text_end = max(0, line.find(TEXT_START)), line.rfind(TEXT_END)
            spans.append((start, end, start + text_start, start + text_end if text_end > 0 else end))
            rows.append(row)
        elif line and len(faults) < MAX_PROBLEMS:
            faults.append(f"{path.parent.name}/{path.name}:{number} is no rollout, and is passed over")
        start = end + 1
    places = np.array(spans, np.int64).reshape(-1, 4)
    return _File(
        step=step,
        split=split,
        path=path,
        identity=identity,
        starts=places[:, 0],
        ends=places[:, 1],
        text_starts=places[:, 2],
        text_ends=places[:, 3],
        numbers={name: np.array([as_float(row.get(name)) for row in rows], np.float64) for name in NUMBERS},
        words={name: [sys.intern(str(row.get(name, ""))) for row in rows] for name in WORDS},  # few are different
        prompts=_prompt_hashes([row.get("prompt") for row in rows]),
        faults=faults,
    )


def row_of(line: bytes) -> dict[str, Any] | None:
    """A line of `rollouts/` as a row; None where it is none."""
    try:
        row = loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _prompt_hashes(prompts: Sequence[Any]) -> list[str]:
    """Of each prompt 16 digits. Those of a group stand together, so equal neighbours are hashed once."""
    found, before, digest = list[str](), object(), ""
    for prompt in prompts:
        if prompt != before:
            digest = blake2b(json.dumps(prompt, default=str).encode(), digest_size=8).hexdigest()
            before = prompt
        found.append(digest)
    return found


def _has_text(row: Mapping[str, Any], text: str) -> bool:
    """Whether a row has a text where `RolloutFilter.text` says: its line also has keys, and words of other columns."""
    texts = [row.get("prompt"), row.get("ground_truth"), row.get("completion")]
    return any(text in _lowered(one) for one in texts)


def _lowered(value: Any) -> str:
    """A text, or what has texts in it, in lower case of ASCII."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return "\n".join(map(_lowered, value))
    return str(value).translate(LOWER)


def _as_codes(parts: Iterable[list[str]]) -> tuple[dict[str, int], Ints]:
    """Words as numbers: word -> number, and the number of each."""
    codes: dict[str, int] = {}
    numbers = [codes.setdefault(word, len(codes)) for part in parts for word in part]
    return codes, np.array(numbers, np.int64)


def _lines_with(needle: bytes, file: _File) -> tuple[list[int], list[int]]:
    """The lines of a file with these bytes among their texts; and those of which only the parsed row can say."""
    try:
        with open_file(file.path) as opened:
            if _identity(os.fstat(opened.fileno())) != file.identity:
                return [], []
            data = opened.read()
    except OSError:
        return [], []
    sure, perhaps = list[int](), list[int]()
    plain = not AMBIGUOUS.intersection(needle) and needle not in KEYS
    spans = zip(file.text_starts.tolist(), file.text_ends.tolist(), strict=True)
    for line, (start, end) in enumerate(spans):
        text = data[start:end].lower()  # of ASCII alone, as other characters may change their length
        at = text.find(needle)
        if at >= 0:
            escaped = b"\\" in text[max(0, at - ESCAPE) : at]
            (sure if plain and not escaped else perhaps).append(line)
    return sure, perhaps
