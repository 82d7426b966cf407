"""Rows to problems of offline data: a prompt, and completions with scores.

Layouts of demonstrations, recognised by their fields:

- `prompt` and `completion`: text, or lists of messages (TRL's prompt-completion rows);
- `messages`: a conversation (TRL's conversational rows), or `conversations` with `from` and `value` (ShareGPT);
- `instruction`, `input` (may be empty) and `output` (Alpaca), with optional `system` and `history`;
- `text` alone: the whole text is trained, and the end-of-sequence token behind it (TRL's rows of text). Its prompt is
  empty, which no other row's is;
- `input_ids`: the tokens of the whole row, with optional `labels`: the token again, or -100 where it is not trained.

The assistant's messages are trained, from its first one after the prompt to its last; other messages are not.
Messages keep their other keys (calls, thoughts) for the chat template. In lists of messages, one with the role
`environment` is an environment's reply within the assistant's turn (`Reply`): its text follows without the template.

An optional column `tools` has the JSON schemas of the tools that the chat template shows: a list, or its JSON.

Layouts of preferences:

- `prompt`, `chosen`, `rejected`, each text; or `prompt` a list of messages and the others its assistant's turns; in
  place of `prompt` also `conversations` (ShareGPT), with a message in each of the others, or `instruction` and
  `input`;
- `chosen` and `rejected` alone, which share their beginning (Anthropic HH's texts, or conversations);
- HuggingFaceH4/ultrafeedback_binarized: `prompt` is text, `chosen` and `rejected` are whole conversations;
- openbmb/UltraFeedback: `instruction` and `completions`, of which the best and the worst are used;
- `prompt`, `completion`, `label`: one completion, good (true) or bad.

An optional column `margin`, or `score_chosen` and `score_rejected`, has the margin of the preference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from atomrl.common.errors import reraise_as
from atomrl.data.columns import TEMPLATE_KWARGS, check_used, images_of, template_kwargs, with_places, with_system
from atomrl.data.conversations import common_prefix, content_fields, is_trained
from atomrl.data.files import DataError
from atomrl.data.messages import COMPLETIONS, ROLES, TOOLS, PromptContent, check_messages, check_prompt, check_tools
from atomrl.data.problems import ENVIRONMENT, Convert, Scored, missing
from atomrl.types import Message, Problem

if TYPE_CHECKING:
    from atomrl.config import PreferenceConfig


CONVERSATION = "conversation"
"""Column of a demonstration that is a whole conversation, without a completion of its own."""
TOKENS = "input_ids"
"""Column with the tokens of a row. In a problem: the tokens, and for each whether it is trained."""
NOT_TRAINED = -100
"""Value of `labels` for a token that is not trained, as in transformers."""
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

SHAREGPT |= {"function_call": "assistant", "observation": "tool", "function_response": "tool", "tool": "tool"}

HH_TURN = "\n\nAssistant:"
TURNS = (*ROLES, ENVIRONMENT)
ALLOWED_AROUND_ENVIRONMENT = ("assistant", ENVIRONMENT), (ENVIRONMENT, "assistant")


def demonstration_reader(prompt_field: str, completion_field: str) -> Convert:
    """Return a converter of rows to demonstrations (`demonstrated`)."""

    def read(place: str, row: Mapping[str, Any]) -> Problem:
        if row.get(TOKENS) is not None:
            tokens = _tokens(row)
            text = " ".join(map(str, tokens[0]))  # names the row where equal rows are looked for
            columns = {COMPLETIONS: ((text, 0.0),), TOKENS: tokens}
            return Problem(problem_id=place, prompt="", ground_truth=None, columns=columns)
        source = None if row.get(completion_field) is not None else _conversation_column(row)
        used = [prompt_field, completion_field, *([] if source is None else [source])]
        prompt, completions = demonstrated(row, prompt_field, completion_field)
        sample = _sample(place, row, [*used, *(["text"] if prompt == "" else [])], prompt, completions)
        return sample if source is None else replace(sample, columns={**sample.columns, CONVERSATION: True})

    return read


def preference_reader(prompt_field: str, fields: PreferenceConfig) -> Convert:
    """Return a converter of rows to preferences (`preference`)."""
    used = prompt_field, fields.chosen_field, fields.rejected_field, fields.completion_field, fields.label_field

    def read(place: str, row: Mapping[str, Any]) -> Problem:
        source = () if row.get(prompt_field) is not None else ("conversations",)
        return _sample(place, row, [*used, *source], *preference(row, prompt_field, fields))

    return read


def _tokens(row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a row, and for each whether it is trained.

    Raises:
        DataError: they are no tokens, or the labels are other ones.
    """
    ids = row[TOKENS]
    labels = ids if row.get("labels") is None else row["labels"]
    if not isinstance(ids, list) or not ids or not all(isinstance(one, int) and one >= 0 for one in ids):
        raise DataError(f"field {TOKENS!r} must be a list of token ids")
    if not isinstance(labels, list) or len(labels) != len(ids):
        raise DataError(f"field 'labels' must be a list as long as {TOKENS!r}")
    if any(label not in (NOT_TRAINED, token) for token, label in zip(ids, labels, strict=True)):
        raise DataError(f"field 'labels' must repeat {TOKENS!r}, with {NOT_TRAINED} for tokens that are not trained")
    return ids, [label != NOT_TRAINED for label in labels]


