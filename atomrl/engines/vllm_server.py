"""`VLLMServerEngine`: rollout with vLLM's OpenAI-compatible server, by its tokens-in, tokens-out endpoint."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from packaging.version import Version

from atomrl.common.threads import max_threads
from atomrl.engines.http import Server, ServerOutput, logprob_of
from atomrl.engines.requests import RequestState
from atomrl.engines.server_weights import cpu_cache_bytes
from atomrl.engines.servers import ServerEngine, as_flags
from atomrl.engines.vllm import VLLMEngine, logprobs_mode, other_logprobs, request_fields
from atomrl.engines.vllm_images import ENCODING, check_prompt, features
from atomrl.engines.vllm_worker import WORKER_EXTENSION, whole_hashes
from atomrl.protocols import WeightHash
from atomrl.types import SamplingParams

ANSWER_S = 30.0
"""Seconds to wait for a server's answer before a run."""
_ADAPTERS = "policy"
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


class VLLMServerEngine(ServerEngine):
    """Rollout engine over vLLM servers (0.32 or later; https://docs.vllm.ai), its own or running ones.

    Start a server for it with `VLLM_SERVER_DEV_MODE=1` and `vllm serve MODEL --enable-scale-out --logprobs-mode
    processed_logprobs --max-logprobs -1` (`raw_logprobs` for `EngineOptions.whole_logprobs`), and for adapters with
    `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, `--enable-lora` and `--max-lora-rank`. For pictures it needs
    `--no-mm-device-do-normalize`, and the version that is installed here. To verify its weights it needs
    `--worker-extension-cls atomrl.engines.vllm_worker.WeightReader`.

    Log-probs are those of the distribution that is sampled from, as with vLLM in process, and for the same reason it is
    not `exact`.
    """

    package, probe = VLLMEngine.package, VLLMEngine.probe
    least_version = "0.32"
    argument_class = VLLMEngine.argument_class
    own_arguments = VLLMEngine.own_arguments | {"host": "rollout.server", "port": "rollout.server"}
    seeded = returns_candidates = supports_lora = supports_images = True
    decode_time = replace(VLLMEngine.decode_time, source="estimated: as vLLM in the process")
    whole_logprobs = False

    @classmethod
    def refusal(cls, sampling: SamplingParams) -> str | None:
        """Return why vLLM cannot give the requested log-probs; None if it can."""
        return VLLMEngine.refusal(sampling)

    @classmethod
    def image_refusal(cls, sampling: SamplingParams) -> str | None:
        """Return why vLLM cannot give the requested log-probs where tokens are banned; None if it can."""
        return VLLMEngine.image_refusal(sampling)

    @classmethod
    def server_image_refusal(cls, url: str) -> str | None:
        """Return why a running server cannot take pictures from this process; None if it can, or does not answer."""
        import httpx

        try:
            with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as client:
                version = client.get("/version").json()["version"]
                config = client.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
        except (httpx.HTTPError, ValueError, KeyError):
            return None  # `_check_server` says what is wrong with it
        return cls._image_fault(version, config["model_config"]["multimodal_config"])

    @classmethod
    def _image_fault(cls, version: str, settings: Mapping[str, Any] | None) -> str | None:
        """Return why a server does not read patches as this process encodes them.

        Args:
            version: of the server's vLLM.
            settings: its `multimodal_config`.
        """
        own, public = cls.package_version(), Version(version).public
        if own is None or Version(Version(own).public) != Version(public):
            return (
                f"is vLLM {version}, and this process has {f'vLLM {own}' if own else 'none'}: pictures are encoded by "
                f"vLLM, so both need the same version: pip install 'vllm=={public}'"
            )
        if settings is None or settings["language_model_only"]:
            return "reads text alone: start it with the whole model"
        if settings["mm_device_do_normalize"] is not False:
            return "would normalize pictures twice: start it with --no-mm-device-do-normalize"
        return None

    def refused(self, sampling: SamplingParams) -> str | None:
        """Return why these servers, as they were started, cannot sample like that; None if they can."""
        return self.refusal(sampling) or other_logprobs(sampling, self.whole_logprobs)

    # ---- Server ----

    def server_command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        options = self.options
        self.check_version()
        environment = _ENVIRONMENT | {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--model", self.folder, "--tokenizer", self.tokenizer.name_or_path or self.folder]
        words += ["--dtype", str(options.dtype).removeprefix("torch."), "--enable-scale-out", "--max-logprobs", "-1"]
        words += ["--worker-extension-cls", WORKER_EXTENSION]
        words += ["--logprobs-mode", logprobs_mode(options.whole_logprobs), "--enable-prefix-caching"]
        words += ["--max-num-seqs", str(options.max_concurrent_completions)]
        words += ["--tensor-parallel-size", str(options.tensor_parallel)]
        if self.on_cpu:
            # A CPU's generator has no offset to continue from, which seeds with chunked prefill would need.
            cache = cpu_cache_bytes(self.config, options.max_concurrent_completions, options.dtype)
            words += ["--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(cache)]
            # By default vLLM binds to all cores but one, and two servers of a machine to the same ones.
            bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": bound,
                "OMP_NUM_THREADS": str(max(1, max_threads() // options.tensor_parallel)),
            }
        else:
            words += ["--enable-sleep-mode", "--gpu-memory-utilization", str(options.gpu_memory_utilization)]
        if options.lora_rank:
            from vllm.config.lora import MaxLoRARanks  # the ranks that vLLM has kernels for

            rank = min(rank for rank in MaxLoRARanks.__args__ if rank >= options.lora_rank)
            words += ["--enable-lora", "--max-lora-rank", str(rank)]
        if options.trust_remote_code:
            words.append("--trust-remote-code")
        if options.images is not None:  # its pictures come normalized
            words.append("--no-mm-device-do-normalize")
        return words + as_flags(options.engine_args, negative=True), environment

    async def _check_server(self, server: Server) -> None:
        try:
            config = (await self.client.get(server, "/server_info", params={"config_format": "json"}))["vllm_config"]
        except RuntimeError:
            raise RuntimeError(
                f"{server.name} does not accept new weights: start it with VLLM_SERVER_DEV_MODE=1"
            ) from None
        version = (await self.client.get(server, "/version"))["version"]
        if Version(version) < Version(self.least_version):
            raise RuntimeError(f"{server.name} is vLLM {version}; {self.least_version} or later is required")
        model, lora = config["model_config"], config["lora_config"]
        self.whole_logprobs = self.options.whole_logprobs and model["logprobs_mode"] == logprobs_mode(True)
        if model["logprobs_mode"] != logprobs_mode(self.whole_logprobs) or model["max_logprobs"] != -1:
            raise RuntimeError(
                f"{server.name} does not return log-probs of the sampling distribution: start it with "
                f"--logprobs-mode {logprobs_mode(False)} --max-logprobs -1"
            )
        if self.options.lora_rank and (lora is None or lora["max_lora_rank"] < self.options.lora_rank):
            raise RuntimeError(
                f"{server.name} does not accept adapters of rank {self.options.lora_rank}: start it with --enable-lora "
                f"--max-lora-rank {self.options.lora_rank} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        if self.options.images is not None:
            if reason := self._image_fault(version, model["multimodal_config"]):
                raise RuntimeError(f"{server.name} {reason}")
            await asyncio.to_thread(import_module, ENCODING)  # takes seconds, which the first request would wait
        probe = {"token_ids": [0], "sampling_params": {"max_tokens": 1}}
        try:
            await self.client.post(server, "/inference/v1/generate", probe)
        except RuntimeError:
            raise RuntimeError(f"{server.name} does not return tokens: start it with --enable-scale-out") from None

    async def _set_memory(self, server: Server, asleep: bool) -> None:
        await self.client.post(
            server, "/sleep" if asleep else "/wake_up", **({"params": {"level": 1}} if asleep else {})
        )

    # ---- Requests ----

    async def _generate(self, server: Server, state: RequestState, name: str) -> ServerOutput:
        sampling, request = state.rule.sampling, state.request
        body: dict[str, Any] = {
            "request_id": name,
            "token_ids": list(request.prompt_token_ids),
            "sampling_params": request_fields(state),
        }
        if server.adapters:
            body["model"] = server.adapters
        if request.images:
            assert self.options.images is not None, "the engine of a run with pictures is created with `images`"
            body |= {"features": features(request, self.options.images, self.options.dtype), "return_token_ids": True}
        answer = await self.client.post(server, "/inference/v1/generate", body)
        if request.images:
            check_prompt(answer["prompt_token_ids"], request, server.name)
        (choice,) = answer["choices"]
        tokens = choice["token_ids"]
        content = ((choice["logprobs"] or {}).get("content") or []) if sampling.logprobs_over != "none" else []
        logprobs = [logprob_of(token["logprob"]) for token in content]
        candidates: list[list[int]] = []
        if sampling.logprobs_over == "kept" and sampling.temperature == 0:  # greedy: the only candidate is the token
            candidates, logprobs = [[token] for token in tokens], [0.0] * len(tokens)
        elif sampling.logprobs_over == "kept":
            for token in content:
                ranked = sorted(token["top_logprobs"], key=lambda other: -other["logprob"])
                candidates.append([other["token_id"] for other in ranked if other["logprob"] > -9999.0])
        return ServerOutput(tokens, logprobs, choice["weight_versions"] or (), choice["finish_reason"], candidates)

    async def _abort(self, server: Server, name: str) -> None:
        await self.client.post(server, "/abort_requests", {"request_ids": [f"generate-tokens-{name}"]})

    async def _set_paused(self, server: Server, paused: bool) -> None:
        if paused:
            await self.client.post(server, "/pause", params={"mode": "keep"})
        else:
            await self.client.post(server, "/resume")

    # ---- Weights ----

    async def _load_weights(self, server: Server) -> None:
        if self.weights is not None:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(self.weights)}}
            await self.client.post(server, "/collective_rpc", call)
            if self.options.images is not None:  # its features are those of the weights before
                await self.client.post(server, "/reset_encoder_cache")
        if self.adapters is not None:
            body = {"lora_name": _ADAPTERS, "lora_path": str(self.adapters), "load_inplace": True}
            await self.client.post(server, "/v1/load_lora_adapter", body)
        reset = await self.client.post(server, "/reset_prefix_cache", params={"reset_running_requests": True})
        if not reset["success"]:
            raise RuntimeError(f"{server.name} did not reset its prefix cache, which is of the previous weights")

    def _adapter_name(self) -> str | None:
        return _ADAPTERS if self.adapters else None  # always the same: new adapters replace the old in place

    async def _set_version(self, server: Server) -> None:
        await self.client.post(server, "/update_weight_version", {"new_version": self.label})
        label = (await self.client.get(server, "/weight_info"))["weight_version"]
        if label != self.label:
            raise RuntimeError(f"{server.name} has weights of version {label}, not {self.label}")

    async def _hashes(self, server: Server) -> list[WeightHash]:
        config = (await self.client.get(server, "/server_info", params={"config_format": "json"}))["vllm_config"]
        if config["parallel_config"].get("worker_extension_cls") != WORKER_EXTENSION:
            return await super()._hashes(server)
        call = {"method": "published_hashes", "args": [self.shapes, self.tied, self.ranks]}
        workers = (await self.client.post(server, "/collective_rpc", call))["results"]
        return whole_hashes(workers, self.shapes)
