"""What ends a completion: the model's end-of-sequence tokens, stop tokens, stop strings."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from atomrl.chat_template import special_ids, stop_tokens
from atomrl.types import SamplingParams


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
