"""Call a user's own functions of an objective once with made-up numbers, before a run loads a model.

A mistake in such a function (a field that does not exist, a wrong shape, no gradient) would otherwise show in the first
step, after models are loaded and completions are drawn. Made-up numbers may not be such as the function takes, so it is
refused only where it fails with every kind of rewards that is tried, and never for what depends on where it runs (a
kernel of a GPU, a process group).
"""

import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import torch
from torch import Tensor

from atomrl.batches import RowBatch, TrainingBatch
from atomrl.common.errors import did_you_mean
from atomrl.common.functions import find_function, name_of, plain_name
from atomrl.config import ConfigError, RunConfig, build_config
from atomrl.data.rows import to_rows, to_training_batches
from atomrl.objectives import PolicyObjective
from atomrl.objectives.auxiliary import Distillation
from atomrl.objectives.base import as_tuple
from atomrl.objectives.choice import Custom, imported
from atomrl.protocols import Algorithm, ModelInput, ModelOutputs
from atomrl.types import Sample, Segment, Trajectory

# --------------------------------------------------------------------------------------------------------------------
# Functions that a script hands over, as a config names them.


def check_functions(reward: Any, advantage: Any, rewards: Any, callbacks: Any) -> None:
    """That each of a script's functions is one, before anything is loaded.

    Raises:
        ConfigError: one is not.
    """
    for name, given in (("reward", reward), ("advantage", advantage)):
        if given is not None and not isinstance(given, str) and not callable(given):
            raise ConfigError(f"{name}={given!r}: give a function, or a path of one as in './my_file.py:f'")
    if rewards is not None and not (isinstance(rewards, Mapping) and all(map(callable, rewards.values()))):
        raise ConfigError(f"rewards={rewards!r}: give a dict of functions by the names that reward.functions has")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ConfigError(f"callbacks={callbacks!r}: give a list of functions f(step, metrics)")


def with_functions(
    config: RunConfig, reward: Callable[..., Any] | str | None, advantage: Callable[..., Any] | str | None
) -> tuple[RunConfig, dict[str, Callable[..., Any]]]:
    """A config with a reward and an advantage of one's own, each a function or what a config calls one by.

    Returns:
        The config, and rewards of this process by the name that it has for them.

    Raises:
        ConfigError: this kind of run has none; the advantage does not take the inputs.
    """
    tree = config.to_tree(secrets=True)
    by_name: dict[str, Callable[..., Any]] = {}
    if reward is None and advantage is None:
        return config, by_name
    if config.kind != "rl":
        raise ConfigError(f"a {config.kind} run has no rewards and no advantages of rollouts")
    if advantage is not None:
        if not isinstance(config.algorithm, PolicyObjective):
            raise ConfigError(f"algorithm.name={config.algorithm.name} has no advantage")
        imported.cache_clear()  # another function may have had the name before
        tree["algorithm"]["advantage"] = {
            "type": "custom",
            "function": advantage if isinstance(advantage, str) else name_of(advantage),
        }
    if reward is not None:
        name = reward if isinstance(reward, str) else plain_name(reward)
        if not isinstance(reward, str):
            by_name[name] = reward
        tree["reward"] |= {"functions": [{"function": name}], "by_data_source": {}}
    return build_config(tree), by_name


# --------------------------------------------------------------------------------------------------------------------
# The source of a run's own functions, kept with it: what a config only names.

MAX_CHARACTERS = 100_000


def function_sources(config: RunConfig, local: Mapping[str, Any]) -> dict[str, str]:
    """The source of each function of the user's that a config names, by the name that it has there.

    Args:
        local: functions that exist in this process alone, by that name.
    """
    found = {}
    for name in dict.fromkeys(_named(config.to_tree())):
        function = local.get(name)
        if function is None and not ("." in name or ":" in name):
            continue  # a built-in
        try:
            function = inspect.unwrap(function or find_function(name))
            if not str(getattr(function, "__module__", "")).startswith("atomrl."):
                found[name] = inspect.getsource(function)[:MAX_CHARACTERS]
        except (OSError, TypeError, ValueError):  # an object without source, or a command line
            continue
    return found


