"""`RequestEngine`, the base class of rollout engines, with the state of its requests."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, ClassVar, Self

import torch
from packaging.version import Version
from transformers import PretrainedConfig

from atomrl.common.errors import did_you_mean
from atomrl.config import ConfigError
from atomrl.engines.stop_rule import StopRule
from atomrl.models.vision import Patches
from atomrl.protocols import FrozenBase, RolloutEngine, RoundedWeights, WeightHash, WeightUpdate
from atomrl.tracking.system_info import installed_version
from atomrl.types import FinishReason, GenerationOutput, GenerationRequest, RaggedIds, SamplingParams, Segment

DIVERGED = (
    "the model's logits are NaN or infinite: its weights have diverged; resume from an earlier checkpoint with a lower "
    "train.learning_rate"
)


@dataclass(frozen=True)
class EngineOptions:
    """Options to create an engine. Each engine reads those that apply to it."""

    dtype: torch.dtype
    """dtype of weights and computation."""
    device: str
    """For example `cpu` or `cuda:0`."""
    max_concurrent_completions: int
    """Maximum batch size of decoding."""
    trust_remote_code: bool = False
    """Run the model code of the folder."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that vLLM and SGLang may use."""
    tensor_parallel: int = 1
    """Tensor-parallel size of vLLM and SGLang."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of vLLM and SGLang, by their own names."""
    whole_logprobs: bool = False
    """vLLM's log-probs. True: the model's own, at temperature 1 over the whole vocabulary, regardless of top-p, top-k
    and minimum length. False: those of the distribution that is sampled from, at any temperature."""
    lora_rank: int = 0
    """Maximum rank of LoRA adapters; 0: none."""
    server: tuple[str, ...] = ()
    """URLs of running servers; empty: the engine starts its own."""
    server_timeout_s: float = 600.0
    """Limit for a server's answer."""
    server_weights: str = "files"
    """How weights are sent to servers: `files` or `collective`."""
    base: FrozenBase | None = None
    """The trainer's frozen weights, for engines with `shares_base`."""
    rounded: RoundedWeights | None = None
    """The trainer's weights that may be rounded into the engine's memory, for engines with `shares_base`."""
    images: Patches | None = None
    """Reads the patches of pictures; None: prompts have none."""


@dataclass(frozen=True)
class DecodeTime:
    """Overhead of a decode step on a GPU in seconds, beyond its bytes and FLOPs at the card's rates (`atomrl plan`)."""

    source: str
    """Origin of these figures."""
    layer_s: float
    """Per layer: launches, and the fixed cost of small products."""
    adapted_layer_s: float = 0.0
    """Additional per layer with adapters."""
    row_s: float = 0.0
    """Per row: work of the host."""
    logprob_s: float = 0.0
    """Additional per row with log-probs."""


