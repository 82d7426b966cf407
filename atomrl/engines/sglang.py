"""`SGLangEngine`: SGLang behind its HTTP server."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from atomrl.engines.http import HttpAnswer, Server, ServerGone, logprob_of
from atomrl.engines.requests import RequestState
from atomrl.engines.servers import EMBEDDING, HEAD, ServerEngine, as_flags, cpu_cache_tokens, weights_for_engines
from atomrl.engines.vllm import VLLMEngine
from atomrl.models.gpt import unsupported
from atomrl.models.loading import read_weights
from atomrl.protocols import WeightHash, WeightUpdate
from atomrl.types import SamplingParams
from atomrl.weight_sync import tensor_hash
from atomrl.weight_sync.channels import WEIGHTS, ServerGroup, TransferBroken

# --------------------------------------------------------------------------------------------------------------------
# What SGLang tells of the weights that it holds, beside those that it was sent.

DIFFERS = -1
"""In the place of a hash, which is never negative: the server holds something else."""
Digest = Callable[[Tensor], str]
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ROWS = 64  # of which the vocabulary's rows are made a multiple, with zeros


def digest_of(device: str) -> Digest | None:
    """How a server on a kind of device sums a tensor up for `/weights_checker` (0.5.23); None where it cannot be done
    here: on a GPU it is a kernel of SGLang's own.

    Example:
        >>> digest_of("cpu")(torch.zeros(2))
        'af5570f5a1810b7a'
    """
    if device == "cpu":
        return lambda tensor: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()[:16]
    if device == "cuda" and torch.cuda.is_available() and find_spec("sglang") is not None:
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

        return lambda tensor: f"{gpu_tensor_hash(tensor.cuda()):016x}"
    return None


def held_hashes(
    names: Iterable[str], sent: Mapping[str, Tensor], checksums: Mapping[str, str], digest: Digest | None
) -> list[WeightHash]:
    """What a server holds of the weights that it was sent: `tensor_hash` where it has them bit by bit, `DIFFERS` where
    it has not, and None where it does not tell.

    SGLang tells a checksum of each of its own parameters, in which several weights may be stacked; where they are not
    what was sent, all of them differ.

    Args:
        names: of the published weights, all of which were `sent`.
        sent: in the server's own dtype.
        checksums: by the server's own names.
        digest: makes such a checksum of a tensor.
    """
    values: dict[str, int] = {}
    for own, checksum in checksums.items() if digest else ():
        prefix, _, leaf = own.rpartition(".")
        before, _, layer = prefix.rpartition(".")
        parts = [f"{before}.{part}.{leaf}" for part in _STACKED.get(layer, (layer,))] if before else [own]
        if digest and all(name in sent for name in parts):
            whole = torch.cat([sent[name] for name in parts])
            if own in (EMBEDDING, HEAD):
                whole = torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % _ROWS))
            same = digest(whole) == checksum
            values |= {name: tensor_hash(sent[name], sent[name].dtype) if same else DIFFERS for name in parts}
    return [WeightHash(name, sent[name].dtype, values.get(name)) for name in names]


_MOST_KEPT = 4096  # of `--sampling-mask-max-tokens`
_AT_ONCE = 2**29  # bytes in a call, which the server holds beside its own weights
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
_SPARE_S = 10.0  # by which a broadcast outlasts the request that belongs to it, whose error names the server


class SGLangEngine(ServerEngine):
    """Draws completions with an SGLang server (0.5.23 or later; https://docs.sglang.io), its own or such as are there.

    Log-probs are over the whole vocabulary at the sampling temperature, also where top-p and top-k cut it, or over what
    they kept. A minimum length shifts them, and is refused.

    `seeded` where all servers run with `--enable-deterministic-inference`, as its own do on a GPU. SGLang has no
    attention for it on a CPU: there it ignores the seeds of completions, and a run cannot be repeated.

    Weights travel as files, or in a process group of each server with this process (`server_weights: collective`); NCCL
    where both have a GPU, of their own, else gloo. They are read back as far as SGLang tells (`_hashes`).

    Adapters need `--enable-lora`, which wants a GPU. New ones have the completions under way begin again.
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
    returns_candidates = True
    weight_ways = ("files", "collective")
    sent: Mapping[str, Tensor]
    """Where weights are broadcast: the last."""

    def __init__(self, *args: Any) -> None:
        self.sent = {}
        super().__init__(*args)

    @classmethod
    def unsupported(cls, config: PretrainedConfig) -> str | None:
        """Why SGLang would compute another model; None where it does not."""
        if config.model_type == "llama" and getattr(config, "mlp_bias", False):
            return "mlp_bias: SGLang's Llama has no biases there, and passes over those of a checkpoint without a word"
        return None

    @classmethod
    def refusal(cls, sampling: SamplingParams) -> str | None:
        """Why SGLang cannot give the log-probs that are asked for; None where it can."""
        if sampling.logprobs_over == "kept" and sampling.temperature > 0 and not 0 < sampling.top_k <= _MOST_KEPT:
            return f"logprobs_over=kept: SGLang tells which tokens were kept where top_k is 1 to {_MOST_KEPT}"
        if sampling.logprobs_over == "vocabulary" and sampling.min_completion_tokens and sampling.temperature > 0:
            return (
                "logprobs_over=vocabulary: of tokens before min_completion_tokens SGLang gives log-probs over what is "
                "drawn from: ask for logprobs_over=kept, drop min_completion_tokens, or take the native engine"
            )
        return super().refusal(sampling)

    def _command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
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

    async def _check(self, server: Server) -> None:
        found = await self.client.get(server, "/server_info")
        if self.options.lora_rank and not found["enable_lora"]:
            raise RuntimeError(
                f"{server.name} takes no adapters: start it with --enable-lora --lora-target-modules all "
                f"--max-lora-rank {self.options.lora_rank}, which wants a GPU; or train all weights (no model.lora)"
            )
        server.about = found
        server.seeded = bool(found["enable_deterministic_inference"])
        self.seeded = all(each.seeded for each in self.servers)

    async def _generate(self, server: Server, state: RequestState, name: str) -> HttpAnswer:
        sampling, request = state.rule.sampling, state.request
        stops = state.rule.is_stop.nonzero()[:, 0].tolist()
        kept = sampling.logprobs_over == "kept" and sampling.temperature > 0
        params: dict[str, Any] = {
            "max_new_tokens": request.sampling.max_completion_tokens,
            "min_new_tokens": sampling.min_completion_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
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
        if kept:
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
        if server.adapters:
            body["lora_path"] = server.adapters
        return self._read(await self.client.post(server, "/generate", body), sampling)

    def _read(self, found: Mapping[str, Any], sampling: SamplingParams) -> HttpAnswer:
        tokens, meta = found["output_ids"], found["meta_info"]
        logprobs = [logprob_of(entry[0]) for entry in meta.get("output_token_logprobs") or ()]
        candidates: list[list[int]] = []
        if sampling.logprobs_over == "kept" and sampling.temperature == 0:  # greedy: drawn from itself
            candidates, logprobs = [[token] for token in tokens], [0.0] * len(tokens)
        elif sampling.logprobs_over == "kept":
            logprobs = []
            support = zip(meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"], strict=True)
            for token, (ids, values) in zip(tokens, support, strict=True):
                ranked = sorted(zip(values, ids, strict=True), reverse=True)
                candidates.append([other for _, other in ranked])
                logprobs.append(logprob_of(values[ids.index(token)]))
        return HttpAnswer(tokens, logprobs, meta["weight_versions"] or (), meta["finish_reason"]["type"], candidates)

    async def _abort(self, server: Server, name: str) -> None:
        await self.client.post(server, "/abort_request", {"rid": name})

    async def _hold(self, server: Server) -> None:
        # Not `in_place`, which goes on with the cache of the weights before.
        await self.client.post(server, "/pause_generation", {"mode": "retract"})

    async def _go_on(self, server: Server) -> None:
        await self.client.post(server, "/continue_generation", {"torch_empty_cache": False})

    def _keep(self, update: WeightUpdate) -> None:
        if self.options.server_weights == "collective":  # the trainer may change its own before a server asks again
            self.sent = weights_for_engines(update, self.options.dtype, self.tied, copy=True)
        else:
            super()._keep(update)

    async def _load(self, server: Server) -> None:
        if self.sent:
            await self._broadcast(server)
        elif self.weights is not None:
            named = {"model_path": str(self.weights), "weight_version": self.label, "flush_cache": True}
            await self.client.post(server, "/update_weights_from_disk", named)
        if server.adapters == self._adapter_name():
            return
        if server.adapters is not None:
            await self.client.post(server, "/unload_lora_adapter", {"lora_name": server.adapters})
        if self.adapters is not None:
            named = {"lora_name": self.adapters.name, "lora_path": str(self.adapters)}
            await self.client.post(server, "/load_lora_adapter", named)

    async def _broadcast(self, server: Server) -> None:
        """Send what is kept, a part in each call."""
        label = (await self.client.get(server, "/model_info"))["weight_version"]
        group = server.group if label.endswith(f"@{self.mark}") else None  # it has started again
        group, server.group = group or await self._join(server), None
        await self.client.post(server, "/begin_weight_update", {})
        parts = list(_parts(self.sent))
        for number, part in enumerate(parts, start=1):
            body = {
                "names": list(part),
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in part.values()],
                "shapes": [list(tensor.shape) for tensor in part.values()],
                "group_name": group.name,
                "flush_cache": number == len(parts),
            }
            await self._together(server, group.send(part.values()), "/update_weights_from_distributed", body)
        await self.client.post(server, "/end_weight_update", {})
        server.group = group  # whoever fails before is given another one

    async def _join(self, server: Server) -> ServerGroup:
        """A new group with a server's ranks."""
        with suppress(RuntimeError):  # it has none under way, unless a sender went in the middle
            await self.client.post(server, "/end_weight_update", {})
        device = self.options.device if server.about["device"] == "cuda" else "cpu"
        address, ranks = urlsplit(server.url), int(server.about["tp_size"])
        place = address.hostname, address.port
        try:
            with socket.create_connection(place, timeout=self.options.server_timeout_s) as found:
                host = found.getsockname()[0]  # by which it reaches us
        except OSError as error:
            raise ServerGone(f"{type(error).__name__} {error}") from None
        timeout_s = self.options.server_timeout_s + _SPARE_S
        group = ServerGroup(host, device, ranks, timeout_s)
        body = {"master_address": host, "master_port": group.port, "rank_offset": 1, "world_size": ranks + 1}
        body |= {"group_name": group.name, "backend": group.backend}
        await self._together(server, group.join(), "/init_weights_update_group", body)
        return group

    async def _together(self, server: Server, ours: Future[None], path: str, body: Mapping[str, Any]) -> None:
        """Our part of a collective call, while the server has its own."""
        try:
            await asyncio.gather(self.client.post(server, path, body), asyncio.wrap_future(ours))
        except TransferBroken as error:
            raise ServerGone(f"{path}: {error}") from None

    async def _hashes(self, server: Server) -> list[WeightHash]:
        """A server tells a checksum of each parameter. That is enough for layers as the native engine knows them, on
        one rank, without adapters' own weights; on a GPU the checksum is made by SGLang, where it is installed here."""
        digest = digest_of(server.about["device"]) if unsupported(self.config) is None else None
        (*_, last) = ranks = (await self.client.post(server, "/weights_checker", {"action": "checksum"}))["ranks"]
        found = held_hashes(self.shapes, self._given(), last["checksums"], digest if len(ranks) == 1 else None)
        adapters = [f"{name}.{part}" for name in self.ranks for part in ("lora_A", "lora_B")]
        return found + [WeightHash(name, self.options.dtype, None) for name in adapters]

    def _given(self) -> Mapping[str, Tensor]:
        """What servers have been given last, or have started with."""
        if self.weights is not None:
            return load_file(self.weights / WEIGHTS)
        weights = read_weights(self.folder, trust_remote_code=self.options.trust_remote_code)
        return self.sent or {name: tensor.to(self.options.dtype) for name, tensor in weights}

    async def _name_version(self, server: Server) -> None:
        label = {"new_version": self.label, "abort_all_requests": False}
        await self.client.post(server, "/update_weight_version", label)
        found = (await self.client.get(server, "/model_info"))["weight_version"]
        if found != self.label:
            raise RuntimeError(f"{server.name} has weights of version {found}, not {self.label}")

    async def _set_memory(self, server: Server, asleep: bool) -> None:
        await self.client.post(server, "/release_memory_occupation" if asleep else "/resume_memory_occupation", {})


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """In pieces of at most `_AT_ONCE` bytes, or of one tensor."""
    part, size = dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > _AT_ONCE:
            yield part
            part, size = {}, 0
        part[name], size = tensor, size + tensor.nbytes
    yield part
