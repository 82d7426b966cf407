"""`VLLMEngine`: rollout with vLLM's `LLMEngine` in this process (https://docs.vllm.ai)."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, get_args

import numpy as np
import torch
from torch import Tensor

from atomrl.common.files import TemporaryFolder
from atomrl.common.hangs import progress
from atomrl.common.launchers import launcher_hidden
from atomrl.common.threads import max_threads
from atomrl.engines.requests import DIVERGED, DecodeTime, EngineOptions, RequestEngine, RequestState
from atomrl.engines.server_weights import HEAD, cpu_cache_bytes, published_shapes, tied_embedding, write_weights
from atomrl.engines.stop_rule import StopRule, eos_token_ids
from atomrl.engines.vllm_images import banned_words, check_prompt, multimodal
from atomrl.engines.vllm_worker import WORKER_EXTENSION, whole_hashes
from atomrl.models.loading import base_path, model_config_only, resolve_folder
from atomrl.models.vision import Patches, media_tokens
from atomrl.protocols import Adapter, WeightHash, WeightUpdate
from atomrl.types import FinishReason, SamplingParams
from atomrl.weight_sync.files import write_adapters

LEAST_VERSION = "0.22.1"
"""Minimum version of vLLM in this process."""
OWN_ARGUMENTS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "seed": "seed",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "max_num_seqs": "rollout.max_concurrent_completions",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "data_parallel_size": "cluster.replicas",
    "pipeline_parallel_size": "rollout.tensor_parallel",
    "logprobs_mode": "rollout.logprobs_over",
    "max_logprobs": "rollout.logprobs_over",
    "enable_sleep_mode": "",
    "worker_extension_cls": "",
    "mm_device_do_normalize": "",
}
"""vLLM arguments that AtomRL sets itself -> the config key that decides them ("" for none)."""


def vocabulary_cut(sampling: SamplingParams) -> bool:
    """Return True if a sampling restricts the tokens but requests log-probs over the whole vocabulary."""
    cuts = sampling.cuts or sampling.min_completion_tokens > 0
    return sampling.logprobs_over == "vocabulary" and cuts and sampling.temperature > 0


def logprobs_mode(whole: bool) -> str:
    """Return vLLM's `logprobs_mode` for `EngineOptions.whole_logprobs`."""
    return "raw_logprobs" if whole else "processed_logprobs"


def other_logprobs(sampling: SamplingParams, whole: bool) -> str | None:
    """Return why an engine started with `logprobs_mode(whole)` cannot give a sampling's log-probs; None if it can."""
    if sampling.logprobs_over == "none" or sampling.temperature == 0:
        return None
    if whole and (sampling.temperature != 1 or sampling.logprobs_over == "kept"):
        return (
            f"logprobs_over={sampling.logprobs_over}: at temperature={sampling.temperature:g} this vLLM cannot return "
            "them: it was started for log-probs over the vocabulary at temperature 1"
        )
    if not whole and vocabulary_cut(sampling):
        return "logprobs_over=vocabulary: this vLLM was started for log-probs over the kept tokens"
    return None


@contextmanager
def worker_threads(options: EngineOptions) -> Iterator[None]:
    """Share a CPU's cores among tensor-parallel workers; by default vLLM binds each to whole sockets."""
    if options.tensor_parallel == 1 or torch.device(options.device).type != "cpu":
        yield
        return
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, max_threads() // options.tensor_parallel)),
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update({name: value for name, value in own.items() if before[name] is None or name.startswith("OMP")})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def request_fields(state: RequestState) -> dict[str, Any]:
    """Return the fields of vLLM's `SamplingParams` for a request, in process and over HTTP."""
    sampling = state.rule.sampling
    ranked = (sampling.top_k or -1) if sampling.logprobs_over == "kept" and sampling.temperature > 0 else 0
    return {
        "max_tokens": state.request.sampling.max_completion_tokens,
        "min_tokens": sampling.min_completion_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": state.rule.is_stop.nonzero()[:, 0].tolist(),
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # `stop_token_ids` contains the ones to stop at
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "seed": state.request.seed,
        "logprobs": None if sampling.logprobs_over == "none" else ranked,
        "bad_words": list(banned_words(state.rule.tokenizer, state.rule.never_ids)),
    }


