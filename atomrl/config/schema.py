"""The sections of a config: a class for each, with the meaning of each key beside it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from atomrl.common.chat_template import SET_HERE
from atomrl.common.secrets import is_variable

# --------------------------------------------------------------------------------------------------------------------
# What every part of the config is made of.


class ConfigError(ValueError):
    """A mistake in a config; the message says which key, what is wrong and what to do."""


class Section(BaseModel):
    """A group of keys. Unknown keys are errors, and values cannot be changed."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


# --------------------------------------------------------------------------------------------------------------------
# The section `model`: which policy, what it computes in, and how.

Quantization = Literal["nf4", "int8"]


class LoraConfig(Section):
    """Low-rank adapters (needs the `lora` extra)."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: list[str] | str = "all-linear"
    """Linear layers: all between embedding and output matrix; or names, the last part or more of a path; or a regular
    expression of whole paths."""


class ModelConfig(Section):
    """The policy."""

    path: str | None = None
    """A folder in Hugging Face layout, or a hub name. Required, but where `sft.gpt` makes a fresh model."""
    tokenizer: str | None = None
    """Where its tokenizer is, if not beside the model: a folder or a hub name."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Where trainer and engine compute: `cpu`, `cuda`, `cuda:1`, ...; `auto` is a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the forward pass computes in; master weights are float32 in either case. `auto` is bfloat16 where the
    hardware multiplies it fast."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Compute each layer again in the backward pass instead of keeping its activations. `auto`: on a GPU where a run
    does not fit without it, and where memory runs out with a single row in a micro-batch."""
    activation_offload: bool = False
    """Keep activations in the CPU's memory between the forward and the backward pass; needs a GPU."""
    compile: bool = False
    """Compile each layer once (pays after some tens of steps)."""
    pack_rows: bool | None = None
    """Lay the rows of a forward pass end to end, without padding, the prompt of a group once. null: where the model
    can, on a GPU in bfloat16 alone; true: an error where it cannot; false: padded rows."""
    lora: LoraConfig | None = None
    quantization: Quantization | None = None
    """Keep the linear layers beneath the adapters in 4 bits (bitsandbytes' nf4) or 8. null: in `dtype`."""
    trust_remote_code: bool = False

    @property
    def checkpoints_layers(self) -> bool:
        """`gradient_checkpointing`; False where it is `auto` and nothing was chosen."""
        return self.gradient_checkpointing is True

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.quantization and self.lora is None:
            raise ValueError("model.quantization: quantised weights are not trained; give model.lora too")
        if self.quantization and self.compile:
            raise ValueError("model.quantization: layers that are quantised are not compiled; leave out compile")
        return self


# --------------------------------------------------------------------------------------------------------------------
# The sections `environment` and `tools`: what answers the model.


class EnvironmentConfig(Section):
    """What answers the model, turn by turn (docs/guides/environments.md).

    `rollout.max_completion_tokens` bounds all that comes after the prompt, replies included; with `when_full` all of it
    that the model sees at once.
    """

    function: str
    """A built-in name, or a dotted path to a generator function, an async function, or a class with reset and step."""
    args: dict[str, Any] = {}
    opening: bool = False
    """The environment begins: what it says first is the end of the prompt's last message."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a turn of the model, beside `rollout.stop`."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model; the environment may end the episode before."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Of the model in one turn; null: what is left of the episode."""
    when_full: Literal["end", "drop_oldest"] = "end"
    """What happens where another turn has no room: the episode ends, or the model goes on without its oldest turns."""
    max_reply_tokens: int = Field(512, ge=1)
    """Of the environment at once; what is beyond is cut."""
    timeout_s: float = Field(30.0, gt=0)
    """For one answer of the environment."""
    wait_s: float = Field(600.0, ge=0)
    """How long a service that it asks is waited for while that is away, before the run ends."""
    workers: int = Field(2, ge=1)
    """Processes that episodes run in, many at once in each."""


