"""`GRPOConfig`, `SFTConfig` and others: the arguments of TRL's configs, by their names there and with their meaning."""

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from atomrl.config import ConfigError, RunConfig, build_config, merge_trees
from atomrl.hints import did_you_mean
from atomrl.importers import trl_shared
from atomrl.importers.translation import Translation
from atomrl.importers.trl import TRAINERS
from atomrl.importers.trl_names import WITHOUT_MEANING

OF_TRAINER = frozenset({"processing_class", "model", "reward_funcs", "train_dataset", "eval_dataset", "peft_config"})
LOGGED = {
    "reward": "critic/score/mean", "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr", "entropy": "actor/entropy", "kl": "actor/kl_loss",
    "completions/mean_length": "response_length/mean", "completions/max_length": "response_length/max",
    "completions/min_length": "response_length/min", "completions/clipped_ratio": "response_length/clip_ratio",
    "step_time": "timing_s/step", "num_tokens": "perf/total_num_tokens",
}  # fmt: skip
"""TRL's names in `log_history` -> the metric here."""
LOSSES = {
    "loss": ("actor/pg_loss", "sft/nll_per_token", "preference/loss", "reward_model/loss"),
    "eval_loss": ("eval/nll_per_token",),
}
"""Likewise of losses, which each kind of run has by another name."""


class TRLConfig:
    """The arguments of one of TRL's configs (TRL 1.x), with its names, defaults and meaning: batch sizes are of one
    process, a step is an optimizer step, the learning rate decays linearly.

    A TRL script runs with its import changed. An argument that this package knows nothing of, or that decides what is
    trained and has no counterpart, is refused by name; one that changes only how TRL itself runs is named in a warning.

    Args:
        output_dir: the folder of the run. None: `runs/grpo` (`runs/sft`, ...), or `runs/grpo-2`, ...
        arguments: TRL's, as in `learning_rate=1e-6, max_completion_length=256`.

    Raises:
        ConfigError: an argument is unknown or has no counterpart, or a value is none that it takes.

    Example:
        >>> args = GRPOConfig(output_dir="out", learning_rate=1e-5, num_generations=4, per_device_train_batch_size=8)
        >>> args.learning_rate, args.to_tree()["rollout"]["prompts_per_step"]
        (1e-05, 2)
        >>> GRPOConfig(learning_rat=1e-5)
        Traceback (most recent call last):
            ...
        atomrl.config.base.ConfigError: GRPOConfig has no argument 'learning_rat'; did you mean 'learning_rate'?
    """

    output_dir: str | None
    kind: ClassVar[str] = "grpo"
    """Which of TRL's trainers it is for."""

    def __init__(self, output_dir: str | Path | None = None, **arguments: Any) -> None:
        given = dict(arguments) | ({} if output_dir is None else {"output_dir": str(output_dir)})
        object.__setattr__(self, "_given", given)
        self._translated()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._given or name in self._defaults:
            return self._given.get(name, self._defaults.get(name))
        if name in self._known:
            return None
        raise AttributeError(f"{self._called} has no argument {name!r}; {did_you_mean(name, sorted(self._known))}")

    def __setattr__(self, name: str, value: Any) -> None:
        before = dict(self._given)
        self._given[name] = value
        try:
            self._translated()
        except ConfigError:
            object.__setattr__(self, "_given", before)
            raise

    def __repr__(self) -> str:
        return f"{self._called}({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"

    @property
    def device(self) -> str:
        """`cpu` with `use_cpu`, else `auto`."""
        return "cpu" if self._given.get("use_cpu") else "auto"

    def to_tree(self) -> dict[str, Any]:
        """The arguments as a part of a config's tree, without model, data and rewards."""
        return self._translated()[0]

    def notes(self) -> list[str]:
        """Notes on arguments that have no effect here, or not quite TRL's."""
        return self._translated()[1]

    def _translated(self) -> tuple[dict[str, Any], list[str]]:
        given = dict(self._given)
        if given.get("push_to_hub"):
            raise ConfigError(
                f"{self._called}.push_to_hub: nothing is uploaded here; trainer.model.push_to_hub(...) does it"
            )
        t = Translation("TRL", given | {"model": "-"}, self._defaults)
        trl_shared.translate_shared(t, Path(self.kind))
        TRAINERS[self.kind].translate(t, int(os.environ.get("WORLD_SIZE", "1")))
        idle = sorted(name for name in given if name not in t.known and name in WITHOUT_MEANING)
        t.name_of([*WITHOUT_MEANING, "reward_weights"])
        object.__setattr__(self, "_known", t.known | self._defaults.keys())
        for name in given:
            if name not in t.known:
                if name in OF_TRAINER:
                    trainer = f"{TRAINERS[self.kind].called}Trainer"
                    raise ConfigError(f"{self._called} has no argument {name!r}: it is one of {trainer}")
                nearest = did_you_mean(name, sorted(self._known))
                raise ConfigError(f"{self._called} has no argument {name!r}; {nearest}")
        tree = {key: value for key, value in t.tree.items() if key not in ("run_name", "reward")}
        tree["data"] = {key: value for key, value in tree["data"].items() if key not in ("train", "answer_field")}
        tree["model"] = {key: value for key, value in tree["model"].items() if key != "path"}
        tree["model"]["device"] = self.device
        if "bf16" not in given:
            tree["model"]["dtype"] = "auto"
        if given.get("use_vllm") and find_spec("vllm") is not None:
            tree["rollout"]["engine"] = "vllm"
        checked: RunConfig = build_config(
            merge_trees(tree, {"run_name": "-", "model": {"path": "-"}, "data": {"train": "-"}}), self._called
        )
        assert (checked.kind == "rl") == TRAINERS[self.kind].draws
        notes = [f"{', '.join(idle)}: no effect here"] if idle else []
        if given.get("use_vllm") and tree["rollout"]["engine"] != "vllm":
            notes.append("use_vllm: vLLM is not installed (pip install 'atomrl[vllm]'); AtomRL's own engine draws")
        return tree, [*notes, *t.left]

    @property
    def _defaults(self) -> dict[str, Any]:
        return {**trl_shared.DEFAULTS, **TRAINERS[self.kind].defaults}

    @property
    def _called(self) -> str:
        return type(self).__name__


