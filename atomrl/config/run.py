"""The configuration of a run: one YAML file, then `key=value` overrides. Unknown keys are errors with the nearest one.

Nothing is written into a config after it is loaded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.algorithms.sft import PRETRAINING, SFT
from atomrl.algorithms.table import objective_of
from atomrl.common.errors import nearest
from atomrl.common.secrets import left_out, secrets_of
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
from atomrl.objectives.base import Objective
from atomrl.objectives.choice import Choice

# --------------------------------------------------------------------------------------------------------------------
# What an unknown key may mean: the nearest key, or the one that other libraries' users know by that name.


@cache
def foreign_table() -> dict[str, Any]:
    """What `foreign_names.yaml` says: `sections` of verl's, and `keys` with their names elsewhere."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("foreign_names.yaml").read_text(encoding="utf-8"))
    return table


def foreign_names() -> dict[str, tuple[str, str]]:
    """A name in TRL, verl or OpenRLHF -> the key here, and what it counts where that is not plain."""
    return {name: key.partition(" ")[::2] for key, names in foreign_table()["keys"].items() for name in names}


def suggestion(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """What to say of an unknown key.

    Args:
        path: its parts.
        keys: all valid keys with dots.

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
    beside = _key_beside(path, keys, cutoff=0.8)
    foreign = leaf if leaf in names or beside or takes_args else nearest(leaf, names, cutoff=0.8)
    if foreign in names:
        key, unit = names[foreign]
        own_leaf = key.rpartition(".")[2]
        beneath = (".".join([*path[:depth], own_leaf]) for depth in range(len(path) - 1, 0, -1))
        key = next((own for own in beneath if own in keys), key)  # the critic has a learning rate too
        return f"did you mean {key!r}{f' {unit}' if unit else ''}?"
    near = nearest_key(path, keys)
    if takes_args and (near is None or near.rpartition(".")[0] != ".".join(parents)):
        near = ".".join([*parents, "args", leaf])  # of the function that is named there
    return None if near is None else f"did you mean {near!r}?"


def known_elsewhere(path: Sequence[str], value: Any) -> list[list[str]]:
    """The keys in what an unknown key was given that other libraries' users know by name.

    Example:
        >>> known_elsewhere(["critic", "optim"], {"lr": 1e-5, "zzz": {"lr": 1e-6}})
        [['critic', 'optim', 'lr'], ['critic', 'optim', 'zzz', 'lr']]
    """
    if not isinstance(value, Mapping):
        return [[*path]] if path[-1] in foreign_names() else []
    return [found for key, inner in value.items() for found in known_elsewhere([*path, str(key)], inner)]


def nearest_key(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """The valid key most like `path`: in the same section first, then by its last part anywhere."""
    parts = {key.rpartition(".")[0] for key in keys} if len(path) > 1 else set()  # a section is no key of another
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys) if key not in parts}  # the first section counts
    elsewhere = leaves.get(nearest(path[-1], leaves, cutoff=0.8) or "")
    return _key_beside(path, keys, cutoff=0.8) or elsewhere or _key_beside(path, keys, cutoff=0.65 if parts else 0.7)


def _key_beside(path: Sequence[str], keys: Sequence[str], cutoff: float) -> str | None:
    """The key of the same section that is like the last part of `path`, or begins like it."""
    section = ".".join(part for part in path[:-1] if not part.isdigit())  # a place in a list is in no key
    names = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
    first_words = {name.partition("_")[0]: name for name in reversed(names)}
    near = (
        nearest(path[-1], names, cutoff)
        or next((name for name in names if len(path[-1]) > 2 and name.startswith(path[-1])), None)
        or first_words.get(nearest(path[-1], first_words, cutoff=0.8) or "")
    )
    return ".".join([*path[:-1], near]) if near else None


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message about a config with the keys called as where the values were given.

    Example:
        >>> renamed("train.steps: must be positive; see train.steps_", {"train.steps": "max_steps"})
        'max_steps: must be positive; see train.steps_'
    """
    keys = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{keys})(?!\w)", lambda found: names[found.group()], message)


Kind = Literal["rl", "sft", "preference", "reward-model", "pretrain"]
"""Kind of run that a config describes."""
TOOLS = "tools"
"""The environment that the section `tools` stands for."""
ROWS_PER_UPDATE = 64
"""Of runs on given data, unless `train.rows_per_update` says otherwise."""