class ToolConfig(Section):
    """What the model may call (docs/guides/tool_calling.md)."""

    function: str | None = None
    """A dotted path to a function with type hints and a docstring, or to a class whose methods are such."""
    args: dict[str, Any] = {}
    """Arguments that the config gives and the model does not see; of a class, those that it is made with."""
    mcp: str | tuple[str, ...] | None = None
    """All tools of an MCP server: the command that starts it, or its address. `${NAME}` is an environment variable of
    the run's, in `env` too: so a secret is named and not written down."""
    env: dict[str, str] = {}
    """Environment variables of a command; it has but a few others."""
    headers_env: dict[str, str] = {}
    """HTTP headers for an address, by the environment variables that have their values."""
    timeout_s: float = Field(20.0, gt=0)
    """For one call, and for finding an MCP server. `environment.timeout_s` is for all calls of a turn."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, tree: Any) -> Any:
        return {"function": tree} if isinstance(tree, str) else tree

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.function is None) == (not self.mcp):
            raise ValueError("a tool is a function or an MCP server: give function or mcp")
        if isinstance(self.mcp, str) and not self.mcp.startswith(("http://", "https://")):
            raise ValueError("mcp is a command as a list of words, or an address with http://")
        if wrong := [header for header, name in self.headers_env.items() if not is_variable(name)]:
            raise ValueError(f"headers_env.{wrong[0]} names the environment variable that has the value, as in MY_KEY")
        if self.args and self.mcp:
            raise ValueError("args are a function's; an MCP server takes what is in its command or its address")
        return self


# --------------------------------------------------------------------------------------------------------------------
# The section `tracking`: what of a run is written down, and where it goes beside the run's folder.


class TrackingConfig(Section):
    """Where metrics go beside `metrics.jsonl`."""

    sinks: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    wandb_project: str = "atomrl"
    wandb_entity: str | None = None
    wandb_tags: list[str] = []
    log_every_steps: int = Field(1, ge=1)
    """Of the sinks; `metrics.jsonl` has every step."""
    save_rollouts: bool = True
    tokens: float = Field(2, ge=0)
    """Of which groups the numbers of every token are kept beside their rollouts (docs/guides/inspect_tokens.md): below
    1 a share of the prompts, the same ones in the whole run; from 1 on so many groups of each step, those whose
    rewards differ before others. 0: none."""
    log_completions: int = Field(10, ge=0)
    """Show a few completions on the terminal, with reward and advantage: of the first step, and every so many steps.
    true: of every step; false or 0: never."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.tokens >= 1 and self.tokens % 1:
            raise ValueError(f"tokens={self.tokens:g} is neither a share below 1 nor a whole number of groups")
        return self


# --------------------------------------------------------------------------------------------------------------------
# The section `backend`: a trainer of several processes.


class RankedConfig(Section):
    """What every back end of several processes (ranks) has."""

    ranks: int | None = Field(None, ge=1)
    """Processes that train, the one that you start included. null: as many as torchrun or accelerate started; without
    them one for each GPU, and one on a machine without."""
    timeout_s: float = Field(600.0, gt=0)
    """Within which all ranks must come to the same point; an error names who did not."""
    restarts: int = Field(2, ge=0)
    """How often in a run a new group goes on from the newest checkpoint, after a rank died, stood still, or ran out of
    memory (then with micro-batches of half the size, or gradient checkpointing). Where a launcher started the ranks the
    run ends instead."""

    @property
    def divisors(self) -> Mapping[str, int]:
        """What must divide the number of ranks, by the words that say it."""
        raise NotImplementedError

    @property
    def choices(self) -> Mapping[str, Any]:
        """Other values of settings, of which a dry run says what they would take; one that cannot be is left out."""
        raise NotImplementedError

    @property
    def activation_ranks(self) -> int:
        """Ranks that share what a layer keeps of a token beside the residual stream and its norms."""
        return 1

    @property
    def ranks_per_row(self) -> int:
        """Ranks that compute the same rows."""
        return 1

    def check_count(self, ranks: int) -> None:
        """Raise ConfigError where so many ranks cannot be shared out."""
        for words, divisor in self.divisors.items():
            if ranks % divisor:
                raise ConfigError(f"backend.{words} does not divide the {ranks} ranks")

    @model_validator(mode="after")
    def _whole_shares(self) -> Self:
        for words, divisor in self.divisors.items():
            if self.ranks is not None and self.ranks % divisor:
                raise ValueError(f"backend.{words} does not divide ranks={self.ranks}")
        return self


