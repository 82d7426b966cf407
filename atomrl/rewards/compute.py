"""All rewards of a run together."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from atomrl.cluster.ray_cluster import Actor, RayCluster, RayHangs
from atomrl.common.errors import Outage, ServiceGone
from atomrl.common.processes import progress
from atomrl.rewards.calling import (
    Outcome,
    Score,
    Scorer,
    Task,
    call,
    columns_of,
    find_scorer,
    instantiate,
    missing_column,
)
from atomrl.rewards.errors import NoScore, RewardError, RewardStop
from atomrl.rewards.pool import WorkerPool
from atomrl.rewards.service import RewardService
from atomrl.rewards.table import LOADING, REWARDS, SERVICES, AnyReward, importable_name, truth_problem
from atomrl.types import RewardFailure, Sample, Segment, Trajectory

if TYPE_CHECKING:
    from atomrl.config import RewardConfig, RewardRoute


log = logging.getLogger(__name__)
BY_SOURCE = "by_data_source"
"""The name of the part that the table of data sources gives."""
ENVIRONMENT = "environment"
"""In the place of a part, where an environment failed."""
PATIENCE = 3
"""Batches in a row of which a reward may fail on everything."""
MIN_FAILURES = 8
"""A reward that never gave a value stops the run once it failed on this many completions."""
MAX_HANGS = 16
"""...or, before the end of a batch, once this many calls hung or ended their process: each takes its time-out."""


COUNTERS = {"timeout": "timeouts", "error": "errors", "crash": "crashes", "invalid": "invalid"}
"""kind of failure -> the metric that counts it, after `reward/NAME/`."""


def _first(lines: Iterable[str], most: int = 20) -> str:
    """Lines for an error, up to a number."""
    found = list(lines)
    rest = [f"and {len(found) - most} more"] if len(found) > most else []
    return "\n".join(f"  {line}" for line in found[:most] + rest)


@dataclass(frozen=True)
class _Part:
    """One named term of the reward."""

    name: str
    """Unique in the run; the name it is logged under."""
    weight: float
    scorers: dict[str | None, Scorer]
    """data source -> reward; None: every completion's."""

    def scorer(self, sample: Sample) -> Scorer:
        found = self.scorers.get(None) or self.scorers.get(sample.data_source)
        if found is None:
            raise RewardError(
                f"sample {sample.sample_id!r}: its data_source {sample.data_source!r} has no reward in "
                f"reward.by_data_source, which has {', '.join(map(repr, self.scorers))}"
            )
        return found


