"""Columns and keys that LLaMA-Factory, TRL, axolotl, ms-swift and ShareGPT give a meaning in a conversation.

A row is trained as given: such a column is used, or the row is refused. The system prompt becomes the first message
(`with_system`); a history or a further conversation must be part of what is used, and weights of rows are refused
(`check_used`); weights of messages select what is trained (`message_weight`); pictures have their places in the prompt
(`with_places`), and are refused where the model reads text alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from atomrl.common.chat_template import SET_HERE
from atomrl.data.files import DataError
from atomrl.types import Image, Message

SYSTEM = ("system", "system_prompt", "system_message", "system_instruction")
"""Columns with a system prompt."""
CONVERSATIONS = ("history", "chat_history", "conversation_history", "messages", "conversations", "conversation")
"""Columns with messages or [question, answer] pairs."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Columns, and keys of an assistant's message, with its thought."""
MEDIA = (
    "image", "images", "image_path", "image_url", "image_urls", "pixel_values", "video", "videos", "audio", "audios",
)  # fmt: skip
"""Columns with pictures, films or sound."""
IMAGES, PLACE = "images", "<image>"
"""Column with the pictures of a row that `ImageStore.row` has read; the place of a picture in a prompt."""
WEIGHTS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight")
"""Keys of a message that say whether it is trained."""
ROW_WEIGHTS = (*WEIGHTS, "sample_weight")
UNTRAINED = "weight"
"""Key of a checked message that is not trained; its value is 0."""
_PLACEHOLDER = re.compile(
    r"<(image|video|audio)>(?!.*</\1>)|<\|(?:image|video|audio|vision)(?:_pad|_start|_end)?\|>|<\|image_\d+\|>"
    r"|<(?:image|audio|video)_(?:soft_token|placeholder|pad)>|<start_of_image>|\[IMG\]",
    re.DOTALL,
)
"""Places of pictures in a prompt; a tag of HTML is closed."""
TEMPLATE_KWARGS = "chat_template_kwargs"
"""Column with the variables of the chat template for its row, as in TRL."""


def with_system(row: Mapping[str, Any], prompt: str | tuple[Message, ...]) -> str | tuple[Message, ...]:
    """Put the system prompt in a row's column (`SYSTEM`) before the prompt.

    Raises:
        DataError: it is not text, or the row has another system prompt.

    Example:
        >>> with_system({"system": "Be brief."}, "2+2=")
        ({'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2+2='})
    """
    given = {name: row[name] for name in SYSTEM if row.get(name) is not None}
    for name, text in given.items():
        if not isinstance(text, str):
            raise DataError(f"field {name!r} must be text, the system prompt, not {type(text).__name__}")
    texts = {text.strip(): name for name, text in given.items() if text.strip()}
    if not texts:
        return prompt
    messages = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
    own = [message["content"].strip() for message in messages if message["role"] in ("system", "developer")]
    if len(texts) > 1 or (own and own != [*texts]):
        names = " and ".join(map(repr, texts.values()))
        raise DataError(
            f"field {names}: the row has " + ("two system prompts" if len(texts) > 1 else "another system prompt in "
            "its messages") + "; remove one"
        )  # fmt: skip
    [name] = texts.values()
    return messages if own else (Message(role="system", content=given[name]), *messages)


