"""Demonstrations and preferences as token ids: held in flat arrays, and made into rows."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atomrl.data.problems import DataError
from atomrl.types import RowBatch, Sample

log = logging.getLogger(__name__)
Items = Sequence[tuple[str, Sample]]
"""(prompt id, sample)"""
SAMPLES_AT_ONCE = 512


class Example(NamedTuple):
    """A prompt with a completion, as tokens.

    Example:
        >>> demonstration([5, 6], [7, 2])
        Example(tokens=[5, 6, 7, 2], learned=[False, False, True, True], label=0, margin=0.0)
    """

    tokens: Sequence[int] | NDArray[np.int32]
    learned: Sequence[bool] | NDArray[np.bool_]
    """Which of them are trained on."""
    label: int = 0
    """Of a preference: 1 chosen or good, -1 rejected or bad."""
    margin: float = 0.0
    """By how much the chosen completion of the pair is better."""


def demonstration(prompt: Sequence[int], completion: Sequence[int], label: int = 0, margin: float = 0.0) -> Example:
    """A completion that is trained on, after a prompt that is not."""
    learned = [False] * len(prompt) + [True] * len(completion)
    return Example([*prompt, *completion], learned, label, margin)


Encode = Callable[[Items], list[list[Example]]]
"""Tokenizes samples: the completions of each; none of a prompt that is too long."""


def rows_from_tokens(
    groups: Sequence[Sequence[Example]], max_row_tokens: int | None = None, mismatched: bool = False
) -> RowBatch:
    """Rows of completions, those of one prompt as a group, and as a pair where it has a chosen and a rejected one.

    Args:
        groups: the completions of each prompt.
        max_row_tokens: rows are cut to this many tokens.
        mismatched: after them, each prompt once more with the completions of the next one (KTO's).

    Raises:
        ValueError: there is no next prompt.

    Example:
        >>> rows = rows_from_tokens([[demonstration([5], [6, 2], 1), demonstration([5], [7], -1)]])
        >>> rows.tokens.tolist(), rows.labels.tolist(), rows.pair_ids.tolist()
        ([[5, 6, 2], [5, 7, 0]], [1, -1], [0, 0])
    """
    examples = [(place, example, False) for place, group in enumerate(groups) for example in group]
    if mismatched:
        if len(groups) < 2:
            raise ValueError("completions of other prompts are needed: train.rows_per_update must be at least 2")
        swapped = [
            _with_prompt_of(group[0], other)
            for group, others in zip(groups, [*groups[1:], groups[0]], strict=True)
            for other in others
        ]
        examples += [(len(groups) + place, example, True) for place, example in enumerate(swapped)]
    sizes = [min(len(example.tokens), max_row_tokens or len(example.tokens)) for _, example, _ in examples]
    tokens = torch.zeros(len(examples), max(sizes, default=0), dtype=torch.long)
    loss_mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (size, (_, example, _)) in enumerate(zip(sizes, examples, strict=True)):
        tokens[row, :size] = torch.as_tensor(np.asarray(example.tokens[:size], dtype=np.int64))
        loss_mask[row, :size] = torch.as_tensor(np.asarray(example.learned[:size]))
    loss_mask[:, :1] = False  # nothing predicts the first token
    labels = torch.tensor([0 if other else example.label for _, example, other in examples])
    group_ids = torch.tensor([group for group, _, _ in examples])
    pairs = [{example.label for example in group} >= {1, -1} for group in groups]
    pair_ids = [group if group < len(groups) and pairs[group] else -1 for group, _, _ in examples]
    return RowBatch(
        tokens=tokens,
        loss_mask=loss_mask,
        lengths=torch.tensor(sizes),
        prompt_lengths=torch.tensor([_prompt_length(example) for _, example, _ in examples]),
        group_ids=group_ids,
        rewards=torch.zeros(len(examples)),
        truncated=torch.tensor(
            [len(example.tokens) > size for size, (_, example, _) in zip(sizes, examples, strict=True)]
        ),
        labels=labels if labels.any() else None,
        pair_ids=torch.tensor(pair_ids) if any(pairs) else None,
        pair_margins=torch.tensor([example.margin for _, example, _ in examples]) if any(pairs) else None,
        mismatched=torch.tensor([other for _, _, other in examples]) if mismatched else None,
    )


def _prompt_length(example: Example) -> int:
    return int(np.asarray(example.learned).argmax())


def _with_prompt_of(example: Example, other: Example) -> Example:
    return demonstration(list(example.tokens[: _prompt_length(example)]), list(other.tokens[_prompt_length(other) :]))


@dataclass(frozen=True)
class TooLong:
    """What is said of samples over the limit on length; `{}` is filled in."""

    complaint: str
    """Fields: `over`, `total`, `limit`, `longest`, `sample`."""
    advice: str
    """What to do where none is left."""


class TokenizedSamples:
    """Samples as rows of tokens. Those of a file are tokenized once, into flat arrays of 5 bytes a token; those of a
    generator, which writes other completions every time, as they are drawn.

    Attributes:
        samples: those that fit.

    Args:
        samples: of a data set.
        encode: tokenizes some of them.
        drawn: whether `encode` gives other completions every time.
        limit: samples of which a row, as in the first epoch, has more tokens are left out, with a warning.
        too_long: what is said of them.
        max_row_tokens: rows are cut to this many tokens.

    Raises:
        DataError: none is left.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        encode: Encode,
        *,
        drawn: bool,
        limit: int | None,
        too_long: TooLong,
        max_row_tokens: int | None = None,
    ) -> None:
        self._encode, self._drawn = encode, drawn
        self._max_row_tokens = min((size for size in (limit, max_row_tokens) if size is not None), default=None)
        self._tokens, self._learned = array("i"), bytearray()
        self._ends, self._labels, self._margins = array("q", [0]), array("b"), array("d")
        self._rows: dict[str, tuple[int, int]] = {}
        self.samples: list[Sample] = []
        over, longest, no_prompt = 0, (0, ""), 0
        for start in range(0, len(samples), SAMPLES_AT_ONCE):
            part = samples[start : start + SAMPLES_AT_ONCE]
            for sample, group in zip(part, encode([(f"0:{s.sample_id}", s) for s in part]), strict=True):
                size = max((len(example.tokens) for example in group), default=0)
                longest = max(longest, (size, sample.sample_id))
                no_prompt += not group
                if group and limit is not None and size > limit:
                    over += 1
                elif group:
                    self.samples.append(sample)
                    if not drawn:
                        self._keep(sample, group)
        if over:
            message = too_long.complaint.format(
                over=over, total=len(samples), limit=limit, longest=longest[0], sample=longest[1]
            )
            if not self.samples:
                raise DataError(f"{message}; {too_long.advice}")
            log.warning("%s and are left out", message)
        if no_prompt:
            if not self.samples:
                raise DataError(f"all {no_prompt} prompts are longer than data.max_prompt_tokens")
            log.warning("%d of %d prompts are over data.max_prompt_tokens and are left out", no_prompt, len(samples))

    def _keep(self, sample: Sample, group: Sequence[Example]) -> None:
        self._rows[sample.sample_id] = len(self._labels), len(self._labels) + len(group)
        for example in group:
            self._tokens.extend(example.tokens)
            self._learned.extend(example.learned)
            self._ends.append(len(self._tokens))
            self._labels.append(example.label)
            self._margins.append(example.margin)

    def rows(self, items: Items, mismatched: bool = False) -> RowBatch:
        """The rows of some samples; `mismatched`: see `rows_from_tokens`."""
        groups = self._encode(items) if self._drawn else [self._kept(sample) for _, sample in items]
        return rows_from_tokens(groups, self._max_row_tokens, mismatched)

    def batches(self, samples: int) -> Iterator[RowBatch]:
        """The rows of all samples, the same ones every time, so many samples at once."""
        for start in range(0, len(self.samples), samples):
            yield self.rows([(f"eval:{s.sample_id}", s) for s in self.samples[start : start + samples]])

    def _kept(self, sample: Sample) -> list[Example]:
        tokens = np.frombuffer(self._tokens, dtype=np.int32)
        learned = np.frombuffer(self._learned, dtype=np.bool_)
        found = []
        for row in range(*self._rows[sample.sample_id]):
            span = slice(self._ends[row], self._ends[row + 1])
            found.append(Example(tokens[span], learned[span], self._labels[row], self._margins[row]))
        return found
