"""The doctor at a run's side: it sees one row of metrics after another and says what is new."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from atomrl.doctor.findings import Finding, NotLogged, Row, is_evaluation
from atomrl.doctor.hacks import quote
from atomrl.doctor.rules import RULES

FIRST_ROWS, LAST_ROWS = 20, 100


class Doctor:
    """Applies the rules to the steps so far. What it says is a function of the rows alone.

    Attributes:
        findings: all so far, oldest first; one of a kind.

    Example:
        >>> doctor = Doctor()
        >>> rows = [{"step": step, "response_length/clip_ratio": 0.8} for step in range(1, 7)]
        >>> [finding.id for row in rows for finding in doctor.observe(row)]
        ['length_limit']
        >>> doctor.findings[0].step
        5
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._rows: list[Row] = []

    def observe(self, row: Row, completions: Sequence[Mapping[str, Any]] = ()) -> list[Finding]:
        """Take the metrics of one more step; what an evaluation logged is passed over.

        Args:
            completions: of the step, as rows of `rollouts/`; findings quote them.

        Returns:
            The findings that are new.
        """
        if is_evaluation(row):
            return []
        self._rows.append(row)
        if len(self._rows) > FIRST_ROWS + LAST_ROWS:
            del self._rows[FIRST_ROWS]
        new: list[Finding] = []
        for rule in RULES:
            known = {finding.id for finding in (*self.findings, *new)}
            if rule.id in known or rule.explained_by & known:
                continue
            with suppress(NotLogged):
                for what, advice in rule.findings(self._rows):
                    step = int(row["step"] or 0)
                    seen = quote(rule.id, completions)
                    new.append(
                        Finding(id=rule.id, severity=rule.severity, step=step, what=what, advice=advice, quote=seen)
                    )
        self.findings += new
        return new


def diagnose(rows: Iterable[Row]) -> list[Finding]:
    """All findings of a run, from the rows of its `metrics.jsonl`."""
    doctor = Doctor()
    for row in rows:
        doctor.observe(row)
    return doctor.findings
