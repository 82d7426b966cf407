"""The sections of a config: one class per section, one documented field per key.

The docstring below a field is the one description of its key: `make keys` writes it into docs/reference/config.md, the
web page and the help of commands. So each has to make sense alone.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from atomrl.common.chat_template import SET_HERE
from atomrl.common.errors import ConfigError
from atomrl.common.secrets import is_variable
from atomrl.config.adapters import adapters_section
from atomrl.types import SAMPLING_KEYS, SamplingParams

_CONTROL = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""Control characters, and marks that change the direction of text."""
NAME = rf"^[^/\\.{_CONTROL}][^/\\{_CONTROL}]*$"
DEVICE, TEMPLATE = r"^(auto|cpu|cuda(:\d+)?)$", r"^(auto|none|messages_only|chatml|.+\.jinja)$"
ADDRESS = r"^https?://[^/\s]+$"
FORMS = {
    NAME: "must be a name without slashes, control characters and a leading dot",
    DEVICE: "must be auto, cpu, cuda or cuda:N",
    TEMPLATE: "must be auto, none, messages_only, chatml or a file FILE.jinja",
    ADDRESS: "must be an address such as http://HOST:PORT, without a path",
}
"""Regular expression of a field -> what a message says in its place."""


class Section(BaseModel):
    """Base class of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


# --------------------------------------------------------------------------------------------------------------------
# Model

Quantization = Literal["nf4", "int8"]


class LoraConfig(Section):
    """Low-rank adapters (needs the `lora` extra)."""

    @model_validator(mode="before")
    @classmethod
    def _read_start(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(start := given.get("start"), str):
            return given
        stored = adapters_section(start)
        for key in ("rank", "alpha"):
            if key in given and stored.get(key, given[key]) != given[key]:
                raise ValueError(f"{key}={given[key]}: the adapters in {start} have {stored[key]}; leave it out")
        return stored | given

    rank: int = Field(16, ge=1)
    """Columns of each adapter's two matrices."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by `alpha / rank`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on an adapter's input, in training."""
    target_modules: list[str] | str = "all-linear"
    """Linear layers that get an adapter: `all-linear` (all between embedding and output matrix), a list of module names
    or path suffixes, or a regular expression that matches whole module paths."""
    modules_to_save: list[str] = []
    """Modules that are trained in full beside the adapters, by the ends of their names (`[lm_head, embed_tokens]`); the
    score head of a reward model always is."""
    start: str | None = None
    """Folder of trained adapters, in peft's layout, to start from; null: new ones. Keys of this section that are not
    given are read from its adapter_config.json."""
    reference: Literal["base", "start"] = "base"
    """The reference policy: `base`, the model without adapters; `start`, with those of `start`."""

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self.reference == "start" and self.start is None:
            raise ValueError("reference=start: needs start, a folder of trained adapters")
        return self


class ModelConfig(Section):
    """The policy."""

    path: str | None = None
    """A folder in Hugging Face layout, or a hub name, `OWNER/NAME` or `OWNER/NAME@REVISION`. Required unless `sft.gpt`
    or `pretrain.gpt` starts from a new model."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, if it is not beside the model."""
    device: str = Field("auto", pattern=DEVICE)
    """Device of trainer and engine: `cpu`, `cuda`, `cuda:1`, ...; `auto` is a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass; master weights are always float32. `auto` is bfloat16 if the hardware has fast
    bfloat16 instructions."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute each layer in the backward pass instead of storing its activations: less memory, updates a third
    slower. `auto`: on a GPU, if the run does not fit without it or runs out of memory with one row per micro-batch."""
    activation_offload: bool = False
    """Keep activations in CPU memory between the forward and the backward pass; needs a GPU."""
    compile: bool = False
    """Compile each layer with `torch.compile` (pays off after some tens of steps)."""
    pack_rows: bool | None = None
    """Pack the rows of a forward pass without padding, with the prompt of a group computed once. null: if the model
    supports it, on a GPU only in bfloat16; true: an error if it does not; false: padded rows."""
    lora: LoraConfig | None = None
    quantization: Quantization | None = None
    """Quantize the frozen linear layers under the adapters to 4 bits (`nf4`) or 8 bits (`int8`), with bitsandbytes.
    null: keep them in `dtype` (docs/guides/reduce_memory.md)."""
    freeze_vision: bool = True
    """Leave the vision tower of a model as it is. false: train it with the rest; needs data with pictures."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @property
    def checkpoints_layers(self) -> bool:
        """Return `gradient_checkpointing`; False for an `auto` that has not been resolved."""
        return self.gradient_checkpointing is True

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        if self.quantization and self.lora is None:
            raise ValueError("model.quantization: quantised weights cannot be trained; set model.lora too")
        if self.quantization and self.compile:
            raise ValueError("model.quantization: quantised layers are not compiled; remove compile")
        return self

    @model_validator(mode="after")
    def _check_vision(self) -> Self:
        if self.lora is not None and not self.freeze_vision:
            raise ValueError("model.freeze_vision=false: adapters leave the vision tower as it is; remove it or lora")
        return self


# --------------------------------------------------------------------------------------------------------------------
# Environment and tools


class EnvironmentConfig(Section):
    """Multi-turn environment that replies to the model (docs/guides/environments.md).

    `rollout.max_completion_tokens` limits an episode after its prompt, replies included; with `when_full=drop_oldest`
    it limits the context that the model sees at once.
    """

    function: str
    """A built-in name, or a dotted path to a generator function, an async function, or a class with reset and step."""
    args: dict[str, Any] = {}
    """Arguments that are passed by name to each episode."""
    opening: bool = False
    """The environment starts the episode: its first text is appended to the prompt's last message."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a turn of the model, in addition to `rollout.stop`."""
    max_turns: int = Field(8, ge=1)
    """Maximum number of model turns; the environment may end the episode earlier."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of one model turn; null: the rest of the episode."""
    when_full: Literal["end", "drop_oldest"] = "end"
    """If there is no room for another turn: `end` the episode, or `drop_oldest` turns from the model's context."""
    max_reply_tokens: int = Field(512, ge=1)
    """Maximum tokens of one reply of the environment; longer replies are truncated, those with pictures fail."""
    images: bool = False
    """Replies may have pictures (`Reply.images`)."""
    timeout_s: float = Field(30.0, gt=0)
    """Time limit of one reply of the environment."""
    wait_s: float = Field(600.0, ge=0)
    """How long to wait for an unavailable service that the environment calls, before the run ends."""
    workers: int = Field(2, ge=1)
    """Worker processes; each runs many episodes at once."""


