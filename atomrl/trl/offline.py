"""Trainers on rows of a data set: SFT, preferences and reward models."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import DataCollatorForLanguageModeling

from atomrl.config import ConfigError
from atomrl.models.loading import model_config_only
from atomrl.models.scalar import is_classifier
from atomrl.models.shapes import text_config
from atomrl.trl.collators import DataCollatorForCompletionOnlyLM, without_padding
from atomrl.trl.inputs import sft_rows, token_rows
from atomrl.trl.objects import load_trained
from atomrl.trl.trainer import Trainer, check_reference


class SFTTrainer(Trainer):
    """Train a model on demonstrations (`SFTConfig`): conversations, prompt and completion, or text.

    Args:
        formatting_func: makes the text of a row.
    """

    kind = "sft"

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        *positional: Any,
        formatting_func: Any = None,
        **arguments: Any,
    ) -> None:
        self._formatting_func = formatting_func
        self._collator: Any = None
        super().__init__(model, args, *positional, data_collator=data_collator, **arguments)

    def _check_collator(self, collator: Any) -> None:
        if not isinstance(collator, DataCollatorForCompletionOnlyLM):
            super()._check_collator(collator)
        self._collator = collator

    def _read_rows(self, train: Any, held_out: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        rows, eval_rows = super()._read_rows(train, held_out)
        field = self.args.dataset_text_field or "text"
        rows = sft_rows(rows, field, self._formatting_func)
        eval_rows = None if eval_rows is None else sft_rows(eval_rows, field, self._formatting_func)
        if isinstance(self._collator, DataCollatorForCompletionOnlyLM):
            if self.args.packing:
                raise ConfigError("packing=True: DataCollatorForCompletionOnlyLM needs rows that are not packed")
            learned = self._collator.learned
        elif (
            isinstance(self._collator, DataCollatorForLanguageModeling)
            and self._collator.tokenizer.pad_token_id == self._collator.tokenizer.eos_token_id
        ):
            learned = functools.partial(without_padding, self._collator.tokenizer)
        else:
            return rows, eval_rows
        return self._with_learned(rows, learned, "data_collator"), (
            None if eval_rows is None else self._with_learned(eval_rows, learned, "data_collator")
        )

    def _with_learned(
        self, rows: list[dict[str, Any]], learned: Callable[[list[int]], list[bool]], what: str
    ) -> list[dict[str, Any]]:
        """Return the rows as tokens, of which those that `learned` selects are trained."""
        return token_rows(rows, self.tokenizer, self.args.max_length, learned, what)

    def train_on(self, learned: Callable[[list[int]], list[bool]], what: str) -> None:
        """Train only some tokens of each row.

        Args:
            learned: the tokens of a row -> for each whether it is trained.
            what: name of the argument that selects them, for messages.

        Raises:
            ConfigError: nothing of any row would be trained, or a row is neither text nor messages.
        """
        self._train_rows = self._with_learned(self._train_rows, learned, what)
        if self._eval_rows is not None:
            self._eval_rows = self._with_learned(self._eval_rows, learned, what)


class DPOTrainer(Trainer):
    """Train a model on preferences with DPO and its variants (`DPOConfig`).

    Args:
        ref_model: None, or the same as `model`: the reference is always the initial model.
    """

    kind = "dpo"
    copies_adapters = True

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        *positional: Any,
        **arguments: Any,
    ) -> None:
        check_reference(ref_model, model)
        super().__init__(model, args, *positional, data_collator=data_collator, **arguments)


class KTOTrainer(DPOTrainer):
    """Train a model on completions labelled good or bad (`KTOConfig`); arguments as for `DPOTrainer`."""

    kind = "kto"


class ORPOTrainer(Trainer):
    """Train a model on preferences with ORPO, without a reference (`ORPOConfig`)."""

    kind = "orpo"


class CPOTrainer(Trainer):
    """Train a model on preferences with CPO or SimPO, without a reference (`CPOConfig`)."""

    kind = "cpo"


class RewardTrainer(Trainer):
    """Train a reward model on preferences (`RewardConfig`)."""

    kind = "reward"

    def _open_tokenizer(self, model: Any, tokenizer: Any) -> None:
        super()._open_tokenizer(model, tokenizer)
        end, pad = self.tokenizer.eos_token, self.args.pad_token or self.tokenizer.pad_token
        kept = not self._given.is_name or is_classifier(self._given.config)  # a classifier keeps its pad token
        own = text_config(self._given.config).pad_token_id if kept else None
        if pad in (None, end) and own != self.tokenizer.eos_token_id:
            self._notes.append(
                f"differs from TRL: score of a row that ends with {end}: TRL at the token before, as pad_token is "
                f"eos_token; here at {end}"
            )

    def _open_adapters(self, peft_config: Any) -> None:
        super()._open_adapters(peft_config)
        if self._lora is None:
            return
        given = peft_config if self._given.lora is None else next(iter(self._given.model.peft_config.values()))
        task, whole = getattr(given, "task_type", None), getattr(given, "modules_to_save", None) or ()
        if task != "SEQ_CLS" and "score" not in whole:
            self._notes.append("differs from TRL: score head: TRL trains it with SEQ_CLS only; here always")

    @staticmethod
    def _load(folder: str | Path) -> Any:
        from transformers import AutoModelForSequenceClassification

        model = load_trained(folder, AutoModelForSequenceClassification, num_labels=1)
        text_config(model.config).pad_token_id = text_config(model_config_only(folder)).pad_token_id
        return model
