"""`SGLangEngine`: SGLang behind its HTTP server."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atomrl.rollout.checkpoints import cpu_cache_tokens
from atomrl.rollout.http import Answer, Server, logprob_of
from atomrl.rollout.requests import RequestState
from atomrl.rollout.servers import ServerEngine
from atomrl.rollout.vllm import cut_refusal
from atomrl.types import SamplingParams

_MOST_KEPT = 4096  # of `--sampling-mask-max-tokens`


class SGLangEngine(ServerEngine):
    """Draws completions with an SGLang server (0.5.23 or later; https://docs.sglang.io), its own or such as are there.

    Log-probs are over the whole vocabulary at the sampling temperature, also where top-p and top-k cut it, or over what
    they kept. A minimum length shifts them, and is refused.

    `seeded` where all servers run with `--enable-deterministic-inference`, as its own do on a GPU. SGLang has no
    attention for it on a CPU: there it ignores the seeds of completions, and a run cannot be repeated.

    Adapters need `--enable-lora`, which wants a GPU. New ones have the completions under way begin again.
    """

    package = "sglang"
    probe = (
        "import os, torch\n"
        "os.environ |= {} if torch.cuda.is_available() else {'SGLANG_USE_CPU_ENGINE': '1'}\n"
        "import sglang.srt.entrypoints.http_server\n"
        "from sglang.srt.models.registry import ModelRegistry; archs = ModelRegistry.get_supported_archs()"
    )
    returns_candidates = True

    @classmethod
    def refusal(cls, sampling: SamplingParams) -> str | None:
        """Why SGLang cannot give the log-probs that are asked for; None where it can."""
        if sampling.logprobs_over == "kept" and sampling.temperature > 0 and not 0 < sampling.top_k <= _MOST_KEPT:
            return f"logprobs_over=kept: SGLang tells which tokens were kept where top_k is 1 to {_MOST_KEPT}"
        return super().refusal(sampling) or cut_refusal("SGLang", sampling, sampling.min_completion_tokens > 0)

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
        environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        return words, environment | ({"SGLANG_USE_CPU_ENGINE": "1"} if self.on_cpu else {})

    async def _check(self, server: Server) -> None:
        found = await self.client.get(server, "/server_info")
        if self.options.lora_rank and not found["enable_lora"]:
            raise RuntimeError(
                f"{server.name} takes no adapters: start it with --enable-lora --lora-target-modules all "
                f"--max-lora-rank {self.options.lora_rank}, which wants a GPU; or train all weights (no model.lora)"
            )
        server.seeded = bool(found["enable_deterministic_inference"])
        self.seeded = all(each.seeded for each in self.servers)

    async def _generate(self, server: Server, state: RequestState, name: str) -> Answer:
        sampling, request = state.rule.sampling, state.request
        stops = state.rule.is_stop.nonzero()[:, 0].tolist()
        kept = sampling.logprobs_over == "kept" and sampling.temperature > 0
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_completion_tokens,
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

    def _read(self, found: Mapping[str, Any], sampling: SamplingParams) -> Answer:
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
        return Answer(tokens, logprobs, meta["weight_versions"], meta["finish_reason"]["type"], candidates)

    async def _abort(self, server: Server, name: str) -> None:
        await self.client.post(server, "/abort_request", {"rid": name})

    async def _hold(self, server: Server) -> None:
        # Not `in_place`, which goes on with the cache of the weights before.
        await self.client.post(server, "/pause_generation", {"mode": "retract"})

    async def _go_on(self, server: Server) -> None:
        await self.client.post(server, "/continue_generation", {"torch_empty_cache": False})

    async def _load(self, server: Server, weights: Path | None, adapters: Path | None) -> None:
        if weights is not None:
            named = {"model_path": str(weights), "weight_version": str(self.version), "flush_cache": True}
            await self.client.post(server, "/update_weights_from_disk", named)
        if server.adapters == self._adapter_name():
            return
        if server.adapters is not None:
            await self.client.post(server, "/unload_lora_adapter", {"lora_name": server.adapters})
        if adapters is not None:
            await self.client.post(
                server, "/load_lora_adapter", {"lora_name": adapters.name, "lora_path": str(adapters)}
            )

    async def _name_version(self, server: Server) -> None:
        label = {"new_version": str(self.version), "abort_all_requests": False}
        await self.client.post(server, "/update_weight_version", label)
        found = (await self.client.get(server, "/model_info"))["weight_version"]
        if found != str(self.version):
            raise RuntimeError(f"{server.name} has weights of version {found}, not {self.version}")

    async def _set_memory(self, server: Server, asleep: bool) -> None:
        await self.client.post(server, "/release_memory_occupation" if asleep else "/resume_memory_occupation", {})
