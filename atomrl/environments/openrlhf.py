"""The environment `openrlhf_agent`: the agent in a file of OpenRLHF's `train.agent_func_path`."""

import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

from atomrl.common.functions import find_function
from atomrl.environments.worker import Cut
from atomrl.types import Problem, Reply


class AgentInstanceBase:
    """OpenRLHF's base class of agents, for machines without OpenRLHF."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the states: the prompt is the observation."""
        return states


class AgentExecutorBase:
    """OpenRLHF's base class of what plays an agent."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """OpenRLHF's loop over the turns of an agent, of which only the agent's class is used."""

    execute = None

    def __init__(self, agent_instance_cls: type) -> None:
        self.agent_instance_cls = agent_instance_cls


async def openrlhf_agent(
    problem: Problem, say: Callable[[Reply | None], Awaitable[str]], *, path: str, rendered: str = ""
) -> float:
    """Play an episode with the agent in a file of OpenRLHF's `train.agent_func_path`.

    The agent's `reset` and `step` get the prompt as rendered, all text since, and the label. The text of its feedback
    is appended as it is, special tokens too. The outcome is the sum of the rewards of all steps, also if there is no
    room for another turn.

    Args:
        path: the Python file. OpenRLHF need not be installed.

    Raises:
        ValueError: `reset` changes the prompt, whose tokens are fixed, or a step changes the sampling parameters or has
            pictures.
    """
    agent, total, sampling = agent_class(path)(), 0.0, SimpleNamespace()
    label = "" if problem.ground_truth is None else problem.ground_truth
    context = (await agent.reset({"observation": rendered, "label": label}))["observation"]
    if not context.startswith(rendered):
        raise ValueError(f"{path}: its reset changes the prompt; write the complete prompt into the data")
    opening = context.removeprefix(rendered)
    reply = Reply(text=opening, special_tokens=True) if opening else None
    try:
        while True:
            text = await say(reply)
            states = {"observation_text": context, "action_text": text, "label": label}
            step = await agent.step(states | {"sampling_params": sampling})
            if step.get("sampling_params") not in (None, sampling) or vars(sampling):
                raise ValueError(f"{path}: its step changes the sampling parameters, which are those of the config")
            if step.get("environment_images"):
                raise ValueError(f"{path}: its step replies with pictures, which are not supported")
            total += float(step["rewards"])
            if step["done"]:
                return total
            context += text + step["environment_feedback"]
            reply = Reply(text=step["environment_feedback"], special_tokens=True)
    except Cut:
        return total


def agent_class(path: str) -> Any:
    """Return the class of the agents in a file of OpenRLHF's `train.agent_func_path`.

    Raises:
        ValueError: the file cannot be imported, or its `AgentExecutor` samples by itself.
    """
    if "openrlhf" not in sys.modules and find_spec("openrlhf") is None:
        modules = [ModuleType("openrlhf"), ModuleType("openrlhf.utils"), ModuleType("openrlhf.utils.agent")]
        vars(modules[2]).update(
            {one.__name__: one for one in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor)}
        )
        sys.modules.update({module.__name__: module for module in modules})
    executor: Any = find_function(f"{path}:AgentExecutor")
    base = import_module("openrlhf.utils.agent").MultiTurnAgentExecutor
    if base not in getattr(executor, "__mro__", ()) or executor.execute is not base.execute:
        raise ValueError(
            f"path: AgentExecutor of {path} samples by itself: supported is a MultiTurnAgentExecutor without an "
            "execute of its own, whose AgentInstance has reset and step"
        )
    return executor().agent_instance_cls


def check_openrlhf_agent(*, path: str) -> None:
    """Check the `args` of `openrlhf_agent`.

    Raises:
        ValueError: the file has no agent that can be played.
    """
    agent_class(path)