@contextmanager
def _preserved_rng(device: str) -> Iterator[None]:
    """Restore the process's random states afterwards: vLLM's worker seeds them all, and the trainer needs its own."""
    states, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if torch.device(device).type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states)
            np.random.set_state(numbers)


class VLLMEngine(RequestEngine):
    """Rollout engine over vLLM's `LLMEngine` in this process.

    Requests and new weights enter between any two tokens. After `update_weights` the KV cache of running completions is
    recomputed, so each token is sampled from its version's policy. vLLM's kernels are not the trainer's, so log-probs
    differ by rounding; hence not `exact`.

    Log-probs are those of the distribution that is sampled from. With top-k, top-p or a minimum length, log-probs over
    the whole vocabulary need temperature 1 and `EngineOptions.whole_logprobs`.

    On several GPUs (`EngineOptions.tensor_parallel`) its workers are processes, which load new weights from files.

    vLLM has a random generator per request. So a completion depends on its seed alone, but cannot be continued in
    another engine.

    Args:
        llm: the `LLMEngine`.
        shapes: of the published weights.
        tied: published name of the embedding whose weight the head shares; None: the head has its own.
        eos: end-of-sequence tokens.
        tokenizer: the model's.
        whole_logprobs: see `EngineOptions`.
        images: reads the patches of pictures; None: prompts have none.
    """

    package = "vllm"
    least_version, images_version = LEAST_VERSION, "0.32"
    argument_class = "vllm.engine.arg_utils:EngineArgs"
    own_arguments = OWN_ARGUMENTS
    probe = "from vllm import ModelRegistry; archs = ModelRegistry.get_supported_archs()"
    seeded = returns_candidates = supports_lora = supports_images = True
    # 10.4 ms per step of 28 layers and 256 rows, and 15.1 with log-probs. The cost of a layer is the native engine's,
    # the rest counts as the host's. Adapters are an estimate.
    decode_time = DecodeTime(
        "measured on one H200 with vLLM 0.22.1", layer_s=118e-6, adapted_layer_s=24e-6, row_s=20e-6, logprob_s=18.4e-6
    )

    def __init__(
        self,
        llm: Any,
        shapes: Mapping[str, tuple[int, ...]],
        tied: str | None,
        eos: tuple[int, ...],
        tokenizer: Any,
        whole_logprobs: bool = False,
        images: Patches | None = None,
    ) -> None:
        super().__init__(tokenizer, llm.vllm_config.model_config.max_model_len)
        self.images = images
        self.llm, self.shapes, self.tied, self.eos, self.whole_logprobs = llm, shapes, tied, eos, whole_logprobs
        self.folder = TemporaryFolder("update")
        self.adapters: Any = None
        self.ranks: dict[str, int] = {}

    @classmethod
    def from_pretrained(cls, path: str, tokenizer: Any, options: EngineOptions) -> Self:
        """Load a model. The installed build of vLLM must support `options.device`.

        On a CPU the KV cache is large enough for all rows, but at most 4 GiB.

        Raises:
            ImportError: vLLM is not installed, or older than `least_version`; for pictures than `images_version`.
        """
        cls.check_version(None if options.images is None else cls.images_version)
        # Run the engine core in this process, so that weights are not copied to another one.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs, LLMEngine
        from vllm.config.lora import MaxLoRARanks

        folder = str(resolve_folder(base_path(path)))
        on_cpu = torch.device(options.device).type == "cpu"
        config = model_config_only(path, options.trust_remote_code)
        cache_bytes = cpu_cache_bytes(config, options.max_concurrent_completions, options.dtype)
        set_threads = torch.set_num_threads
        arguments = {
            "model": folder,
            "tokenizer": tokenizer.name_or_path or folder,
            "dtype": str(options.dtype).removeprefix("torch."),
            "max_num_seqs": options.max_concurrent_completions,
            "trust_remote_code": options.trust_remote_code,
            "logprobs_mode": logprobs_mode(options.whole_logprobs),
            "max_logprobs": -1,
            # A CPU's generator has no offset to continue from, which seeds with chunked prefill would need.
            "enable_chunked_prefill": not on_cpu,
            "enable_prefix_caching": True,
            "enforce_eager": on_cpu,
            "enable_sleep_mode": not on_cpu,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "kv_cache_memory_bytes": cache_bytes if on_cpu else None,
            "tensor_parallel_size": options.tensor_parallel,
            "enable_lora": options.lora_rank > 0,
            "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= options.lora_rank),
            "disable_log_stats": True,
            "worker_extension_cls": WORKER_EXTENSION,
        }
        if options.images is not None:  # its pictures come normalized
            arguments["mm_device_do_normalize"] = False
        with launcher_hidden(), _preserved_rng(options.device), worker_threads(options):
            llm = LLMEngine.from_engine_args(EngineArgs(**arguments | dict(options.engine_args)))
        torch.set_num_threads = set_threads  # on a CPU vLLM replaces it by a function that does nothing
        eos = eos_token_ids(folder, config, tokenizer)
        shapes = published_shapes(folder, config, options.trust_remote_code)
        return cls(llm, shapes, tied_embedding(config, shapes), eos, tokenizer, options.whole_logprobs, options.images)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the published weights; a tied head has none."""
        return self.shapes

    def update_weights(self, update: WeightUpdate) -> None:
        """Load new weights in place. Running completions continue with them from a recomputed KV cache."""
        tensors = list(update.tensors)
        if tensors and self._in_process:
            self.llm.collective_rpc("load_published", args=(self._with_head(tensors),))
        elif tensors:
            dtype = self.llm.vllm_config.model_config.dtype
            folder = write_weights(replace(update, tensors=tensors), self.folder.path / "weights", dtype, self.tied)
            self.llm.collective_rpc("load_published", args=(str(folder),))
            shutil.rmtree(folder)
        if tensors and self.images is not None:  # its features are those of the weights before
            self.llm.reset_encoder_cache()
        self.adapters = self._load_adapters(update.adapters, update.version) if update.adapters else None
        self.ranks = {name: len(adapter.a) for name, adapter in update.adapters.items()}
        self.llm.reset_prefix_cache(reset_running_requests=True)
        self.version = update.version
        for state in self.held.values():
            state.set_version(update.version)

    def weight_hashes(self) -> list[WeightHash]:
        """Hashes of the workers' weights, stacked matrices split again.

        A matrix that vLLM packs on a CPU is read by multiplying it with the identity, which costs as much as a forward
        pass over as many tokens as it has inputs. Fused experts cannot be read back.
        """
        workers = self.llm.collective_rpc("published_hashes", args=(self.shapes, self.tied, self.ranks))
        return whole_hashes(workers, self.shapes)

    @property
    def _in_process(self) -> bool:
        """True if the only worker is in this process and can read tensors without a copy."""
        return bool(self.llm.vllm_config.parallel_config.distributed_executor_backend == "uni")

    def _with_head(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Add a tied head under its own name, without which vLLM keeps the old one."""
        for name, tensor in tensors:
            yield name, tensor
            if name == self.tied:
                yield HEAD, tensor

    def _load_adapters(self, adapters: Mapping[str, Adapter], version: int) -> Any:
        from vllm.lora.request import LoRARequest

        folder = self.folder.path / f"adapters-{version}"
        write_adapters(adapters, folder)
        self.llm.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
        for earlier in folder.parent.iterdir():
            if earlier != folder:
                shutil.rmtree(earlier)
        return LoRARequest("policy", 1, str(folder))  # without `load_inplace`, or each request would load it again

    @classmethod
    def refusal(cls, sampling: SamplingParams) -> str | None:
        """Return why vLLM cannot give the requested log-probs; None if it can."""
        if (reason := super().refusal(sampling)) or not vocabulary_cut(sampling) or sampling.temperature == 1:
            return reason
        return (
            f"logprobs_over=vocabulary: at temperature={sampling.temperature:g} vLLM returns log-probs over the tokens "
            "kept by top_p, top_k and min_completion_tokens: use temperature=1 or logprobs_over=kept, remove these "
            "limits, or use the native engine"
        )

    def refused(self, sampling: SamplingParams) -> str | None:
        """Return why this engine, as it was started, cannot sample like that; None if it can."""
        reason = self.image_refusal(sampling) if self.images is not None else None
        return reason or self.refusal(sampling) or other_logprobs(sampling, self.whole_logprobs)

    @classmethod
    def image_refusal(cls, sampling: SamplingParams) -> str | None:
        """Return why vLLM cannot give the requested log-probs where tokens are banned; None if it can."""
        if sampling.logprobs_over != "vocabulary" or sampling.temperature in (0, 1):
            return None
        return (
            f"logprobs_over=vocabulary: at temperature={sampling.temperature:g} vLLM returns log-probs over the "
            "tokens that may be sampled, and those of pictures may not: use temperature=1, logprobs_over=kept, or the "
            "hf engine"
        )

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        model = self.llm.vllm_config.model_config
        never = media_tokens(model.hf_config) if self.images is not None else ()
        return StopRule(sampling, self.eos, self.tokenizer, model.get_vocab_size(), torch.device("cpu"), never)

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        from vllm import SamplingParams as VLLMSampling
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        while self.waiting:
            state = self.waiting.popleft()
            state.set_version(self.version)
            prompt: Any = TokensPrompt(prompt_token_ids=list(state.request.prompt_token_ids))
            if state.request.images:
                assert self.images is not None, "the engine of a run with pictures is created with `images`"
                prompt = multimodal(state.request, self.images, self.llm.vllm_config.model_config.dtype)
            params = VLLMSampling(**request_fields(state), output_kind=RequestOutputKind.DELTA)
            self.llm.add_request(state.request.request_id, prompt, params, lora_request=self.adapters)
        finished: list[tuple[RequestState, FinishReason]] = []
        while True:
            # vLLM also uses the process's random generator, although every request has a seed.
            with torch.random.fork_rng(devices=[]):
                outputs = self.llm.step()
            for output in outputs:
                progress()
                state, (delta,) = self.held[output.request_id], output.outputs
                if state.request.images and not state.token_ids:
                    check_prompt(output.prompt_token_ids, state.request, "vLLM")
                _append(state, delta)
                if output.finished:
                    if delta.finish_reason not in ("stop", "length"):
                        raise RuntimeError(f"vLLM ended a completion with {delta.finish_reason!r}")
                    finished.append((state, delta.finish_reason))
            if any(state.diverged() for state, _ in finished):
                raise ValueError(DIVERGED)
            if finished or time.monotonic() >= end:
                return finished

    def _cancel(self, states: Sequence[RequestState]) -> None:
        self.llm.abort_request([state.request.request_id for state in states])

    def sleep(self) -> None:
        """Release the GPU memory of weights and cache; does nothing on a CPU.

        Raises:
            RuntimeError: the engine has unfinished requests.
        """
        super().sleep()
        if self.llm.vllm_config.model_config.enable_sleep_mode:
            self.llm.sleep(level=1)

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._asleep and self.llm.vllm_config.model_config.enable_sleep_mode:
            self.llm.wake_up()
        super().wake()

    def close(self) -> None:
        """Shut vLLM down."""
        self.folder.close()
        self.llm.engine_core.shutdown()
        del self.llm


def _append(state: RequestState, delta: Any) -> None:
    """Append the tokens of a vLLM step, their log-probs and, if requested, the candidates that top-k and top-p kept."""
    sampling = state.rule.sampling
    state.token_ids += delta.token_ids
    if sampling.logprobs_over == "none":
        return
    sampled = list(zip(delta.token_ids, delta.logprobs, strict=True))
    if sampling.logprobs_over == "vocabulary":
        state.logprobs += [logprobs[token].logprob for token, logprobs in sampled]
        return
    greedy = sampling.temperature == 0
    for token, logprobs in sampled:
        ranked = [token] if greedy else sorted(logprobs, key=lambda other: -logprobs[other].logprob)
        candidates = [other for other in ranked if logprobs[other].logprob > -torch.inf]
        state.logprobs.append(0.0 if greedy else logprobs[token].logprob)
        state.candidate_counts.append(len(candidates))
        state.candidate_ids.extend(candidates)
