"""`HFEngine`: rollout with Hugging Face `generate`, for every causal language model that `transformers` loads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from atomrl.atoms.logprobs import head_logits
from atomrl.common.hangs import progress
from atomrl.engines.requests import DIVERGED, DecodeTime, EngineOptions, RequestEngine, RequestState
from atomrl.engines.sampling import sample
from atomrl.engines.stop_rule import StopRule, eos_token_ids
from atomrl.models.loading import base_path, load_transformers
from atomrl.models.published import published_names, published_weights
from atomrl.models.shapes import text_config
from atomrl.models.vision import Patches, Vision, media_tokens
from atomrl.protocols import Adapter, WeightHash, WeightUpdate
from atomrl.types import FinishReason, SamplingParams
from atomrl.weight_sync.hashes import tensor_hashes


class HFEngine(RequestEngine):
    """Rollout engine over `model.generate`. Each `poll` runs one batch to its end.

    Tokens are sampled as by the native engine, with the completion's own seed. But for some models the other rows of a
    batch change the logits by more than rounding, so it is not `seeded`.

    Args:
        model: a transformers model; its head is patched to compute logits in float32 (`head_logits`).
        eos: end-of-sequence tokens.
        tokenizer: the model's; decodes completions and stop strings.
        max_concurrent_completions: batch size of `generate`.
        images: reads the patches of pictures; None: prompts have none.
    """

    exact = supports_lora = updates_parts = supports_images = True
    # 70 ms per step of 28 layers and 256 rows; the host launches the layers kernel by kernel.
    decode_time = DecodeTime("measured on one H200 with transformers 5.17", layer_s=2.43e-3)

    def __init__(
        self,
        model: Any,
        eos: tuple[int, ...],
        tokenizer: Any,
        max_concurrent_completions: int,
        images: Patches | None = None,
    ) -> None:
        super().__init__(tokenizer, getattr(text_config(model.config), "max_position_embeddings", 2**31))
        self.model, self.eos, self.max_concurrent_completions = model, eos, max_concurrent_completions
        self.adapters: dict[str, Adapter] = {}
        self.vision = None if images is None else Vision(model, images)
        head = model.get_output_embeddings()
        if head.weight.dtype.itemsize < 4:
            head.forward = _wide_forward(head)

    @classmethod
    def from_pretrained(cls, path: str, tokenizer: Any, options: EngineOptions) -> Self:
        """Load any causal language model that transformers supports."""
        model = load_transformers(path, options.dtype, options.trust_remote_code).to(options.device).eval()
        model.requires_grad_(False)  # `Vision` keeps the features of a tower that is not trained
        eos = eos_token_ids(base_path(path), model.config, tokenizer)
        # Ignore the checkpoint's own sampling settings, such as Qwen's repetition penalty and top-k.
        model.generation_config = GenerationConfig()
        return cls(model, eos, tokenizer, options.max_concurrent_completions, options.images)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the published weights; tied ones once."""
        return {name: tuple(tensor.shape) for name, tensor in published_weights(self.model).items()}

    @torch.no_grad()
    def update_weights(self, update: WeightUpdate) -> None:
        """Copy new weights in place; adapters are added to their layers' outputs. No KV cache outlives a `poll`."""
        own = published_weights(self.model)
        copied = [own[name].copy_(tensor) for name, tensor in update.tensors]
        if copied and self.vision is not None:  # adapters alone leave the tower as it is
            self.vision.forget()
        for name in self.adapters:
            del self._layer(name).forward
        device = self.model.device
        self.adapters = {  # copies, since the trainer updates its own in place
            name: replace(
                adapter,
                a=adapter.a.to(device, torch.float32, copy=True),
                b=(adapter.b * adapter.scale).to(device, torch.float32),
                scale=1.0,
            )
            for name, adapter in update.adapters.items()
        }
        for name, adapter in self.adapters.items():
            layer = self._layer(name)
            layer.forward = _adapted(layer, adapter)
        self.version = update.version

    @cached_property
    def _own_names(self) -> dict[str, str]:
        """Name of each weight in the model, by its published name."""
        return {published: own for own, published in published_names(self.model).items()}

    def _layer(self, name: str) -> Any:
        """Return the layer that has a weight."""
        own = self._own_names.get(name, name)
        return self.model.get_submodule(own.removesuffix(".weight"))

    def weight_hashes(self) -> list[WeightHash]:
        """Hashes of the model's parameters and of the adapters."""
        held = [*WeightUpdate(self.version, published_weights(self.model).items(), self.adapters).parts()]
        values = tensor_hashes((tensor, tensor.dtype) for _, tensor in held)
        return [WeightHash(name, tensor.dtype, value) for (name, tensor), value in zip(held, values, strict=True)]

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        vocab = self.model.get_output_embeddings().weight.shape[0]
        return StopRule(sampling, self.eos, self.tokenizer, vocab, self.model.device, media_tokens(self.model.config))

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        """Run one batch: the oldest request, and others with the same sampling."""
        rule = self.waiting[0].rule
        alike = [state for state in self.waiting if state.rule is rule]
        states = alike[: self.max_concurrent_completions]
        rows = [state.request.prompt_token_ids for state in states]
        device, width = self.model.device, max(len(row) for row in rows)
        tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        sampler = _Sampler(width, [state.request.seed for state in states], rule, device)
        limits = [state.request.sampling.max_completion_tokens for state in states]
        ends = _Ends(width, limits, rule, device)
        sequences = self.model.generate(
            input_ids=tokens,
            attention_mask=mask,
            generation_config=GenerationConfig(max_new_tokens=max(limits), pad_token_id=0),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([ends]),
            **self._pictures(tokens, states),
        )
        logprobs = torch.stack(sampler.logprobs, dim=1)
        if logprobs.isnan().any():
            raise ValueError(DIVERGED)
        drawn, stopped = (sequences[:, width:].tolist(), logprobs.tolist()), ends.stopped.tolist()
        for state, row, own, length in zip(states, *drawn, ends.lengths.tolist(), strict=True):
            state.set_version(self.version)
            state.token_ids, state.logprobs = row[:length], own[:length]
            self.waiting.remove(state)
        return [(state, "stop" if stop else "length") for state, stop in zip(states, stopped, strict=True)]

    def _pictures(self, tokens: Tensor, states: Sequence[RequestState]) -> dict[str, Any]:
        """Return the model's arguments for prompts with pictures."""
        if not any(state.request.images for state in states):
            return {}
        assert self.vision is not None, "the engine of a run with pictures is created with `images`"
        return self.vision.inputs(tokens, [state.request.images for state in states])

    def sleep(self) -> None:
        """Release cached GPU memory. No KV cache outlives a `poll`, but PyTorch keeps its memory for this process.

        Raises:
            RuntimeError: the engine has unfinished requests.
        """
        super().sleep()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the weights."""
        del self.model


def _wide_forward(head: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a forward pass of the head with float32 logits."""
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)
    if bias is None:
        return lambda hidden: head_logits(hidden, weight)
    return lambda hidden: head_logits(hidden, weight) + bias


