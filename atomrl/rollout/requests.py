"""What every engine shares: the requests it holds, and what has been drawn for each."""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, ClassVar, Self

import torch
from packaging.version import Version
from transformers import PretrainedConfig

from atomrl.config import ConfigError
from atomrl.hints import did_you_mean
from atomrl.protocols import RolloutEngine
from atomrl.rollout.stopping import StopRule
from atomrl.tracking.environment import installed_version
from atomrl.types import FinishReason, GenerationOutput, GenerationRequest, RaggedIds, SamplingParams, Segment

DIVERGED = (
    "the model's logits are NaN or infinite: its weights have diverged; go on from an earlier checkpoint with a lower "
    "train.learning_rate"
)


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is made. Each reads what it has a use for."""

    dtype: torch.dtype
    """Of weights and computation."""
    device: str
    """Such as `cpu` or `cuda:0`."""
    max_concurrent_completions: int
    """Rows decoded at once."""
    trust_remote_code: bool = False
    """Let the folder's own code make the model."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that vLLM and SGLang may use."""
    tensor_parallel: int = 1
    """GPUs that vLLM and SGLang cut the model over."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM and SGLang, by their own names."""
    whole_logprobs: bool = False
    """Start vLLM for log-probs of the model itself, at temperature 1 and over the whole vocabulary, whatever top-p,
    top-k or a minimum length leave out; else for those of the distribution that is drawn from, at any temperature."""
    lora_rank: int = 0
    """Of adapters that updates bring; 0: none."""
    server: tuple[str, ...] = ()
    """Addresses of servers that are there; none: the engine starts its own."""
    server_timeout_s: float = 600.0
    """Within which a server must answer."""
    server_weights: str = "files"
    """How weights travel to servers: `files` or `collective`."""


@dataclass(frozen=True)
class DecodeTime:
    """Seconds of a decode step on a GPU beside what its bytes and products take at the card's rates, by which
    `atomrl plan` estimates a run's time."""

    source: str
    """Where these figures are from."""
    layer_s: float
    """Of a layer: launches, and what small products take whatever their size."""
    adapted_layer_s: float = 0.0
    """More of a layer with adapters."""
    row_s: float = 0.0
    """Of a row: work of the host."""
    logprob_s: float = 0.0
    """More of a row whose log-probs are asked for."""


