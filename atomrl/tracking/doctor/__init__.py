"""The doctor detects common RL failures in a run's metrics; each rule has a page in docs/guides/troubleshooting/.

`RULES` is the table of the rules: severity, remedy, and which finding explains which. `Doctor` applies them step by
step, `diagnose` to a finished run. The rules are functions in `rules.py` (training), `hacks.py`
(rewards) and `environments.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from atomrl.tracking.doctor.environments import (
    environment_failures,
    invalid_actions,
    replies_die_out,
    replies_in_the_loss,
)
from atomrl.tracking.doctor.findings import (
    Finding,
    MetricRows,
    NotLogged,
    Row,
    Severity,
    Verdict,
    is_evaluation,
    without_idle_accuracy,
)
from atomrl.tracking.doctor.hacks import (
    echo_is_paid,
    empty_answer_is_paid,
    format_alone_is_paid,
    hedging_is_paid,
    keyword_is_paid,
    one_text_is_paid,
    pays_for_shortness,
    repetition_is_paid,
    wrong_answers_are_paid,
)
from atomrl.tracking.doctor.quotes import quote
from atomrl.tracking.doctor.rules import (
    constant_reward,
    dead_reward_part,
    entropy_collapse,
    gradient_spikes,
    learning_rate_too_high,
    learns_nothing,
    length_limit,
    missing_stop_token,
    no_mixed_groups,
    no_updates,
    pays_for_length,
    reward_failures,
    reward_without_accuracy,
    rollout_gap,
    skipped_updates,
    stale_weights,
)


@dataclass(frozen=True)
class Rule:
    """A row of `RULES`."""

    severity: Severity
    check: Callable[[MetricRows], Verdict]
    """Raises `NotLogged` if the rows lack a metric."""
    advice: str = ""
    """The remedy, with config keys; empty if every symptom has its own."""
    explained_by: frozenset[str] = frozenset()
    """Ids of findings that cause this one; it is not reported in addition to them."""

    @property
    def id(self) -> str:
        return self.check.__name__


DEGENERATE_TEXT = frozenset(
    {"repetition_is_paid", "echo_is_paid", "hedging_is_paid", "empty_answer_is_paid", "one_text_is_paid"}
)
HACKED = DEGENERATE_TEXT | {"keyword_is_paid", "pays_for_length", "pays_for_shortness", "wrong_answers_are_paid"}
NO_SIGNAL = HACKED | {"no_updates", "missing_stop_token", "length_limit", "learning_rate_too_high", "constant_reward"}
"""Findings after which the rewards carry no signal."""
NO_TOOL_USE = frozenset({"replies_in_the_loss", "environment_failures", "learning_rate_too_high"})
"""Findings that explain why the model stops using its environment."""

RULES = (
    Rule(
        "error", skipped_updates,
        "a lower train.learning_rate; model.dtype=float32; and look for extreme rewards in rollouts/.",
    ),
    Rule(
        "error", replies_in_the_loss,
        "only what the model sampled may be a segment of origin `model` (`atomrl/types.py`), also in your own "
        "engine; RowBatch.loss_mask must be false elsewhere.",
    ),
    Rule(
        "error", environment_failures,
        "read the message in rollouts/ (episode.message); check that the service is up and answers within "
        "environment.timeout_s.",
    ),
    Rule(
        "error", reward_failures,
        "`atomrl reward NAME rollouts/step_.../train.jsonl` with your function, to see the exception; make it return a "
        "number for every completion.",
        frozenset({"environment_failures"}),
    ),
    Rule(
        "error", stale_weights,
        "another rollout.engine (`hf` is the reference), to rule out the engine: it must get the weights after "
        "every step. For your own engine: check that update_weights copies all tensors.",
    ),
    Rule(
        "error", rollout_gap,
        "model.dtype=float32; rollout.engine=hf, to compare; rollout.top_p=1 and rollout.top_k=0.",
        frozenset({"stale_weights"}),
    ),
    Rule("error", learning_rate_too_high, explained_by=frozenset({"stale_weights"})),
    Rule(
        "error", missing_stop_token,
        "rollout.stop_token_ids=[ID] with the tokenizer's end token (or rollout.stop=['TEXT']), and eos_token_id in "
        "the model's generation_config.json; a base model may need some steps of SFT to learn to stop.",
        frozenset({"learning_rate_too_high"}),
    ),
    Rule(
        "warning", length_limit,
        "a larger rollout.max_completion_tokens (twice), or a prompt that requests less. If the texts in rollouts/ are "
        "complete and then continue, see docs/guides/troubleshooting/missing_stop_token.md.",
        frozenset({"missing_stop_token", "learning_rate_too_high"}),
    ),
    Rule(
        "error", repetition_is_paid,
        "a reward that does not reward repetition (reward.functions: add repetition_penalty, or check only the "
        "answer), a smaller rollout.max_completion_tokens, a KL penalty (algorithm.kl.coefficient=0.01).",
        frozenset({"missing_stop_token"}),
    ),
    Rule(
        "error", echo_is_paid,
        "a reward that reads only the answer (text copied from the prompt should not count), and "
        "one that compares with ground_truth (reward.functions).",
    ),
    Rule(
        "error", hedging_is_paid,
        "a reward that accepts one answer and compares all of it (strict_math, exact_match, boxed), not one that "
        "searches for the ground truth in the text (reward.functions).",
    ),
    Rule(
        "error", empty_answer_is_paid,
        "a reward of 0 without an answer, also if parsing fails (reward.functions; a default in an "
        "`except` is the usual cause), and no penalty for wrong answers that exceeds the reward of right ones.",
    ),
    Rule(
        "error", one_text_is_paid,
        "a reward that depends on the prompt (compare with ground_truth); data with different answers (data.train); a "
        "KL penalty (algorithm.kl.coefficient=0.01).",
        frozenset({"empty_answer_is_paid", "repetition_is_paid"}),
    ),
    Rule(
        "error", pays_for_length,
        "the reward without its dependence on length (reward.functions); compare reward/NAME/mean by part.",
        DEGENERATE_TEXT,
    ),
    Rule(
        "error", pays_for_shortness,
        "no length penalty for wrong answers, a smaller weight (reward.functions), or length_penalty with "
        "free_tokens, below which length is free.",
        DEGENERATE_TEXT,
    ),
    Rule(
        "error", keyword_is_paid,
        "a reward that compares the answer with ground_truth (reward.functions); for a judge or a reward model, check "
        "its score of this word alone (`atomrl reward NAME FILE`).",
        DEGENERATE_TEXT | {"pays_for_length", "pays_for_shortness"},
    ),
    Rule(
        "error", wrong_answers_are_paid,
        "compare with ground_truth in the reward (reward.functions: strict_math, exact_match, boxed, gsm8k), or drop "
        "the column if answers cannot be right or wrong.",
        DEGENERATE_TEXT | {"pays_for_length", "pays_for_shortness", "keyword_is_paid"},
    ),
    Rule(
        "error", reward_without_accuracy,
        "lower weights of the other reward.functions; sort rollouts/ by reward and read the highest.",
        HACKED,
    ),
    Rule(
        "warning", format_alone_is_paid,
        "a lower weight of this part (reward.functions), or a format reward only for right answers "
        "(strict_format beside strict_math does not); easier problems, or a warm start (SFT), so that some answers are "
        "right.",
        HACKED,
    ),
    Rule("error", no_updates, explained_by=NO_SIGNAL),
    Rule("error", constant_reward, explained_by=NO_SIGNAL),
    Rule("warning", no_mixed_groups, explained_by=NO_SIGNAL),
    Rule(
        "warning", dead_reward_part,
        "`atomrl reward NAME rollouts/step_.../train.jsonl`, to check the function, the ground truth and "
        "the model.",
        NO_SIGNAL,
    ),
    Rule(
        "warning", invalid_actions,
        "SFT on some correct episodes; stop strings that end a turn after an action (environment.stop); a "
        "reward for valid turns, or a penalty for invalid ones.",
        frozenset({"learning_rate_too_high", "missing_stop_token"}),
    ),
    Rule(
        "warning", replies_die_out,
        "look for a penalty per reply in the reward: if wrong answers get it too, a group of wrong "
        "answers differs only in it, and division by the standard deviation makes it large; apply it to right answers "
        "only, or use algorithm.advantage.type=grpo_no_std. Compare reward/NAME/mean by part, and read rollouts/.",
        NO_TOOL_USE,
    ),
    Rule(
        "warning", entropy_collapse,
        "algorithm.clip.high=0.28 (clip-higher), a lower train.learning_rate, rollout.temperature=1, or a KL penalty "
        "(algorithm.kl.coefficient=0.001).",
        HACKED | {"learning_rate_too_high", "constant_reward"},
    ),
    Rule(
        "warning", gradient_spikes,
        "a smaller train.max_grad_norm or train.learning_rate; look at this step's rollouts/ for odd texts or rewards.",
        frozenset({"learning_rate_too_high"}),
    ),
    Rule(
        "warning", learns_nothing,
        "a higher train.learning_rate (3 times), larger batches (rollout.completions_per_prompt), easier problems "
        "(data.train) or a warm start (SFT); read rollouts/ for what is rewarded. If the steps so far are a small part "
        "of the run, wait.",
        NO_SIGNAL | {
            "skipped_updates", "replies_in_the_loss", "environment_failures", "reward_failures", "stale_weights",
            "rollout_gap", "reward_without_accuracy", "format_alone_is_paid", "no_mixed_groups", "invalid_actions",
            "replies_die_out", "entropy_collapse",
        },
    ),
)  # fmt: skip
"""Causes stand before the findings that they explain."""


# --------------------------------------------------------------------------------------------------------------------
# Apply the rules while a run is running, or to its `metrics.jsonl` afterwards.

FIRST_ROWS, LAST_ROWS = 20, 100
MOST_CHECKS = 1_000


class Doctor:
    """Applies the rules after each step. The findings depend on the rows only.

    Attributes:
        findings: all so far, oldest first; each rule reports once.

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

    def observe(self, row: Row, completions: Sequence[Mapping[str, Any]] = (), check: bool = True) -> list[Finding]:
        """Add the metrics of a step; rows of evaluations are ignored.

        Args:
            completions: completions of the step, as rows of `rollouts/`, for findings to quote.
            check: apply the rules; False only adds the row.

        Returns:
            The new findings.
        """
        if is_evaluation(row):
            return []
        self._rows.append(row)
        if len(self._rows) > FIRST_ROWS + LAST_ROWS:
            del self._rows[FIRST_ROWS]
        if not check:
            return []
        new: list[Finding] = []
        rows = without_idle_accuracy(self._rows)
        for rule in RULES:
            reported = {finding.id for finding in (*self.findings, *new)}
            if rule.id in reported or rule.explained_by & reported:
                continue
            with suppress(NotLogged):
                for symptom in rule.check(rows):
                    new.append(
                        Finding(
                            id=rule.id,
                            severity=rule.severity,
                            step=int(row["step"] or 0),
                            what=symptom.what,
                            advice=symptom.advice or rule.advice,
                            quote=quote(rule.id, completions),
                        )
                    )
        self.findings += new
        return new


def diagnose(rows: Iterable[Row]) -> list[Finding]:
    """Return the findings of a run, from the rows of its `metrics.jsonl`.

    The rules are applied `MOST_CHECKS` times at most, at equal distances and at the end: a problem of a few steps in a
    longer run is found by the run itself, which checks each step (`findings.jsonl`).
    """
    doctor, rows = Doctor(), list(rows)
    every = -(-len(rows) // MOST_CHECKS)
    for number, row in enumerate(rows, 1):
        doctor.observe(row, check=number % every == 0 or number == len(rows))
    return doctor.findings
