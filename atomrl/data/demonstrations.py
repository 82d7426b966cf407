"""Rows with demonstrations become samples, and samples become tokens.

Layouts, recognised by their fields:

- `prompt` and `completion`: text, or lists of messages (TRL's prompt-completion rows);
- `messages`: a conversation (TRL's conversational rows), or `conversations` with `from` and `value` (ShareGPT);
- `instruction`, `input` (may be empty) and `output` (Alpaca).

What the assistant says is trained on, from its first message after the prompt to the last; what others say is not.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from atomrl.data.generators import find_demonstrator, is_generator
from atomrl.data.problems import DataError
from atomrl.data.sources import (
    Convert,
    LoadReport,
    PromptContent,
    answer_reader,
    as_content,
    check_messages,
    check_prompt,
    load_samples,
)
from atomrl.data.tokenized import Encode, Example, Items, demonstration
from atomrl.types import Message, Sample

if TYPE_CHECKING:
    from atomrl.config import DataConfig
    from atomrl.data.processor import DataProcessor

Turns = str | tuple[Message, ...]
"""A completion, or messages of which the first is the assistant's."""
TURNS = "demonstration"
"""The column of a sample that holds them."""
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def load_demonstrations(
    config: DataConfig, completion_field: str, split: Literal["train", "eval"] = "train", seed: int = 0
) -> LoadReport:
    """The demonstrations of one split, as `load_samples` loads problems.

    Raises:
        DataError: as `load_samples`; or the generator writes no demonstrations.
    """
    convert = demonstration_reader(config.prompt_field, completion_field)
    return load_samples(config, split, seed, convert, find_demonstrator)


def demonstration_reader(prompt_field: str, completion_field: str) -> Convert:
    """Reads a row as a demonstration (`demonstrated`)."""
    return answer_reader(TURNS, lambda row: demonstrated(row, prompt_field, completion_field))


def demonstrated(
    row: Mapping[str, Any], prompt_field: str = "prompt", completion_field: str = "completion"
) -> tuple[PromptContent, Turns]:
    """The prompt of a row, and what follows it.

    Raises:
        DataError: what is wrong with it, without the place.

    Example:
        >>> demonstrated({"instruction": "Add.", "input": "2+2", "output": "4"})
        ('Add.\\n\\n2+2', '4')
        >>> demonstrated({"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]})
        ('2+2=', '4')
    """
    given = {name for name, value in row.items() if value is not None}
    if completion_field in given:
        if prompt_field not in given:
            raise DataError(f"field {prompt_field!r} is missing (has {', '.join(map(repr, row))})")
        completion = row[completion_field]
        if isinstance(completion, list):
            prompt = check_prompt(row[prompt_field])
            return prompt, _turns(completion_field, check_messages(completion))
        if not isinstance(completion, str) or not completion:
            raise DataError(f"field {completion_field!r} holds no text and no messages")
        return check_prompt(row[prompt_field]), completion
    if "conversations" in given:
        return _conversation("conversations", [_sharegpt(message) for message in _list(row["conversations"])])
    if "messages" in given:
        return _conversation("messages", _list(row["messages"]))
    if {"instruction", "output"} <= given:
        texts = [row[name] for name in ("instruction", "input") if row.get(name)]
        if not all(isinstance(text, str) for text in texts) or not isinstance(row["output"], str) or not row["output"]:
            raise DataError("fields 'instruction', 'input' and 'output' must be text")
        return check_prompt("\n\n".join(texts)), row["output"]
    raise DataError(
        f"no demonstration: it has {', '.join(map(repr, row)) or 'no keys'}, but neither {prompt_field!r} and "
        f"{completion_field!r} (sft.completion_field), nor 'messages', 'conversations', or 'instruction' and 'output'"
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"a conversation must be a list of messages, not {type(value).__name__}")
    return value


