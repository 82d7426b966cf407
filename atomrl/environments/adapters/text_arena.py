"""TextArena's games for one player."""

import random
import threading
from collections.abc import Generator, Mapping
from typing import Any

from atomrl.environments.adapters import seed_of
from atomrl.episodes import Reply, Role
from atomrl.types import Sample

_lock = threading.Lock()
"""Games draw from Python's own random numbers, which all episodes of a process share."""


def play(
    sample: Sample, *, id: str, role: Role = "user", args: Mapping[str, Any] | None = None
) -> Generator[Reply, str, float]:
    """An episode of `textarena.make(id, **args)`, without its wrappers: each turn is told what is new.

    The outcome is the game's reward.
    """
    import textarena

    game, seed, turn = textarena.make(id, **(args or {})), seed_of(sample), 0
    while isinstance(game, textarena.Wrapper):
        game = game.env
    with _lock:
        random.seed(seed)
        game.reset(num_players=1, seed=seed)
    while True:
        news = [words for sender, words, _ in game.get_observation()[1] if sender == textarena.GAME_ID]
        text = yield Reply(text="\n".join(news), role=role, label="invalid" if "invalid move" in str(news) else "")
        turn += 1
        with _lock:
            random.seed(f"{seed}/{turn}")
            ended, _ = game.step(text)
        if ended:
            return float(game.close()[0][0])