class FSDPConfig(RankedConfig):
    """Weights, gradients and moments in shards over the ranks (PyTorch's FSDP2)."""

    type: Literal["fsdp"]
    replicas: int = Field(1, ge=1)
    """Hybrid sharding: whole copies of the shards, each over ranks / replicas ranks."""
    reduce: Literal["micro_batch", "update"] = "micro_batch"
    """When gradients are summed over ranks: after each micro-batch, or once in an update, until when every rank holds
    all of them."""
    sequence: int = Field(1, ge=1)
    """Ranks that share the rows of a micro-batch, each a part of the tokens (Ulysses), for rows that are too long for
    one. It divides the numbers of ranks and of the model's heads, of keys too."""
    tensor: int = Field(1, ge=1)
    """Ranks that share each layer's matrices, and compute the same rows (tensor parallel). It divides the numbers of
    ranks, of the model's heads, of keys too, and the MLP's width."""
    cpu_offload: bool = False
    """Shards of weights, gradients and moments are kept in the CPU's memory; needs GPUs."""

    @property
    def divisors(self) -> Mapping[str, int]:
        named = {"replicas": self.replicas, "sequence": self.sequence, "tensor": self.tensor}
        return {f"{key}={value}": value for key, value in named.items()}

    @property
    def choices(self) -> Mapping[str, Any]:
        return {
            "tensor": 2 * self.tensor,
            "replicas": 2 if self.replicas == 1 else 1,
            "reduce": "update" if self.reduce == "micro_batch" else "micro_batch",
            "sequence": 2 * self.sequence,
            "cpu_offload": not self.cpu_offload,
        }

    @property
    def activation_ranks(self) -> int:
        return self.tensor

    @property
    def ranks_per_row(self) -> int:
        return self.sequence * self.tensor  # one of them is 1

    @model_validator(mode="after")
    def _one_at_a_time(self) -> Self:
        if self.tensor > 1 and (self.sequence > 1 or self.replicas > 1):
            raise ValueError("backend.tensor goes with neither sequence nor replicas: leave out one of them")
        return self


class MegatronConfig(RankedConfig):
    """Each layer's matrices, and the layers, cut over ranks (NVIDIA's megatron-core)."""

    type: Literal["megatron"]
    tensor: int = Field(1, ge=1)
    """Ranks that share each layer: its heads, its MLP, the vocabulary. It divides the numbers of heads, of keys too,
    and the MLP's width."""
    pipeline: int = Field(1, ge=1)
    """Stages, each with as many of the layers. tensor x pipeline ranks hold the model once; rows are spread over the
    ranks / (tensor x pipeline) copies."""
    expert: int = Field(1, ge=1)
    """Ranks that share the experts of each layer of a mixture, each some of them whole: a multiple of tensor, or with
    stages the same number. Tokens travel to their experts."""

    @property
    def divisors(self) -> Mapping[str, int]:
        return {
            f"tensor={self.tensor} x pipeline={self.pipeline}": self.tensor * self.pipeline,
            f"expert={self.expert} x pipeline={self.pipeline}": self.expert * self.pipeline,
        }

    @property
    def choices(self) -> Mapping[str, Any]:
        return {"tensor": 2 * self.tensor, "pipeline": 2 * self.pipeline, "expert": 2 * self.expert}

    @property
    def ranks_per_row(self) -> int:
        return self.tensor * self.pipeline


BackendConfig = FSDPConfig | MegatronConfig
"""The back ends of several processes, told apart by `type`."""