class ToolConfig(Section):
    """Tools that the model may call (docs/guides/tool_calling.md)."""

    function: str | None = None
    """A dotted path to a function with type hints and a docstring, or to a class with such methods."""
    args: dict[str, Any] = {}
    """Arguments set by the config and hidden from the model; for a class, its constructor arguments."""
    mcp: str | tuple[str, ...] | None = None
    """All tools of an MCP server: the command that starts it, or its URL. `${NAME}`, here and in `env`, is replaced by
    the run's environment variable, so that no secret is written into the config."""
    env: dict[str, str] = {}
    """Environment variables of the server's command, which inherits only a few others."""
    headers_env: dict[str, str] = {}
    """HTTP headers for a server's URL: header name -> environment variable with its value."""
    timeout_s: float = Field(20.0, gt=0)
    """Time limit of a call, and of connecting to an MCP server. `environment.timeout_s` limits all calls of a turn."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, tree: Any) -> Any:
        return {"function": tree} if isinstance(tree, str) else tree

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.function is None) == (not self.mcp):
            raise ValueError("a tool is a function or an MCP server: give either function or mcp")
        if isinstance(self.mcp, str) and not self.mcp.startswith(("http://", "https://")):
            raise ValueError(
                "mcp must be a command as a list of strings, or a URL that begins with http:// or https://"
            )
        if wrong := [header for header, name in self.headers_env.items() if not is_variable(name)]:
            raise ValueError(f"headers_env.{wrong[0]} must be the name of an environment variable, as in MY_KEY")
        if self.args and self.mcp:
            raise ValueError("args are for a function; configure an MCP server by its command or URL")
        return self


# --------------------------------------------------------------------------------------------------------------------
# Tracking


class TrackingConfig(Section):
    """Trackers and records, in addition to `metrics.jsonl`."""

    sinks: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Trackers, each an extra to install, in addition to `metrics.jsonl`, which is always written."""
    wandb_project: str = "atomrl"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """User or team in Weights & Biases; null: your own."""
    wandb_tags: list[str] = []
    """Tags of the run in Weights & Biases."""
    log_every_steps: int = Field(1, ge=1)
    """Interval at which the trackers in `sinks` log; `metrics.jsonl` has every step."""
    save_rollouts: bool = True
    """Save completions in `RUN/rollouts`."""
    tokens: float = Field(2, ge=0)
    """Groups whose per-token values (log-prob, loss, gradient) are recorded with the rollouts
    (docs/guides/inspect_tokens.md). Below 1: a fraction of the prompts, the same ones for the whole run. From 1: that
    many groups per step, those with differing rewards first. 0: none."""
    log_completions: int = Field(10, ge=0)
    """Print a few completions with reward and advantage, at the first step and then every N steps. true: every step;
    false or 0: never."""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.tokens >= 1 and self.tokens % 1:
            raise ValueError(f"tokens={self.tokens:g} must be a fraction below 1 or a whole number of groups")
        return self


# --------------------------------------------------------------------------------------------------------------------
# Back ends of several ranks


