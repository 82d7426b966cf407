"""Render a conversation with the chat template and mask it: the assistant's messages are trained, the rest is not.

All messages are rendered in one call, so that tool calls, thoughts and tool schemas look as in generation. A field of a
message is located by rendering again with a marker as its value: where the two texts differ, there is the field. If the
marker does not appear, the template leaves the field out.

This takes several renderings per message, so it is done once for all conversations of the same shape (roles and
fields), with placeholders for the words (`_Form`). The form is then filled with the words of each conversation. If the
result differs from its rendered text, the conversation is analysed by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, takewhile, zip_longest
from typing import Any, NamedTuple

from atomrl.common.chat_template import (
    THOUGHT_TAG,
    as_object,
    closing_tag,
    end_of_turn,
    render,
    thought_opening,
    turn_marks,
)
from atomrl.common.errors import reraise_as
from atomrl.data.columns import UNTRAINED
from atomrl.data.files import DataError
from atomrl.data.problems import ENVIRONMENT

Messages = Sequence[Mapping[str, Any]]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message."""
WORDS = ("content", *THOUGHTS, "tool_calls", "function_call", "refusal")
"""Fields with content: a row is refused where the template leaves one of them out."""
LINKS = {"role", "content", "tool_call_id", UNTRAINED}
"""Fields that the template need not show."""
_MARK, _FORM = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which no text has
_FORMS = 1000
"""Most shapes of conversations that are cached."""
_CALL_ID = re.compile(r"(?<='id': )'[^']*'")
_SLOT = re.compile(rf"{_FORM}([^{_FORM}]+){_FORM}")


class Piece(NamedTuple):
    """A part of a row's text, trained or not."""

    text: str
    trained: bool


