"""`RunConfig`, the config of a run: its sections, and the rules between them.

`loading.py` makes one from a YAML file, a dict and `key=value` overrides. It is immutable.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from atomrl.algorithms import objective_of
from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.algorithms.sft import PRETRAINING, SFT
from atomrl.common.secrets import mask_secrets, secrets_of
from atomrl.config import schema
from atomrl.config.schema import BackendConfig, EnvironmentConfig, ModelConfig, Section, ToolConfig, TrackingConfig
from atomrl.objectives import PolicyObjective, PreferenceObjective, Setting
from atomrl.objectives.objective import Objective

Kind = Literal["rl", "sft", "preference", "reward-model", "pretrain"]
"""Kind of run that a config describes."""
TOOLS = "tools"
"""Built-in environment that the section `tools` selects."""
ROWS_PER_UPDATE = 64
"""Default of `train.rows_per_update` for runs without rollouts."""


class RunConfig(Section):
    """The config of a run: all sections, and the rules between them."""

    run_name: str = Field(pattern=schema.NAME)
    """Name of the run and of its folder in `output_dir`: no slashes, no leading dot, no control characters."""
    output_dir: str = "runs"
    """Folder of all runs."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything: order of the data, completions, a new model; below 2**63."""
    model: ModelConfig = ModelConfig()
    data: schema.DataConfig
    rollout: schema.RolloutConfig = schema.RolloutConfig()
    reward: schema.RewardConfig = schema.RewardConfig()
    algorithm: Annotated[
        PolicyObjective | PreferenceObjective | RewardModelObjective, BeforeValidator(objective_of)
    ] = objective_of({"name": "grpo"})
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
    """Distributed training back end; null: train in one process."""
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
                    raise ValueError(f"tools need environment.function={TOOLS}; remove one of the two")
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
                f"preference: algorithm.name={self.algorithm.name} is trained on rollouts; remove the section, or use "
                "a preference algorithm (dpo, kto, ..., reward_model)"
            )
        if rows is not None and total % rows and self.kind == "rl":  # other kinds have no rollouts
            raise ValueError(
                f"train.rows_per_update={rows} does not divide the {total} rows of a step "
                f"(rollout.prompts_per_step={rollout.prompts_per_step} x "
                f"rollout.completions_per_prompt={rollout.completions_per_prompt})"
            )
        if len(kinds) > 1:
            raise ValueError(f"{' and '.join(kinds)} are {len(kinds)} kinds of run; keep one")
        if (self.model.path is None) == (self.gpt is None):
            raise ValueError(
                "model.path: is required (a folder or a hub name)"
                if self.model.path is None
                else f"model.path and {'sft' if self.sft else 'pretrain'}.gpt both set the initial model; keep one"
            )
        if self.asynchronous and self.kind != "rl":
            raise ValueError("asynchronous: this kind of run samples no rollouts; remove the section")
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
            raise ValueError(
                "rollout.server: one engine distributes the groups over all servers; use cluster.replicas=1"
            )
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
                f"rollout.tensor_parallel={size}: an engine needs that many whole GPUs, but here it shares one: set "
                "cluster.placement=split, or remove the section cluster; the engine then runs in the trainer's process "
                "and sleeps during updates"
            )

    def _check_environment(self) -> None:
        """Check that environment, kind of run, rewards and lengths fit together."""
        rewards = [*self.reward.functions, *self.reward.by_data_source.values()]
        if self.environment is None:
            if self.kind == "rl" and any(reward.function == "environment" for reward in rewards):
                raise ValueError(
                    "reward.functions: 'environment' is the outcome of episodes, but there is no section environment"
                )
        elif self.kind != "rl":
            raise ValueError("environment: this kind of run samples no rollouts; remove the section")
        elif self.rollout.min_completion_tokens:
            raise ValueError("rollout.min_completion_tokens: not supported for turns of an episode; remove it")
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
            raise ValueError(f"{key}: algorithm.name={self.algorithm.name} needs completions of one row each; use end")
        for axis, parts in self.algorithm.used_axes().items():
            for part in parts:
                if part.by_completion:
                    raise ValueError(
                        f"{key}: algorithm.{axis}={part.type} needs all tokens of a completion in one row, but it has "
                        "several rows if turns are dropped; use one by token, or end"
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
        """Items that a step uses from the data: prompts in RL, rows, pairs or windows otherwise."""
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
        """Convert to a plain dict with the keys of a file; `load_config` restores the config from it.

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