class RankedConfig(Section):
    """Keys that all distributed back ends share."""

    ranks: int | None = Field(None, ge=1)
    """Number of training processes, including the one that you start. null: as many as torchrun or accelerate started,
    else one per GPU, or one without a GPU."""
    timeout_s: float = Field(600.0, gt=0)
    """Time limit for all ranks to reach the same point; the error names the missing ranks."""
    restarts: int = Field(2, ge=0)
    """How often a run may restart all ranks from the newest checkpoint after a rank died, hung or ran out of memory
    (then with half the micro-batch, or gradient checkpointing). Ranks that a launcher started are not restarted: the
    run ends."""

    @property
    def divisors(self) -> Mapping[str, int]:
        """Numbers that must divide the number of ranks, by the setting they come from (`tensor=2`)."""
        raise NotImplementedError

    @property
    def choices(self) -> Mapping[str, Any]:
        """Alternative values of settings whose memory a dry run prints; invalid combinations are skipped there."""
        raise NotImplementedError

    @property
    def activation_ranks(self) -> int:
        """Number of ranks over which a layer's activations are split, apart from the residual stream and its norms."""
        return 1

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that compute the same rows."""
        return 1

    def check_count(self, ranks: int) -> None:
        """Raise ConfigError if the settings do not divide a number of ranks."""
        for setting, divisor in self.divisors.items():
            if ranks % divisor:
                raise ConfigError(f"backend.{setting} does not divide the {ranks} ranks")

    @model_validator(mode="after")
    def _check_divisors(self) -> Self:
        for setting, divisor in self.divisors.items():
            if self.ranks is not None and self.ranks % divisor:
                raise ValueError(f"backend.{setting} does not divide ranks={self.ranks}")
        return self


class FSDPConfig(RankedConfig):
    """Shard weights, gradients and optimizer state over the ranks (PyTorch FSDP2)."""

    type: Literal["fsdp"]
    """The back end."""
    replicas: int = Field(1, ge=1)
    """Hybrid sharding (HSDP): number of replicas, each sharded over ranks / replicas ranks."""
    reduce: Literal["micro_batch", "update"] = "micro_batch"
    """When gradients are reduced over ranks: after each micro-batch, or once per update (each rank then holds full
    gradients until the reduction)."""
    sequence: int = Field(1, ge=1)
    """Sequence parallel size (Ulysses), for rows that are too long for one GPU: ranks that split the tokens of the same
    rows. Must divide the ranks and the model's query and key-value heads."""
    tensor: int = Field(1, ge=1)
    """Tensor parallel size: ranks that split each layer's matrices and compute the same rows. Must divide the ranks,
    the model's query and key-value heads and the MLP width."""
    cpu_offload: bool = False
    """Keep the shards of weights, gradients and optimizer state in CPU memory; needs GPUs."""

    @property
    def divisors(self) -> Mapping[str, int]:
        sizes = {"replicas": self.replicas, "sequence": self.sequence, "tensor": self.tensor}
        return {f"{key}={value}": value for key, value in sizes.items()}

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
    def _check_combination(self) -> Self:
        if self.tensor > 1 and (self.sequence > 1 or self.replicas > 1):
            raise ValueError("backend.tensor cannot be combined with sequence or replicas: remove one of them")
        return self


class MegatronConfig(RankedConfig):
    """Tensor, pipeline and expert parallelism with NVIDIA's megatron-core."""

    type: Literal["megatron"]
    """The back end."""
    tensor: int = Field(1, ge=1)
    """Tensor parallel size: ranks that split each layer's heads and MLP, and the vocabulary. Must divide the query and
    key-value heads and the MLP width."""
    pipeline: int = Field(1, ge=1)
    """Pipeline stages, each with the same number of layers. tensor x pipeline ranks hold one copy of the model; the
    ranks / (tensor x pipeline) copies are data parallel."""
    expert: int = Field(1, ge=1)
    """Expert parallel size of a mixture of experts: ranks that split each layer's experts. A multiple of tensor; with
    several pipeline stages, equal to tensor."""

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
"""The distributed back ends; `type` selects one."""


# --------------------------------------------------------------------------------------------------------------------
# Data and rollouts