def template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a row sets.

    Raises:
        DataError: they are no mapping, or one is set by AtomRL.
    """
    given = row.get(TEMPLATE_KWARGS) or {}
    if not isinstance(given, Mapping):
        raise DataError(f"column {TEMPLATE_KWARGS!r} must be a mapping, not {type(given).__name__}")
    for name in given.keys() & {*SET_HERE}:
        raise DataError(f"column {TEMPLATE_KWARGS!r}: {name!r} is set by AtomRL; remove it")
    return {key: value for key, value in given.items() if value is not None}  # null: another row has the key


def images_of(row: Mapping[str, Any]) -> tuple[Image, ...]:
    """Return the pictures of a row that `ImageStore.row` has read; none where the model reads text alone."""
    value = row.get(IMAGES)
    return value if isinstance(value, tuple) else ()


def count_places(prompt: str | Iterable[Message]) -> int:
    """Count the places of pictures in a prompt, without those that the assistant writes."""
    if isinstance(prompt, str):
        return prompt.count(PLACE)
    return sum(message["content"].count(PLACE) for message in prompt if message["role"] != "assistant")


def with_places(
    prompt: str | tuple[Message, ...], images: Sequence[Image], later: Iterable[Message] = ()
) -> str | tuple[Message, ...]:
    """Return a prompt with a place, `<image>`, for each picture. Without any place, pictures come before the text of
    the first user message.

    Args:
        later: messages of others after the assistant's first one, which may have places too.

    Raises:
        DataError: there are more or fewer places than pictures, or no user message.

    Example:
        >>> with_places("How many?", [Image(name="a.png", height=2, width=2)])
        '<image>How many?'
    """
    if not images:
        return prompt
    if prompt == "":
        raise DataError("a row of text alone cannot have pictures: write it as messages")
    if found := count_places(prompt) + count_places(later):
        if found != len(images):
            raise DataError(
                f"the prompt has {found} places of pictures ({PLACE}), and the row {len(images)} pictures: "
                "there must be one for each, in order"
            )
        return prompt
    if isinstance(prompt, str):
        return PLACE * len(images) + prompt
    first = next((place for place, message in enumerate(prompt) if message["role"] == "user"), None)
    if first is None:
        raise DataError("the row has pictures, but its prompt no user message to put them into")
    changed = Message(**{**prompt[first], "content": PLACE * len(images) + prompt[first]["content"]})
    return (*prompt[:first], changed, *prompt[first + 1 :])


def check_used(
    row: Mapping[str, Any],
    used: Iterable[str],
    prompt: str | tuple[Message, ...],
    trained: str | None,
    later: Iterable[Message] = (),
) -> None:
    """Check that nothing is left over of the columns that belong to a conversation.

    Args:
        used: names of the columns that the config maps.
        prompt: the row's prompt.
        trained: the words of its completions; None if there are none (RL): then columns of answers are for rewards.
        later: messages of others between those of the assistant.

    Raises:
        DataError: a column is left over, or a picture would be.
    """
    given = [*(() if isinstance(prompt, str) else prompt), *later]
    messages = [*([prompt] if isinstance(prompt, str) else ()), *(message["content"] for message in given)]
    _check_media(row, used, given, messages)
    if trained is not None:
        for name in ROW_WEIGHTS:
            if name not in used and row.get(name) is not None and not _all_trained(row[name]):
                raise DataError(
                    f"column {name!r} is {str(row[name])[:40]}: weights of rows are not supported; remove the row or "
                    "the column. A message with weight: 0 is not trained"
                )
    shown = "\n".join([*messages, trained or ""])
    for name in (*CONVERSATIONS, *(() if trained is None else THOUGHTS)):
        if name not in row or name in used:
            continue
        left = next((text for text in _words(row.get(name), trained is not None) if text not in shown), None)
        if left is not None:
            raise DataError(
                f"column {name!r} is part of the conversation, but would not be used ({left[:40]!r}): put it into the "
                "messages, or remove or rename the column"
            )
    if TEMPLATE_KWARGS not in used and _filled(row.get(TEMPLATE_KWARGS)):
        raise DataError("column 'chat_template_kwargs': set data.chat_template_kwargs for all rows; remove the column")


def _check_media(row: Mapping[str, Any], used: Iterable[str], given: Sequence[Message], texts: Sequence[str]) -> None:
    """Check that no picture, film or sound of a row is left over, in a column, a message or the middle of a text."""
    images = images_of(row)
    for text in texts:
        if found := _PLACEHOLDER.search(text.replace(PLACE, "") if images else text):
            if images:
                raise DataError(f"the prompt has {found[0]}; write {PLACE} where a picture is")
            raise DataError(
                f"the prompt has {found[0]}, the place of a picture, a film or sound, and the row has no pictures, or "
                "the run reads text alone: remove it, or the row"
            )
    holders = [("column", row), *(("key", message) for message in given)]
    for what, holder in holders:
        others = (name for name in MEDIA if name in holder and name not in used and not (images and name == IMAGES))
        if name := next((name for name in others if _filled(holder[name])), None):
            raise DataError(
                f"{what} {name!r} has pictures, films or sound, and the run reads text alone: remove the {what} if "
                "the text can be understood without it, or the row"
            )


def _filled(value: Any) -> bool:
    """Return False for null, empty text and lists of such values."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_filled, value)) if isinstance(value, list) else value is not None and value != ""


def _all_trained(value: Any) -> bool:
    return all(map(_all_trained, value)) if isinstance(value, list) else value is None or _weight(value) == 1


def _weight(value: Any) -> Any:
    """Convert a weight, which CSV has as text, to 0 or 1; others are returned unchanged."""
    known = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}
    return known.get(str(value).strip().lower(), value)


def message_weight(place: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the keys of `WEIGHTS`, but with `weight: 0` if they say that it is not trained.

    Raises:
        DataError: the value is neither 0 nor 1, or a message that is not the assistant's has 1.

    Example:
        >>> message_weight("message 2", {"role": "assistant", "content": "4", "train": False})
        {'role': 'assistant', 'content': '4', 'weight': 0}
    """
    given = {key: _weight(message[key]) for key in WEIGHTS if message.get(key) is not None}
    others = {key: value for key, value in message.items() if key not in WEIGHTS}
    for key, value in given.items():
        if value not in (0, 1):
            raise DataError(f"{place}: {key!r} must be 0 (not trained) or 1, not {value!r}")
        if value == 1 and message.get("role") != "assistant":
            raise DataError(f"{place}: {key!r} is {message[key]}, but only the assistant's messages are trained")
    if len(set(given.values())) > 1:
        raise DataError(f"{place}: {' and '.join(map(repr, given))} contradict each other")
    return others | ({UNTRAINED: 0} if 0 in given.values() and message.get("role") == "assistant" else {})


def _words(value: Any, answers: bool) -> Iterator[str]:
    """Yield the texts of messages or pairs; without `answers` not those of the assistant."""
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, Mapping):
        if answers or value.get("role", value.get("from")) not in ("assistant", "gpt", "function_call"):
            for key in ("content", "value", "text"):
                yield from _words(value.get(key), answers)
    elif isinstance(value, list):
        for item in value:
            yield from _words(item, answers)
