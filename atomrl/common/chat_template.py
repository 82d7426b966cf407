"""Chat templates of tokenizers: rendering, end-of-turn and stop tokens, opened thoughts, and template variables."""

from __future__ import annotations

import ctypes
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from atomrl.common.errors import did_you_mean

SET_HERE = (
    "messages", "conversation", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""Arguments of `apply_chat_template` that AtomRL sets; `data.chat_template_kwargs` must not have them."""
NO_TEMPLATE = (
    "the tokenizer has no chat template: set one (data.chat_template=chatml, or the path of a .jinja file), use a "
    "tokenizer that has one (model.tokenizer=NAME, such as that of the instruction-tuned version)"
)
"""Error message for messages without a chat template; callers append further remedies."""
NO_JINJA = (
    "it is not valid Jinja; fix chat_template.jinja (or tokenizer_config.json) next to the tokenizer, or set another "
    "(data.chat_template)"
)
_WORDS, _NEXT = "atomrl-words", "atomrl-next"
_ANCHORS = ("\n", "a", ".")
_THOUGHT = (
    r"(?:[^\W_]+[:_])*(?:think(?:ing)?|thoughts?|reason(?:ing)?)\|?[>\]]"  # <think>, [THINK], <|begin_of_thought|>
)
_OPEN, _CLOSED = rf"[<\[]\|?(?!end){_THOUGHT}", rf"[<\[]\|?(?:/|end[:_]){_THOUGHT}"
_OPENED = re.compile(rf"{_OPEN}\s*(?:{_CLOSED}\s*)?\Z", re.IGNORECASE)
THOUGHT_TAG = re.compile(rf"({_OPEN}|{_CLOSED})", re.IGNORECASE)
"""Matches a tag that opens or closes a thought."""
FOREIGN_MARK = re.compile(
    r"<\|im_start\|>|<\|im_end\|>|<\|start_header_id\|>|<\|eot_id\|>|<start_of_turn>|<end_of_turn>|\[/?INST\]|<<SYS>>"
    r"|<\|(?:user|assistant|system|end|channel|message)\|>|<\|start\|>|<｜(?:User|Assistant)｜>"
    r"|<\|(?:START|END)_OF_TURN_TOKEN\|>|<\|start_of_role\|>|\[gMASK\]"
)
"""Marks around turns in the templates of common model families."""
RENDER_S = 10.0
"""Most seconds of one rendering; a template is a program, and need not end."""
_ends: WeakKeyDictionary[Any, dict[str, int | None]] = WeakKeyDictionary()
"""Cache of `end_of_turn`: tokenizer -> template, end of sequence and variables -> token."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template of Qwen's and many other models, without tools and thoughts."""


class EndlessTemplateError(ValueError):
    """A chat template that was stopped after `RENDER_S`."""

    def __init__(self) -> None:
        super().__init__(
            f"the chat template was still running after {RENDER_S:g} s, so it may never end; fix chat_template.jinja "
            "(or tokenizer_config.json) next to the tokenizer, or set another (data.chat_template)"
        )


class _Watch:
    """Raises `EndlessTemplateError` in threads that render for longer than `RENDER_S`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}
        """Thread that is rendering -> start, on the monotonic clock."""
        self._late: set[int] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Limit the time of a block in this thread."""
        own = threading.get_ident()
        with self._lock:
            self._begun[own] = time.monotonic()
            if self._thread is None or not self._thread.is_alive():  # also after a fork
                self._thread = threading.Thread(target=self._run, name="atomrl-template", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._begun.pop(own, None)
                if own in self._late:  # withdraw what was not raised yet
                    self._late.remove(own)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(own), None)

    def _run(self) -> None:
        while True:
            time.sleep(1.0)
            with self._lock:
                for thread, start in self._begun.items():
                    if time.monotonic() - start > RENDER_S and thread not in self._late:
                        self._late.add(thread)
                        kind = ctypes.py_object(EndlessTemplateError)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)


_watch = _Watch()


