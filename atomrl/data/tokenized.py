"""Demonstrations and preferences as token ids, and as rows."""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from atomrl.batches import RowBatch
from atomrl.chat_template import closing_tag, following, thought_opening, token_ids
from atomrl.data.completions import written
from atomrl.data.conversations import ConversationWriter, Piece, continued, joined, said_in, within_turns
from atomrl.data.problems import DataError, problem_list
from atomrl.data.processor import DataProcessor
from atomrl.data.sources import COMPLETIONS, ENVIRONMENT, LoadReport, PromptContent, Scored
from atomrl.types import Message, Sample

log = logging.getLogger(__name__)
Items = Sequence[tuple[str, Sample]]
"""(prompt id, sample)"""
Read = Callable[[Sample, Sequence[int], Sequence[int], str | Message], Sequence[int]]
"""A reward model's way to read: sample, prompt and completion as token ids, completion as text or as the assistant's
message -> the whole row."""
SAMPLES_AT_ONCE = 512
OPENING_TOKENS = 16
"""In which a prompt's end is looked for that opens the assistant's thoughts."""


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
        stops: the tokens that end the model's completions, beside the tokenizer's and the chat template's.

    Raises:
        DataError: none is left, or the chat template cannot show what is in a row (`data.on_bad_row` may leave such
            rows out).
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
        stops: Iterable[int] = (),
    ) -> None:
        self._draw, self._processor, self._seed, self._read = report.draw, processor, seed, read
        if processor.tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so a model could not learn to stop: name one as eos_token "
                "in its tokenizer_config.json, or as eos_token_id in the model's config.json (or take another by "
                "model.tokenizer)"
            )
        self._writer = ConversationWriter(processor.tokenizer, processor.template_kwargs, stops, in_use=read is None)
        self._max_row_tokens = min((size for size in (limit, max_row_tokens) if size is not None), default=None)
        self._kept: dict[str, list[Example]] = {}
        self.samples: list[Sample] = []
        over, longest, no_prompt, total = 0, (0, ""), 0, len(report.samples)
        problems: list[str] = []
        useless, cut = dict[str, list[str]](), 0
        for start in range(0, total, SAMPLES_AT_ONCE):
            items = [(f"0:{sample.sample_id}", sample) for sample in report.samples[start : start + SAMPLES_AT_ONCE]]
            for (_, sample), group in zip(items, self._groups(items, problems), strict=True):
                if group is None:
                    continue
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
            if problems and processor.config.on_bad_row == "error":
                raise DataError(
                    f"{report.source}: {len(problems)} rows have problems (data.on_bad_row=skip leaves them out):\n"
                    + problem_list(problems)
                )
        for note, place in self._writer.notes.items():
            log.warning("%s: %s", place, note)
        if problems:
            self._left_out(f"{len(problems)} of {total} {what} have problems (the first: {problems[0]})", "")
        if over:
            self._left_out(
                f"{over} of {total} {what} are longer than {limit} tokens, all that the model takes (the longest, with "
                f"its prompt: {longest[0]}, {longest[1]})",
                "; take a model with a longer context (of one that is made fresh: sft.gpt.max_tokens), or shorter data",
            )
        if no_prompt:
            self._left_out(
                f"{no_prompt} of {total} prompts are longer than data.max_prompt_tokens",
                "; raise it, or cut them (data.overlong_prompt=truncate)",
            )
        within = "" if max_row_tokens is None else f" within train.max_row_tokens={max_row_tokens}"
        advice = "; raise it above prompt and completion together" if within else ""
        for reason, found in useless.items():
            self._left_out(f"{len(found)} of {total} {what} {reason}{within} (such as {found[0]})", advice)
        if cut:
            log.warning(
                "train.max_row_tokens=%d: %d of %d %s are longer, and are cut", max_row_tokens, cut, total, what
            )

    def _groups(self, items: Items, problems: list[str]) -> list[list[Example] | None]:
        """The completions of each; None of one with a problem, which is added to the others."""
        try:
            return [*self._encode(items)]
        except DataError as error:
            if len(items) == 1:
                problems.append(str(error))
                return [None]
        return [group for item in items for group in self._groups([item], problems)]

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
        rows: list[tuple[int, PromptContent, list[Piece], int, float]] = []
        for place, ((prompt_id, sample), prompt) in enumerate(zip(items, prompts, strict=True)):
            group = self.completions(prompt_id, sample)
            margin = group[0][1] - group[-1][1]
            labels = (1, -1) if len(group) == 2 else (int(group[0][1]),)
            for (turns, _), label in zip(group, labels, strict=True):
                if prompt is not None:
                    rows.append((place, turns, self._pieces(sample, prompt, turns), label, margin))
        encoded = iter(self._ids([pieces for _, _, pieces, _, _ in rows]))
        found: list[list[Example]] = [[] for _ in items]
        for place, turns, pieces, label, margin in rows:
            (_, sample), prompt = items[place], prompts[place]
            parts = [next(encoded) for _ in pieces]
            if not pieces[0].trained:  # a conversation's: the prompt is a part of it
                prompt, pieces, parts = self._processor.cut(parts[0]), pieces[1:], parts[1:]
            if prompt is None:
                continue
            learned = [piece.trained for piece, part in zip(pieces, parts, strict=True) for _ in part]
            ids = [token for part in parts for token in part]
            if self._read is not None:
                whole = self._read(sample, prompt, ids, turns if isinstance(turns, str) else turns[-1])
                prompt, ids, learned = [], [*whole], [True] * len(whole)
            tokens = np.array([*prompt, *ids], dtype=np.int32)
            mask = np.array([False] * len(prompt) + learned, dtype=np.bool_)
            found[place].append(Example(tokens, mask, label, margin))
        return found

    def _pieces(self, sample: Sample, prompt: Sequence[int], turns: PromptContent) -> list[Piece]:
        """What follows the prompt: a text, and the token that ends it. Or a whole conversation, the prompt included."""
        writer, processor, place = self._writer, self._processor, sample.sample_id
        asked, tools = processor.conversation(sample.prompt), processor.tools_of(sample)
        own = len(asked) == (1 if isinstance(sample.prompt, str) else len(sample.prompt))
        as_it_is, continues = processor.is_bare(sample), asked[-1]["role"] == "assistant"
        parts = within_turns([Message(role="assistant", content=turns)] if isinstance(turns, str) else turns)
        plain = len(parts) == 1 and all(said_in(message) == ["content"] for message in parts[0])
        if plain and (isinstance(turns, str) or len(parts[0]) > 1 or continues or as_it_is):
            said = [Piece(message["content"], message["role"] == "assistant") for message in parts[0]]
            said[-1] = Piece(writer.without_end(said[-1].text, "a completion", place), True)
            opening = thought_opening(str(processor.tokenizer.decode([*prompt[-OPENING_TOKENS:]])))
            if isinstance(turns, str) and processor.has_template and not (as_it_is or continues or opening):
                writer.note_lead(turns, place)
            if (first := continued(opening, said[0].text)) is not None:
                return joined([Piece(first, True), *said[1:], Piece(writer.end, True)])
            whole = Message(role="assistant", content="".join(text for text, _ in said))
            return self._in_open_thought(sample, opening, whole, own)
        if as_it_is or not processor.has_template:
            why = "the prompt carries it: give messages" if processor.has_template else processor.why_none()
            raise DataError(f"{place}: turns of a conversation need a chat template, but {why}")
        messages = cast(Sequence[Message], turns)
        if continues:  # the prompt's last words begin the turn
            asked, messages = asked[:-1], [Message(role=ENVIRONMENT, content=asked[-1]["content"]), *messages]
        return writer.pieces(asked, messages, tools, place, own)

    def _in_open_thought(self, sample: Sample, opening: str, message: Message, own: bool) -> list[Piece]:
        """The row of a completion that does not fit the thought in which its prompt ends, where the chat template
        closes it itself (Qwen3-Thinking).

        Raises:
            DataError: it does not.
        """
        processor, place, tools = self._processor, sample.sample_id, self._processor.tools_of(sample)
        if processor.has_template and not processor.is_bare(sample):
            pieces = self._writer.pieces(processor.conversation(sample.prompt), [message], tools, place, own)
            if pieces[0].text == processor.rendered(sample.prompt, place, tools):
                return pieces
        if closing_tag(opening) in opening:
            raise DataError(
                f"{place}: the prompt ends in {opening!r}, and the completion has a thought: remove it, or the "
                "data.chat_template_kwargs that close thoughts"
            )
        raise DataError(
            f"{place}: the prompt ends in {opening!r}, and the completion has no thought: begin it with one, ended by "
            f"{closing_tag(opening)}, or close it by data.chat_template_kwargs (enable_thinking: false), "
            "where the template knows that"
        )

    def _ids(self, rows: Sequence[Sequence[Piece]]) -> list[list[int]]:
        """The tokens of each piece of each row. A row's first begins a text where it is not trained (it is the prompt);
        others follow one."""
        tokenizer = self._processor.tokenizer
        items: list[tuple[str, str]] = []
        for pieces in rows:
            for number, (text, trained) in enumerate(pieces):
                before = "" if trained else self._writer.last_token(pieces[number - 1].text) if number else None
                items.append((text, "\n" if before == "" else before or ""))
        fronts = {before: token_ids(tokenizer, before) for before in {before for _, before in items}}
        texts = [before + text for text, before in items]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        found: list[list[int]] = []
        for (text, before), ids in zip(items, encoded, strict=True):
            front = fronts[before]
            found.append(ids[len(front) :] if ids[: len(front)] == front else following(tokenizer, text, before))
        return found
