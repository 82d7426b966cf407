"""An episode: what a model and an environment say in turns, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["timeout", "error", "crash", "invalid", "away"]
"""Took too long; raised an exception; ended its process; returned what is no finite number, or too many or few; a
service that it asks is away (which is waited for, so that no trajectory has this failure)."""
Role = Literal["", "tool", "user"]
Ended = Literal["environment", "turns", "length", "abort", "failed"]
"""The environment ended it; the limit on turns or on tokens did; the caller called it off; the environment failed."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment answers to what the model wrote.

    Example:
        >>> Reply(text="<information>Paris</information>", label="search").role
        ''
    """

    text: str
    role: Role = ""
    """Whose message it is in the chat template; the empty one is no message: the text follows what the model wrote, in
    the same turn of the conversation."""
    reward: float | None = None
    """Of what the model wrote before it, beside the outcome."""
    label: str = ""
    """What kind of answer it is, such as `search` or `invalid`: counted in `environment/replies/LABEL`."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model wrote until the environment answered, and the answer."""

    model_tokens: int
    reply_tokens: int = 0
    """0 where it did not answer, since it ended the episode or was not asked."""
    seconds: float = 0.0
    """That the environment took."""
    reward: float | None = None
    """Of what the model wrote."""
    labels: tuple[str, ...] = ()
    """Of the messages of the reply, in their order: where the model called tools, one for each call."""
    text: str = ""
    """What the model wrote, decoded without special tokens."""
    reply: str = ""
    """What the environment answered, as far as it is in the row."""
    sees_from: int = 0
    """The first turn that the model still saw when it wrote this one, with what it saw before all turns: those between
    had been dropped (`environment.when_full`)."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The turns of a trajectory with an environment.

    The model's and the environment's tokens are in the trajectory's segments, in the same order.

    Example:
        >>> two = (Turn(model_tokens=5, reply_tokens=3, reward=0.5), Turn(model_tokens=4))
        >>> Episode(turns=two, ended="environment", outcome=1.0).turn_rewards
        ((4, 0.5),)
    """

    turns: tuple[Turn, ...]
    ended: Ended
    opening_tokens: int = 0
    """That the environment wrote before the model began."""
    outcome: float | None = None
    """What the environment returned."""
    failure: FailureKind | None = None
    message: str = ""
    """Of the failure."""
    opening: str = ""
    """What the environment wrote before the model began."""

    @property
    def turn_rewards(self) -> tuple[tuple[int, float], ...]:
        """(place in the response of the last token of the model's turn, its reward)."""
        found, place = [], self.opening_tokens
        for turn in self.turns:
            place += turn.model_tokens
            if turn.reward is not None:
                found.append((place - 1, turn.reward))
            place += turn.reply_tokens
        return tuple(found)
