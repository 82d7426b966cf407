"""Environments of other packages: Gymnasium, OpenEnv, reasoning-gym, SkyRL, TextArena, TextWorld."""

import hashlib
import json
import math
import random
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.data.images import without_parts
from atomrl.data.messages import content_text
from atomrl.rewards.tasks import reasoning_gym
from atomrl.types import Message, Problem, Reply, Role

# --------------------------------------------------------------------------------------------------------------------
# Gymnasium's text games (FrozenLake, Taxi, CliffWalking, Blackjack), played by the names of their actions.


def seed_of(problem: Problem) -> int:
    """Return the seed of a game: the row's column `seed`, else a hash of the problem's id, so that all completions of a
    prompt play the same game."""
    digest = hashlib.blake2b(problem.problem_id.encode(), digest_size=4).digest()
    return int(problem.columns.get("seed", int.from_bytes(digest, "little") >> 1))


MARKS = {"34;1": "({})", "35": "<{}>"}
"""Colour code -> mark: Taxi's passenger and destination. Other colours mark the player."""


def gymnasium(
    problem: Problem, *, id: str, actions: Sequence[str], role: Role = "user", args: Mapping[str, Any] | None = None
) -> Generator[Reply, str, float]:
    """Play `gymnasium.make(id, **args)`. Each turn has the game's reward; the last one is the outcome.

    The game is shown as its `ansi` rendering with the player in brackets, or as its observation if it has none. The
    last action in the model's turn counts.

    Args:
        actions: names of the actions, in the order of their numbers.
    """
    import gymnasium

    ansi = "ansi" in gymnasium.spec(id).make().metadata["render_modes"]
    game: Any = gymnasium.make(id, render_mode="ansi" if ansi else None, **(args or {}))

    def render(observation: Any) -> str:
        text = game.render() if ansi else str(observation)
        return re.sub(r"\x1b\[([\d;]+)m(.)\x1b\[0m", lambda m: MARKS.get(m[1], "[{}]").format(m[2]), text).strip()

    text = yield Reply(text="\n" + render(game.reset(seed=seed_of(problem))[0]), role=role)
    while True:
        chosen = actions_in(text, actions)
        if not chosen:
            text = yield Reply(text=f"Name an action: {', '.join(actions)}.", role=role, label="invalid")
            continue
        observation, reward, ended, cut, _ = game.step(list(actions).index(chosen[-1]))
        if ended or cut:
            return float(reward)
        text = yield Reply(text=render(observation), role=role, reward=float(reward))


def actions_in(text: str, actions: Sequence[str]) -> list[str]:
    """Return the actions named in a text, in order, ignoring case.

    Example:
        >>> actions_in("Left? No, right. That is upright.", ["Left", "right", "up"])
        ['Left', 'right']
    """
    names = {name.lower(): name for name in sorted(actions, key=len, reverse=True)}
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)"
    return [names[match] for match in re.findall(pattern, text.lower())]


def check_gymnasium(*, id: str, actions: Sequence[str], args: Mapping[str, Any] | None = None, **_: Any) -> None:
    """Check the `args` of `gymnasium`.

    Raises:
        ValueError: the game does not exist or does not take `args`, an action has no name, or observations are arrays
            too large for a text.
    """
    import gymnasium
    import numpy as np

    with reraise_as(ValueError, "id", gymnasium.error.Error), reraise_as(ValueError, "args", TypeError):
        game: Any = gymnasium.make(id, **(args or {}))
    if not all(actions) or not actions:
        raise ValueError("actions: name all of them, by their numbers")
    shape, most = game.observation_space.shape or (), np.get_printoptions()["threshold"]
    if "ansi" not in game.metadata["render_modes"] and math.prod(shape) > most:
        raise ValueError(
            f"id: {id} is shown as its observation, an array of shape {shape}, of which a text has no more than {most} "
            "numbers; for pictures write an environment of your own, whose Reply has images"
        )


# --------------------------------------------------------------------------------------------------------------------
# OpenEnv servers.


