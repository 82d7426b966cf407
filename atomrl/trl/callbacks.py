"""Callbacks of transformers and TRL: their events are called between the steps of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl

from atomrl.config import ConfigError


class LogCompletionsCallback(TrainerCallback):
    """TRL's callback that logs completions; a run's folder has them all (`atomrl rollouts`), so it does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class RichProgressCallback(TrainerCallback):
    """TRL's progress bar; a run prints its steps, so it does nothing."""


def split_callbacks(callbacks: Sequence[Any]) -> tuple[tuple[Callable[..., None], ...], "Events"]:
    """Split callbacks into functions `f(step, metrics)` and `TrainerCallback`s.

    Raises:
        ConfigError: one is neither.
    """
    made = [one() if isinstance(one, type) and issubclass(one, TrainerCallback) else one for one in callbacks]
    events = [one for one in made if isinstance(one, TrainerCallback)]
    functions = tuple(one for one in made if not isinstance(one, TrainerCallback))
    if not all(callable(one) for one in functions):
        raise ConfigError("callbacks: each must be a function f(step, metrics) or a transformers.TrainerCallback")
    return functions, Events(events)


class Events:
    """Calls the events of `TrainerCallback`s: begin and end of the run and of each step, logs, evaluations."""

    def __init__(self, callbacks: Sequence[TrainerCallback]) -> None:
        self.callbacks, self.control, self._evaluations = list(callbacks), TrainerControl(), 0

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def call(self, event: str, trainer: Any, **arguments: Any) -> None:
        """Call an event of all callbacks."""
        tokenizer = trainer.tokenizer
        for callback in self.callbacks:
            given = {"model": trainer._model, "processing_class": tokenizer, "tokenizer": tokenizer, **arguments}
            self.control = getattr(callback, event)(trainer.args, trainer.state, self.control, **given) or self.control

    def after_step(self, trainer: Any, row: Mapping[str, Any]) -> bool:
        """Call the events at the end of a step, whose row of metrics is given; returns whether the run ends."""
        self.call("on_step_end", trainer)
        self.call("on_log", trainer, logs=row)
        rows = [row for row in trainer.state.log_history if any(name.startswith("eval") for name in row)]
        for evaluation in rows[self._evaluations :]:
            self.call("on_evaluate", trainer, metrics=evaluation)
        self._evaluations = len(rows)
        if not self.control.should_training_stop and trainer.state.global_step < trainer.state.max_steps:
            self.call("on_step_begin", trainer)
        return self.control.should_training_stop