def _sharegpt(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("from") not in SHAREGPT:
        raise DataError(f"a message of 'conversations' must have 'from' ({', '.join(SHAREGPT)}) and 'value'")
    return {"role": SHAREGPT[message["from"]], "content": message.get("value")}


def _conversation(name: str, messages: list[Any]) -> tuple[PromptContent, Turns]:
    checked = check_messages(messages)
    first = next((place for place, message in enumerate(checked) if message["role"] == "assistant"), None)
    if not first:
        raise DataError(f"field {name!r} has no message of the assistant" + ("" if first is None else " after another"))
    return as_content(checked[:first]), _turns(name, checked[first:])


def _turns(name: str, turns: tuple[Message, ...]) -> Turns:
    if turns[0]["role"] != "assistant" or turns[-1]["role"] != "assistant":
        raise DataError(f"field {name!r} must begin and end with the assistant after the prompt")
    if not all(turn["content"].strip() for turn in turns if turn["role"] == "assistant"):
        raise DataError(f"field {name!r} has an empty message of the assistant")
    return turns[0]["content"] if len(turns) == 1 else turns


def ended(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of completions, each ended by the end-of-sequence token.

    Raises:
        DataError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token, so a model could not learn to stop")
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [[*tokens, tokenizer.eos_token_id] for tokens in encoded]


def demonstration_encoder(processor: DataProcessor, source: str | list[str], seed: int) -> Encode:
    """Tokenizes demonstrations.

    Args:
        processor: of the prompts.
        source: `data.train` or `data.eval`; a generator writes its own demonstrations.
        seed: with the prompt's id, of what chance decides.
    """
    own = find_demonstrator(source) if is_generator(source) else None

    def turns_of(prompt_id: str, sample: Sample) -> Turns:
        if own is None:
            turns: Turns = sample.columns[TURNS]
            return turns
        return own(random.Random(f"{seed}/{prompt_id}"), {**sample.columns, "ground_truth": sample.ground_truth})

    def encode(items: Items) -> list[list[Example]]:
        prompts = processor.within_limit([sample for _, sample in items], kept=is_generator(source))
        turns = [turns_of(prompt_id, sample) for prompt_id, sample in items]
        texts = iter(ended([text for text in turns if isinstance(text, str)], processor.tokenizer))
        found: list[list[Example]] = []
        for (_, sample), prompt, said in zip(items, prompts, turns, strict=True):
            tokens = next(texts) if isinstance(said, str) else []
            if prompt is None:
                found.append([])
            elif isinstance(said, str):
                found.append([demonstration(prompt, tokens)])
            else:
                found.append([_conversation_tokens(sample, prompt, said, processor)])
        return found

    return encode


def _conversation_tokens(
    sample: Sample, prompt: Sequence[int], turns: Sequence[Message], processor: DataProcessor
) -> Example:
    """A conversation of several turns: each of the assistant's as it would have been sampled, then what the chat
    template puts between it and the assistant's next one.

    Raises:
        DataError: the template writes a conversation otherwise once it goes on, so the tokens would not be those that
            the model sees in use.
    """
    tokenizer, eos = processor.tokenizer, processor.tokenizer.eos_token or ""
    messages: list[Message] = (
        [*sample.prompt] if not isinstance(sample.prompt, str) else [Message(role="user", content=sample.prompt)]
    )
    tokens, learned = [*prompt], [False] * len(prompt)
    text = processor.rendered(messages, sample.sample_id)
    for place, turn in enumerate(turns):
        messages.append(turn)
        if turn["role"] != "assistant":
            continue
        said = ended([turn["content"]], tokenizer)[0]
        tokens, learned = tokens + said, learned + [True] * len(said)
        text += turn["content"]
        following = turns[place + 1 :]
        until = next((i for i, later in enumerate(following) if later["role"] == "assistant"), None)
        if until is None:
            break
        longer = processor.rendered([*messages, *following[:until]], sample.sample_id)
        if not longer.startswith(text):
            raise DataError(
                f"{sample.sample_id}: the chat template writes earlier turns otherwise once a conversation goes on; "
                "give each of the assistant's turns as a row of its own"
            )
        between = tokenizer(longer[len(text) :].removeprefix(eos), add_special_tokens=False)["input_ids"]
        tokens, learned, text = tokens + between, learned + [False] * len(between), longer
    return Example(tokens, learned)
