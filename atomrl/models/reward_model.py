"""A reward model as a reward, and what it reads: the same in training and in use.

A reward model reads a prompt and a completion in one of three ways, by what its own tokenizer has:

- a chat template: the conversation as the template writes it, as TRL and verl do;
- two segments (DeBERTa and its like, the layout of OpenAssistant's): `tokenizer(prompt, completion)`;
- neither: the prompt, the completion, and the end-of-sequence token where the completion came to its end. Where the
  tokens that were sampled are tokens of this tokenizer they are taken as they are, and nothing is tokenized again.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from atomrl.common.chat_template import render, special_ids
from atomrl.common.processes import progress
from atomrl.common.threads import sent
from atomrl.config import ConfigError
from atomrl.models.attention import states_before, total
from atomrl.models.batches import micro_batches
from atomrl.models.gpt import GPT, Linear, unsupported
from atomrl.models.loading import (
    compute_dtype,
    load_decoder,
    load_tokenizer,
    load_transformers,
    model_config_only,
    read_weights,
    save_model,
)
from atomrl.types import Message, Sample, Trajectory

# --------------------------------------------------------------------------------------------------------------------
# Models that give a number where a language model gives a distribution: critics and reward models.
#
# Both are a decoder with an output of size 1, in the layout of transformers' `...ForSequenceClassification` with one
# label: what is saved here loads there, and a reward model can start a critic. Every other sequence classifier
# (DeBERTa, ...) is trained and called through transformers; it scores whole texts and cannot be a critic.

log = logging.getLogger(__name__)
CLASSIFIER = "ForSequenceClassification"


class GPTScalar(GPT):
    """The decoder of `GPT` with an output matrix of one row, `score`.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> model = GPTScalar(new_gpt(vocab_size=11, layers=1, hidden=32, heads=1).config)
        >>> model.scores(torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([3, 2])).shape
        torch.Size([2])
    """

    def __init__(self, config: Any) -> None:
        config.tie_word_embeddings = True  # so that there is no output matrix of logits
        super().__init__(config)
        self.score = Linear(config.hidden_size, 1, bias=False)

    def values(self, tokens: Tensor, mask: Tensor, prompt_lengths: Tensor) -> Tensor:
        """[B, T] float32: at each masked token the number that the token before it has; 0 elsewhere."""
        wanted = mask.clone()
        wanted[:, 0] = False
        states, own = states_before(self, tokens, wanted, prompt_lengths)
        return total(self._spread(states, own.flatten()), self.sharing).view(mask.shape)

    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B] float32: the number at each row's last token that is not the config's pad token (`scored_lengths`)."""
        lengths = scored_lengths(tokens, lengths, self.config.pad_token_id)
        after = F.one_hot(lengths, tokens.shape[1] + 1).bool()
        states, own = states_before(self, F.pad(tokens, (0, 1)), after, torch.zeros_like(lengths))
        return total(self._spread(states, own.any(1)), self.sharing)

    def _spread(self, states: Tensor, where: Tensor) -> Tensor:
        """[N] float32: the number of each state at the places [N] bool that are its; 0 elsewhere."""
        numbers: Tensor = self.score(states)[:, 0].float()
        return numbers.new_zeros(len(where)).index_copy(0, sent(where.nonzero()[:, 0], numbers.device), numbers)


def scored_lengths(tokens: Tensor, lengths: Tensor, pad_token_id: int | None) -> Tensor:
    """[B]: the tokens of each row up to the one whose number is its score. transformers takes the last one that is not
    the pad token, which in many models is the end of sequence, and the first where all are.

    Example:
        >>> scored_lengths(torch.tensor([[5, 6, 2], [5, 2, 2]]), torch.tensor([3, 2]), 2)
        tensor([2, 1])
    """
    if pad_token_id is None:
        return lengths
    places = torch.arange(1, tokens.shape[1] + 1)
    ends = places * ((tokens != pad_token_id) & (places <= lengths[:, None]))
    return ends.amax(1).clamp(min=1).minimum(lengths)


