"""Score trajectories with all reward functions of a config: `build_rewards` returns a `Rewards`.

`Rewards` distributes the calls over this process, worker processes (`pool`) and services, sums the weighted values and
decides when failures end the run.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from atomrl.common import outages
from atomrl.common.hangs import progress
from atomrl.common.outages import Outage, ServiceGone
from atomrl.common.redaction import without_secrets
from atomrl.data.files import error_list
from atomrl.rewards.calling import Outcome, Score, Task, call, columns_of, instantiate
from atomrl.rewards.errors import RewardError, RewardStop
from atomrl.rewards.scorer import Scorer, find_scorer, missing_column
from atomrl.rewards.service import RewardService
from atomrl.rewards.table import (
    CLASSES,
    LOADING,
    REWARDS,
    SERVICES,
    AnyReward,
    importable_name,
    says_right,
    truth_problem,
)
from atomrl.rewards.workers import RewardPool
from atomrl.types import Problem, RewardFailure, Segment, Trajectory

if TYPE_CHECKING:
    from atomrl.config import RewardConfig, RewardRoute

log = logging.getLogger(__name__)

BY_SOURCE = "by_data_source"
"""Name of the reward term that `reward.by_data_source` defines."""
ENVIRONMENT = "environment"
"""Name under which failures of an environment are reported, in place of a reward's name."""
PATIENCE = 3
"""Consecutive batches on which a reward may fail completely before the run stops."""
MIN_FAILURES = 8
"""A reward that has never returned a value stops the run after this many failed completions."""
RETRIES = 3
"""Repetitions of a call that fails with the error of an unavailable service, while that answers other calls."""
LARGEST_REWARD = 1e18
"""Largest absolute reward: its square must be finite in float32, in which advantages are computed."""
MAX_HANGS = 16
"""It stops the run even within a batch after this many calls that hung or crashed, since each costs its time-out."""
COUNTERS = {"timeout": "timeouts", "error": "errors", "crash": "crashes", "invalid": "invalid"}
"""Failure kind -> suffix of its metric `reward/NAME/SUFFIX`."""


@dataclass(frozen=True)
class _Part:
    """One named term of the reward."""

    name: str
    """Unique in the run; used in metric names."""
    weight: float
    scorers: dict[str | None, Scorer]
    """Data source -> reward. The key None applies to every data source."""

    def scorer(self, problem: Problem) -> Scorer:
        """Return the reward for a problem's data source.

        Raises:
            RewardError: `reward.by_data_source` has no entry for it.
        """
        scorer = self.scorers.get(None) or self.scorers.get(problem.data_source)
        if scorer is None:
            raise RewardError(
                f"problem {problem.problem_id!r}: its data_source {problem.data_source!r} has no reward in "
                f"reward.by_data_source, which has {', '.join(map(repr, self.scorers))}"
            )
        return scorer


@dataclass(eq=False)
class _Batch:
    """Scores of a batch while its calls run."""

    rows: list[int]
    """Index of each scored trajectory in the batch."""
    scores: dict[str, list[Score]]
    """Part -> a score for each trajectory."""
    seconds: list[float]
    outages: dict[Scorer, Outage] = field(default_factory=dict)
    """Services that are away."""
    faults: Counter[tuple[Scorer, int]] = field(default_factory=Counter)
    """Failures of a completion while the service answered others."""


@dataclass(eq=False)
class _Round:
    """Outcome of a round of calls."""

    again: list[Task] = field(default_factory=list)
    """Calls to repeat one completion at a time."""
    away: dict[Scorer, list[tuple[Task, Score]]] = field(default_factory=dict)
    """Calls whose service did not answer, each with a score that says so."""
    slowest: dict[Scorer, float] = field(default_factory=dict)
    """Seconds of a completion, in the slowest of the calls that gave a value."""


