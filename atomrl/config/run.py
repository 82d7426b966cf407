"""`RunConfig`, the config of a run: validation across sections, and error messages that name the key to use.

A config comes from one YAML file and `key=value` overrides (`atomrl/config/loading.py`). It is immutable once loaded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from atomrl.algorithms import objective_of
from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.algorithms.sft import PRETRAINING, SFT
from atomrl.common.errors import nearest
from atomrl.common.secrets import mask_secrets, secrets_of
from atomrl.config import schema
from atomrl.config.schema import (
    BackendConfig,
    ConfigError,
    EnvironmentConfig,
    ModelConfig,
    Section,
    ToolConfig,
    TrackingConfig,
)
from atomrl.objectives import PolicyObjective, PreferenceObjective, Setting
from atomrl.objectives.base import Choice, Objective

# --------------------------------------------------------------------------------------------------------------------
# Suggestions for unknown keys: the nearest valid key, or the key for a name of another library


@cache
def foreign_table() -> dict[str, Any]:
    """Read `foreign_names.yaml`: `sections` of verl, and `keys` with their names in other libraries."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("foreign_names.yaml").read_text(encoding="utf-8"))
    return table


def foreign_names() -> dict[str, tuple[str, str]]:
    """Map names of TRL, verl and OpenRLHF to (key here, note on a different unit or "")."""
    return {name: key.partition(" ")[::2] for key, names in foreign_table()["keys"].items() for name in names}


def suggestion(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """Suggest a valid key for an unknown one; None if no key is similar.

    Args:
        path: parts of the unknown key.
        keys: all valid dotted keys.

    Example:
        >>> suggestion(["data", "train_batch_size"], ["rollout.prompts_per_step", "data.train_size"])
        "did you mean 'rollout.prompts_per_step' (prompts in a step, as in verl; OpenRLHF's is train.rows_per_update)?"
        >>> suggestion(["critic", "lr"], ["train.learning_rate", "critic.learning_rate"])
        "did you mean 'critic.learning_rate'?"
        >>> suggestion(["train", "stepz"], ["train.steps", "eval.every_steps"])
        "did you mean 'train.steps'?"
        >>> suggestion(["reward", "functions", "0", "max_words"], ["reward.functions.args", "sft.gpt.max_tokens"])
        "did you mean 'reward.functions.0.args.max_words'?"
    """
    sections, names = foreign_table()["sections"], foreign_names()
    if len(path) == 1 and path[0] in sections:
        return str(sections[path[0]])
    *parents, leaf = path
    takes_args = ".".join([*(part for part in parents if not part.isdigit()), "args"]) in keys
    # A name of another library, exact or (if no key of the same section is similar) misspelt.
    sibling = _sibling_key(path, keys, cutoff=0.8)
    foreign = leaf if leaf in names or sibling or takes_args else nearest(leaf, names, cutoff=0.8)
    if foreign in names:
        key, unit = names[foreign]
        own_leaf = key.rpartition(".")[2]
        in_section = (".".join([*path[:depth], own_leaf]) for depth in range(len(path) - 1, 0, -1))
        key = next((own for own in in_section if own in keys), key)  # the critic has a learning rate too
        return f"did you mean {key!r}{f' {unit}' if unit else ''}?"
    near = nearest_key(path, keys)
    if takes_args and (near is None or near.rpartition(".")[0] != ".".join(parents)):
        near = ".".join([*parents, "args", leaf])  # an argument of the function that is named there
    return None if near is None else f"did you mean {near!r}?"


def known_elsewhere(path: Sequence[str], value: Any) -> list[list[str]]:
    """List the keys below an unknown key that are names of another library.

    Example:
        >>> known_elsewhere(["critic", "optim"], {"lr": 1e-5, "zzz": {"lr": 1e-6}})
        [['critic', 'optim', 'lr'], ['critic', 'optim', 'zzz', 'lr']]
    """
    if not isinstance(value, Mapping):
        return [[*path]] if path[-1] in foreign_names() else []
    return [name for key, inner in value.items() for name in known_elsewhere([*path, str(key)], inner)]


def nearest_key(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """Return the valid key most similar to `path`: in the same section first, then by its last part in any section."""
    sections = {key.rpartition(".")[0] for key in keys} if len(path) > 1 else set()  # a section is no key of another
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys) if key not in sections}  # the first section counts
    elsewhere = leaves.get(nearest(path[-1], leaves, cutoff=0.8) or "")
    sibling = _sibling_key(path, keys, cutoff=0.8)
    return sibling or elsewhere or _sibling_key(path, keys, cutoff=0.65 if sections else 0.7)