class HFScalar(nn.Module):
    """Any sequence classifier of transformers with one label."""

    shares_prompts, pack_rows, sharing, generation_config = False, None, None, None

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def values(self, tokens: Tensor, mask: Tensor, prompt_lengths: Tensor) -> Tensor:
        """Not of these: they see the whole text at once."""
        raise ConfigError(f"critic.path: a {self.config.model_type} model reads whole texts; a critic must be causal")

    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B] float32."""
        config = self.config.get_text_config()
        if (pad := config.pad_token_id) is None:  # the last token has the score: pad with one that is no row's last
            last = set(tokens.gather(1, lengths[:, None] - 1)[:, 0].tolist())
            config.pad_token_id = next(token for token in range(len(last) + 1) if token not in last)
        try:
            return self._scores(tokens, lengths, config.pad_token_id)
        finally:
            config.pad_token_id = pad

    def _scores(self, tokens: Tensor, lengths: Tensor, pad: int) -> Tensor:
        tokens, lengths = (sent(part, self.inner.device) for part in (tokens, lengths))
        attention = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        padded = tokens.masked_fill(~attention, pad)
        return cast(Tensor, self.inner(input_ids=padded, attention_mask=attention.long()).logits[:, 0].float())


ScalarModel = GPTScalar | HFScalar


def is_classifier(config: Any) -> bool:
    """Whether a transformers config is of a model that has a score already."""
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def load_scalar(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    trainable: bool = True,
) -> ScalarModel:
    """A critic or reward model: of a reward model's folder as it is, of a language model's with a score of 0.

    Args:
        dtype: what the forward pass computes in; weights that are trained are float32 in any case.
        trainable: False keeps all weights in `dtype` and without gradient.

    Raises:
        ConfigError: the model is not there, has several labels, or its files do not fit its config.
    """
    config = model_config_only(path, trust_remote_code)
    if is_classifier(config) and config.num_labels != 1:
        raise ConfigError(f"{path} has {config.num_labels} labels; a reward model has one")
    compute = compute_dtype(dtype, device)
    weight_dtype = torch.float32 if trainable else compute
    model: ScalarModel
    if unsupported(config) is None:
        # A fresh critic expects nothing, a fresh reward model prefers nothing.
        stored = read_weights(path, is_classifier(config), trust_remote_code)
        weights = {"score.weight": torch.zeros(1, config.hidden_size)} | dict(stored)
        weights.pop("lm_head.weight", None)
        model = load_decoder(GPTScalar, path, config, weights.items(), weight_dtype)
        model.compute_dtype = compute if compute != weight_dtype else None
    else:
        if not is_classifier(config):
            log.warning("%s has no score yet: it starts with a fresh one", path)
        model = HFScalar(load_transformers(path, weight_dtype, trust_remote_code, scalar=True))
    return model.to(device).requires_grad_(trainable)


def save_scalar(model: ScalarModel, tokenizer: Any, folder: str | Path) -> None:
    """Write a folder that `AutoModelForSequenceClassification` loads: config, safetensors, tokenizer.

    Args:
        tokenizer: None leaves it out.
    """
    save_model(model, tokenizer, folder, **scalar_settings(model, tokenizer))


def scalar_settings(model: ScalarModel, tokenizer: Any) -> dict[str, Any]:
    """What the config of such a folder has otherwise than the model's; arguments as of `save_scalar`."""
    config = model.config
    settings: dict[str, Any] = {"num_labels": 1}
    if isinstance(model, HFScalar):
        settings["architectures"] = [type(model.inner).__name__]  # the config may still name the language model's
    else:
        family = (config.architectures or ["LlamaForCausalLM"])[0].partition("For")[0]
        settings["architectures"] = [family + CLASSIFIER]
        if config.pad_token_id is None:  # transformers finds the last token by it
            settings["pad_token_id"] = getattr(tokenizer, "pad_token_id", None) or 0
    return settings


_REMEDY = "put one into that folder as chat_template.jinja, or give the prompt as text"


