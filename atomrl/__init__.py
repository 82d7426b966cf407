"""AtomRL: reinforcement learning for language models, every algorithm a page of atoms."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from atomrl.config import RunConfig
    from atomrl.tracking.reading import Run

# MKL then splits no sum over threads, so products are bit-identical with any number of them. It reads this once, at its
# first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if os.environ.get("ATOMRL_RUN"):  # a process of `atomrl run`: the script imports trl
    from atomrl.redirect import install

    install()

__version__ = "0.1.0"
__all__ = ["load_run", "train"]


def train(
    config: str | Path | RunConfig | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    reward: Callable[..., Any] | str | None = None,
    advantage: Callable[..., Any] | str | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    callbacks: Sequence[Callable[[int, Mapping[str, float]], None]] = (),
    resume: bool = False,
) -> dict[str, Any]:
    """Train a model: reinforcement learning, supervised, preferences, reward model or pretraining.

    Functions may be defined in the script, also as lambdas and closures. The run's `config.yaml` has only their names,
    so a script that resumes the run has to pass them again.

    Args:
        config: a YAML file, a run's folder, a `RunConfig`, or a dict with the content of a file.
        overrides: `key=value`, as on the command line.
        reward: replaces `reward.functions`: `f(prompts, completions, **columns) -> list` (docs/guides/rewards.md), or
            the path of one, as in a config (`./my_rewards.py:f`).
        advantage: replaces `algorithm.advantage`: `f(inputs: AdvantageInputs) -> Tensor`, [B] or [B, T], or the path of
            one.
        rewards: functions of this process, by their names in `reward.functions`.
        callbacks: called after each step with its number and metrics.
        resume: continue from the run's newest checkpoint.

    Returns:
        The run's summary.

    Raises:
        ConfigError, DataError, ValueError: invalid input; the message names the place and the remedy.

    Example:
        >>> import atomrl
        >>> atomrl.train("configs/quickstart.yaml", ["train.steps=10"])["model"]  # doctest: +SKIP
        'runs/quickstart/model'
        >>> from atomrl.atoms.advantages import leave_one_out_baseline
        >>> def mine(inputs):
        ...     return leave_one_out_baseline(inputs.rewards, inputs.group_ids)
        >>> atomrl.train("configs/quickstart.yaml", ["run_name=mine"], advantage=mine)  # doctest: +SKIP
    """
    from functools import partial

    from atomrl.config import load_config
    from atomrl.trainer import prepare_run, run_to_end
    from atomrl.trainer.own_functions.passed import check_functions, with_functions

    check_functions(reward, advantage, rewards, callbacks)
    loaded = load_config(config, overrides)
    loaded, by_name = with_functions(loaded, reward, advantage)
    prepare = partial(prepare_run, loaded, {**(rewards or {}), **by_name} or None)
    return run_to_end(prepare(), prepare, resume, callbacks=callbacks)


def load_run(path: str | Path) -> Run:
    """Read the folder of a run: finished, running or killed, written by this or another version.

    Raises:
        ReadError: the folder is not that of a run; the message lists runs below it.

    Example:
        >>> import atomrl
        >>> run = atomrl.load_run("runs/quickstart")  # doctest: +SKIP
        >>> run.state.status, run.metrics["critic/score/mean"][-1]  # doctest: +SKIP
        ('finished', 0.9921875)
    """
    from atomrl.tracking.reading import load_run as load

    return load(path)