class DataConfig(Section):
    """Where problems come from and how a row becomes a prompt."""

    train: str | list[str]
    """A file (JSONL, JSON, CSV, Parquet, a folder of `datasets`), a data set of the Hugging Face hub
    (`openai/gsm8k:main:train@REVISION`), a list of these, or a generator: `countdown`, `reasoning_gym:NAME`, ...
    (`atomrl data make --help`)."""
    eval: str | list[str] | None = None
    train_size: int | None = Field(None, ge=1)
    """Problems to draw from a generator, or rows to keep of a file."""
    eval_size: int | None = Field(None, ge=1)
    generator_args: dict[str, Any] = {}
    prompt_field: str = "prompt"
    answer_field: str | None = "ground_truth"
    """null: the rows have no ground truth (demonstrations, or rewards that need none)."""
    data_source_field: str = "data_source"
    answer_pattern: str | None = None
    """A regular expression; its first group in the answer field is the ground truth (GSM8K: `####\\s*(.+)`)."""
    system_prompt: str | None = None
    system_prompt_file: str | None = None
    chat_template: str = Field("auto", pattern=r"^(auto|none|chatml|.+\.jinja)$")
    """`auto`: the tokenizer's; `none`: text as it is; `chatml`, or the path of a .jinja file: in place of the
    tokenizer's, and saved with the model."""
    """`auto` applies the tokenizer's template to messages, and to text when it has one; `none` takes the text as
    it is, for prompts that carry their template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, as in `{enable_thinking: false}` (Qwen 3), `{reasoning_effort: low}` (gpt-oss),
    `{date_string: 26 Jul 2024}` (Llama 3.2). One that the template does not read is an error."""
    max_prompt_tokens: int = Field(512, ge=1)
    overlong_prompt: Literal["drop", "truncate"] = "drop"
    """`truncate` keeps the last tokens."""
    on_bad_row: Literal["error", "skip"] = "error"
    """`error` lists every problem with file and line and stops; `skip` counts them."""
    shuffle: bool = True

    @model_validator(mode="after")
    def _one_system_prompt(self) -> Self:
        if self.system_prompt is not None and self.system_prompt_file is not None:
            raise ValueError("give system_prompt or system_prompt_file, not both")
        return self

    @model_validator(mode="after")
    def _variables_of_the_template(self) -> Self:
        for name in self.chat_template_kwargs.keys() & {*SET_HERE}:
            raise ValueError(f"chat_template_kwargs: {name!r} is set by AtomRL itself; leave it out")
        return self


Server = Annotated[str, Field(pattern=r"^https?://[^/\s]+$")]
"""The address of a server, without a path."""