class DataConfig(Section):
    """Data sets, and how a row becomes a prompt."""

    train: str | list[str]
    """A file (JSONL, JSON, CSV, Parquet, or a folder of `datasets`), a data set of the Hugging Face hub
    (`openai/gsm8k:main:train@REVISION`), a list of these, or a generator: `countdown`, `reasoning_gym:NAME`, ...
    (`atomrl data make --help`)."""
    eval: str | list[str] | None = None
    """Held-out problems, in the same forms as `train`."""
    train_size: int | None = Field(None, ge=1)
    """Number of problems that a generator makes, or of rows to use from a file."""
    eval_size: int | None = Field(None, ge=1)
    """Number of held-out problems that a generator makes, or of rows to use from the file of `eval`."""
    generator_args: dict[str, Any] = {}
    """Arguments of the generator."""
    prompt_field: str = "prompt"
    """Column of the prompt: text, or messages."""
    answer_field: str | None = "ground_truth"
    """Column of the ground truth. null: the rows have none (demonstrations, or rewards that need none)."""
    data_source_field: str = "data_source"
    """Column of the data source, for metrics and `reward.by_data_source`."""
    answer_pattern: str | None = None
    """A regular expression whose first group, in the answer column, is the ground truth (GSM8K: `####\\s*(.+)`)."""
    system_prompt: str | None = None
    """Prepended to prompts without a system prompt."""
    system_prompt_file: str | None = None
    """File with the system prompt."""
    chat_template: str = Field("auto", pattern=TEMPLATE)
    """`auto`: apply the tokenizer's template, if it has one. `none`: use the text as it is, for prompts that contain
    their template. `messages_only`: apply it to messages, and use text as it is (TRL). `chatml`, or the path of a
    .jinja file: replace the tokenizer's template, and save it with the model."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `{enable_thinking: false}` (Qwen 3), `{reasoning_effort: low}` (gpt-oss),
    `{date_string: 26 Jul 2024}` (Llama 3.2). A variable that the template does not read is an error."""
    row_end: Literal["turn", "template"] = "turn"
    """Where a demonstration or a preference of messages ends. `turn`: with the token that ends the assistant's last
    turn, at which the model stops. `template`: with all that the chat template writes, such as the line break of
    ChatML, which is trained too (TRL)."""
    images_field: str | None = None
    """Column with the pictures of a row, in the order of the `<image>` in its prompt. null: `images` or `image`."""
    min_pixels: int | None = Field(None, ge=1)
    """Pictures with fewer pixels are enlarged. null: the setting of the model's image processor."""
    max_pixels: int | None = Field(None, ge=1)
    """Pictures with more pixels are reduced, which saves tokens. null: the setting of the model's image processor."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Maximum tokens of a prompt; `overlong_prompt` says what happens to longer ones."""
    overlong_prompt: Literal["drop", "truncate"] = "drop"
    """Prompts over `max_prompt_tokens`: `drop` them, or `truncate` them to their last tokens."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Invalid rows: `error` lists all of them with file and line and stops; `skip` leaves them out and counts them."""
    shuffle: bool = True
    """Shuffle anew in each epoch."""

    @model_validator(mode="after")
    def _check_system_prompt(self) -> Self:
        if self.system_prompt is not None and self.system_prompt_file is not None:
            raise ValueError("give system_prompt or system_prompt_file, not both")
        return self

    @model_validator(mode="after")
    def _check_pixels(self) -> Self:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}")
        return self

    @model_validator(mode="after")
    def _check_template_variables(self) -> Self:
        for name in self.chat_template_kwargs.keys() & {*SET_HERE}:
            raise ValueError(f"chat_template_kwargs: {name!r} is set by AtomRL; remove it")
        return self


Server = Annotated[str, Field(pattern=ADDRESS)]
"""URL of a server, without a path."""


