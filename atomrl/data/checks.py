"""Check a data file before a run (`atomrl data check`): errors, duplicates, overlaps, lengths."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from atomrl.data.files import DataError, RawRow, error_list
from atomrl.data.given import demonstration_reader, preference_reader
from atomrl.data.images import ImageStore
from atomrl.data.messages import COMPLETIONS, PromptContent
from atomrl.data.pictures import thumbnail
from atomrl.data.problems import problem_reader, read_source, to_problems
from atomrl.data.stored import repeated
from atomrl.data.tasks import normalise_content
from atomrl.types import Image, Problem

if TYPE_CHECKING:
    from atomrl.config import DataConfig

PROBLEMS, DEMONSTRATIONS, PREFERENCES = "problems", "demonstrations", "preferences"
RUNS = {
    PROBLEMS: "RL",
    DEMONSTRATIONS: "SFT (a config with `sft: {}`)",
    PREFERENCES: "preferences or a reward model (algorithm.name=dpo, reward_model, ...)",
}
"""Kind of rows -> the runs that use it."""
SHOWN = 3
"""Rows of `first_rows`, and pictures of each."""
CHARACTERS = 400
"""Characters of a prompt in `first_rows`."""
_QUANTILES = {0: "shortest", 50: "median", 90: "90%", 99: "99%", 100: "longest"}


def first_rows(problems: Sequence[Problem], images: ImageStore | None) -> list[dict[str, Any]]:
    """Return the first rows as a page shows them: `prompt`, and `images`, each with its `source`, `width`, `height` and
    `thumbnail` (a PNG in base64)."""
    rows = []
    for problem in problems[:SHOWN]:
        pictures = [] if images is None else [_picture(image, images) for image in problem.images[:SHOWN]]
        rows.append({"prompt": _plain(problem.prompt)[:CHARACTERS], "images": pictures})
    return rows


def _picture(image: Image, images: ImageStore) -> dict[str, Any]:
    return {
        "source": image.source, "width": image.width, "height": image.height,
        "thumbnail": base64.b64encode(thumbnail(images.content(image.name))).decode(),
    }  # fmt: skip


def _plain(prompt: PromptContent) -> str:
    """Return the text of a prompt; messages begin with their role."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """The result of `check_data`."""

    path: str
    kind: str
    """A key of `RUNS`."""
    rows: int
    """All rows, invalid ones included."""
    errors: list[str]
    """One line per invalid row: file, line and reason."""
    problems: Sequence[Problem]
    """The valid rows, as a run sees them."""
    against: str | Path | None = None
    overlap: tuple[tuple[str, str], ...] = ()
    """(place in this file, place in `against`) of prompts that are equal after normalisation."""

    @property
    def ok(self) -> bool:
        """True without errors and overlaps. Duplicates are reported only: they may be intended."""
        return not self.errors and not self.overlap

    @property
    def duplicates(self) -> list[tuple[str, str]]:
        """(place, place of the first row with the same normalised prompt and completions)."""
        return repeated(self.problems, _prompt if self.kind == PROBLEMS else _whole)

    def text(self) -> str:
        """Format the report for a terminal."""
        count = f"{len(self.errors)} problems, {len(self.problems)} usable" if self.errors else "no problems"
        lines = [f"{self.path}: {self.rows} rows, {count}", f"read as: {self.kind}, for {RUNS[self.kind]}"]
        if self.problems:
            first, prompts = self.problems[0], [problem.prompt for problem in self.problems]
            lengths = sorted(len(p) if isinstance(p, str) else sum(len(turn["content"]) for turn in p) for p in prompts)
            shown = {"prompt": _words(first.prompt)} | _answers(self.kind, first)
            lines += [f"first {name}: {str(value)[:200]!r}" for name, value in shown.items()]
            lines += [f"first picture: {each.source}, {each.width} x {each.height} pixels" for each in first.images]
            at = [f"{name} {lengths[min(len(lengths) * q // 100, len(lengths) - 1)]}" for q, name in _QUANTILES.items()]
            lines.append("prompt characters: " + ", ".join(at))
        if self.kind == PROBLEMS and self.problems:
            sources = Counter(problem.data_source for problem in self.problems).most_common()
            lines.append("data sources: " + ", ".join(f"{name} {count}" for name, count in sources))
            columns = ", ".join(sorted(self.problems[0].columns))
            lines.append("columns: " + (columns or "none besides prompt and ground truth"))
        same = "duplicates by normalised prompt" if self.kind == PROBLEMS else "duplicate rows"
        lines += _section(same, self.duplicates)
        if same_id := repeated(self.problems, _own_id):
            lines += _section("rows with the same id", same_id)
        if self.against is not None:
            lines += _section(f"prompts also in {self.against}", self.overlap)
        if self.errors:
            lines += ["problems:", error_list(self.errors)]
        return "\n".join(lines)


def _answers(kind: str, problem: Problem) -> dict[str, Any]:
    """Return the fields beside the prompt that a report shows of a row."""
    if kind == PROBLEMS:
        return {"ground truth": problem.ground_truth}
    (first, score), *others = ((_words(turns), score) for turns, score in problem.columns[COMPLETIONS])
    if others:
        return {"chosen": first, "rejected": others[0][0]}
    return {"completion" + {1: ", good", -1: ", bad"}.get(score, ""): first}


def _words(turns: PromptContent) -> PromptContent:
    """Return the content of a completion that is one plain message; others unchanged."""
    return turns[0]["content"] if not isinstance(turns, str) and len(turns) == 1 and len(turns[0]) == 2 else turns


def _section(title: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    lines = [f"{title}: {len(pairs)}"]
    return [*lines, error_list([f"{here} is a duplicate of {there}" for here, there in pairs])] if pairs else lines


def repetitions(problems: Sequence[Problem]) -> list[str]:
    """Return lines that list problems with the same prompt or the same id; empty if there are none."""
    by_prompt, by_id = repeated(problems, _prompt), repeated(problems, _own_id)
    lines = _section("duplicates by normalised prompt", by_prompt) if by_prompt else []
    return lines + (_section("rows with the same id", by_id) if by_id else [])


def _prompt(problem: Problem) -> str:
    return " ".join([normalise_content(problem.prompt), *(image.name for image in problem.images)])


def _whole(problem: Problem) -> tuple[str, str]:
    return _prompt(problem), repr(problem.columns)


def _own_id(problem: Problem) -> str | None:
    own = problem.columns.get("id")
    return None if own is None else repr(own)


def kind_of_rows(rows: Iterable[RawRow], config: DataConfig) -> str:
    """Detect the kind of rows from the columns of the first readable row: a key of `RUNS`.

    Rows with the config's `answer_field` are problems, whatever other columns they have; so are rows that match no
    layout. With `answer_field: null` every file contains problems.

    Example:
        >>> from atomrl.config import DataConfig
        >>> rows = [RawRow("a.jsonl:1", {"prompt": "2+2=", "chosen": "4", "rejected": "5"})]
        >>> kind_of_rows(rows, DataConfig(train="a.jsonl"))
        'preferences'
    """
    from atomrl.config import PreferenceConfig

    fields = PreferenceConfig()
    layouts: list[tuple[str, set[str]]] = [
        (PREFERENCES, {fields.chosen_field, fields.rejected_field}),
        (PREFERENCES, {"instruction", "completions"}),
        (PREFERENCES, {fields.completion_field, fields.label_field}),
        (DEMONSTRATIONS, {config.prompt_field, "completion"}),
        (DEMONSTRATIONS, {"messages"}),
        (DEMONSTRATIONS, {"conversations"}),
        (DEMONSTRATIONS, {"instruction", "output"}),
    ]
    row = next((raw.row for raw in rows if raw.row is not None), {})
    names = {name for name, value in row.items() if value is not None}
    if config.answer_field is None or config.answer_field in names:
        return PROBLEMS
    return next((kind for kind, required in layouts if required <= names), PROBLEMS)


def check_data(
    path: str | Path,
    config: DataConfig | None = None,
    against: str | Path | None = None,
    truth_problem: Callable[[Problem], str | None] | None = None,
) -> DataReport:
    """Read a data file like a run would, and report what is in it.

    Args:
        path: the file.
        config: field names and answer pattern; default: those of `DataConfig`.
        against: a second file that should share no prompt with the first, such as the evaluation set; read with the
            same config.
        truth_problem: returns why the ground truth of a problem cannot be parsed, or None.

    Raises:
        DataError: a file cannot be read at all, or is empty.
    """
    from atomrl.config import DataConfig

    config = config or DataConfig(train=str(path))
    report = _load(path, config)
    if truth_problem is not None and report.kind == PROBLEMS and config.answer_field is not None:
        reasons = {problem.problem_id: truth_problem(problem) for problem in report.problems}
        unparsed = [f"{place}: {reason}" for place, reason in reasons.items() if reason]
        usable = [problem for problem in report.problems if not reasons[problem.problem_id]]
        report = replace(report, errors=report.errors + unparsed, problems=usable)
    if against is None:
        return report
    first = {_prompt(problem): problem.problem_id for problem in reversed(report.problems)}
    others = [(first.get(_prompt(other)), other.problem_id) for other in _load(against, config).problems]
    overlap = tuple((here, there) for here, there in others if here is not None)
    return replace(report, against=against, overlap=overlap)


def _load(path: str | Path, config: DataConfig) -> DataReport:
    from atomrl.config import PreferenceConfig

    rows = list(read_source(str(path)))
    if not rows:
        raise DataError(f"{path} is empty")
    kind, convert = kind_of_rows(rows, config), problem_reader(config)
    if kind == DEMONSTRATIONS:
        convert = demonstration_reader(config.prompt_field, "completion")
    elif kind == PREFERENCES:
        convert = preference_reader(config.prompt_field, PreferenceConfig())
    with TemporaryDirectory() as folder:  # nothing is written to it
        problems, errors = to_problems(rows, convert, images=ImageStore(folder, config.images_field))
    return DataReport(path=str(path), kind=kind, rows=len(rows), errors=errors, problems=problems)