def _sibling_key(path: Sequence[str], keys: Sequence[str], cutoff: float) -> str | None:
    """Return the key of the same section whose name is similar to the last part of `path`, or begins like it."""
    section = ".".join(part for part in path[:-1] if not part.isdigit())  # indices of lists are in no key
    names = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
    first_words = {name.partition("_")[0]: name for name in reversed(names)}
    near = (
        nearest(path[-1], names, cutoff)
        or next((name for name in names if len(path[-1]) > 2 and name.startswith(path[-1])), None)
        or first_words.get(nearest(path[-1], first_words, cutoff=0.8) or "")
    )
    return ".".join([*path[:-1], near]) if near else None


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Replace keys in an error message by the names under which the user gave the values.

    Example:
        >>> renamed("train.steps: must be positive; see train.steps_", {"train.steps": "max_steps"})
        'max_steps: must be positive; see train.steps_'
    """
    keys = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{keys})(?!\w)", lambda match: names[match.group()], message)


# --------------------------------------------------------------------------------------------------------------------
# The config

Kind = Literal["rl", "sft", "preference", "reward-model", "pretrain"]
"""Kind of run that a config describes."""
TOOLS = "tools"
"""Built-in environment that the section `tools` selects."""
ROWS_PER_UPDATE = 64
"""Default of `train.rows_per_update` for runs without rollouts."""


def _to_objective(value: Any) -> Any:
    """Convert `{name: grpo, clip: {high: 0.28}}` into an objective: the axes of the name, with the changes."""
    if isinstance(value, PolicyObjective | PreferenceObjective | RewardModelObjective):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"algorithm takes a mapping with a name, as in {{name: dapo}}, got {value!r}")
    axes = {key: item for key, item in value.items() if key != "name"}
    valid = known_keys()
    foreign = [str(key) for key in axes if key in foreign_names() and f"algorithm.{key}" not in valid]
    if foreign:
        answers = [f"unknown key 'algorithm.{key}'; {suggestion(['algorithm', key], valid)}" for key in foreign]
        raise ValueError("\n  ".join(answers))
    return objective_of(str(value.get("name", "grpo")), axes)


class RunConfig(Section):
    """The config of a run: all sections, and the rules between them."""

    run_name: str = Field(pattern=r"^[^/\\.][^/\\]*$")
    """Name of the run and of its folder in `output_dir`: no slashes, and no leading dot."""
    output_dir: str = "runs"
    seed: int = Field(0, ge=0, lt=2**63)
    model: ModelConfig = ModelConfig()
    data: schema.DataConfig
    rollout: schema.RolloutConfig = schema.RolloutConfig()
    reward: schema.RewardConfig = schema.RewardConfig()
    algorithm: Annotated[
        PolicyObjective | PreferenceObjective | RewardModelObjective, BeforeValidator(_to_objective)
    ] = objective_of("grpo", {})
    """Name of an algorithm and changes of its axes; without effect in `sft` and `pretrain`."""
    train: schema.TrainConfig = schema.TrainConfig()
    eval: schema.EvalConfig = schema.EvalConfig()
    checkpoint: schema.CheckpointConfig = schema.CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    sft: schema.SftConfig | None = None
    pretrain: schema.PretrainConfig | None = None
    preference: schema.PreferenceConfig | None = None
    critic: schema.CriticConfig = schema.CriticConfig()
    teacher: schema.TeacherConfig | None = None
    cluster: schema.ClusterConfig | None = None
    backend: BackendConfig | None = Field(None, discriminator="type")
    """Distributed training back end; None: train in one process."""
    asynchronous: schema.AsynchronousConfig | None = None
    pool: schema.PoolConfig = schema.PoolConfig()
    environment: EnvironmentConfig | None = None
    tools: tuple[ToolConfig, ...] = ()
    """Tools that the model may call; the built-in environment `tools` runs them."""

    @model_validator(mode="before")
    @classmethod
    def _environment_defaults(cls, tree: Any) -> Any:
        """Set defaults of environments: tools imply the environment `tools`, and an environment implies its outcome as
        the reward unless the config names rewards."""
        if isinstance(tree, Mapping) and tree.get("tools"):
            environment = tree.get("environment") or {}
            if isinstance(environment, Mapping):
                if environment.get("function", TOOLS) != TOOLS:
                    raise ValueError(f"tools are answered by environment.function={TOOLS}; remove one of the two")
                tree = {**tree, "environment": {**environment, "function": TOOLS}}
        if isinstance(tree, Mapping) and tree.get("environment"):
            reward = tree.get("reward") or {}
            if isinstance(reward, Mapping) and not {"functions", "by_data_source"} & reward.keys():
                return {**tree, "reward": {**reward, "functions": ["environment"]}}
        return tree

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        """Check the rules between sections, so that a run fails here and not after minutes."""
        rollout, rows = self.rollout, self.train.rows_per_update
        total = rollout.prompts_per_step * rollout.completions_per_prompt
        kinds = [name for name in ("sft", "pretrain", "preference") if getattr(self, name) is not None]
        if self.preference is not None and self.kind == "rl":
            raise ValueError(
                f"preference: algorithm.name={self.algorithm.name} is trained on rollouts; remove the section, or take "
                "an algorithm of preferences (dpo, kto, ..., reward_model)"
            )
        if rows is not None and total % rows and self.kind == "rl":  # other kinds have no rollouts
            raise ValueError(
                f"train.rows_per_update={rows} does not divide the {total} rows of a step "
                f"(rollout.prompts_per_step={rollout.prompts_per_step} x "
                f"rollout.completions_per_prompt={rollout.completions_per_prompt})"
            )
        if len(kinds) > 1:
            raise ValueError(f"{' and '.join(kinds)} are {len(kinds)} kinds of run; give one")
        if (self.model.path is None) == (self.gpt is None):
            raise ValueError(
                "model.path: is required (a folder or a hub name)"
                if self.model.path is None
                else f"model.path and {'sft' if self.sft else 'pretrain'}.gpt are two places to start from; give one"
            )
        if self.asynchronous and self.kind != "rl":
            raise ValueError("asynchronous: this kind of run draws no rollouts; remove the section")
        if self.asynchronous and rollout.source == "pool":
            raise ValueError(
                "asynchronous: with rollout.source=pool other processes sample; pool.max_staleness limits the lag"
            )
        if self.asynchronous and self.cluster and self.cluster.placement == "colocated":
            raise ValueError(
                "asynchronous: with cluster.placement=colocated the engines sleep during updates; use split"
            )
        self._check_engine_gpus()
        if rollout.server and self.cluster and self.cluster.replicas > 1:
            raise ValueError("rollout.server: one engine spreads the groups over all servers; take cluster.replicas=1")
        least = self.asynchronous.min_completions if self.asynchronous else None
        if least is not None and least > rollout.completions_per_prompt:
            raise ValueError(
                f"asynchronous.min_completions={least} is larger than rollout.completions_per_prompt="
                f"{rollout.completions_per_prompt}"
            )
        self._check_environment()
        if rollout.min_completion_tokens > (self.eval.max_completion_tokens or rollout.max_completion_tokens):
            raise ValueError(
                f"rollout.min_completion_tokens={rollout.min_completion_tokens} applies to evaluation too, and is "
                f"larger than eval.max_completion_tokens={self.eval.max_completion_tokens}"
            )
        return self

    def _check_engine_gpus(self) -> None:
        """Check that an engine in an actor has as many GPUs as `rollout.tensor_parallel`."""
        if (cluster := self.cluster) is None:
            return
        engine, size = cluster.resources.get("rollout", schema.ResourceConfig()), self.rollout.tensor_parallel
        if (gpus := engine.num_gpus or 0) > 1 and gpus != size:
            raise ValueError(
                f"cluster.resources.rollout.num_gpus={gpus:g}: an engine uses rollout.tensor_parallel={size} of "
                "them, and the others would idle; cluster.replicas sets the number of engines"
            )
        if size > 1 and (cluster.placement == "colocated" or 0 < gpus < size):
            raise ValueError(
                f"rollout.tensor_parallel={size}: an engine takes as many whole GPUs, and here it shares one: set "
                "cluster.placement=split, or remove the section cluster; the engine then runs in the trainer's process "
                "and sleeps during updates"
            )

    def _check_environment(self) -> None:
        """Check that environment, kind of run, rewards and lengths fit together."""
        rewards = [*self.reward.functions, *self.reward.by_data_source.values()]
        if self.environment is None:
            if self.kind == "rl" and any(reward.function == "environment" for reward in rewards):
                raise ValueError("reward.functions: environment is the outcome of episodes; there is no environment")
        elif self.kind != "rl":
            raise ValueError("environment: this kind of run draws no rollouts; remove the section")
        elif self.rollout.min_completion_tokens:
            raise ValueError("rollout.min_completion_tokens: turns of an episode have no minimum length; remove it")
        if self.environment is not None and self.environment.when_full == "drop_oldest":
            self._check_dropping(self.environment.max_turn_tokens)

    def _check_dropping(self, max_turn_tokens: int | None) -> None:
        """Check `when_full=drop_oldest`: a turn fits into the context that dropping frees, and no axis of the algorithm
        needs a completion in one row, because it then has several."""
        key, limit = "environment.when_full=drop_oldest", self.rollout.max_completion_tokens
        limit = min(limit, self.eval.max_completion_tokens or limit)
        if max_turn_tokens is None or 2 * max_turn_tokens > limit:
            raise ValueError(
                f"{key} needs environment.max_turn_tokens of at most {limit // 2}: dropping turns frees half of "
                f"max_completion_tokens ({limit})"
            )
        if not isinstance(self.algorithm, PolicyObjective):
            raise ValueError(
                f"{key}: algorithm.name={self.algorithm.name} compares completions of one row each; take end"
            )
        for axis, parts in self.algorithm.used_axes().items():
            for part in parts:
                if part.by_completion:
                    raise ValueError(
                        f"{key}: algorithm.{axis}={part.type} takes all tokens of a completion together, which has "
                        "several rows where turns are dropped; take one by token, or end"
                    )

    @property
    def gpt(self) -> schema.GptConfig | None:
        """Shape of the new model that training starts from, instead of `model.path`."""
        supervised = self.sft or self.pretrain
        return supervised.gpt if supervised else None

    @property
    def kind(self) -> Kind:
        """Kind of run: by the section `sft` or `pretrain`, else by the algorithm."""
        if self.sft is not None:
            return "sft"
        if self.pretrain is not None:
            return "pretrain"
        if isinstance(self.algorithm, RewardModelObjective):
            return "reward-model"
        return "preference" if isinstance(self.algorithm, PreferenceObjective) and not self.algorithm.online else "rl"

    @property
    def unused_sections(self) -> tuple[str, ...]:
        """Sections that this kind of run does not read."""
        if self.kind == "rl":
            return ("sft", "pretrain", "preference")
        unused = ["reward", "critic", "teacher", "asynchronous", "pool", "environment", "tools"]
        samples = self.pretrain is not None and self.pretrain.sample_every_steps > 0
        if not samples or self.rollout == schema.RolloutConfig():
            unused.append("rollout")
        if self.kind in ("sft", "pretrain"):
            unused += ["algorithm", "preference"]
        return tuple(unused)

    @property
    def items_per_step(self) -> int:
        """Items that a step takes from the data: prompts in RL, rows, pairs or windows otherwise."""
        if self.kind == "rl":
            return self.rollout.prompts_per_step
        return self.train.rows_per_update or ROWS_PER_UPDATE

    @property
    def rows_per_update(self) -> int:
        """Batch size of an optimizer step: completions in RL, rows, pairs or windows otherwise."""
        if self.kind != "rl":
            return self.items_per_step
        return self.train.rows_per_update or self.rollout.prompts_per_step * self.rollout.completions_per_prompt

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps per pass over the rows of a step: 1, unless an RL run sets `train.rows_per_update`."""
        rows = self.rollout.prompts_per_step * self.rollout.completions_per_prompt
        return rows // (self.train.rows_per_update or rows) if self.kind == "rl" else 1

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per step, in all passes over its rows (`train.epochs_per_step`)."""
        return self.updates_per_epoch * self.train.epochs_per_step if self.kind == "rl" else 1

    def to_tree(self, secrets: bool = False) -> dict[str, Any]:
        """Convert to a plain dict with the keys of a file; `build_config` restores the config from it.

        Args:
            secrets: keep secrets, to build another config. Never for a tree that is written, sent or shown.
        """
        tree = self.model_dump(mode="json", by_alias=True)
        return tree if secrets else dict(mask_secrets(tree))

    @property
    def secrets(self) -> frozenset[str]:
        """Secrets that the config contains literally, not as the name of an environment variable."""
        return frozenset(secrets_of(self.to_tree(secrets=True), self.to_tree()))

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.output_dir) / self.run_name

    @property
    def pool_file(self) -> Path:
        """The file of the run's rollout pool."""
        folder = self.pool.folder or Path(self.output_dir) / "pools"
        return Path(folder) / f"{self.pool.name or self.run_name}.sqlite"