@dataclass(eq=False)
class RequestState:
    """A request in an engine and its tokens so far."""

    request: GenerationRequest
    rule: StopRule
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(index, version): tokens from this index on were sampled with weights of this version."""
    candidate_counts: array[int] = field(default_factory=lambda: array("i"))
    candidate_ids: array[int] = field(default_factory=lambda: array("i"))
    """Candidates of all tokens, `candidate_counts` for each; both empty if they are not requested."""
    group_id: str = ""
    """Group whose prompt `token_ids` follow: the request's own, or that of the turn it continues."""
    prefix_length: int = 0
    """Leading `token_ids` that this request did not sample: those of earlier turns, whose KV cache it continues."""

    def __post_init__(self) -> None:
        self.group_id = self.group_id or self.request.group_id

    @property
    def limit(self) -> int:
        """Maximum length of `token_ids`."""
        return self.prefix_length + self.request.sampling.max_completion_tokens

    def set_version(self, version: int) -> None:
        """Record that tokens from here on are sampled with this version."""
        if self.versions and self.versions[-1][0] == len(self.token_ids):
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.token_ids), version))

    def cut(self, length: int) -> None:
        """Truncate tokens to a length, and candidates to the tokens."""
        del self.token_ids[length:], self.logprobs[length:]
        del self.candidate_ids[sum(self.candidate_counts[:length]) :], self.candidate_counts[length:]

    def diverged(self) -> bool:
        """Return True if a token was sampled from logits that are not finite."""
        return math.isnan(sum(self.logprobs))

    def segments(self) -> tuple[Segment, ...]:
        """Return one segment per version that sampled tokens."""
        ends = [start for start, _ in [*self.versions, (len(self.token_ids), 0)]][1:]
        segments, first_id = [], 0
        for (start, version), end in zip(self.versions, ends, strict=True):
            counts, candidates = self.candidate_counts[start:end], None
            if counts:
                past = first_id + sum(counts)
                ids = torch.frombuffer(self.candidate_ids[first_id:past], dtype=torch.int32)
                candidates, first_id = RaggedIds(torch.frombuffer(counts, dtype=torch.int32), ids), past
            segments.append(
                Segment(
                    origin="model",
                    token_ids=tuple(self.token_ids[start:end]),
                    logprobs=tuple(self.logprobs[start:end]) if self.logprobs else None,
                    policy_version=version,
                    candidates=candidates,
                )
            )
        return tuple(segment for segment in segments if segment.token_ids)


