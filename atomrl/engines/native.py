"""`NativeEngine`: our own decoding for Llama, Qwen2 and Qwen3.

A prompt is run once for its whole group, and its keys and values are kept once. Completions that finish leave the
batch at once, waiting ones enter as slots fall free, also those submitted in between. Every token is drawn with one
number that depends on the completion's own seed and the position alone, so neither the order of arrival nor what shares
the batch can change a completion (beyond the rounding of the floating-point sums).

On a CPU keys and values are in slots, and C++ kernels attend to them; on a GPU they are in pages, and a decode step is
a CUDA graph of Triton kernels and matrix products (docs/development/design.md).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from atomrl.engines.batching import ContinuousBatch
from atomrl.engines.cache import KernelKVCache, KVCache, PagedKVCache
from atomrl.engines.decoder import DecoderModel, StackedLinear, WideLinear, load_kernels
from atomrl.engines.paged import CUDACapture, PagedBatch, PlainOps, StepOps
from atomrl.engines.requests import DecodeTime, EngineOptions, RequestEngine, RequestState, StopRule, eos_token_ids
from atomrl.models.gpt import DecoderSpec, fitting_weights, read_spec, rope_table, unsupported, weight_shapes
from atomrl.models.loading import base_path, model_config_only, read_weights
from atomrl.models.lora import is_adapter
from atomrl.protocols import WeightHash, WeightUpdate
from atomrl.types import FinishReason, GenerationOutput, GenerationRequest, SamplingParams
from atomrl.weight_sync.transfer import device_hash, fetch_hashes

log = logging.getLogger(__name__)
_GPU_CHECK_EVERY = 8


def choose_ops(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> StepOps:
    """The Triton kernels, once they have given what PyTorch gives at this model's shape on this GPU; else PyTorch,
    with a warning that says why."""
    try:
        from atomrl.engines.triton_kernels import TritonOps, check_ops

        ops = TritonOps(spec)
        with torch.cuda.device(device):
            check_ops(ops, spec, dtype, device)
    except Exception as error:
        log.warning("native engine: decoding in plain PyTorch, several times slower: %s", error)
        return PlainOps()
    return ops


class NativeEngine(RequestEngine):
    """Draws completions with our own decoder; `seeded` and `exact`.

    After `update_weights` the cache of completions under way is computed again (one forward pass over what they have),
    so that each token is exactly of its version's policy. On a GPU the host looks for finished completions every 8
    tokens and cuts what was drawn beyond the end, so that it is not waited for at each token.

    Where memory runs out, all completions under way are computed again, as after `update_weights`, and at most half as
    many at once from then on; a warning says so.

    Example:
        >>> options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=256)
        >>> engine = NativeEngine.from_pretrained("model", tokenizer, options)  # doctest: +SKIP
        >>> generate(engine, prompts, SamplingParams(max_completion_tokens=64))  # doctest: +SKIP
    """

    seeded = exact = returns_candidates = True
    # Four products and seven Triton kernels a layer, in a graph. On an H200 the 113 products of a step of 256 rows took
    # 4.0 ms, which is 26 us each beyond the card's rate. Estimated: 2 us for a kernel, 6 us for a product of adapters.
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
            path: a folder in Hugging Face layout or of adapters, which are merged, or a hub name.
            tokenizer: of the model; decodes completions and stop strings.
            options: how.
            use_kernel: run the C++ kernels on a CPU, where a compiler is there to build them.
            ops: keep keys and values in pages, and decode with these; None: slots on a CPU, and on a GPU pages with
                the Triton kernels where they work.

        Raises:
            Unsupported: the architecture is none that this engine knows.
            ValueError: the weights do not fit the config.
        """
        dtype = options.dtype
        config = model_config_only(path, options.trust_remote_code)
        spec = read_spec(config)
        place = torch.device(options.device)
        ops = choose_ops(spec, dtype, place) if ops is None and place.type != "cpu" else ops
        known = ops is None and dtype in (torch.float32, torch.bfloat16) and spec.head_dim % 2 == 0
        if place.type == "cuda":
            # The few rows of a step have their sums split, and the parts would be added in bfloat16.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        with torch.inference_mode():
            kernels = load_kernels() if use_kernel and known else None
            model = DecoderModel(spec, dtype, place, kernels, StackedLinear if ops is None else WideLinear)
            unused = {"lm_head.weight"} if spec.tied_head else ()  # state dicts carry it
            weights = read_weights(path, trust_remote_code=options.trust_remote_code)
            model.load(fitting_weights(weights, weight_shapes(spec), unused).items())
            eos = eos_token_ids(base_path(path), config, tokenizer)
            return cls(model, rope_table(config, place), eos, tokenizer, options.max_concurrent_completions, ops)

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        """Why our own decoder cannot compute a model; None where it can."""
        return unsupported(config)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every weight that an update may bring; a tied head follows the embedding and has no name of its own."""
        return weight_shapes(self.model.spec)

    def update_weights(self, update: WeightUpdate) -> None:
        """Take new weights in place. Completions under way go on with them, from a cache that they have computed."""
        with torch.inference_mode():
            self.batch.take_back()
            self.model.load(update.tensors)
            self.model.set_adapters(update.adapters)
        self.version = update.version

    def weight_hashes(self) -> list[WeightHash]:
        """Of the fused and packed matrices that it multiplies, cut and unpacked again."""
        found = {}
        with torch.inference_mode():
            for name, tensor in self.model.held():
                dtype = self.model.adapter_dtype if is_adapter(name) else self.model.weight_dtype
                found[name, dtype] = device_hash(tensor, dtype)
            values = fetch_hashes([*found.values()])
        return [WeightHash(name, dtype, value) for (name, dtype), value in zip(found, values, strict=True)]

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        return StopRule(sampling, self.eos, self.tokenizer, self.model.spec.vocab, self.model.device)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests in.

        Raises:
            ValueError: as in every engine, or two requests of a group have different prompts.
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

    def _withdraw(self, states: Sequence[RequestState]) -> None:
        with torch.inference_mode():
            self.batch.remove(states)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Give up requests (None: all), and return what they have so far; forget what is kept of finished ones."""
        names = None if request_ids is None else list(request_ids)
        self.batch.forget(list(self.batch.parking.parked) if names is None else names)
        return super().abort(names)

    def sleep(self) -> None:
        """Free the cache, which the next requests make again, and give a GPU its memory.

        Raises:
            RuntimeError: there are requests.
        """
        super().sleep()
        self.batch.take_back()
        self.batch.free()
        if self.model.device.type == "cuda":  # else torch keeps it, for this process alone
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free weights and cache."""
        del self.model, self.batch
