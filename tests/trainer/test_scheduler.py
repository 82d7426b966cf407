"""The asynchronous loop: a scripted engine with random timing, and the real parts in the synchronous order."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomrl.algorithms import objective_of
from atomrl.config import AsynchronousConfig
from atomrl.data.curriculum import CurriculumState
from atomrl.engines.fake import FakeEngine
from atomrl.engines.generation import generate
from atomrl.trainer import sources as groups
from atomrl.trainer.async_source import AsyncRolloutSource
from atomrl.trainer.loop import Progress
from atomrl.trainer.report.stopwatch import Stopwatch
from tests.tiny import make_tiny_model
from tests.trainer import test_sync
from tests.trainer.scripted import make_parts, planned, train
from tests.trainer.test_sync import saver, weights

DAPO = objective_of({"name": "dapo"}).resolved(max_completion_tokens=12)


class TimedEngine(FakeEngine):
    """Draws some tokens of some requests at each poll, as chance has it, with the version of that time."""

    def __init__(self, *args, seed=0, tick_s=0.0):
        super().__init__(*args)
        self.rng, self.tick_s, self.busy, self.aborted = random.Random(seed), tick_s, threading.Lock(), []

    def _advance(self, end):
        assert self.busy.acquire(blocking=False), "two threads use the engine at once"
        try:
            while True:
                time.sleep(self.tick_s * self.rng.random())
                for state in [*self.waiting]:
                    if self.rng.random() < 0.5:
                        continue
                    request = state.request
                    tokens = list(self.complete(request.prompt_token_ids, int(request.request_id.rpartition("/")[2])))
                    state.set_version(self.version)
                    state.token_ids = tokens[: len(state.token_ids) + 1]
                    state.logprobs = [-1.0] * len(state.token_ids)
                done = [state for state in self.waiting if state.token_ids[-1:] == [self.tokenizer.eos_token_id]]
                for state in done:
                    self.waiting.remove(state)
                if done or time.monotonic() >= end:
                    return [(state, "stop") for state in done]
        finally:
            self.busy.release()

    def abort(self, request_ids=None):
        assert self.busy.acquire(blocking=False), "two threads use the engine at once"
        aborted = super().abort(request_ids)
        self.busy.release()
        self.aborted += [output.request_id for output in aborted]
        return aborted


class ScriptedRewards:
    """A reward of one completion, for a group at a time."""

    def __init__(self, score, wait=lambda items: 0.0):
        self.one_by_one, self.wait, self.judged = score, wait, []

    def __call__(self, items, judge=True):
        assert not judge  # of a group: failures are judged over a step
        time.sleep(self.wait(items))
        return self.one_by_one(items)

    def judge(self, items):
        self.judged += items


def scheduled(parts, config, engine=None, rewards=None, progress=None, **keys):
    """The parts with a scheduler as their source."""
    source, progress = parts.source, progress or Progress()
    source.curriculum.load(CurriculumState(progress.position, progress.pending, progress.curriculum))
    engine = engine or source.engine
    shared = {
        "engine": engine, "algorithm": source.algorithm, "curriculum": source.curriculum,
        "processor": source.processor, "sampling": source.sampling,
        "rewards": rewards or ScriptedRewards(source.rewards),
    }  # fmt: skip
    parts.transfer.engine = engine
    scheduler = AsyncRolloutSource(
        **shared, transfer=parts.transfer, settings=AsynchronousConfig(**keys), groups=config.items_per_step,
        steps=config.train.steps, done=progress.step,
    )  # fmt: skip
    return replace(parts, source=scheduler, transfer=scheduler.update)


def by_index(item):
    return float(item.index % 2)


def versions(trajectory):
    return [part.policy_version for part in trajectory.segments if part.origin == "model"]


def drawing_threads():
    return {thread for thread in threading.enumerate() if thread.name == "rollouts"}


def handed_out(scheduler, groups):
    """Position in the stream, counted by how often a group of it was trained on or is pending."""
    position, pending, _ = scheduler.curriculum.state()
    names = {scheduler.curriculum.stream.at(place)[0]: place for place in range(position)}
    return position, Counter([names[group[0].prompt_id] for group in groups] + [place for place, _ in pending])


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    bound=st.integers(0, 3),
    policy=st.sampled_from(["keep", "abort", "wait"]),
    oversampling=st.sampled_from([1.0, 1.5]),
    least=st.sampled_from([None, 2]),
)
def test_no_token_is_staler_than_the_bound_and_no_group_is_lost_or_doubled(
    tmp_path_factory, seed, bound, policy, oversampling, least
):
    rng = random.Random(seed)
    parts = make_parts(
        tmp_path_factory.mktemp("run"), lambda problem, index: "x" * rng.choice((1, 2, 9)), by_index, DAPO
    )
    engine = TimedEngine(parts.source.engine.complete, parts.processor.tokenizer, seed=seed)
    lengths = {}
    engine.complete = lambda prompt, index, inner=engine.complete: lengths.setdefault(
        (prompt, index), inner(prompt, index)
    )
    refused_ids = set(range(0, 40, 7))
    one_by_one = parts.source.rewards

    def flat(items):
        if int(items[0].problem.problem_id) not in refused_ids:
            return one_by_one(items)
        return [replace(item, reward=0.0) for item in one_by_one(items)]

    rewards = ScriptedRewards(flat, lambda items: rng.random() * 0.004)
    parts = scheduled(
        parts, planned(steps=5), engine, rewards,
        max_staleness=bound, on_update=policy, oversampling=oversampling, min_completions=least, timeout_s=20,
    )  # fmt: skip
    scheduler, trained, refused, others = parts.source, [], [], drawing_threads()
    try:
        for step in range(1, 6):
            accepted, rejected = scheduler.collect(3, step, Stopwatch())
            assert len(accepted) == 3
            for item in (item for group in accepted for item in group):
                assert all(step - 1 - bound <= version <= step - 1 for version in versions(item)), (step, item)
                if policy != "keep":
                    assert len(versions(item)) == 1
            assert all(len(group) == 4 or (least and len(group) >= least) for group in accepted)
            assert scheduler.metrics()["async/staleness_max"] <= bound
            trained, refused = trained + accepted, refused + rejected
            time.sleep(rng.random() * 0.01)
            parts.transfer(step)
        with scheduler.quiet():
            assert not engine.held
        for thread in threading.enumerate():
            if thread.name == "rewards of a group":
                thread.join()
        refused += scheduler.collect(0, 5, Stopwatch())[1]  # since the last step, after which nothing is sampled
        position, counts = handed_out(scheduler, trained + refused)
        assert counts == Counter(range(position)), "none lost and none twice"
    finally:
        scheduler.close()
    assert not drawing_threads() - others


class RareRewards:
    """Pays a completion in so many, whichever it is."""

    def __init__(self, one_in):
        self.one_in = one_in

    def __call__(self, items):
        drawn = [zlib.crc32(repr((item.prompt_id, item.index, item.token_ids)).encode()) for item in items]
        return [replace(item, reward=float(n % self.one_in == 0)) for item, n in zip(items, drawn, strict=True)]


@pytest.mark.parametrize("gives_up", [False, True])
def test_without_staleness_it_is_the_synchronous_loop_to_the_last_bit(tmp_path, monkeypatch, gives_up):
    """With rewards that overlap and come in any order, dynamic sampling, and two threads; and where steps find too few
    groups."""
    model = str(make_tiny_model(tmp_path / "model", "qwen2"))
    monkeypatch.setattr(groups, "MAX_ROUNDS", 2 if gives_up else 20)
    metrics = []
    for asynchronous in (False, True):
        algorithm = objective_of({"name": "grpo", "group_filter": "mixed_outcomes"}).resolved(report_entropy=True)
        parts, plan = test_sync.make_parts(model, tmp_path / str(asynchronous), algorithm=algorithm)
        progress = Progress()
        parts = replace(parts, source=replace(parts.source, rewards=RareRewards(12 if gives_up else 4)))
        if asynchronous:
            source, rng = parts.source, random.Random(0)
            rewards = ScriptedRewards(source.rewards, lambda items, rng=rng: rng.random() * 0.05)
            scheduler = AsyncRolloutSource(
                **{key: value for key, value in vars(source).items() if key != "rewards"}, rewards=rewards,
                transfer=parts.transfer, settings=AsynchronousConfig(max_staleness=0), groups=3, steps=4,
            )  # fmt: skip
            parts = replace(parts, source=scheduler, transfer=scheduler.update)
        train(parts, plan, progress, saver(parts))
        parts.source.close()
        rows = [
            {key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/", "async/"))}
            for row in parts.record.rows
        ]
        metrics.append((weights(parts), rows, parts.record.rollouts, progress.position))
    (one, rows, rollouts, position), (other, *rest) = metrics
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert rest == [rows, rollouts, position] and any(row["rollout/groups_drawn"] > 3 for row in rows)
    missing = {row["rollout/groups_missing"] for row in rows}
    assert missing & {1, 2} if gives_up else missing == {0}


def test_a_slow_reward_holds_up_its_own_group_alone(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x", by_index)
    release, slow = threading.Event(), []

    def wait(items):
        if items[0].problem.problem_id == "1":
            slow.append(threading.current_thread())
            release.wait(120)
        return 0.0

    parts = scheduled(parts, planned(), rewards=ScriptedRewards(parts.source.rewards, wait), max_staleness=2)
    seen = []
    for step in (1, 2):
        accepted, _ = parts.source.collect(3, step, Stopwatch())
        seen += [group[0].problem.problem_id for group in accepted]
        parts.transfer(step)
    release.set()
    slow[0].join()
    accepted, _ = parts.source.collect(3, 3, Stopwatch())
    parts.source.close()
    assert len(set(seen)) == 6 and "1" not in seen, "in any order, as their rewards come at the same time"
    assert "1" in [group[0].problem.problem_id for group in accepted], "the oldest comes first"


class SilentEngine(FakeEngine):
    """Finishes nothing."""

    def _advance(self, end):
        time.sleep(max(0.0, end - time.monotonic()))
        return []


class InterruptedEngine(FakeEngine):
    """Ends its second poll in the middle."""

    polls = 0

    def _advance(self, end):
        self.polls += 1
        if self.polls == 2:
            raise KeyboardInterrupt
        return super()._advance(end)


def test_nobody_draws_in_an_engine_that_was_interrupted(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x", by_index)
    engine = InterruptedEngine(parts.source.engine.complete, parts.processor.tokenizer, at_once=2)
    parts = scheduled(parts, planned(), engine, max_staleness=3)
    with pytest.raises(KeyboardInterrupt):
        parts.source.collect(3, 1, Stopwatch())
    time.sleep(0.2)
    assert engine.polls == 2
    parts.source.close()


def test_other_threads_keep_their_number_of_threads(tmp_path):
    parts = scheduled(make_parts(tmp_path, lambda problem, index: "x", by_index), planned())
    before, threads = torch.get_num_threads(), []
    torch.set_num_threads(4)
    try:
        parts.source.collect(3, 1, Stopwatch())
        other = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert [torch.get_num_threads(), *threads] == [4, 4]
    finally:
        parts.source.close()
        torch.set_num_threads(before)


class LongEngine(FakeEngine):
    """Finishes what is beyond the first step with the weights of its update alone."""

    def _advance(self, end):
        late = [state for state in self.waiting if int(state.request.group_id[2:]) >= 3 and not self.version]
        for state in late:
            self.waiting.remove(state)
        if not self.waiting:
            time.sleep(max(0.0, end - time.monotonic()))
        finished = super()._advance(end)
        self.waiting.extend(late)
        return finished


def test_an_update_waits_for_no_completion(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x", by_index)
    engine = LongEngine(parts.source.engine.complete, parts.processor.tokenizer)
    parts = scheduled(parts, planned(), engine, max_staleness=1, timeout_s=20)
    for step in (1, 2, 3):
        groups, _ = parts.source.collect(3, step, Stopwatch())
        assert len(groups) == 3
        parts.transfer(step)
    parts.source.close()


class NarrowEngine(TimedEngine):
    """Draws a token at a time for group 0 and for four other requests, in the order of their submission.

    Args:
        limit: (group, version) -> how many tokens its completions have at most until the weights change.
    """

    def __init__(self, *args, limit=lambda group, version: math.inf):
        super().__init__(*args)
        self.limit = limit

    def _advance(self, end):
        rows = [state for state in self.waiting if state.request.group_id != "0:0"][:4]
        rows += [state for state in self.waiting if state.request.group_id == "0:0"]
        done, limit = [], {name: self.limit(int(name[2:]), self.version) for name in {r.request.group_id for r in rows}}
        while not done and time.monotonic() < end:
            time.sleep(0.01)
            for state in rows:
                request = state.request
                if len(state.token_ids) >= limit[request.group_id]:
                    continue
                tokens = list(self.complete(request.prompt_token_ids, 0))
                state.set_version(self.version)
                state.token_ids = tokens[: len(state.token_ids) + 1]
                state.logprobs = [-1.0] * len(state.token_ids)
            done = [state for state in rows if state.token_ids[-1:] == [self.tokenizer.eos_token_id]]
        for state in done:
            self.waiting.remove(state)
        return [(state, "stop") for state in done]


def is_long(group, version):
    """Group 0, of 21 tokens, runs until the second update, however long the trainer takes."""
    return 8 * (version + 1) if group == 0 else math.inf


@pytest.mark.parametrize("policy, expected", [("keep", {(0, 1, 2), (0, 2)}), ("abort", {(2,)}), ("wait", {(0,)})])
def test_updates_in_flight(tmp_path, policy, expected):
    """Group 0 takes long: its tokens are of several versions, of the newest alone, or of the oldest alone."""
    parts = make_parts(tmp_path, lambda problem, index: "x" * (20 if problem.problem_id == "0" else 1), by_index)
    limit = {} if policy == "wait" else {"limit": is_long}
    engine = NarrowEngine(parts.source.engine.complete, parts.processor.tokenizer, **limit)
    parts = scheduled(parts, planned(steps=9), engine, max_staleness=3, on_update=policy)
    by_id = {}
    for step in range(1, 7):
        for group in parts.source.collect(3, step, Stopwatch())[0]:
            by_id[group[0].problem.problem_id] = group
        parts.transfer(step)
        if step == 2:
            with parts.source.quiet():
                assert not engine.held
    parts.source.close()
    assert {tuple(versions(item)) for item in by_id["0"]} <= expected
    assert bool(engine.aborted) == (policy == "abort")


def test_stale_groups_are_dropped_and_sampled_again(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x" * (1 + int(problem.problem_id)), by_index)
    engine = NarrowEngine(
        parts.source.engine.complete, parts.processor.tokenizer,
        limit=lambda group, version: 1 if group >= 3 * (version + 1) else math.inf,  # three groups end at a version
    )  # fmt: skip
    parts = scheduled(parts, planned(steps=9), engine, max_staleness=0, oversampling=2.0)
    seen = []
    for step in (1, 2):
        accepted, _ = parts.source.collect(3, step, Stopwatch())
        assert {version for group in accepted for item in group for version in versions(item)} == {step - 1}
        seen += [group[0].prompt_id for group in accepted]
        parts.transfer(step)
    assert parts.source.collect(3, 3, Stopwatch()) and parts.source.metrics()["async/groups_dropped"] > 0
    assert engine.aborted and len(set(seen)) == 6
    parts.source.close()


def test_a_group_goes_without_its_slowest_completions(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x" * (9 if index == 3 else 1), by_index)
    engine = TimedEngine(parts.source.engine.complete, parts.processor.tokenizer, seed=1)
    parts = scheduled(parts, planned(), engine, max_staleness=0, min_completions=3)
    accepted, _ = parts.source.collect(3, 1, Stopwatch())
    parts.source.close()
    assert [[item.index for item in group] for group in accepted] == [[0, 1, 2]] * 3
    assert parts.source.metrics()["async/groups_cut"] == 3 and len(engine.aborted) == 3


def test_extra_rollouts_are_baselines(tmp_path):
    algorithm = objective_of({"name": "remax"}).resolved()
    parts = make_parts(
        tmp_path, lambda problem, index: "x" * (index + 1), lambda item: float(len(item.text)), algorithm
    )
    parts = scheduled(parts, planned())
    accepted, _ = parts.source.collect(3, 1, Stopwatch())
    parts.source.close()
    assert [item.baseline_reward for group in accepted for item in group] == [1.0] * 12


@pytest.mark.parametrize("kill_at", [1, 2, 3, 4])
def test_a_resumed_run_trains_on_every_prompt_once(tmp_path, kill_at):
    """At each checkpoint the groups that are open are pending; the next process draws them again."""
    progress, seen = Progress(), []
    for start, end in ((1, kill_at), (kill_at + 1, 6)):
        parts = make_parts(tmp_path / str(start), lambda problem, index: "x" * (index + 1), by_index)
        engine = TimedEngine(parts.source.engine.complete, parts.processor.tokenizer, seed=kill_at, tick_s=0.001)
        engine.version = progress.step
        parts = scheduled(parts, planned(steps=6), engine, progress=progress, max_staleness=2)
        for step in range(start, end + 1):
            seen += [group[0].prompt_id for group in parts.source.collect(3, step, Stopwatch())[0]]
            parts.transfer(step)
        progress = Progress(step=end)
        progress.position, progress.pending, progress.curriculum = parts.source.curriculum.state()
        parts.source.close()
    assert sorted(seen, key=lambda name: int(name[2:])) == [f"0:{n}" for n in range(18)] and not progress.pending


def test_seeds_do_not_depend_on_timing(tmp_path):
    seeds = []
    for seed in range(2):
        parts = make_parts(tmp_path / str(seed), lambda problem, index: "x" * (index + 1), by_index)
        engine = TimedEngine(parts.source.engine.complete, parts.processor.tokenizer, seed=seed, tick_s=0.002)
        requests, submit = [], engine.submit
        engine.submit = lambda new, requests=requests, submit=submit: (requests.extend(new), submit(new))[1]
        parts = scheduled(parts, planned(steps=5), engine, max_staleness=3)
        for step in range(1, 6):
            parts.source.collect(3, step, Stopwatch())
            parts.transfer(step)
        parts.source.close()
        # The first seeds: on a busy machine a group may get too old, and is then sampled again with others.
        seeds.append({request.request_id: request.seed for request in reversed(requests)})
    assert seeds[0] == seeds[1] and len(seeds[0]) == 60, "and nothing is drawn beyond the run's end"


def test_errors_reach_the_trainer_with_their_own_traceback(tmp_path):
    def fails_in_the_engine(prompt, index):
        raise KeyError("engine")

    parts = make_parts(tmp_path, lambda problem, index: "x", by_index)
    engine = FakeEngine(fails_in_the_engine, parts.processor.tokenizer)
    broken = scheduled(parts, planned(), engine)
    with pytest.raises(KeyError, match="engine") as caught:
        broken.source.collect(3, 1, Stopwatch())
    assert "fails_in_the_engine" in "".join(traceback.format_tb(caught.value.__traceback__))
    with pytest.raises(KeyError, match="engine"), broken.source.quiet():
        pass
    broken.source.close()

    def fails_in_the_reward(items):
        raise KeyError("reward")

    parts = make_parts(tmp_path, lambda problem, index: "x", by_index)
    broken = scheduled(parts, planned(), rewards=ScriptedRewards(fails_in_the_reward))
    with pytest.raises(KeyError, match="reward"):
        train_with(broken)
    assert broken.source.curriculum.state().pending
    broken.source.close()


def train_with(parts):
    progress = Progress()
    return train(parts, planned(), progress, lambda folder, now: None)


def test_a_hang_is_named(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x", by_index)
    hung = scheduled(parts, planned(), SilentEngine(None, parts.processor.tokenizer), timeout_s=0.7)
    with pytest.raises(TimeoutError, match=r"0.7.*\(SilentEngine\) has 24"):
        hung.source.collect(3, 1, Stopwatch())
    hung.source.close()
    parts = make_parts(tmp_path, lambda problem, index: "x", by_index)
    release = threading.Event()
    waits = ScriptedRewards(parts.source.rewards, lambda items: float(not release.wait()))
    hung = scheduled(parts, planned(), rewards=waits, timeout_s=0.7)
    with pytest.raises(TimeoutError, match="6 groups"):
        hung.source.collect(3, 1, Stopwatch())
    hung.source.close()
    release.set()


def test_the_engine_is_the_evaluations_while_it_is_quiet(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x" * (index + 1), by_index)
    engine = TimedEngine(parts.source.engine.complete, parts.processor.tokenizer, tick_s=0.002)
    prompts = parts.processor.to_prompts([(f"eval:{n}", parts.source.curriculum.stream.at(n)[1]) for n in range(5)])
    sampling = parts.source.sampling
    parts = scheduled(parts, planned(), engine, max_staleness=3)
    seen = []
    for step in range(1, 5):
        seen += [group[0].prompt_id for group in parts.source.collect(3, step, Stopwatch())[0]]
        parts.transfer(step)
        with parts.source.quiet():
            drawn = generate(engine, prompts, sampling)
        assert len(drawn) == 20 and {version for item in drawn for version in versions(item)} == {step}
    parts.source.close()
    assert sorted(seen) == sorted(f"0:{n}" for n in range(12))


def test_a_step_that_finds_too_few_groups_continues(tmp_path, caplog):
    parts = make_parts(tmp_path, lambda problem, index: "x", lambda item: 1.0, DAPO)
    parts = scheduled(parts, planned(steps=9), max_staleness=1)
    progress = Progress()
    assert train(parts, planned(steps=9), progress, lambda folder, now: None) is True
    assert progress.idle_steps == 3 and progress.step == 3
    assert re.search(r"accepted 0 of 6\d groups, but 3 were requested", caplog.text), "of 60 and those under way"
    parts.source.close()


def test_rewards_of_dropped_groups_keep_no_others_waiting(tmp_path):
    """Each step a reward hangs, and its group is dropped: in the end more hang than groups may be open."""
    parts = make_parts(tmp_path, lambda problem, index: "x", by_index)
    release, hung = threading.Event(), []

    def wait(items):
        if int(items[0].problem.problem_id) % 3 == 1 and items[0].prompt_id not in hung:
            hung.append(items[0].prompt_id)
            release.wait(60)
        return 0.0

    rewards = ScriptedRewards(parts.source.rewards, wait)
    parts = scheduled(parts, planned(steps=20), rewards=rewards, max_staleness=0, oversampling=1.5, timeout_s=20)
    for step in range(1, 13):
        assert len(parts.source.collect(3, step, Stopwatch())[0]) == 3
        parts.transfer(step)
    parts.source.close()
    release.set()
    assert len(hung) > 6


HANGS = """
import threading
from pathlib import Path
from atomrl.trainer.report.stopwatch import Stopwatch
from tests.trainer.scripted import make_parts, planned
from tests.trainer.test_scheduler import ScriptedRewards, by_index, scheduled

