"""The sections of a config: a class for each, with the meaning of each key beside it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from atomrl.chat_template import SET_HERE
from atomrl.config.base import ConfigError, Section


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