def _apply(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    try:
        with _watch.rendering():
            return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # Jinja's type, compared by name because Jinja may not be imported
        if type(error).__name__ != "TemplateSyntaxError":
            raise
        raise ValueError(f"{NO_JINJA}: line {getattr(error, 'lineno', '?')}: {error}") from error


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """Render a conversation by the chat template.

    Arguments of tool calls may be objects or JSON (as in OpenAI's API); the template gets the form that it takes.

    Args:
        tools: JSON schemas that the template shows to the model.
        kwargs: further variables of the template (`data.chat_template_kwargs`), such as `enable_thinking`.
        add_generation_prompt: end with the header of the assistant's next turn.
        continue_final_message: leave the last message open, so that the model continues it.

    Raises:
        Exception: of any type, as templates are programs.

    Example:
        >>> from atomrl.models.tokenizer import make_tokenizer
        >>> render(make_tokenizer(), [{"role": "user", "content": "2+2"}], add_generation_prompt=True)
        '<|user|>2+2<|assistant|>'
    """
    options = {
        "tools": [dict(tool) for tool in tools] or None,
        "tokenize": False,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        **(kwargs or {}),
    }
    turns = [dict(message) for message in messages]
    if not any(message.get("tool_calls") for message in turns):
        return str(_apply(tokenizer, turns, **options))
    # Templates expect arguments of tool calls either as objects or as JSON. Try objects first: a template that expects
    # JSON fails on them, or prints them as Python dicts.
    try:
        text = str(_apply(tokenizer, [_with_arguments(message, False) for message in turns], **options))
        if not any(str(arguments) in text for message in turns for arguments in _arguments(message) if arguments):
            return text
    except TypeError:  # the template concatenates them with text (DeepSeek)
        pass
    return str(_apply(tokenizer, [_with_arguments(message, True) for message in turns], **options))


def _with_arguments(message: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Convert the arguments of a message's calls to objects, or to JSON."""
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_call_with_arguments(call, as_text) for call in calls]}


def _call_with_arguments(call: Any, as_text: bool) -> Any:
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_with_arguments(call["function"], as_text)}
    if not isinstance(call, Mapping) or "arguments" not in call:
        return call
    arguments = call["arguments"]
    if as_text:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "arguments": text}
    return {**call, "arguments": as_object(arguments)}


def as_object(arguments: Any) -> Any:
    """Parse arguments that are the JSON of an object (as in OpenAI's API); return others unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _arguments(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of a message's tool calls that are objects."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or [] if isinstance(call, Mapping)]
    arguments = [as_object(call.get("arguments")) for call in calls if isinstance(call, Mapping)]
    return [each for each in arguments if isinstance(each, dict)]


def end_of_turn(tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> int | None:
    """Return the token that the chat template writes at the end of the assistant's turn.

    It need not be the tokenizer's end of sequence: Gemma writes `<end_of_turn>`, Phi `<|end|>`, a Qwen base model
    `<|im_end|>`. If the template writes none (GLM), or there is no template, it is the tokenizer's. A token that ends
    only earlier turns (`<|end|>` of gpt-oss) does not count.

    Returns:
        The token's id; None if the tokenizer has no end of sequence either.

    Example:
        >>> from atomrl.models.tokenizer import make_tokenizer
        >>> tokenizer = make_tokenizer()
        >>> tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer))
        '<|end|>'
    """
    cache, key = _ends.setdefault(tokenizer, {}), repr((tokenizer.chat_template, tokenizer.eos_token, kwargs))
    if key not in cache:
        token = _end_of_turn(tokenizer, kwargs) if tokenizer.chat_template else None
        cache[key] = tokenizer.eos_token_id if token is None else tokenizer.convert_tokens_to_ids(token)
    return cache[key]


def stop_tokens(tokenizer: Any, config: Any = None, generation_config: Any = None) -> tuple[int, ...]:
    """Return the ids of the tokens that end a completion, without duplicates.

    These are the tokens of the generation config and the config, the tokenizer's end of sequence, and the end of turn
    of the chat template. Training teaches the last one, which the generation config of a base model does not have.

    If there is a generation config, tokens of the config that are not special are ignored: config classes have defaults
    (2), which may be any token of the vocabulary.

    Example:
        >>> from types import SimpleNamespace
        >>> from atomrl.models.tokenizer import make_tokenizer
        >>> stop_tokens(make_tokenizer(), SimpleNamespace(eos_token_id=[7, 8]))
        (7, 8, 1)
    """
    of_generation, of_config = (_ids(getattr(each, "eos_token_id", None)) for each in (generation_config, config))
    ids = [*of_generation, *(id for id in of_config if not of_generation or id in special_ids(tokenizer))]
    return tuple(dict.fromkeys([*ids, *_ids(tokenizer.eos_token_id), *_ids(end_of_turn(tokenizer))]))


def _ids(ids: Any) -> list[int]:
    """Convert one id, several or None to a list."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = getattr(tokenizer, "all_special_ids", ())
    return frozenset({*named, *(id for id, token in added.items() if token.special)})


