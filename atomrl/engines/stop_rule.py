"""When a completion ends: end-of-sequence tokens, stop tokens, stop strings, minimum length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from atomrl.common.chat_template import special_ids, stop_tokens
from atomrl.types import SamplingParams


def eos_token_ids(path: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the end-of-sequence tokens (`stop_tokens`), with the generation config of the folder `path`."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # no generation_config.json
        generation = None
    return stop_tokens(tokenizer, config, generation)


@lru_cache(maxsize=16)
def completing_tokens(tokenizer: Any, stops: tuple[str, ...], vocab: int) -> Tensor:
    """Return [V] bool: tokens in which a stop string may end. Cached, since it decodes the whole vocabulary."""

    def can_complete(text: str) -> bool:  # a part of a character may be anything
        return "\ufffd" in text or any(
            stop in text or any(stop.endswith(text[:end]) for end in range(1, len(text) + 1)) for stop in stops
        )

    completing = torch.zeros(vocab, dtype=torch.bool)
    # The model's vocabulary may be padded with tokens that the tokenizer does not have.
    texts = tokenizer.batch_decode([[token] for token in range(min(vocab, len(tokenizer)))])
    completing[: len(texts)] = torch.tensor([can_complete(text) for text in texts])
    return completing


class StopRule:
    """Stop conditions of completions with the same sampling parameters.

    Stop strings are searched in the decoded tail, special tokens included, and only if the newest tokens can complete
    one (`completing_tokens`).

    Args:
        sampling: stop tokens, stop strings, minimum length and `ignore_eos`.
        eos: end-of-sequence tokens of the model.
        tokenizer: the model's; decodes the tails.
        vocab: width of the logits.
        device: of the tokens passed to its methods.
        never: tokens that are never sampled, such as those of pictures.

    Raises:
        ValueError: a stop token is not in the vocabulary, or a stop string is empty.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        eos: Sequence[int],
        tokenizer: Any,
        vocab: int,
        device: torch.device,
        never: Sequence[int] = (),
    ):
        self.sampling, self.minimum, self.tokenizer = sampling, sampling.min_completion_tokens, tokenizer
        self.eos, self.special = frozenset(eos), special_ids(tokenizer)
        stop_ids = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)})
        if any(not 0 <= token < vocab for token in stop_ids):
            raise ValueError(f"stop tokens {stop_ids} are not all in the vocabulary of {vocab}")
        if any(not stop for stop in sampling.stop):
            raise ValueError("a stop string is empty")
        self.never: Tensor | None = None
        self.never_ids = tuple(token for token in never if token < vocab)
        if self.never_ids:
            self.never = torch.zeros(vocab, dtype=torch.bool, device=device)
            self.never[list(self.never_ids)] = True
        self.bans = bool(self.minimum and stop_ids)
        self.is_stop = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.is_stop[stop_ids] = True
        self.completes: Tensor | None = None
        if sampling.stop:
            self.completes = completing_tokens(tokenizer, sampling.stop, vocab).to(device)
            self.tail_tokens = max(len(stop.encode()) for stop in sampling.stop) + 8

    def banned(self, lengths: Tensor) -> Tensor | None:
        """Return [N, V] True for tokens that must not be sampled yet, or None; `lengths` [N] are the tokens so far."""
        if not self.bans:
            return None if self.never is None else self.never.expand(len(lengths), -1)
        early = lengths < self.minimum
        # Reading the values would synchronize with the GPU.
        stops = early[:, None] & self.is_stop if early.is_cuda or bool(early.any()) else None
        if self.never is None:
            return stops
        return self.never.expand(len(lengths), -1) if stops is None else stops | self.never

    def token_ends(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return [N] bool: completions that end with their newest token [N]; lengths [N] include it."""
        stopped = self.is_stop[tokens]
        return stopped & (lengths >= self.minimum) if self.minimum else stopped

    def string_ends(
        self, sequences: Tensor, rows: Tensor, lengths: Tensor, window: int = 1, starts: Tensor | None = None
    ) -> dict[int, int]:
        """Find completions in which one of the last `window` tokens completes a stop string: index -> length with it.

        Args:
            sequences: [*, T]; completion i is the first `lengths[i]` tokens of row `rows[i]`.
            rows: [N] int64.
            lengths: [N] int64.
            starts: [N] int64: where the sampled tokens begin; None: at 0.
        """
        ends: dict[int, int] = {}
        if self.completes is None:
            return ends
        starts = torch.zeros_like(lengths) if starts is None else starts
        places = lengths[:, None] + torch.arange(-window, 0, device=lengths.device)
        tokens = sequences[rows[:, None], places.clamp(min=0)]
        candidates = self.completes[tokens] & (places >= starts[:, None] + max(self.minimum - 1, 0))
        for index, column in candidates.nonzero().tolist():
            if index not in ends:
                length = int(lengths[index]) - window + column + 1
                tail = sequences[rows[index], max(int(starts[index]), length - self.tail_tokens) : length].tolist()
                if self._completed(tail):
                    ends[index] = length
        return ends

    def written(self, tokens: Sequence[int], stopped: bool) -> Sequence[int]:
        """Return the tokens to decode as the completion's text, without the special token that ended it.

        A special token that completes a stop string stays, unless it is an end of sequence.

        Args:
            stopped: the finish reason is `stop`.
        """
        last = tokens[-1] if stopped and tokens else None
        if last in self.eos or (last in self.special and not self._completed(list(tokens))):
            return tokens[:-1]
        return tokens

    def _completed(self, tail: list[int]) -> bool:
        """Return True if the last token of `tail` completes a stop string."""
        after = self.tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        if not any(stop in after for stop in self.sampling.stop):
            return False
        before = self.tokenizer.decode(tail[:-1], clean_up_tokenization_spaces=False)
        return any(after.rfind(stop) + len(stop) > len(before) for stop in self.sampling.stop if stop in after)
