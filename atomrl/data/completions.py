"""Rows with demonstrations or preferences become samples: a prompt, and completions with scores.

Layouts of demonstrations, recognised by their fields:

- `prompt` and `completion`: text, or lists of messages (TRL's prompt-completion rows);
- `messages`: a conversation (TRL's conversational rows), or `conversations` with `from` and `value` (ShareGPT);
- `instruction`, `input` (may be empty) and `output` (Alpaca), after `system` and `history`, if there are any.

What the assistant says is trained on, from its first message after the prompt to the last; what others say is not.
Messages keep all that they have (calls, thoughts), for the chat template to write. In lists of messages, one with the
role `environment` is what an environment answers within the assistant's turn (`Reply`): its text follows as it is.

A column `tools`, in all layouts, has the JSON schemas of the tools that the chat template shows: a list, or its JSON.

Layouts of preferences:

- `prompt`, `chosen`, `rejected`, each text; or `prompt` a list of messages and the others its assistant's turns; in
  place of `prompt` also `conversations` (ShareGPT), with a message in each of the others, or `instruction` and `input`;
- `chosen` and `rejected` alone, which share their beginning (Anthropic HH's texts, or conversations);
- HuggingFaceH4/ultrafeedback_binarized: `prompt` is text, `chosen` and `rejected` are whole conversations;
- openbmb/UltraFeedback: `instruction` and `completions`, of which the best and the worst are taken;
- `prompt`, `completion`, `label`: one completion, good (true) or not.

A column `margin`, or `score_chosen` and `score_rejected`, says by how much a completion is better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from atomrl.data.conversations import said_in
from atomrl.data.problems import DataError
from atomrl.data.sources import (
    COMPLETIONS,
    ENVIRONMENT,
    ROLES,
    TOOLS,
    Convert,
    PromptContent,
    Scored,
    check_messages,
    check_prompt,
    check_tools,
    missing,
)
from atomrl.hints import said_as
from atomrl.types import Message, Sample

if TYPE_CHECKING:
    from atomrl.config import PreferenceConfig

SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAREGPT |= {"function_call": "assistant", "observation": "tool", "function_response": "tool", "tool": "tool"}
HH_TURN = "\n\nAssistant:"
TURNS = (*ROLES, ENVIRONMENT)
ANSWERED = ("assistant", ENVIRONMENT), (ENVIRONMENT, "assistant")


def demonstration_reader(prompt_field: str, completion_field: str) -> Convert:
    """Reads a row as a demonstration (`demonstrated`)."""
    return lambda place, row: _sample(place, row, *demonstrated(row, prompt_field, completion_field))


def preference_reader(prompt_field: str, fields: PreferenceConfig) -> Convert:
    """Reads a row as a preference (`preference`)."""
    return lambda place, row: _sample(place, row, *preference(row, prompt_field, fields))


def _sample(place: str, row: Mapping[str, Any], prompt: PromptContent, completions: Scored) -> Sample:
    tools = check_tools(row.get(TOOLS))
    if "conversations" in row:  # ShareGPT's are without what is around them
        tools = tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)
    columns = {COMPLETIONS: completions} | ({TOOLS: tools} if tools else {})
    return Sample(sample_id=place, prompt=prompt, ground_truth=None, columns=columns)


def demonstrated(
    row: Mapping[str, Any], prompt_field: str = "prompt", completion_field: str = "completion"
) -> tuple[PromptContent, Scored]:
    """The prompt of a row, and what follows it, with a score of 0.

    Raises:
        DataError: what is wrong with it, without the place.

    Example:
        >>> demonstrated({"instruction": "Add.", "input": "2+2", "output": "4"})
        ('Add.\\n\\n2+2', (('4', 0.0),))
        >>> demonstrated({"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]})
        (({'role': 'user', 'content': '2+2='},), ((({'role': 'assistant', 'content': '4'},), 0.0),))
    """
    given = {name for name, value in row.items() if value is not None}
    if completion_field in given:
        if prompt_field not in given:
            raise missing(prompt_field, row, "data.prompt_field")
        prompt, turns = check_prompt(row[prompt_field]), _answer(completion_field, row[completion_field], several=True)
    elif name := next((name for name in ("conversations", "messages") if name in given), None):
        prompt, turns = _conversation(name, row[name], row)
    elif {"instruction", "output"} <= given:
        prompt, turns = _alpaca(row, "output")
    else:
        raise DataError(
            f"no demonstration: it has {', '.join(map(repr, row)) or 'no keys'}, but neither {prompt_field!r} and "
            f"{completion_field!r} (sft.completion_field), nor 'messages', 'conversations', or 'instruction' and "
            "'output'"
        )
    return prompt, ((turns, 0.0),)


def _alpaca(row: Mapping[str, Any], output: str) -> tuple[PromptContent, PromptContent]:
    """Instruction and input, and the output; after a history, whose answers are trained too, as LLaMA-Factory does."""
    texts = [row[name] for name in ("instruction", "input") if row.get(name)]
    if not all(isinstance(text, str) for text in [*texts, row[output]]) or not row[output]:
        raise DataError(f"fields 'instruction', 'input' and {output!r} must be text")
    asked, history = check_prompt("\n\n".join(texts)), row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise DataError("field 'history' must be a list of pairs: what was asked and what was answered")
    messages = [
        {"role": role, "content": text}
        for turn in [*history, (asked, row[output])]
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    if system := _system(row):
        messages.insert(0, system)
    if len(messages) == 2:
        return asked, row[output]
    if not history:
        return check_prompt(messages[:-1]), row[output]
    return _conversation("history", messages, {})


def _system(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The system prompt that stands beside a conversation (LLaMA-Factory)."""
    text = row.get("system")
    if text is not None and not isinstance(text, str):
        raise DataError("field 'system' must be text")
    return {"role": "system", "content": text} if text and text.strip() else None


def _conversation(name: str, messages: Any, row: Mapping[str, Any]) -> tuple[PromptContent, PromptContent]:
    checked = check_messages(_listed(name, messages, row), f"field {name!r}", TURNS)
    first = next((place for place, message in enumerate(checked) if message["role"] == "assistant"), None)
    if not first:
        raise DataError(f"field {name!r} has no message of the assistant" + ("" if first is None else " after another"))
    if any(message["role"] == ENVIRONMENT for message in checked[:first]):
        raise DataError(f"field {name!r}: what the environment says stands between two messages of the assistant")
    return checked[:first], _turns(name, checked[first:])


def written(messages: Sequence[Message]) -> PromptContent:
    """A demonstration that a generator has written as messages, checked as one of a file.

    Raises:
        DataError: what is wrong with it.
    """
    return _answer("completion", messages, several=True)


def _listed(name: str, messages: Any, row: Mapping[str, Any]) -> Any:
    """A list of messages, which ShareGPT writes in its own way, with the system prompt beside it."""
    if not isinstance(messages, list) or not messages:
        return messages
    if name == "conversations" or any(isinstance(message, Mapping) and "from" in message for message in messages):
        messages = [_sharegpt(name, message) for message in messages]
        if (system := _system(row)) and messages[0]["role"] != "system":
            return [system, *messages]
    return messages


def _sharegpt(name: str, message: Any) -> dict[str, Any]:
    if isinstance(message, Mapping) and "role" in message:
        return dict(message)
    if not isinstance(message, Mapping) or message.get("from") not in SHAREGPT:
        raise DataError(f"a message of {name!r} must have 'from' ({', '.join(SHAREGPT)}) and 'value'")
    found = {key: value for key, value in message.items() if key not in ("from", "value")}
    found |= {"role": SHAREGPT[message["from"]], "content": message.get("value")}
    if message["from"] != "function_call":
        return found
    with said_as(
        DataError, f"field {name!r}: the value of a 'function_call' must be the JSON of calls", ValueError, TypeError
    ):
        calls = json.loads(message["value"])
    return found | {"content": "", "tool_calls": [
        {"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])
    ]}  # fmt: skip


def preference(row: Mapping[str, Any], prompt_field: str, fields: PreferenceConfig) -> tuple[PromptContent, Scored]:
    """The prompt and the completions of a row.

    Raises:
        DataError: what is wrong with it, without the place.

    Example:
        >>> from atomrl.config import PreferenceConfig
        >>> preference({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "prompt", PreferenceConfig())
        ('2+2=', (('4', 1.0), ('5', 0.0)))
    """
    given = {name for name, value in row.items() if value is not None}
    if {fields.chosen_field, fields.rejected_field} & given:
        prompt, chosen, rejected = _pair(row, prompt_field, fields)
        scores = _scores(row)
    elif {"instruction", "completions"} <= given:
        prompt = check_prompt(row["instruction"])
        chosen, rejected, scores = _best_and_worst(row["completions"])
    elif {fields.completion_field, fields.label_field} & given:
        label = row.get(fields.label_field)
        for name, key in ((fields.label_field, "preference.label_field"), (prompt_field, "data.prompt_field")):
            if row.get(name) is None:
                raise missing(name, row, key)
        if not isinstance(label, bool):
            raise DataError(f"field {fields.label_field!r} must be true or false, not {label!r}")
        completion = _answer(fields.completion_field, row.get(fields.completion_field))
        return check_prompt(row[prompt_field]), ((completion, 1.0 if label else -1.0),)
    else:
        raise DataError(
            f"no preference: it has {', '.join(map(repr, row)) or 'no keys'}, but neither {fields.chosen_field!r} and "
            f"{fields.rejected_field!r}, nor 'instruction' and 'completions', nor {fields.completion_field!r} and "
            f"{fields.label_field!r}"
        )
    if chosen == rejected:
        raise DataError("the chosen and the rejected completion are the same")
    return prompt, ((chosen, scores[0]), (rejected, scores[1]))


def _pair(row: Mapping[str, Any], prompt_field: str, fields: PreferenceConfig) -> Sequence[PromptContent]:
    """Prompt, chosen and rejected."""
    names = fields.chosen_field, fields.rejected_field
    sides = [
        [value] if isinstance(value := row.get(name), Mapping) and {"role", "from"} & value.keys() else value
        for name in names
    ]
    for name, value in zip(names, sides, strict=True):
        if not isinstance(value, str | list) or not value:
            raise DataError(f"field {name!r} " + ("is missing or empty" if not value else "is no text and no list"))
    if isinstance(sides[0], str) != isinstance(sides[1], str):
        raise DataError(f"of {names[0]!r} and {names[1]!r} one is text and the other a list of messages")
    alone = all(isinstance(side, str) or _begins_with_answer(side) for side in sides)
    prompt = _asked(row, prompt_field, names[0], alone)
    if isinstance(prompt, tuple) or (prompt is not None and alone):
        return prompt, *(_answer(name, value) for name, value in zip(names, sides, strict=True))
    if isinstance(sides[0], str) and isinstance(sides[1], str):
        return _shared_text(sides[0], sides[1])
    turns = [
        check_messages(_listed(name, value, row), f"field {name!r}") for name, value in zip(names, sides, strict=True)
    ]
    shared = _shared(*turns)
    if shared == min(map(len, turns)):
        raise DataError(f"{names[0]!r} and {names[1]!r} are the same, or one is the beginning of the other")
    if not shared:
        raise DataError(f"{names[0]!r} and {names[1]!r} share no prompt (their first messages differ)")
    answers = [_turns(name, rest[shared:], several=False) for name, rest in zip(names, turns, strict=True)]
    conversation = turns[0][:shared]
    if prompt is not None and all(message["content"].strip() != prompt.strip() for message in conversation):
        raise DataError(f"{prompt_field!r} is none of the messages that {names[0]!r} and {names[1]!r} share")
    return conversation, *answers


def _begins_with_answer(messages: Any) -> bool:
    first = messages[0]
    return isinstance(first, Mapping) and first.get("role", SHAREGPT.get(first.get("from", ""))) == "assistant"


def _asked(row: Mapping[str, Any], prompt_field: str, answer: str, alone: bool) -> PromptContent | None:
    """The prompt of a pair that stands by itself.

    Args:
        answer: a field with one of the answers.
        alone: these are without the prompt, which may then have another name.
    """
    if row.get(prompt_field) is not None:
        return check_prompt(row[prompt_field])
    if alone and row.get("conversations") is not None:
        return check_messages(_listed("conversations", row["conversations"], row), "field 'conversations'")
    return _alpaca(row, answer)[0] if alone and row.get("instruction") else None


def _shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items they begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _shared_text(chosen: str, rejected: str) -> tuple[str, PromptContent, PromptContent]:
    """Up to the assistant's turn where the texts have such marks, else up to the last space that they share."""
    end = _shared(chosen, rejected)
    turn = chosen.rfind(HH_TURN, 0, end)
    if turn >= 0:
        end = turn + len(HH_TURN)
    else:
        # the space belongs to the completion: tokenizers join it to the word behind it
        end = max((place for place in range(end) if chosen[place].isspace()), default=0)
    if chosen != rejected and not chosen[:end].strip():
        raise DataError("there is no prompt, and the chosen and the rejected text share no beginning")
    return chosen[:end], _answer("chosen", chosen[end:]), _answer("rejected", rejected[end:])


def _answer(name: str, value: Any, several: bool = False) -> PromptContent:
    """What the assistant says: text, or its message (`several`: or messages from its first to its last)."""
    value = [value] if isinstance(value, Mapping) and {"role", "from"} & value.keys() else value
    if isinstance(value, list):
        checked = check_messages(_listed(name, value, {}), f"field {name!r}", TURNS if several else ROLES)
        return _turns(name, checked, several)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"field {name!r} " + ("is empty" if isinstance(value, str) else "must be text or messages"))
    return value


def _turns(name: str, turns: tuple[Message, ...], several: bool = True) -> PromptContent:
    roles = [turn["role"] for turn in turns]
    if roles[:1] + roles[-1:] != ["assistant"] * 2 or (len(turns) > 1 and not several):
        what = "begin and end with the assistant" if several else "end in one message of the assistant"
        raise DataError(f"field {name!r} must {what} after the prompt, not {', '.join(roles) or 'nothing'}")
    if not all(said_in(turn) for turn in turns if turn["role"] == "assistant"):
        raise DataError(f"field {name!r} has an empty message of the assistant")
    pairs = set(pairwise(roles))
    if any(ENVIRONMENT in pair and pair not in ANSWERED for pair in pairs):
        raise DataError(f"field {name!r}: what the environment says stands between two messages of the assistant")
    return turns


def _scores(row: Mapping[str, Any]) -> tuple[float, float]:
    """(score, score), or (margin, 0), or (1, 0)."""
    if row.get("margin") is not None:
        margin = _number("margin", row["margin"])
        if margin <= 0:
            raise DataError(f"field 'margin' is {margin:g}: the chosen completion must be the better one")
        return margin, 0.0
    if row.get("score_chosen") is None or row.get("score_rejected") is None:
        return 1.0, 0.0
    chosen, rejected = (_number(name, row[name]) for name in ("score_chosen", "score_rejected"))
    if chosen <= rejected:
        raise DataError(f"score_chosen is {chosen:g} and score_rejected {rejected:g}: no preference for the chosen one")
    return chosen, rejected


def _best_and_worst(completions: Any) -> tuple[PromptContent, PromptContent, tuple[float, float]]:
    if not isinstance(completions, list) or not all(isinstance(item, Mapping) for item in completions):
        raise DataError("field 'completions' must be a list of objects with response and overall_score")
    scores = [
        _number(f"completions[{place}].overall_score", item.get("overall_score"))
        for place, item in enumerate(completions)
    ]
    if len(scores) < 2:
        raise DataError(f"field 'completions' holds {len(scores)}; a preference needs two")
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] == scores[worst]:
        raise DataError(f"all completions have an overall_score of {scores[best]:g}: no preference")
    texts = [_answer(f"completions[{at}].response", completions[at].get("response")) for at in (best, worst)]
    return texts[0], texts[1], (scores[best], scores[worst])


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"field {name!r} must be a number, not {value!r}")
    return float(value)