class RolloutConfig(Section):
    """How completions are sampled during training."""

    engine: str = "auto"
    """Rollout engine: `native`, `hf`, `vllm`, `vllm-server` or `sglang`. `auto`: on a GPU vLLM, if it is installed and
    supports the model, else `native` (docs/guides/distributed_rollout.md)."""
    source: Literal["engine", "pool"] = "engine"
    """Source of a step's groups: the run's own `engine`, or a `pool` that `atomrl pool fill` writes (section `pool`,
    docs/guides/rollout_pool.md)."""
    prompts_per_step: int = Field(16, ge=1)
    """Prompts per step; times `completions_per_prompt` are its rows."""
    completions_per_prompt: int = Field(8, ge=1)
    """Group size: completions of a prompt, whose rewards are compared."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy, which leaves nothing to learn from."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this probability; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample no token whose probability is below this fraction of the most likely token's."""
    min_completion_tokens: int = Field(0, ge=0)
    """No end of sequence before this many tokens."""
    max_completion_tokens: int = Field(256, ge=1)
    """Completions are truncated at this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, in addition to the tokenizer's own."""
    logprobs_over: Literal["vocabulary", "kept", "none"] = "vocabulary"
    """Tokens that log-probs are normalized over. `vocabulary`: all. `kept`: those that top-p and top-k left, in engine
    and trainer alike; the `hf` engine does not support it. `none`: vLLM and SGLang return no log-probs, which is
    faster; their difference from the trainer's is then neither measured nor corrected (`algorithm.rollout_is`)."""
    max_concurrent_completions: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Maximum number of completions that an engine decodes at once: speed against memory. `auto`: on a GPU as many as
    fit, up to all of a step; 256 on a CPU. With an environment, the native engine caches as many again between two
    turns."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Fraction of a GPU's memory for vLLM or SGLang. `auto`: what the trainer leaves, by the estimate of `atomrl plan`,
    but no more than the engine can use."""
    tensor_parallel: int = Field(1, ge=1)
    """Tensor parallel size of a vLLM or SGLang engine, in GPUs."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM (`EngineArgs`) or SGLang (`ServerArgs`), by their own names. An argument that they do
    not have, or that AtomRL sets itself, is an error."""
    server: Annotated[tuple[Server, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = ()
    """URLs of running servers for the engines `vllm-server` and `sglang`, such as `http://127.0.0.1:8000`; groups are
    distributed over them. Empty: the engine starts a server of its own for the run."""
    server_timeout_s: float = Field(600.0, gt=0)
    """Time limit of one server request, a completion included; the run then ends with an error that names the
    server."""
    server_weights: Literal["files", "collective"] = "files"
    """Weight transfer to servers: `files` on a path that they can read, or a `collective` broadcast (`sglang` only)."""

    @property
    def concurrent_completions(self) -> int:
        """Return `max_concurrent_completions`; 256 for an `auto` that has not been resolved."""
        return 256 if self.max_concurrent_completions == "auto" else self.max_concurrent_completions

    @model_validator(mode="after")
    def _check_servers(self) -> Self:
        if len({*self.server}) < len(self.server):
            raise ValueError(f"rollout.server has a duplicate: {', '.join(self.server)}")
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        try:
            SamplingParams(**self.model_dump(include=SAMPLING_KEYS))
        except ValueError as error:
            raise ValueError(f"rollout.{error}") from None
        if self.logprobs_over == "kept" and self.temperature == 0:
            raise ValueError("rollout.logprobs_over=kept needs a temperature above 0")
        return self


# --------------------------------------------------------------------------------------------------------------------
# Curriculum


def _as_type(value: Any) -> Any:
    """Convert a text to the choice of that type."""
    return {"type": value} if isinstance(value, str) else value


class DifficultySamplerConfig(Section):
    """Draws each prompt once per epoch, from easy to hard."""

    type: Literal["difficulty"]
    """Each epoch has every prompt once, from easy to hard."""
    field: str
    """Column with the difficulty of a prompt, a number: a level, or a pass rate."""
    easiest: Literal["min", "max"] = "min"
    """The easiest prompt has the smallest (`min`: a level) or the largest number (`max`: a pass rate)."""


class CustomSamplerConfig(Section):
    """Draws prompts in the order of a class of the user's."""

    type: Literal["custom"]
    """Your own class chooses each prompt."""
    function: str
    """A dotted path to a subclass of `atomrl.data.curriculum.Sampler`."""
    args: dict[str, Any] = {}
    """Arguments that are passed to the class by name."""


class SolvedGateConfig(Section):
    """Drops prompts that are always solved."""

    type: Literal["solved"]
    """Drop prompts that are always solved, for the rest of the run."""
    groups: int = Field(2, ge=1)
    """A prompt is dropped after this many groups in a row in which every reward is at least `reward`."""
    reward: float = 1.0
    """Reward of a solved completion."""


class CustomGateConfig(Section):
    """Skips prompts and rejects groups as a class of the user's says."""

    type: Literal["custom"]
    """Your own class skips prompts and rejects groups."""
    function: str
    """A dotted path to a subclass of `atomrl.data.curriculum.Gate`."""
    args: dict[str, Any] = {}
    """Arguments that are passed to the class by name."""


SamplerConfig = DifficultySamplerConfig | CustomSamplerConfig
GateConfig = SolvedGateConfig | CustomGateConfig


class CurriculumConfig(Section):
    """Which prompt is sampled next, and which groups are trained on (docs/guides/curriculum.md)."""

    sampler: SamplerConfig | None = Field(None, discriminator="type")
    """Order of the prompts; null: each epoch has every prompt once, in the order of `data.shuffle`."""
    gates: list[Annotated[Annotated[GateConfig, Field(discriminator="type")], BeforeValidator(_as_type)]] = []
    """Gates that skip prompts or reject groups, in addition to `algorithm.group_filter`. An item may be a type
    alone."""

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        names = [gate.function if isinstance(gate, CustomGateConfig) else gate.type for gate in self.gates]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"curriculum.gates: {twice[0]} is given twice")
        return self


# --------------------------------------------------------------------------------------------------------------------
# Cluster, asynchronous loop, rollout pool

ClusterRole = Literal["rollout", "trainer", "reference", "critic", "teacher", "reward"]
"""Roles that may run in Ray actors of their own."""


