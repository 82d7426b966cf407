"""`NativeEngine`: AtomRL's own decoder for Llama, Qwen2 and Qwen3.

- `requests.py` holds the requests, `batching.py` schedules them (continuous batching), `decoder.py` is the model,
  `cache.py` the KV cache, `sampling.py` the sampler.
- A prompt is prefilled once for its group, and its keys and values are shared.
- On a CPU keys and values are in slots, read by C++ kernels (`kernels.cpp`). On a GPU they are in pages (`paged.py`),
  and a decode step is a CUDA graph of Triton kernels (`triton_kernels.py`) and matrix products.
- A token depends on the completion's seed and the position alone, so neither the order of arrival nor the other rows of
  the batch change a completion, beyond floating-point rounding.

Design: docs/development/design.md.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from atomrl.engines.native.batching import ContinuousBatch
from atomrl.engines.native.cpu_kernels import load_kernels
from atomrl.engines.native.cuda_graphs import CUDACapture
from atomrl.engines.native.decoder import DecoderModel
from atomrl.engines.native.linear import StackedLinear, WideLinear
from atomrl.engines.native.paged_batch import PagedBatch
from atomrl.engines.native.paged_cache import PagedKVCache
from atomrl.engines.native.slot_cache import KernelKVCache, KVCache
from atomrl.engines.native.step_ops import PlainOps, StepOps
from atomrl.engines.requests import DecodeTime, EngineOptions, RequestEngine, RequestState
from atomrl.engines.stop_rule import StopRule, eos_token_ids
from atomrl.models.decoder_spec import DecoderSpec, fitting_weights, read_spec, rope_table, unsupported
from atomrl.models.gpt import weight_shapes
from atomrl.models.loading import base_path, model_config_only, read_weights
from atomrl.models.lora import is_adapter
from atomrl.protocols import WeightHash, WeightUpdate
from atomrl.types import FinishReason, GenerationOutput, GenerationRequest, SamplingParams
from atomrl.weight_sync.hashes import device_hash, fetch_hashes

log = logging.getLogger(__name__)
_GPU_CHECK_EVERY = 8
"""Decode steps on a GPU between two checks for finished completions."""


class NativeEngine(RequestEngine):
    """Rollout engine with AtomRL's own decoder; `seeded` and `exact`.

    `update_weights` invalidates the cache of running completions: they are prefilled again, so each token is sampled
    from exactly its version's policy. On a GPU the host checks for finished completions every 8 tokens and cuts what
    was sampled beyond the end, so the GPU is not synchronized at each token.

    If memory runs out, all running completions are preempted, and from then on at most half as many are decoded at
    once; a warning says so.

    Example:
        >>> options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=256)
        >>> engine = NativeEngine.from_pretrained("model", tokenizer, options)  # doctest: +SKIP
        >>> generate(engine, prompts, SamplingParams(max_completion_tokens=64))  # doctest: +SKIP
    """

    seeded = exact = returns_candidates = supports_lora = updates_parts = shares_base = True
    # A layer is four products and seven Triton kernels, in a CUDA graph. On an H200 the 113 products of a step of 256
    # rows took 4.0 ms, which is 26 us each beyond the card's rate. Estimated: 2 us for a kernel, 6 us for a product of
    # adapters.
    decode_time = DecodeTime("estimated: no GPU has run it", layer_s=118e-6, adapted_layer_s=24e-6)

    def __init__(
        self,
        model: DecoderModel,
        rope: tuple[Tensor, Tensor],
        eos: tuple[int, ...],
        tokenizer: Any,
        max_rows: int,
        ops: StepOps | None = None,
    ) -> None:
        super().__init__(tokenizer, model.spec.max_positions)
        self.model, self.eos = model, eos
        check_every = 1 if model.device.type == "cpu" else _GPU_CHECK_EVERY
        self.batch: ContinuousBatch
        if ops is None:
            cache = KVCache(model, rope) if model.kernels is None else KernelKVCache(model, rope, model.kernels)
            self.batch = ContinuousBatch(cache, max_rows, self.waiting, check_every)
        else:
            capture = CUDACapture() if model.device.type == "cuda" and ops.draws else None
            pages = PagedKVCache(model, rope, max_rows)
            self.batch = PagedBatch(pages, max_rows, self.waiting, check_every, ops, capture)

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        tokenizer: Any,
        options: EngineOptions,
        use_kernel: bool = True,
        ops: StepOps | None = None,
    ) -> Self:
        """Load a model. On CPUs without bfloat16 instructions, bfloat16 weights are multiplied in float32.

        Args:
            path: folder in Hugging Face layout, folder of adapters (merged on load), or hub name.
            tokenizer: the model's; decodes completions and stop strings.
            options: see `EngineOptions`.
            use_kernel: on a CPU, use the C++ kernels if a compiler can build them.
            ops: use the paged KV cache, and these operations in a decode step. None: on a CPU the cache in slots; on a
                GPU pages with the Triton kernels, or with PyTorch if they fail (`choose_ops`).

        Raises:
            Unsupported: this engine does not support the architecture.
            ValueError: the weights do not match the config.
        """
        dtype = options.dtype
        config = model_config_only(path, options.trust_remote_code)
        spec = read_spec(config)
        device = torch.device(options.device)
        ops = choose_ops(spec, dtype, device) if ops is None and device.type != "cpu" else ops
        has_kernels = ops is None and dtype in (torch.float32, torch.bfloat16) and spec.head_dim % 2 == 0
        if device.type == "cuda":
            # With few rows cuBLAS splits the sum of a product; do not add the parts in bfloat16.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        with torch.inference_mode():
            kernels = load_kernels() if use_kernel and has_kernels else None
            linear = StackedLinear if ops is None else WideLinear
            model = DecoderModel(spec, dtype, device, kernels, linear, options.base)
            if options.base is None:
                unused = {"lm_head.weight"} if spec.tied_head else ()  # state dicts contain it nevertheless
                weights = read_weights(path, trust_remote_code=options.trust_remote_code)
                model.load(fitting_weights(weights, weight_shapes(spec), unused).items())
            if options.rounded is not None:
                model.offer(options.rounded)
            eos = eos_token_ids(base_path(path), config, tokenizer)
            return cls(model, rope_table(config, device), eos, tokenizer, options.max_concurrent_completions, ops)

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        """Return why the decoder cannot compute this model; None if it can."""
        return unsupported(config)

    # ---- Requests ----

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        return StopRule(sampling, self.eos, self.tokenizer, self.model.spec.vocab, self.model.device)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests.

        Raises:
            ValueError: as for every engine, or two requests of a group have different prompts.
        """
        prompts = {name: group.prompt for name, group in self.batch.groups.items()}
        for request in requests:
            if prompts.setdefault(request.group_id, request.prompt_token_ids) != request.prompt_token_ids:
                raise ValueError(f"request {request.request_id!r}: group {request.group_id!r} has another prompt")
        super().submit(requests)
        for request in requests:
            self.batch.add(self.held[request.request_id])

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        return self.batch.advance(self.version, end)

    def _cancel(self, states: Sequence[RequestState]) -> None:
        with torch.inference_mode():
            self.batch.remove(states)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Abort requests (None: all) and return their partial outputs; also drop cache rows retained for these ids."""
        names = None if request_ids is None else list(request_ids)
        self.batch.drop_retained(list(self.batch.retained.rows) if names is None else names)
        return super().abort(names)

    # ---- Weights ----

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the published weights; a tied head shares the embedding's name."""
        return weight_shapes(self.model.spec)

    def update_weights(self, update: WeightUpdate) -> None:
        """Copy new weights in place. Running completions continue with them after a new prefill."""
        with torch.inference_mode():
            self.batch.requeue()
            self.model.load(update.tensors)
            self.model.set_adapters(update.adapters)
        self.version = update.version

    def weight_hashes(self) -> list[WeightHash]:
        """Hashes of the weights in use: the fused and packed matrices, split and unpacked again."""
        hashes = {}
        with torch.inference_mode():
            for name, tensor in self.model.held():
                dtype = self.model.adapter_dtype if is_adapter(name) else self.model.weight_dtype
                hashes[name, dtype] = device_hash(tensor, dtype)
            values = fetch_hashes([*hashes.values()])
        return [WeightHash(name, dtype, value) for (name, dtype), value in zip(hashes, values, strict=True)]

    # ---- Memory ----

    def sleep(self) -> None:
        """Free the KV cache, and release GPU memory to other processes; the next requests allocate it again.

        Raises:
            RuntimeError: the engine has unfinished requests.
        """
        super().sleep()
        self.batch.requeue()
        self.batch.sleep()
        self.model.scratch.free()
        if self.model.device.type == "cuda":  # else PyTorch's allocator keeps it for this process
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free weights and cache."""
        del self.model, self.batch


def choose_ops(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> StepOps:
    """Return the Triton kernels if their results on this GPU match PyTorch's (`check_ops`), else PyTorch's operations.

    The fallback logs a warning with the reason.
    """
    try:
        from atomrl.engines.native.triton_ops import TritonOps, check_ops

        ops = TritonOps(spec)
        with torch.cuda.device(device):
            check_ops(ops, spec, dtype, device)
    except Exception as error:
        log.warning("native engine: decoding in plain PyTorch, several times slower: %s", error)
        return PlainOps()
    return ops
