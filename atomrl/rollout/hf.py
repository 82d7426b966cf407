"""`HFEngine`: Hugging Face `generate`, for every causal language model that `transformers` loads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from atomrl.rollout.stopping import Drawn, StopRule, check_prompts, eos_token_ids, to_rollout_batch
from atomrl.stages import PromptBatch, RolloutBatch, SamplingParams


class HFEngine:
    """Draws completions with `model.generate`.

    Not `seeded`: a draw depends on the rest of its batch. The same prompts with the same seed and step give the
    same completions.
    """

    seeded = False
    returns_kept = False

    def __init__(self, model: Any, eos: tuple[int, ...], tokenizer: Any, max_concurrent_completions: int):
        self.model, self.eos, self.tokenizer = model, eos, tokenizer
        self.max_concurrent_completions = max_concurrent_completions
        self.version = 0

    @classmethod
    def from_pretrained(
        cls, path: str, tokenizer: Any, *, dtype: torch.dtype, device: str, max_concurrent_completions: int
    ) -> HFEngine:
        """Load a model.

        Args:
            path: a folder in Hugging Face layout, or a hub name.
            tokenizer: of the model; decodes completions and stop strings.
            dtype: of weights and computation.
            device: such as `cpu` or `cuda:0`.
            max_concurrent_completions: rows of one call of `generate`.
        """
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        eos = eos_token_ids(str(path), model.config, tokenizer)
        # The folder's own sampling settings (Qwen's repetition penalty and top-k) must not mix with ours.
        model.generation_config = GenerationConfig()
        return cls(model, eos, tokenizer, max_concurrent_completions)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights, named as in the Hugging Face state dict.

        Raises:
            ValueError: names what is missing, unexpected or of a wrong shape; the old weights stay.
        """
        own = self.model.state_dict()
        found = dict(weights)
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        problems = [f"{name} is missing" for name in own if name not in found and name not in tied]
        problems += [f"{name} is unexpected" for name in found if name not in own]
        problems += [
            f"{name} has shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}"
            for name, tensor in found.items()
            if name in own and tensor.shape != own[name].shape
        ]
        if problems:
            more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ValueError("the weights were refused, the old ones stay: " + "; ".join(problems[:8]) + more)
        with torch.no_grad():
            for name, tensor in found.items():
                if name not in tied:
                    own[name].copy_(tensor)
        self.version = version

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        """`sampling.completions_per_prompt` completions of each prompt.

        Raises:
            ValueError: a prompt is empty or too long for the model's context; or log-probs over the kept tokens are
                asked for, which `model.generate` does not tell.
        """
        if sampling.logprobs_over == "kept":
            raise ValueError("logprobs_over=kept: the hf engine does not tell which tokens top-p and top-k kept")
        check_prompts(prompts, sampling, getattr(self.model.config, "max_position_embeddings", 2**31))
        rows = [tokens for tokens in prompts.prompt_token_ids for _ in range(sampling.completions_per_prompt)]
        device = self.model.device
        rule = StopRule(sampling, self.eos, self.tokenizer, self.model.get_output_embeddings().out_features, device)
        seed = hashlib.blake2b(f"{sampling.seed}/{sampling.step}".encode(), digest_size=7).digest()
        drawn = []
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(int.from_bytes(seed, "little"))
            for start in range(0, len(rows), self.max_concurrent_completions):
                drawn += self._generate(rows[start : start + self.max_concurrent_completions], sampling, rule)
        return to_rollout_batch(prompts, sampling, drawn, self.tokenizer, self.version)

    def _generate(self, rows: list[tuple[int, ...]], sampling: SamplingParams, rule: StopRule) -> list[Drawn]:
        device = self.model.device
        width = max(len(row) for row in rows)
        tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        recorder = _Recorder(width, sampling, rule)
        ends = _Ends(width, len(rows), rule, device)
        sequences = self.model.generate(
            input_ids=tokens,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_completion_tokens,
                pad_token_id=0,
                **_draw_settings(sampling),
            ),
            logits_processor=LogitsProcessorList([recorder]),
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        recorder.record(sequences)
        completions = sequences[:, width:].tolist()
        logprobs = torch.stack(recorder.logprobs, dim=1).tolist()
        longest = sequences.shape[1] - width
        lengths = [length or longest for length in ends.lengths.tolist()]
        return [
            Drawn(row[:length], values[:length], stopped > 0)
            for row, values, length, stopped in zip(completions, logprobs, lengths, ends.lengths.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Free the weights."""
        del self.model


def _draw_settings(sampling: SamplingParams) -> dict[str, Any]:
    if sampling.temperature == 0:  # the others are warned of
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }


class _Recorder(LogitsProcessor):
    """Keeps the log-prob of each sampled token; bans what may not be sampled yet.

    It runs before temperature, top-k and top-p cut the logits, and sees in the next step what was drawn in this one.
    """

    def __init__(self, width: int, sampling: SamplingParams, rule: StopRule):
        self.width, self.temperature, self.rule = width, sampling.temperature or 1.0, rule
        self.logprobs: list[Tensor] = []
        self.scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.record(input_ids)
        self.scores = scores
        banned = self.rule.banned(torch.full((len(scores),), input_ids.shape[1] - self.width, device=scores.device))
        return scores if banned is None else scores.masked_fill(banned, -torch.inf)

    def record(self, input_ids: Tensor) -> None:
        """Take the newest column's log-probs from the scores that it was drawn from."""
        if self.scores is not None:
            scores = self.scores.float() / self.temperature
            chosen = scores.gather(-1, input_ids[:, -1:])[:, 0]
            self.logprobs.append(chosen - scores.logsumexp(-1))


class _Ends(StoppingCriteria):
    """Our stop rule; `lengths` [N] is where each row stopped, 0 where it has not."""

    def __init__(self, width: int, count: int, rule: StopRule, device: torch.device):
        self.width, self.rule = width, rule
        self.rows = torch.arange(count, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int64, device=device)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        completions = input_ids[:, self.width :]
        length = torch.full_like(self.lengths, completions.shape[1])
        going = self.lengths == 0
        ends = self.rule.ends(input_ids[:, -1], length, completions, self.rows) & going
        self.lengths = torch.where(ends, length, self.lengths)
        return self.lengths > 0
