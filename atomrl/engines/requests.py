"""What every engine shares: the requests it holds, and what has been drawn for each."""

from __future__ import annotations

import hashlib
import math
import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, Self

import torch
from packaging.version import Version
from torch import Tensor
from transformers import PretrainedConfig

from atomrl.common.chat_template import special_ids, stop_tokens
from atomrl.common.errors import did_you_mean
from atomrl.common.processes import progress
from atomrl.config import ConfigError
from atomrl.protocols import RolloutEngine
from atomrl.tracking.run_directory import installed_version
from atomrl.types import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    Prompt,
    RaggedIds,
    SamplingParams,
    Segment,
    Trajectory,
)

# --------------------------------------------------------------------------------------------------------------------
# What ends a completion: the model's end-of-sequence tokens, stop tokens, stop strings.


def eos_token_ids(path: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a completion (`stop_tokens`), the generation config being that of the folder `path`."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the folder has none
        generation = None
    return stop_tokens(tokenizer, config, generation)


@lru_cache(maxsize=16)
def completing_tokens(tokenizer: Any, stops: tuple[str, ...], vocab: int) -> Tensor:
    """[V] bool: the tokens in which a stop string may end. Kept, since it decodes the whole vocabulary."""

    def can_complete(text: str) -> bool:  # part of a character: unknown, so yes
        return "\ufffd" in text or any(
            stop in text or any(stop.endswith(text[:end]) for end in range(1, len(text) + 1)) for stop in stops
        )

    found = torch.zeros(vocab, dtype=torch.bool)
    # A token may be unknown to the tokenizer where the model's vocabulary is padded.
    texts = tokenizer.batch_decode([[token] for token in range(min(vocab, len(tokenizer)))])
    found[: len(texts)] = torch.tensor([can_complete(text) for text in texts])
    return found


class StopRule:
    """Says where completions end.

    Stop strings are looked for in the decoded tail, special tokens included, of those completions only whose newest
    tokens can be the ones that complete one.

    Args:
        sampling: the stop tokens, stop strings, minimum length and `ignore_eos`.
        eos: the model's end-of-sequence tokens.
        tokenizer: of the model; decodes the tails.
        vocab: width of the logits.
        device: of the tokens that it gets.

    Raises:
        ValueError: a stop token is not in the vocabulary, or a stop string is empty.
    """

    def __init__(self, sampling: SamplingParams, eos: Sequence[int], tokenizer: Any, vocab: int, device: torch.device):
        self.sampling, self.minimum, self.tokenizer = sampling, sampling.min_completion_tokens, tokenizer
        self.eos, self.special = frozenset(eos), special_ids(tokenizer)
        stop_ids = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)})
        if any(not 0 <= token < vocab for token in stop_ids):
            raise ValueError(f"stop tokens {stop_ids} are not all in the vocabulary of {vocab}")
        if any(not stop for stop in sampling.stop):
            raise ValueError("a stop string is empty")
        self.bans = bool(self.minimum and stop_ids)
        self.is_stop = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.is_stop[stop_ids] = True
        self.completes: Tensor | None = None
        if sampling.stop:
            self.completes = completing_tokens(tokenizer, sampling.stop, vocab).to(device)
            self.tail_tokens = max(len(stop.encode()) for stop in sampling.stop) + 8

    def banned(self, lengths: Tensor) -> Tensor | None:
        """[N, V] True where a token must not be drawn yet, or None; `lengths` [N] is how many tokens there are."""
        if not self.bans:
            return None
        early = lengths < self.minimum
        # A look at the values would make a GPU wait.
        return early[:, None] & self.is_stop if early.is_cuda or bool(early.any()) else None

    def token_ends(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[N] bool: which completions end with their newest token [N] by itself; lengths [N] with it."""
        stopped = self.is_stop[tokens]
        return stopped & (lengths >= self.minimum) if self.minimum else stopped

    def string_ends(
        self, sequences: Tensor, rows: Tensor, lengths: Tensor, window: int = 1, starts: Tensor | None = None
    ) -> dict[int, int]:
        """Completions in which one of the last `window` tokens completes a stop string: index -> length with it.

        Args:
            sequences: [*, T]; completion i is the first `lengths[i]` tokens of row `rows[i]`.
            rows: [N] int64.
            lengths: [N] int64.
            starts: [N] int64: where its own tokens begin, if not at 0.
        """
        found: dict[int, int] = {}
        if self.completes is None:
            return found
        starts = torch.zeros_like(lengths) if starts is None else starts
        places = lengths[:, None] + torch.arange(-window, 0, device=lengths.device)
        tokens = sequences[rows[:, None], places.clamp(min=0)]
        candidates = self.completes[tokens] & (places >= starts[:, None] + max(self.minimum - 1, 0))
        for index, column in candidates.nonzero().tolist():
            if index not in found:
                length = int(lengths[index]) - window + column + 1
                tail = sequences[rows[index], max(int(starts[index]), length - self.tail_tokens) : length].tolist()
                if self._completed(tail):
                    found[index] = length
        return found

    def written(self, tokens: Sequence[int], stopped: bool) -> Sequence[int]:
        """The tokens of a completion that are its text: all but the special one that ended it. One that completes a
        stop string is text, unless it is an end of sequence.

        Args:
            stopped: an end-of-sequence token, a stop token or a stop string ended it.
        """
        last = tokens[-1] if stopped and tokens else None
        if last in self.eos or (last in self.special and not self._completed(list(tokens))):
            return tokens[:-1]
        return tokens

    def _completed(self, tail: list[int]) -> bool:
        """Whether the last token of `tail` completes a stop string."""
        after = self.tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        if not any(stop in after for stop in self.sampling.stop):
            return False
        before = self.tokenizer.decode(tail[:-1], clean_up_tokenization_spaces=False)
        return any(after.rfind(stop) + len(stop) > len(before) for stop in self.sampling.stop if stop in after)


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


# --------------------------------------------------------------------------------------------------------------------
# Completions of whole prompts, for callers that wait for all of them.


def completion_seed(seed: int, step: int, prompt_id: str, index: int) -> int:
    """The seed of one completion: a hash, so that the order in which completions arrive cannot matter.

    Returns:
        A non-negative integer below 2**63.
    """
    key = f"{seed}/{step}/{prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def requests_of(prompt: Prompt, sampling: SamplingParams) -> list[GenerationRequest]:
    """The requests for `sampling.completions_per_prompt` completions of a prompt, each with its own seed.

    Example:
        >>> from atomrl.types import Sample
        >>> prompt = Prompt(prompt_id="0:a", sample=Sample(sample_id="a", prompt="", ground_truth=""), token_ids=(5, 6))
        >>> [request.request_id for request in requests_of(prompt, SamplingParams(completions_per_prompt=2))]
        ['0:a/0', '0:a/1']
    """
    return [
        GenerationRequest(
            request_id=f"{prompt.prompt_id}/{index}",
            group_id=prompt.prompt_id,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            seed=completion_seed(sampling.seed, sampling.step, prompt.prompt_id, index),
            sample=prompt.sample,
        )
        for index in range(sampling.completions_per_prompt)
    ]


def to_trajectory(prompt: Prompt, index: int, output: GenerationOutput) -> Trajectory:
    """The prompt's segment, and those that came after it; rewards of turns at the last token of each."""
    rewards = output.episode.turn_rewards if output.episode else ()
    return Trajectory(
        prompt_id=prompt.prompt_id,
        index=index,
        sample=prompt.sample,
        segments=(Segment(origin="prompt", token_ids=prompt.token_ids), *output.segments),
        text=output.text,
        opening=prompt.opening,
        finish_reason=output.finish_reason,
        episode=output.episode,
        token_rewards=tuple((len(prompt.token_ids) + place, reward) for place, reward in rewards),
    )


def generate(engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Trajectory]:
    """`sampling.completions_per_prompt` completions of each prompt, in the order of prompts and index.

    The engine must hold no other requests: their outputs would be lost.

    Raises:
        ValueError: the engine refuses a prompt or the sampling, or its model's logits are not finite; none of these
            requests is then left in it.
        RuntimeError: the engine is paused or asleep, or finished a request of someone else's.
        TimeoutError: it does not answer; it then still has the requests.

    Example:
        >>> generate(engine, prompts, SamplingParams(completions_per_prompt=8, seed=1, step=3))  # doctest: +SKIP
    """
    requests = [requests_of(prompt, sampling) for prompt in prompts]
    waiting = {request.request_id for group in requests for request in group}
    outputs: dict[str, GenerationOutput] = {}
    engine.submit([request for group in requests for request in group])
    try:
        while len(outputs) < len(waiting):
            finished = {output.request_id: output for output in engine.poll()}
            if not finished:
                raise RuntimeError("the engine holds requests and finishes none: it is paused or asleep")
            if not finished.keys() <= waiting:
                raise RuntimeError(f"the engine finished {sorted(finished.keys() - waiting)[:3]}, submitted elsewhere")
            outputs |= finished
            progress()
    except TimeoutError:  # who does not answer would not answer that either
        raise
    except BaseException:
        engine.abort(waiting)
        raise
    return [
        to_trajectory(prompt, index, outputs[request.request_id])
        for prompt, group in zip(prompts, requests, strict=True)
        for index, request in enumerate(group)
    ]
