"""A reward model from a config: `atomrl reward-model`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atomrl.algorithms.reward_model import reward_model
from atomrl.assembly import model_path
from atomrl.assembly.preferences import train_on_preferences
from atomrl.config import ConfigError, RunConfig
from atomrl.data.processor import read_system_prompt
from atomrl.models.loading import load_tokenizer, model_config_only
from atomrl.models.reward_model import Reader
from atomrl.objective.axis import check_name, checked_value, parameters_of
from atomrl.protocols import Algorithm, TrainingBackend
from atomrl.stages import RowBatch


def train_reward_model(config: RunConfig, resume: bool = False, allow_changes: bool = False) -> dict[str, Any]:
    """`atomrl reward-model`: a reward model from pairs of completions.

    It starts from a causal language model, or from a sequence classifier with its own tokenizer, and learns to read
    pairs as it will read rollouts (`models.reward_model`). Otherwise as `train`.
    """
    algorithm = algorithm_of(config)
    if config.model.lora is not None:
        raise ConfigError("model.lora: reward models are trained whole; leave it out")
    path, trusted = model_path(config), config.model.trust_remote_code
    tokenizer = load_tokenizer(config.model.tokenizer or path, trusted)
    reader = Reader(tokenizer, model_config_only(path, trusted), path)
    if read_system_prompt(config.data) is not None and not reader.reads_tokens:
        raise ConfigError(
            "data.system_prompt: as a reward, this model will read the conversations of the data without it; leave it "
            "out, or put it into the data"
        )

    def scores(trainer: TrainingBackend, rows: RowBatch) -> dict[str, Tensor]:
        found = trainer.annotate(rows, frozenset({"scores"})).scores
        assert found is not None
        return {"reward": found}

    return train_on_preferences(config, resume, allow_changes, algorithm=algorithm, scores=scores, reader=reader)


def algorithm_of(config: RunConfig) -> Algorithm:
    """`algorithm: {name: reward_model, margin: ..., centring: ...}`, of which the parameters may be left out.

    Raises:
        ConfigError: another algorithm.
        ValueError: an unknown parameter, or a value that it does not take.
    """
    given = config.algorithm
    if given.name != "reward_model":
        raise ConfigError(f"algorithm.name: `atomrl reward-model` needs reward_model, not {given.name}")
    known = parameters_of(reward_model)
    for name, value in given.axes.items():
        check_name("algorithm", name, list(known))
        checked_value(f"algorithm.{name}", value, known[name].annotation)
    return reward_model(**given.axes)
