"""Gymnasium's text games (FrozenLake, Taxi, CliffWalking, Blackjack), by the words for their actions."""

import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from atomrl.environments.adapters import seed_of
from atomrl.episodes import Reply, Role
from atomrl.hints import said_as
from atomrl.types import Sample

MARKS = {"34;1": "({})", "35": "<{}>"}
"""Of colours: Taxi's passenger and destination; others are where the player is."""


def play(
    sample: Sample, *, id: str, actions: Sequence[str], role: Role = "user", args: Mapping[str, Any] | None = None
) -> Generator[Reply, str, float]:
    """An episode of `gymnasium.make(id, **args)`; its rewards are those of the turns, and the last one the outcome.

    The game is shown as its `ansi` rendering, the player in brackets, or as its observation where it has none. The last
    action that the model names counts.

    Args:
        actions: names, by their numbers.
    """
    import gymnasium

    ansi = "ansi" in gymnasium.spec(id).make().metadata["render_modes"]
    game: Any = gymnasium.make(id, render_mode="ansi" if ansi else None, **(args or {}))

    def shown(observation: Any) -> str:
        text = game.render() if ansi else str(observation)
        return re.sub(r"\x1b\[([\d;]+)m(.)\x1b\[0m", lambda m: MARKS.get(m[1], "[{}]").format(m[2]), text).strip()

    text = yield Reply(text="\n" + shown(game.reset(seed=seed_of(sample))[0]), role=role)
    while True:
        named = actions_in(text, actions)
        if not named:
            text = yield Reply(text=f"Name an action: {', '.join(actions)}.", role=role, label="invalid")
            continue
        observation, reward, ended, cut, _ = game.step(list(actions).index(named[-1]))
        if ended or cut:
            return float(reward)
        text = yield Reply(text=shown(observation), role=role, reward=float(reward))


def actions_in(text: str, actions: Sequence[str]) -> list[str]:
    """The names of actions in a text, in its order and in whatever case.

    Example:
        >>> actions_in("Left? No, right. That is upright.", ["Left", "right", "up"])
        ['Left', 'right']
    """
    names = {name.lower(): name for name in sorted(actions, key=len, reverse=True)}
    return [names[found] for found in re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", text.lower())]


def refuse(*, id: str, actions: Sequence[str], **_: Any) -> None:
    """
    Raises:
        ValueError: there is no such game, or no action.
    """
    import gymnasium

    with said_as(ValueError, "id", gymnasium.error.Error):
        gymnasium.spec(id)
    if not all(actions) or not actions:
        raise ValueError("actions: name them all, by their numbers")