class GRPOConfig(TRLConfig):
    """The arguments of `trl.GRPOConfig`; see `TRLConfig`."""


class RLOOConfig(TRLConfig):
    """The arguments of `trl.RLOOConfig`; see `TRLConfig`."""

    kind = "rloo"


class SFTConfig(TRLConfig):
    """The arguments of `trl.SFTConfig`; see `TRLConfig`."""

    kind = "sft"


class DPOConfig(TRLConfig):
    """The arguments of `trl.DPOConfig`; see `TRLConfig`."""

    kind = "dpo"


class RewardConfig(TRLConfig):
    """The arguments of `trl.RewardConfig`; see `TRLConfig`."""

    kind = "reward"


def in_trl_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics with TRL's names beside those here.

    Example:
        >>> in_trl_names({"step": 1, "critic/score/mean": 0.5, "reward/brevity/mean": -1.0})["reward"]
        0.5
    """
    return {**row, **dict(_named(row))}


def _named(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for theirs, ours in LOGGED.items():
        if ours in row:
            yield theirs, row[ours]
    for theirs, metrics in LOSSES.items():
        yield from ((theirs, row[ours]) for ours in metrics if ours in row)
    for name, value in row.items():
        if name.startswith("reward/") and name.endswith("/mean"):
            yield f"rewards/{name.removeprefix('reward/')}", value
    if (mixed := row.get("by_group/frac_mixed")) is not None:
        yield "frac_reward_zero_std", 1 - mixed