class RewardModel:
    """The reward `reward_model`: what a sequence classifier with one label gives each completion.

    It is loaded at the first batch and stays. A text over the model's limit loses its end, with a warning.

    Args:
        path: a folder in the layout of `AutoModelForSequenceClassification` with its tokenizer (runs with
            algorithm.name=reward_model write such), or a hub name.
        device: as torch names it; a run gives its own. auto: a GPU, where the process that computes has one.
        dtype: what the model computes in: auto, float32 or bfloat16.
        tokens_per_batch: padded tokens in one forward pass.
        trust_remote_code: let the folder's own code run; a run gives its own `model.trust_remote_code`.

    Raises:
        ConfigError: there is no such model or tokenizer, it has several labels, or it is no classifier.
    """

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str = "auto",
        tokens_per_batch: int = 4096,
        trust_remote_code: bool = False,
    ) -> None:
        path = str(path)  # a folder's name may be a number
        config = model_config_only(path, trust_remote_code)
        if not is_classifier(config):
            kind = (config.architectures or [config.model_type])[0]
            raise ConfigError(
                f"reward_model: {path} is a {kind}, which gives no score; a run with "
                "algorithm.name=reward_model makes a reward model of a language model and preferences"
            )
        if tokens_per_batch < 1:
            raise ConfigError(f"reward_model: tokens_per_batch must be at least 1, not {tokens_per_batch}")
        self.path, self.device, self.tokens_per_batch = path, device, tokens_per_batch
        self.options: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        self.reader = Reader(load_tokenizer(path, trust_remote_code), config, path)
        self.model: ScalarModel | None = None

    @torch.no_grad()
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """The score of each trajectory, whatever else there is."""
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
    """From prompts and completions to the tokens that a reward model reads; see the module.

    Args:
        tokenizer: the reward model's own.
        config: of the reward model, for its limit on length.
        path: of the reward model, for messages.

    Raises:
        ConfigError: the model has several labels, or tells the two segments of a pair apart by numbers that are not
            passed on (BERT, ELECTRA).
    """

    def __init__(self, tokenizer: Any, config: Any, path: str) -> None:
        if is_classifier(config) and config.num_labels != 1:
            raise ConfigError(f"{path} has {config.num_labels} labels; a reward model has one")
        self.tokenizer, self.path = tokenizer, path
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
        """The pad token of a reward model that is trained: a classifier's own, if it has one, since transformers takes
        the score at the last token that is not it. Else one with which no row ends, if there is any: the tokenizer's,
        or another special token.

        Args:
            config: of the model that training starts from.
        """
        tokenizer, own = self.tokenizer, config.get_text_config().pad_token_id
        if is_classifier(config) and own is not None:
            return int(own)
        end, sample = config.get_text_config().eos_token_id, Sample(sample_id="", prompt="a", ground_truth=None)
        used = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])}
        with suppress(Exception):  # templates are programs and raise what they like
            used |= set(self.row(sample, (), (), "b"))
        special = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        named = sorted(special, key=lambda id: ("pad" not in special[id].lower(), id))
        found = [id for id in (tokenizer.pad_token_id, own, *named) if id is not None and 0 <= id < config.vocab_size]
        return int(next((id for id in found if id not in used), tokenizer.eos_token_id or 0))

    def token_ids(self, trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
        """The tokens of every trajectory, the prompt's in front.

        Raises:
            ConfigError: a prompt of several messages without a template for them.
        """
        rows = []
        for item in trajectories:
            tokens, start = item.token_ids, item.prompt_tokens
            asked = item.sample.prompt if isinstance(item.sample.prompt, str) else item.sample.prompt[-1]["content"]
            text = item.text if asked.endswith(item.opening) else item.turn
            row = self.row(item.sample, tokens[:start], tokens[start:], text, item.finish_reason == "stop")
            rows.append(self._within_limit(item.sample, text, row))
        return rows

    def row(
        self,
        sample: Sample,
        prompt: Sequence[int],
        completion: Sequence[int],
        text: str | Message,
        ended: bool = True,
    ) -> tuple[int, ...]:
        """The tokens of a prompt with a completion, however long.

        Args:
            prompt, completion: as token ids.
            text: of the completion, or the assistant's message.
            ended: whether it came to its end.

        Raises:
            ConfigError: the model has no chat template for what is in a message beside text.
        """
        message = Message(role="assistant", content=text) if isinstance(text, str) else text
        tools = sample.columns.get("tools", ()) if "completions" in sample.columns else ()
        if self.has_template:
            written = render(self.tokenizer, _conversation(sample, message), tools=tools)
            return self._encode(written, add_special_tokens=False)
        text = message["content"]
        if len(message) > 2 or tools:
            raise ConfigError(
                f"{sample.sample_id}: the tokenizer of reward model {self.path} has no chat template, which calls, "
                f"thoughts and tools need: {_REMEDY}"
            )
        if self.makes_pairs:
            return self._encode(self._plain(sample), text)
        if self._says(completion, text) and self._asks(prompt, sample):
            return (*prompt, *completion)
        end = self.tokenizer.eos_token_id
        front = self._encode(self._plain(sample))
        front = front[:-1] if front[-1:] == (end,) else front  # what some tokenizers put behind a text
        last = (end,) if ended and end is not None else ()
        return (*front, *self._encode(text, add_special_tokens=False), *last)

    def _within_limit(self, sample: Sample, text: str, row: tuple[int, ...]) -> tuple[int, ...]:
        """Cut at the end; of a pair, at the end of the longer text, so that its special tokens stay."""
        if len(row) <= self.limit:
            return row
        if not self._warned:
            self._warned = True
            log.warning(
                "reward model %s reads at most %d tokens, and %s has %d: the end of such texts is cut off",
                self.path, self.limit, sample.sample_id, len(row),
            )  # fmt: skip
        if self.has_template or not self.makes_pairs:
            return row[: self.limit]
        return self._encode(self._plain(sample), text, truncation=True, max_length=self.limit)

    def _decoded(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str | None:
        """The text of tokens; None where some are none of this tokenizer's."""
        if not token_ids or max(token_ids) >= len(self.tokenizer):
            return None
        return cast(str, self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _says(self, completion: Sequence[int], text: str) -> bool:
        """Whether the tokens are the text: all of it, without a special one that ends it, or without special ones."""
        ended = bool(completion) and completion[-1] in self._special
        without_end = self._decoded(completion[:-1], False) if ended else None
        return text in (without_end, self._decoded(completion, False), self._decoded(completion, True))

    def _asks(self, prompt: Sequence[int], sample: Sample) -> bool:
        """Whether the tokens are the sample's prompt in this tokenizer's; a system prompt may go before."""
        return isinstance(sample.prompt, str) and (self._decoded(prompt, True) or "").endswith(sample.prompt)

    def _plain(self, sample: Sample) -> str:
        """The prompt as one text: a single message of a user's is its content."""
        if isinstance(sample.prompt, str):
            return sample.prompt
        if len(sample.prompt) > 1:
            raise ConfigError(
                f"{sample.sample_id}: the prompt has {len(sample.prompt)} messages, and the tokenizer of reward model "
                f"{self.path} has no chat template for them: {_REMEDY}"
            )
        return sample.prompt[0]["content"]

    def _encode(self, *texts: str, **options: Any) -> tuple[int, ...]:
        return tuple(self.tokenizer(*texts, verbose=False, **options)["input_ids"])


def _conversation(sample: Sample, completion: Message) -> list[Message]:
    """Prompt and completion as messages; a prompt whose last message is the assistant's is gone on with."""
    if isinstance(sample.prompt, str):
        return [Message(role="user", content=sample.prompt), completion]
    *before, last = sample.prompt
    if last["role"] != "assistant":
        return [*sample.prompt, completion]
    words = last["content"] + completion["content"]
    return [*before, cast(Message, {**last, **completion, "content": words})]