def build_config(tree: Mapping[str, Any], source: str = "config") -> RunConfig:
    """Build and validate a config from a dict of sections.

    Args:
        source: name of the file, for messages.

    Raises:
        ConfigError: lists all problems, one per line, each with its key and, for an unknown key, the nearest valid one.
    """
    try:
        return RunConfig.model_validate(dict(tree))
    except ValidationError as error:
        raise config_error(error, source) from None


def config_error(error: ValidationError, source: str) -> ConfigError:
    """Convert a pydantic error into a ConfigError, with one problem per line."""
    return ConfigError("\n  ".join([f"{source}:", *map(_problem, error.errors())]))


def _problem(item: Mapping[str, Any]) -> str:
    """Format one problem of a pydantic error, with its dotted key first."""
    path = [str(part) for part in item["loc"]]
    if path[:1] == ["backend"] and len(path) > 2:
        del path[1]  # the tag of the union, which is no key
    if path[-1:] == ["[key]"]:  # pydantic's mark for an invalid key of a dict
        del path[-1]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        valid = known_keys()
        if path[:2] == ["cluster", "resources"]:  # the part after it is a role, so its keys are not in `known_keys`
            valid = [".".join([*path[:3], name]) for name in schema.ResourceConfig.model_fields]
        inner = known_elsewhere(path, item["input"]) if isinstance(item["input"], Mapping) else []
        unknown = [path] if not inner or len(path) == 1 else []
        return "\n  ".join(_unknown(parts, valid) for parts in [*unknown, *inner])
    if item["type"] == "union_tag_invalid":
        return f"{key}.type: {item['ctx']['tag']!r} is none of {item['ctx']['expected_tags']}"
    if item["type"] == "union_tag_not_found":
        unknown = [[key, str(name)] for name in item["input"] if f"{key}.{name}" not in known_keys()]
        return "\n  ".join([f"{key}.type: is required", *(_unknown(parts, known_keys()) for parts in unknown)])
    if item["type"] == "missing":
        return f"{key}: is required"
    if item["type"] == "model_type":
        return f"{key}: takes a mapping of keys (got {_shown(path, item['input'])!r})"
    message = str(item["msg"]).removeprefix("Value error, ")
    if not key or item["type"] == "value_error":
        return message
    return f"{key}: {message} (got {_shown(path, item['input'])!r})"