def _conversation_column(row: Mapping[str, Any]) -> str | None:
    return next((name for name in ("conversations", "messages") if row.get(name) is not None), None)


def _sample(
    place: str, row: Mapping[str, Any], used: Sequence[str], prompt: PromptContent, completions: Scored
) -> Problem:
    messages = [turn for turns, _ in completions if not isinstance(turns, str) for turn in turns]
    images = images_of(row)
    prompt = with_system(row, with_places(prompt, images, messages))
    shown = [turns for turns, _ in completions if isinstance(turns, str)]
    shown += [str(dict(turn)[name]) for turn in messages for name in content_fields(turn)]
    given = [turn for turn in messages if turn["role"] != "assistant"]  # in a conversation's later turns
    check_used(row, [*used, TEMPLATE_KWARGS], prompt, "\n".join(shown), given)
    tools = check_tools(row.get(TOOLS))
    if "conversations" in row:  # ShareGPT's tools are bare function schemas
        tools = tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)
    columns: dict[str, Any] = {COMPLETIONS: completions} | ({TOOLS: tools} if tools else {})
    columns |= {TEMPLATE_KWARGS: variables} if (variables := template_kwargs(row)) else {}
    return Problem(problem_id=place, prompt=prompt, ground_truth=None, columns=columns, images=images)


def demonstrated(
    row: Mapping[str, Any], prompt_field: str = "prompt", completion_field: str = "completion"
) -> tuple[PromptContent, Scored]:
    """Split a demonstration into its prompt and its completion, with score 0.

    Raises:
        DataError: the row is invalid; without the place.

    Example:
        >>> demonstrated({"instruction": "Add.", "input": "2+2", "output": "4"})
        ('Add.\\n\\n2+2', (('4', 0.0),))
        >>> demonstrated({"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]})
        (({'role': 'user', 'content': '2+2='},), ((({'role': 'assistant', 'content': '4'},), 0.0),))
    """
    names = {name for name, value in row.items() if value is not None}
    if completion_field in names:
        if prompt_field not in names:
            raise missing(prompt_field, row, "data.prompt_field")
        prompt, turns = check_prompt(row[prompt_field]), _answer(completion_field, row[completion_field], several=True)
    elif name := _conversation_column(row):
        prompt, turns = _conversation(name, row[name])
    elif {"instruction", "output"} <= names:
        prompt, turns = _alpaca(row, "output")
    elif "text" in names:
        prompt, turns = "", _answer("text", row["text"])
        if not isinstance(turns, str):
            raise DataError("field 'text' must be text")
    else:
        raise DataError(
            f"not a demonstration: it has {', '.join(map(repr, row)) or 'no keys'}, but neither {prompt_field!r} and "
            f"{completion_field!r} (sft.completion_field), nor 'messages', 'conversations', 'instruction' and "
            "'output', 'text', or 'input_ids'"
        )
    return prompt, ((turns, 0.0),)


