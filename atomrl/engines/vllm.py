"""`VLLMEngine`: vLLM in this process, stepped by whoever polls it."""

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
from atomrl.common.processes import launcher_hidden, progress
from atomrl.common.threads import full
from atomrl.engines.requests import (
    DIVERGED,
    DecodeTime,
    EngineOptions,
    RequestEngine,
    RequestState,
    StopRule,
    eos_token_ids,
)
from atomrl.engines.servers import EMBEDDING, HEAD, cpu_cache_bytes, is_tied, published_shapes, write_weights
from atomrl.engines.vllm_worker import WORKER_EXTENSION, whole_hashes
from atomrl.models.loading import base_path, model_config_only, resolve_folder
from atomrl.protocols import Adapter, WeightHash, WeightUpdate
from atomrl.types import FinishReason, SamplingParams
from atomrl.weight_sync.channels import write_adapters

LEAST_VERSION = "0.22.1"
"""Of vLLM in this process."""
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
}
"""vLLM's arguments that AtomRL gives it, by the key of a config that decides each; empty: none does."""


def vocabulary_cut(sampling: SamplingParams) -> bool:
    """Whether something is left out of what is drawn from, and log-probs over the whole vocabulary are asked for."""
    cuts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_completion_tokens > 0
    return sampling.logprobs_over == "vocabulary" and cuts and sampling.temperature > 0


def logprobs_mode(whole: bool) -> str:
    """vLLM's `logprobs_mode`.

    Args:
        whole: log-probs of the model itself, at temperature 1 and over the whole vocabulary, whatever is cut of what is
            drawn from; else of the distribution that is drawn from.
    """
    return "raw_logprobs" if whole else "processed_logprobs"


def other_logprobs(sampling: SamplingParams, whole: bool) -> str | None:
    """Why an engine that was started with `logprobs_mode(whole)` cannot give the log-probs of a sampling, if so."""
    if sampling.logprobs_over == "none" or sampling.temperature == 0:
        return None
    if whole and (sampling.temperature != 1 or sampling.logprobs_over == "kept"):
        return (
            f"logprobs_over={sampling.logprobs_over}: at temperature={sampling.temperature:g} this vLLM cannot give "
            "them: it was started for those over the vocabulary at temperature 1"
        )
    if not whole and vocabulary_cut(sampling):
        return "logprobs_over=vocabulary: this vLLM was started for log-probs over what is drawn from"
    return None


@contextmanager
def worker_threads(options: EngineOptions) -> Iterator[None]:
    """On a CPU, let the workers of a model that is cut share the cores: by itself vLLM gives each whole sockets."""
    if options.tensor_parallel == 1 or torch.device(options.device).type != "cpu":
        yield
        return
    own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, full() // options.tensor_parallel))}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update({name: value for name, value in own.items() if before[name] is None or name.startswith("OMP")})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def request_fields(state: RequestState) -> dict[str, Any]:
    """How vLLM is to draw a request: the fields of its `SamplingParams`, in process and over HTTP."""
    sampling = state.rule.sampling
    ranked = (sampling.top_k or -1) if sampling.logprobs_over == "kept" and sampling.temperature > 0 else 0
    return {
        "max_tokens": state.request.sampling.max_completion_tokens,
        "min_tokens": sampling.min_completion_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop": list(sampling.stop),
        "stop_token_ids": state.rule.is_stop.nonzero()[:, 0].tolist(),
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # `stop_token_ids` has those that count
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "seed": state.request.seed,
        "logprobs": None if sampling.logprobs_over == "none" else ranked,
    }


@contextmanager
def _own_randomness(device: str) -> Iterator[None]:
    """Leave the process's random states as they are: a worker of vLLM seeds all of them, and those of a run are the
    trainer's, whose dropout goes on where a checkpoint says."""
    states, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if torch.device(device).type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states)
            np.random.set_state(numbers)


