"""Rows with preferences become samples: a prompt, and completions with scores.

Layouts, recognised by their fields:

- `prompt`, `chosen`, `rejected`, each text; or `prompt` a list of messages and the others its assistant's turns;
- `chosen` and `rejected` alone, which share their beginning (Anthropic HH's texts, or conversations);
- HuggingFaceH4/ultrafeedback_binarized: `prompt` is text, `chosen` and `rejected` are whole conversations;
- openbmb/UltraFeedback: `instruction` and `completions`, of which the best and the worst are taken;
- `prompt`, `completion`, `label`: one completion, good (true) or not.

A column `margin`, or `score_chosen` and `score_rejected`, says by how much a completion is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from atomrl.data.problems import DataError
from atomrl.data.sources import (
    Convert,
    LoadReport,
    PromptContent,
    Scored,
    as_content,
    check_messages,
    check_prompt,
    completions_reader,
    load_samples,
)
from atomrl.types import Message

if TYPE_CHECKING:
    from atomrl.config import DataConfig, PreferenceConfig

HH_TURN = "\n\nAssistant:"


def load_preferences(
    config: DataConfig, fields: PreferenceConfig, split: Literal["train", "eval"] = "train", seed: int = 0
) -> LoadReport:
    """The preferences of one split, as `load_samples` loads problems.

    Args:
        fields: what the columns are called.
        seed: decides what a generator draws.

    Returns:
        Samples with their completions; none where `split` is `eval` and `config.eval` is None.

    Raises:
        DataError: as `load_samples`; or the generator writes no pairs.
    """
    return load_samples(config, split, seed, preference_reader(config.prompt_field, fields), "pair")


def preference_reader(prompt_field: str, fields: PreferenceConfig) -> Convert:
    """Reads a row as a preference (`preference`)."""
    return completions_reader(partial(preference, prompt_field=prompt_field, fields=fields))


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
        prompt, completion, good = _labelled(row, prompt_field, fields)
        return prompt, ((completion, 1.0 if good else -1.0),)
    else:
        raise DataError(
            f"no preference: it has {', '.join(map(repr, row)) or 'no keys'}, but neither {fields.chosen_field!r} and "
            f"{fields.rejected_field!r}, nor 'instruction' and 'completions', nor {fields.completion_field!r} and "
            f"{fields.label_field!r}"
        )
    if chosen == rejected:
        raise DataError("the chosen and the rejected completion are the same")
    return prompt, ((chosen, scores[0]), (rejected, scores[1]))


def _pair(row: Mapping[str, Any], prompt_field: str, fields: PreferenceConfig) -> tuple[PromptContent, str, str]:
    names = fields.chosen_field, fields.rejected_field
    chosen, rejected = (row.get(name) for name in names)
    for name, value in zip(names, (chosen, rejected), strict=True):
        if not isinstance(value, str | list) or not value:
            raise DataError(f"field {name!r} " + ("is missing or empty" if not value else "is no text and no list"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"of {names[0]!r} and {names[1]!r} one is text and the other a list of messages")
    prompt = row.get(prompt_field)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            return _shared_text(chosen, rejected)
        return check_prompt(prompt), _answer(names[0], chosen), _answer(names[1], rejected)
    turns = [_messages(name, row[name]) for name in names]
    if isinstance(prompt, list):
        return check_prompt(prompt), _only_turn(names[0], turns[0]), _only_turn(names[1], turns[1])
    shared = _shared(*turns)
    if shared == min(map(len, turns)):
        raise DataError(f"{names[0]!r} and {names[1]!r} are the same, or one is the beginning of the other")
    if not shared:
        raise DataError(f"{names[0]!r} and {names[1]!r} share no prompt (their first messages differ)")
    answers = [_only_turn(name, rest[shared:]) for name, rest in zip(names, turns, strict=True)]
    conversation = turns[0][:shared]
    if prompt is not None:
        asked = check_prompt(prompt)
        if all(message["content"].strip() != str(asked).strip() for message in conversation):
            raise DataError(f"{prompt_field!r} is none of the messages that {names[0]!r} and {names[1]!r} share")
    return as_content(conversation), answers[0], answers[1]


def _shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items they begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _messages(name: str, value: Any) -> tuple[Message, ...]:
    try:
        checked = check_messages(value)
    except DataError as error:
        raise DataError(f"field {name!r}: {str(error).removeprefix('the prompt ')}") from None
    return tuple(Message(role=item["role"], content=item["content"]) for item in checked)


def _only_turn(name: str, turns: tuple[Message, ...]) -> str:
    if len(turns) != 1 or turns[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in turns) or "nothing"
        raise DataError(f"field {name!r} must end in one message of the assistant after the prompt, not {roles}")
    return _answer(name, turns[0]["content"])


def _answer(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"field {name!r} " + ("is empty" if isinstance(value, str) else "must be text"))
    return value


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
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


def _best_and_worst(completions: Any) -> tuple[str, str, tuple[float, float]]:
    if not isinstance(completions, list) or not all(isinstance(item, Mapping) for item in completions):
        raise DataError("field 'completions' must be a list of objects with response and overall_score")
    scored = [
        (_number(f"completions[{place}].overall_score", item.get("overall_score")), place, item)
        for place, item in enumerate(completions)
    ]
    if len(scored) < 2:
        raise DataError(f"field 'completions' holds {len(scored)}; a preference needs two")
    worst, best = min(scored, key=lambda item: item[:2]), max(scored, key=lambda item: (item[0], -item[1]))
    if best[0] == worst[0]:
        raise DataError(f"all completions have an overall_score of {best[0]:g}: no preference")
    texts = [_answer(f"completions[{place}].response", item.get("response")) for _, place, item in (best, worst)]
    return texts[0], texts[1], (best[0], worst[0])


def _labelled(row: Mapping[str, Any], prompt_field: str, fields: PreferenceConfig) -> tuple[PromptContent, str, bool]:
    label, completion = row.get(fields.label_field), row.get(fields.completion_field)
    if not isinstance(label, bool):
        raise DataError(f"field {fields.label_field!r} must be true or false, not {label!r}")
    if row.get(prompt_field) is None:
        raise DataError(f"field {prompt_field!r} is missing")
    if isinstance(completion, list):
        completion = _only_turn(fields.completion_field, _messages(fields.completion_field, completion))
    return check_prompt(row[prompt_field]), _answer(fields.completion_field, completion), label


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"field {name!r} must be a number, not {value!r}")
    return float(value)