class RequestEngine(RolloutEngine):
    """Base class of rollout engines: validates and queues requests, and turns their states into outputs.

    A subclass defines `from_pretrained`, `_make_rule`, `_advance`, `weight_shapes`, `update_weights`, `weight_hashes`
    and `close` (docs/guides/add_an_engine.md).

    Args:
        tokenizer: the model's; decodes completions and stop strings.
        max_positions: the model's context length.
    """

    package: ClassVar[str | None] = None
    """Python package of the engine; AtomRL's extra has the same name."""
    server: ClassVar[bool] = False
    """True for engines behind an HTTP server (`EngineOptions.server`)."""
    probe: ClassVar[str] = ""
    """Python statements that import the package and set `archs` to the architectures it supports."""
    weight_transfers: ClassVar[tuple[str, ...]] = ("files",)
    """Supported values of `EngineOptions.server_weights`."""
    supports_images: ClassVar[bool] = False
    """True if requests may have pictures (`GenerationRequest.images`); if not, data with pictures are refused."""
    supports_lora: ClassVar[bool] = False
    """True if `update_weights` takes LoRA adapters (`WeightUpdate.adapters`); if not, `model.lora` is refused."""
    updates_parts: ClassVar[bool] = False
    """True if `update_weights` takes some of the weights beside adapters; if not, `model.lora.modules_to_save` is
    refused."""
    shares_base: ClassVar[bool] = False
    """True if the engine uses `EngineOptions.base` in place of base weights of its own."""
    health_path: ClassVar[str] = ""
    """Path of a server's health endpoint."""
    least_version: ClassVar[str | None] = None
    """Minimum version of the package."""
    images_version: ClassVar[str | None] = None
    """Minimum version of the package for pictures; None: `least_version`."""
    argument_class: ClassVar[str] = ""
    """`module:name` of the dataclass whose fields may be set by `EngineOptions.engine_args`."""
    own_arguments: ClassVar[Mapping[str, str]] = {}
    """Arguments that AtomRL sets itself -> the config key that decides them ("" for none)."""
    decode_time: ClassVar[DecodeTime] = DecodeTime("estimated: as hf", layer_s=2.43e-3)
    """Overhead of a decode step on a GPU."""
    seeded = exact = returns_candidates = False

    @classmethod
    def package_version(cls) -> str | None:
        """Return the installed version of the package, or of its `-cpu` build."""
        return cls.package and (installed_version(cls.package) or installed_version(f"{cls.package}-cpu"))

    @classmethod
    def check_version(cls, least: str | None = None) -> None:
        """Check that the installed package is new enough.

        Args:
            least: minimum version; None: `least_version`.

        Raises:
            ImportError: it is older.
        """
        installed, least = cls.package_version(), least or cls.least_version
        if installed and least and Version(installed) < Version(least):
            raise ImportError(
                f"{cls.package} {installed} is installed, but {cls.__name__} needs {least} or later: "
                f"pip install 'atomrl[{cls.package}]'"
            )

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        """Check that the package has these arguments and that AtomRL sets none of them itself.

        Raises:
            ConfigError: names the argument and what to do.
        """
        if not arguments:
            return
        if not cls.argument_class:
            raise ConfigError(f"rollout.engine_args: only for vLLM and SGLang; {cls.__name__} has none")
        for name in arguments.keys() & cls.own_arguments.keys():
            key = cls.own_arguments[name]
            raise ConfigError(f"rollout.engine_args.{name}: {f'set {key}' if key else 'AtomRL sets it itself'}")
        module, _, kind = cls.argument_class.partition(":")
        names = [field.name for field in fields(getattr(import_module(module), kind))]
        for name in arguments.keys() - {*names}:
            hint = did_you_mean(name, names)
            raise ConfigError(
                f"rollout.engine_args.{name}: {cls.package} {cls.package_version()} has no argument {name!r} "
                f"({kind}){f'; {hint}' if hint else ''}"
            )

    @classmethod
    def from_pretrained(cls, path: str, tokenizer: Any, options: EngineOptions) -> Self:
        """Load a model.

        Args:
            path: folder in Hugging Face layout, folder of adapters (merged on load), or hub name.
            tokenizer: the model's; decodes completions and stop strings.
            options: see `EngineOptions`.

        Raises:
            ImportError: the package is not installed.
        """
        raise NotImplementedError

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        """Return why the engine does not support a model with this config, as far as known before loading; else
        None."""
        return None

    @classmethod
    def refusal(cls, sampling: SamplingParams) -> str | None:
        """Return why the engine does not support these sampling parameters, beginning with the config key; else
        None."""
        if sampling.logprobs_over == "kept" and not cls.returns_candidates:
            return f"logprobs_over=kept: {cls.__name__} does not report which tokens were kept"
        return None

    @classmethod
    def image_refusal(cls, sampling: SamplingParams) -> str | None:
        """Return why the engine does not support these sampling parameters for prompts with pictures, whose tokens are
        never sampled, beginning with the config key; else None."""
        return None

    @classmethod
    def server_image_refusal(cls, url: str) -> str | None:
        """Return why a running server cannot take pictures; else None."""
        return None

    def __init__(self, tokenizer: Any, max_positions: int = 2**31):
        self.tokenizer, self.max_positions = tokenizer, max_positions
        self.version = 0
        self.held: dict[str, RequestState] = {}
        self.waiting: deque[RequestState] = deque()
        self._rules: dict[SamplingParams, StopRule] = {}
        self._paused = self._asleep = False

    # Abstract here: the bodies of a protocol return None, so an engine that lacks one would fail later, elsewhere.

    @abstractmethod
    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        """Compute until at least one request has finished or `time.monotonic()` passes `end`; return the finished.

        Takes requests from `waiting`, and adds their tokens, log-probs and versions to their states.

        Raises:
            ValueError: the model's logits are not finite (`DIVERGED`).
        """

    @abstractmethod
    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        """Create the stop rule of a sampling."""

    @abstractmethod
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights that an update may contain, named as in the published Hugging Face checkpoint."""

    @abstractmethod
    def update_weights(self, update: WeightUpdate) -> None:
        """Copy new weights and adapters in place and set `version`; discard what was computed with the old ones."""

    @abstractmethod
    def weight_hashes(self) -> list[WeightHash]:
        """Hash all weights and adapters that the engine computes with, as they are now."""

    def refused(self, sampling: SamplingParams) -> str | None:
        """Return `refusal` for this engine as it was started."""
        return self.refusal(sampling)

    def rule_of(self, sampling: SamplingParams) -> StopRule:
        """Return the stop rule of a sampling; shared by samplings that differ only in number, limit, seed and step."""
        room = max(1, sampling.min_completion_tokens)
        key = replace(sampling, completions_per_prompt=1, max_completion_tokens=room, seed=0, step=0)
        if key not in self._rules:
            if reason := self.refused(key):
                raise ValueError(reason)
            self._rules[key] = self._make_rule(key)
        return self._rules[key]

    def _cancel(self, states: Sequence[RequestState]) -> None:
        """Stop computing aborted requests, which have left `held` and `waiting`."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests.

        Raises:
            ValueError: a prompt is empty or too long for the model, an id is in use, or the sampling is refused.
                None of the requests is then queued.
        """
        new: dict[str, RequestState] = {}
        # Most requests share one sampling, so its stop rule is looked up once.
        samplings = {id(request.sampling): request.sampling for request in requests}
        rules = {key: self.rule_of(sampling) for key, sampling in samplings.items()}
        for request in requests:
            name, tokens, limit = request.request_id, request.prompt_token_ids, request.sampling.max_completion_tokens
            if name in self.held or name in new:
                raise ValueError(f"request {name!r} already exists")
            if not tokens:
                raise ValueError(f"request {name!r}: the prompt has no tokens; at least one is required")
            if len(tokens) + limit > self.max_positions:
                raise ValueError(
                    f"request {name!r}: the prompt has {len(tokens)} tokens; with max_completion_tokens={limit} that "
                    f"exceeds the model's context of {self.max_positions}; lower max_completion_tokens or drop longer "
                    "prompts"
                )
            new[name] = RequestState(request, rules[id(request.sampling)])
        self.held.update(new)
        self.waiting.extend(new.values())

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        """Compute until at least one request has finished, or for `wait_s` seconds; return the finished outputs.

        A step that has begun is completed. Empty if there are no requests or the engine is paused or asleep.

        Raises:
            ValueError: the model's logits are not finite.
        """
        if self._paused or self._asleep or not self.held:
            return []
        with torch.inference_mode():
            finished = self._advance(time.monotonic() + wait_s)
        for state, _ in finished:
            del self.held[state.request.request_id]
        return self._outputs(finished)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Abort requests (None: all) and return their partial outputs; unknown ids are ignored."""
        names = list(self.held) if request_ids is None else [name for name in request_ids if name in self.held]
        states = [self.held.pop(name) for name in dict.fromkeys(names)]
        if not states:  # the usual case when an episode ends
            return []
        aborted = {id(state) for state in states}
        staying = [state for state in self.waiting if id(state) not in aborted]
        self.waiting.clear()
        self.waiting.extend(staying)
        self._cancel(states)
        return self._outputs([(state, "abort") for state in states])

    def _outputs(self, states: Sequence[tuple[RequestState, FinishReason]]) -> list[GenerationOutput]:
        """Convert requests that have ended, each with its reason, into outputs; decode all texts in one call."""
        sampled = [(state.rule, state.token_ids[state.prefix_length :], reason) for state, reason in states]
        rows = [rule.written(tokens, reason == "stop") for rule, tokens, reason in sampled]
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        texts = self.tokenizer.batch_decode(rows, **options) if rows else []
        return [
            GenerationOutput(
                request_id=state.request.request_id, segments=state.segments(), text=text, finish_reason=reason
            )
            for (state, reason), text in zip(states, texts, strict=True)
        ]

    def pause(self) -> None:
        """Stop sampling until `resume`; requests stay."""
        self._paused = True

    def resume(self) -> None:
        """Continue; running requests continue with the current weights."""
        self._paused = False

    def sleep(self) -> None:
        """Free the KV cache while others need the memory.

        Raises:
            RuntimeError: the engine has unfinished requests.
        """
        if self.held:
            raise RuntimeError(
                f"the engine has {len(self.held)} unfinished requests; let them finish or abort them first"
            )
        self._asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        self._asleep = False
