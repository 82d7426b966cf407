"""An environment's reply as tokens: what follows a turn of the model in its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atomrl.episodes import Reply

_USER, _MODEL, _REPLY = "atomrl-user-words", "atomrl-model-words", "atomrl-reply-words"


class ReplyTokens:
    """Tokenizes replies, each alone: tokens that were sampled are never encoded again, so a row only grows.

    What an environment says holds no special token: a document that contains the text of an end-of-turn token cannot
    end a turn. Added tokens that are not special (`<think>`, `<tool_call>`, a tokenizer's own tags) stay tokens.

    A raw reply is its text. One with a role is what the chat template writes between the end of the assistant's words
    and its next ones, which is found by rendering a conversation of dummies; the end-of-turn token is left out where
    the model wrote it itself.

    Args:
        tokenizer: of the model.

    Raises:
        ValueError: of `encode`, where there is no chat template, or it has no place for the role behind the assistant's
            words.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._around: dict[str, tuple[str, str]] = {}

    def encode(self, reply: Reply, last_token: int | None, most: int) -> list[int]:
        """The tokens of a reply.

        Args:
            last_token: of the model's turn before it; None: there is none.
            most: tokens of the reply's own text; what is beyond is cut, and what the template writes around it is not.
        """
        text = self._ids(reply.text, split=True)[:most]
        if not reply.role:
            return text
        before, after = (self._ids(part) for part in self.around(reply.role, opening=last_token is None))
        if last_token is not None and before[:1] == [last_token]:
            before = before[1:]
        return [*before, *text, *after]

    def _ids(self, text: str, split: bool = False) -> list[int]:
        options = {"add_special_tokens": False, "verbose": False, "split_special_tokens": split}
        ids: list[int] = self.tokenizer(text, **options)["input_ids"] if text else []
        return ids

    def around(self, role: str, opening: bool = False) -> tuple[str, str]:
        """What the template writes before and after a message of a role that follows the assistant's words.

        Raises:
            ValueError: it writes none, refuses the role, or changes what comes before.
        """
        key = f"{role}/{opening}"
        if key not in self._around:
            self._around[key] = self._find(role, opening)
        return self._around[key]

    def _find(self, role: str, opening: bool) -> tuple[str, str]:
        where = f"a reply with the role {role!r}"
        if not self.tokenizer.chat_template:
            raise ValueError(f"{where}: the tokenizer has no chat template; reply with role ''")
        if opening:
            raise ValueError(f"{where} before the model's first turn: the prompt has been rendered; reply with role ''")
        user, model = {"role": "user", "content": _USER}, {"role": "assistant", "content": _MODEL}
        try:
            short = self._rendered([user, model], add_generation_prompt=False)
            whole = self._rendered([user, model, {"role": role, "content": _REPLY}], add_generation_prompt=True)
        except Exception as error:  # templates are programs and raise what they like
            raise ValueError(f"{where}: the chat template refuses it behind the assistant's words: {error}") from error
        start, _, rest = whole.partition(_MODEL)
        if short.count(_MODEL) != 1 or whole.count(_MODEL) != 1 or short.partition(_MODEL)[0] != start:
            raise ValueError(f"{where}: the chat template does not keep what came before it; reply with role ''")
        if rest.count(_REPLY) != 1:
            raise ValueError(f"{where}: the chat template leaves it out")
        before, _, after = rest.partition(_REPLY)
        return before, after

    def _rendered(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        return str(self.tokenizer.apply_chat_template([dict(message) for message in messages], **options))