class Rewards:
    """Score trajectories with all reward functions of a config. Built by `build_rewards`; `close` ends the workers.

    A call with `judge=False` is thread-safe, so groups can be scored as they arrive. `judge` then checks the failures
    of all groups of the step.

    Attributes:
        seconds: scoring time of each trajectory of the last call, summed over all rewards.
    """

    def __init__(self, parts: Sequence[_Part], workers: int, patience: int | None, wait_s: float = 600.0) -> None:
        self.parts = list(parts)
        self.patience, self.wait_s = patience, wait_s
        self.seconds: list[float] = []
        self.pool = RewardPool(workers)
        self._answered: dict[Scorer, Task] = {}
        """A call of each reward that gave a value, of one completion (`_probes`)."""
        self._gave_values: set[str] = set()
        self._hangs: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._failed_batches: Counter[str] = Counter()
        self._empty_batches = 0
        self._warned: set[tuple[str, str]] = set()

    def close(self) -> None:
        """End the worker processes and the connections to services. A later batch starts new ones."""
        self.pool.close()
        for service in self.services.values():
            service.close()

    @property
    def services(self) -> dict[str, RewardService]:
        """Rewards that call an HTTP service, by `PART` or `PART/DATA_SOURCE`."""
        return {
            "/".join(filter(None, (part.name, source))): scorer.function
            for part in self.parts
            for source, scorer in part.scorers.items()
            if isinstance(scorer.function, RewardService)
        }

    @property
    def says_right(self) -> bool:
        """Whether the first part grades answers as right or wrong, for every data source: then runs have an accuracy,
        the share of its values that are 1.0 or more (`table.says_right`)."""
        scorers = self.parts[0].scorers.values() if self.parts else ()
        return bool(scorers) and all(says_right(scorer.built_in, scorer.function) for scorer in scorers)

    def totals(self) -> dict[str, float]:
        """Return cumulative service metrics `reward/NAME/...`: requests, retries, tokens, cost."""
        return {
            f"reward/{name}/{key}": value
            for name, service in self.services.items()
            for key, value in service.totals().items()
        }

    def restore(self, totals: Mapping[str, float]) -> None:
        """Restore the `totals` of a resumed run."""
        for name, service in self.services.items():
            start = f"reward/{name}/"
            service.restore({key.removeprefix(start): totals[key] for key in totals if key.startswith(start)})

    def check_sources(self, problems: Iterable[Problem]) -> None:
        """Check that every problem has a reward, the columns that it needs, and a ground truth that it can parse.

        Raises:
            RewardError: a column is missing; a data source has no reward; the template of a service names a column
                that the problem lacks; or built-in rewards cannot parse ground truths, which are listed with file and
                line.
        """
        unreadable: dict[str, None] = {}
        checked: set[tuple[Scorer, tuple[str, ...]]] = set()
        for problem in problems:
            for part in self.parts:
                scorer = part.scorer(problem)
                if (columns := (scorer, tuple(problem.columns))) not in checked:
                    checked.add(columns)
                    if reason := missing_column(scorer, problem.columns):
                        raise RewardError(f"reward {part.name!r} ({scorer.name}), {problem.problem_id}: {reason}")
                if isinstance(scorer.function, RewardService):
                    scorer.function.check(problem)
                row = {**problem.columns, "ground_truth": problem.ground_truth}
                if scorer.built_in and (reason := truth_problem(scorer.built_in, row, scorer.args)):
                    unreadable[f"{problem.problem_id}: {reason}"] = None
        if unreadable:
            raise RewardError(
                f"{len(unreadable)} ground truths cannot be read, so no answer could be correct:\n"
                + error_list([*unreadable])
            )

    def try_functions(self, problem: Problem) -> None:
        """Call the user's own functions once before the run, on two invented completions of a problem.

        Only errors that would occur on any completion are raised. Others may come from the invented texts.

        Raises:
            RewardError: a function returns a wrong number or type of values, uses an undefined name, lacks a package,
                or makes a call with wrong arguments.
        """
        texts = (str(problem.ground_truth), "I am not sure.")
        examples = [_example_completion(problem, index, text) for index, text in enumerate(texts)]
        columns, used_workers = columns_of(examples), False
        for part in self.parts:
            scorer = part.scorer(problem)
            if scorer.style == "trajectories" or scorer.built_in is not None:
                continue
            task = Task(part.name, scorer, range(len(examples)), examples, columns)
            if scorer.in_process:
                outcome = call(scorer, task.payload())
            else:
                with closing(self.pool.run([task])) as outcomes:
                    ((_, outcome),) = outcomes
                used_workers = True
            errors = [score.message for score in outcome.scores if _is_programming_error(score)]
            if len(errors) == len(examples):
                self.pool.close()
                raise RewardError(
                    f"reward {part.name!r} ({scorer.name}), called before the run with {len(examples)} made-up "
                    f"completions of {problem.problem_id}: {errors[0]}"
                )
        if used_workers:
            self.pool.close()  # the run starts its own workers

    def __call__(self, trajectories: Sequence[Trajectory], judge: bool = True) -> list[Trajectory]:
        """Score a batch.

        Args:
            trajectories: the batch.
            judge: check the failures of the batch (`judge`). False for groups that are scored as they arrive.

        Returns:
            The trajectories with `reward`, `reward_parts`, `part_weights` and `reward_failures`, in the same order.

        Raises:
            RewardError: a reward cannot be loaded or called, or its first `MAX_HANGS` calls all hung or crashed; or as
                `judge`.
            RewardStop: a service was unavailable for `reward.wait_s`.
        """
        # Episodes whose environment failed are not scored: the text says nothing about the policy.
        rows = [row for row, item in enumerate(trajectories) if item.episode is None or item.episode.failure is None]
        scores = {part.name: [Score()] * len(trajectories) for part in self.parts}
        batch = _Batch(rows, scores, [0.0] * len(trajectories))
        self.seconds = batch.seconds
        tasks, rounds = self._tasks([trajectories[row] for row in rows]), 0
        # A call that failed as a whole is repeated one completion at a time, and those of a function whose service is
        # unavailable until it answers. The later outcome of a completion replaces the earlier one.
        while tasks:
            result = self._run(tasks, rounds, batch)
            tasks, rounds = [*result.again, *self._wait_for_services(result, batch)], rounds + 1
        scored = self._add_up(trajectories, scores)
        if judge:
            self.judge(scored)
        return scored

    def _tasks(self, played: Sequence[Trajectory]) -> list[Task]:
        """Return the calls: one per part and scorer, or one per completion if a worker can score these independently.

        Raises:
            RewardError: an argument of a reward has the name of a column.
        """
        columns = columns_of(played)
        tasks: list[Task] = []
        for part in self.parts:
            by_scorer: dict[Scorer, list[int]] = {}
            for index, item in enumerate(played):
                by_scorer.setdefault(part.scorer(item.problem), []).append(index)
            for scorer, indices in by_scorer.items():
                clashes = sorted(set(scorer.args) & {*columns, "prompts", "completions"})
                if clashes and scorer.style == "columns":
                    text = f"argument {clashes[0]!r} has the name of a column; rename one of them"
                    raise RewardError(f"reward {part.name!r}: {text}")
                task = Task(part.name, scorer, indices, played, columns)
                tasks += task.split() if scorer.by_row and not scorer.in_process else [task]
        return tasks

    def _run(self, tasks: Sequence[Task], rounds: int, batch: _Batch) -> _Round:
        """Run calls, and store the scores of those that have an answer."""
        result = _Round()
        probes = self._probes(tasks, rounds) if rounds else []
        calls, probing = [*tasks, *probes], {id(task) for task in probes}
        with closing(self.pool.run([task for task in calls if not task.scorer.in_process])) as outcomes:
            here = ((task, call(task.scorer, task.payload())) for task in calls if task.scorer.in_process)
            for task, outcome in chain(outcomes, here):
                progress()
                item_s = outcome.seconds / len(task.rows)
                scored = zip(task.rows, outcome.scores, strict=True)
                valued = next((row for row, score in scored if score.failure is None), None)
                if valued is not None and item_s >= result.slowest.get(task.scorer, 0.0):
                    result.slowest[task.scorer] = item_s
                    self._answered[task.scorer] = task.alone(valued)
                if id(task) in probing:
                    continue
                if waits := next((score for score in outcome.scores if score.failure in ("away", "busy")), None):
                    result.away.setdefault(task.scorer, []).append((task, waits))
                    continue
                # Outcomes come in any order, so each is stored at its trajectory's row.
                for index, score in zip(task.rows, outcome.scores, strict=True):
                    batch.scores[task.part][batch.rows[index]] = score
                    batch.seconds[batch.rows[index]] += item_s
                if outcome.call_failed and len(task.rows) > 1:
                    self._warn_of_calls_alone(task, outcome.scores[0])
                    result.again += task.split()
                if not task.scorer.in_process:
                    self._check_hangs(task, outcome)
        return result

    def _wait_for_services(self, result: _Round, batch: _Batch) -> list[Task]:
        """Wait for services that did not answer, and return the calls to repeat.

        A call may itself be the cause of its error, if its service answers others; else the service is away.

        Raises:
            RewardStop: a service was unavailable for `reward.wait_s`.
        """
        again: list[Task] = []
        pauses = [0.0]
        for scorer, calls in result.away.items():
            if scorer not in result.slowest or any(score.failure == "busy" for _, score in calls):
                again += [task for task, _ in calls]
                (task, score) = calls[0]
                outage = Outage(f"the service of reward {task.part!r}", self.wait_s, "reward.wait_s")
                try:
                    pauses.append(batch.outages.setdefault(scorer, outage).pause_s(without_secrets(score.message)))
                except ServiceGone as gone:
                    raise RewardStop(str(gone)) from None
                continue
            if scorer in batch.outages:
                batch.outages.pop(scorer).answered()
            for task, score in calls:
                batch.faults[scorer, task.rows[0]] += 1
                if len(task.rows) > 1:
                    again += task.split()
                elif batch.faults[scorer, task.rows[0]] <= RETRIES:
                    again.append(task)
                    pauses.append(outages.FIRST_S)
                else:
                    batch.scores[task.part][batch.rows[task.rows[0]]] = score._replace(failure="error")
        for scorer in batch.outages.keys() - result.away.keys():
            batch.outages.pop(scorer).answered()
        time.sleep(max(pauses))
        return again

    def _add_up(self, trajectories: Sequence[Trajectory], scores: Mapping[str, Sequence[Score]]) -> list[Trajectory]:
        """Return the trajectories with the weighted sum of their values, and with failures.

        Every trajectory reports the same extra parts: the union of those that any completion of the batch returned.
        """
        names = {name: dict.fromkeys(key for score in column for key in score.parts) for name, column in scores.items()}
        weights = {part.name: part.weight for part in self.parts}
        scored = []
        for row, item in enumerate(trajectories):
            by_part = {name: column[row] for name, column in scores.items()}
            values = {name: score.value for name, score in by_part.items()}
            extra = {f"{name}/{key}": score.parts.get(key) for name, score in by_part.items() for key in names[name]}
            failures = tuple(
                RewardFailure(reward=name, kind=score.failure, message=without_secrets(score.message))
                for name, score in by_part.items()
                if score.failure
            )
            terms = {name: weights[name] * value for name, value in values.items() if value is not None}
            reward = sum(terms.values()) if terms else None
            if reward is not None and not abs(reward) <= LARGEST_REWARD:
                name = max(terms, key=lambda name: abs(terms[name]))
                message = f"the weighted values {terms} add up to {reward:g}, which is beyond ±{LARGEST_REWARD:g}"
                failures += (RewardFailure(reward=name, kind="invalid", message=message),)
                values[name], reward = None, None
            if any(weights[failure.reward] for failure in failures):
                reward = None  # the sum of the other parts would look like a low reward
            if item.episode is not None and item.episode.failure is not None:
                failures = (RewardFailure(reward=ENVIRONMENT, kind=item.episode.failure, message=item.episode.message),)
            scored.append(
                replace(
                    item, reward=reward, reward_parts=values | extra, part_weights=weights, reward_failures=failures
                )
            )
        return scored

    def _probes(self, tasks: Sequence[Task], turn: int) -> list[Task]:
        """Return a call of a single completion for each reward, to find out whether its service answers others: the
        slowest one that gave a value (a fast one may not have asked the service), else one of a call's completions."""
        probes = {}
        for task in tasks:
            if task.scorer in self._answered:
                probes[task.scorer] = self._answered[task.scorer]
            elif len(task.rows) > 1:
                probes[task.scorer] = task.alone(task.rows[turn % len(task.rows)])
        return [replace(task) for task in probes.values()]

    def _warn_of_calls_alone(self, task: Task, first: Score) -> None:
        """Log once in the run that a call for several completions has failed, as calls of one each may all succeed."""
        if (task.part, "call") not in self._warned:
            self._warned.add((task.part, "call"))
            log.warning(
                "reward %r failed for %d completions together, and is called again for each of them: %s: %s",
                task.part, len(task.rows), first.failure, first.message,
            )  # fmt: skip

    def _warn_of_new_kinds(self, name: str, failures: Sequence[tuple[Trajectory, RewardFailure]]) -> None:
        """Log each kind of failure of a reward once in the run."""
        for item, failure in failures:
            if (name, failure.kind) not in self._warned:
                self._warned.add((name, failure.kind))
                log.warning(
                    "reward %r has no value for %s: %s: %s (more are counted in reward/%s/%s and marked in the "
                    "rollouts)", name, _describe(item), failure.kind, failure.message, name, COUNTERS[failure.kind],
                )  # fmt: skip

    def judge(self, scored: Sequence[Trajectory]) -> None:
        """Log new kinds of failures in a batch, and stop the run if a reward keeps failing.

        Raises:
            RewardError: a reward fails on every completion, or no completion of `patience` batches in a row has a
                reward.
        """
        names = [part.name for part in self.parts]
        gave_values = {name: any(item.reward_parts[name] is not None for item in scored) for name in names}
        # An environment's failures are checked likewise, unless a reward that has its name covers them.
        if episodes := [item.episode for item in scored if item.episode is not None]:
            gave_values.setdefault(ENVIRONMENT, any(episode.failure is None for episode in episodes))

        for name, gave_value in gave_values.items():
            failures = [(item, each) for item in scored for each in item.reward_failures if each.reward == name]
            self._warn_of_new_kinds(name, failures)
            # Stop if it has failed on every completion, of the run so far or of `patience` batches in a row.
            self._failures[name] += len(failures)
            if gave_value:
                self._gave_values.add(name)
                failures = []
            self._failed_batches[name] = self._failed_batches[name] + 1 if failures else 0
            never = name not in self._gave_values and self._failures[name] >= MIN_FAILURES
            if failures and self.patience is not None and (never or self._failed_batches[name] >= self.patience):
                scope = "every completion so far" if never else f"every completion of {self.patience} batches in a row"
                item, failure = failures[0]
                raise RewardError(
                    f"reward {name!r} failed on {scope}, first on {_describe(item)}: {failure.kind}: {failure.message} "
                    f"(columns: {', '.join(columns_of(scored))})",
                    scored,
                )

        # Stop if no completion of `patience` batches in a row has a reward: there is nothing to train on.
        self._empty_batches = self._empty_batches + 1 if scored and all(item.reward is None for item in scored) else 0
        if self.patience is not None and self._empty_batches >= self.patience:
            hint = "; an environment must return its outcome, a number" if names == ["environment"] else ""
            raise RewardError(
                f"no completion of {self.patience} batches in a row has a reward: "
                f"{', '.join(map(repr, names))} returned None for all others{hint}",
                scored,
            )

    def _check_hangs(self, task: Task, outcome: Outcome) -> None:
        """Raise RewardError if the first `MAX_HANGS` calls of a reward all hung or ended their process."""
        if any(score.value is not None for score in outcome.scores):
            self._gave_values.add(task.part)
        score = outcome.scores[0]
        self._hangs[task.part] += score.failure in ("timeout", "crash")
        never = task.part not in self._gave_values
        if self.patience is not None and never and self._hangs[task.part] >= MAX_HANGS:
            raise RewardError(
                f"reward {task.part!r}: the first {MAX_HANGS} calls all hung or ended their process, the last "
                f"on {_describe(task.items[0])}: {score.failure}: {score.message}"
            )