def _shown(path: list[str], value: Any) -> Any:
    """Return a value without secrets, as a message may show it."""
    if path[0] == "tools" and "env" in path:
        return type(value).__name__
    if path[0] in ("tools", "reward", "environment") and isinstance(value, str | list):
        return mask_secrets({"mcp": value})["mcp"]
    return mask_secrets(value, path[-1])


def _unknown(path: list[str], valid: list[str]) -> str:
    """Format the error of an unknown key."""
    if path[0] == "backend" and (key := ".".join(path)) in valid:
        fields = [kind.model_fields for kind in get_args(BackendConfig)]
        kinds = [get_args(own["type"].annotation)[0] for own in fields if path[1] in own]
        return f"unknown key {key!r} of this backend.type; it is of {' and '.join(kinds)}"
    hint = suggestion(path, valid)
    return f"unknown key {'.'.join(path)!r}" + (f"; {hint}" if hint else "")


def known_keys(section: type[BaseModel] | None = None, prefix: str = "") -> list[str]:
    """List all dotted keys of a config, each section before its keys."""
    keys = [f"{prefix}type"] if section is not None and issubclass(section, Choice) else []
    for name, info in (section or RunConfig).model_fields.items():
        keys.append(prefix + name)
        parts = () if get_origin(info.annotation) is dict else get_args(info.annotation)  # the user names keys of dicts
        for kind in (info.annotation, *parts):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))  # kinds of a section share some


def dump_config(config: RunConfig) -> str:
    """Dump the resolved config as YAML, without secrets; loading it gives the same config."""
    return yaml.safe_dump(config.to_tree(), sort_keys=False, allow_unicode=True)


# --------------------------------------------------------------------------------------------------------------------
# The objective, for `atomrl explain` and the web interface


def objective_in(config: RunConfig) -> Objective:
    """Return the objective of a run, by the kind of run."""
    if config.kind in ("sft", "pretrain"):
        return SFT if config.kind == "sft" else PRETRAINING
    return config.algorithm.resolved(max_completion_tokens=config.rollout.max_completion_tokens)


def setting_in(config: RunConfig, objective: Objective) -> Setting:
    """Return the settings of a config that decide which parts of its objective have an effect."""
    names = {field.name for field in fields(Setting)}
    weights = [item.weight for item in config.reward.functions if item.weight]
    return Setting(
        axes=objective.axes,
        updates_per_step=config.updates_per_step,
        reward_parts=len(weights) + bool(config.reward.by_data_source),
        **config.rollout.model_dump(include=names),
    )
