"""An environment's reply as tokens: what follows a turn of the model in its row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from atomrl.chat_template import NO_TEMPLATE, end_of_turn, following, render, token_ids
from atomrl.episodes import Reply

_USER, _MODEL, _REPLY = "atomrl-user-words", "atomrl-model-words", "atomrl-reply-words"
_THOUGHT = "atomrl-thoughts"
_FORGED = re.compile(r"(atomrl-special-\d+-words)")
_CALL_ID = "atomrl001"
"""Nine letters and digits: Mistral's templates take no other."""

Message = dict[str, Any]


class ReplyTokens:
    """Tokenizes replies, each alone: tokens that were sampled are never encoded again, so a row only grows.

    A raw reply is its text. Messages are what the chat template writes between the end of the assistant's words and its
    next ones, found by rendering a short conversation of dummies that ends with them: trimmed, quoted and wrapped as it
    does. The end-of-turn token is left out where the model wrote it itself, and nothing else is: not the line break
    that follows it. The text of a special token in what is said is text, so that no document or tool can end a turn;
    added tokens that are not special stay tokens.

    Args:
        tokenizer: of the model.
        tools: JSON schemas that the prompt was rendered with; what templates write may depend on them.
        kwargs: further variables of the template, likewise (`data.chat_template_kwargs`).
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer, self.tools, self.kwargs = tokenizer, [dict(tool) for tool in tools], dict(kwargs or {})
        self._openings: dict[str, list[Message]] = {}
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = sorted(special, key=len, reverse=True)
        self._added = special | {token.content for token in added}

    def encode(self, replies: Reply | Sequence[Reply], last_token: int | None, most: int) -> list[int]:
        """The tokens of what an environment answers at once.

        Args:
            replies: one, or several messages of the same role.
            last_token: of the model's turn before it; None: there is none, and a message is the end of the prompt's
                last one (`environment.opening`).
            most: tokens of the replies' own text. Where there are more, each gets an equal part, and what is beyond is
                cut; what the template writes around it is not.

        Raises:
            ValueError: the chat template has no place for such messages.
        """
        replies = [replies] if isinstance(replies, Reply) else list(replies)
        role, names = replies[0].role, {f"atomrl-special-{n}-words": token for n, token in enumerate(self._special)}
        texts = self._cut([reply.text for reply in replies], most) if role else [reply.text for reply in replies]
        for name, token in names.items():
            texts = [text.replace(token, name) for text in texts]
        before = "" if last_token is None else str(self.tokenizer.convert_ids_to_tokens(last_token))
        if not role:
            before, after = "", "".join(texts)
        else:
            after = self._opening(role, texts) if last_token is None else self._after_model(role, texts)
        if before in self._added and after.lstrip().startswith(before):
            after = after.lstrip().removeprefix(before)  # the model ended its turn itself
        else:
            before = ""
        first, *others = _FORGED.split(after)
        ids = following(self.tokenizer, first, before)
        for part in others:
            ids += self._spelled(names[part]) if part in names else following(self.tokenizer, part)
        return ids if role else ids[:most]

    def check(self, role: str, opening: bool = False) -> list[str]:
        """Whether the chat template has a place for an environment's messages.

        Args:
            role: `tool` or `user`.
            opening: whether the environment begins.

        Returns:
            What is worth a warning: where the template, given the whole conversation, would write its earlier turns
            otherwise than they are in the row.

        Raises:
            ValueError: it has none.
        """
        if opening:
            self._opening("user", [_REPLY])
        messages = self._conversation(role)
        thinking = [dict(message) for message in messages]
        thinking[-1]["content"] = f"<think>\n{_THOUGHT}\n</think>\n\n{_MODEL}"
        reply = self._messages(role, [_REPLY])
        kept = [self._rendered([*thinking, *more], bool(more)) for more in ([], reply)]
        prompt, whole = self._rendered(messages[:-1], True), self._rendered([*messages, *reply], True)
        start = whole.partition(_MODEL)[0]
        if not start.startswith(prompt) and not prompt.startswith(start):  # either may have thoughts, or a call's begin
            return [
                f"the chat template writes what came before otherwise where a message of {role!r} follows; rows keep "
                "it as the model saw it"
            ]
        if _THOUGHT in kept[0] and _THOUGHT not in kept[1]:
            return [f"the chat template drops thoughts before a message of {role!r}; rows keep all that was sampled"]
        return []

    # ---- Text ----

    def _opening(self, role: str, texts: Sequence[str]) -> str:
        """What follows the words of the prompt's last message where the environment goes on with it."""
        if role != "user":
            raise ValueError(f"a reply with the role {role!r} before the model's first turn: it is 'user'")
        if not self.tokenizer.chat_template:
            raise ValueError(f"opening: {NO_TEMPLATE}, or remove it, so that what is said first is text")
        *before, user = self._conversation("user")[:-1]
        return self._rendered([*before, user | {"content": _USER + texts[0]}], True).partition(_USER)[2]

    def _after_model(self, role: str, texts: Sequence[str]) -> str:
        """What follows the model's words: the end of its turn, the messages, and what begins its next turn."""
        conversation = self._conversation(role)
        text = self._rendered([*conversation, *self._messages(role, texts)], True).partition(_MODEL)[2]
        if "tool_calls" in conversation[-1]:  # the words are an argument of a call, whose end is the model's too
            end = self._end(text)
            text = end + text.partition(end)[2]
        return text

    def _end(self, text: str) -> str:
        """The token that ends the model's turn, in a text behind its words: the one that ends an answer, or the
        tokenizer's, else the first special."""
        ends = self.tokenizer.convert_ids_to_tokens(end_of_turn(self.tokenizer, self.kwargs)), self.tokenizer.eos_token
        if end := next((end for end in ends if end and end in text), None):
            return str(end)
        return min((token for token in self._special if token in text), key=text.index, default="")

    def _conversation(self, role: str) -> list[Message]:
        """Dummies up to the assistant's words that a message of the role may follow: the first that the template takes.

        Raises:
            ValueError: it takes none.
        """
        if role not in self._openings:
            if not self.tokenizer.chat_template:
                raise ValueError(f"a reply with the role {role!r}: {NO_TEMPLATE}, or reply with ''")
            system, user = {"role": "system", "content": "atomrl-system-words"}, {"role": "user", "content": _USER}
            plain: Message = {"role": "assistant", "content": _MODEL}
            arguments = {"name": "atomrl", "arguments": {"words": _MODEL}}
            call = {"id": _CALL_ID, "type": "function", "function": arguments}
            calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            ways: list[list[Message]] = [[user, plain], [system, user, plain]]
            ways += [[user, calling], [system, user, calling]] if role == "tool" else []
            problems = []
            for way in ways:
                if (problem := self._problem(way, role)) is None:
                    self._openings[role] = way
                    break
                problems.append(problem)
            else:
                raise ValueError(f"a reply with the role {role!r}: the chat template {problems[0]}")  # the plainest way
        return self._openings[role]

    def _problem(self, way: list[Message], role: str) -> str | None:
        """Why messages of a role cannot follow this conversation."""
        texts = [f"{_REPLY}-1", f"{_REPLY}-2"] if role == "tool" else [_REPLY]
        try:
            prompt = self._rendered(way[:-1], True)
            whole = self._rendered([*way, *self._messages(role, texts)], True)
        except Exception as error:  # templates are programs and raise what they like
            return f"refuses it behind the assistant's words: {error}"
        start, _, after = whole.partition(_MODEL)
        kept = start.count(_USER) == 1 and start.partition(_USER)[0] == prompt.partition(_USER)[0]
        if whole.count(_MODEL) != 1 or not kept:
            return "does not keep what came before it"
        if after.count(_REPLY) != len(texts):
            return "leaves it out"
        if "tool_calls" in way[-1] and not self._end(after):
            return "writes no end-of-sequence token behind a call"
        return None

    def _messages(self, role: str, texts: Sequence[str]) -> list[Message]:
        if role == "user":
            return [{"role": role, "content": text} for text in texts]
        return [{"role": role, "name": "atomrl", "tool_call_id": _CALL_ID, "content": text} for text in texts]

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        options: dict[str, Any] = {"tools": self.tools, "kwargs": self.kwargs}
        return render(self.tokenizer, messages, add_generation_prompt=add_generation_prompt, **options)

    # ---- Tokens ----

    def _cut(self, texts: Sequence[str], most: int) -> list[str]:
        found = [token_ids(self.tokenizer, text, split=True) for text in texts]
        if sum(map(len, found)) <= most:
            return list(texts)
        part, cut = max(1, most // len(texts)), []
        for text, ids in zip(texts, found, strict=True):
            short = str(self.tokenizer.decode(ids[:part], clean_up_tokenization_spaces=False))
            cut.append(text if len(ids) <= part else short.rstrip("\ufffd"))  # the first half of a character
        return cut

    def _spelled(self, text: str) -> list[int]:
        """The text of a special token, without it."""
        ids = following(self.tokenizer, text, split=True)
        if set(self.tokenizer.convert_ids_to_tokens(ids)) & set(self._special):  # sentencepiece has it as a piece too
            ids = [token for character in text for token in following(self.tokenizer, character, split=True)]
        return ids
