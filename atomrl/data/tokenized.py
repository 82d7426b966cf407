"""Demonstrations and preferences as token ids, and as rows."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from atomrl.batches import RowBatch
from atomrl.data.completions import written
from atomrl.data.problems import DataError
from atomrl.data.processor import DataProcessor
from atomrl.data.sources import COMPLETIONS, ENVIRONMENT, LoadReport, PromptContent, Scored
from atomrl.types import Message, Sample

log = logging.getLogger(__name__)
Items = Sequence[tuple[str, Sample]]
"""(prompt id, sample)"""
Read = Callable[[Sample, Sequence[int], Sequence[int], str], Sequence[int]]
"""A reward model's way to read: sample, prompt and completion as token ids, completion as text -> the whole row."""
SAMPLES_AT_ONCE = 512
SAID = ("assistant", ENVIRONMENT)
"""Roles whose words are tokenized as they are, each message by itself."""


class Example(NamedTuple):
    """A prompt with a completion, as tokens; in 5 bytes each, since whole data sets are held so."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """Which of them are trained on."""
    label: int = 0
    """Of a preference: 1 chosen or good, -1 rejected or bad."""
    margin: float = 0.0
    """By how much the chosen completion of the pair is better."""

    @property
    def prompt_length(self) -> int:
        return int(self.learned.argmax())


def demonstration(prompt: Sequence[int], completion: Sequence[int], label: int = 0) -> Example:
    """A completion that is trained on, after a prompt that is not.

    Example:
        >>> demonstration([5, 6], [7, 2]).learned.tolist()
        [False, False, True, True]
    """
    tokens = np.array([*prompt, *completion], dtype=np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(prompt), label)


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
        for (own, *_), others in zip(groups, [*groups[1:], groups[0]], strict=True):
            prompt = own.tokens[: own.prompt_length].tolist()
            for other in others:
                swapped = demonstration(prompt, other.tokens[other.prompt_length :].tolist())
                examples.append((len(examples), swapped, True))
    rows = [torch.from_numpy(example.tokens[:max_row_tokens]).long() for _, example, _ in examples]
    learned = [torch.from_numpy(example.learned[:max_row_tokens]) for _, example, _ in examples]
    tokens, loss_mask = pad_sequence(rows, batch_first=True), pad_sequence(learned, batch_first=True)
    loss_mask[:, :1] = False  # nothing predicts the first token
    labels = torch.tensor([example.label for _, example, _ in examples])
    pairs = [{example.label for example in group} >= {1, -1} for group in groups]
    pair_ids = [group if not other and pairs[group] else -1 for group, _, other in examples]
    return RowBatch(
        tokens=tokens,
        loss_mask=loss_mask,
        lengths=torch.tensor([len(row) for row in rows]),
        prompt_lengths=torch.tensor([example.prompt_length for _, example, _ in examples]),
        group_ids=torch.tensor([group for group, _, _ in examples]),
        rewards=torch.zeros(len(examples)),
        truncated=torch.tensor([len(one.tokens) > len(row) for row, (_, one, _) in zip(rows, examples, strict=True)]),
        labels=labels if labels.any() else None,
        pair_ids=torch.tensor(pair_ids) if any(pairs) else None,
        pair_margins=torch.tensor([example.margin for _, example, _ in examples]) if any(pairs) else None,
        mismatched=torch.tensor([other for _, _, other in examples]) if mismatched else None,
    )


def untrainable(group: Sequence[Example], max_row_tokens: int | None) -> str | None:
    """Why nothing can be learned of the completions of a prompt; None where something can.

    Example:
        >>> untrainable([demonstration([5, 6], [7])], 2)
        'have no token to train on'
        >>> untrainable([demonstration([5], [7, 8], 1), demonstration([5], [7, 9], -1)], 2)
        'are the same tokens, chosen and rejected'
    """
    if not all(example.learned[1:max_row_tokens].any() for example in group):
        return "have no token to train on"
    rows = [example.tokens[:max_row_tokens] for example in group]
    if len(rows) == 2 and np.array_equal(rows[0], rows[1]):
        return "are the same tokens, chosen and rejected"
    return None


class TokenizedSamples:
    """Samples as rows of tokens: those of a file are tokenized once; those of a generator, which writes other
    completions every time, as they are drawn.

    Attributes:
        samples: those that fit.

    Args:
        report: what was loaded.
        processor: of the prompts.
        what: the plural that messages call the samples by.
        seed: with the prompt's id, of what chance decides.
        limit: samples of which a row, as in the first epoch, has more tokens are left out, with a warning.
        max_row_tokens: rows are cut to this many tokens. Samples that are then `untrainable` are left out likewise.
        read: where the model has a way of its own to read a row; all of it is then trained on.

    Raises:
        DataError: none is left.
    """

    def __init__(
        self,
        report: LoadReport,
        processor: DataProcessor,
        what: str,
        *,
        seed: int = 0,
        limit: int | None = None,
        max_row_tokens: int | None = None,
        read: Read | None = None,
    ) -> None:
        self._draw, self._processor, self._seed, self._read = report.draw, processor, seed, read
        self._max_row_tokens = min((size for size in (limit, max_row_tokens) if size is not None), default=None)
        self._kept: dict[str, list[Example]] = {}
        self.samples: list[Sample] = []
        over, longest, no_prompt, total = 0, (0, ""), 0, len(report.samples)
        useless, cut = dict[str, list[str]](), 0
        for start in range(0, total, SAMPLES_AT_ONCE):
            items = [(f"0:{sample.sample_id}", sample) for sample in report.samples[start : start + SAMPLES_AT_ONCE]]
            for (_, sample), group in zip(items, self._encode(items), strict=True):
                size = max((len(example.tokens) for example in group), default=0)
                longest = max(longest, (size, sample.sample_id))
                if not group:
                    no_prompt += 1
                elif limit is not None and size > limit:
                    over += 1
                elif reason := untrainable(group, max_row_tokens):
                    useless.setdefault(reason, []).append(sample.sample_id)
                else:
                    cut += max_row_tokens is not None and size > max_row_tokens
                    self.samples.append(sample)
                    if self._draw is None:
                        self._kept[sample.sample_id] = group
        if over:
            self._left_out(
                f"{over} of {total} {what} are longer than {limit} tokens, all that the model takes (the longest, with "
                f"its prompt: {longest[0]}, {longest[1]})",
                "; take a model with a longer context (of one that is made fresh: sft.gpt.max_tokens), or shorter data",
            )
        if no_prompt:
            self._left_out(f"{no_prompt} of {total} prompts are longer than data.max_prompt_tokens", "")
        within = "" if max_row_tokens is None else f" within train.max_row_tokens={max_row_tokens}"
        advice = "; raise it above prompt and completion together" if within else ""
        for reason, found in useless.items():
            self._left_out(f"{len(found)} of {total} {what} {reason}{within} (such as {found[0]})", advice)
        if cut:
            log.warning(
                "train.max_row_tokens=%d: %d of %d %s are longer, and are cut", max_row_tokens, cut, total, what
            )

    def _left_out(self, message: str, advice: str) -> None:
        if not self.samples:
            raise DataError(message + advice)
        log.warning("%s and are left out", message)

    def rows(self, items: Items, mismatched: bool = False) -> RowBatch:
        """The rows of some samples; `mismatched`: see `rows_from_tokens`."""
        if self._draw is None:
            groups = [self._kept[sample.sample_id] for _, sample in items]
        else:
            groups = [group for group in self._encode(items) if not untrainable(group, self._max_row_tokens)]
            if not groups:
                raise DataError(f"of {len(items)} samples that were drawn, none has rows that can be trained on")
        return rows_from_tokens(groups, self._max_row_tokens, mismatched)

    def batches(self, samples: int) -> Iterator[RowBatch]:
        """The rows of all samples, the same ones every time, so many samples at once."""
        for start in range(0, len(self.samples), samples):
            yield self.rows([(f"eval:{s.sample_id}", s) for s in self.samples[start : start + samples]])

    def completions(self, prompt_id: str, sample: Sample) -> Scored:
        """Those of the sample's row, or of its generator."""
        if self._draw is None:
            return cast(Scored, sample.columns[COMPLETIONS])
        row = {**sample.columns, "ground_truth": sample.ground_truth}
        drawn = self._draw(random.Random(f"{self._seed}/{prompt_id}"), row)
        if isinstance(drawn, tuple):
            return ((drawn[0], 1.0), (drawn[1], 0.0))
        return ((drawn if isinstance(drawn, str) else written(drawn), 0.0),)

    def _encode(self, items: Items) -> list[list[Example]]:
        """The completions of each; none of a prompt that is too long."""
        prompts = self._processor.within_limit([sample for _, sample in items])
        groups = [self.completions(prompt_id, sample) for prompt_id, sample in items]
        said = iter(self._ids([text for group in groups for turns, _ in group for text in _said(turns)]))
        found: list[list[Example]] = []
        for (_, sample), prompt, group in zip(items, prompts, groups, strict=True):
            margin = group[0][1] - group[-1][1]
            labels = (1, -1) if len(group) == 2 else (int(group[0][1]),)
            examples = []
            for (turns, _), label in zip(group, labels, strict=True):
                answers = [next(said) for _ in _said(turns)]
                if prompt is not None:
                    examples.append(self._example(sample, prompt, turns, answers)._replace(label=label, margin=margin))
            found.append(examples)
        return found

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer = self._processor.tokenizer
        if tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so a model could not learn to stop: name one as eos_token "
                "in its tokenizer_config.json, or as eos_token_id in the model's config.json (or take another by "
                "model.tokenizer)"
            )
        encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return encoded

    def _example(
        self, sample: Sample, prompt: Sequence[int], turns: PromptContent, said: Sequence[list[int]]
    ) -> Example:
        """A completion; or several turns, each of the assistant's as it would have been sampled: with the
        end-of-sequence token behind it, or where an environment answers, with its words as they are and the assistant's
        next ones; then what the chat template puts between it and the assistant's next turn.

        Raises:
            DataError: the template writes a conversation otherwise once it goes on, so the tokens would not be those
                that the model sees in use.
        """
        tokenizer, processor = self._processor.tokenizer, self._processor
        if isinstance(turns, str):
            completion = [*said[0], tokenizer.eos_token_id]
            if self._read is None:
                return demonstration(prompt, completion)
            return demonstration([], self._read(sample, prompt, completion, turns))
        start = sample.prompt
        messages = [Message(role="user", content=start)] if isinstance(start, str) else list(start)
        tokens, learned, text, following = [*prompt], [False] * len(prompt), "", iter(said)
        parts = _conversation_turns(turns)
        for number, part in enumerate(parts):
            if part[0]["role"] != "assistant":
                messages += part
                continue
            longer = processor.rendered(messages, sample.sample_id) if len(parts) > 1 else ""
            if not longer.startswith(text):
                raise DataError(
                    f"{sample.sample_id}: the chat template writes earlier turns otherwise once a conversation goes "
                    "on; give each of the assistant's turns as a row of its own"
                )
            between = longer[len(text) :].removeprefix(tokenizer.eos_token) if number else ""
            pieces = [(self._ids([between])[0], False)] if between else []
            pieces += [(next(following), message["role"] == "assistant") for message in part]
            for ids, own in [*pieces, ([tokenizer.eos_token_id], True)]:
                tokens += ids
                learned += [own] * len(ids)
            words = "".join(message["content"] for message in part)
            messages.append(Message(role="assistant", content=words))
            text = longer + words
        return Example(np.array(tokens, dtype=np.int32), np.array(learned, dtype=np.bool_))


def _said(turns: PromptContent) -> list[str]:
    """What the assistant says in them, and what an environment answers within its turns."""
    return [turns] if isinstance(turns, str) else [turn["content"] for turn in turns if turn["role"] in SAID]


def _conversation_turns(turns: Sequence[Message]) -> list[list[Message]]:
    """A turn as the chat template sees it: a message, or the assistant's with what environments answer within it."""
    parts: list[list[Message]] = []
    for turn in turns:
        if parts and ENVIRONMENT in (turn["role"], parts[-1][-1]["role"]):
            parts[-1].append(turn)
        else:
            parts.append([turn])
    return parts