def _named(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == "function" and isinstance(value, str):
                yield value
            else:
                yield from _named(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _named(value)


log = logging.getLogger(__name__)
MOST_ROWS = 512
"""Most prompts of a trial."""
MOST_TOKENS = 64
"""Tokens of a completion of a trial."""
PROMPT_TOKENS = 4
REWARDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "between 0 and 1": lambda random: random,
    "0 and 1": lambda random: (torch.arange(len(random)) % 2).float(),
    "between -1 and 0": lambda random: -random,
}
"""Kinds of rewards, each made of random numbers [B]."""
_ELSEWHERE = re.compile(r"cuda|triton|\bgpu|process group|distributed", re.IGNORECASE)
"""In an error of a function that cannot be tried here."""


def made_up_rows(
    groups: int,
    members: int,
    tokens: int = 4,
    rewards: Callable[[Tensor], Tensor] = REWARDS["between 0 and 1"],
    weights: Sequence[float] = (1.0,),
    turns: bool = False,
    baselines: bool = True,
) -> RowBatch:
    """Rows of a step with random numbers, the same each time.

    Args:
        groups: prompts.
        members: completions of each.
        tokens: of the longest completion.
        rewards: a kind of `REWARDS`.
        weights: of the parts of the reward.
        turns: completions of two turns, with a reward at the end of the first.
        baselines: rewards of extra rollouts as well.
    """
    random = torch.Generator().manual_seed(0)
    count = groups * members
    earned = rewards(torch.rand(count, generator=random)).tolist()
    lengths = torch.randint(1, tokens + 1, (count,), generator=random).tolist()
    lengths[0] = tokens
    sample = Sample(sample_id="", prompt="", ground_truth=None)
    names = [f"part {number}" for number in range(len(weights))]
    drawn = []
    for number, (reward, length) in enumerate(zip(earned, lengths, strict=True)):
        segments = [Segment(origin="prompt", token_ids=(1,) * PROMPT_TOKENS), *_written(length, random)]
        if turns:
            segments += [Segment(origin="environment", token_ids=(1,)), *_written(length, random)]
        drawn.append(
            Trajectory(
                prompt_id=str(number // members), index=number % members, sample=sample, segments=tuple(segments),
                text="", finish_reason="stop", reward=reward, reward_parts=dict.fromkeys(names, reward),
                part_weights=dict(zip(names, weights, strict=True)), baseline_reward=0.5 if baselines else None,
                token_rewards=((PROMPT_TOKENS + length - 1, reward),) if turns else (),
            )
        )  # fmt: skip
    return to_rows(drawn)


def _written(length: int, random: torch.Generator) -> list[Segment]:
    logprobs = tuple((torch.rand(length, generator=random) - 1).tolist())
    return [Segment(origin="model", token_ids=(1,) * length, logprobs=logprobs, policy_version=0)]


def with_inputs(rows: RowBatch, names: Iterable[str]) -> RowBatch:
    """Rows with random numbers for what the back end computes: between -1 and 0 (entropies between 0 and 1), and 0 off
    the mask."""
    random, changes = torch.Generator().manual_seed(1), dict[str, Any]()
    for name in sorted(names):
        numbers = torch.rand(rows.rows if name == "scores" else rows.tokens.shape, generator=random) - 1
        numbers = -numbers if name == "old_entropy" else numbers
        changes[name] = numbers if name == "scores" else numbers * rows.loss_mask
    return replace(rows, **changes)


@dataclass(eq=False)
class Mistake(Exception):
    """A number that a loss must not have, found outside of the functions that it is made by."""

    axes: Sequence[str]
    what: str


def check_own_functions(algorithm: Algorithm, config: RunConfig, device: str = "cpu") -> None:
    """Call the functions on the `custom` axes once, as a step of the run would.

    Args:
        algorithm: of the run.
        config: of the run, for the size of groups, the parts of the reward, and updates in a step.
        device: that losses are computed on.

    Raises:
        ConfigError: one fails: its axis, file and line, what is wrong, and what it was called with.
    """
    if not isinstance(algorithm, PolicyObjective) or not own_choices(algorithm):
        return
    algorithm = algorithm.model_copy(update={"distillation": Distillation()})  # which reads whole vocabularies
    first: Exception | None = None
    with torch.random.fork_rng(devices=[]), _eager():
        for kind in REWARDS:
            try:
                batch = _try(algorithm, config, kind)
                break
            except Exception as error:  # whatever the user's code raises
                first = first or error
        else:
            assert first is not None
            elsewhere = device != "cpu" or config.backend is not None
            if elsewhere and (isinstance(first, AssertionError) or _ELSEWHERE.search(str(first))):
                log.info("a function of the objective could not be tried on this process's CPU: %s", first)
            elif (refusal := _refusal(algorithm, first)) is not None:
                raise refusal from first
            return
        _warn_of_equal_rewards(algorithm, config)
        if device.startswith("cuda"):
            _check_device(algorithm, batch, device)


def own_choices(algorithm: PolicyObjective) -> dict[str, list[Custom]]:
    """The functions of one's own by their axis."""
    found = {
        axis: [part for part in as_tuple(choice) if isinstance(part, Custom)] for axis, choice in algorithm.axes.items()
    }
    return {axis: parts for axis, parts in found.items() if parts}


def _rows(algorithm: PolicyObjective, config: RunConfig, rewards: Callable[[Tensor], Tensor]) -> RowBatch:
    members = config.rollout.completions_per_prompt
    uses = [*config.reward.functions, *list(config.reward.by_data_source.values())[:1]]
    rows = made_up_rows(
        max(1, min(config.rollout.prompts_per_step, MOST_ROWS // members)),
        members,
        min(MOST_TOKENS, config.rollout.max_completion_tokens),
        rewards,
        weights=[getattr(use, "weight", 1.0) for use in uses],
        turns=config.environment is not None,
        baselines=algorithm.extra_rollouts is not None,
    )
    needs = algorithm.needs
    if config.updates_per_step == 1:  # as in the loop: old log-probs are the policy's own
        needs = algorithm.advantage_inputs | (needs - {"old_logprobs"})
    return with_inputs(rows, needs)


def _try(algorithm: PolicyObjective, config: RunConfig, kind: str) -> TrainingBatch:
    """Advantages and losses of a step, on the policy and, where a step has several updates, off it."""
    credited = algorithm.advantages(_rows(algorithm, config, REWARDS[kind]))
    (batch,) = to_training_batches(credited, algorithm, updates=1, epochs=1, seed=0, step=1)
    mask, random = batch.loss_mask, torch.Generator().manual_seed(2)
    old = (torch.rand(mask.shape, generator=random) - 1) * mask if batch.old_logprobs is None else batch.old_logprobs
    moves = {"where log_ratio is 0, as in the first update of a step": torch.zeros(mask.shape)}
    if config.updates_per_step > 1:
        moves["where the policy has moved"] = 0.2 * (torch.rand(mask.shape, generator=random) - 0.5) * mask
    axes = [axis for axis in own_choices(algorithm) if axis in ("clip", "rollout_is")]
    for where, move in moves.items():
        logprobs = (old + move).requires_grad_()
        loss = algorithm.loss(_outputs(algorithm, batch, logprobs), batch).loss
        if axes and not loss.isfinite():
            raise Mistake(axes, f"the loss is {loss.item()} {where}")
        (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True) if loss.requires_grad else (None,)
        if axes and gradient is not None and not gradient[mask].isfinite().all():
            raise Mistake(axes, f"the gradient of the loss is not finite {where}")
    return batch


def _outputs(algorithm: PolicyObjective, batch: TrainingBatch, logprobs: Tensor) -> ModelOutputs:
    entropy = (1 - logprobs) * batch.loss_mask if "entropy" in algorithm.outputs else None
    values = None if batch.values is None else batch.values.clone().requires_grad_()
    return ModelOutputs(logprobs=logprobs, entropy=entropy, values=values)


def _warn_of_equal_rewards(algorithm: PolicyObjective, config: RunConfig) -> None:
    """A warning where an advantage of one's own is not finite for a group whose rewards are equal."""
    for choice in own_choices(algorithm).get("advantage", ()):
        if algorithm.keeps_group is not None or config.rollout.completions_per_prompt == 1:
            return
        try:
            algorithm.advantages(_rows(algorithm, config, torch.ones_like))
        except Exception as error:  # whatever the user's code raises
            log.warning(
                "algorithm.advantage.function=%s fails where all rewards of a group are equal, and the run would end "
                "there (%s): add a small number to what it divides by, or draw other groups in their place "
                "(algorithm.group_filter=mixed_outcomes)",
                choice.shown, error,
            )  # fmt: skip


def _check_device(algorithm: PolicyObjective, batch: TrainingBatch, device: str) -> None:
    """Check with meta tensors that a loss mixes no CPU tensors with those of a GPU.

    Raises:
        ConfigError: it does.
    """
    moved: dict[str, Any] = {name: value.to("meta") for name, value in vars(batch).items() if isinstance(value, Tensor)}
    there = replace(batch, **moved)
    try:
        algorithm.loss(_outputs(algorithm, there, there.loss_mask.float().requires_grad_()), there)
    except Exception as error:  # most of what reads values fails without data
        message = str(error)
        on_the_cpu = "device" in message and "cpu" in message and "cuda" not in message
        if not on_the_cpu or isinstance(error, NotImplementedError):
            return
        what = (
            f"a tensor that it makes is on the CPU, and its inputs are on {device}: make it like one of them "
            "(torch.zeros_like(inputs.advantages)), or with device=inputs.mask.device"
        )
        if (refusal := _refusal(algorithm, error, what)) is not None:
            raise refusal from error


@contextmanager
def _eager() -> Iterator[None]:
    """Compile nothing within it: functions that are compiled are called as they are written."""
    if "torch._dynamo" not in sys.modules:  # whose import takes seconds, and which nobody has asked for
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _refusal(algorithm: PolicyObjective, error: Exception, what: str | None = None) -> ConfigError | None:
    """The error of a function of one's own, with its place; None where it is of none."""
    own = own_choices(algorithm)
    if isinstance(error, Mistake):
        names = ", ".join(f"algorithm.{axis}.function={part.shown}" for axis in error.axes for part in own[axis])
        place = _definition(own[error.axes[0]][0]) if len(error.axes) == 1 else ""
        return ConfigError(f"{names}: {error.what}{place}. {_TRIED}")
    frames = list(traceback.walk_tb(error.__traceback__))
    at = next((n for n, (frame, _) in enumerate(frames) if frame.f_code is Custom.__call__.__code__), None)
    if at is None:
        return None
    choice, inputs = frames[at][0].f_locals["self"], frames[at][0].f_locals["inputs"]
    axis = next(axis for axis, parts in own.items() if any(part is choice for part in parts))
    inside = _own_line(choice, frames[at + 1 :])
    if what is None:
        what = _what(error, inputs, axis, inside)
    place = f" ({inside})" if inside else _definition(choice)
    return ConfigError(f"algorithm.{axis}.function={choice.shown}: {what}{place}. {_TRIED}: {_described(inputs)}")


_TRIED = "It was called before the run with made-up numbers"


def _code(choice: Custom) -> Any:
    function = inspect.unwrap(imported(choice.function))
    method = function if inspect.isroutine(function) else type(function).__call__
    return getattr(method, "__code__", None)


def _definition(choice: Custom) -> str:
    code = _code(choice)
    return "" if code is None else f" ({_shown(code.co_filename)}, line {code.co_firstlineno})"


def _own_line(choice: Custom, frames: Sequence[tuple[FrameType, int]]) -> str:
    """The innermost line of the function's file that was being run; "" where the function had returned."""
    code = _code(choice)
    summary = traceback.StackSummary.extract(iter(frames))
    found = [line for line in summary if code is not None and line.filename == code.co_filename]
    if not found:
        return ""
    return f"{_shown(found[-1].filename)}, line {found[-1].lineno}{f': {found[-1].line}' if found[-1].line else ''}"


def _shown(file: str) -> str:
    """A path, as short as it can be written from here."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _what(error: Exception, inputs: Any, axis: str, line: str) -> str:
    """An error in words, with what may have been meant."""
    kind, fields = type(inputs), list(inspect.signature(type(inputs)).parameters)
    if isinstance(error, AttributeError) and error.obj is inputs:
        return f"{kind.__name__} has no {error.name!r}; {did_you_mean(str(error.name), fields, 'it has')}"
    message = str(error) if type(error) is ValueError and not line else f"{type(error).__name__}: {error}"
    absent = [name for name in re.findall(r"\.(\w+)", line) if name in fields and getattr(inputs, name) is None]
    if not absent or not re.search("NoneType|None", message):
        return message
    name = absent[0]
    asked = f"; algorithm.{axis}.reads=[{name}] has it computed" if name in get_args(ModelInput) else ""
    return f"{message}: {name} is None in this run{asked}"


def _described(inputs: Any) -> str:
    """The tensors of inputs by name, with shape and dtype."""
    names = inspect.signature(type(inputs)).parameters
    given = {name: getattr(inputs, name) for name in names}
    parts = [
        f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, value in given.items()
        if isinstance(value, Tensor)
    ]
    absent = [name for name, value in given.items() if value is None]
    without = f"; {', '.join(absent)} are None" if absent else ""
    return f"{type(inputs).__name__} with {', '.join(parts)}{without}"
