"""Callbacks of transformers and TRL: their events are called between the steps of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl

from atomrl.config import ConfigError
from atomrl.trl.arguments import in_trl_names


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

    def call(self, event: str, trainer: Any, step: int | None = None, **arguments: Any) -> None:
        """Call an event of all callbacks."""
        state = trainer.state
        if step is not None:
            state.global_step = step
        tokenizer = trainer.tokenizer
        for callback in self.callbacks:
            given = {"model": trainer._model, "processing_class": tokenizer, "tokenizer": tokenizer, **arguments}
            self.control = getattr(callback, event)(trainer.args, state, self.control, **given) or self.control

    def after_step(self, trainer: Any) -> Callable[[int, Mapping[str, float]], bool]:
        """Return the function that a run calls after each step."""

        def called(step: int, metrics: Mapping[str, float]) -> bool:
            self.call("on_step_end", trainer, step)
            self.call("on_log", trainer, step, logs=in_trl_names({"step": step, **metrics}))
            rows = [row for row in trainer.state.log_history if any(name.startswith("eval") for name in row)]
            for row in rows[self._evaluations :]:
                self.call("on_evaluate", trainer, step, metrics=row)
            self._evaluations = len(rows)
            if not self.control.should_training_stop:
                self.call("on_step_begin", trainer, step + 1)
            return self.control.should_training_stop

        return called