parts = make_parts(Path("."), lambda sample, index: "x", by_index)
rewards = ScriptedRewards(parts.source.rewards, lambda items: threading.Event().wait() or 0.0)
parts = scheduled(parts, planned(), rewards=rewards, timeout_s=0.5)
try:
    parts.source.collect(3, 1, Stopwatch())
finally:
    parts.source.close()
"""


def test_a_reward_that_hangs_does_not_keep_the_process(tmp_path):
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1 and "the rewards of 6 groups are being computed" in done.stderr


def test_restarted_groups_are_dropped_before_the_weights_arrive_and_submitted_after(tmp_path):
    """So that an engine computes no cache again for what it is to forget."""
    parts = make_parts(tmp_path, lambda problem, index: "x" * (20 if problem.problem_id == "0" else 1), by_index)
    engine = NarrowEngine(parts.source.engine.complete, parts.processor.tokenizer, limit=is_long)
    inner, held, submitted, submit = parts.transfer, [], set(), engine.submit

    def noted(requests):
        if engine.version:
            submitted.update(request.request_id for request in requests)
        submit(requests)

    engine.submit = noted
    parts = replace(parts, transfer=lambda version: (held.append(len(engine.held)), inner(version)))
    parts = scheduled(parts, planned(steps=9), engine, max_staleness=3, on_update="abort")
    parts.source.collect(3, 1, Stopwatch())
    inner.engine = engine
    parts.transfer(1)
    assert held == [0] and engine.aborted and set(engine.aborted) <= submitted
    parts.source.close()


def test_a_transfer_that_fails_ends_the_step_and_leaves_the_thread_to_be_closed(tmp_path):
    parts = make_parts(tmp_path, lambda problem, index: "x" * (index + 1), by_index)
    engine = TimedEngine(parts.source.engine.complete, parts.processor.tokenizer, tick_s=0.002)

    def fails(version):
        raise ValueError("the weights were refused")

    parts = scheduled(parts, planned(steps=9), engine, max_staleness=2)
    parts.source.transfer = fails
    others = drawing_threads()
    progress, saved = Progress(), []
    with pytest.raises(ValueError, match="weights were refused"):
        train(parts, planned(steps=9), progress, lambda folder, now: saved.append(now.step))
    assert progress.step == 0 and not saved, "the step's update is made, so nothing is to be saved of it"
    assert drawing_threads() - others
    parts.source.close()
    assert not drawing_threads() - others