def _example_completion(problem: Problem, index: int, text: str) -> Trajectory:
    """Build an invented completion for `Rewards.try_functions`, with one dummy token per word."""
    segments = (
        Segment(origin="prompt", token_ids=(0,)),
        Segment(origin="model", token_ids=(0,) * len(text.split())),
    )
    return Trajectory(
        prompt_id=problem.problem_id, index=index, problem=problem, segments=segments, text=text, finish_reason="stop"
    )


def _is_programming_error(score: Score) -> bool:
    """Return True for failures that would occur on any completion. A NaN may be due to the invented text."""
    if score.failure == "invalid":
        return re.match(r"it returned -?(nan|inf)\b", score.message) is None
    always = r"(NameError|UnboundLocalError|ImportError|ModuleNotFoundError): |TypeError: \w+\(\) (got|missing|takes) "
    return score.failure == "error" and re.match(always, score.message) is not None


def build_rewards(
    config: RewardConfig,
    local: Mapping[str, AnyReward] | None = None,
    patience: int | None = PATIENCE,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Rewards:
    """Build the `Rewards` of a config.

    A completion's reward is the weighted sum over the functions that returned a value. It is None if no function did,
    or if one with a nonzero weight failed. Failures are in `Trajectory.reward_failures`.

    Args:
        config: the section `reward`.
        local: functions that exist in this process only, by the name used in the config. They run in this process:
            exceptions are caught, but there is no time limit.
        patience: consecutive batches on which a reward may fail completely; None for no limit.
        device, trust_remote_code: defaults for reward models; their `args` take precedence.

    Raises:
        RewardError: a reward is unknown, lacks `**columns`, or does not accept its `args`. The returned object raises
            it later for a reward that keeps failing, whose arguments clash with column names, or that a worker cannot
            import.
    """
    local, loading = local or {}, {"device": device, "trust_remote_code": trust_remote_code}
    parts: list[_Part] = []
    if config.by_data_source:
        table = config.by_data_source.items()
        parts.append(
            _Part(BY_SOURCE, 1.0, {source: _scorer(route, local, loading, config.wait_s) for source, route in table})
        )
    for item in config.functions:
        name = item.function.rpartition(":")[2].rpartition(".")[2]
        scorer = _scorer(item, local, loading, config.wait_s)
        parts.append(_Part(_unique_name(name, [part.name for part in parts]), item.weight, {None: scorer}))
    return Rewards(parts, config.workers, patience, config.wait_s)


def name_functions(functions: Iterable[AnyReward | str]) -> tuple[list[str], dict[str, AnyReward]]:
    """Assign names to functions, so that a config can refer to them.

    Returns:
        (names, local). A built-in keeps its name; an importable function gets its dotted path; any other its plain
        name, with a number if it is already used, and with `__main__:` in front if it is the name of a built-in, for
        which another process would take it. `local` maps names to the functions that exist in this process only:
        lambdas, closures, functions of `__main__`, and callable objects.

    Example:
        >>> from atomrl.rewards import gsm8k
        >>> names, local = name_functions([gsm8k, lambda prompts, completions, **columns: [0.0], "strict_math"])
        >>> names, list(local)
        (['gsm8k', 'reward', 'strict_math'], ['reward'])
    """
    names: list[str] = []
    local: dict[str, AnyReward] = {}
    for function in functions:
        if isinstance(function, str):
            names.append(function)
            continue
        name = importable_name(function)
        if name is None:
            base = getattr(function, "__name__", type(function).__name__)
            base = base if base.isidentifier() else "reward"
            name = _unique_name(f"__main__:{base}" if base in REWARDS or base in CLASSES else base, names)
            local[name] = function
        names.append(name)
    return names, local


def failure_counts(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Count failed completions per reward: metrics `reward/NAME/{timeouts,errors,crashes,invalid}`."""
    counts: dict[str, float] = {}
    for item in trajectories:
        for name in [*item.part_weights, *([ENVIRONMENT] if item.episode else [])]:
            for counter in COUNTERS.values():
                counts.setdefault(f"reward/{name}/{counter}", 0.0)
        for failure in item.reward_failures:
            counts[f"reward/{failure.reward}/{COUNTERS[failure.kind]}"] += 1
    return counts


def _unique_name(name: str, taken: Sequence[str]) -> str:
    """Return `name`, with a number appended if it is already in `taken`."""
    return next(n for n in [name, *(f"{name}_{k}" for k in range(2, len(taken) + 3))] if n not in taken)


def _scorer(route: RewardRoute, local: Mapping[str, AnyReward], loading: Mapping[str, object], wait_s: float) -> Scorer:
    """Build the scorer of one config entry."""
    function = local.get(route.function)
    defaults = loading if function is None and route.function in LOADING else {}
    if function is None and route.function in SERVICES:
        defaults = {"timeout_s": route.timeout_s, "wait_s": wait_s}
    scorer = find_scorer(route.function, {**defaults, **route.args}, function, route.timeout_s, route.completions)
    if not scorer.in_process:
        return scorer
    scorer = instantiate(scorer)
    # Rewards that only wait for a service or an actor set `concurrent`. Others are called by one thread at a time.
    return scorer if getattr(scorer.function, "concurrent", False) else replace(scorer, lock=threading.Lock())


def _describe(item: Trajectory) -> str:
    """Describe a trajectory for a message: problem, index and the start of its text."""
    return f"problem {item.problem.problem_id!r}, completion {item.index}: {item.turn[:200]!r}"