def _adapted(module: Any, adapter: Adapter) -> Callable[[Tensor], Tensor]:
    """Return the forward pass of a linear layer with an adapter.

    The adapter's part goes into the product before rounding. Added afterwards, changes below half a unit in the last
    place would be lost.
    """

    def forward(x: Tensor) -> Tensor:
        weight = module.weight.t() if isinstance(module, torch.nn.Linear) else module.weight  # GPT-2: [in, out]
        added = ((x.float() @ adapter.a.T) @ adapter.b.T).to(x.dtype)
        y = torch.addmm(added.flatten(0, -2), x.flatten(0, -2), weight).view(added.shape)
        return y if module.bias is None else y + module.bias

    return forward


class _Sampler(LogitsProcessor):
    """Samples the next token of each row and stores its log-prob; all other tokens get -inf."""

    def __init__(self, width: int, seeds: list[int], rule: StopRule, device: torch.device):
        self.width, self.rule, self.seeds = width, rule, torch.tensor(seeds, device=device)
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        progress()
        lengths = torch.full_like(self.seeds, input_ids.shape[1] - self.width)
        tokens, logprobs = sample(scores, self.rule.sampling, self.seeds, lengths, self.rule.banned(lengths))
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens[:, None], 0.0)


class _Ends(StoppingCriteria):
    """Stops rows by a `StopRule` and a limit [N]. `lengths` [N]: where a row ended, 0: not yet; `stopped` [N]: True if
    the rule ended it."""

    def __init__(self, width: int, limits: list[int], rule: StopRule, device: torch.device):
        self.width, self.rule, self.limits = width, rule, torch.tensor(limits, device=device)
        self.rows = torch.arange(len(limits), device=device)
        self.lengths = torch.zeros_like(self.limits)
        self.stopped = torch.zeros_like(self.limits, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        completions = input_ids[:, self.width :]
        length = torch.full_like(self.lengths, completions.shape[1])
        going = self.lengths == 0
        ends = self.rule.token_ends(input_ids[:, -1], length)
        ends[list(self.rule.string_ends(completions, self.rows, length))] = True
        self.stopped |= ends & going
        self.lengths = torch.where((ends | (length >= self.limits)) & going, length, self.lengths)
        return self.lengths > 0