def openenv(
    problem: Problem, *, url: str, action: str, observation: str = "", role: Role = "user", timeout_s: float = 20.0
) -> Generator[Reply, str, float]:
    """Play an episode of the server at `url`. Each turn has the server's reward; the last one is the outcome.

    Args:
        action: field of the action that gets the model's turn.
        observation: field of the observation to show to the model: a text, content parts with text and pictures, or
            another value as JSON; "" shows the whole observation as JSON.
        timeout_s: time limit of each request.
    """
    from openenv.core import GenericEnvClient

    def render(fields: Mapping[str, Any]) -> tuple[str, list[Any]]:
        value = fields[observation] if observation else fields
        if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
            return shown(f"{url}: {observation}", [{"role": role, "content": value}])
        return value if isinstance(value, str) else json.dumps(value), []

    def request(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except TimeoutError as error:  # `outages.is_away` does not count a TimeoutError as the service's fault
            raise ConnectionError(f"{url} has not answered within {timeout_s:g} s") from error

    client: Any = GenericEnvClient(base_url=url, connect_timeout_s=timeout_s, message_timeout_s=timeout_s).sync()
    with ExitStack() as stack:
        request(stack.enter_context, client)
        state, reward = request(client.reset, seed=seed_of(problem)), None
        while not state.done:
            said, images = render(state.observation)
            text = yield Reply(text=said, role=role, reward=reward, images=images)
            state = request(client.step, {action: text})
            reward = float(state.reward or 0.0)
        return reward or 0.0


# --------------------------------------------------------------------------------------------------------------------
# Reasoning-gym problems with several tries.


def reasoning_gym_retries(
    problem: Problem, *, tries: int = 3, role: Role = "user"
) -> Generator[Reply | None, str, float]:
    """Play a problem of the generator `reasoning_gym:NAME`. After a wrong answer the model may try again.

    The outcome is the task's own score of the last answer.
    """
    text = yield None
    for left in range(tries - 1, -1, -1):
        (score,) = reasoning_gym([problem.prompt], [text], [problem.columns["reasoning_gym"]])
        if score >= 1 or not left:
            break
        hint = f"That is not right (score {score:.2f}). Try again, with the answer in <answer> and </answer>."
        text = yield Reply(text=hint, role=role, label="retry")
    return score


# --------------------------------------------------------------------------------------------------------------------
# SkyRL's environments (skyrl-gym).


def skyrl_gym(
    problem: Problem,
    *,
    id: str,
    config: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
    role: Role = "user",
) -> Generator[Reply | None, str, float]:
    """Play an episode of `skyrl_gym.make(id)`. Each turn has the game's reward; the last one is the outcome.

    The environment's `extras` are the row's columns, `reward_spec.ground_truth`, and the argument `extras`. Pictures in
    the content parts of its observations are those of the reply.

    Raises:
        ValueError: its `init` changes the prompt, which has been rendered already.
    """
    import skyrl_gym

    truth = {"ground_truth": problem.ground_truth}
    extras = {"reward_spec": truth, "extra_info": {}, **problem.columns, **(extras or {})}
    game = skyrl_gym.make(id, env_config=config or {}, extras=extras)
    prompt = [Message(role="user", content=problem.prompt)] if isinstance(problem.prompt, str) else [*problem.prompt]
    if game.init([dict(message) for message in prompt])[0] != prompt:
        raise ValueError(f"{id}: its init changes the prompt; write the complete prompt into the data")
    text = yield None
    try:
        while not (step := game.step(text))["done"]:
            reply, images = shown(f"{id}: an observation", step["observations"])
            text = yield Reply(text=reply, role=role, reward=float(step["reward"]), images=images)
        return float(step["reward"])
    finally:
        game.close()


def shown(place: str, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Any]]:
    """Return the text of messages, with `<image>` where a picture is, and the pictures.

    Raises:
        DataError: a content is neither text, nor parts with text and pictures.

    Example:
        >>> parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "!"}]
        >>> shown("an observation", [{"role": "user", "content": parts}])
        ('<image>!', ['a.png'])
    """
    images: list[Any] = []
    texts = [content_text(place, without_parts(message, images)["content"]) for message in messages]
    return "\n".join(texts), images


# --------------------------------------------------------------------------------------------------------------------
# TextArena's games for one player.

_random_lock = threading.Lock()
"""Games use Python's global random state, which all episodes of a process share."""


def textarena(
    problem: Problem, *, id: str, role: Role = "user", args: Mapping[str, Any] | None = None
) -> Generator[Reply, str, float]:
    """Play `textarena.make(id, **args)` without its wrappers; each reply contains the new messages only.

    The outcome is the game's reward.
    """
    import textarena

    game, seed, turn = textarena.make(id, **(args or {})), seed_of(problem), 0
    while isinstance(game, textarena.Wrapper):
        game = game.env
    with _random_lock:
        random.seed(seed)
        game.reset(num_players=1, seed=seed)
    while True:
        news = [words for sender, words, _ in game.get_observation()[1] if sender == textarena.GAME_ID]
        text = yield Reply(text="\n".join(news), role=role, label="invalid" if "invalid move" in str(news) else "")
        turn += 1
        with _random_lock:
            random.seed(f"{seed}/{turn}")
            ended, _ = game.step(text)
        if ended:
            return float(game.close()[0][0])


# --------------------------------------------------------------------------------------------------------------------
# TextWorld's games, from files.


def textworld(problem: Problem, *, role: Role = "user") -> Generator[Reply, str, float]:
    """Play the game in the file that the row's column `game` names (`.z8`, as written by `tw-make`).

    The last line of the model's turn that is not empty is the command. Rewards are the points of each turn, as shares
    of the maximum score; the last one is the outcome.
    """
    import textworld

    game = textworld.start(problem.columns["game"], textworld.EnvInfos(max_score=True))
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