def _alpaca(row: Mapping[str, Any], output: str) -> tuple[PromptContent, PromptContent]:
    """Convert an Alpaca row to prompt and answer. Answers in the history are trained too, as in LLaMA-Factory."""
    question = _alpaca_prompt(row)
    if not isinstance(row[output], str) or not row[output]:
        raise DataError(f"field {output!r} must be text")
    if isinstance(question, str):
        return question, row[output]
    return _conversation("history", [*question, {"role": "assistant", "content": row[output]}])


def _alpaca_prompt(row: Mapping[str, Any]) -> PromptContent:
    """Return the question of an Alpaca row, after its history if there is one."""
    texts = [row[name] for name in ("instruction", "input") if row.get(name)]
    if not all(isinstance(text, str) for text in texts):
        raise DataError("fields 'instruction' and 'input' must be text")
    question, history = check_prompt("\n\n".join(texts)), row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise DataError("field 'history' must be a list of [question, answer] pairs")
    turns = [(role, text) for turn in history for role, text in zip(("user", "assistant"), turn, strict=True)]
    messages = [{"role": role, "content": text} for role, text in [*turns, ("user", question)]]
    return check_messages(messages, "field 'history'") if history else question


def _conversation(name: str, messages: Any) -> tuple[PromptContent, PromptContent]:
    checked = check_messages(_as_messages(name, messages), f"field {name!r}", TURNS)
    first = next((place for place, message in enumerate(checked) if message["role"] == "assistant"), None)
    if not first:
        raise DataError(f"field {name!r} has no assistant message" + ("" if first is None else " after another"))
    if any(message["role"] == ENVIRONMENT for message in checked[:first]):
        raise DataError(f"field {name!r}: environment messages must be between two assistant messages")
    return checked[:first], _turns(name, checked[first:])


def written(messages: Sequence[Message]) -> PromptContent:
    """Validate a demonstration that a generator wrote as messages, like one in a file.

    Raises:
        DataError: the messages are invalid.
    """
    return _answer("completion", messages, several=True)


def _as_messages(name: str, messages: Any) -> Any:
    """Convert ShareGPT messages to chat messages; others are returned unchanged."""
    if not isinstance(messages, list) or not messages:
        return messages
    if name == "conversations" or any(isinstance(message, Mapping) and "from" in message for message in messages):
        return [_sharegpt(name, message) for message in messages]
    return messages


def _sharegpt(name: str, message: Any) -> dict[str, Any]:
    if isinstance(message, Mapping) and "role" in message:
        return dict(message)
    if not isinstance(message, Mapping) or message.get("from") not in SHAREGPT:
        raise DataError(f"a message of {name!r} must have 'from' ({', '.join(SHAREGPT)}) and 'value'")
    converted = {key: value for key, value in message.items() if key not in ("from", "value")}
    converted |= {"role": SHAREGPT[message["from"]], "content": message.get("value")}
    if message["from"] != "function_call":
        return converted
    with reraise_as(
        DataError, f"field {name!r}: the value of a 'function_call' must be the JSON of calls", ValueError, TypeError
    ):
        calls = json.loads(message["value"])
    return converted | {"content": "", "tool_calls": [
        {"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])
    ]}  # fmt: skip


def preference(row: Mapping[str, Any], prompt_field: str, fields: PreferenceConfig) -> tuple[PromptContent, Scored]:
    """Split a preference into its prompt and its completions with scores.

    Raises:
        DataError: the row is invalid; without the place.

    Example:
        >>> from atomrl.config import PreferenceConfig
        >>> preference({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "prompt", PreferenceConfig())
        ('2+2=', (('4', 0.0), ('5', 0.0)))
    """
    names = {name for name, value in row.items() if value is not None}
    if {fields.chosen_field, fields.rejected_field} & names:
        prompt, chosen, rejected = _pair(row, prompt_field, fields)
        scores = _scores(row)
    elif {"instruction", "completions"} <= names:
        prompt = _alpaca_prompt(row)
        chosen, rejected, scores = _best_and_worst(row["completions"])
    elif {fields.completion_field, fields.label_field} & names:
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
            f"not a preference: it has {', '.join(map(repr, row)) or 'no keys'}, but neither {fields.chosen_field!r} "
            f"and {fields.rejected_field!r}, nor 'instruction' and 'completions', nor {fields.completion_field!r} and "
            f"{fields.label_field!r}"
        )
    if chosen == rejected:
        raise DataError("the chosen and the rejected completion are the same")
    return prompt, ((chosen, scores[0]), (rejected, scores[1]))


