"""`AsyncRolloutSource`: groups that are sampled ahead, also during updates."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from atomrl.common.hangs import waits_for_service
from atomrl.common.threads import max_threads
from atomrl.config import AsynchronousConfig
from atomrl.data.curriculum import Curriculum, Draw
from atomrl.data.processor import DataProcessor
from atomrl.engines.generation import requests_of, to_trajectory
from atomrl.protocols import Algorithm, RolloutEngine, WeightTransfer
from atomrl.rewards.compute import Rewards
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.sources import Groups, GroupSource, is_exhausted, with_baselines
from atomrl.trainer.staleness import groups_to_truncate, open_limit, select_groups, staleness, too_old
from atomrl.types import GenerationOutput, GenerationRequest, Prompt, SamplingParams, Trajectory

log = logging.getLogger(__name__)


TICK_S = 0.5
"""Longest wait for a change before the time-out is checked again."""
POLL_S = 0.02
"""Duration of a poll of the engine. The engine is free for others between two polls."""
JOIN_S = 5.0
"""Seconds that `close` waits for the sampling thread."""
EXTRA = "extra:"
"""Prefix of request ids for an algorithm's `extra_rollouts`."""


@dataclass(eq=False)
class _Group:
    """A prompt from its submission until its completions are trained on, rejected or dropped."""

    draw: Draw
    prompt: Prompt
    version: int
    """Weight version when its current requests were submitted."""
    waiting: dict[str, GenerationRequest]
    """Requests in the engine."""
    outputs: dict[str, GenerationOutput] = field(default_factory=dict)
    scored: list[Trajectory] | None = None

    @property
    def position(self) -> int:
        return self.draw.position

    @property
    def oldest(self) -> int:
        """Oldest weight version that may have sampled one of its tokens."""
        parts = [part for output in self.outputs.values() for part in output.segments]
        drawn = [part.policy_version for part in parts if part.policy_version is not None]
        return min([*drawn, *([self.version] if self.waiting or not drawn else [])])

    @property
    def drawing(self) -> bool:
        return bool(self.waiting)

    @property
    def drawn(self) -> int:
        if any(name.startswith(EXTRA) for name in self.waiting):
            return 0  # a group without its baseline cannot be trained on
        return sum(not name.startswith(EXTRA) for name in self.outputs)

    def trajectories(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Return the trajectories to train on and the extra ones, in the order of their index."""
        names = sorted(self.outputs, key=lambda name: int(name.rpartition("/")[2]))
        pairs = [(to_trajectory(self.prompt, int(n.rpartition("/")[2]), self.outputs[n]), n) for n in names]
        extra = [item for item, name in pairs if name.startswith(EXTRA)]
        return [item for item, name in pairs if not name.startswith(EXTRA)], extra


class AsyncRolloutSource(GroupSource):
    """Samples ahead of the trainer, for asynchronous training.

    Each group is submitted, sampled, and scored as soon as it is complete; then it waits for the trainer, which takes
    the oldest groups. So a slow completion or reward delays only its own group.

    Staleness: there are at most as many open groups (not trained on yet) as one step and `max_staleness` further steps
    need. Groups that are trained on in the order of submission are then within the bound, as in AReaL
    (arXiv:2505.24298). Groups that come too late are dropped when the weights change, and sampled again: every trained
    token was sampled by weights at most `max_staleness` versions behind the trainer's. With `max_staleness` 0 nothing
    is sampled during updates; without `oversampling`, the groups are then those of `EngineSource`, round by round.

    Threads: while the trainer waits for groups, it polls the engine itself, with all its threads. During updates a
    thread of the source polls, with a quarter as many: two teams with more threads than cores would wait for each other
    in every operation.

    Seeds: a group's seeds derive from the step in which it would be trained on if all groups came in order. So requests
    depend on timing only if the algorithm rejects groups. A group that is sampled again has the seeds of a later step.

    Args:
        engine: used by one thread at a time, for one short poll.
        transfer: sends the trainer's weights to the engine.
        algorithm, curriculum, processor, sampling: see `EngineSource`. The curriculum learns from a group when it is
            trained on, or as soon as it is rejected.
        rewards: scores one group per call; calls may overlap.
        settings: the section `asynchronous`.
        groups: groups per step.
        steps: steps of the run; nothing is sampled beyond.
        done: steps done so far.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        transfer: WeightTransfer,
        algorithm: Algorithm,
        curriculum: Curriculum,
        processor: DataProcessor,
        rewards: Rewards,
        sampling: SamplingParams,
        settings: AsynchronousConfig,
        groups: int,
        steps: int,
        done: int = 0,
    ) -> None:
        self.engine, self.transfer, self.algorithm, self.curriculum = engine, transfer, algorithm, curriculum
        self.processor, self.rewards, self.sampling, self.settings = processor, rewards, sampling, settings
        self.groups, self.steps, self.step = groups, steps, done
        self._open: dict[int, _Group] = {}
        self._requests: dict[str, _Group] = {}
        self._refused: list[_Group] = []
        self._unjudged: Groups = []
        self._wanted = self._rounds = 0
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._drawing = self._waits = self._held = self._closing = False
        self._error: Exception | None = None
        self._moved = 0
        self._drawing_s, self._since = 0.0, time.monotonic()
        self._dropped = self._cut = 0
        self._metrics: dict[str, float] = {}

    # ---- The trainer's side ----

    def collect(self, groups: int, step: int, watch: Stopwatch) -> tuple[Groups, Groups]:
        """Wait for `groups` scored groups and return the oldest, and the groups rejected since the last call.

        Raises:
            TimeoutError: engine and rewards finished nothing for `timeout_s`, although polls return.
            Exception: an error of another thread.
        """
        began = time.monotonic()
        with self._changed, watch("wait"):
            self.step, self._wanted, self._rounds = step, groups, 0
            self._start()
            self._wait(lambda: len(self._ready()) >= groups or self._gives_up(groups))
            self._wanted = 0
            chosen = select_groups(self._ready(), groups)
            accepted = [group.scored or [] for group in chosen]
            for group, scored in zip(chosen, accepted, strict=True):
                del self._open[group.position]
                self.curriculum.observe(scored)
            refused = [group.scored or [] for group in sorted(self._refused, key=lambda group: group.position)]
            self._refused = []
            self._measure(accepted, step - 1, time.monotonic() - began)
            self._changed.notify_all()
        self.warn_if_short(step, len(accepted), len(refused), groups)
        return accepted, refused

    def update(self, version: int) -> None:
        """Send the trainer's weights to the engine between two polls, and drop groups that are too stale for them.

        Running requests continue with the new weights (`on_update: keep`), restart (`abort`), or finish before
        (`wait`).

        Raises:
            ValueError, TimeoutError, Exception: errors of `transfer` and `collect`.
        """
        with self._still(drain=self.settings.on_update == "wait"):
            begun = self._requests if self.settings.on_update == "abort" else {}
            if begun:  # before the transfer, which would recompute their KV cache
                self.engine.abort(list(begun))
            self.transfer(version)
            with self._changed:
                for group in begun.values():
                    group.version = version
                for group in too_old(self._open.values(), self.settings, version):
                    self._abort(list(group.waiting))
                    del self._open[group.position]
                    self.curriculum.again(group.draw)
                    self._dropped += 1
                if begun:
                    self.engine.submit([group.waiting[name] for name, group in begun.items()])

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context in which the engine has no requests and the caller may use it."""
        with self._still(drain=True):
            yield

    def metrics(self) -> dict[str, float]:
        """Return `async/...` and `perf/...` of the last `collect`, over the time since the one before."""
        return self._metrics

    def close(self) -> None:
        """End the sampling thread after its current poll."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                log.warning("the engine is still sampling after %g s; the run ends without waiting for it", JOIN_S)

    def _ready(self) -> list[_Group]:
        return [group for group in self._open.values() if group.scored is not None]

    @property
    def _in_rounds(self) -> bool:
        """True if groups are sampled only after all earlier ones are scored: none depends on which finished first."""
        return self.settings.max_staleness == 0 and self.settings.oversampling == 1

    def _gives_up(self, groups: int) -> bool:
        if self.curriculum.is_empty and len(self._ready()) == len(self._open):
            return True
        if self._in_rounds:
            return is_exhausted(groups, 0, self._rounds) and len(self._ready()) == len(self._open)
        return is_exhausted(groups, len(self._refused))

    def _measure(self, accepted: Groups, version: int, waited_s: float) -> None:
        now = time.monotonic()
        passed, self._since = max(now - self._since, 1e-9), now
        drawing_s, self._drawing_s = self._drawing_s, 0.0
        self._metrics = staleness(accepted, version) | {
            "perf/trainer_idle": waited_s / passed,
            "perf/engine_idle": max(0.0, 1 - drawing_s / passed),
            "async/groups_ready": float(len(self._ready())),
            "async/groups_open": float(len(self._open)),
            "async/groups_dropped": float(self._dropped),
            "async/groups_cut": float(self._cut),
            "perf/groups_per_hour": 3600 * len(accepted) / passed,
        }
        self._dropped = self._cut = 0

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Poll the engine until a condition holds. The caller holds the lock.

        Time in which this process was suspended does not count towards `timeout_s`.
        """
        self._waits, silent_s, moved = True, 0.0, self._moved
        try:
            while self._error is None and not condition():
                began = time.monotonic()
                if not self._draw():
                    self._changed.wait(TICK_S)
                waited = min(time.monotonic() - began, 2 * TICK_S)
                silent = moved == self._moved and not waits_for_service()
                silent_s, moved = (silent_s + waited if silent else 0.0), self._moved
                if silent_s > self.settings.timeout_s:
                    raise TimeoutError(self._silence())
            if self._error is not None:
                raise self._error
        except BaseException:
            self._closing = True  # the engine may have been interrupted within a poll
            raise
        finally:
            self._waits = False

    def _silence(self) -> str:
        scoring = sum(not group.waiting and group.scored is None for group in self._open.values())
        return (
            f"no output of engine or rewards for {self.settings.timeout_s:g} s (asynchronous.timeout_s): the "
            f"engine ({type(self.engine).__name__}) has {len(self._requests)} requests, and the rewards of {scoring} "
            "groups are being computed"
        )

    @contextmanager
    def _still(self, drain: bool) -> Iterator[None]:
        """Context of exclusive use of the engine; with `drain`, after all its requests have finished."""
        with self._changed:
            self._held = True
        try:
            with self._changed:
                self._wait(lambda: not self._drawing and not (drain and self._requests))
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    # ---- Sampling ----

    def _start(self) -> None:
        if self._thread is None:
            threads, started = torch.get_num_threads(), threading.Event()
            self._thread = threading.Thread(target=self._work, args=(started,), name="rollouts", daemon=True)
            self._thread.start()
            started.wait()
            torch.set_num_threads(threads)  # new threads inherit the number of the last call

    def _work(self, started: threading.Event) -> None:
        """Run on the sampling thread: poll the engine during updates."""
        torch.set_num_threads(max(1, max_threads() // 4))
        started.set()
        try:
            with self._changed:
                while not self._closing:
                    if self._held or self._waits or not self._draw():
                        self._changed.wait()
        except Exception as error:
            self._fail(error)

    def _draw(self) -> bool:
        """Submit requests and poll the engine once, without the lock.

        Returns:
            False if the engine has no requests, or another thread is polling it.
        """
        if self._drawing:
            return False
        if not self._held:
            self._submit(open_limit(self.settings, self.groups, self._wanted, self.steps - self.step))
        if not self._requests:
            return False
        self._drawing, began = True, time.monotonic()
        self._changed.release()
        try:
            outputs = self.engine.poll(POLL_S)
        finally:
            self._changed.acquire()
            self._drawing, took_s = False, time.monotonic() - began
            self._drawing_s += took_s
            self._changed.notify_all()
        if not outputs and took_s < POLL_S / 2:
            raise RuntimeError("the engine has requests but finishes none: it is paused or asleep")
        for output in outputs:
            self._take(output)
        self._cut_groups()
        return True

    def _submit(self, limit: int) -> None:
        """Submit groups up to the limit."""
        if self._in_rounds and len(self._open) < limit:
            if is_exhausted(self.groups, 0, self._rounds) or len(self._ready()) < len(self._open):
                return
            self._rounds += 1
        current = self.step if self._wanted else self.step + 1
        requests: list[GenerationRequest] = []
        while len(self._open) < limit:
            draw = self.curriculum.next(current + len(self._open) // self.groups)
            if draw is None:
                break
            (prompt,) = self.processor.to_prompts([(draw.prompt_id, draw.problem)])
            sampling = replace(self.sampling, step=draw.step)
            waiting = {request.request_id: request for request in requests_of(prompt, sampling)}
            if self.algorithm.extra_rollouts is not None:
                for extra in requests_of(prompt, replace(sampling, **self.algorithm.extra_rollouts)):
                    name = EXTRA + extra.request_id
                    waiting[name] = replace(extra, request_id=name)
            group = _Group(draw, prompt, self.engine.version, waiting)
            self._open[draw.position] = group
            self._requests |= dict.fromkeys(waiting, group)
            requests += waiting.values()
        if requests:
            self.engine.submit(requests)

    def _take(self, output: GenerationOutput) -> None:
        group = self._requests.pop(output.request_id, None)
        if group is None:
            raise RuntimeError(f"the engine finished an unknown request, {output.request_id!r}")
        self._moved += 1
        del group.waiting[output.request_id]
        group.outputs[output.request_id] = output
        if not group.waiting:
            self._begin_rewards(group)

    def _cut_groups(self) -> None:
        for group in groups_to_truncate(self._open.values(), self.settings, self._wanted):
            self._abort(list(group.waiting))
            group.waiting.clear()
            self._cut += 1
            self._begin_rewards(group)

    def _abort(self, names: Sequence[str]) -> None:
        if names:
            self.engine.abort(names)
        for name in names:
            del self._requests[name]

    def _begin_rewards(self, group: _Group) -> None:
        # One thread per group, so that a slow reward delays no other group, even after its group was dropped. Daemon
        # threads, so that a hanging reward does not keep the process alive.
        threading.Thread(target=self._score, args=(group,), name="rewards of a group", daemon=True).start()

    def _score(self, group: _Group) -> None:
        """Run on a thread per group: score it, and decide whether it is trained on."""
        try:
            drawn, extra = group.trajectories()
            scored = self.rewards(drawn, judge=False)
            if extra:
                scored = with_baselines(scored, self.rewards(extra, judge=False))
            with self._changed:
                self._moved += 1
                if self._open.get(group.position) is group:  # it was not dropped in between
                    group.scored = scored
                    if not self.accepts(scored):
                        del self._open[group.position]
                        self._refused.append(group)
                        self.curriculum.observe(scored)
                self._judge(scored)
                self._changed.notify_all()
        except Exception as error:
            self._fail(error)

    def _judge(self, scored: list[Trajectory]) -> None:
        """Judge reward failures over as many groups as a step has, in order of completion."""
        self._unjudged.append(scored)
        if len(self._unjudged) >= self.groups:
            batch, self._unjudged = self._unjudged, []
            self.rewards.judge([item for group in batch for item in group])

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
