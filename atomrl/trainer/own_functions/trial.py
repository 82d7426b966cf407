"""A trial of the user's functions of an objective before a run loads a model.

`check_own_functions` calls them once with random numbers. A mistake in one (a field that does not exist, a wrong shape,
no gradient) would otherwise show in the first step, after models are loaded and completions are sampled. The random
numbers may be invalid inputs for a function, so it is refused only if it fails with every kind of rewards in `REWARDS`,
and never for an error that depends on where it runs (a GPU kernel, a process group).
"""

import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import torch
from torch import Tensor

from atomrl.batches import RowBatch, TrainingBatch, map_fields
from atomrl.common.errors import did_you_mean
from atomrl.config import ConfigError, RunConfig
from atomrl.data.rows import to_training_batches
from atomrl.objectives import PolicyObjective
from atomrl.objectives.auxiliary import Distillation
from atomrl.objectives.choice import Custom, imported
from atomrl.objectives.objective import as_tuple
from atomrl.protocols import Algorithm, ModelInput, ModelOutputs
from atomrl.trainer.own_functions.random_rows import MAX_ROWS, MAX_TOKENS, REWARDS, random_rows, with_inputs

log = logging.getLogger(__name__)


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
    old = batch.rollout.logprobs if algorithm.old_policy else batch.old_logprobs
    old = (torch.rand(mask.shape, generator=random) - 1) * mask if old is None else old
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