class ResourceConfig(Section):
    """Ray resources of an actor."""

    num_cpus: float = Field(1.0, gt=0)
    """CPUs of the actor, which is also its number of threads."""
    num_gpus: float | None = Field(None, ge=0)
    """GPUs of the actor: a fraction of one, or a whole number (for an engine, `rollout.tensor_parallel`). null: set by
    `placement`, else 0. Engines without a GPU are refused on a cluster that has GPUs."""
    custom: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Custom Ray resources that the actor needs (`ray start --resources`): name -> amount."""

    @model_validator(mode="after")
    def _check_resources(self) -> Self:
        if (gpus := self.num_gpus or 0) > 1 and gpus % 1:
            raise ValueError(f"num_gpus={gpus:g}: an actor gets a fraction of one GPU, or whole ones")
        if own := self.custom.keys() & {"CPU", "GPU", "memory", "object_store_memory"}:
            raise ValueError(f"custom: {min(own)} is a built-in resource of Ray; use num_cpus and num_gpus")
        return self


class ClusterConfig(Section):
    """Rollout engines, the trainer and its models in Ray actors."""

    placement: Literal["colocated", "split"] | None = None
    """`colocated`: trainer and engines share a GPU, half each, and the engines sleep during updates. `split`: every
    actor has a GPU of its own. null: only the engines and the roles in `resources` run in actors."""
    replicas: int = Field(1, ge=1)
    """Number of rollout engines; groups are distributed over them."""
    resources: dict[ClusterRole, ResourceConfig] = {}
    """Resources of the actors by role; for `rollout`, of each replica. Roles that are not listed run in the process
    that you start, or with `placement`, in the trainer's actor."""
    address: str | None = None
    """Address of a running Ray cluster; null starts one on this machine for the run."""
    timeout_s: float = Field(600.0, gt=0)
    """Time limit of a call to an actor; the run then ends with an error that names the actor."""
    weight_transfer: Literal["shared_memory", "files", "collective"] = "shared_memory"
    """Weight transfer to the replicas: Ray's object store, safetensors files, or a broadcast (NCCL, or gloo)."""
    weight_folder: str | None = None
    """Folder for `weight_transfer=files`, which all machines must see; each run has a folder in it. null: a folder of
    the run."""


class AsynchronousConfig(Section):
    """Sample rollouts while the trainer updates."""

    max_staleness: int = Field(1, ge=0)
    """Maximum number of weight versions that a trained token may lag behind the trainer's weights. 0: on-policy, in
    step with the trainer; 1: one step off-policy."""
    on_update: Literal["keep", "abort", "wait"] = "keep"
    """Completions that are running when new weights arrive: `keep` continues them with the new weights, `abort`
    restarts them, `wait` delays the update until they finish."""
    oversampling: float = Field(1.0, ge=1)
    """Sample this many times the groups that a step needs; the first groups to finish are trained on."""
    min_completions: int | None = Field(None, ge=1)
    """While the trainer waits, accept a group with this many finished completions and drop the rest; null: wait for
    all."""
    timeout_s: float = Field(600.0, gt=0)
    """Time limit for the engine or the rewards to finish anything; the run then ends with an error that lists what is
    pending."""


