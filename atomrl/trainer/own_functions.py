"""A user's own functions: put them into a config, record their source, and test them before a run loads a model.

`check_own_functions` calls the functions of an objective once with random numbers. A mistake in one (a field that does
not exist, a wrong shape, no gradient) would otherwise show in the first step, after models are loaded and completions
are sampled. The random numbers may be invalid inputs for a function, so it is refused only if it fails with every kind
of rewards in `REWARDS`, and never for an error that depends on where it runs (a GPU kernel, a process group).
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

from atomrl.batches import RowBatch, TrainingBatch, map_fields
from atomrl.common.errors import did_you_mean
from atomrl.common.functions import find_function, name_of, plain_name
from atomrl.config import ConfigError, RunConfig, load_config
from atomrl.data.rows import to_rows, to_training_batches
from atomrl.objectives import PolicyObjective
from atomrl.objectives.auxiliary import Distillation
from atomrl.objectives.choice import Custom, imported
from atomrl.objectives.objective import as_tuple
from atomrl.protocols import Algorithm, ModelInput, ModelOutputs
from atomrl.types import Problem, Segment, Trajectory

log = logging.getLogger(__name__)

# --------------------------------------------------------------------------------------------------------------------
# Functions passed from a Python script.


def check_functions(reward: Any, advantage: Any, rewards: Any, callbacks: Any) -> None:
    """Check the types of the functions that a script passes to `atomrl.train`.

    Raises:
        ConfigError: one is neither callable nor, where allowed, a name.
    """
    for name, function in (("reward", reward), ("advantage", advantage)):
        if function is not None and not isinstance(function, str) and not callable(function):
            raise ConfigError(f"{name}={function!r}: must be a function or its path, as in './my_file.py:f'")
    if rewards is not None and not (isinstance(rewards, Mapping) and all(map(callable, rewards.values()))):
        raise ConfigError(f"rewards={rewards!r}: must be a dict of functions by their names in reward.functions")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ConfigError(f"callbacks={callbacks!r}: must be a list of functions f(step, metrics)")


def with_functions(
    config: RunConfig, reward: Callable[..., Any] | str | None, advantage: Callable[..., Any] | str | None
) -> tuple[RunConfig, dict[str, Callable[..., Any]]]:
    """Set the reward and the advantage of a config to functions, given as objects or by name.

    Returns:
        The config, and its rewards that exist only in this process: name in the config -> function.

    Raises:
        ConfigError: this kind of run has no rewards or advantages, or the advantage has the wrong signature.
    """
    tree = config.to_tree(secrets=True)
    by_name: dict[str, Callable[..., Any]] = {}
    if reward is None and advantage is None:
        return config, by_name
    if config.kind != "rl":
        raise ConfigError(f"a {config.kind} run has no rewards or advantages")
    if advantage is not None:
        if not isinstance(config.algorithm, PolicyObjective):
            raise ConfigError(f"algorithm.name={config.algorithm.name} has no advantage")
        imported.cache_clear()  # another function may have had this name before
        tree["algorithm"]["advantage"] = {
            "type": "custom",
            "function": advantage if isinstance(advantage, str) else name_of(advantage),
        }
    if reward is not None:
        name = reward if isinstance(reward, str) else plain_name(reward)
        if not isinstance(reward, str):
            by_name[name] = reward
        tree["reward"] |= {"functions": [{"function": name}], "by_data_source": {}}
    return load_config(tree), by_name


# --------------------------------------------------------------------------------------------------------------------
# The source of the user's functions, saved in the run's folder. A config has only their names.

MAX_CHARACTERS = 100_000


def function_sources(config: RunConfig, local: Mapping[str, Any]) -> dict[str, str]:
    """Return the source of each of the user's functions in a config: name -> source.

    Args:
        local: functions that exist only in this process, by their name in the config.
    """
    sources = {}
    for name in dict.fromkeys(_function_names(config.to_tree())):
        function = local.get(name)
        if function is None and not ("." in name or ":" in name):
            continue  # a built-in
        try:
            function = inspect.unwrap(function or find_function(name))
            if not str(getattr(function, "__module__", "")).startswith("atomrl."):
                sources[name] = inspect.getsource(function)[:MAX_CHARACTERS]
        except (OSError, TypeError, ValueError):  # an object without source, or a command line
            continue
    return sources


def _function_names(tree: Any) -> Iterator[str]:
    """Yield the values of all keys `function` in a tree."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == "function" and isinstance(value, str):
                yield value
            else:
                yield from _function_names(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _function_names(value)


# --------------------------------------------------------------------------------------------------------------------
# A batch of random numbers.

MAX_ROWS = 512
"""Maximum number of rows of a trial."""
MAX_TOKENS = 64
"""Maximum length of a completion of a trial."""
PROMPT_TOKENS = 4
REWARDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "between 0 and 1": lambda random: random,
    "0 and 1": lambda random: (torch.arange(len(random)) % 2).float(),
    "between -1 and 0": lambda random: -random,
}
"""Name of a kind of rewards -> function that makes them of uniform random numbers [B] in [0, 1)."""


