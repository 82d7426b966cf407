"""`NativeEngine`: our own decoding for Llama, Qwen2 and Qwen3.

A prompt is run once for its whole group, and its keys and values are kept once. Rows that finish leave the batch at
once, waiting ones enter as slots fall free. Every token is drawn with one number that depends on the completion's
own seed and the position alone, so neither the order of the prompts nor what shares the batch can change a
completion (beyond the rounding of the floating-point sums).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atomrl.rollout.attention import KernelKVCache, KVCache, Rows
from atomrl.rollout.decoder import (
    Decoder,
    DecoderSpec,
    Unsupported,
    check_weights,
    read_spec,
    read_weights,
    rope_table,
    unsupported_reason,
)
from atomrl.rollout.kernel import load_kernels
from atomrl.rollout.sampling import sample, sample_kept
from atomrl.rollout.stopping import Drawn, StopRule, check_prompts, eos_token_ids, to_rollout_batch
from atomrl.stages import PromptBatch, RolloutBatch, SamplingParams, completion_seed

__all__ = ["NativeEngine", "Unsupported"]

_PREFILL_TOKENS = 8192
logger = logging.getLogger(__name__)


class NativeEngine:
    """Draws completions with our own decoder; `seeded`.

    Example:
        >>> engine = NativeEngine.from_pretrained("model", tokenizer, dtype=torch.float32, device="cpu",
        ...     max_concurrent_completions=256)  # doctest: +SKIP
        >>> engine.generate(prompts, SamplingParams(max_completion_tokens=64))  # doctest: +SKIP
    """

    seeded = True
    returns_kept = True

    def __init__(
        self,
        spec: DecoderSpec,
        decoder: Decoder,
        rope: tuple[Tensor, Tensor],
        eos: tuple[int, ...],
        tokenizer: Any,
        dtype: torch.dtype,
        max_concurrent_completions: int,
    ):
        self.spec, self.decoder, self.rope, self.eos, self.tokenizer = spec, decoder, rope, eos, tokenizer
        self.dtype, self.max_concurrent_completions = dtype, max_concurrent_completions
        self.device = rope[0].device
        self.version = 0
        self._cache: KVCache | None = None

    @staticmethod
    def supports(config: Any) -> str | None:
        """Why a model of this Hugging Face config cannot be run, or None if it can."""
        return unsupported_reason(config)

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        tokenizer: Any,
        *,
        dtype: torch.dtype,
        device: str,
        max_concurrent_completions: int,
        use_kernel: bool = True,
    ) -> NativeEngine:
        """Load a model.

        Args:
            path: a folder in Hugging Face layout, or a hub name.
            tokenizer: of the model; decodes completions and stop strings.
            dtype: of the weights. On CPUs without bfloat16 instructions, bfloat16 weights are multiplied in float32.
            device: such as `cpu` or `cuda:0`.
            max_concurrent_completions: rows decoded at once.
            use_kernel: run the C++ kernels on a CPU, where a compiler is there to build them.

        Raises:
            Unsupported: the architecture is none that this engine knows.
            ValueError: the weights do not fit the config.
        """
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        spec = read_spec(config)
        place = torch.device(device)
        known = place.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and spec.head_dim % 2 == 0
        kernels = load_kernels() if use_kernel and known else None
        with torch.inference_mode():
            decoder = Decoder(spec, check_weights(read_weights(str(path)), spec), dtype, place, kernels)
        return cls(
            spec=spec,
            decoder=decoder,
            rope=rope_table(config, place),
            eos=eos_token_ids(str(path), config, tokenizer),
            tokenizer=tokenizer,
            dtype=dtype,
            max_concurrent_completions=max_concurrent_completions,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights, named as in the Hugging Face state dict.

        Raises:
            ValueError: names what is missing, unexpected or of a wrong shape; the old weights stay.
        """
        with torch.inference_mode():
            checked, kernels = check_weights(weights, self.spec), self.decoder.kernels
            self.decoder = Decoder(self.spec, checked, self.dtype, self.device, kernels)
        self.version = version

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        """`sampling.completions_per_prompt` completions of each prompt.

        Raises:
            ValueError: a prompt is empty or too long for the model's context, or the model's logits are not finite.
        """
        check_prompts(prompts, sampling, self.spec.max_positions)
        if not prompts.prompt_ids:
            return to_rollout_batch(prompts, sampling, [], self.tokenizer, self.version)
        with torch.inference_mode():
            run = _Run(self, prompts, sampling)
            run.complete()
        return to_rollout_batch(prompts, sampling, run.drawn(), self.tokenizer, self.version)

    def cache_for(self, slots: int, groups: int, prompt_tokens: int, sampling: SamplingParams) -> KVCache:
        """A cache of at least that size: the last one if it fits."""
        size = {
            "slots": slots,
            "groups": groups,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampling.max_completion_tokens,
            "members": sampling.completions_per_prompt,
        }
        if self._cache is None or not self._cache.fits(**size):
            self._cache = None  # freed before the new one is made
            if self.decoder.kernels is not None:
                self._cache = KernelKVCache(self.decoder, self.decoder.kernels, rope=self.rope, **size)
            else:
                self._cache = KVCache(self.decoder, rope=self.rope, **size)
        self._cache.decoder = self.decoder
        return self._cache

    def close(self) -> None:
        """Free weights and cache."""
        self._cache = None
        del self.decoder


