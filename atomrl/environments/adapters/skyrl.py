"""SkyRL's environments (skyrl-gym): `init`, then `step(text)` until it is done."""

from collections.abc import Generator, Mapping
from typing import Any

from atomrl.episodes import Reply, Role
from atomrl.types import Message, Sample


def play(
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