def random_rows(
    groups: int,
    group_size: int,
    tokens: int = 4,
    rewards: Callable[[Tensor], Tensor] = REWARDS["between 0 and 1"],
    weights: Sequence[float] = (1.0,),
    turns: bool = False,
    baselines: bool = True,
) -> RowBatch:
    """Return the rows of a step with random log-probs, lengths and rewards; the same on every call.

    Args:
        groups: number of prompts.
        group_size: completions per prompt.
        tokens: length of the longest completion.
        rewards: a value of `REWARDS`.
        weights: weights of the parts of the reward.
        turns: completions have two turns, with a reward at the end of the first.
        baselines: with rewards of extra rollouts.
    """
    random = torch.Generator().manual_seed(0)
    count = groups * group_size
    outcomes = rewards(torch.rand(count, generator=random)).tolist()
    lengths = torch.randint(1, tokens + 1, (count,), generator=random).tolist()
    lengths[0] = tokens
    problem = Problem(problem_id="", prompt="", ground_truth=None)
    names = [f"part {number}" for number in range(len(weights))]
    trajectories = []
    for number, (reward, length) in enumerate(zip(outcomes, lengths, strict=True)):
        segments = [Segment(origin="prompt", token_ids=(1,) * PROMPT_TOKENS), _random_turn(length, random)]
        if turns:
            segments += [Segment(origin="environment", token_ids=(1,)), _random_turn(length, random)]
        trajectories.append(
            Trajectory(
                prompt_id=str(number // group_size), index=number % group_size, problem=problem,
                segments=tuple(segments), text="", finish_reason="stop", reward=reward,
                reward_parts=dict.fromkeys(names, reward),
                part_weights=dict(zip(names, weights, strict=True)), baseline_reward=0.5 if baselines else None,
                token_rewards=((PROMPT_TOKENS + length - 1, reward),) if turns else (),
            )
        )  # fmt: skip
    return to_rows(trajectories)


def _random_turn(length: int, random: torch.Generator) -> Segment:
    logprobs = tuple((torch.rand(length, generator=random) - 1).tolist())
    return Segment(origin="model", token_ids=(1,) * length, logprobs=logprobs, policy_version=0)


def with_inputs(rows: RowBatch, names: Iterable[str]) -> RowBatch:
    """Add random values for inputs that the back end computes (`ModelInput`).

    Values are in [-1, 0), entropies in (0, 1], and 0 outside the loss mask.
    """
    random, changes = torch.Generator().manual_seed(1), dict[str, Any]()
    for name in sorted(names):
        numbers = torch.rand(rows.rows if name == "scores" else rows.tokens.shape, generator=random) - 1
        numbers = -numbers if name == "old_entropy" else numbers
        changes[name] = numbers if name == "scores" else numbers * rows.loss_mask
    return replace(rows, **changes)


# --------------------------------------------------------------------------------------------------------------------
# A trial of the functions of an objective.

ELSEWHERE = re.compile(r"cuda|triton|\bgpu|process group|distributed", re.IGNORECASE)
"""Matches errors of a function that can run only on another device or in a process group."""
_TRIED = "It was called before the run with random inputs"


@dataclass(eq=False)
class InvalidLoss(Exception):
    """A loss or gradient that is not finite, although no function raised an error."""

    axes: Sequence[str]
    """Axes whose functions contribute to it."""
    problem: str


def check_own_functions(algorithm: Algorithm, config: RunConfig, device: str = "cpu") -> None:
    """Call the user's functions of an objective (`custom` on an axis) once, as a step of the run would.

    Args:
        algorithm: algorithm of the run.
        config: config of the run; it sets group size, parts of the reward and updates per step.
        device: device on which losses are computed.

    Raises:
        ConfigError: a function fails; the message has its axis, file and line, the problem, and its inputs.
    """
    if not isinstance(algorithm, PolicyObjective) or not own_choices(algorithm):
        return
    # Without distillation over the vocabulary, for which there are no random inputs.
    algorithm = algorithm.model_copy(update={"distillation": Distillation()})
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
            if elsewhere and (isinstance(first, AssertionError) or ELSEWHERE.search(str(first))):
                log.info("a function of the objective could not be tested on the CPU of this process: %s", first)
            elif (refusal := _refusal(algorithm, first)) is not None:
                raise refusal from first
            return
        _warn_of_equal_rewards(algorithm, config)
        if device.startswith("cuda"):
            _check_device(algorithm, batch, device)


def own_choices(algorithm: PolicyObjective) -> dict[str, list[Custom]]:
    """Return the user's functions of an objective: axis -> its `Custom` parts."""
    choices = {
        axis: [part for part in as_tuple(choice) if isinstance(part, Custom)] for axis, choice in algorithm.axes.items()
    }
    return {axis: parts for axis, parts in choices.items() if parts}


def _rows(algorithm: PolicyObjective, config: RunConfig, rewards: Callable[[Tensor], Tensor]) -> RowBatch:
    """Return random rows with the group size, reward parts and inputs of a run's steps."""
    group_size = config.rollout.completions_per_prompt
    uses = [*config.reward.functions, *list(config.reward.by_data_source.values())[:1]]
    rows = random_rows(
        max(1, min(config.rollout.prompts_per_step, MAX_ROWS // group_size)),
        group_size,
        min(MAX_TOKENS, config.rollout.max_completion_tokens),
        rewards,
        weights=[getattr(use, "weight", 1.0) for use in uses],
        turns=config.environment is not None,
        baselines=algorithm.extra_rollouts is not None,
    )
    needs = algorithm.needs
    if config.updates_per_step == 1:  # as in the training loop: old log-probs are the policy's own
        needs = algorithm.advantage_inputs | (needs - {"old_logprobs"})
    return with_inputs(rows, needs)


def _try(algorithm: PolicyObjective, config: RunConfig, kind: str) -> TrainingBatch:
    """Compute the advantages and losses of a step, on-policy and, if it has several updates, off-policy as well.

    Raises:
        InvalidLoss: a loss or its gradient is not finite.
    """
    credited = algorithm.advantages(_rows(algorithm, config, REWARDS[kind]))
    (batch,) = to_training_batches(credited, algorithm, updates=1, epochs=1, seed=0, step=1)
    mask, random = batch.loss_mask, torch.Generator().manual_seed(2)
    old = (torch.rand(mask.shape, generator=random) - 1) * mask if batch.old_logprobs is None else batch.old_logprobs
    log_ratios = {"where log_ratio is 0, as in the first update of a step": torch.zeros(mask.shape)}
    if config.updates_per_step > 1:
        log_ratios["where the policy has moved"] = 0.2 * (torch.rand(mask.shape, generator=random) - 0.5) * mask
    axes = [axis for axis in own_choices(algorithm) if axis in ("clip", "rollout_is")]
    for case, log_ratio in log_ratios.items():
        logprobs = (old + log_ratio).requires_grad_()
        loss = algorithm.loss(_outputs(algorithm, batch, logprobs), batch).loss
        if axes and not loss.isfinite():
            raise InvalidLoss(axes, f"the loss is {loss.item()} {case}")
        (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True) if loss.requires_grad else (None,)
        if axes and gradient is not None and not gradient[mask].isfinite().all():
            raise InvalidLoss(axes, f"the gradient of the loss is not finite {case}")
    return batch


def _outputs(algorithm: PolicyObjective, batch: TrainingBatch, logprobs: Tensor) -> ModelOutputs:
    """Return random outputs of the model's forward pass."""
    entropy = (1 - logprobs) * batch.loss_mask if "entropy" in algorithm.outputs else None
    values = None if batch.values is None else batch.values.clone().requires_grad_()
    return ModelOutputs(logprobs=logprobs, entropy=entropy, values=values)


def _warn_of_equal_rewards(algorithm: PolicyObjective, config: RunConfig) -> None:
    """Warn if the user's advantage fails for groups with equal rewards.

    Not if such groups are filtered out, or have only one completion.
    """
    for choice in own_choices(algorithm).get("advantage", ()):
        if algorithm.keeps_group is not None or config.rollout.completions_per_prompt == 1:
            return
        try:
            algorithm.advantages(_rows(algorithm, config, torch.ones_like))
        except Exception as error:  # whatever the user's code raises
            log.warning(
                "algorithm.advantage.function=%s fails if all rewards of a group are equal, which would end the run "
                "(%s): add a small eps to the divisor, or replace such groups "
                "(algorithm.group_filter=mixed_outcomes)",
                choice.shown, error,
            )  # fmt: skip


def _check_device(algorithm: PolicyObjective, batch: TrainingBatch, device: str) -> None:
    """Check that a loss does not mix CPU tensors with those of the GPU.

    The batch is moved to the meta device, on which operations check devices and shapes but compute nothing.

    Raises:
        ConfigError: it does.
    """
    meta_batch = map_fields(batch, lambda name, value: value.to("meta") if isinstance(value, Tensor) else value)
    try:
        algorithm.loss(_outputs(algorithm, meta_batch, meta_batch.loss_mask.float().requires_grad_()), meta_batch)
    except Exception as error:  # also a function that reads values, which meta tensors do not have
        message = str(error)
        mixed_devices = "device" in message and "cpu" in message and "cuda" not in message
        if not mixed_devices or isinstance(error, NotImplementedError):
            return
        problem = (
            f"it creates a tensor on the CPU, but its inputs are on {device}: create it like one of them "
            "(torch.zeros_like(inputs.advantages)), or with device=inputs.mask.device"
        )
        if (refusal := _refusal(algorithm, error, problem)) is not None:
            raise refusal from error


@contextmanager
def _eager() -> Iterator[None]:
    """Run functions with `torch.compile` eagerly within the context."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


# --------------------------------------------------------------------------------------------------------------------
# Error messages of a trial.


def _refusal(algorithm: PolicyObjective, error: Exception, problem: str | None = None) -> ConfigError | None:
    """Return the error to raise for a user's function, with file and line; None if the error is not from one.

    Args:
        problem: replaces the message of `error`.
    """
    own = own_choices(algorithm)
    if isinstance(error, InvalidLoss):
        names = ", ".join(f"algorithm.{axis}.function={part.shown}" for axis in error.axes for part in own[axis])
        place = _definition(own[error.axes[0]][0]) if len(error.axes) == 1 else ""
        return ConfigError(f"{names}: {error.problem}{place}. {_TRIED}")
    # The frame of `Custom.__call__` has the choice and its inputs; the frames below it are the user's code.
    frames = list(traceback.walk_tb(error.__traceback__))
    at = next((n for n, (frame, _) in enumerate(frames) if frame.f_code is Custom.__call__.__code__), None)
    if at is None:
        return None
    choice, inputs = frames[at][0].f_locals["self"], frames[at][0].f_locals["inputs"]
    axis = next(axis for axis, parts in own.items() if any(part is choice for part in parts))
    line = _failing_line(choice, frames[at + 1 :])
    problem = problem or _problem(error, inputs, axis, line)
    place = f" ({line})" if line else _definition(choice)
    return ConfigError(f"algorithm.{axis}.function={choice.shown}: {problem}{place}. {_TRIED}: {_described(inputs)}")


def _code(choice: Custom) -> Any:
    """Return the code object of a user's function or callable object; None if it has none."""
    function = inspect.unwrap(imported(choice.function))
    method = function if inspect.isroutine(function) else type(function).__call__
    return getattr(method, "__code__", None)


def _definition(choice: Custom) -> str:
    """Return file and line of a function's definition, in parentheses."""
    code = _code(choice)
    return "" if code is None else f" ({_shown(code.co_filename)}, line {code.co_firstlineno})"


def _failing_line(choice: Custom, frames: Sequence[tuple[FrameType, int]]) -> str:
    """Return the innermost line of the function's file in a traceback; "" if the function had returned."""
    code = _code(choice)
    summary = traceback.StackSummary.extract(iter(frames))
    lines = [line for line in summary if code is not None and line.filename == code.co_filename]
    if not lines:
        return ""
    last = lines[-1]
    return f"{_shown(last.filename)}, line {last.lineno}{f': {last.line}' if last.line else ''}"


def _shown(file: str) -> str:
    """Return a path relative to the current folder, if it is in it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _problem(error: Exception, inputs: Any, axis: str, line: str) -> str:
    """Return an error's message with a hint: a similar field name, or how to have an input computed."""
    kind, fields = type(inputs), list(inspect.signature(type(inputs)).parameters)
    if isinstance(error, AttributeError) and error.obj is inputs:
        return f"{kind.__name__} has no {error.name!r}; {did_you_mean(str(error.name), fields, 'valid:')}"
    message = str(error) if type(error) is ValueError and not line else f"{type(error).__name__}: {error}"
    absent = [name for name in re.findall(r"\.(\w+)", line) if name in fields and getattr(inputs, name) is None]
    if not absent or not re.search("NoneType|None", message):
        return message
    name = absent[0]
    hint = f"; add algorithm.{axis}.reads=[{name}] to compute it" if name in get_args(ModelInput) else ""
    return f"{message}: {name} is None in this run{hint}"


def _described(inputs: Any) -> str:
    """Return the tensors of the inputs by name, with shape and dtype."""
    values = {name: getattr(inputs, name) for name in inspect.signature(type(inputs)).parameters}
    parts = [
        f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, value in values.items()
        if isinstance(value, Tensor)
    ]
    absent = [name for name, value in values.items() if value is None]
    without = f"; {', '.join(absent)} are None" if absent else ""
    return f"{type(inputs).__name__} with {', '.join(parts)}{without}"