def thought_opening(text: str) -> str:
    """Return the end of a prompt that opens a thought, or contains an empty one: it belongs to the assistant's turn,
    although the model did not write it. "" if there is none.

    Example:
        >>> thought_opening("<|user|>2+2?<|assistant|><think>\\n")
        '<think>\\n'
        >>> thought_opening("<|assistant|><think>\\n\\n</think>\\n\\n"), thought_opening("Write in <think> tags.")
        ('<think>\\n\\n</think>\\n\\n', '')
    """
    match = _OPENED.search(text)
    return match[0] if match else ""


def closing_tag(opening: str) -> str:
    """Return the tag that closes the thought which a prompt has opened (`thought_opening`).

    Example:
        >>> closing_tag("<think>\\n"), closing_tag("[THINK]"), closing_tag("<|begin_of_thought|>")
        ('</think>', '[/THINK]', '<|end_of_thought|>')
    """
    tag = THOUGHT_TAG.split(opening)[1]
    if re.search("begin|start", tag, re.IGNORECASE):
        return re.sub("begin|start", "end", tag, flags=re.IGNORECASE)
    return re.sub(r"^[<\[]\|?", r"\g<0>/", tag)


@dataclass(frozen=True)
class TurnMarks:
    """Marks that a chat template writes around messages, by which a rendered prompt is recognised."""

    special: tuple[str, ...] = ()
    """Special tokens of the template, and the tokenizer's begin and end of sequence."""
    ends: tuple[str, ...] = ()
    """The special tokens that end the assistant's turn."""
    front: str = ""
    """The text in front of the first user message."""
    header: str = ""
    """The generation prompt: the text between a user message and the assistant's."""

    def turn(self, text: str) -> str | None:
        """Return the text of a prompt after its last generation prompt: the beginning of the assistant's turn.

        Returns:
            None if the prompt does not look rendered by this template: it has no generation prompt or another
            beginning, or the turn has ended.
        """
        header = self.header.removesuffix(thought_opening(self.header)).strip()
        begins = tuple(mark for mark in (*self.special, self.front.strip()) if mark)
        before, separator, turn = text.rpartition(header) if header and begins else ("", "", "")
        if not (separator and before.lstrip().startswith(begins)) or any(end in turn for end in self.ends):
            return None
        return turn.lstrip("\n")


