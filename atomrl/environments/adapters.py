"""Gymnasium's text games (FrozenLake, Taxi, CliffWalking, Blackjack), by the words for their actions."""

import hashlib
import json
import random
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from atomrl.common.errors import said_as
from atomrl.rewards.verifiable import reasoning_gym
from atomrl.types import Message, Reply, Role, Sample

# --------------------------------------------------------------------------------------------------------------------
# Other people's environments: each of their interfaces as an episode.


def seed_of(sample: Sample) -> int:
    """What a game is made with: the row's column `seed`, else a number of its own, so that all completions of a prompt
    play the same game."""
    digest = hashlib.blake2b(sample.sample_id.encode(), digest_size=4).digest()
    return int(sample.columns.get("seed", int.from_bytes(digest, "little") >> 1))


MARKS = {"34;1": "({})", "35": "<{}>"}
"""Of colours: Taxi's passenger and destination; others are where the player is."""


def gymnasium(
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


def refuse_gymnasium(*, id: str, actions: Sequence[str], **_: Any) -> None:
    """
    Raises:
        ValueError: there is no such game, or no action.
    """
    import gymnasium

    with said_as(ValueError, "id", gymnasium.error.Error):
        gymnasium.spec(id)
    if not all(actions) or not actions:
        raise ValueError("actions: name them all, by their numbers")


# --------------------------------------------------------------------------------------------------------------------
# Environments behind an OpenEnv server.


def openenv(
    sample: Sample, *, url: str, action: str, observation: str = "", role: Role = "user", timeout_s: float = 20.0
) -> Generator[Reply, str, float]:
    """An episode of the server at `url`. Its rewards are those of the turns, and the last one the outcome.

    Args:
        action: the field of its action that is what the model wrote.
        observation: the field of its observations that the model sees; the empty one is all of them, as JSON.
        timeout_s: for an answer.
    """
    from openenv.core import GenericEnvClient

    def shown(seen: Mapping[str, Any]) -> str:
        return str(seen[observation]) if observation else json.dumps(seen)

    def answered(ask: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            return ask(*args, **named)
        except TimeoutError as error:  # `outages.is_away` takes one for somebody's own clock
            raise ConnectionError(f"{url} has not answered within {timeout_s:g} s") from error

    client: Any = GenericEnvClient(base_url=url, connect_timeout_s=timeout_s, message_timeout_s=timeout_s).sync()
    with ExitStack() as stack:
        answered(stack.enter_context, client)
        found, reward = answered(client.reset, seed=seed_of(sample)), None
        while not found.done:
            text = yield Reply(text=shown(found.observation), role=role, reward=reward)
            found = answered(client.step, {action: text})
            reward = float(found.reward or 0.0)
        return reward or 0.0


# --------------------------------------------------------------------------------------------------------------------
# Reasoning-gym's problems with several tries.


def reasoning_gym_retries(
    sample: Sample, *, tries: int = 3, role: Role = "user"
) -> Generator[Reply | None, str, float]:
    """A problem of a generator `reasoning_gym:NAME`: a wrong answer is told so, until the tries are used up.

    The outcome is the task's own score of the last answer.
    """
    text = yield None
    for left in range(tries - 1, -1, -1):
        (score,) = reasoning_gym([sample.prompt], [text], [sample.columns["reasoning_gym"]])
        if score >= 1 or not left:
            break
        said = f"That is not right (score {score:.2f}). Try again, with the answer in <answer> and </answer>."
        text = yield Reply(text=said, role=role, label="retry")
    return score


# --------------------------------------------------------------------------------------------------------------------
# SkyRL's environments (skyrl-gym): `init`, then `step(text)` until it is done.


def skyrl_gym(
    sample: Sample,
    *,
    id: str,
    config: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
    role: Role = "user",
) -> Generator[Reply | None, str, float]:
    """An episode of `skyrl_gym.make(id)`. Rewards are those of the turns, and the last one the outcome.

    `extras` has the row's columns, and `reward_spec.ground_truth`; more of them may be given.

    Raises:
        ValueError: its `init` changes the prompt, which has been rendered.
    """
    import skyrl_gym

    truth = {"ground_truth": sample.ground_truth}
    given = {"reward_spec": truth, "extra_info": {}, **sample.columns, **(extras or {})}
    game = skyrl_gym.make(id, env_config=config or {}, extras=given)
    prompt = [Message(role="user", content=sample.prompt)] if isinstance(sample.prompt, str) else [*sample.prompt]
    if game.init([dict(message) for message in prompt])[0] != prompt:
        raise ValueError(f"{id}: its init changes the prompt; write the whole prompt into the data")
    text = yield None
    try:
        while not (found := game.step(text))["done"]:
            said = "\n".join(message["content"] for message in found["observations"])
            text = yield Reply(text=said, role=role, reward=float(found["reward"]))
        return float(found["reward"])
    finally:
        game.close()


# --------------------------------------------------------------------------------------------------------------------
# TextArena's games for one player.

_lock = threading.Lock()
"""Games draw from Python's own random numbers, which all episodes of a process share."""


def textarena(
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


# --------------------------------------------------------------------------------------------------------------------
# TextWorld's games, from their files.


def textworld(sample: Sample, *, role: Role = "user") -> Generator[Reply, str, float]:
    """An episode of the game in the file that the row's column `game` names (`.z8`, as `tw-make` writes).

    The model writes a command a turn: its last line that is not empty. Points are rewards of the turns, as shares of
    the most that the game gives, and the last ones the outcome.
    """
    import textworld

    game = textworld.start(sample.columns["game"], textworld.EnvInfos(max_score=True))
    try:
        state, score, ended, reward = game.reset(), 0.0, False, None
        while not ended:
            text = yield Reply(text=state.feedback.strip(), role=role, reward=reward)
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            before = score
            state, score, ended = game.step(lines[-1] if lines else "look")
            reward = (score - before) / max(1, state.max_score)
        return float(reward or 0.0)
    finally:
        game.close()
