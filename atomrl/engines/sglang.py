"""`SGLangEngine`: rollout with SGLang's HTTP server (0.5.23 or later; https://docs.sglang.io)."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from atomrl.engines.http import Server, ServerFailure, ServerOutput, logprob_of
from atomrl.engines.requests import RequestState
from atomrl.engines.server_weights import cpu_cache_tokens, weights_for_engines
from atomrl.engines.servers import ServerEngine, as_flags
from atomrl.engines.sglang_checksums import digest_of, held_hashes
from atomrl.engines.vllm import VLLMEngine
from atomrl.models.decoder_spec import unsupported
from atomrl.models.loading import read_weights
from atomrl.protocols import WeightHash, WeightUpdate
from atomrl.types import SamplingParams
from atomrl.weight_sync.broadcast import ServerGroup
from atomrl.weight_sync.channel import TransferBroken
from atomrl.weight_sync.files import WEIGHTS

_MAX_CANDIDATES = 4096  # `--sampling-mask-max-tokens`
BROADCAST_BYTES = 2**29
"""Maximum bytes of weights in one broadcast; the server holds them in addition to its own weights."""
_OWN_ARGUMENTS = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "max_running_requests": "rollout.max_concurrent_completions",
    "mem_fraction_static": "rollout.gpu_memory_utilization",
    "tp_size": "rollout.tensor_parallel",
    "pp_size": "rollout.tensor_parallel",
    "dp_size": "cluster.replicas",
    "device": "model.device",
    "host": "rollout.server",
    "port": "rollout.server",
    "enable_memory_saver": "",
    "enable_weights_cpu_backup": "",
}
_SPARE_S = 10.0  # a broadcast times out this much later than its HTTP request, whose error names the server


class SGLangEngine(ServerEngine):
    """Rollout engine over SGLang servers, its own or running ones.

    Log-probs are over the whole vocabulary at the sampling temperature, also with top-p and top-k, or over the tokens
    that these kept. A minimum length changes them, and is refused.

    `seeded` if all servers run with `--enable-deterministic-inference`, as its own server does on a GPU. On a CPU
    SGLang has no deterministic attention: it ignores the seeds, and a run cannot be repeated.

    Weights are sent as files, or broadcast in a process group of each server with this process (`server_weights:
    collective`): NCCL if both have a GPU of their own, else gloo. They are verified as far as SGLang allows
    (`_hashes`).

    Adapters need `--enable-lora`, which needs a GPU. New ones restart the running completions.
    """

    package = "sglang"
    probe = (
        "import os, torch\n"
        "os.environ |= {} if torch.cuda.is_available() else {'SGLANG_USE_CPU_ENGINE': '1'}\n"
        "import sglang.srt.entrypoints.http_server\n"
        "from sglang.srt.models.registry import ModelRegistry; archs = ModelRegistry.get_supported_archs()"
    )
    argument_class = "sglang.srt.server_args:ServerArgs"
    own_arguments = _OWN_ARGUMENTS
    decode_time = replace(VLLMEngine.decode_time, source="estimated: as vLLM")
    returns_candidates = supports_lora = True
    weight_transfers = ("files", "collective")

    def __init__(self, *args: Any) -> None:
        self.broadcast_weights: Mapping[str, Tensor] = {}
        """With `server_weights: collective`: a copy of the weights of the last update."""
        super().__init__(*args)

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        """Return why SGLang would compute another model; None if it does not."""
        if config.model_type == "llama" and getattr(config, "mlp_bias", False):
            return "mlp_bias: SGLang's Llama has no MLP biases and silently ignores those of a checkpoint"
        return None

    @classmethod
    def refusal(cls, sampling: SamplingParams) -> str | None:
        """Return why SGLang cannot give the requested log-probs; None if it can."""
        if sampling.logprobs_over == "kept" and sampling.temperature > 0 and not 0 < sampling.top_k <= _MAX_CANDIDATES:
            return (
                f"logprobs_over=kept: SGLang reports which tokens were kept only with top_k from 1 to {_MAX_CANDIDATES}"
            )
        if sampling.logprobs_over == "vocabulary" and sampling.min_completion_tokens and sampling.temperature > 0:
            return (
                "logprobs_over=vocabulary: for tokens before min_completion_tokens SGLang returns log-probs over the "
                "kept tokens: use logprobs_over=kept, remove min_completion_tokens, or use the native engine"
            )
        return super().refusal(sampling)

    # ---- Server ----

    def server_command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        options = self.options
        words = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--model-path", self.folder, "--tokenizer-path", self.tokenizer.name_or_path or self.folder]
        words += ["--dtype", str(options.dtype).removeprefix("torch."), "--log-level", "warning"]
        words += ["--max-running-requests", str(options.max_concurrent_completions), "--sleep-on-idle"]
        # A completion may fill the model's context; SGLang keeps its last two places free.
        words += ["--context-length", str(self.max_positions + 2)]
        if self.on_cpu:
            cache = cpu_cache_tokens(self.config, options.max_concurrent_completions, options.dtype)
            words += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            words += ["--max-total-tokens", str(cache)]
        else:
            words += ["--mem-fraction-static", str(options.gpu_memory_utilization), "--enable-deterministic-inference"]
            words += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
        if options.lora_rank:
            words += ["--enable-lora", "--max-lora-rank", str(options.lora_rank), "--lora-target-modules", "all"]
        if options.trust_remote_code:
            words.append("--trust-remote-code")
        words += ["--tp-size", str(options.tensor_parallel), *as_flags(options.engine_args)]
        environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        return words, environment | ({"SGLANG_USE_CPU_ENGINE": "1"} if self.on_cpu else {})

    async def _check_server(self, server: Server) -> None:
        server.info = await self.client.get(server, "/server_info")
        if self.options.lora_rank and not server.info["enable_lora"]:
            raise RuntimeError(
                f"{server.name} does not accept adapters: start it with --enable-lora --lora-target-modules all "
                f"--max-lora-rank {self.options.lora_rank}, which needs a GPU; or train all weights (no model.lora)"
            )
        server.seeded = bool(server.info["enable_deterministic_inference"])
        self.seeded = all(each.seeded for each in self.replicas)

    async def _set_memory(self, server: Server, asleep: bool) -> None:
        await self.client.post(server, "/release_memory_occupation" if asleep else "/resume_memory_occupation", {})

    # ---- Requests ----

    async def _generate(self, server: Server, state: RequestState, name: str) -> ServerOutput:
        sampling, request = state.rule.sampling, state.request
        stops = state.rule.is_stop.nonzero()[:, 0].tolist()
        params: dict[str, Any] = {
            "max_new_tokens": request.sampling.max_completion_tokens,
            "min_new_tokens": sampling.min_completion_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": stops,
            "ignore_eos": not stops,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if self.seeded:
            params["sampling_seed"] = request.seed % 2**31
        body: dict[str, Any] = {
            "rid": name,
            "input_ids": list(request.prompt_token_ids),
            "sampling_params": params,
            "return_logprob": sampling.logprobs_over != "none",
        }
        if sampling.logprobs_over == "kept" and sampling.temperature > 0:
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
        if server.adapters:
            body["lora_path"] = server.adapters
        return _output(await self.client.post(server, "/generate", body), sampling)

    async def _abort(self, server: Server, name: str) -> None:
        await self.client.post(server, "/abort_request", {"rid": name})

    async def _set_paused(self, server: Server, paused: bool) -> None:
        if paused:  # not `in_place`, which would continue with the KV cache of the old weights
            await self.client.post(server, "/pause_generation", {"mode": "retract"})
        else:
            await self.client.post(server, "/continue_generation", {"torch_empty_cache": False})

    # ---- Weights ----

    def _store(self, update: WeightUpdate) -> None:
        if self.options.server_weights == "collective":  # a copy: a restarted server may need it after the next step
            self.broadcast_weights = weights_for_engines(update, self.options.dtype, self.tied, copy=True)
        else:
            super()._store(update)

    async def _load_weights(self, server: Server) -> None:
        if self.broadcast_weights:
            await self._broadcast(server)
        elif self.weights is not None:
            body = {"model_path": str(self.weights), "weight_version": self.label, "flush_cache": True}
            await self.client.post(server, "/update_weights_from_disk", body)
        if server.adapters == self._adapter_name():
            return
        if server.adapters is not None:
            await self.client.post(server, "/unload_lora_adapter", {"lora_name": server.adapters})
        if self.adapters is not None:
            body = {"lora_name": self.adapters.name, "lora_path": str(self.adapters)}
            await self.client.post(server, "/load_lora_adapter", body)

    async def _set_version(self, server: Server) -> None:
        body = {"new_version": self.label, "abort_all_requests": False}
        await self.client.post(server, "/update_weight_version", body)
        label = (await self.client.get(server, "/model_info"))["weight_version"]
        if label != self.label:
            raise RuntimeError(f"{server.name} has weights of version {label}, not {self.label}")

    async def _broadcast(self, server: Server) -> None:
        """Broadcast the weights, `BROADCAST_BYTES` bytes per call."""
        label = (await self.client.get(server, "/model_info"))["weight_version"]
        # A server that has restarted has lost our label, and the process group with it.
        group = server.group if label.endswith(f"@{self.engine_id}") else None
        group, server.group = group or await self._join(server), None
        await self.client.post(server, "/begin_weight_update", {})
        parts = list(_parts(self.broadcast_weights))
        for number, part in enumerate(parts, start=1):
            body = {
                "names": list(part),
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in part.values()],
                "shapes": [list(tensor.shape) for tensor in part.values()],
                "group_name": group.name,
                "flush_cache": number == len(parts),
            }
            await self._collective(server, group.send(part.values()), "/update_weights_from_distributed", body)
        await self.client.post(server, "/end_weight_update", {})
        server.group = group  # only now: after a failure a new group is needed

    async def _join(self, server: Server) -> ServerGroup:
        """Create a process group with a server's ranks."""
        with suppress(RuntimeError):  # refused unless an earlier sender was cut off in the middle of an update
            await self.client.post(server, "/end_weight_update", {})
        device = self.options.device if server.info["device"] == "cuda" else "cpu"
        url, ranks = urlsplit(server.url), int(server.info["tp_size"])
        address = url.hostname, url.port
        try:
            with socket.create_connection(address, timeout=self.options.server_timeout_s) as connection:
                host = connection.getsockname()[0]  # our address as the server sees it
        except OSError as error:
            raise ServerFailure(f"{type(error).__name__} {error}") from None
        timeout_s = self.options.server_timeout_s + _SPARE_S
        group = ServerGroup(host, device, ranks, timeout_s)
        body = {"master_address": host, "master_port": group.port, "rank_offset": 1, "world_size": ranks + 1}
        body |= {"group_name": group.name, "backend": group.backend}
        await self._collective(server, group.join(), "/init_weights_update_group", body)
        return group

    async def _collective(self, server: Server, ours: Future[None], path: str, body: Mapping[str, Any]) -> None:
        """Wait for our part of a collective while the request makes the server do its part."""
        try:
            await asyncio.gather(self.client.post(server, path, body), asyncio.wrap_future(ours))
        except TransferBroken as error:
            raise ServerFailure(f"{path}: {error}") from None

    async def _hashes(self, server: Server) -> list[WeightHash]:
        """Compare the server's checksums with those of the weights that it was sent.

        Possible for architectures of the native engine, on one rank, and not for adapters. On a GPU the checksum is a
        kernel of SGLang, so SGLang must be installed here.
        """
        digest = digest_of(server.info["device"]) if unsupported(self.config) is None else None
        (*_, last) = ranks = (await self.client.post(server, "/weights_checker", {"action": "checksum"}))["ranks"]
        hashes = held_hashes(self.shapes, self._sent(), last["checksums"], digest if len(ranks) == 1 else None)
        adapters = [f"{name}.{part}" for name in self.ranks for part in ("lora_A", "lora_B")]
        return hashes + [WeightHash(name, self.options.dtype, None) for name in adapters]

    def _sent(self) -> Mapping[str, Tensor]:
        """The weights that servers were sent last, or have started with."""
        if self.weights is not None:
            return load_file(self.weights / WEIGHTS)
        weights = read_weights(self.folder, trust_remote_code=self.options.trust_remote_code)
        return self.broadcast_weights or {name: tensor.to(self.options.dtype) for name, tensor in weights}


def _output(response: Mapping[str, Any], sampling: SamplingParams) -> ServerOutput:
    """Read the response of `/generate`."""
    tokens, meta = response["output_ids"], response["meta_info"]
    logprobs = [logprob_of(entry[0]) for entry in meta.get("output_token_logprobs") or ()]
    candidates: list[list[int]] = []
    if sampling.logprobs_over == "kept" and sampling.temperature == 0:  # greedy: the only candidate is the token
        candidates, logprobs = [[token] for token in tokens], [0.0] * len(tokens)
    elif sampling.logprobs_over == "kept":
        logprobs = []
        support = zip(meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"], strict=True)
        for token, (ids, values) in zip(tokens, support, strict=True):
            ranked = sorted(zip(values, ids, strict=True), reverse=True)
            candidates.append([other for _, other in ranked])
            logprobs.append(logprob_of(values[ids.index(token)]))
    return ServerOutput(tokens, logprobs, meta["weight_versions"] or (), meta["finish_reason"]["type"], candidates)


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Split tensors into parts of at most `BROADCAST_BYTES` bytes, or of one tensor."""
    part, size = dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > BROADCAST_BYTES:
            yield part
            part, size = {}, 0
        part[name], size = tensor, size + tensor.nbytes
    yield part
