"""`ServerEngine`: the common part of engines behind an HTTP server (vLLM, SGLang).

A subclass says how to start its server and which endpoints to call: the abstract methods.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import PretrainedConfig

from atomrl.common.errors import reraise_as
from atomrl.common.files import TemporaryFolder
from atomrl.common.outages import ServiceGone
from atomrl.engines.distributor import ABORT_S, Distributor, ReplicaFailure
from atomrl.engines.http import Client, Server, ServerFailure, ServerOutput, check_output, store_output
from atomrl.engines.requests import EngineOptions, RequestEngine, RequestState
from atomrl.engines.server_process import ServerProcess
from atomrl.engines.server_weights import published_shapes, tied_embedding, write_weights
from atomrl.engines.stop_rule import StopRule, eos_token_ids
from atomrl.models.loading import base_path, model_config_only, read_weights, resolve_folder
from atomrl.models.shapes import text_config
from atomrl.models.vision import media_tokens
from atomrl.protocols import WeightHash, WeightUpdate
from atomrl.types import FinishReason, GenerationOutput, GenerationRequest, SamplingParams
from atomrl.weight_sync.files import write_adapters

_START_S = 600.0


class ServerEngine(Distributor[Server], RequestEngine):
    """Rollout engine over HTTP servers: one that it starts, or running ones (`EngineOptions.server`).

    `Distributor` says how requests are distributed. Servers report which weights sampled each token, so weights may
    change while completions are running. A server that fails is restarted if it is our own, and waited for if not.

    Weights are sent as files in a folder under `TMPDIR`, which the servers must be able to read, or as
    `EngineOptions.server_weights` says.

    Args:
        folder, config, tokenizer: of the model, without adapters.
        eos: end-of-sequence tokens.
        options: see `EngineOptions`.

    Raises:
        RuntimeError: a server lacks something that is needed, or ended while it started.
        TimeoutError: a server does not answer.
    """

    server: ClassVar[bool] = True
    health_path: ClassVar[str] = "/health"

    # ---- Implemented by subclasses: one method per request to a server ----

    @abstractmethod
    def server_command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Command line that starts a server on 127.0.0.1:`port`, and environment variables to add."""

    @abstractmethod
    async def _check_server(self, server: Server) -> None:
        """Check that a running server supports what is needed. Raises RuntimeError if not."""

    @abstractmethod
    async def _generate(self, server: Server, state: RequestState, name: str) -> ServerOutput:
        """Generate one completion under a request id."""

    @abstractmethod
    async def _abort(self, server: Server, name: str) -> None:
        """Abort the request with this id; `_generate` then returns the partial completion."""

    @abstractmethod
    async def _set_paused(self, server: Server, paused: bool) -> None:
        """Stop sampling so that running completions can continue later from a recomputed KV cache; or continue."""

    @abstractmethod
    async def _load_weights(self, server: Server) -> None:
        """Load `weights` (None: unchanged) and `adapters` (None: none) into a paused server and reset its KV cache."""

    @abstractmethod
    async def _set_version(self, server: Server) -> None:
        """Label the tokens sampled from now on with `label`."""

    @abstractmethod
    async def _set_memory(self, server: Server, asleep: bool) -> None:
        """Release the GPU memory, or take it again."""

    def _adapter_name(self) -> str | None:
        """Name of the current adapters in a server."""
        return self.adapters.name if self.adapters else None

    async def _hashes(self, server: Server) -> list[WeightHash]:
        """Hashes of the weights in use. By default without values, for servers that cannot read them back."""
        names = [*self.shapes, *(f"{name}.{part}" for name in self.ranks for part in ("lora_A", "lora_B"))]
        return [WeightHash(name, self.options.dtype, None) for name in names]

    # ---- Setup ----

    def __init__(
        self, folder: str, config: PretrainedConfig, eos: tuple[int, ...], tokenizer: Any, options: EngineOptions
    ) -> None:
        RequestEngine.__init__(self, tokenizer, getattr(config, "max_position_embeddings", 2**31))
        Distributor.__init__(self, options.server_timeout_s)
        self.folder, self.config, self.eos, self.options = folder, config, eos, options
        self.shapes = published_shapes(folder, config, options.trust_remote_code)
        """Shapes of the published weights."""
        self.tied = tied_embedding(config, self.shapes)
        self.starts_server, self.on_cpu = not options.server, torch.device(options.device).type == "cpu"
        self.files = TemporaryFolder("update")
        self.engine_id = os.urandom(4).hex()
        """Tells this engine from others that may push weights to the same server."""
        self.weights: Path | None = None
        """Folder of the weights of the last update."""
        self.adapters: Path | None = None
        """Folder of the adapters of the last update."""
        self.ranks: dict[str, int] = {}
        """Ranks of the adapters, by the name of the weight that they adapt."""
        self.counter = itertools.count()
        self.client = Client(options.server_timeout_s)
        try:
            self.replicas = [self._new(url) for url in options.server] or [self._new(None)]
            self._on_all(self._wait_ready)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_pretrained(cls, path: str, tokenizer: Any, options: EngineOptions) -> Self:
        """Start a server with the model, or load its weights into the servers of `options.server`."""
        folder = str(resolve_folder(base_path(path)))
        config = model_config_only(path, options.trust_remote_code)
        engine = cls(folder, config, eos_token_ids(folder, config, tokenizer), tokenizer, options)
        if options.server or folder != str(resolve_folder(path)):  # a running server may have any weights
            try:
                published = read_weights(path, trust_remote_code=options.trust_remote_code)
                weights = ((name, tensor) for name, tensor in published if name in engine.shapes)
                engine.update_weights(WeightUpdate(version=0, tensors=weights))
            except BaseException:
                engine.close()
                raise
        return engine

    def _new(self, url: str | None) -> Server:
        slots, kind = asyncio.Semaphore(self.options.max_concurrent_completions), type(self).__name__
        wait_s = self.options.server_timeout_s
        if url is not None:
            return Server(kind, url, slots, wait_s)
        process = ServerProcess(self.server_command)
        return Server(kind, process.url, slots, wait_s, process)

    async def _wait_ready(self, server: Server) -> None:
        """Wait until a server is up, and check it."""
        limit_s = _START_S if server.process else self.options.server_timeout_s
        await self.client.until_up(server, self.health_path, limit_s)
        await self._check_server(server)
        await self._set_version(server)

    # ---- Repair ----

    async def _count_failure(self, server: Server, error: ReplicaFailure) -> None:
        """Wait for a server of the user's, with growing pauses, up to `server_timeout_s`; count failures of others."""
        if isinstance(error, ServerFailure) and error.unreachable and server.process is None:
            with reraise_as(RuntimeError, "rollout", ServiceGone):
                await asyncio.sleep(server.outage.pause_s(str(error)))
        else:
            await super()._count_failure(server, error)

    async def _restart(self, server: Server) -> None:
        """Restart our own server, or check that a running one is back."""
        if server.process is not None:
            await asyncio.to_thread(server.process.end)
            server.process = await asyncio.to_thread(ServerProcess, self.server_command)
            server.url = server.process.url
        elif not await self.client.healthy(server, self.health_path):
            raise ServerFailure(f"{self.health_path}: not healthy", unreachable=True)
        server.adapters = server.group = None
        await self._wait_ready(server)
        await self._set_paused(server, True)  # a server that failed a single call may still be sampling

    # ---- Requests ----

    @property
    def label(self) -> str:
        """Label of the current weights in servers: version and engine."""
        return f"{self.version}@{self.engine_id}"

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        never = media_tokens(self.config) if self.options.images is not None else ()
        size = text_config(self.config).vocab_size
        return StopRule(sampling, self.eos, self.tokenizer, size, torch.device("cpu"), never)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Send requests to servers: a group to one server, a continuation to the server that has its cache.

        Raises:
            ValueError: as for every engine. None of the requests is then sent.
        """
        super().submit(requests)
        waiting = [state.request for state in self.waiting]
        self.waiting.clear()
        for server, part in self._assign(waiting).items():
            for request in part:
                self.loop.start(self._run_request(server, self.held[request.request_id]))

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Abort requests (None: all) and return their partial outputs; also forget which server has their cache."""
        names = None if request_ids is None else list(request_ids)
        for server in self.replicas:
            server.retained.difference_update(server.retained.copy() if names is None else names)
        return super().abort(names)

    async def _run_request(self, server: Server, state: RequestState) -> None:
        """Generate a request to its end and put the output, or the error, into the queue that `poll` reads."""
        try:
            async with server.slots:
                self.outputs.put((state.request, await self._generate_until_done(server, state)))
        except Exception as error:
            self.outputs.put((state.request, error))

    async def _generate_until_done(self, server: Server, state: RequestState) -> ServerOutput:
        """Repeat a request until its server has finished it or it is aborted."""
        while server.holds(state.request):
            generation = server.generation
            try:
                output = await self._attempt(server, state)
            except ServerFailure as error:
                server.remote_ids.pop(state.request.request_id, None)
                if server.holds(state.request):
                    await self._repair(server, generation, error)
                continue
            except TimeoutError:
                if not self._paused:
                    raise
                continue
            # Requests that were aborted for new adapters (`_update_server`) are repeated.
            if output.reason != "abort" or not server.holds(state.request):
                server.restarts = 0
                server.outage.answered()
                return output
        return ServerOutput((), (), (), "abort")

    async def _attempt(self, server: Server, state: RequestState) -> ServerOutput:
        """Send a request once, under a new id. The lock keeps it from a server whose weights are changing."""
        name = f"atomrl-{id(self):x}-{next(self.counter)}"
        async with server.lock:
            if not server.holds(state.request):
                return ServerOutput((), (), (), "abort")
            server.in_flight += 1
            server.remote_ids[state.request.request_id] = name
            adapters = server.adapters
        try:
            output = check_output(await self._generate(server, state, name), server, self.engine_id)
        finally:
            server.in_flight -= 1
        if output.reason == "abort" and server.holds(state.request) and adapters == self._adapter_name():
            raise ServerFailure("it aborted a completion on its own")
        return output

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        finished = [(self.held[request.request_id], output) for request, output in self._receive(end)]
        return [(state, store_output(state, output)) for state, output in finished]

    def _cancel(self, states: Sequence[RequestState]) -> None:
        """Abort requests in their servers and store their partial completions."""
        by_name = {state.request.request_id: state for state in states}
        for request, output in self._give_up(by_name):
            if isinstance(output, ServerOutput):
                store_output(by_name[request.request_id], replace(output, reason="abort"))

    async def _abort_requests(self, server: Server, request_ids: Sequence[str]) -> None:
        names = [name for request_id in request_ids if (name := server.remote_ids.get(request_id))]
        await asyncio.gather(*(self._abort(server, name) for name in names), return_exceptions=True)

    async def _set_asleep(self, server: Server, asleep: bool) -> None:
        """Release the GPU memory of our own server; running servers keep theirs."""
        if self.starts_server and not self.on_cpu:
            await self._set_memory(server, asleep)

    # ---- Weights ----

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the published weights; a tied head has none."""
        return self.shapes

    def update_weights(self, update: WeightUpdate) -> None:
        """Load new weights into all servers. Running completions continue with them from a recomputed cache.

        Raises:
            RuntimeError: a server refuses them.
        """
        parent, tensors = self.files.path, list(update.tensors)
        if tensors:
            self._store(replace(update, tensors=tensors))
        self.adapters = None
        if update.adapters:
            self.adapters = parent / f"adapters-{next(self.counter)}"
            write_adapters(update.adapters, self.adapters)
        self.ranks = {name: len(adapter.a) for name, adapter in update.adapters.items()}
        self.version, self.updated = update.version, True
        self._on_all(self._update_server, restored=True)
        for folder in {*parent.iterdir()} - {self.weights, self.adapters}:
            shutil.rmtree(folder)

    def _store(self, update: WeightUpdate) -> None:
        """Write new weights where all servers can load them, also those that restart later."""
        folder = self.files.path / f"weights-{next(self.counter)}"
        self.weights = write_weights(update, folder, self.options.dtype, self.tied)

    async def _update_server(self, server: Server) -> None:
        """Load the current weights between two tokens.

        With other adapters, running requests are aborted and repeated: a server uses one adapter name for a request
        from beginning to end.
        """
        while server.in_flight and self._adapter_name() != server.adapters:
            await self._abort_requests(server, [*server.remote_ids])
            await asyncio.sleep(ABORT_S)
        if not self._paused:
            await self._set_paused(server, True)
        await self._load(server)
        if not self._paused:
            await self._set_paused(server, False)

    async def _load(self, server: Server) -> None:
        await self._load_weights(server)
        server.adapters = self._adapter_name()
        await self._set_version(server)

    def close(self) -> None:
        """End our own server and remove the files."""
        self.loop.close(self.client.close())  # first, or its tasks would restart the server that ends
        for server in self.replicas:
            if server.process is not None:
                server.process.end()
        self.files.close()


def as_flags(arguments: Mapping[str, Any], negative: bool = False) -> list[str]:
    """Return arguments as words of a command line.

    Args:
        negative: write False as `--no-NAME`; else it is left out.

    Example:
        >>> as_flags({"enforce_eager": True, "swap_space": 4, "compilation_config": {"mode": 0}})
        ['--enforce-eager', '--swap-space', '4', '--compilation-config', '{"mode": 0}']
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{flag}"] if value else [f"--no-{flag}"] * negative
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words