class RolloutConfig(Section):
    """How completions are drawn during training."""

    engine: str = "auto"
    """Who draws: `native`, `hf`, `vllm`, `vllm-server` or `sglang`. `auto`: on a GPU vLLM, where it is installed and
    knows the model, else `native` (docs/guides/distributed_rollout.md)."""
    source: Literal["engine", "pool"] = "engine"
    """Where the groups of a step come from: this process's engine, or a pool that `atomrl pool fill` fills (section
    `pool`, docs/guides/rollout_pool.md)."""
    prompts_per_step: int = Field(16, ge=1)
    completions_per_prompt: int = Field(8, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_completion_tokens: int = Field(0, ge=0)
    max_completion_tokens: int = Field(256, ge=1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs_over: Literal["vocabulary", "kept", "none"] = "vocabulary"
    """`kept`: all log-probs, of the engine and of the trainer, are over the tokens that top-p and top-k kept, as they
    were sampled. The hf engine cannot tell them. `none`: vLLM and SGLang give none, which is faster; their distance
    from the trainer is then neither measured nor corrected (`algorithm.rollout_is`)."""
    max_concurrent_completions: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows that an engine decodes at once. `auto`: on a GPU chosen from its free memory, elsewhere 256."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """The share of a GPU's memory that vLLM or SGLang may take. `auto`: what the trainer leaves of it, by the formulas
    of `atomrl plan`, and no more than the engine can use."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that vLLM or SGLang cut the model over."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM (`EngineArgs`) or SGLang (`ServerArgs`), by their own names. One that AtomRL sets
    itself, or that they do not have, is an error."""
    server: Annotated[tuple[Server, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = ()
    """Addresses of servers that are there, for the engines `vllm-server` and `sglang`, such as `http://127.0.0.1:8000`;
    groups are spread over several. None: the engine starts its own, which ends with the run."""
    server_timeout_s: float = Field(600.0, gt=0)
    """Within which a server must answer, a completion included; the run ends with an error that names it."""
    server_weights: Literal["files", "collective"] = "files"
    """How weights travel to servers: as files that they see, or by a broadcast (`sglang`)."""

    @property
    def concurrent_completions(self) -> int:
        """`max_concurrent_completions`; 256 where it is `auto` and nothing was chosen."""
        return 256 if self.max_concurrent_completions == "auto" else self.max_concurrent_completions

    @model_validator(mode="after")
    def _each_server_once(self) -> Self:
        if len({*self.server}) < len(self.server):
            raise ValueError(f"rollout.server names one twice: {', '.join(self.server)}")
        return self

    @model_validator(mode="after")
    def _something_is_cut(self) -> Self:
        if self.logprobs_over == "kept" and (self.temperature == 0 or (self.top_p == 1 and not self.top_k)):
            raise ValueError(
                "logprobs_over=kept needs a temperature above 0, and top_p below 1 or a top_k: nothing is cut"
            )
        return self


ClusterRole = Literal["rollout", "trainer", "reference", "critic", "teacher", "reward"]
"""What an actor of a cluster is there for."""


class ResourceConfig(Section):
    """What an actor has of the cluster."""

    num_cpus: float = Field(1.0, gt=0)
    """It computes with as many threads."""
    num_gpus: float | None = Field(None, ge=0)
    """A share of one, or a whole number (of an engine: `rollout.tensor_parallel`). null: what `placement` says, and 0
    without."""
    custom: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Of Ray's custom resources, which a machine is started with (`ray start --resources`): name -> how much."""

    @model_validator(mode="after")
    def _whole_gpus(self) -> Self:
        if (gpus := self.num_gpus or 0) > 1 and gpus % 1:
            raise ValueError(f"num_gpus={gpus:g}: an actor has a share of one GPU, or whole ones")
        if own := self.custom.keys() & {"CPU", "GPU", "memory", "object_store_memory"}:
            raise ValueError(f"custom: {min(own)} is Ray's own; num_cpus and num_gpus ask for CPUs and GPUs")
        return self


class ClusterConfig(Section):
    """Rollout engines, and the trainer with its models, in Ray actors."""

    placement: Literal["colocated", "split"] | None = None
    """`colocated`: trainer and engines have half of one GPU each, and the engines sleep while the trainer works.
    `split`: everyone in an actor has a GPU. null: the engines and who is in `resources` are in actors."""
    replicas: int = Field(1, ge=1)
    """Engines; each draws whole groups."""
    resources: dict[ClusterRole, ResourceConfig] = {}
    """What an actor of a role has, each of the replicas of `rollout`. Trainer and models that are not named are in the
    process that you start, or with `placement`, in the trainer's."""
    address: str | None = None
    """Of a Ray cluster that is there; null starts one on this machine for the run."""
    timeout_s: float = Field(600.0, gt=0)
    """Within which an actor must answer; the run ends with an error that names it."""
    weight_transfer: Literal["shared_memory", "files", "collective"] = "shared_memory"
    """How weights come to the replicas: Ray's object store, safetensors files, or a broadcast (NCCL, or gloo)."""
    weight_folder: str | None = None
    """Of `files`: has a folder for each run, and all machines must see it; null is a folder in the run's."""


class AsynchronousConfig(Section):
    """Rollouts that go on while the trainer learns; 0 and the defaults are the synchronous order."""

    max_staleness: int = Field(1, ge=0)
    """By how many versions of the weights a token that is trained on may be behind the trainer's: 1 is one step off."""
    on_update: Literal["keep", "abort", "wait"] = "keep"
    """Completions under way when new weights come: go on with them, begin anew, or are finished before."""
    oversampling: float = Field(1.0, ge=1)
    """So many times the groups that are needed are drawn at once; the first that are complete are trained on."""
    min_completions: int | None = Field(None, ge=1)
    """While the trainer waits, a group with so many completions goes without its others; null: it waits for all."""
    timeout_s: float = Field(600.0, gt=0)
    """Within which engine or rewards must finish something; the run ends with an error that says what they hold."""


class PoolConfig(Section):
    """The rollout pool: what `atomrl pool fill` fills, and `rollout.source: pool` trains on."""

    folder: str | None = None
    """Where pools are, a file each; on a local disk. None: `pools` in `output_dir`."""
    name: str | None = Field(None, pattern=r"^[^/\\.][^/\\]*$")
    """Of the file. None: `run_name`, so that each run has its own."""
    capacity: int = Field(4096, ge=1)
    """Groups that no trainer holds; of more, the oldest version goes first, and of this what was written first."""
    ttl_s: float = Field(86400.0, gt=0)
    """A group that is older goes."""
    max_staleness: int = Field(4, ge=0)
    """A group is trained on while the policy is at most so many versions (steps) ahead of its oldest token."""
    max_uses: int = Field(1, ge=1)
    """Steps that a group may be trained in."""
    min_response_tokens: int = Field(0, ge=0)
    """Groups with a shorter completion are passed over."""
    mixed_only: bool = False
    """Groups in which all completions earn the same are passed over."""
    timeout_s: float = Field(600.0, gt=0)
    """How long a step waits for a group before the run ends with an error."""
    lease_s: float = Field(1800.0, gt=0)
    """After which the groups of a trainer that is not heard of are given to another."""


class RewardRoute(Section):
    """A reward and how it is called."""

    function: str
    """A built-in name, or a dotted path to a function of the same signature, to verl's `compute_score`, or to a class
    that is called with trajectories."""
    args: dict[str, Any] = {}
    completions: Literal["text", "messages"] | None = None
    """How a function gets completions of prompts that are messages: as texts, or as TRL does, each as
    `[{"role": "assistant", "content": text}]`. null: as messages where the function is one of TRL's, or its annotation
    says lists of dicts."""
    timeout_s: float = Field(10.0, gt=0)
    """For one completion, in rewards that run in worker processes (all but the cheap built-in ones); for one request,
    in rewards that ask a service."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, route: Any) -> Any:
        return {"function": route} if isinstance(route, str) else route


class RewardItem(RewardRoute):
    """One reward and its weight in the sum."""

    weight: float = 1.0


class RewardConfig(Section):
    """What a completion earns."""

    functions: list[RewardItem] = [RewardItem(function="strict_math")]
    """For every completion; a name alone is enough. Empty unless given where there is a table `by_data_source`."""
    by_data_source: dict[str, RewardRoute] = {}
    """data source -> the reward of its completions: `openai/gsm8k: gsm8k`."""
    workers: int = Field(2, ge=1)
    """Processes that rewards run in."""
    wait_s: float = Field(600.0, ge=0)
    """How long a service that a reward asks is waited for while it is away, before the run ends."""

    @model_validator(mode="before")
    @classmethod
    def _routes_alone(cls, tree: Any) -> Any:
        return {"functions": [], **tree} if isinstance(tree, Mapping) and tree.get("by_data_source") else tree

    @model_validator(mode="after")
    def _at_least_one(self) -> Self:
        if not self.functions and not self.by_data_source:
            raise ValueError("reward.functions is empty and there is no reward.by_data_source: nothing gives a reward")
        return self


class TrainConfig(Section):
    """How the policy is updated."""

    steps: int = Field(100, ge=1)
    total_epochs: float | None = Field(None, gt=0)
    """Passes over the data, in the place of `steps`."""
    epochs_per_step: int = Field(1, ge=1)
    """Passes over the rows of a step."""
    rows_per_update: int | None = Field(None, ge=1)
    """Completions in one optimizer step; None takes all rows of the step."""
    tokens_per_micro_batch: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(lambda value: "auto" if value is None else value)
    ] = "auto"
    """Padded tokens in one forward pass; changes speed and memory, never the gradient. `auto`: on a GPU chosen from its
    free memory, on a CPU 3072. On a GPU passes without gradient take more: as many as need no more memory."""
    rows_per_micro_batch: int | None = Field(None, ge=1)
    """A further limit on a forward pass, in rows."""
    max_row_tokens: int | None = Field(None, ge=2)
    """Rows are cut to this many tokens, prompt and completion together."""
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"
    """`adamw8bit` keeps Adam's moments in 8 bits (bitsandbytes); paged, they move to the CPU's memory where a GPU's is
    full."""
    learning_rate: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The end of `linear` and `cosine`, as a fraction of `learning_rate`."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    report_entropy: bool = True
    """Log `actor/entropy` (costs one more reduction over the vocabulary)."""
    timeout_s: float = Field(3600.0, gt=0)
    """Within which a token, a micro-batch or a reward must come in the process of the run; it ends with an error that
    names what hangs."""

    def micro_batch_tokens(self, device_type: str) -> int:
        """`tokens_per_micro_batch`; where it is `auto` and nothing was chosen, 3072 on a CPU and 8192 elsewhere."""
        if self.tokens_per_micro_batch == "auto":
            return 3072 if device_type == "cpu" else 8192
        return self.tokens_per_micro_batch


class EvalConfig(Section):
    """Evaluation on held-out problems."""

    every_steps: int = Field(0, ge=0)
    """Evaluate every so many steps; 0: only before and after."""
    before: bool = True
    after: bool = True
    samples_per_prompt: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_completion_tokens: int | None = Field(None, ge=1)
    """None takes the rollout's."""


class CheckpointConfig(Section):
    """When the state is saved and what stays; the end of a run is always saved (docs/guides/checkpoints.md)."""

    every_steps: int = Field(20, ge=0)
    """Save every so many steps; 0: only at the end."""
    keep: int = Field(2, ge=1)
    """How many of the newest ones."""
    keep_best: str | None = None
    """A metric, as `critic/score/mean`: the checkpoint with the best value of it stays too (`RUN/best`)."""
    best_is: Literal["max", "min"] = "max"


class GptConfig(Section):
    """The shape of a GPT with fresh weights; its tokenizer is made for the data."""

    layers: int = Field(4, ge=1)
    hidden: int = Field(256, ge=32)
    heads: int = Field(4, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    """Width of a head; None is `hidden / heads`. vLLM computes on a CPU with heads of 32, 64, 80 and more only."""
    intermediate: int | None = Field(None, ge=1)
    family: Literal["llama", "qwen2"] = "llama"
    max_tokens: int = Field(1024, ge=16)
    """The longest row that a serving engine will accept."""

    @model_validator(mode="after")
    def _heads_that_fit(self) -> Self:
        check_heads(self.hidden, self.heads, self.kv_heads or self.heads, self.head_dim, self.family)
        return self


def check_heads(hidden: int, heads: int, kv_heads: int, head_dim: int | None, family: str) -> None:
    """That attention of this shape is possible, or a ConfigError."""
    if heads % kv_heads:
        raise ConfigError(f"gpt: heads={heads} must be a multiple of kv_heads={kv_heads}")
    if head_dim is None and hidden % (2 * heads):
        raise ConfigError(f"gpt: heads={heads} must divide hidden={hidden} into heads of an even size, or say head_dim")
    if head_dim is not None and (head_dim % 2 or family != "llama"):
        raise ConfigError(f"gpt: head_dim={head_dim} must be even, and of family llama (others derive it)")


class SftConfig(Section):
    """Supervised training (SFT); steps, rows and learning rate are those of `train`."""

    completion_field: str = "completion"
    """Where a row of a file has its demonstration; a generator writes its own."""
    gpt: GptConfig | None = None
    """Start from a fresh GPT of this shape, in place of `model.path`."""


class PreferenceConfig(Section):
    """Training on preferences; pairs in an optimizer step are `train.rows_per_update` (64), and steps
    and learning rate are those of `train`. A generator writes its own pairs
    (docs/guides/preference_optimization.md)."""

    chosen_field: str = "chosen"
    """Where a row of a file has the better completion, or the whole conversation."""
    rejected_field: str = "rejected"
    completion_field: str = "completion"
    """Of rows that are labelled one by one."""
    label_field: str = "label"
    """true: a good completion."""


class CriticConfig(Section):
    """The critic, for algorithms that have one (PPO, A2C, TRPO); otherwise without effect."""

    path: str | None = None
    """Where its weights start from: a causal or a reward model; None is `model.path`."""
    learning_rate: float = Field(1e-5, gt=0)
    """Schedule, Adam's constants and clipping are those of `train`."""


class TeacherConfig(Section):
    """Whom the policy is distilled from."""

    path: str
    """A folder in Hugging Face layout, or a hub name; its vocabulary must be the policy's."""


class PretrainConfig(Section):
    """Pretraining on plain text; `data.train` is a folder of `atomrl data prepare`. Steps, windows in
    an optimizer step (`rows_per_update`, 64), learning rate and micro-batches are those of `train`, and the loss on
    the validation split is computed every `eval.every_steps`."""

    gpt: GptConfig | None = None
    """Start from a fresh GPT of this shape, in place of `model.path`."""
    window_tokens: int = Field(256, ge=2)
    """Tokens of a row, cut from the text at a random place."""
    eval_windows: int = Field(64, ge=1)
    """Windows of the validation split, the same at every step."""
    sample_every_steps: int = Field(0, ge=0)
    """Write samples, and at the end; 0: none."""
    samples: int = Field(2, ge=1)
    sample_tokens: int = Field(128, ge=1)
    sample_prompt: str = Field("\n", min_length=1)
    sample_temperature: float = Field(0.8, ge=0)