class Rewards:
    """Scores trajectories with all rewards of a config: see `build_rewards`. Close it to end its worker processes.

    `score` may be called from several threads at once: for the groups of a step as they come. `judge` then says of all
    of them whether the run can go on.

    Attributes:
        seconds: what each trajectory of the last call took in all rewards together.
    """

    def __init__(self, parts: Sequence[_Part], workers: int, patience: int | None, wait_s: float = 600.0) -> None:
        self.parts = list(parts)
        self.patience, self.wait_s = patience, wait_s
        self.seconds: list[float] = []
        self.pool = WorkerPool(workers)
        # one call at a time, where a reward computes in this process; one that only waits says that it is `concurrent`
        scorers = [scorer for part in self.parts for scorer in part.scorers.values()]
        serial = [scorer for scorer in scorers if not getattr(scorer.function, "concurrent", False)]
        self._locks = {scorer: threading.Lock() for scorer in serial}
        self._gave_values: set[str] = set()
        self._hangs: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._failed_batches: Counter[str] = Counter()
        self._empty_batches = 0
        self._warned: set[tuple[str, str]] = set()

    def close(self) -> None:
        """End the worker processes and the connections to services; another batch starts new ones."""
        self.pool.close()
        for service in self.services.values():
            service.close()

    @property
    def services(self) -> dict[str, RewardService]:
        """The rewards that ask a service, by the name of their part (and data source)."""
        return {
            "/".join(filter(None, (part.name, source))): scorer.function
            for part in self.parts
            for source, scorer in part.scorers.items()
            if isinstance(scorer.function, RewardService)
        }

    def totals(self) -> dict[str, float]:
        """`reward/NAME/...`: what services were asked, and what they cost, since the run began."""
        return {
            f"reward/{name}/{key}": value
            for name, service in self.services.items()
            for key, value in service.totals().items()
        }

    def restore(self, totals: Mapping[str, float]) -> None:
        """Go on from the `totals` of a run that is resumed."""
        for name, service in self.services.items():
            start = f"reward/{name}/"
            service.restore({key.removeprefix(start): totals[key] for key in totals if key.startswith(start)})

    def check_sources(self, samples: Iterable[Sample]) -> None:
        """Check that every sample has a reward, the columns that this needs, and a truth that it can read.

        Raises:
            RewardError: a reward needs a column that the data lack; it names the reward, its parameter and the columns.
                Or the table of data sources lacks one; it names the sample and the sources that it has. Or a
                service would be sent what the sample has not. Or built-in rewards cannot read ground truths: they are
                listed with their places.
        """
        unread: dict[str, None] = {}
        checked: set[tuple[Scorer, tuple[str, ...]]] = set()
        for sample in samples:
            for part in self.parts:
                scorer = part.scorer(sample)
                if (columns := (scorer, tuple(sample.columns))) not in checked:
                    checked.add(columns)
                    if problem := missing_column(scorer, sample.columns):
                        raise RewardError(f"reward {part.name!r} ({scorer.name}), {sample.sample_id}: {problem}")
                if isinstance(scorer.function, RewardService):
                    scorer.function.check(sample)
                row = {**sample.columns, "ground_truth": sample.ground_truth}
                name = importable_name(scorer.function) or scorer.name
                if problem := truth_problem(name, row, scorer.args):
                    unread[f"{sample.sample_id}: {problem}"] = None
        if unread:
            raise RewardError(
                f"{len(unread)} ground truths cannot be read, so no answer could be right:\n" + _first(unread)
            )

    def try_functions(self, sample: Sample) -> None:
        """Call the user's own functions once, with made-up completions of a sample, before there are any others.

        What fails in another way than by what it returns is left to real completions, on which it may do better.

        Raises:
            RewardError: a function does not return as many numbers as there are completions, or cannot work at all: a
                name that it uses is not defined, a package is missing, a call has other arguments.
        """
        made = [
            _made_up(sample, index, text) for index, text in enumerate((str(sample.ground_truth), "I am not sure."))
        ]
        columns, tried = columns_of(made), False
        for part in self.parts:
            scorer = part.scorer(sample)
            if scorer.style == "trajectories" or scorer.name in REWARDS:
                continue
            task = Task(part.name, scorer, range(len(made)), made, columns)
            if scorer.in_process:
                outcome = call(scorer, task.payload())
            else:
                with closing(self.pool.run([task])) as outcomes:
                    ((_, outcome),) = outcomes
                tried = True
            wrong = [score.message for score in outcome.scores if _is_mistake(score)]
            if len(wrong) == len(made):
                self.pool.close()
                raise RewardError(
                    f"reward {part.name!r} ({scorer.name}), called before the run with {len(made)} made-up completions "
                    f"of {sample.sample_id}: {wrong[0]}"
                )
        if tried:
            self.pool.close()  # a run starts its own workers

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same with their rewards, in the same order.

        Raises:
            RewardError: a reward fails on everything, none gives a value for several batches in a row, or one cannot
                be called at all (see `build_rewards`).
        """
        scored = self.score(trajectories)
        self.judge(scored)
        return scored

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same with their rewards, in the same order, without a judgement of failures.

        Raises:
            RewardError: a reward cannot be called at all.
        """
        unplayed = [item.episode is not None and item.episode.failure is not None for item in trajectories]
        if any(unplayed):
            pairs = list(zip(trajectories, unplayed, strict=True))
            played = iter(self.score([item for item, failed in pairs if not failed]))
            return [self._without_reward(item) if failed else next(played) for item, failed in pairs]
        columns = columns_of(trajectories)
        scores = {part.name: [Score()] * len(trajectories) for part in self.parts}
        self.seconds = seconds = [0.0] * len(trajectories)
        for task, outcome in self._run([task for part in self.parts for task in _tasks(part, trajectories, columns)]):
            for row, score in zip(task.rows, outcome.scores, strict=True):
                scores[task.part][row] = score
                seconds[row] += outcome.seconds / len(task.rows)
        names = {name: dict.fromkeys(key for score in given for key in score.parts) for name, given in scores.items()}
        weights = {part.name: part.weight for part in self.parts}
        scored = []
        for row, item in enumerate(trajectories):
            mine = {name: given[row] for name, given in scores.items()}
            values = {name: score.value for name, score in mine.items()}
            extra = {f"{name}/{key}": score.parts.get(key) for name, score in mine.items() for key in names[name]}
            failures = tuple(
                RewardFailure(reward=name, kind=score.failure, message=score.message)
                for name, score in mine.items()
                if score.failure
            )
            scored.append(
                replace(
                    item,
                    reward=_total(values, weights, failures),
                    reward_parts=values | extra,
                    part_weights=weights,
                    reward_failures=failures,
                )
            )
        return scored

    def _without_reward(self, item: Trajectory) -> Trajectory:
        """One whose environment failed: what it wrote says nothing of the model."""
        episode = item.episode
        assert episode is not None and episode.failure is not None
        return replace(
            item,
            reward=None,
            reward_parts={part.name: None for part in self.parts},
            part_weights={part.name: part.weight for part in self.parts},
            reward_failures=(RewardFailure(reward=ENVIRONMENT, kind=episode.failure, message=episode.message),),
        )

    def judge(self, scored: Sequence[Trajectory]) -> None:
        """Warn of new kinds of failures in a batch.

        Raises:
            RewardError: a reward fails on everything, or none gives a value for several batches in a row.
        """
        columns = columns_of(scored)
        played = [item.episode for item in scored if item.episode is not None]
        try:
            for part in self.parts:
                given = any(item.reward_parts[part.name] is not None for item in scored)
                self._judge(part.name, scored, columns, given)
            if played and ENVIRONMENT not in {part.name for part in self.parts}:  # whose failures those then are
                self._judge(ENVIRONMENT, scored, columns, any(episode.failure is None for episode in played))
            self._judge_total(scored)
        except RewardError as error:
            error.scored = scored
            raise

    def _run(self, tasks: Sequence[Task]) -> list[tuple[Task, Outcome]]:
        """The outcomes; a call that failed as a whole is done again, one completion at a time."""
        first = self._run_patiently(tasks)
        again = [task for task, outcome in first if outcome.call_failed and len(task.rows) > 1]
        return first + (self._run_patiently([one for task in again for one in task.split()]) if again else [])

    def _run_patiently(self, tasks: Sequence[Task]) -> list[tuple[Task, Outcome]]:
        """The outcomes; a call of a function that asks a service is repeated while that is away.

        Raises:
            RewardStop: it is for too long.
        """
        found: list[tuple[Task, Outcome]] = []
        outages: dict[str, Outage] = {}
        while tasks:
            away: list[tuple[Task, str]] = []
            pauses = [0.0]
            for task, outcome in self._run_once(tasks):
                if score := next((score for score in outcome.scores if score.failure == "away"), None):
                    away.append((task, score.message))
                else:
                    found.append((task, outcome))
            failing = {task.part: message for task, message in away}
            for part in outages.keys() - failing:
                outages.pop(part).answered()
            for part, message in failing.items():
                outages.setdefault(part, Outage(f"what the reward {part!r} asks", self.wait_s, "reward.wait_s"))
                try:
                    pauses.append(outages[part].pause_s(message))
                except ServiceGone as gone:
                    raise RewardStop(str(gone)) from None
            tasks = [task for task, _ in away]
            time.sleep(max(pauses))
        return found

    def _run_once(self, tasks: Sequence[Task]) -> list[tuple[Task, Outcome]]:
        found: list[tuple[Task, Outcome]] = []
        with closing(self.pool.run([task for task in tasks if not task.scorer.in_process])) as outcomes:
            for task, outcome in outcomes:
                progress()
                found.append((task, outcome))
                score = outcome.scores[0]
                if any(score.value is not None for score in outcome.scores):
                    self._gave_values.add(task.part)
                self._hangs[task.part] += score.failure in ("timeout", "crash")
                never = task.part not in self._gave_values
                if self.patience is not None and never and self._hangs[task.part] >= MAX_HANGS:
                    raise RewardError(
                        f"reward {task.part!r}: the first {MAX_HANGS} calls all hung or ended their process, the last "
                        f"on {_shown(task.items[0])}: {score.failure}: {score.message}"
                    )
        for task in [task for task in tasks if task.scorer.in_process]:
            progress()
            with self._locks.get(task.scorer, nullcontext()):
                found.append((task, call(task.scorer, task.payload())))
        return found

    def _judge(self, name: str, scored: Sequence[Trajectory], columns: Iterable[str], gave_values: bool) -> None:
        """Warn of new kinds of failures, and stop where a reward fails on everything."""
        failures = [(item, failure) for item in scored for failure in item.reward_failures if failure.reward == name]
        for item, failure in failures:
            if (name, failure.kind) not in self._warned:
                self._warned.add((name, failure.kind))
                log.warning(
                    "reward %r has no value for %s: %s: %s (further ones are counted in reward/%s/%s and marked in the "
                    "rollouts)", name, _shown(item), failure.kind, failure.message, name, COUNTERS[failure.kind]
                )  # fmt: skip
        self._failures[name] += len(failures)
        if gave_values:
            self._gave_values.add(name)
            failures = []
        self._failed_batches[name] = self._failed_batches[name] + 1 if failures else 0
        never = name not in self._gave_values and self._failures[name] >= MIN_FAILURES
        if failures and self.patience is not None and (never or self._failed_batches[name] >= self.patience):
            often = "every completion so far" if never else f"every completion of {self.patience} batches in a row"
            item, failure = failures[0]
            raise RewardError(
                f"reward {name!r} failed on {often}, first on {_shown(item)}: {failure.kind}: {failure.message} "
                f"(columns: {', '.join(columns)})"
            )

    def _judge_total(self, scored: Sequence[Trajectory]) -> None:
        """Stop where no completion of several batches in a row has a reward: nothing can be learned from them."""
        self._empty_batches = self._empty_batches + 1 if scored and all(item.reward is None for item in scored) else 0
        if self.patience is not None and self._empty_batches >= self.patience:
            raise RewardError(
                f"no completion of {self.patience} batches in a row has a reward: "
                f"{', '.join(repr(part.name) for part in self.parts)} returned None for all that did not fail"
            )


