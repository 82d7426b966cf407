"""What every engine shares: when a completion ends, and which prompts can be run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomrl.stages import Completion, PromptBatch, RolloutBatch, SamplingParams


def eos_token_ids(path: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The model's end-of-sequence tokens: its generation config's, else its config's, else its tokenizer's."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the folder has none
        ids = None
    for other in (config.eos_token_id, tokenizer.eos_token_id):
        ids = other if ids is None else ids
    return tuple(ids) if isinstance(ids, Iterable) else (() if ids is None else (ids,))


def check_prompts(prompts: PromptBatch, sampling: SamplingParams, max_positions: int) -> None:
    """Refuse what no engine can run.

    Raises:
        ValueError: a prompt has no tokens, or leaves no room for the completion in the model's context.
    """
    for prompt_id, tokens in zip(prompts.prompt_ids, prompts.prompt_token_ids, strict=True):
        if not tokens:
            raise ValueError(f"prompt {prompt_id!r} has no tokens; a completion needs at least one to start from")
        if len(tokens) + sampling.max_completion_tokens > max_positions:
            raise ValueError(
                f"prompt {prompt_id!r} has {len(tokens)} tokens; with max_completion_tokens="
                f"{sampling.max_completion_tokens} that passes the model's context of {max_positions}; "
                "lower max_completion_tokens or drop longer prompts"
            )


class StopRule:
    """Says which rows end with their newest token.

    Stop strings are looked for in the decoded tail, special tokens included, of those rows only whose newest token
    can be the one that completes one.

    Args:
        sampling: the stop tokens, stop strings, minimum length and `ignore_eos`.
        eos: the model's end-of-sequence tokens.
        tokenizer: of the model; decodes the tails.
        vocab: width of the logits.
        device: of the tokens that `ends` gets.
    """

    def __init__(self, sampling: SamplingParams, eos: Sequence[int], tokenizer: Any, vocab: int, device: torch.device):
        self.minimum, self.stops, self.tokenizer = sampling.min_completion_tokens, sampling.stop, tokenizer
        self.stop_ids = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)})
        if any(not 0 <= token < vocab for token in self.stop_ids):
            raise ValueError(f"stop tokens {self.stop_ids} are not all in the vocabulary of {vocab}")
        if any(not stop for stop in self.stops):
            raise ValueError("a stop string is empty")
        self.is_stop = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.is_stop[self.stop_ids] = True
        self.completes = None
        if self.stops:
            # A token may be unknown to the tokenizer where the model's vocabulary is padded.
            texts = tokenizer.batch_decode([[token] for token in range(min(vocab, len(tokenizer)))])
            self.completes = torch.zeros(vocab, dtype=torch.bool)
            self.completes[: len(texts)] = torch.tensor([self._can_complete(text) for text in texts])
            self.completes = self.completes.to(device)
            self.tail_tokens = max(len(stop.encode()) for stop in self.stops) + 8

    def _can_complete(self, text: str) -> bool:
        """Whether a stop string may end inside a token of this text (part of a character: unknown, so yes)."""
        return "\ufffd" in text or any(
            stop in text or any(stop.endswith(text[:end]) for end in range(1, len(text) + 1)) for stop in self.stops
        )

    def banned(self, positions: Tensor) -> Tensor | None:
        """[N, V] True where a token must not be drawn yet, or None; `positions` [N] is how many tokens rows have."""
        if not self.minimum or not self.stop_ids:
            return None
        early = positions < self.minimum
        return early[:, None] & self.is_stop if bool(early.any()) else None

    def ends(self, tokens: Tensor, lengths: Tensor, sequences: Tensor, rows: Tensor) -> Tensor:
        """Which rows stop: newest tokens [N], lengths with them [N], and row `rows[i]` of `sequences` [*, T], whose
        first `lengths[i]` are completion i. -> [N] bool.
        """
        stopped = self.is_stop[tokens]
        if self.completes is not None:
            candidates = self.completes[tokens] & ~stopped
            for place in candidates.nonzero()[:, 0].tolist():
                length = int(lengths[place])
                tail = sequences[rows[place], max(0, length - self.tail_tokens) : length].tolist()
                stopped[place] = self._completed(tail)
        return stopped & (lengths >= self.minimum) if self.minimum else stopped

    def _completed(self, tail: list[int]) -> bool:
        """Whether the last token of `tail` completes a stop string."""
        after = self.tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        if not any(stop in after for stop in self.stops):
            return False
        before = self.tokenizer.decode(tail[:-1], clean_up_tokenization_spaces=False)
        return any(after.rfind(stop) + len(stop) > len(before) for stop in self.stops if stop in after)


class Drawn(NamedTuple):
    """A completion as it leaves the model."""

    token_ids: list[int]
    logprobs: list[float]
    stopped: bool
    """By itself, and not at the limit."""
    kept_ids: tuple[tuple[int, ...], ...] | None = None


def to_rollout_batch(
    prompts: PromptBatch, sampling: SamplingParams, drawn: Sequence[Drawn], tokenizer: Any, version: int
) -> RolloutBatch:
    """Put what was drawn, prompt by prompt, into a batch, with texts."""
    rows = [item.token_ids for item in drawn]
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    texts = tokenizer.batch_decode(rows, **options) if rows else []
    completions = [
        Completion(
            token_ids=tuple(item.token_ids),
            text=text,
            logprobs=tuple(item.logprobs),
            finish_reason="stop" if item.stopped else "length",
            kept_ids=item.kept_ids,
        )
        for item, text in zip(drawn, texts, strict=True)
    ]
    members = sampling.completions_per_prompt
    groups = tuple(tuple(completions[start : start + members]) for start in range(0, len(completions), members))
    return RolloutBatch(
        samples=prompts.samples,
        prompt_ids=prompts.prompt_ids,
        prompt_token_ids=prompts.prompt_token_ids,
        completions=groups,
        policy_version=version,
    )