class _Form:
    """The template's text around the contents of conversations of one shape (roles and fields).

    Args:
        whole: the text of a conversation with markers in place of its contents.
        pieces: the pieces of its row.
        hidden: index of a message that the template shows only in the generation prompt.
    """

    def __init__(self, whole: str, pieces: Sequence[Piece], hidden: int | None) -> None:
        self._texts, self._pieces, self._hidden = _SLOT.split(whole)[::2], pieces, hidden
        self._slots = _SLOT.findall(whole)

    def fill(self, conversation: _Conversation) -> list[Piece] | None:
        """Fill in the contents of another conversation; None if the template writes that differently."""
        if self._hidden is not None:
            conversation.hide(self._hidden)
        whole, at, words = conversation.whole, len(self._texts[0]), list[str]()
        if not whole.startswith(self._texts[0]):
            return None
        for name, text in zip(self._slots, self._texts[1:], strict=True):
            content = conversation.words[name]
            # Templates strip some fields, and write the arguments of calls as JSON.
            in_json = (json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
            for word in chain((content, content.strip(), content.lstrip("\n"), content.rstrip()), in_json):
                if whole.startswith(word, at) and whole.startswith(text, at + len(word)):
                    break
            else:
                return None
            words.append(word)
            at += len(word) + len(text)
        if at != len(whole):
            return None
        remaining = iter(words)
        return [Piece(_SLOT.sub(lambda _: next(remaining), piece.text), piece.trained) for piece in self._pieces]


class ConversationWriter:
    """Renders conversations by a tokenizer's chat template, and marks what is trained.

    Args:
        kwargs: further variables of the template (`data.chat_template_kwargs`).
        stops: other tokens that end the model's completions; some templates write nothing behind the assistant's words
            but the beginning of the next turn (GLM).
        in_use: accept a system prompt that the template shows in generation alone.
        whole: keep what the template writes after the last turn (`data.row_end: template`).

    Attributes:
        notes: warnings, each with the first row that it is about.
    """

    def __init__(
        self,
        tokenizer: Any,
        kwargs: Mapping[str, Any] | None = None,
        stops: Iterable[int] = (),
        in_use: bool = True,
        whole: bool = False,
    ) -> None:
        self.tokenizer, self.kwargs, self.notes, self.in_use = tokenizer, kwargs, dict[str, str](), in_use
        self.whole = whole
        end = end_of_turn(tokenizer, kwargs)
        ids = {end, tokenizer.eos_token_id, *stops} - {None}
        self.end = "" if end is None else str(tokenizer.convert_ids_to_tokens(end))
        self.stops = {str(tokenizer.convert_ids_to_tokens(token)) for token in ids}
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | self.stops
        self._added = tuple(added - {""})
        names = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._parts = re.compile("|".join([*names, "."]), re.DOTALL)
        self._behind_user = turn_marks(tokenizer, kwargs).header.lstrip()
        self._forms: dict[str, _Form | None] = {}

    def without_end(self, text: str, what: str, place: str) -> str:
        """Remove the token that ends the turn from a text of the assistant's, as it is added anyway.

        Args:
            what: the name of the text in the note.
        """
        ends = {self.end, self.tokenizer.eos_token} - {None, ""}
        while end := next((end for end in ends if text.rstrip().endswith(end)), None):
            text = text.rstrip().removesuffix(end)
            if not any("appended anyway" in note for note in self.notes):
                self.notes[f"{what} ends in {end!r}, which is appended anyway; it is kept once"] = place
        return text

    @cached_property
    def lead(self) -> str:
        """Text between the generation prompt and the content of the assistant's message, such as an empty thought."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": _FORM}
        writer = ConversationWriter(self.tokenizer, self.kwargs)  # another one, as its notes are about no row
        try:
            return writer.pieces([question], [answer])[-1].text.partition(_FORM)[0].strip()
        except DataError:
            return ""

    def note_lead(self, completion: str, place: str) -> None:
        """Add a note if a completion that is text does not begin with `lead`."""
        if self.lead and not completion.lstrip().startswith(self._parts.findall(self.lead)[0]):
            self.notes.setdefault(
                f"the chat template writes {self.lead!r} before the assistant's text; completions given as text "
                'are trained without it. Messages, {"role": "assistant", "content": ...}, include it',
                place,
            )

    def pieces(
        self, prompt: Messages, turns: Messages, tools: Messages = (), place: str = "", own: bool = True
    ) -> list[Piece]:
        """Return the row of a conversation: its text up to the token that ends the assistant's last turn, or `whole`.

        Args:
            prompt: the first messages, which are not trained.
            turns: the others, from the assistant's first to its last.
            tools: JSON schemas.
            place: name of the row in errors.
            own: the first message is the row's, not the config's system prompt.

        Raises:
            DataError: the template refuses it, or leaves out a part of it.

        Example:
            >>> from atomrl.models.tokenizer import make_tokenizer
            >>> question, answer = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
            >>> ConversationWriter(make_tokenizer()).pieces([question], [answer])
            [Piece(text='<|user|>2+2<|assistant|>', trained=False), Piece(text='4<|end|>', trained=True)]
        """
        conversation = _Conversation(self, prompt, turns, tools, place, own)
        form = self._form(conversation)
        return (form and form.fill(conversation)) or conversation.pieces()

    def _form(self, conversation: _Conversation) -> _Form | None:
        """Return the cached form of conversations of this shape; None if each has to be analysed by itself."""
        if conversation.merged or any(THOUGHT_TAG.search(text) for text in conversation.words.values()):
            return None  # templates parse words with such tags
        fields = [
            [(key, message[key]) if key in (*WORDS, "role") else key for key in message]
            for message in conversation.slotted
        ]
        shape = _CALL_ID.sub("", repr((conversation.first, conversation.tools, fields)))
        if shape not in self._forms and len(self._forms) < _FORMS:
            self._forms[shape] = conversation.form()
        return self._forms.get(shape)

    def last_token(self, text: str) -> str:
        """Return the added token at the end of a text, or "". The next text may be tokenized differently after it."""
        if not text.endswith(self._added):  # there may be thousands
            return ""
        return max((token for token in self._added if text.endswith(token)), key=len)

    def common(self, first: str, second: str) -> int:
        """Return the length in characters of the common prefix of two texts; it does not end within an added token."""
        pairs = zip(self._parts.finditer(first), self._parts.finditer(second), strict=False)
        return sum(len(part[0]) for part, _ in takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))

    def closing(self, tail: str, alone: Callable[[], str]) -> tuple[str, bool]:
        """Find the text that closes an assistant turn.

        Args:
            tail: the text behind its words.
            alone: returns that text if the conversation ended there; called only where that matters.

        Returns:
            The beginning of `tail`, and True where it ends in a token that ends a completion.
        """
        first = self._parts.match(tail)
        if first and first[0] in self.stops:
            return first[0], True
        closing, here, there = "", self._parts.finditer(tail), self._parts.finditer(alone())
        for part, other in ((a and a[0], b and b[0]) for a, b in zip_longest(here, there)):
            if part in self.stops:
                return closing + part, True
            if part is None or part != other:
                # an end for turns within a conversation alone (gpt-oss), which the user's have too
                inner = part and {part, other} <= {*self._added} and self._behind_user.startswith(part)
                return closing + (part if part and inner else ""), False
            closing += part
        return closing, False


def continued(opening: str, completion: str) -> str | None:
    """Return the text behind a prompt that ends in `opening` (`chat_template.thought_opening`): the completion without
    an opening of its own. None where they contradict each other: a thought after a closed one, or no thought in an
    open one.

    Example:
        >>> continued("<think>\\n", "<think>\\nas 2+2=4\\n</think>\\n\\n4")
        'as 2+2=4\\n</think>\\n\\n4'
        >>> continued("", "4"), continued("<think>\\n", "4")
        ('4', None)
    """
    if not opening:
        return completion
    words, close = completion.lstrip(), closing_tag(opening)
    tag = THOUGHT_TAG.split(opening)[1]
    if close in opening:
        empty = re.match(rf"{re.escape(tag)}\s*{re.escape(close)}\s*", words)
        rest = words[empty.end() :] if empty else completion
        return None if close in rest else rest
    if words.startswith(tag):
        return words.removeprefix(opening) if words.startswith(opening) else words.removeprefix(tag)
    return completion if close in completion else None


class _Conversation:
    """A conversation that is rendered and split into pieces; see `ConversationWriter.pieces`."""

    def __init__(
        self, writer: ConversationWriter, prompt: Messages, turns: Messages, tools: Messages, place: str, own: bool
    ) -> None:
        self.writer, self.tools, self.place, self.own = writer, tools, place, own
        self.messages = [dict(message) for message in prompt]
        self.first, self.merged = len(prompt), dict[int, list[Piece]]()
        for part in within_turns(turns):
            message = {**part[-1]}
            if len(part) > 1:
                pieces = [Piece(each["content"], each["role"] == "assistant" and is_trained(each)) for each in part]
                self.merged[len(self.messages)], message["content"] = pieces, "".join(text for text, _ in pieces)
            if message["role"] == "assistant":
                name = f"the content of message {len(self.messages) + own}"
                message["content"] = writer.without_end(message["content"], name, place)
            self.messages.append(message)
        self.hidden: int | None = None
        self.words: dict[str, str] = {}
        """Slot of the form -> content."""
        self.slotted = [
            message | {key: slotted(message[key], f"{number} {key}", self.words) for key in content_fields(message)}
            for number, message in enumerate(self.messages)
        ]
        self.whole = self.render(self.messages)

    def pieces(self) -> list[Piece]:
        """Split the conversation into pieces, after checking that the template shows all of it."""
        self.check()
        pieces, cursor = list[Piece](), 0
        own = [n for n in range(self.first, len(self.messages)) if self.messages[n]["role"] == "assistant"]
        for number in own:
            begin, end, closing = self.span(number)
            if begin is None:  # its thought is shown in use alone: the prompt opens one
                prompt, text = self.in_use(number)
                return joined([*pieces, Piece(prompt[cursor:], False), Piece(text, is_trained(self.messages[number]))])
            if not cursor <= begin < end:
                raise DataError(f"{self.place}: the chat template does not keep the order of the messages")
            pieces += [Piece(self.whole[cursor:begin], False), *self.parts(number, begin, end)]
            cursor = end
            if not closing and number != own[-1] and not self.writer.last_token(self.whole[begin:end]):
                self.note(
                    "the chat template writes no end token after assistant turns within a conversation, so the model "
                    "learns to stop only at the last turn of a row"
                )
        rest = self.whole[cursor:] if self.writer.whole else "" if closing else self.writer.end
        return joined([*pieces, Piece(rest, is_trained(self.messages[own[-1]]))])

    def form(self) -> _Form | None:
        """Return the form of conversations of this shape; None if the template refuses the markers or changes them."""
        try:
            template = _Conversation(
                self.writer,
                self.slotted[: self.first],
                self.slotted[self.first :],
                self.tools,
                self.place,
                self.own,
            )
            pieces = template.pieces()
        except DataError:
            return None
        text = "".join(piece.text for piece in pieces)
        same = template.whole.startswith((text, text.removesuffix(self.writer.end)))
        return _Form(template.whole, pieces, template.hidden) if same else None

    def render(self, messages: Messages, add_generation_prompt: bool = False, tools: bool = True) -> str:
        with reraise_as(DataError, f"{self.place}: the chat template raised an error for the conversation", Exception):
            return render(
                self.writer.tokenizer, messages, tools=self.tools if tools else (), kwargs=self.writer.kwargs,
                add_generation_prompt=add_generation_prompt,
            )  # fmt: skip

    def written(self, messages: Messages) -> str:
        """Return the whole text; with a `hidden` message, the last generation prompt and the rest."""
        if self.hidden is None:
            return self.render(messages)
        others = [*messages[: self.hidden], *messages[self.hidden + 1 :]]
        front, text = self.render(others[:-1], True), self.render(others)
        if not text.startswith(front):
            return text
        return self.render(messages[:-1], True) + text.removeprefix(front)

    def named(self, number: int) -> str:
        """Return the name of a message in errors, by its number in the row."""
        return f"{self.place}: message {number + self.own}"

    def note(self, text: str) -> None:
        self.writer.notes.setdefault(text, self.place)

    # ---- Check that the template shows everything ----

    def check(self) -> None:
        """Check that the template shows the tools, and all messages that are not trained.

        A thought in the prompt need not be shown: the model does not see it in generation either.
        """
        if self.tools and self.render(self.messages, tools=False) == self.whole:
            raise DataError(
                f"{self.place}: field 'tools': the chat template does not show tools; use a tokenizer whose template "
                "does, or remove the column"
            )
        others = [
            (number, field)
            for number, message in enumerate(self.messages)
            if number < self.first or message["role"] != "assistant"
            for field in content_fields(message)
            if field not in THOUGHTS
        ]
        changed = list(self.messages)
        for number, field in others:
            changed[number] = marked(changed[number], field, f"{number}")
        text = self.written(changed)
        for number, field in others:
            if not shown(changed[number], field, f"{number}", text):
                self.show(number, field)
        for number, message in enumerate(self.messages):
            linked = LINKS | ({"name"} if message["role"] in ("tool", "function") else set())
            for key in message.keys() - linked - {*WORDS}:
                note = f"messages have the key {key!r}, which the chat template ignores"
                less = {name: value for name, value in message.items() if name != key}
                if note not in self.writer.notes and self.written(self.replaced(number, less)) == self.whole:
                    self.note(note)

    def show(self, number: int, field: str) -> None:
        """Render a field as in the generation prompt: Mistral writes the system prompt only into the last message, if
        that is the user's.

        Raises:
            DataError: the template does not show it there either.
        """
        if self.writer.in_use and self.messages[number]["role"] == "system":
            self.hide(number)
        self.altered(number, field)
        if sum(message["role"] == "assistant" for message in self.messages[self.first :]) > 1:
            self.note(
                "the chat template shows the system prompt only before the last answer, so earlier answers are trained "
                "without it; make each turn its own row"
            )

    def hide(self, number: int) -> None:
        """Render the text with a message that is shown only in the generation prompt."""
        self.hidden = number
        self.whole = self.written(self.messages)

    def altered(self, number: int, field: str) -> str:
        """Render the text with other words in a field.

        Raises:
            DataError: the words are not in the text.
        """
        message = marked(self.messages[number], field)
        text = self.written(self.replaced(number, message))
        if not shown(message, field, "", text):
            raise DataError(
                f"{self.named(number)}: the chat template does not show {field!r}; {self.advice(number, field)}"
            )
        return text

    def replaced(self, number: int, message: Mapping[str, Any]) -> Messages:
        return [*self.messages[:number], message, *self.messages[number + 1 :]]

    def advice(self, number: int, field: str) -> str:
        message, source = self.messages[number], str(self.writer.tokenizer.chat_template)
        if field in THOUGHTS:
            readable = [name for name in THOUGHTS if re.search(rf"""(?:\.|\[['"]|get\(['"]){name}\b""", source)]
            if field not in readable:
                if readable:
                    return f"the template reads thoughts from {readable[0]!r}: rename the field"
                return "write it into the content, as <think>...</think>, or use a tokenizer whose template shows it"
        if field in THOUGHTS or field == "thought":
            if number < len(self.messages) - 1:
                return "it shows only the thought of the last turn: make each assistant turn its own row"
            return "use a tokenizer whose template shows it, or remove it"
        if field == "content" and message.get("tool_calls"):
            return "it shows only a message's tool calls; remove the text, or use a tokenizer whose template shows both"
        return "use a tokenizer whose template does, or remove it"

    # ---- Locate the trained text ----

    def span(self, number: int) -> tuple[int | None, int, bool]:
        """Return the start of the assistant's message (after the generation prompt), its end (after the end-of-turn
        token), and True if that token ends a completion. If the start is None, see `in_use`."""
        message = self.messages[number]
        fields, places = content_fields(message), list[tuple[int, str, dict[str, Any]]]()
        if not fields:
            raise DataError(f"{self.named(number)} is empty")
        for field in fields:
            try:
                text = self.altered(number, field)
            except DataError:
                if field in THOUGHTS and any(message[field] == message[other] for other in fields if other != field):
                    continue  # the same words in two fields, shown once
                if field in THOUGHTS and self.opens(number):
                    return None, 0, True
                raise
            places.append((common_prefix(self.whole, text), text.rpartition(_MARK)[2], marked(message, field)))
        parts = THOUGHT_TAG.split(message["content"])
        for place in [
            n for n, part in enumerate(parts) if part.strip() and len(parts) > 1 and not THOUGHT_TAG.fullmatch(part)
        ]:
            content = "".join([*parts[:place], _MARK, *parts[place + 1 :]])
            if _MARK not in self.written(self.replaced(number, {**message, "content": content})):
                if self.opens(number):
                    return None, 0, True
                raise DataError(
                    f"{self.named(number)}: the chat template drops part of 'content', "
                    f"{parts[place].strip()[:40]!r}; {self.advice(number, 'thought')}"
                )
        begin = self.begin(number, min(start for start, _, _ in places))
        _, tail, changed = min(places, key=lambda place: len(place[1]))
        closing, ended = self.writer.closing(tail, lambda: self.alone(number, changed))
        words = len(self.whole) - common_prefix(self.whole[::-1], tail[::-1])
        end = len(self.whole) - len(tail) + len(closing if ended else closing.rstrip())
        return begin, max(words, end), ended

    def alone(self, number: int, changed: Mapping[str, Any]) -> str:
        """Return the text after a marked message if the conversation ended with it."""
        return self.render([*self.messages[:number], changed]).rpartition(_MARK)[2]

    def begin(self, number: int, words: int) -> int:
        """Return the end of the generation prompt, at most `words`, where the content of the message begins."""
        prompt = self.render(self.messages[:number], True)
        if self.whole.startswith(prompt):
            return len(prompt)
        # Earlier messages are rendered differently than in generation: the header follows the message before.
        before = self.messages[number - 1]
        for field in content_fields(before):
            before = marked(before, field)
        if before is self.messages[number - 1]:
            before = marked(before, "content")
        header = self.render([*self.messages[: number - 1], before], True).rpartition(_MARK)[2]
        rest = self.written(self.replaced(number - 1, before)).rpartition(_MARK)[2]
        if not self.whole.endswith(rest):
            return words
        same = len(header)
        if not rest.startswith(header):
            same = self.writer.common(header.removesuffix(thought_opening(header)), rest)
            self.note(
                f"in generation the assistant's turn begins with {header[same:]!r}, and the chat template writes some "
                "turns of the data without it: make each turn its own row, with its thought"
            )
        return min(words, len(self.whole) - len(rest) + same)

    def opens(self, number: int) -> bool:
        """Return True if the generation prompt of the last message opens a thought that the message lacks."""
        last = number == len(self.messages) - 1 and number not in self.merged
        plain = last and not self.messages[number].get("tool_calls")
        opening = thought_opening(self.render(self.messages[:number], True)) if plain else ""
        return bool(opening) and closing_tag(opening) not in opening

    def in_use(self, number: int) -> tuple[str, str]:
        """Return the generation prompt of the last message, and the text after it: its thought and its content."""
        message, prompt = self.messages[number], self.render(self.messages[:number], True)
        opening, words = thought_opening(prompt), message["content"]
        if not self.whole.startswith(prompt.removesuffix(opening)):
            raise DataError(f"{self.place}: " + self.advice(number, "thought"))
        thought = next((message[field] for field in THOUGHTS if field in content_fields(message)), None)
        if thought is not None:
            words = f"{thought.strip()}\n{closing_tag(opening)}\n\n{words}"
        return prompt, (continued(opening, words) or words) + self.writer.end

    def parts(self, number: int, begin: int, end: int) -> list[Piece]:
        """Split a turn into pieces; an environment's words within it are not trained."""
        text = self.whole[begin:end]
        if number not in self.merged:
            return [Piece(text, is_trained(self.messages[number]))]
        words = "".join(part for part, _ in self.merged[number])
        place = text.find(words.strip())
        if place < 0:
            raise DataError(
                f"{self.named(number)}: the chat template changes the assistant's text, so the "
                "environment's text is not found in it; " + self.advice(number, "thought")
            )
        place -= len(words) - len(words.lstrip())
        pieces, cursor = list[Piece](), 0
        for part, trained in self.merged[number]:
            place += len(part)
            if not trained:
                start = max(place - len(part), 0)
                pieces += [Piece(text[cursor:start], True), Piece(text[start:place], False)]
                cursor = place
        return [*pieces, Piece(text[cursor:], True)]


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge neighbours that are both trained or both not, and drop empty pieces."""
    groups = groupby((piece for piece in pieces if piece.text), key=lambda piece: piece.trained)
    return [Piece("".join(piece.text for piece in group), trained) for trained, group in groups]


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return False for a message of the assistant with weight 0."""
    return message.get(UNTRAINED) != 0


def within_turns(turns: Messages) -> list[list[Mapping[str, Any]]]:
    """Group messages into turns: a message, or the assistant's messages with an environment's answers between them."""
    parts: list[list[Mapping[str, Any]]] = []
    for turn in turns:
        if parts and ENVIRONMENT in (turn["role"], parts[-1][-1]["role"]):
            parts[-1].append(turn)
        else:
            parts.append([turn])
    return parts


def content_fields(message: Mapping[str, Any]) -> list[str]:
    """Return the fields of a message that have content."""
    return [name for name in WORDS if (value := message.get(name)) and (not isinstance(value, str) or value.strip())]


def slotted(value: Any, name: str, words: dict[str, str]) -> Any:
    """Replace the words of a field by marks, and add them to `words`. The words of calls are the texts in their
    arguments."""
    if isinstance(value, str):
        words[name] = value
        return f"{_FORM}{name}{_FORM}"
    if name.endswith("tool_calls") and isinstance(value, list):
        return [_slotted_call(call, f"{name}.{n}", words) for n, call in enumerate(value)]
    return _slotted_call(value, name, words) if name.endswith("function_call") else value


def _slotted_call(call: Any, name: str, words: dict[str, str]) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _slotted_call(call["function"], name, words)}
    arguments = as_object(call.get("arguments"))
    if not isinstance(arguments, Mapping):
        return call
    texts = {
        key: slotted(value, f"{name}.{n}", words) if isinstance(value, str) else value
        for n, (key, value) in enumerate(arguments.items())
    }
    return {**call, "arguments": texts}


def marked(message: Mapping[str, Any], field: str, name: str = "") -> dict[str, Any]:
    """Replace the words of a field by a mark, or by one for each call."""
    value = message.get(field)
    if field == "tool_calls" and isinstance(value, list):
        return {**message, field: [_marked_call(call, f"{name}.{n}") for n, call in enumerate(value)]}
    if isinstance(value, Mapping):
        return {**message, field: _marked_call(value, name)}
    return {**message, field: f"{_MARK}{name}{_MARK}"}


def _marked_call(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _marked_call(call["function"], name)}
    arguments, mark = call.get("arguments"), f"{_MARK}{name}{_MARK}"
    keys = arguments if arguments and isinstance(arguments, Mapping) else [mark]
    return {**call, "arguments": dict.fromkeys(keys, mark)}


def shown(message: Mapping[str, Any], field: str, name: str, text: str) -> bool:
    """Return True where all marks of a marked field are in a text."""
    calls = message[field] if isinstance(message[field], list) else None
    marks = [name] if calls is None else [f"{name}.{n}" for n in range(len(calls))]
    return all(f"{_MARK}{mark}{_MARK}" in text for mark in marks)


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts or sequences; by bisection, which compares whole slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low
