"""Problems of offline data to token ids (`TokenizedSamples`), and token ids to rows (`rows_from_tokens`)."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from atomrl.common.chat_template import closing_tag, thought_opening, token_ids, tokenize_continuation
from atomrl.data.columns import PLACE, TEMPLATE_KWARGS, count_places
from atomrl.data.conversations import (
    ConversationWriter,
    Piece,
    content_fields,
    continued,
    is_trained,
    joined,
    within_turns,
)
from atomrl.data.files import DataError, error_list
from atomrl.data.given import CONVERSATION, TOKENS, written
from atomrl.data.messages import COMPLETIONS, PromptContent
from atomrl.data.packing import Example, Strategy, packed
from atomrl.data.problems import ENVIRONMENT, LoadReport, Scored
from atomrl.data.processor import DataProcessor
from atomrl.types import Image, Message, Problem

if TYPE_CHECKING:
    from atomrl.batches import RowBatch

log = logging.getLogger(__name__)


Items = Sequence[tuple[str, Problem]]
"""(prompt id, problem)"""
Read = Callable[[Problem, Sequence[int], Sequence[int], str | Message], Sequence[int]]
"""(problem, prompt ids, completion ids, completion as text or as the assistant's message) -> ids of the whole row: the
input format of a reward model with its own template."""
SAMPLES_AT_ONCE = 512
OPENING_TOKENS = 16
"""Last prompt tokens in which to look for an opening of the assistant's thoughts."""


def demonstration(prompt: Sequence[int], completion: Sequence[int], label: int = 0) -> Example:
    """Return an example with a trained completion after an untrained prompt.

    Example:
        >>> demonstration([5, 6], [7, 2]).learned.tolist()
        [False, False, True, True]
    """
    tokens = np.array([*prompt, *completion], dtype=np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(prompt), label)


def rows_from_tokens(
    groups: Sequence[Sequence[Example]], max_row_tokens: int | None = None, mismatched: bool = False
) -> RowBatch:
    """Pad examples to rows [B, T]. Completions of one prompt are a group, and a pair if one is chosen and one rejected.

    Args:
        groups: the completions of each prompt.
        max_row_tokens: cuts longer rows.
        mismatched: append each prompt with the completions of the next prompt, for KTO's KL estimate.

    Raises:
        ValueError: `mismatched` with fewer than two prompts.

    Example:
        >>> rows = rows_from_tokens([[demonstration([5], [6, 2], 1), demonstration([5], [7], -1)]])
        >>> rows.tokens.tolist(), rows.preference.labels.tolist(), rows.preference.pair_ids.tolist()
        ([[5, 6, 2], [5, 7, 0]], [1, -1], [0, 0])
    """
    import torch  # here, so that `atomrl data check` need not load it
    from torch.nn.utils.rnn import pad_sequence

    from atomrl.batches import PreferenceFields, RowBatch, RowImages

    examples = [(place, example, False) for place, group in enumerate(groups) for example in group]
    if mismatched:
        if len(groups) < 2:
            raise ValueError("train.rows_per_update must be at least 2, as completions of other prompts are needed")
        for (own, *_), others in zip(groups, [*groups[1:], groups[0]], strict=True):
            prompt = own.tokens[: own.prompt_length].tolist()
            for other in others:
                swapped = demonstration(prompt, other.tokens[other.prompt_length :].tolist())
                examples.append((len(examples), swapped._replace(images=own.images), True))
    rows = [torch.from_numpy(example.tokens[:max_row_tokens]).long() for _, example, _ in examples]
    learned = [torch.from_numpy(example.learned[:max_row_tokens]) for _, example, _ in examples]
    tokens, loss_mask = pad_sequence(rows, batch_first=True), pad_sequence(learned, batch_first=True)
    loss_mask[:, :1] = False  # nothing predicts the first token
    labels = torch.tensor([example.label for _, example, _ in examples])
    pairs = [{example.label for example in group} >= {1, -1} for group in groups]
    pair_ids = [group if not other and pairs[group] else -1 for group, _, other in examples]
    preference = PreferenceFields(
        labels=labels if labels.any() else None,
        pair_ids=torch.tensor(pair_ids) if any(pairs) else None,
        margins=torch.tensor([example.margin for _, example, _ in examples]) if any(pairs) else None,
        mismatched=torch.tensor([other for _, _, other in examples]) if mismatched else None,
    )
    return RowBatch(
        tokens=tokens,
        loss_mask=loss_mask,
        lengths=torch.tensor([len(row) for row in rows]),
        prompt_lengths=torch.tensor([example.prompt_length for _, example, _ in examples]),
        group_ids=torch.tensor([group for group, _, _ in examples]),
        rewards=torch.zeros(len(examples)),
        images=RowImages.of(example.images for _, example, _ in examples),
        truncated=torch.tensor([len(one.tokens) > len(row) for row, (_, one, _) in zip(rows, examples, strict=True)]),
        preference=preference,
    )


def untrainable(group: Sequence[Example], max_row_tokens: int | None) -> str | None:
    """Return why the completions of a prompt cannot be trained; None if they can.

    Example:
        >>> untrainable([demonstration([5, 6], [7])], 2)
        'have no token to train on'
        >>> untrainable([demonstration([5], [7, 8], 1), demonstration([5], [7, 9], -1)], 2)
        'are the same tokens, chosen and rejected'
    """
    if not all(example.learned[1:max_row_tokens].any() for example in group):
        return "have no token to train on"
    if max_row_tokens is not None and any(one.images and len(one.tokens) > max_row_tokens for one in group):
        return "have pictures and would be cut"
    rows = [example.tokens[:max_row_tokens] for example in group]
    if len(rows) == 2 and np.array_equal(rows[0], rows[1]):
        return "are the same tokens, chosen and rejected"
    return None


def _of_tokens(ids: Sequence[int], learned: Sequence[bool]) -> Example:
    return Example(np.array(ids, dtype=np.int32), np.array(learned, dtype=np.bool_))


def _messages(turns: PromptContent) -> Sequence[Message]:
    return [Message(role="assistant", content=turns)] if isinstance(turns, str) else turns


def _digest(block: Sequence[Example]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for example in block:
        digest.update(example.tokens.tobytes() + example.learned.tobytes())
    return digest.hexdigest()


@dataclass
class _LeftOut:
    """Rows that cannot be trained on, by reason, so that one message names all of a kind."""

    errors: list[str] = field(default_factory=list)
    """Messages about wrong rows."""
    over: int = 0
    """Number of rows that are longer than the limit."""
    prompts: int = 0
    """Number of rows whose prompt is too long."""
    untrainable: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> ids of the rows."""
    cut: int = 0
    """Number of rows that are trained on, but truncated."""
    longest: tuple[int, str] = (0, "")
    """Length and id of the longest row."""


class TokenizedSamples:
    """Demonstrations or preferences as training rows. Those of a file are tokenized once. A generator draws new
    completions at every epoch, which are tokenized when a step needs them.

    Attributes:
        problems: the demonstrations or preferences that can be trained on.
        units: what steps take: the problems, or with `packing` blocks of them.

    Args:
        report: the loaded ones.
        processor: encodes the prompts.
        what: their name in messages, such as "demonstrations".
        seed: of a generator's completions, with the prompt's id.
        limit: those with more tokens, in the first epoch, are dropped with a warning.
        max_row_tokens: cuts longer rows. Those that are then `untrainable` are dropped with a warning, too.
        read: input format of a reward model with its own template; all of its tokens are trained.
        stops: tokens that end the model's completions, besides those of the tokenizer and the chat template.
        train_on: which tokens of a row are trained (`sft.train_on`).
        packing: puts demonstrations together to blocks of `max_row_tokens` (`sft.packing`).

    Raises:
        DataError: no problem is left, or the chat template does not show a part of a row (`data.on_bad_row` may skip
            such rows).
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
        train_on: Literal["completions", "conversations", "all"] = "completions",
        packing: Strategy | None = None,
    ) -> None:
        self._train_on = train_on
        self._draw, self._processor, self._seed, self._read = report.draw, processor, seed, read
        if processor.tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so the model cannot learn to stop: set eos_token "
                "in its tokenizer_config.json, or as eos_token_id in the model's config.json (or set another by "
                "model.tokenizer)"
            )
        self._stops = tuple(stops)
        self._writers: dict[str, ConversationWriter] = {}
        """One for each set of variables of the chat template."""
        self._writer = self._writer_of(processor.template_kwargs)
        self._max_row_tokens = min((size for size in (limit, max_row_tokens) if size is not None), default=None)
        self._encoded: dict[str, list[Example]] = {}
        self.problems: list[Problem] = []
        cut_at = None if packing in ("bfd_split", "wrapped") else max_row_tokens
        left_out = self._tokenize(report, limit, max_row_tokens, cut_at)
        self._report(left_out, len(report.problems), what, limit, max_row_tokens)
        self.units = self.problems if packing is None else self._pack(packing)

    def _tokenize(
        self, report: LoadReport, limit: int | None, max_row_tokens: int | None, cut_at: int | None
    ) -> _LeftOut:
        """Tokenize the rows once, in chunks, keep those that can be trained on, and return what is left out.

        Raises:
            DataError: rows are wrong, and `data.on_bad_row` is `error`.
        """
        left_out = _LeftOut()
        for start in range(0, len(report.problems), SAMPLES_AT_ONCE):
            chunk = report.problems[start : start + SAMPLES_AT_ONCE]
            items = [(f"0:{problem.problem_id}", problem) for problem in chunk]
            for (_, problem), group in zip(items, self._groups(items, left_out.errors), strict=True):
                if group is None:
                    continue
                size = max((len(example.tokens) for example in group), default=0)
                left_out.longest = max(left_out.longest, (size, problem.problem_id))
                if not group:
                    left_out.prompts += 1
                elif limit is not None and min(size, max_row_tokens or size) > limit:
                    left_out.over += 1
                elif reason := untrainable(group, cut_at):
                    left_out.untrainable.setdefault(reason, []).append(problem.problem_id)
                else:
                    left_out.cut += cut_at is not None and size > cut_at
                    self.problems.append(problem)
                    # A generator draws new completions in every epoch, so only those of a file are kept.
                    if self._draw is None:
                        self._encoded[problem.problem_id] = group
            if left_out.errors and self._processor.config.on_bad_row == "error":
                raise DataError(
                    f"{report.source}: {len(left_out.errors)} rows have problems (data.on_bad_row=skip drops them):\n"
                    + error_list(left_out.errors)
                )
        return left_out

    def _report(self, left_out: _LeftOut, total: int, what: str, limit: int | None, max_row_tokens: int | None) -> None:
        """Warn about rows that were left out or cut; `_warn_left_out` raises if nothing is left."""
        for note, place in {note: at for one in self._writers.values() for note, at in one.notes.items()}.items():
            log.warning("%s: %s", place, note)
        if errors := left_out.errors:
            self._warn_left_out(f"{len(errors)} of {total} {what} have problems (the first: {errors[0]})", "")
        if left_out.over:
            longest, place = left_out.longest
            self._warn_left_out(
                f"{left_out.over} of {total} {what} are longer than {limit} tokens, the model's context (the longest, "
                f"with its prompt: {longest}, {place})",
                "; use a model with a longer context (fresh models: sft.gpt.max_tokens), or shorter data",
            )
        if left_out.prompts:
            self._warn_left_out(
                f"{left_out.prompts} of {total} prompts are longer than data.max_prompt_tokens",
                "; raise it, or truncate them (data.overlong_prompt=truncate)",
            )
        within = "" if max_row_tokens is None else f" within train.max_row_tokens={max_row_tokens}"
        advice = "; raise it above the length of prompt plus completion" if within else ""
        for reason, places in left_out.untrainable.items():
            self._warn_left_out(f"{len(places)} of {total} {what} {reason}{within} (such as {places[0]})", advice)
        if left_out.cut:
            log.warning(
                "train.max_row_tokens=%d: %d of %d %s are longer and are truncated",
                max_row_tokens, left_out.cut, total, what,
            )  # fmt: skip

    def _pack(self, strategy: Strategy) -> list[Problem]:
        """Replace the demonstrations by blocks of them; returns the blocks."""
        if self._draw is not None or self._max_row_tokens is None:
            raise DataError("sft.packing: needs a file, and train.max_row_tokens, the size of a block")
        if place := next((one.problem_id for one in self.problems if one.images), None):
            raise DataError(f"{place}: sft.packing: rows with pictures are not packed")
        blocks = packed([self._encoded[one.problem_id][0] for one in self.problems], self._max_row_tokens, strategy)
        self._encoded = {f"block {number}": block for number, block in enumerate(blocks)}
        return [
            Problem(problem_id=name, prompt="", ground_truth=_digest(block)) for name, block in self._encoded.items()
        ]

    def _groups(self, items: Items, errors: list[str]) -> list[list[Example] | None]:
        """Encode the completions of each problem; None for an invalid one, whose error is added to `errors`."""
        try:
            return [*self._encode(items)]
        except DataError as error:
            if len(items) == 1:
                errors.append(str(error))
                return [None]
        return [group for item in items for group in self._groups([item], errors)]

    def _warn_left_out(self, message: str, advice: str) -> None:
        """Warn of problems that are dropped; an error if none is left."""
        if not self.problems:
            raise DataError(message + advice)
        log.warning("%s and are dropped", message)

    def rows(self, items: Items, mismatched: bool = False) -> RowBatch:
        """Return the rows of some problems; for `mismatched` see `rows_from_tokens`."""
        if self._draw is None:
            groups = [self._encoded[problem.problem_id] for _, problem in items]
        else:
            groups = [group for group in self._encode(items) if not untrainable(group, self._max_row_tokens)]
            if not groups:
                raise DataError(f"none of {len(items)} sampled problems has rows to train on")
        return rows_from_tokens(groups, self._max_row_tokens, mismatched)

    def batches(self, size: int) -> Iterator[RowBatch]:
        """Yield the rows of all problems, `size` at a time; the same ones every time, for evaluation."""
        for start in range(0, len(self.units), size):
            yield self.rows([(f"eval:{s.problem_id}", s) for s in self.units[start : start + size]])

    def completions(self, prompt_id: str, problem: Problem) -> Scored:
        """Return the completions of the problem's row, or draw them from its generator."""
        if self._draw is None:
            return cast(Scored, problem.columns[COMPLETIONS])
        row = {**problem.columns, "ground_truth": problem.ground_truth}
        drawn = self._draw(random.Random(f"{self._seed}/{prompt_id}"), row)
        if isinstance(drawn, tuple):
            return ((drawn[0], 0.0), (drawn[1], 0.0))
        return ((drawn if isinstance(drawn, str) else written(drawn), 0.0),)

    def _encode(self, items: Items) -> list[list[Example]]:
        """Encode the completions of each problem; none for a prompt over the limit."""
        if any(TOKENS in problem.columns for _, problem in items):
            others = iter(self._encode([item for item in items if TOKENS not in item[1].columns]))
            return [
                [_of_tokens(*problem.columns[TOKENS])] if TOKENS in problem.columns else next(others)
                for _, problem in items
            ]
        groups = [self.completions(prompt_id, problem) for prompt_id, problem in items]
        # Prompts are encoded by themselves only where completions continue them.
        alone = [
            place
            for place, ((_, problem), group) in enumerate(zip(items, groups, strict=True))
            if any(self._continues_prompt(problem, turns) for turns, _ in group)
        ]
        prompts: dict[int, Sequence[int] | None]
        prompts = dict(zip(alone, self._processor.within_limit([items[place][1] for place in alone]), strict=True))
        rows: list[tuple[int, PromptContent, list[Piece], int, float]] = []
        for place, ((_, problem), group) in enumerate(zip(items, groups, strict=True)):
            margin = group[0][1] - group[-1][1]
            labels = (1, -1) if len(group) == 2 else (int(group[0][1]),)
            prompt = prompts.setdefault(place, ())
            for (turns, _), label in zip(group, labels, strict=True):
                if prompt is not None:
                    rows.append((place, turns, self._pieces(problem, prompt, turns), label, margin))
        encoded = iter(self._ids([(items[place][1], pieces) for place, _, pieces, _, _ in rows]))
        examples: list[list[Example]] = [[] for _ in items]
        for place, turns, pieces, label, margin in rows:
            (_, problem), prompt = items[place], prompts[place]
            parts = [next(encoded) for _ in pieces]
            if not pieces[0].trained:  # a conversation: its first piece is the prompt
                prompt, pieces, parts = self._processor.cut(parts[0], problem), pieces[1:], parts[1:]
            if prompt is None:
                continue
            trained = [piece.trained for piece, part in zip(pieces, parts, strict=True) for _ in part]
            ids = [token for part in parts for token in part]
            if self._read is not None:
                row = self._read(problem, prompt, ids, turns if isinstance(turns, str) else turns[-1])
                prompt, ids, trained = [], [*row], [True] * len(row)
            tokens = np.array([*prompt, *ids], dtype=np.int32)
            whole = self._train_on == "all" or (self._train_on == "conversations" and problem.columns.get(CONVERSATION))
            trained = trained if self._train_on == "completions" else [True] * len(trained)
            mask = np.array([whole] * len(prompt) + trained, dtype=np.bool_)
            examples[place].append(Example(tokens, mask, label, margin, problem.images))
        return examples

    def _writer_of(self, kwargs: Mapping[str, Any]) -> ConversationWriter:
        """Return the writer for variables of the chat template."""
        name = json.dumps(kwargs, sort_keys=True, default=str)
        if name not in self._writers:
            tokenizer, in_use = self._processor.tokenizer, self._read is None
            whole = self._processor.config.row_end == "template"
            self._writers[name] = ConversationWriter(tokenizer, kwargs, self._stops, in_use=in_use, whole=whole)
        return self._writers[name]

    def _pieces(self, problem: Problem, prompt: Sequence[int], turns: PromptContent) -> list[Piece]:
        """Return the pieces behind the prompt: a text and the end-of-turn token. Or a whole conversation with its
        prompt, where the chat template has to render both together."""
        processor, place = self._processor, problem.problem_id
        writer = self._writer_of(processor.kwargs_of(problem))
        if self._read is not None and problem.columns.get(TEMPLATE_KWARGS):
            raise DataError(f"{place}: column {TEMPLATE_KWARGS!r}: a reward model reads conversations without them")
        if problem.prompt == "":  # a row of text, all of which is trained
            end = processor.tokenizer.eos_token
            return [Piece(str(turns).removesuffix(end), True), Piece(end, True)]
        question, tools = processor.conversation(problem.prompt), processor.tools_of(problem)
        own = len(question) == (1 if isinstance(problem.prompt, str) else len(problem.prompt))
        bare, continues = processor.is_bare(problem), question[-1]["role"] == "assistant"
        if self._continues_prompt(problem, turns):
            messages = _messages(turns)
            if not all(map(is_trained, messages)):
                raise DataError(f"{place}: weight: 0 needs messages that the chat template renders; remove the key")
            texts = [Piece(message["content"], message["role"] == "assistant") for message in messages]
            texts[-1] = Piece(writer.without_end(texts[-1].text, "a completion", place), True)
            opening = thought_opening(str(processor.tokenizer.decode([*prompt[-OPENING_TOKENS:]])))
            if isinstance(turns, str) and processor.has_template and not (bare or continues or opening):
                writer.note_lead(turns, place)
            if (first := continued(opening, texts[0].text)) is not None:
                of_text = isinstance(problem.prompt, str) and processor.config.chat_template == "messages_only"
                end = processor.tokenizer.eos_token if of_text else writer.end
                return joined([Piece(first, True), *texts[1:], Piece(end, True)])
            message = Message(role="assistant", content="".join(text for text, _ in texts))
            return self._in_open_thought(problem, opening, message, own)
        if bare or not processor.has_template:
            why = "the prompt already contains it: give messages" if processor.has_template else processor.why_none()
            raise DataError(f"{place}: a conversation needs a chat template, but {why}")
        messages = _messages(turns)
        if continues:  # the prompt's last message begins the turn and is not trained
            question, messages = question[:-1], [Message(role=ENVIRONMENT, content=question[-1]["content"]), *messages]
        return writer.pieces(question, messages, tools, place, own)

    def _continues_prompt(self, problem: Problem, turns: PromptContent) -> bool:
        """Return True for plain text, which continues the rendered prompt.

        The chat template writes anything else: turns, calls, thoughts.
        """
        parts = within_turns(_messages(turns))
        if len(parts) > 1 or any(content_fields(message) != ["content"] for message in parts[0]):
            return False
        continues = not isinstance(problem.prompt, str) and problem.prompt[-1]["role"] == "assistant"
        return isinstance(turns, str) or len(parts[0]) > 1 or continues or self._processor.is_bare(problem)

    def _in_open_thought(self, problem: Problem, opening: str, message: Message, own: bool) -> list[Piece]:
        """Return the row of a completion that does not continue the thought that the prompt opens, where the chat
        template closes it itself (Qwen3-Thinking).

        Raises:
            DataError: the template does not.
        """
        processor, place, tools = self._processor, problem.problem_id, self._processor.tools_of(problem)
        if processor.has_template and not processor.is_bare(problem):
            kwargs = processor.kwargs_of(problem)
            pieces = self._writer_of(kwargs).pieces(
                processor.conversation(problem.prompt), [message], tools, place, own
            )
            if pieces[0].text == processor.rendered(problem.prompt, place, tools, kwargs):
                return pieces
        if closing_tag(opening) in opening:
            raise DataError(
                f"{place}: the prompt ends in {opening!r}, but the completion has a thought: remove it, or the "
                "data.chat_template_kwargs that close thoughts"
            )
        raise DataError(
            f"{place}: the prompt ends in {opening!r}, but the completion has no thought: begin it with one that ends "
            f"with {closing_tag(opening)}, or close it with data.chat_template_kwargs (enable_thinking: false), "
            "if the template supports that"
        )

    def _ids(self, rows: Sequence[tuple[Problem, Sequence[Piece]]]) -> list[list[int]]:
        """Encode each piece of each row. The first piece begins a text if it is the prompt (not trained) or the row is
        one of text alone; all others follow a text."""
        processor, tokenizer = self._processor, self._processor.tokenizer
        items: list[tuple[str, str]] = []
        shown: list[tuple[Sequence[Image], str]] = []
        """Pictures of each piece, and the name of its row."""
        for problem, unmarked in rows:
            is_text = problem.prompt == ""
            behind = count_places(problem.prompt) if unmarked[0].trained else 0  # pictures of the prompt are not shown
            pictures: Sequence[Image] = problem.images[behind:]
            pieces = [
                piece if piece.trained else Piece(processor.marked(piece.text, problem), False) for piece in unmarked
            ]
            for number, (text, trained) in enumerate(pieces):
                count = 0 if trained else unmarked[number].text.count(PLACE)
                shown.append((pictures[:count], problem.problem_id))
                pictures = pictures[count:]
                if not number and (is_text or not trained):
                    before = ""
                elif trained:
                    before = "\n"
                else:
                    before = self._writer.last_token(pieces[number - 1].text) or "\n"
                items.append((text, before))
        fronts = {before: token_ids(tokenizer, before) for before in {before for _, before in items}}
        joined = [before + text for text, before in items]
        # masks would take as long as the ids
        options: dict[str, Any] = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        encoded = tokenizer(joined, add_special_tokens=False, **options)["input_ids"] if joined else []
        ids_by_piece: list[list[int]] = []
        for (text, before), ids, (pictures, place) in zip(items, encoded, shown, strict=True):
            front = fronts[before]
            own = ids[len(front) :] if ids[: len(front)] == front else tokenize_continuation(tokenizer, text, before)
            ids_by_piece.append(processor.expanded(own, pictures, place))
        return ids_by_piece