def _pair(row: Mapping[str, Any], prompt_field: str, fields: PreferenceConfig) -> Sequence[PromptContent]:
    """Return prompt, chosen and rejected."""
    names = fields.chosen_field, fields.rejected_field
    sides = [
        [value] if isinstance(value := row.get(name), Mapping) and {"role", "from"} & value.keys() else value
        for name in names
    ]
    for name, value in zip(names, sides, strict=True):
        if not isinstance(value, str | list) or not value:
            raise DataError(f"field {name!r} " + ("is missing or empty" if not value else "is neither text nor a list"))
    if isinstance(sides[0], str) != isinstance(sides[1], str):
        raise DataError(f"of {names[0]!r} and {names[1]!r} one is text, the other a list of messages")
    # With a prompt of their own, both sides are answers; without one, the prompt is what both conversations share.
    no_prompt = all(isinstance(side, str) or _begins_with_answer(side) for side in sides)
    prompt = _pair_prompt(row, prompt_field, names[0], no_prompt)
    if isinstance(prompt, tuple) or (prompt is not None and no_prompt):
        return prompt, *(_answer(name, value) for name, value in zip(names, sides, strict=True))
    if isinstance(sides[0], str) and isinstance(sides[1], str):
        return _split_texts(sides[0], sides[1])
    turns = [
        check_messages(_as_messages(name, value), f"field {name!r}") for name, value in zip(names, sides, strict=True)
    ]
    shared = common_prefix(*turns)
    if shared == min(map(len, turns)):
        raise DataError(f"{names[0]!r} and {names[1]!r} are the same, or one is a prefix of the other")
    if not shared:
        raise DataError(f"{names[0]!r} and {names[1]!r} have no common prompt (their first messages differ)")
    answers = [_turns(name, rest[shared:], several=False) for name, rest in zip(names, turns, strict=True)]
    conversation = turns[0][:shared]
    if prompt is not None and all(message["content"].strip() != prompt.strip() for message in conversation):
        raise DataError(f"{prompt_field!r} is not among the messages that {names[0]!r} and {names[1]!r} share")
    return conversation, *answers


def _begins_with_answer(messages: Any) -> bool:
    first = messages[0]
    return isinstance(first, Mapping) and first.get("role", SHAREGPT.get(first.get("from", ""))) == "assistant"


def _pair_prompt(row: Mapping[str, Any], prompt_field: str, answer: str, no_prompt: bool) -> PromptContent | None:
    """Return the prompt of a pair from its own column; None if there is none.

    Args:
        answer: name of the column with one of the answers.
        no_prompt: the answers do not repeat the prompt, so it may be in another column (ShareGPT's, Alpaca's).
    """
    if row.get(prompt_field) is not None:
        return check_prompt(row[prompt_field])
    if no_prompt and row.get("conversations") is not None:
        return check_messages(_as_messages("conversations", row["conversations"]), "field 'conversations'")
    return _alpaca_prompt(row) if no_prompt and row.get("instruction") else None


