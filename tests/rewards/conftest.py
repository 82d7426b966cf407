"""Rewards that are services."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from atomrl.common import outages
from atomrl.config import RewardConfig
from atomrl.rewards.compute import Rewards, build_rewards


@pytest.fixture
def build_service(monkeypatch) -> Iterator[Callable[..., Rewards]]:
    """Builds one of a name with its `args`; it hardly waits before it asks again, and is closed after the test."""
    monkeypatch.setattr(outages, "FIRST_S", 0.01)
    built = []

    def make(name, timeout_s=20.0, patience=None, **args):
        item = {"function": name, "timeout_s": timeout_s, "args": args}
        built.append(build_rewards(RewardConfig(functions=[item]), patience=patience))
        return built[-1]

    yield make
    for rewards in built:
        rewards.close()
