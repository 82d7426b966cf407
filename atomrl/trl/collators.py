"""Data collators that select the trained tokens of a row."""

from collections.abc import Sequence
from typing import Any

from transformers import DataCollatorForLanguageModeling

from atomrl.config import ConfigError
from atomrl.data.given import NOT_TRAINED


class DataCollatorForCompletionOnlyLM(DataCollatorForLanguageModeling):
    """TRL's collator (until 0.19): trains the tokens behind a template, such as `### Response:`.

    The tokens of the templates are looked for in those of the row. Without `instruction_template`, tokens behind the
    last response template are trained. With it, those from each response template to the next instruction template.
    Padding tokens are not trained; where `pad_token` is `eos_token`, neither is the end of a row.

    Args:
        response_template: text or token ids before what is trained.
        instruction_template: text or token ids before what is not trained again.
        tokenizer: of the rows.
        options: others of TRL (`ignore_index`, `padding_free`), without effect on what is trained.

    Raises:
        ConfigError: `mlm` is set, or a template has no tokens.
    """

    def __init__(
        self,
        response_template: str | list[int],
        instruction_template: str | list[int] | None = None,
        *,
        tokenizer: Any,
        mlm: bool = False,
        **options: Any,
    ) -> None:
        if mlm:
            raise ConfigError("DataCollatorForCompletionOnlyLM(mlm=True): masked tokens are not trained")
        super().__init__(tokenizer=tokenizer, mlm=False)
        self.response_template, self.instruction_template = response_template, instruction_template
        self.response_token_ids = template_ids(response_template, tokenizer, "response_template")
        self.instruction_token_ids = (
            None
            if instruction_template is None
            else template_ids(instruction_template, tokenizer, "instruction_template")
        )

    def learned(self, ids: Sequence[int]) -> list[bool]:
        """Return for each token of a row whether it is trained; none without the templates."""
        begins = [at + len(self.response_token_ids) for at in places(ids, self.response_token_ids)]
        trained = [False] * len(ids)
        if self.instruction_token_ids is None:
            spans = [(begins[-1], len(ids))] if begins else []
        else:
            ends = places(ids, self.instruction_token_ids)
            if begins and ends and ends[0] > begins[0]:
                ends = [0, *ends]
            # TRL counts: the n-th response ends where the next instruction begins
            spans = list(zip(begins, [*ends[1:], len(ids)], strict=False)) if ends else []
        for begin, end in spans:
            trained[begin:end] = [True] * max(0, end - begin)
        return [one and token != self.tokenizer.pad_token_id for one, token in zip(trained, ids, strict=True)]

    def torch_call(self, examples: Any) -> dict[str, Any]:
        """Return a batch with `labels`, as TRL does; a trainer here uses `learned`."""
        batch: dict[str, Any] = super().torch_call(examples)
        for row, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True):
            for place, trained in enumerate(self.learned(row)):
                if not trained:
                    labels[place] = NOT_TRAINED
        return batch


def without_padding(tokenizer: Any, ids: Sequence[int]) -> list[bool]:
    """Return for each token of a row whether transformers' DataCollatorForLanguageModeling trains it: it does not train
    the padding token, which may be the end of the row."""
    return [token != tokenizer.pad_token_id for token in ids]


def responses(ids: Sequence[int], instruction: Sequence[int], response: Sequence[int]) -> list[bool]:
    """Return for each token of a row whether unsloth's `train_on_responses_only` trains it: from behind `response` to
    the next `instruction`, or to the end.

    Example:
        >>> responses([1, 5, 2, 6, 7, 1, 5, 2, 8], [1], [2])
        [False, False, False, True, True, False, False, False, True]
    """
    trained, at = [False] * len(ids), 0
    ends = places(ids, instruction)
    for begin in places(ids, response):
        if begin >= at:
            start = begin + len(response)
            at = next((end for end in ends if end >= start), len(ids))
            trained[start:at] = [True] * (at - start)
    return trained


def places(ids: Sequence[int], part: Sequence[int]) -> list[int]:
    """Return where the tokens `part` begin in a row.

    Example:
        >>> places([1, 2, 1, 2, 3], [1, 2])
        [0, 2]
    """
    return [at for at in range(len(ids) - len(part) + 1) if list(ids[at : at + len(part)]) == list(part)]


def template_ids(template: str | Sequence[int], tokenizer: Any, name: str) -> list[int]:
    """Return the tokens of a template.

    Raises:
        ConfigError: it has none.
    """
    ids = tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else list(template)
    if not ids:
        raise ConfigError(f"{name}: {template!r} has no tokens")
    return [int(one) for one in ids]