@dataclass(eq=False)
class RequestState:
    """A request that an engine holds, and the tokens drawn for it so far."""

    request: GenerationRequest
    rule: StopRule
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(place, version): from this token on, the weights of that version draw."""
    candidate_counts: array[int] = field(default_factory=lambda: array("i"))
    candidate_ids: array[int] = field(default_factory=lambda: array("i"))
    """Token by token, as many as `candidate_counts` says; both empty where they are not asked for."""
    group_id: str = ""
    """Whose prompt `token_ids` follow."""
    given: int = 0
    """Of `token_ids` the first that it did not draw: those of earlier turns, which the engine has in its cache."""

    def __post_init__(self) -> None:
        self.group_id = self.group_id or self.request.group_id

    @property
    def limit(self) -> int:
        """The most that `token_ids` may become."""
        return self.given + self.request.sampling.max_completion_tokens

    def set_version(self, version: int) -> None:
        """Mark the tokens from here on."""
        if self.versions and self.versions[-1][0] == len(self.token_ids):
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.token_ids), version))

    def cut(self, length: int) -> None:
        """Drop the tokens beyond a length, and candidates beyond the tokens."""
        del self.token_ids[length:], self.logprobs[length:]
        del self.candidate_ids[sum(self.candidate_counts[:length]) :], self.candidate_counts[length:]

    def diverged(self) -> bool:
        """Whether a token was drawn from logits that are not finite."""
        return math.isnan(sum(self.logprobs))

    def segments(self) -> tuple[Segment, ...]:
        """One for each version that has drawn a token."""
        ends = [start for start, _ in [*self.versions, (len(self.token_ids), 0)]][1:]
        found, first_id = [], 0
        for (start, version), end in zip(self.versions, ends, strict=True):
            counts, candidates = self.candidate_counts[start:end], None
            if counts:
                past = first_id + sum(counts)
                ids = torch.frombuffer(self.candidate_ids[first_id:past], dtype=torch.int32)
                candidates, first_id = RaggedIds(torch.frombuffer(counts, dtype=torch.int32), ids), past
            found.append(
                Segment(
                    origin="model",
                    token_ids=tuple(self.token_ids[start:end]),
                    logprobs=tuple(self.logprobs[start:end]) if self.logprobs else None,
                    policy_version=version,
                    candidates=candidates,
                )
            )
        return tuple(segment for segment in found if segment.token_ids)


class RequestEngine(RolloutEngine):
    """The part of a `RolloutEngine` that is the same in all: requests come in, wait, and leave as outputs.

    Args:
        tokenizer: of the model; decodes completions and stop strings.
        max_positions: tokens of prompt and completion that the model can read.
    """

    package: ClassVar[str | None] = None
    """What must be installed for it beside AtomRL; the extra that brings it has the same name."""
    server: ClassVar[bool] = False
    """Whether it draws in a server, which may be there already (`EngineOptions.server`)."""
    probe: ClassVar[str] = ""
    """Statements that import the package and put the architectures it knows into `archs`."""
    weight_ways: ClassVar[tuple[str, ...]] = ("files",)
    """How weights may travel to its server (`EngineOptions.server_weights`)."""
    health_path: ClassVar[str] = ""
    """Of a server: what says that it is well."""
    least_version: ClassVar[str | None] = None
    """Of its package."""
    argument_class: ClassVar[str] = ""
    """`module:name` of the dataclass whose fields are the package's arguments (`EngineOptions.engine_args`)."""
    own_arguments: ClassVar[Mapping[str, str]] = {}
    """Those that AtomRL gives it, by the config's key that decides each; empty: none does."""
    decode_time: ClassVar[DecodeTime]
    """What a decode step takes on a GPU."""
    seeded = exact = returns_candidates = False

    @classmethod
    def package_version(cls) -> str | None:
        """The version of its package that is installed; builds for CPUs have a name of their own."""
        return cls.package and (installed_version(cls.package) or installed_version(f"{cls.package}-cpu"))

    @classmethod
    def check_version(cls) -> None:
        """Check that its package is new enough.

        Raises:
            ImportError: it is not.
        """
        found, least = cls.package_version(), cls.least_version
        if found and least and Version(found) < Version(least):
            raise ImportError(
                f"{cls.package} {found} is installed, and {cls.__name__} needs {least} or later: "
                f"pip install 'atomrl[{cls.package}]'"
            )

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        """Check that its package has these arguments, and that AtomRL sets none of them itself.

        Raises:
            ConfigError: which, and what to do.
        """
        if not arguments:
            return
        if not cls.argument_class:
            raise ConfigError(f"rollout.engine_args: they are for vLLM and SGLang; {cls.__name__} has none")
        for name in arguments.keys() & cls.own_arguments.keys():
            key = cls.own_arguments[name]
            raise ConfigError(f"rollout.engine_args.{name}: {f'set {key}' if key else 'AtomRL sets it itself'}")
        module, _, kind = cls.argument_class.partition(":")
        known = [field.name for field in fields(getattr(import_module(module), kind))]
        for name in arguments.keys() - {*known}:
            hint = did_you_mean(name, known)
            raise ConfigError(
                f"rollout.engine_args.{name}: {cls.package} {cls.package_version()} has no argument {name!r} "
                f"({kind}){f'; {hint}' if hint else ''}"
            )

    @classmethod
    def from_pretrained(cls, path: str, tokenizer: Any, options: EngineOptions) -> Self:
        """Load a model.

        Args:
            path: a folder in Hugging Face layout or of adapters, which are merged, or a hub name.
            tokenizer: of the model; decodes completions and stop strings.
            options: how.

        Raises:
            ImportError: its package is not installed.
        """
        raise NotImplementedError

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        """Why it cannot compute a model of this config, as far as it knows before it loads one; None where it can."""
        return None

    @classmethod
    def refusal(cls, sampling: SamplingParams) -> str | None:
        """Why completions cannot be drawn like that, beginning with the key that asks for it; None where they can."""
        if sampling.logprobs_over == "kept" and not cls.returns_candidates:
            return f"logprobs_over=kept: {cls.__name__} does not tell which tokens were kept"
        return None

    def __init__(self, tokenizer: Any, max_positions: int = 2**31):
        self.tokenizer, self.max_positions = tokenizer, max_positions
        self.version = 0
        self.held: dict[str, RequestState] = {}
        self.waiting: deque[RequestState] = deque()
        self._rules: dict[SamplingParams, StopRule] = {}
        self._paused = self._asleep = False

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        """Go on until at least one of the requests held has finished, or to that time; those that have."""
        raise NotImplementedError

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        """When completions end."""
        raise NotImplementedError

    def refused(self, sampling: SamplingParams) -> str | None:
        """`refusal` of this engine as it was started."""
        return self.refusal(sampling)

    def rule_of(self, sampling: SamplingParams) -> StopRule:
        """How completions with a sampling are drawn and end; one for all that differ in number, room, seed and step
        alone."""
        room = max(1, sampling.min_completion_tokens)
        key = replace(sampling, completions_per_prompt=1, max_completion_tokens=room, seed=0, step=0)
        if key not in self._rules:
            if reason := self.refused(key):
                raise ValueError(reason)
            self._rules[key] = self._make_rule(key)
        return self._rules[key]

    def _withdraw(self, states: Sequence[RequestState]) -> None:
        """Give up what is computed for requests that have left `held` and `waiting`."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests in.

        Raises:
            ValueError: a prompt is empty or too long for the model, an id is in use, or the sampling cannot be done.
                None of the requests is then taken in.
        """
        new: dict[str, RequestState] = {}
        samplings = {id(request.sampling): request.sampling for request in requests}
        rules = {key: self.rule_of(sampling) for key, sampling in samplings.items()}
        for request in requests:
            name, tokens, limit = request.request_id, request.prompt_token_ids, request.sampling.max_completion_tokens
            if name in self.held or name in new:
                raise ValueError(f"request {name!r} is there already")
            if not tokens:
                raise ValueError(f"request {name!r}: the prompt has no tokens; a completion needs one to start from")
            if len(tokens) + limit > self.max_positions:
                raise ValueError(
                    f"request {name!r}: the prompt has {len(tokens)} tokens; with max_completion_tokens={limit} that "
                    f"passes the model's context of {self.max_positions}; lower max_completion_tokens or drop longer "
                    "prompts"
                )
            new[name] = RequestState(request, rules[id(request.sampling)])
        self.held.update(new)
        self.waiting.extend(new.values())

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        """Go on until at least one request has finished, but no longer than `wait_s` seconds and what cannot be
        interrupted; those that have. Empty also where there is none, or it is paused or asleep.

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
        """Give up requests (None: all), and return what they have so far; ids that it does not hold are passed over."""
        names = list(self.held) if request_ids is None else [name for name in request_ids if name in self.held]
        states = [self.held.pop(name) for name in dict.fromkeys(names)]
        if not states:  # as where an episode ends, which gives up what may be kept of its last turn
            return []
        gone = {id(state) for state in states}
        staying = [state for state in self.waiting if id(state) not in gone]
        self.waiting.clear()
        self.waiting.extend(staying)
        self._withdraw(states)
        return self._outputs([(state, "abort") for state in states])

    def _outputs(self, states: Sequence[tuple[RequestState, FinishReason]]) -> list[GenerationOutput]:
        rows = [state.rule.written(state.token_ids[state.given :], reason == "stop") for state, reason in states]
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        texts = self.tokenizer.batch_decode(rows, **options) if rows else []
        return [
            GenerationOutput(
                request_id=state.request.request_id, segments=state.segments(), text=text, finish_reason=reason
            )
            for (state, reason), text in zip(states, texts, strict=True)
        ]

    def pause(self) -> None:
        """Draw no token until `resume`; requests stay."""
        self._paused = True

    def resume(self) -> None:
        """Go on; a request under way continues with the weights there are now."""
        self._paused = False

    def sleep(self) -> None:
        """Free what can be made again (the cache) while others need the memory.

        Raises:
            RuntimeError: there are requests.
        """
        if self.held:
            raise RuntimeError(f"the engine holds {len(self.held)} requests; let them finish or abort them first")
        self._asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        self._asleep = False
