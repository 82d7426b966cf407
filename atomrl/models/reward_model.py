"""A reward model as a reward, and the input format of reward models."""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from atomrl.batches import micro_batches
from atomrl.common.chat_template import render, special_ids
from atomrl.common.hangs import progress
from atomrl.config import ConfigError
from atomrl.models.loading import load_tokenizer, model_config_only
from atomrl.models.scalar import ScalarModel, is_classifier, load_scalar
from atomrl.models.shapes import text_config
from atomrl.types import Message, Problem, Trajectory

log = logging.getLogger(__name__)


_REMEDY = "add one to that folder as chat_template.jinja, or give the prompt as text"


class RewardModel:
    """The reward `reward_model`: the score of a sequence classifier with one label.

    The model is loaded at the first batch. A text over the model's maximum length is truncated, with a warning.

    Args:
        path: a folder in the layout of `AutoModelForSequenceClassification` with its tokenizer (as runs with
            algorithm.name=reward_model save it), or a hub name.
        device: a torch device; a run passes its own. auto: a GPU if the process has one.
        dtype: auto, float32 or bfloat16.
        tokens_per_batch: padded tokens per forward pass.
        trust_remote_code: allow the model's own code to run; a run passes `model.trust_remote_code`.
        chat_template: auto, or messages_only: a prompt of text is used as it is, as in TRL.

    Raises:
        ConfigError: the model or tokenizer does not exist, or the model is not a classifier or has several labels.
    """

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str = "auto",
        tokens_per_batch: int = 4096,
        trust_remote_code: bool = False,
        chat_template: Literal["auto", "messages_only"] = "auto",
    ) -> None:
        path = str(path)  # a folder's name may be a number
        config = model_config_only(path, trust_remote_code)
        if not is_classifier(config):
            kind = (config.architectures or [config.model_type])[0]
            raise ConfigError(
                f"reward_model: {path} is a {kind}, which has no score head; train a reward model with "
                "algorithm.name=reward_model"
            )
        if tokens_per_batch < 1:
            raise ConfigError(f"reward_model: tokens_per_batch must be at least 1, not {tokens_per_batch}")
        self.path, self.device, self.tokens_per_batch = path, device, tokens_per_batch
        self.options: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        self.reader = Reader(load_tokenizer(path, trust_remote_code), config, path, chat_template == "messages_only")
        self.model: ScalarModel | None = None

    @torch.no_grad()
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Compute the score of each trajectory."""
        if self.model is None:
            if self.device == "auto":
                self.device = self.options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
            self.model = load_scalar(self.path, trainable=False, **self.options).eval()
        rows = self.reader.token_ids(trajectories)
        lengths, scores = torch.tensor([len(row) for row in rows]), torch.zeros(len(rows))
        for index in micro_batches(lengths, None, self.tokens_per_batch):
            progress()
            tokens = pad_sequence([torch.tensor(rows[row]) for row in index], batch_first=True)
            scores[index] = self.model.scores(tokens, lengths[index]).cpu()
        return scores.tolist()


class Reader:
    """Formats prompts and completions as input tokens of a reward model; the module's docstring has the formats.

    Args:
        tokenizer: tokenizer of the reward model.
        config: config of the reward model, for its maximum length.
        path: path of the reward model, for messages.
        messages_only: do not apply its chat template to prompts of text.

    Raises:
        ConfigError: the model has several labels, or needs token type ids, which are not passed on (BERT, ELECTRA).
    """

    def __init__(self, tokenizer: Any, config: Any, path: str, messages_only: bool = False) -> None:
        if is_classifier(config) and config.num_labels != 1:
            raise ConfigError(f"{path} has {config.num_labels} labels; a reward model has one")
        self.tokenizer, self.path, self._messages_only = tokenizer, path, messages_only
        self.limit = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or 1 << 30)
        self.has_template = bool(tokenizer.chat_template)
        self._special = special_ids(tokenizer)
        separator = tokenizer.sep_token_id
        self.makes_pairs = separator is not None and separator in tokenizer("a", "b")["input_ids"]
        if self.makes_pairs and not self.has_template and (getattr(config, "type_vocab_size", 0) or 0) > 1:
            raise ConfigError(
                f"{path}: a {config.model_type} model has embeddings for the two segments of a pair "
                "(type_vocab_size > 1), which are not supported; DeBERTa-v2 and RoBERTa have none"
            )
        self._warned = False

    def pad_token_id(self, config: Any) -> int:
        """Choose the pad token of a reward model to train.

        transformers reads the score at the last token other than the pad token. So it is that of the initial model if
        this is a classifier. Else it is the tokenizer's, or another special token, with which no row ends.

        Args:
            config: config of the initial model.
        """
        tokenizer, own = self.tokenizer, text_config(config).pad_token_id
        if is_classifier(config) and own is not None:
            return int(own)
        end, problem = text_config(config).eos_token_id, Problem(problem_id="", prompt="a", ground_truth=None)
        used = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])}
        with suppress(Exception):  # templates are programs, and may raise anything
            used |= set(self.row(problem, (), (), "b"))
        special = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        named = sorted(special, key=lambda id: ("pad" not in special[id].lower(), id))
        size = text_config(config).vocab_size
        ids = [id for id in (tokenizer.pad_token_id, own, *named) if id is not None and 0 <= id < size]
        return int(next((id for id in ids if id not in used), tokenizer.eos_token_id or 0))

    def token_ids(self, trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
        """Return the input tokens of every trajectory: prompt and completion, truncated to the maximum length.

        Raises:
            ConfigError: a prompt has several messages, and the tokenizer no chat template.
        """
        rows = []
        for item in trajectories:
            tokens, start = item.token_ids, item.prompt_tokens
            asked = item.problem.prompt if isinstance(item.problem.prompt, str) else item.problem.prompt[-1]["content"]
            text = item.text if asked.endswith(item.opening) else item.turn
            row = self.row(item.problem, tokens[:start], tokens[start:], text, item.finish_reason == "stop")
            rows.append(self._within_limit(item.problem, text, row))
        return rows

    def row(
        self,
        problem: Problem,
        prompt: Sequence[int],
        completion: Sequence[int],
        text: str | Message,
        ended: bool = True,
    ) -> tuple[int, ...]:
        """Return the input tokens of a prompt with a completion, without truncation.

        Args:
            prompt, completion: token ids.
            text: text of the completion, or the assistant's message.
            ended: False if the completion was cut off.

        Raises:
            ConfigError: the message has tool calls or the like, and the tokenizer no chat template.
        """
        message = Message(role="assistant", content=text) if isinstance(text, str) else text
        tools = problem.columns.get("tools") or ()
        if isinstance(tools, str):  # the JSON text of a row, which the data's reader has checked
            tools = json.loads(tools.strip() or "[]")
        if self.has_template and not (self._messages_only and isinstance(problem.prompt, str)):
            written = render(self.tokenizer, _conversation(problem, message), tools=tools)
            return self._encode(written, add_special_tokens=False)
        text = message["content"]
        if len(message) > 2 or tools:
            raise ConfigError(
                f"{problem.problem_id}: the tokenizer of reward model {self.path} has no chat template, which calls, "
                f"thoughts and tools need: {_REMEDY}"
            )
        if self.makes_pairs:
            return self._encode(self._plain(problem), text)
        if self._decodes_to(completion, text) and self._decodes_to_prompt(prompt, problem):
            return (*prompt, *completion)
        end = self.tokenizer.eos_token_id
        front = self._encode(self._plain(problem))
        front = front[:-1] if front[-1:] == (end,) else front  # some tokenizers append it to every text
        last = (end,) if ended and end is not None else ()
        return (*front, *self._encode(text, add_special_tokens=False), *last)

    def _within_limit(self, problem: Problem, text: str, row: tuple[int, ...]) -> tuple[int, ...]:
        """Truncate at the end; for a pair, truncate the longer text, so that special tokens stay."""
        if len(row) <= self.limit:
            return row
        if not self._warned:
            self._warned = True
            log.warning(
                "reward model %s reads at most %d tokens, and %s has %d: longer texts are truncated",
                self.path, self.limit, problem.problem_id, len(row),
            )  # fmt: skip
        if self.has_template or not self.makes_pairs:
            return row[: self.limit]
        return self._encode(self._plain(problem), text, truncation=True, max_length=self.limit)

    def _decoded(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str | None:
        """Decode tokens; None if some are not in this tokenizer's vocabulary."""
        if not token_ids or max(token_ids) >= len(self.tokenizer):
            return None
        return cast(str, self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _decodes_to(self, completion: Sequence[int], text: str) -> bool:
        """Return True if tokens decode to the text: in full, without a final special token, or without special ones."""
        ended = bool(completion) and completion[-1] in self._special
        without_end = self._decoded(completion[:-1], False) if ended else None
        return text in (without_end, self._decoded(completion, False), self._decoded(completion, True))

    def _decodes_to_prompt(self, prompt: Sequence[int], problem: Problem) -> bool:
        """Return True if tokens decode to the problem's prompt, perhaps after a system prompt."""
        return isinstance(problem.prompt, str) and (self._decoded(prompt, True) or "").endswith(problem.prompt)

    def _plain(self, problem: Problem) -> str:
        """Return the prompt as text: a single message is its content."""
        if isinstance(problem.prompt, str):
            return problem.prompt
        if len(problem.prompt) > 1:
            raise ConfigError(
                f"{problem.problem_id}: the prompt has {len(problem.prompt)} messages, and the tokenizer of reward "
                f"model {self.path} has no chat template for them: {_REMEDY}"
            )
        return problem.prompt[0]["content"]

    def _encode(self, *texts: str, **options: Any) -> tuple[int, ...]:
        return tuple(self.tokenizer(*texts, verbose=False, **options)["input_ids"])


def _conversation(problem: Problem, completion: Message) -> list[Message]:
    """Return prompt and completion as messages; a completion continues a last message of the assistant."""
    if isinstance(problem.prompt, str):
        return [Message(role="user", content=problem.prompt), completion]
    *before, last = problem.prompt
    if last["role"] != "assistant":
        return [*problem.prompt, completion]
    words = last["content"] + completion["content"]
    return [*before, cast(Message, {**last, **completion, "content": words})]