def turn_marks(tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> TurnMarks:
    """Find the marks of the tokenizer's chat template; empty if it has none.

    Example:
        >>> from atomrl.models.tokenizer import make_tokenizer
        >>> marks = turn_marks(make_tokenizer())
        >>> marks.header, marks.turn("<|user|>2+2<|assistant|>It is"), marks.turn("2+2")
        ('<|assistant|>', 'It is', None)
    """
    if not tokenizer.chat_template:
        return TurnMarks()
    end = end_of_turn(tokenizer, kwargs)
    ends = {str(tokenizer.convert_ids_to_tokens(id)) for id in (end, tokenizer.eos_token_id) if id is not None}
    user, words = {"role": "user", "content": _WORDS}, {"role": "assistant", "content": _WORDS}
    front, _, header = _around(tokenizer, kwargs, [user], add_generation_prompt=True)
    text = header + "".join(_around(tokenizer, kwargs, [words, {**user, "content": _NEXT}, words]))
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    marks = {mark for mark in added if mark and mark in text} | ends | {tokenizer.bos_token or ""}
    special = sorted(mark for mark in marks if mark and not THOUGHT_TAG.fullmatch(mark))
    return TurnMarks(tuple(special), tuple(sorted(ends)), front, header)


def tokenize_continuation(tokenizer: Any, text: str, before: str = "", split: bool = False) -> list[int]:
    """Tokenize a text as a continuation of other text; sentencepiece puts a space in front of text that stands alone.

    Args:
        before: the text in front, if it is known; its tokens are not returned.
        split: tokenize special tokens in the text as plain characters.
    """
    if not text:
        return []
    for anchor in ([before] if before else []) + list(_ANCHORS):
        front, whole = token_ids(tokenizer, anchor, split), token_ids(tokenizer, anchor + text, split)
        if whole[: len(front)] == front:
            return whole[len(front) :]
    return token_ids(tokenizer, text, split)


def token_ids(tokenizer: Any, text: str, split: bool = False) -> list[int]:
    """Tokenize a text without added special tokens; `split` as in `tokenize_continuation`."""
    options = {"add_special_tokens": False, "verbose": False, "split_special_tokens": split}
    ids: list[int] = tokenizer(text, **options)["input_ids"] if text else []
    return ids


def check_kwargs(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Check that the chat template reads each of `data.chat_template_kwargs`.

    Raises:
        ValueError: it has no such variable, or there is no template.
    """
    if kwargs and not tokenizer.chat_template:
        raise ValueError(f"{NO_TEMPLATE}, or remove them")
    for name in kwargs:
        if name not in (variables := template_variables(tokenizer)):
            hint = did_you_mean(name, sorted(variables), "its variables:") if variables else "it has none"
            raise ValueError(f"the chat template does not read {name!r}; {hint}")


def set_template(tokenizer: Any, named: str) -> None:
    """Set a tokenizer's chat template to `chatml`, or to the content of a file (`data.chat_template`).

    Raises:
        OSError, ValueError: the file cannot be read, or the tokenizer has no tokens for the marks of `chatml`.
    """
    if named == "chatml":
        if missing := [mark for mark in ("<|im_start|>", "<|im_end|>") if mark not in tokenizer.get_vocab()]:
            raise ValueError(
                f"the tokenizer has no token {' and '.join(missing)}, so a turn would not end in one token; write a "
                f"template that ends turns with {tokenizer.eos_token} into a file, and set "
                "data.chat_template=FILE.jinja"
            )
        tokenizer.chat_template = CHATML
        return
    if not Path(named).is_file():
        raise ValueError("the file does not exist")
    tokenizer.chat_template = Path(named).read_text(encoding="utf-8")


def template_variables(tokenizer: Any) -> set[str]:
    """Return the variables of the chat template that AtomRL does not set: `enable_thinking`, `date_string`, ..."""
    template = tokenizer.chat_template
    sources = template.values() if isinstance(template, dict) else [template]
    names = {name for source in sources for name in _variables(source)}
    return names - {*SET_HERE, *tokenizer.special_tokens_map, "raise_exception", "strftime_now", "range", "namespace"}


@lru_cache(maxsize=16)
def _variables(source: str) -> frozenset[str]:
    from jinja2 import Environment, meta

    # a tag of transformers, unknown to jinja; its content stays
    source = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source)
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(source)))


def _end_of_turn(tokenizer: Any, kwargs: Mapping[str, Any] | None) -> str | None:
    """Return the end-of-turn token as text, or None if the template writes none.

    Special tokens after the assistant's words count if they are written with and without a following user message: Phi
    adds the end of sequence at the end of a conversation, gpt-oss another end after the last message. The tokenizer's
    end of sequence is preferred (Command R closes its answer, then its turn), else the first one is used.
    """
    words, user = {"role": "assistant", "content": _WORDS}, {"role": "user", "content": _NEXT}
    *_, last = _around(tokenizer, kwargs, [words])
    inner = _around(tokenizer, kwargs, [words, user])[2].partition(_NEXT)[0]
    ends, both = _special(tokenizer, last), list[str]()
    for end, other in zip(ends, _special(tokenizer, inner), strict=False):
        if end != other:
            break
        both.append(end)
    candidates = both or ends
    return tokenizer.eos_token if tokenizer.eos_token in candidates else next(iter(candidates), None)


def _around(
    tokenizer: Any,
    kwargs: Mapping[str, Any] | None,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = False,
) -> tuple[str, str, str]:
    """Render messages, and split the text at the last `_WORDS`: (before, `_WORDS`, behind).

    Some templates require a system message, or content in parts: several forms of the conversation are tried. Empty if
    the template accepts none.
    """
    question: list[dict[str, Any]] = [{"role": "user", "content": "atomrl-asked"}]
    front = [] if messages[0]["role"] == "user" else question
    for begin in (front, [{"role": "system", "content": "atomrl-told"}, *front]):
        for turns in ([*begin, *messages], [_in_parts(message) for message in [*begin, *messages]]):
            try:
                text = render(tokenizer, turns, kwargs=kwargs, add_generation_prompt=add_generation_prompt)
            except EndlessTemplateError:
                raise
            except Exception:  # of any type, as templates are programs
                continue
            if _WORDS in text:
                return text.rpartition(_WORDS)
    return "", "", ""


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message to content parts, the form that templates of vision models read."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _special(tokenizer: Any, text: str) -> list[str]:
    """List the special tokens at the beginning of a text; white space may separate them."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    names, leading = sorted(added - {""}, key=len, reverse=True), list[str]()
    while name := next((name for name in names if (text := text.lstrip()).startswith(name)), None):
        leading.append(name)
        text = text.removeprefix(name)
    return leading