def _made_up(sample: Sample, index: int, text: str) -> Trajectory:
    """A completion that nobody wrote, with a token for each word."""
    segments = (
        Segment(origin="prompt", token_ids=(0,)),
        Segment(origin="model", token_ids=(0,) * len(text.split())),
    )
    return Trajectory(
        prompt_id=sample.sample_id, index=index, sample=sample, segments=segments, text=text, finish_reason="stop"
    )


def _is_mistake(score: Score) -> bool:
    """Whether a function would fail so on any completion: nan may well come of a made-up one."""
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
    """What scores trajectories with all rewards of a config.

    A completion's reward is the sum of weight times value over the functions that gave one; None where none did, and
    where one that counts (whose weight is not 0) failed. Every failure is in its `reward_failures`.

    Args:
        config: the section `reward`.
        local: functions that exist in this process only, by the name that an item calls them. They run here:
            exceptions are caught, but there is no time limit.
        patience: how many batches in a row a reward may fail on everything; None: for ever.
        device, trust_remote_code: of reward models, unless their `args` say it.

    Raises:
        RewardError: a reward is unknown, does not take `**columns`, or does not take its `args`. What is returned
            raises it for a reward that fails on everything, from the start or `patience` batches in a row; whose
            arguments have the names of columns; or that a worker cannot load.
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
        parts.append(_Part(_unused(name, [part.name for part in parts]), item.weight, {None: scorer}))
    return Rewards(parts, config.workers, patience, config.wait_s)


def name_functions(functions: Iterable[AnyReward | str]) -> tuple[list[str], dict[str, AnyReward]]:
    """Names for functions, so that a config can hold them.

    Returns:
        A name for each (a built-in's own; the dotted path of a function of an imported module, which workers find
        too; else its plain name, numbered where two are equal), and by name those that exist in this process only:
        lambdas, functions of `__main__` and of other functions, and objects with `__call__`.

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
            name = _unused(base if base.isidentifier() else "reward", names)
            local[name] = function
        names.append(name)
    return names, local