class VLLMEngine(RequestEngine):
    """Draws completions with vLLM's `LLMEngine` in this process (https://docs.vllm.ai).

    Requests enter its batch between any two tokens, and new weights too: the cache of completions under way is then
    computed again, so that each token is of its version's policy. vLLM's kernels are not the trainer's, so log-probs
    differ by rounding; hence not `exact`.

    Log-probs are of the distribution that is drawn from. Where something is cut of that, those over the whole
    vocabulary are to be had at temperature 1 alone, with `EngineOptions.whole_logprobs`.

    On several GPUs (`EngineOptions.tensor_parallel`) its workers are processes, which get new weights as files.

    Its random generator has a state for each request, so a completion depends on its seed alone, but cannot go on in
    another engine where it was.

    Args:
        llm: the engine.
        shapes: of the published weights.
        tied: the head has no weight of its own.
        eos: the end-of-sequence tokens.
        tokenizer: of the model.
        whole_logprobs: as in `EngineOptions`.
    """

    package = "vllm"
    least_version = LEAST_VERSION
    argument_class = "vllm.engine.arg_utils:EngineArgs"
    own_arguments = OWN_ARGUMENTS
    probe = "from vllm import ModelRegistry; archs = ModelRegistry.get_supported_archs()"
    seeded = returns_candidates = True
    # 10.4 ms a step of 28 layers and 256 rows, and 15.1 with log-probs. Layers as of the native engine, which were not
    # measured apart; what they leave is the host's. Estimated: adapters.
    decode_time = DecodeTime(
        "measured on one H200 with vLLM 0.22.1", layer_s=118e-6, adapted_layer_s=24e-6, row_s=20e-6, logprob_s=18.4e-6
    )

    def __init__(
        self,
        llm: Any,
        shapes: Mapping[str, tuple[int, ...]],
        tied: bool,
        eos: tuple[int, ...],
        tokenizer: Any,
        whole_logprobs: bool = False,
    ) -> None:
        super().__init__(tokenizer, llm.vllm_config.model_config.max_model_len)
        self.llm, self.shapes, self.tied, self.eos, self.whole_logprobs = llm, shapes, tied, eos, whole_logprobs
        self.folder = TemporaryFolder("update")
        self.adapters: Any = None
        self.ranks: dict[str, int] = {}

    @classmethod
    def from_pretrained(cls, path: str, tokenizer: Any, options: EngineOptions) -> Self:
        """Load a model. `options.device` is one that the installed vLLM is made for; on a CPU the cache has what all
        rows may need, and at most 4 GiB.

        Raises:
            ImportError: vLLM is not installed, or older than `least_version`.
        """
        cls.check_version()
        # Its engine runs here and not in a process of its own, so that weights need not travel.
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
            # A CPU's generator has no offset to go on from, which seeds with chunks of prompts would need.
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
        with launcher_hidden(), _own_randomness(options.device), worker_threads(options):
            llm = LLMEngine.from_engine_args(EngineArgs(**arguments | dict(options.engine_args)))
        torch.set_num_threads = set_threads  # on a CPU it puts one there that does nothing, for the trainer too
        eos = eos_token_ids(folder, config, tokenizer)
        shapes = published_shapes(folder, config, options.trust_remote_code)
        return cls(llm, shapes, is_tied(config), eos, tokenizer, options.whole_logprobs)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every weight that an update may bring, by its published name; a tied head has none."""
        return self.shapes

    def update_weights(self, update: WeightUpdate) -> None:
        """Take new weights in place. Completions under way go on with them, from a cache that is computed again."""
        tensors = list(update.tensors)
        if tensors and self._in_process:
            self.llm.collective_rpc("load_published", args=(self._loaded(tensors),))
        elif tensors:
            dtype = self.llm.vllm_config.model_config.dtype
            folder = write_weights(replace(update, tensors=tensors), self.folder.path / "weights", dtype, self.tied)
            self.llm.collective_rpc("load_published", args=(str(folder),))
            shutil.rmtree(folder)
        self.adapters = self._load_adapters(update.adapters, update.version) if update.adapters else None
        self.ranks = {name: len(adapter.a) for name, adapter in update.adapters.items()}
        self.llm.reset_prefix_cache(reset_running_requests=True)
        self.version = update.version
        for state in self.held.values():
            state.set_version(update.version)

    def weight_hashes(self) -> list[WeightHash]:
        """Of the stacked matrices in the worker, cut again; of those that vLLM packs on a CPU by their product with the
        identity, which costs as much as a forward pass over as many tokens as the matrix has inputs. Fused experts
        cannot be read back."""
        found = self.llm.collective_rpc("published_hashes", args=(self.shapes, self.tied, self.ranks))
        return whole_hashes(found, self.shapes)

    @property
    def _in_process(self) -> bool:
        """Whether its only worker is in this process, and reads tensors where they are."""
        return bool(self.llm.vllm_config.parallel_config.distributed_executor_backend == "uni")

    def _loaded(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What vLLM reads. It takes a tied head's weight from nothing but its own name."""
        for name, tensor in tensors:
            yield name, tensor
            if self.tied and name == EMBEDDING:
                yield HEAD, tensor

    def _load_adapters(self, adapters: Mapping[str, Adapter], version: int) -> Any:
        from vllm.lora.request import LoRARequest

        folder = self.folder.path / f"adapters-{version}"
        write_adapters(adapters, folder)
        self.llm.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
        for earlier in folder.parent.iterdir():
            if earlier != folder:
                shutil.rmtree(earlier)
        return LoRARequest("policy", 1, str(folder))  # loaded: requests must not read it again

    @classmethod
    def refusal(cls, sampling: SamplingParams) -> str | None:
        """Why vLLM cannot give the log-probs that are asked for; None where it can."""
        if (reason := super().refusal(sampling)) or not vocabulary_cut(sampling) or sampling.temperature == 1:
            return reason
        return (
            f"logprobs_over=vocabulary: at temperature={sampling.temperature:g} vLLM gives log-probs over what is "
            "drawn from, after top_p, top_k and min_completion_tokens: take temperature=1, ask for logprobs_over=kept, "
            "cut nothing, or take the native engine"
        )

    def refused(self, sampling: SamplingParams) -> str | None:
        """Why this engine, as it was started, cannot draw like that; None where it can."""
        return self.refusal(sampling) or other_logprobs(sampling, self.whole_logprobs)

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        vocab = self.llm.vllm_config.model_config.get_vocab_size()
        return StopRule(sampling, self.eos, self.tokenizer, vocab, torch.device("cpu"))

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        from vllm import SamplingParams as VLLMSampling
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        while self.waiting:
            state = self.waiting.popleft()
            state.set_version(self.version)
            prompt = TokensPrompt(prompt_token_ids=list(state.request.prompt_token_ids))
            params = VLLMSampling(**request_fields(state), output_kind=RequestOutputKind.DELTA)
            self.llm.add_request(state.request.request_id, prompt, params, lora_request=self.adapters)
        finished: list[tuple[RequestState, FinishReason]] = []
        while True:
            # It draws from the process's generator too, although every request has a seed.
            with torch.random.fork_rng(devices=[]):
                outputs = self.llm.step()
            for output in outputs:
                progress()
                state, (delta,) = self.held[output.request_id], output.outputs
                self._take(state, delta)
                if output.finished:
                    if delta.finish_reason not in ("stop", "length"):
                        raise RuntimeError(f"vLLM ended a completion with {delta.finish_reason!r}")
                    finished.append((state, delta.finish_reason))
            if any(state.diverged() for state, _ in finished):
                raise ValueError(DIVERGED)
            if finished or time.monotonic() >= end:
                return finished

    def _take(self, state: RequestState, delta: Any) -> None:
        """Keep the tokens of a step, their log-probs and, where they are asked for, what they were drawn from."""
        sampling = state.rule.sampling
        state.token_ids += delta.token_ids
        if sampling.logprobs_over == "none":
            return
        drawn = list(zip(delta.token_ids, delta.logprobs, strict=True))
        if sampling.logprobs_over == "vocabulary":
            state.logprobs += [found[token].logprob for token, found in drawn]
            return
        for token, found in drawn:
            ranked = [token] if sampling.temperature == 0 else sorted(found, key=lambda other: -found[other].logprob)
            kept = [other for other in ranked if found[other].logprob > -torch.inf]
            state.logprobs.append(0.0 if sampling.temperature == 0 else found[token].logprob)
            state.candidate_counts.append(len(kept))
            state.candidate_ids.extend(kept)

    def _cancel(self, states: Sequence[RequestState]) -> None:
        self.llm.abort_request([state.request.request_id for state in states])

    def sleep(self) -> None:
        """Give back the GPU memory of weights and cache; on a CPU there is none to give.

        Raises:
            RuntimeError: there are requests.
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
        """Free what vLLM holds."""
        self.folder.close()
        self.llm.engine_core.shutdown()
        del self.llm
