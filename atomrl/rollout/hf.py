"""`HFEngine`: Hugging Face `generate`, for every causal language model that `transformers` loads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from atomrl.atoms.logits import head_logits
from atomrl.models.loading import base_path, load_transformers
from atomrl.models.transformers_model import published_weights
from atomrl.protocols import Adapter, WeightUpdate
from atomrl.rollout.requests import DIVERGED, EngineOptions, RequestEngine, RequestState
from atomrl.rollout.stopping import StopRule, eos_token_ids
from atomrl.types import FinishReason, SamplingParams

DRAWN = ("temperature", "top_p", "top_k")
"""What `generate` warns of where nothing is drawn."""


class HFEngine(RequestEngine):
    """Draws completions with `model.generate`: each `poll` runs one batch to its end, so none is ever half done.

    Not `seeded`: a draw depends on the rest of its batch. The same batch with the same seeds gives the same
    completions.

    Args:
        model: of transformers; it is changed to compute logits in float32 (`head_logits`).
        eos: the end-of-sequence tokens.
        tokenizer: of the model; decodes completions and stop strings.
        max_concurrent_completions: rows of one call of `generate`.
    """

    exact = True

    def __init__(self, model: Any, eos: tuple[int, ...], tokenizer: Any, max_concurrent_completions: int) -> None:
        super().__init__(tokenizer, getattr(model.config, "max_position_embeddings", 2**31))
        self.model, self.eos, self.max_concurrent_completions = model, eos, max_concurrent_completions
        self.hooks: list[Any] = []
        head = model.get_output_embeddings()
        if head.weight.dtype.itemsize < 4:
            head.forward = _wide_forward(head)

    @classmethod
    def from_pretrained(cls, path: str, tokenizer: Any, options: EngineOptions) -> Self:
        """Load a model; any that transformers knows."""
        model = load_transformers(path, options.dtype, options.trust_remote_code).to(options.device).eval()
        eos = eos_token_ids(base_path(path), model.config, tokenizer)
        # The folder's own sampling settings (Qwen's repetition penalty and top-k) must not mix with ours.
        model.generation_config = GenerationConfig()
        return cls(model, eos, tokenizer, options.max_concurrent_completions)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every weight that an update may bring, by its published name; tied ones once."""
        return {name: tuple(tensor.shape) for name, tensor in published_weights(self.model).items()}

    @torch.no_grad()
    def update_weights(self, update: WeightUpdate) -> None:
        """Take new weights in place; adapters are added to the outputs of their layers. No cache outlives a `poll`."""
        own = published_weights(self.model)
        for name, tensor in update.tensors:
            own[name].copy_(tensor)
        for hook in self.hooks:
            hook.remove()
        self.hooks = [
            self.model.get_submodule(name.removesuffix(".weight")).register_forward_hook(_adapter_hook(adapter))
            for name, adapter in update.adapters.items()
        ]
        self.version = update.version

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        vocab = self.model.get_output_embeddings().weight.shape[0]
        return StopRule(sampling, self.eos, self.tokenizer, vocab, self.model.device)

    def _advance(self) -> list[tuple[RequestState, FinishReason]]:
        """Those that have waited longest, as many as have the same sampling and fit in a batch."""
        rule = self.waiting[0].rule
        alike = [state for state in self.waiting if state.rule is rule]
        states = alike[: self.max_concurrent_completions]
        seeds = hashlib.blake2b(repr([state.request.seed for state in states]).encode(), digest_size=7).digest()
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(seeds, "little"))
            stopped = self._generate(states, rule)
        for state in states:
            self.waiting.remove(state)
        return [(state, "stop" if stop else "length") for state, stop in zip(states, stopped, strict=True)]

    def _generate(self, states: list[RequestState], rule: StopRule) -> list[bool]:
        """Draw whole completions into `states`; which of them stopped by themselves."""
        sampling = rule.sampling
        rows = [state.request.prompt_token_ids for state in states]
        device, width = self.model.device, max(len(row) for row in rows)
        tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        recorder = _Recorder(width, rule)
        ends = _Ends(width, len(rows), rule, device)
        sequences = self.model.generate(
            input_ids=tokens,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_completion_tokens,
                pad_token_id=0,
                do_sample=sampling.temperature > 0,
                **({name: getattr(sampling, name) for name in DRAWN} if sampling.temperature else {}),
            ),
            logits_processor=LogitsProcessorList([recorder]),
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        recorder.record(sequences)
        completions = sequences[:, width:].tolist()
        values = torch.stack(recorder.logprobs, dim=1)
        if values.isnan().any():
            raise ValueError(DIVERGED)
        logprobs = values.tolist()
        stopped = ends.lengths.tolist()
        for state, row, own, length in zip(states, completions, logprobs, stopped, strict=True):
            length = length or sequences.shape[1] - width
            state.set_version(self.version)
            state.token_ids, state.logprobs = row[:length], own[:length]
        return [length > 0 for length in stopped]

    def close(self) -> None:
        """Free the weights."""
        del self.model


def _wide_forward(head: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)
    if bias is None:
        return lambda hidden: head_logits(hidden, weight)
    return lambda hidden: head_logits(hidden, weight) + bias


def _adapter_hook(adapter: Adapter) -> Callable[[torch.nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    def add(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = inputs[0].float()
        return (output + (x @ adapter.a.to(x.device).T) @ adapter.b.to(x.device).T * adapter.scale).to(output.dtype)

    return add


class _Recorder(LogitsProcessor):
    """Keeps the log-prob of each sampled token; bans what may not be sampled yet.

    It runs before temperature, top-k and top-p cut the logits, and sees in the next step what was drawn in this one.
    """

    def __init__(self, width: int, rule: StopRule):
        self.width, self.temperature, self.rule = width, rule.sampling.temperature or 1.0, rule
        self.logprobs: list[Tensor] = []
        self.scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.record(input_ids)
        self.scores = scores
        scores = scores.nan_to_num(posinf=0.0, neginf=-torch.inf)  # drawn from all the same: the log-probs tell
        banned = self.rule.banned(torch.full((len(scores),), input_ids.shape[1] - self.width, device=scores.device))
        return scores if banned is None else scores.masked_fill(banned, -torch.inf)

    def record(self, input_ids: Tensor) -> None:
        """Take the newest column's log-probs from the scores that it was drawn from."""
        if self.scores is not None:
            scores = self.scores.float() / self.temperature
            chosen = scores.gather(-1, input_ids[:, -1:])[:, 0]
            self.logprobs.append(chosen - scores.logsumexp(-1))


class _Ends(StoppingCriteria):
    """Our stop rule; `lengths` [N] is where each row stopped, 0 where it has not."""

    def __init__(self, width: int, count: int, rule: StopRule, device: torch.device):
        self.width, self.rule = width, rule
        self.rows = torch.arange(count, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int64, device=device)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        completions = input_ids[:, self.width :]
        length = torch.full_like(self.lengths, completions.shape[1])
        going = self.lengths == 0
        ends = self.rule.token_ends(input_ids[:, -1], length)
        ends[list(self.rule.string_ends(completions, self.rows, length))] = True
        ends &= going
        self.lengths = torch.where(ends, length, self.lengths)
        return self.lengths > 0
