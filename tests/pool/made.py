"""Groups made up by number, and a clock that a test sets."""

from __future__ import annotations

import random
import sqlite3
from typing import Any

import pytest

from atomrl.config import PoolConfig
from atomrl.types import Episode, Image, Problem, RaggedIds, RewardFailure, Segment, Trajectory, Turn


def group(
    number: int, version: int = 0, rewards: tuple[float | None, ...] = (1.0, 0.0), tokens: int = 5, salt: Any = 0
) -> list[Trajectory]:
    """A group whose tokens are a function of `number` and `salt`; log-probs are float32 numbers."""
    draw = random.Random(f"{number}/{salt}/{tokens}")
    problem = Problem(
        problem_id=str(number), prompt=f"{number}+1=", ground_truth=str(number + 1), data_source="sums",
        columns={"level": number % 3, "tags": ["a", None]},
    )  # fmt: skip
    prompt = Segment(origin="prompt", token_ids=(number % 100, 7))
    made = []
    for index, reward in enumerate(rewards):
        ids = tuple(draw.randrange(100) for _ in range(tokens + index))
        logprobs = tuple(-draw.randrange(1, 64) / 16 for _ in ids)
        written = Segment(origin="model", token_ids=ids, logprobs=logprobs, policy_version=version)
        made.append(
            Trajectory(
                prompt_id=f"0:{number}", index=index, problem=problem, segments=(prompt, written),
                text=f"é{index}\ud800",
                finish_reason="stop", reward=reward, reward_parts={"r": reward}, part_weights={"r": 1.0},
            )
        )  # fmt: skip
    return made


class FollowedConnection(sqlite3.Connection):
    """A connection that calls `before(statement)` ahead of each statement."""

    def before(self, statement: str) -> None:
        pass

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        self.before(statement)
        return super().execute(statement, *parameters)


def follow_connections(monkeypatch: pytest.MonkeyPatch) -> list[FollowedConnection]:
    """Return a list to which every connection that is opened from here on is added."""
    opened: list[FollowedConnection] = []
    connect = sqlite3.connect

    def followed(*args: Any, **options: Any) -> FollowedConnection:
        opened.append(connect(*args, factory=FollowedConnection, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", followed)
    return opened


def rich_group(candidates: RaggedIds) -> list[Trajectory]:
    """A group with all that a trajectory may have: turns, versions, candidates, failures."""
    problem = Problem(problem_id="a", prompt=({"role": "user", "content": "ß"},), ground_truth=None, columns={})
    prompt = Segment(origin="prompt", token_ids=(1, 2, 3))
    count = len(candidates.counts)
    turns = (
        prompt,
        Segment(origin="model", token_ids=(4,), logprobs=(-0.5,), policy_version=3),
        Segment(
            origin="model", token_ids=tuple(range(count)), logprobs=(-0.25,) * count, policy_version=4,
            candidates=candidates,
        ),
        Segment(origin="environment", token_ids=(9, 9)),
        Segment(origin="model", token_ids=(), logprobs=(), policy_version=5),
        Segment(origin="prompt", token_ids=(1, 2)),
    )  # fmt: skip
    shared: dict[str, Any] = {"prompt_id": "1:a", "problem": problem, "text": "t"}
    return [
        Trajectory(
            index=4, segments=turns, finish_reason="environment", reward=None, token_rewards=((5, 0.5),),
            reward_parts={"r": None, "s": 0.5}, part_weights={"s": 2.0},
            reward_failures=(RewardFailure(reward="r", kind="timeout", message="10 s"),), baseline_reward=0.25,
            episode=rich_episode(), **shared,
        ),
        Trajectory(index=5, segments=(prompt,), finish_reason="abort", **shared),
    ]  # fmt: skip


def rich_episode() -> Episode:
    """An episode with all that one may have."""
    turns = (
        Turn(
            model_tokens=1,
            reply_tokens=2,
            seconds=0.1,
            reward=0.5,
            labels=("search", "error"),
            text="é\ud800",
            reply="<i>ß</i>",
            sees_from=1,
            images=(Image(name="ab.png", height=2, width=3, source="a", folder="f"),),
        ),
        Turn(model_tokens=0),
    )
    pictures = (Image(name="cd.png", height=4, width=5),)
    return Episode(
        turns=turns, ended="failed", opening_tokens=3, opening="go", outcome=-0.5, failure="crash", message="exit 3",
        opening_images=pictures,
    )  # fmt: skip


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def settings(**changes: Any) -> PoolConfig:
    return PoolConfig(**{"max_staleness": 100} | changes)