class PoolConfig(Section):
    """Rollout pool: `atomrl pool fill` writes it, and a run with `rollout.source: pool` trains on it."""

    folder: str | None = None
    """Folder of the pools, one file each; on a local disk. null: `pools` in `output_dir`."""
    name: str | None = Field(None, pattern=NAME)
    """File name of the pool. null: `run_name`, so that each run has a pool of its own."""
    capacity: int = Field(4096, ge=1)
    """Maximum number of unclaimed groups. Evicts the oldest weight version first, then first in, first out."""
    ttl_s: float = Field(86400.0, gt=0)
    """Age after which a group is removed."""
    max_staleness: int = Field(4, ge=0)
    """Maximum number of weight versions (steps) that a group's oldest token may lag behind the policy."""
    max_uses: int = Field(1, ge=1)
    """Maximum number of steps that train on the same group."""
    min_response_tokens: int = Field(0, ge=0)
    """Skip groups that have a completion shorter than this."""
    timeout_s: float = Field(600.0, gt=0)
    """How long a step waits for groups before the run ends with an error."""
    lease_s: float = Field(1800.0, gt=0)
    """Time without a sign of life after which a trainer's claimed groups are released to others."""

    @model_validator(mode="before")
    @classmethod
    def _check_moved(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and "mixed_only" in tree:
            raise ValueError(
                "pool.mixed_only is gone: algorithm.group_filter=mixed_outcomes skips groups in which all rewards are "
                "equal, of a pool too"
            )
        return tree


# --------------------------------------------------------------------------------------------------------------------
# Rewards


class RewardRoute(Section):
    """A reward function and how to call it."""

    function: str
    """A built-in name, or a dotted path to a function of the same signature, to verl's `compute_score`, or to a class
    that is called with trajectories."""
    args: dict[str, Any] = {}
    """Arguments that are passed to the function by name."""
    completions: Literal["text", "messages"] | None = None
    """Form of the completions if the prompts are messages: `text`, or `messages` as in TRL, each
    `[{"role": "assistant", "content": text}]`. null: messages if the function is TRL's or its annotation says lists of
    dicts, else text."""
    timeout_s: float = Field(10.0, gt=0)
    """Time limit of one completion, for rewards that run in worker processes (all but the cheap built-in ones); of one
    request, for rewards that call a service."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, route: Any) -> Any:
        return {"function": route} if isinstance(route, str) else route


class RewardItem(RewardRoute):
    """A reward function and its weight in the sum."""

    weight: float = 1.0
    """Weight in the sum."""


class RewardConfig(Section):
    """How completions are scored."""

    functions: list[RewardItem] = [RewardItem(function="strict_math")]
    """Rewards of every completion; their weighted sum is its reward, and the first decides what counts as correct. An
    item may be a name alone. The default is empty if `by_data_source` is set (docs/guides/rewards.md)."""
    by_data_source: dict[str, RewardRoute] = {}
    """Rewards by data source, as in `openai/gsm8k: gsm8k`."""
    workers: int = Field(2, ge=1)
    """Worker processes that compute rewards; for rewards over HTTP, the number of concurrent requests."""
    wait_s: float = Field(600.0, ge=0)
    """How long to wait for an unavailable service that a reward calls, before the run ends."""

    @model_validator(mode="before")
    @classmethod
    def _default_functions(cls, tree: Any) -> Any:
        return {"functions": [], **tree} if isinstance(tree, Mapping) and tree.get("by_data_source") else tree

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if not self.functions and not self.by_data_source:
            raise ValueError("reward.functions is empty and reward.by_data_source is not set: give a reward")
        return self


# --------------------------------------------------------------------------------------------------------------------
# Training, evaluation, checkpoints


class TrainConfig(Section):
    """Updates of the policy."""

    steps: int = Field(100, ge=1)
    """Number of steps; each samples `prompts_per_step` prompts and trains on all completions."""
    total_epochs: float | None = Field(None, gt=0)
    """Passes over the data, instead of `steps`; 0.5 is half of it. `train.steps=N` on the command line replaces it."""
    epochs_per_step: int = Field(1, ge=1)
    """Passes over the rows of a step (PPO epochs)."""
    rows_per_update: int | None = Field(None, ge=1)
    """Completions per optimizer step (mini-batch); null: all rows of the step."""
    tokens_per_micro_batch: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(lambda value: "auto" if value is None else value)
    ] = "auto"
    """Padded tokens per forward pass; changes speed and memory, never the gradient. `auto`: on a GPU as many as fit, up
    to 16384; 3072 on a CPU (more leave its cache and are slower). On a GPU, passes without gradient take as many more
    as fit in the same memory."""
    rows_per_micro_batch: int | None = Field(None, ge=1)
    """Maximum rows per forward pass, in addition to `tokens_per_micro_batch`."""
    max_row_tokens: int | None = Field(None, ge=2)
    """Truncate rows to this many tokens, prompt and completion together."""
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"
    """`adamw8bit` keeps Adam's moments in 8 bits (bitsandbytes); `paged_adamw8bit` also moves them to CPU memory when
    the GPU's is full."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate; about 1e-6 for full fine-tuning, 1e-5 to 1e-4 for adapters."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "constant"
    """Learning rate after the warmup."""
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    """Fraction of all optimizer steps over which the learning rate rises linearly."""
    warmup_updates: int = Field(0, ge=0)
    """The same as a number of optimizer steps; above 0 it replaces `warmup_ratio`."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate of `linear` and `cosine`, as a fraction of `learning_rate`."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of Adam's second moment."""
    adam_eps: float = Field(1e-8, gt=0)
    """Added to the root of Adam's second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    report_entropy: bool = True
    """Log `actor/entropy` (costs one more reduction over the vocabulary)."""
    timeout_s: float = Field(3600.0, gt=0)
    """Time limit without progress (a token, a micro-batch or a reward) in the run's process; the run then ends with an
    error that names what hangs."""

    def micro_batch_tokens(self, device_type: str) -> int:
        """Return `tokens_per_micro_batch`; for an `auto` that has not been resolved, 3072 on a CPU and 8192 on a
        GPU."""
        if self.tokens_per_micro_batch == "auto":
            return 3072 if device_type == "cpu" else 8192
        return self.tokens_per_micro_batch


class EvalConfig(Section):
    """Evaluation on held-out problems."""

    every_steps: int = Field(0, ge=0)
    """Evaluate every N steps; 0: only before and after training."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    samples_per_prompt: int = Field(1, ge=1)
    """Completions per problem, for mean accuracy and pass@k."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this probability; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 keeps all."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of a completion. null: `rollout.max_completion_tokens`."""


class CheckpointConfig(Section):
    """When to save checkpoints and which to keep; the last step is always saved (docs/guides/checkpoints.md)."""

    every_steps: int = Field(20, ge=0)
    """Save every N steps; 0: only at the end."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: str | None = None
    """A metric, such as `critic/score/mean`: also keep the checkpoint with its best value (`RUN/best` links to it)."""
    best_is: Literal["max", "min"] = "max"
    """`max`: the largest value of `keep_best` is the best; `min`: the smallest."""


# --------------------------------------------------------------------------------------------------------------------
# Other kinds of run, and other models


class GptConfig(Section):
    """Shape of a GPT with random weights; its tokenizer is built from the data."""

    layers: int = Field(4, ge=1)
    """Transformer blocks."""
    hidden: int = Field(256, ge=32)
    """Width of the residual stream."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key-value heads; null: as `heads`."""
    head_dim: int | None = Field(None, ge=2)
    """Dimension of a head; null: `hidden / heads`. On a CPU vLLM supports only 32, 64, 80 and more."""
    intermediate: int | None = Field(None, ge=1)
    """Width of the MLP; null: from `hidden`."""
    family: Literal["llama", "qwen2"] = "llama"
    """Architecture."""
    max_tokens: int = Field(1024, ge=16)
    """Context length (`max_position_embeddings`): the longest row that a serving engine accepts."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        check_heads(self.hidden, self.heads, self.kv_heads or self.heads, self.head_dim, self.family)
        return self


def check_heads(hidden: int, heads: int, kv_heads: int, head_dim: int | None, family: str) -> None:
    """Raise ConfigError if attention of this shape is not possible."""
    if heads % kv_heads:
        raise ConfigError(f"gpt: heads={heads} must be a multiple of kv_heads={kv_heads}")
    if head_dim is None and hidden % (2 * heads):
        raise ConfigError(f"gpt: heads={heads} must divide hidden={hidden} into heads of an even size; or set head_dim")
    if head_dim is not None and (head_dim % 2 or family != "llama"):
        raise ConfigError(f"gpt: head_dim={head_dim} must be even, and needs family llama (others derive it)")


class SftConfig(Section):
    """Supervised fine-tuning (SFT); steps, batch size and learning rate are set in `train`."""

    completion_field: str = "completion"
    """Column of the demonstration in a file; a generator writes its own."""
    train_on: Literal["completions", "conversations", "all"] = "completions"
    """Trained tokens of a row. `completions`: those of the assistant's messages. `conversations`: all of a row with
    `messages` or `conversations`, else all behind the prompt (TRL's default). `all`: all, with the prompt's. Of a row
    of text all are trained in any case."""
    packing: Literal["bfd", "bfd_split", "wrapped"] | None = None
    """Put demonstrations together to blocks of `train.max_row_tokens` tokens, as TRL; `train.rows_per_update` then
    counts blocks. `bfd`: whole demonstrations, which do not see each other; `bfd_split`: what is cut off is a row of
    its own; `wrapped`: end to end, cut anywhere."""
    gpt: GptConfig | None = None
    """Start from a new GPT of this shape, instead of `model.path`."""


class PreferenceConfig(Section):
    """Training on preferences (docs/guides/preference_optimization.md); steps, learning rate and the pairs per
    optimizer step (`rows_per_update`, 64) are set in `train`. A generator writes its own pairs."""

    chosen_field: str = "chosen"
    """Column of the chosen completion, or of the whole conversation with it."""
    rejected_field: str = "rejected"
    """Column of the rejected completion."""
    completion_field: str = "completion"
    """Column of the completion, in rows that are labelled one by one (KTO)."""
    label_field: str = "label"
    """Column of the label, in rows that are labelled one by one (KTO): true is a good completion."""


class CriticConfig(Section):
    """The critic, for algorithms that have one (PPO, A2C, TRPO); otherwise without effect."""

    path: str | None = None
    """Initial weights: a causal language model or a reward model. null: `model.path`."""
    learning_rate: float = Field(1e-5, gt=0)
    """Learning rate of the critic; its schedule, Adam's constants and gradient clipping are those of `train`."""


class TeacherConfig(Section):
    """Teacher model of a distillation."""

    path: str
    """A folder in Hugging Face layout, or a hub name; its vocabulary must be the policy's."""


class PretrainConfig(Section):
    """Pretraining on plain text that `atomrl data prepare` has tokenized (`data.train` is its folder). Steps, learning
    rate, micro-batches and the windows per optimizer step (`rows_per_update`, 64) are set in `train`; the validation
    loss is computed every `eval.every_steps`."""

    gpt: GptConfig | None = None
    """Start from a new GPT of this shape, instead of `model.path`."""
    window_tokens: int = Field(256, ge=2)
    """Tokens per row, cut from the text at a random position."""
    eval_windows: int = Field(64, ge=1)
    """Number of validation windows, the same ones at every evaluation."""
    sample_every_steps: int = Field(0, ge=0)
    """Write samples every N steps and at the end; 0: none."""
    samples: int = Field(2, ge=1)
    """Number of samples."""
    sample_tokens: int = Field(128, ge=1)
    """Tokens of a sample."""
    sample_prompt: str = Field("\n", min_length=1)
    """Text that samples continue."""
    sample_temperature: float = Field(0.8, ge=0)
    """Sampling temperature of samples; 0 is greedy."""