def first_values(trajectories: Iterable[Trajectory]) -> dict[str, list[float]]:
    """What the first part of each trajectory's reward gave, by its name: that says what is right, if it does
    (`table.says_right`)."""
    found: dict[str, list[float]] = {}
    for item in trajectories:
        name, value = next(iter(item.reward_parts.items()), ("", None))
        if value is not None:
            found.setdefault(name, []).append(value)
    return found


def failure_counts(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """`reward/NAME/{timeouts,errors,crashes,invalid}` of every part: completions without a usable value."""
    counts: dict[str, float] = {}
    for item in trajectories:
        for name in [*item.part_weights, *([ENVIRONMENT] if item.episode else [])]:
            for counter in COUNTERS.values():
                counts.setdefault(f"reward/{name}/{counter}", 0.0)
        for failure in item.reward_failures:
            counts[f"reward/{failure.reward}/{COUNTERS[failure.kind]}"] += 1
    return counts


def _unused(name: str, taken: Sequence[str]) -> str:
    """A name that is not taken: itself, or numbered."""
    return next(n for n in [name, *(f"{name}_{k}" for k in range(2, len(taken) + 3))] if n not in taken)


def _scorer(route: RewardRoute, local: Mapping[str, AnyReward], loading: Mapping[str, object], wait_s: float) -> Scorer:
    function = local.get(route.function)
    defaults = loading if function is None and route.function in LOADING else {}
    if function is None and route.function in SERVICES:
        defaults = {"timeout_s": route.timeout_s, "wait_s": wait_s}
    scorer = find_scorer(route.function, {**defaults, **route.args}, function, route.timeout_s, route.completions)
    return instantiate(scorer) if scorer.in_process else scorer


def _tasks(part: _Part, trajectories: Sequence[Trajectory], columns: Mapping[str, list[Any]]) -> list[Task]:
    """The calls of one part: one with all completions, or one for each where they are scored by themselves."""
    by_scorer: dict[Scorer, list[int]] = {}
    for row, item in enumerate(trajectories):
        by_scorer.setdefault(part.scorer(item.sample), []).append(row)
    tasks = []
    for scorer, rows in by_scorer.items():
        taken = sorted(set(scorer.args) & {*columns, "prompts", "completions"})
        if taken and scorer.style == "columns":
            text = f"argument {taken[0]!r} has the name of a column; rename one of them"
            raise RewardError(f"reward {part.name!r}: {text}")
        task = Task(part.name, scorer, rows, trajectories, columns)
        tasks += task.split() if scorer.by_row and not scorer.in_process else [task]
    return tasks


def _total(
    values: Mapping[str, float | None], weights: Mapping[str, float], failures: Sequence[RewardFailure]
) -> float | None:
    """The weighted sum; none where a part that counts failed, since the others alone would pass for a low one."""
    if any(weights[failure.reward] for failure in failures):
        return None
    given = [weights[name] * value for name, value in values.items() if value is not None]
    return sum(given) if given else None


def _shown(item: Trajectory) -> str:
    """How a message names a trajectory."""
    return f"sample {item.sample.sample_id!r}, completion {item.index}: {item.turn[:200]!r}"


# --------------------------------------------------------------------------------------------------------------------
# Reward models in a process of their own, with its share of a GPU.

_DEATHS = 4
"""In a row, after which the run ends."""


class ServedRewards:
    """Rewards in a process of their own, as `RewardActor` calls them."""

    def __init__(self, rewards: Sequence[AnyReward]) -> None:
        self.rewards = rewards

    def score(self, index: int, trajectories: Sequence[Trajectory]) -> Any:
        return self.rewards[index](trajectories)


class RewardActor:
    """Rewards in the Ray actor of the role `reward`.

    When it dies it is started again and asked again. When it does not answer within `cluster.timeout_s`, what it was
    asked for has no score (`timeout`), and another takes its place.

    Args:
        rewards: that are called with trajectories; must be picklable.
        cluster: where it runs, and whose end is its end.
    """

    def __init__(self, rewards: Sequence[AnyReward], cluster: RayCluster) -> None:
        self.cluster, self.build = cluster, partial(ServedRewards, list(rewards))
        self._actor: Actor | None = None
        self._turn = threading.Lock()
        try:
            self.current()
        except cluster.died as error:
            reason = str(error).strip().partition("\n")[0]
            raise RewardStop(f"the actor of the reward model died while it started: {reason}") from error

    def current(self) -> Actor:
        """The actor, started where there is none."""
        if self._actor is None:
            actor = self.cluster.start("reward", 0, self.build)
            try:
                self.cluster.know(actor)
            except BaseException:
                self.cluster.end(actor)
                raise
            self._actor = actor
        return self._actor

    def score(self, index: int, trajectories: Sequence[Trajectory]) -> list[Any]:
        """What the reward of this index gives. One call at a time, so that none's time passes while others compute.

        Raises:
            RewardStop: the actor died again and again.
            Exception: what the reward raised.
        """
        with self._turn:
            return self._score(index, trajectories)

    def _score(self, index: int, trajectories: Sequence[Trajectory]) -> list[Any]:
        for _ in range(_DEATHS):
            actor = None
            try:
                actor = self.current()
                return cast(list[Any], self.cluster.call(actor, "score", index, trajectories))
            except RayHangs as error:
                raise RewardStop(str(error)) from error
            except TimeoutError as error:
                self._give_up(actor, str(error))
                return [NoScore("timeout", str(error))] * len(trajectories)
            except self.cluster.died as error:
                reason = str(error).strip().partition("\n")[0]
                self._give_up(actor, f"{actor or 'reward'} died: {reason}")
        raise RewardStop(f"the actor of the reward model died {_DEATHS} times in a row: {reason}")

    def _give_up(self, actor: Actor | None, reason: str) -> None:
        log.warning("%s; another one is started", reason)
        if actor is not None:
            self.cluster.end(actor)
            self._actor = None


def move_models(rewards: Rewards, cluster: RayCluster) -> None:
    """Let the rewards with weights of their own compute in the actor of the role `reward`. Their weights are not loaded
    yet."""
    places = [(part.scorers, source) for part in rewards.parts for source in part.scorers]
    models = [(scorers, source) for scorers, source in places if scorers[source].name in LOADING]
    actor = RewardActor([scorers[source].function for scorers, source in models], cluster)
    for index, (scorers, source) in enumerate(models):
        scorers[source] = replace(scorers[source], function=partial(actor.score, index))