def _named_algorithm(given: Any) -> Any:
    """`{name: grpo, clip: {high: 0.28}}` as an objective: the name's own axes, with those that are given."""
    if isinstance(given, PolicyObjective | PreferenceObjective | RewardModelObjective):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"algorithm takes a mapping with a name, as in {{name: dapo}}, got {given!r}")
    axes = {key: value for key, value in given.items() if key != "name"}
    known = known_keys()
    foreign = [str(key) for key in axes if key in foreign_names() and f"algorithm.{key}" not in known]
    if foreign:
        answers = [f"unknown key 'algorithm.{key}'; {suggestion(['algorithm', key], known)}" for key in foreign]
        raise ValueError("\n  ".join(answers))
    return objective_of(str(given.get("name", "grpo")), axes)


class RunConfig(Section):
    """Everything that decides a run."""

    run_name: str = Field(pattern=r"^[^/\\.][^/\\]*$")
    """Names the folder of the run: no slashes, and no dot in front."""
    output_dir: str = "runs"
    seed: int = Field(0, ge=0, lt=2**63)
    model: ModelConfig = ModelConfig()
    data: schema.DataConfig
    rollout: schema.RolloutConfig = schema.RolloutConfig()
    reward: schema.RewardConfig = schema.RewardConfig()
    algorithm: Annotated[
        PolicyObjective | PreferenceObjective | RewardModelObjective, BeforeValidator(_named_algorithm)
    ] = objective_of("grpo", {})
    """A name, and what is changed of its axes; without effect in `sft` and `pretrain`."""
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
    """Of several processes; None: one process trains."""
    asynchronous: schema.AsynchronousConfig | None = None
    pool: schema.PoolConfig = schema.PoolConfig()
    environment: EnvironmentConfig | None = None
    tools: tuple[ToolConfig, ...] = ()
    """What the model may call; the built-in environment `tools` answers."""

    @model_validator(mode="before")
    @classmethod
    def _environments_reward(cls, tree: Any) -> Any:
        """With tools, an environment that answers calls; with an environment, its outcome is the reward, unless others
        are named."""
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
    def _batch_arithmetic(self) -> Self:
        rollout, rows = self.rollout, self.train.rows_per_update
        total = rollout.prompts_per_step * rollout.completions_per_prompt
        kinds = [name for name in ("sft", "pretrain", "preference") if getattr(self, name) is not None]
        if self.preference is not None and self.kind == "rl":
            raise ValueError(
                f"preference: algorithm.name={self.algorithm.name} is trained on rollouts; remove the section, or take "
                "an algorithm of preferences (dpo, kto, ..., reward_model)"
            )
        if rows is not None and total % rows and self.kind == "rl":  # others draw no rollouts
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
            raise ValueError("asynchronous: with rollout.source=pool others draw; pool.max_staleness bounds them")
        if self.asynchronous and self.cluster and self.cluster.placement == "colocated":
            raise ValueError("asynchronous: with cluster.placement=colocated engines sleep meanwhile; take split")
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
        if rollout.min_completion_tokens > rollout.max_completion_tokens:
            raise ValueError("rollout.min_completion_tokens is larger than rollout.max_completion_tokens")
        if rollout.min_completion_tokens > (self.eval.max_completion_tokens or rollout.max_completion_tokens):
            raise ValueError("rollout.min_completion_tokens holds in evaluation too: over eval.max_completion_tokens")
        return self

    def _check_engine_gpus(self) -> None:
        """Check that an engine in an actor has as many GPUs as `rollout.tensor_parallel`."""
        if (cluster := self.cluster) is None:
            return
        engine, cut = cluster.resources.get("rollout", schema.ResourceConfig()), self.rollout.tensor_parallel
        if (gpus := engine.num_gpus or 0) > 1 and gpus != cut:
            raise ValueError(
                f"cluster.resources.rollout.num_gpus={gpus:g}: an engine draws on rollout.tensor_parallel={cut} of "
                "them, and the others would idle; cluster.replicas is how many engines there are"
            )
        if cut > 1 and (cluster.placement == "colocated" or 0 < gpus < cut):
            raise ValueError(
                f"rollout.tensor_parallel={cut}: an engine takes as many whole GPUs, and here it shares one: set "
                "cluster.placement=split, or leave the section cluster out, and the engine in the trainer's process "
                "sleeps while that works"
            )

    def _check_environment(self) -> None:
        judges = [*self.reward.functions, *self.reward.by_data_source.values()]
        if self.environment is None:
            if self.kind == "rl" and any(judge.function == "environment" for judge in judges):
                raise ValueError("reward.functions: environment is the outcome of episodes; there is no environment")
        elif self.kind != "rl":
            raise ValueError("environment: this kind of run draws no rollouts; remove the section")
        elif self.rollout.min_completion_tokens:
            raise ValueError("rollout.min_completion_tokens: turns of an episode have no least length; remove it")
        if self.environment is not None and self.environment.when_full == "drop_oldest":
            self._check_dropping(self.environment.max_turn_tokens)

    def _check_dropping(self, turn: int | None) -> None:
        """Where turns are dropped a completion has several rows: nothing may need it in one, and a turn has room."""
        key, room = "environment.when_full=drop_oldest", self.rollout.max_completion_tokens
        room = min(room, self.eval.max_completion_tokens or room)
        if turn is None or 2 * turn > room:
            raise ValueError(
                f"{key} needs environment.max_turn_tokens of at most {room // 2}: where turns were dropped half of "
                f"max_completion_tokens ({room}) is free"
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
        """The shape of the model with fresh weights that training starts from, in place of `model.path`."""
        supervised = self.sft or self.pretrain
        return supervised.gpt if supervised else None

    @property
    def kind(self) -> Kind:
        """Which kind of run it is: by its section, else by its algorithm."""
        if self.sft is not None:
            return "sft"
        if self.pretrain is not None:
            return "pretrain"
        if isinstance(self.algorithm, RewardModelObjective):
            return "reward-model"
        return "preference" if isinstance(self.algorithm, PreferenceObjective) and not self.algorithm.online else "rl"

    @property
    def unused_sections(self) -> tuple[str, ...]:
        """The sections that this kind of run does not read; of pretraining, `rollout` where nothing in it is set."""
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
        """Prompts that a step of reinforcement learning draws; of other kinds, the given items that it takes."""
        drawn = self.kind == "rl"
        return self.rollout.prompts_per_step if drawn else self.train.rows_per_update or ROWS_PER_UPDATE

    @property
    def rows_per_update(self) -> int:
        """Rows of an optimizer step: completions of reinforcement learning, given items elsewhere."""
        if self.kind != "rl":
            return self.items_per_step
        return self.train.rows_per_update or self.rollout.prompts_per_step * self.rollout.completions_per_prompt

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps that a step makes of its rows in one pass: a single one unless `train.rows_per_update` is
        given, and where rows are given and not drawn."""
        rows = self.rollout.prompts_per_step * self.rollout.completions_per_prompt
        return rows // (self.train.rows_per_update or rows) if self.kind == "rl" else 1

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps that a step makes in all its passes."""
        return self.updates_per_epoch * self.train.epochs_per_step if self.kind == "rl" else 1

    def to_tree(self, secrets: bool = False) -> dict[str, Any]:
        """As a plain dict with the keys of a file; `build_config` makes the same config of it.

        Args:
            secrets: with those that it holds, to make another config; what is written, sent or shown has none.
        """
        tree = self.model_dump(mode="json", by_alias=True)
        return tree if secrets else dict(left_out(tree))

    @property
    def secrets(self) -> frozenset[str]:
        """Those that it holds, and does not only name."""
        return frozenset(secrets_of(self.to_tree(secrets=True), self.to_tree()))

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.run_name

    @property
    def pool_file(self) -> Path:
        """Where the run's rollout pool is."""
        folder = self.pool.folder or Path(self.output_dir) / "pools"
        return Path(folder) / f"{self.pool.name or self.run_name}.sqlite"


def build_config(tree: Mapping[str, Any], source: str = "config") -> RunConfig:
    """Validate a tree.

    Raises:
        ConfigError: all problems, one a line, each with its key and, for an unknown key, the nearest valid one.
    """
    try:
        return RunConfig.model_validate(dict(tree))
    except ValidationError as error:
        raise config_error(error, source) from None


def config_error(error: ValidationError, source: str) -> ConfigError:
    """What pydantic found, one problem a line, each with its key."""
    return ConfigError("\n  ".join([f"{source}:", *map(_problem, error.errors())]))


def _problem(item: Mapping[str, Any]) -> str:
    path = [str(part) for part in item["loc"]]
    if path[:1] == ["backend"] and len(path) > 2:
        del path[1]  # which kind of section it is
    if path[-1:] == ["[key]"]:  # pydantic's word for the key of a table
        del path[-1]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        known = known_keys()
        if path[:2] == ["cluster", "resources"]:  # keys of a table's entries, whose names the user gives
            known = [".".join([*path[:3], name]) for name in schema.ResourceConfig.model_fields]
        inner = known_elsewhere(path, item["input"]) if isinstance(item["input"], Mapping) else []
        unknown = [path] if not inner or len(path) == 1 else []
        return "\n  ".join(_unknown(given, known) for given in [*unknown, *inner])
    if item["type"] == "union_tag_invalid":
        return f"{key}.type: {item['ctx']['tag']!r} is none of {item['ctx']['expected_tags']}"
    if item["type"] == "union_tag_not_found":
        unknown = [[key, str(name)] for name in item["input"] if f"{key}.{name}" not in known_keys()]
        return "\n  ".join([f"{key}.type: is required", *(_unknown(given, known_keys()) for given in unknown)])
    if item["type"] == "missing":
        return f"{key}: is required"
    if item["type"] == "model_type":
        return f"{key}: takes a mapping of keys (got {_shown(path, item['input'])!r})"
    message = str(item["msg"]).removeprefix("Value error, ")
    if not key or item["type"] == "value_error":
        return message
    return f"{key}: {message} (got {_shown(path, item['input'])!r})"


def _shown(path: list[str], value: Any) -> Any:
    """A value as a message may show it."""
    if path[0] == "tools" and "env" in path:
        return type(value).__name__
    if path[0] in ("tools", "reward", "environment") and isinstance(value, str | list):
        return left_out({"mcp": value})["mcp"]
    return left_out(value, path[-1])


def _unknown(path: list[str], known: list[str]) -> str:
    if path[0] == "backend" and (key := ".".join(path)) in known:
        fields = [kind.model_fields for kind in get_args(BackendConfig)]
        kinds = [get_args(own["type"].annotation)[0] for own in fields if path[1] in own]
        return f"unknown key {key!r} of this backend.type; it is of {' and '.join(kinds)}"
    hint = suggestion(path, known)
    return f"unknown key {'.'.join(path)!r}" + (f"; {hint}" if hint else "")


def known_keys(section: type[BaseModel] | None = None, prefix: str = "") -> list[str]:
    """All keys with dots, sections before their keys."""
    keys = [f"{prefix}type"] if section is not None and issubclass(section, Choice) else []
    for name, info in (section or RunConfig).model_fields.items():
        keys.append(prefix + name)
        parts = () if get_origin(info.annotation) is dict else get_args(info.annotation)  # a table has keys of its own
        for kind in (info.annotation, *parts):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))  # kinds of a section share some


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML, without secrets; loading it gives the same config."""
    return yaml.safe_dump(config.to_tree(), sort_keys=False, allow_unicode=True)


# --------------------------------------------------------------------------------------------------------------------
# What a config says that `atomrl explain` and the web interface explain.


def objective_in(config: RunConfig) -> Objective:
    """What a run of this config minimises or maximises, by the kind of run it is."""
    if config.kind in ("sft", "pretrain"):
        return SFT if config.kind == "sft" else PRETRAINING
    return config.algorithm.resolved(max_completion_tokens=config.rollout.max_completion_tokens)


def setting_in(config: RunConfig, objective: Objective) -> Setting:
    """What the config says beside the objective."""
    names = {field.name for field in fields(Setting)}
    weights = [item.weight for item in config.reward.functions if item.weight]
    return Setting(
        axes=objective.axes,
        updates_per_step=config.updates_per_step,
        reward_parts=len(weights) + bool(config.reward.by_data_source),
        **config.rollout.model_dump(include=names),
    )