# The rows of `_Run.state`.
_ITEM, _SLOT, _GROUP, _MEMBER, _PROMPT_LENGTH, _LENGTH, _SEED, _TOKEN = range(8)


@dataclass
class _Outputs:
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor
    kept: list[tuple[Tensor, Tensor]]
    """Of each draw: which items, and [N, K] what they were drawn from; where it is asked for."""


class _Run:
    """One call of `generate`: item i is completion i % G of prompt i // G."""

    def __init__(self, engine: NativeEngine, prompts: PromptBatch, sampling: SamplingParams):
        self.engine, self.prompts, self.sampling = engine, prompts.prompt_token_ids, sampling
        self.members = sampling.completions_per_prompt
        self.total = len(self.prompts) * self.members
        self.slots = min(engine.max_concurrent_completions, self.total)
        # Twice as many prompts as a full batch has, because long completions keep theirs while others leave.
        self.groups = min(len(self.prompts), 2 * -(-self.slots // self.members) + 1)
        longest = max(len(prompt) for prompt in self.prompts)
        self.cache = engine.cache_for(self.slots, self.groups, longest, sampling)
        device = engine.device
        self.rule = StopRule(sampling, engine.eos, engine.tokenizer, engine.spec.vocab, device)
        seeds = [
            completion_seed(sampling.seed, sampling.step, prompt_id, index)
            for prompt_id in prompts.prompt_ids
            for index in range(self.members)
        ]
        self.seeds = torch.tensor(seeds)
        self.state = torch.zeros(8, 0, dtype=torch.int64, device=device)
        self.next_item = 0
        self.group_of: dict[int, int] = {}
        self.group_hidden = torch.zeros(self.groups, engine.spec.hidden, dtype=engine.decoder.dtype, device=device)
        width = sampling.max_completion_tokens
        self.out = _Outputs(
            tokens=torch.zeros(self.total, width, dtype=torch.int32, device=device),
            logprobs=torch.zeros(self.total, width, device=device),
            lengths=torch.zeros(self.total, dtype=torch.int64, device=device),
            stopped=torch.zeros(self.total, dtype=torch.bool, device=device),
            kept=[],
        )

    def complete(self) -> None:
        """Decode until no completion is left."""
        while self.next_item < self.total or self.state.shape[1]:
            free = self.slots - self.state.shape[1]
            pending = self.total - self.next_item
            # Prompts are run some at a time: one alone costs nearly as much as eight.
            if pending and free >= min(pending, max(1, self.slots // 8)):
                self._admit(min(free, pending))
            if self.state.shape[1]:
                self._decode()

    def drawn(self) -> list[Drawn]:
        """Each item.

        Raises:
            ValueError: a log-prob is NaN.
        """
        out = self.out
        if bool(out.logprobs.isnan().any()):
            raise ValueError(
                "the model's logits are NaN or infinite: its weights have diverged; go on from an earlier checkpoint "
                "with a lower train.learning_rate"
            )
        kept: list[list[tuple[int, ...]]] = [[] for _ in range(self.total)]
        for items, drawn_from in out.kept:  # in the order of the positions of each item
            for item, ids in zip(items.tolist(), drawn_from.tolist(), strict=True):
                kept[item].append(tuple(token for token in ids if token >= 0))
        rows = zip(out.tokens.cpu(), out.logprobs.cpu(), out.lengths.tolist(), out.stopped.tolist(), kept, strict=True)
        return [
            Drawn(tokens[:n].tolist(), logprobs[:n].tolist(), stopped, tuple(own) if out.kept else None)
            for tokens, logprobs, n, stopped, own in rows
        ]

    def _admit(self, count: int) -> None:
        """Let up to `count` waiting completions in: run the prompts that are new, and draw the first tokens."""
        used = set(self.state[_GROUP].tolist())
        first = self.next_item // self.members
        self.group_of = {prompt: group for prompt, group in self.group_of.items() if prompt == first}
        free_groups = sorted(set(range(self.groups)) - used - set(self.group_of.values()))
        items: list[int] = []
        new: list[int] = []
        while len(items) < count:
            prompt = (self.next_item + len(items)) // self.members
            if prompt not in self.group_of:
                if not free_groups:
                    break
                self.group_of[prompt] = free_groups.pop(0)
                new.append(prompt)
            items.append(self.next_item + len(items))
        if not items:
            return
        self._prefill(sorted(new, key=lambda prompt: len(self.prompts[prompt])))
        used_slots = set(self.state[_SLOT].tolist())
        free_slots = [slot for slot in range(self.slots) if slot not in used_slots]
        owners = [item // self.members for item in items]
        entering = torch.zeros(8, len(items), dtype=torch.int64)
        entering[_ITEM] = torch.tensor(items)
        entering[_SLOT] = torch.tensor(free_slots[: len(items)])
        entering[_GROUP] = torch.tensor([self.group_of[prompt] for prompt in owners])
        entering[_MEMBER] = entering[_ITEM] % self.members
        entering[_PROMPT_LENGTH] = torch.tensor([len(self.prompts[prompt]) for prompt in owners])
        entering[_SEED] = self.seeds[entering[_ITEM]]
        entering = entering.to(self.engine.device)
        self.next_item += len(items)
        groups, place = entering[_GROUP].unique(return_inverse=True)
        logits = self.engine.decoder.logits(self.group_hidden[groups])[place]
        self.state = torch.cat((self.state, self._accept(entering, logits)), dim=1)

    def _prefill(self, prompts: list[int]) -> None:
        """Run these prompts (shortest first) into their groups, a bounded number of padded tokens at a time."""
        while prompts:
            count = 1
            while count < len(prompts) and (count + 1) * len(self.prompts[prompts[count]]) <= _PREFILL_TOKENS:
                count += 1
            part, prompts = prompts[:count], prompts[count:]
            groups = torch.tensor([self.group_of[prompt] for prompt in part], device=self.engine.device)
            self.group_hidden[groups] = self.cache.prefill([self.prompts[prompt] for prompt in part], groups)

    def _decode(self) -> None:
        """One more token for every row."""
        state = self.state
        state[_SLOT] = self.cache.compact(state[_SLOT])
        longest = int(state[_LENGTH].max())
        self.cache.reserve(longest)
        rows = Rows(
            slots=state[_SLOT],
            groups=state[_GROUP],
            members=state[_MEMBER],
            prompt_lengths=state[_PROMPT_LENGTH],
            lengths=state[_LENGTH] - 1,
            longest=longest,
        )
        hidden = self.cache.decode(state[_TOKEN], rows)
        self.state = self._accept(state, self.engine.decoder.logits(hidden))

    def _accept(self, state: Tensor, logits: Tensor) -> Tensor:
        """Draw the next token of each row from `logits` [N, V], keep it, and return the rows that go on."""
        lengths, kernels, items = state[_LENGTH], self.engine.decoder.kernels, state[_ITEM]
        banned = self.rule.banned(lengths)
        if self.sampling.logprobs_over == "kept":
            tokens, logprobs, kept = sample_kept(logits, self.sampling, state[_SEED], lengths, banned)
            self.out.kept.append((items.cpu(), kept.cpu()))
        else:
            tokens, logprobs = sample(logits, self.sampling, state[_SEED], lengths, banned, kernels)
        self.out.tokens[items, lengths] = tokens.int()
        self.out.logprobs[items, lengths] = logprobs
        state[_TOKEN] = tokens
        lengths += 1
        stopped = self.rule.ends(tokens, lengths, self.out.tokens, items)
        finished = stopped | (lengths == self.sampling.max_completion_tokens)
        if not bool(finished.any()):
            return state
        self.out.lengths[items[finished]] = lengths[finished]
        self.out.stopped[items[finished]] = stopped[finished]
        return state[:, ~finished]