def _split_texts(chosen: str, rejected: str) -> tuple[str, PromptContent, PromptContent]:
    """Split two texts after their shared prompt: at the last shared `Assistant:`, else at the last shared space."""
    end = common_prefix(chosen, rejected)
    turn = chosen.rfind(HH_TURN, 0, end)
    if turn >= 0:
        end = turn + len(HH_TURN)
    else:
        # the space belongs to the completion: tokenizers join it to the word behind it
        end = max((place for place in range(end) if chosen[place].isspace()), default=0)
    if chosen != rejected and not chosen[:end].strip():
        raise DataError("no prompt, and the chosen and the rejected text have no common prefix")
    return chosen[:end], _answer("chosen", chosen[end:]), _answer("rejected", rejected[end:])


def _answer(name: str, value: Any, several: bool = False) -> PromptContent:
    """Validate a completion: text or one assistant message; with `several` also messages from its first to its last."""
    value = [value] if isinstance(value, Mapping) and {"role", "from"} & value.keys() else value
    if isinstance(value, list):
        checked = check_messages(_as_messages(name, value), f"field {name!r}", TURNS if several else ROLES)
        return _turns(name, checked, several)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"field {name!r} " + ("is empty" if isinstance(value, str) else "must be text or messages"))
    return value


def _turns(name: str, turns: tuple[Message, ...], several: bool = True) -> PromptContent:
    roles = [turn["role"] for turn in turns]
    if roles[:1] + roles[-1:] != ["assistant"] * 2 or (len(turns) > 1 and not several):
        rule = "begin and end with an assistant message" if several else "end with one assistant message"
        raise DataError(f"field {name!r} must {rule} after the prompt, not {', '.join(roles) or 'nothing'}")
    if not several and not is_trained(turns[0]):
        raise DataError(f"field {name!r} has an answer of weight 0, which cannot be compared: remove the row")
    if not all(content_fields(turn) for turn in turns if turn["role"] == "assistant"):
        raise DataError(f"field {name!r} has an empty assistant message")
    pairs = set(pairwise(roles))
    if any(ENVIRONMENT in pair and pair not in ALLOWED_AROUND_ENVIRONMENT for pair in pairs):
        raise DataError(f"field {name!r}: environment messages must be between two assistant messages")
    return turns


def _scores(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the scores of chosen and rejected: (margin, 0), else the row's scores, else (0, 0)."""
    if row.get("margin") is not None:
        margin = _number("margin", row["margin"])
        if margin < 0:
            raise DataError(f"field 'margin' is {margin:g}: the chosen completion must not have the lower score")
        return margin, 0.0
    names = "score_chosen", "score_rejected"
    if absent := [name for name in names if row.get(name) is None]:
        if len(absent) == 1:
            raise DataError(f"field {absent[0]!r} is missing; a margin needs both scores, or neither")
        return 0.0, 0.0
    chosen, rejected = (_number(name, row[name]) for name in names)
    if chosen < rejected:
        raise DataError(
            f"score_chosen={chosen:g}, score_rejected={rejected:g}: the chosen completion must not have the lower score"
        )
    return chosen, rejected


def _best_and_worst(completions: Any) -> tuple[PromptContent, PromptContent, tuple[float, float]]:
    if not isinstance(completions, list) or not all(isinstance(item, Mapping) for item in completions):
        raise DataError("field 'completions' must be a list of objects with response and overall_score")
    scores = [
        _number(f"completions[{place}].overall_score", item.get("overall_score"))
        for place, item in enumerate(completions)
    ]
    if len(scores) < 2:
        raise DataError(f"field 'completions' has {len(scores)} items; a preference needs two")
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] == scores[worst]:
        raise DataError(f"all completions have the same overall_score, {scores[best]:g}")
    texts = [_answer(f"completions[{at}].response", completions[at].get("response")) for at in (best, worst)]
    return texts[0], texts[1], (scores[best], scores[worst])


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"field {name!r} must be a number, not {value!r}")
    return float(value)
