"""`ServerEngine`: what engines behind an HTTP server share."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import queue
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import PretrainedConfig

from atomrl.files import TemporaryFolder
from atomrl.models.loading import base_path, model_config_only, read_weights, resolve_folder
from atomrl.protocols import WeightHash, WeightUpdate
from atomrl.rollout.checkpoints import is_tied, published_shapes, write_weights
from atomrl.rollout.http import Answer, Client, Server, ServerGone, by_our_weights, take_answer
from atomrl.rollout.requests import EngineOptions, RequestEngine, RequestState
from atomrl.rollout.server_process import ServerProcess
from atomrl.rollout.stopping import StopRule, eos_token_ids
from atomrl.types import FinishReason, GenerationRequest, SamplingParams
from atomrl.weights.files import write_adapters

log = logging.getLogger(__name__)
_RESTARTS = 3
_START_S = 600.0
_RETRY_S = 0.25
_ABORT_S = 0.05


class ServerEngine(RequestEngine):
    """Draws completions in servers, its own or such as are there; groups are spread over them by load.

    One thread speaks to all servers. Each says of every token which weights drew it, so weights may change while
    completions are under way. A server that fails is waited for (its own is started again), gets the current weights,
    and draws what it held again from the same seeds.

    Weights travel as files in a folder under `TMPDIR`, which the servers must see, or as `server_weights` says.

    Args:
        folder, config, tokenizer: of the model, without adapters.
        eos: the end-of-sequence tokens.
        options: how the engine is made.

    Raises:
        RuntimeError: a server cannot do what is needed, or ended while it started.
        TimeoutError: a server does not answer.
    """

    server: ClassVar[bool] = True
    health_path: ClassVar[str] = "/health"

    def __init__(
        self, folder: str, config: PretrainedConfig, eos: tuple[int, ...], tokenizer: Any, options: EngineOptions
    ) -> None:
        super().__init__(tokenizer, getattr(config, "max_position_embeddings", 2**31))
        self.folder, self.config, self.eos, self.options = folder, config, eos, options
        self.shapes, self.tied = published_shapes(folder, config), is_tied(config)
        self.own, self.on_cpu = not options.server, torch.device(options.device).type == "cpu"
        self.files = TemporaryFolder("update")
        self.updated = False  # servers have been given no other weights than they start with
        self.weights: Path | None = None
        self.adapters: Path | None = None
        self.ranks: dict[str, int] = {}
        """Of the adapters, by the name of the weight that they sit on."""
        self.answers: queue.SimpleQueue[tuple[RequestState, Answer | Exception]] = queue.SimpleQueue()
        self.names = itertools.count()
        self.servers: list[Server] = []
        self.client = Client(options.server_timeout_s)
        try:
            self.servers = [self._new(url) for url in options.server] or [self._new(None)]
            self._all(self._ready)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_pretrained(cls, path: str, tokenizer: Any, options: EngineOptions) -> Self:
        """Start a server with the model, or have those of `options.server` load its weights."""
        folder = str(resolve_folder(base_path(path)))
        config = model_config_only(path, options.trust_remote_code)
        engine = cls(folder, config, eos_token_ids(folder, config, tokenizer), tokenizer, options)
        if options.server or folder != str(resolve_folder(path)):  # it has whatever it was started with
            try:
                weights = ((name, tensor) for name, tensor in read_weights(path) if name in engine.shapes)
                engine.update_weights(WeightUpdate(version=0, tensors=weights))
            except BaseException:
                engine.close()
                raise
        return engine

    def _command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """What starts a server on a port of 127.0.0.1, and its environment beside ours."""
        raise NotImplementedError

    async def _check(self, server: Server) -> None:
        """That a server which is up can do what is needed; RuntimeError where not."""
        raise NotImplementedError

    async def _generate(self, server: Server, state: RequestState, name: str) -> Answer:
        """Have a completion drawn under a name."""
        raise NotImplementedError

    async def _abort(self, server: Server, name: str) -> None:
        """Have a completion end where it is."""
        raise NotImplementedError

    async def _hold(self, server: Server) -> None:
        """Draw no token, so that the completions under way can go on later from a cache that is computed again."""
        raise NotImplementedError

    async def _go_on(self, server: Server) -> None:
        """Undo `_hold`."""
        raise NotImplementedError

    def _keep(self, update: WeightUpdate) -> None:
        """Lay out new weights for all servers, also for those that start again later."""
        folder = self.files.path / f"weights-{next(self.names)}"
        self.weights = write_weights(update, folder, self.options.dtype, self.tied)

    async def _load(self, server: Server) -> None:
        """Take `weights` and `adapters` (None: as they are, and none) and drop the cache; the server holds still."""
        raise NotImplementedError

    def _adapter_name(self) -> str | None:
        """What the adapters that there are now are called in a server."""
        return self.adapters.name if self.adapters else None

    async def _name_version(self, server: Server) -> None:
        """Have the tokens from here on marked with `version`."""
        raise NotImplementedError

    async def _hashes(self, server: Server) -> list[WeightHash]:
        """Of the weights that it computes with; without a value where it cannot tell."""
        names = [*self.shapes, *(f"{name}.{part}" for name in self.ranks for part in ("lora_A", "lora_B"))]
        return [WeightHash(name, self.options.dtype, None) for name in names]

    async def _set_memory(self, server: Server, asleep: bool) -> None:
        """Give back the GPU's memory, or take it again."""
        raise NotImplementedError

    def _new(self, url: str | None) -> Server:
        slots, kind = asyncio.Semaphore(self.options.max_concurrent_completions), type(self).__name__
        if url is not None:
            return Server(kind, url, slots)
        process = ServerProcess(self._command)
        return Server(kind, process.url, slots, process)

    async def _ready(self, server: Server) -> None:
        """Wait until a server is up, and ask what it can do."""
        limit = _START_S if server.process else self.options.server_timeout_s
        end = time.monotonic() + limit
        while not await self.client.healthy(server, self.health_path):
            if server.process is not None and (code := server.process.ended()) is not None:
                raise RuntimeError(f"{server.name} ended with status {code}{server.last_words}")
            if time.monotonic() > end:
                raise TimeoutError(f"{server.name} was not up within {limit:g} s")
            await asyncio.sleep(_RETRY_S)
        await self._check(server)
        await self._name_version(server)

    async def _repair(self, server: Server, life: int, error: ServerGone) -> None:
        """Have a server that failed up again with the current weights, once for all who noticed in its `life`."""
        async with server.change:
            if server.life != life:
                return
            server.restarts += 1
            if server.restarts > _RESTARTS:
                raise RuntimeError(f"{server.name} failed {server.restarts} times in a row: {error}{server.last_words}")
            log.warning("%s failed, and what it held is drawn again: %s%s", server.name, error, server.last_words)
            if server.process is not None:
                server.process.end()
                server.process = await asyncio.to_thread(ServerProcess, self._command)
                server.url = server.process.url
            server.adapters = server.group = None
            await self._ready(server)
            if self.updated:
                await self._take(server)
            if self._paused:
                await self._hold(server)
            server.life += 1

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        return StopRule(sampling, self.eos, self.tokenizer, self.config.vocab_size, torch.device("cpu"))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests in, each group by one server.

        Raises:
            ValueError: as in every engine. None of the requests is then taken in.
        """
        super().submit(requests)
        owners = {state.request.group_id: server for server in self.servers for state in server.held.values()}
        while self.waiting:
            state = self.waiting.popleft()
            group = state.request.group_id
            server = owners[group] = owners.get(group) or min(self.servers, key=lambda server: server.load)
            server.held[state.request.request_id] = state
            self.client.start(self._draw(server, state))

    async def _draw(self, server: Server, state: RequestState) -> None:
        """Have a request drawn until it is, and hand it to `poll`."""
        try:
            async with server.slots:
                self.answers.put((state, await self._drawn(server, state)))
        except Exception as error:
            self.answers.put((state, error))

    async def _drawn(self, server: Server, state: RequestState) -> Answer:
        while server.held.get(state.request.request_id) is state:
            life = server.life
            try:
                answer = await self._attempt(server, state)
            except ServerGone as error:
                await self._repair(server, life, error)
                continue
            except TimeoutError:
                if not self._paused:
                    raise
                continue
            # What the server gave up for other adapters is drawn once more.
            if answer.reason != "abort" or server.held.get(state.request.request_id) is not state:
                server.restarts = 0
                return answer
        return Answer((), (), (), "abort")

    async def _attempt(self, server: Server, state: RequestState) -> Answer:
        name = f"atomrl-{id(self):x}-{next(self.names)}"
        async with server.change:
            if server.held.get(state.request.request_id) is not state:
                return Answer((), (), (), "abort")
            server.under_way += 1
            server.wire_ids[state.request.request_id] = name
        try:
            return by_our_weights(await self._generate(server, state, name))
        finally:
            server.under_way -= 1

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        finished: list[tuple[RequestState, FinishReason]] = []
        with suppress(queue.Empty):
            while not finished or not self.answers.empty():
                state, answer = self.answers.get(timeout=None if end == math.inf else max(0.0, end - time.monotonic()))
                if self.held.get(state.request.request_id) is state:  # not given up in the meantime
                    self._forget(state)
                    finished.append((state, take_answer(state, answer)))
        return finished

    def _forget(self, state: RequestState) -> None:
        for server in self.servers:
            if server.held.get(state.request.request_id) is state:
                del server.held[state.request.request_id]
                server.wire_ids.pop(state.request.request_id, None)

    def _withdraw(self, states: Sequence[RequestState]) -> None:
        """Have the servers give up what they draw, and keep what they have drawn."""
        names = [
            (server, server.wire_ids[state.request.request_id], state)
            for state in states
            for server in self.servers
            if server.held.get(state.request.request_id) is state and state.request.request_id in server.wire_ids
        ]
        for state in states:
            self._forget(state)
        missing = {id(state) for _, _, state in names}
        end = time.monotonic() + self.options.server_timeout_s
        held_back: list[tuple[RequestState, Answer | Exception]] = []
        while missing:
            if time.monotonic() > end:
                raise TimeoutError(f"{names[0][0].name} has not given up a request within its time")
            # Again and again: a name may come to a server before its request.
            self.client.run(self._abort_all([(server, name) for server, name, state in names if id(state) in missing]))
            try:
                state, answer = self.answers.get(timeout=_ABORT_S)
            except queue.Empty:
                continue
            if id(state) not in missing:
                held_back.append((state, answer))
                continue
            missing.remove(id(state))
            if isinstance(answer, Answer):
                take_answer(state, replace(answer, reason="abort"))
        for item in held_back:
            self.answers.put(item)

    async def _abort_all(self, names: Iterable[tuple[Server, str]]) -> None:
        await asyncio.gather(*(self._abort(server, name) for server, name in names), return_exceptions=True)

    def _all(self, act: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Do something with all servers at once; where one fails it is repaired, and done again."""

        async def surely(server: Server) -> None:
            while True:
                life = server.life
                try:
                    return await act(server)
                except ServerGone as error:
                    await self._repair(server, life, error)

        async def everywhere() -> None:
            await asyncio.gather(*(surely(server) for server in self.servers))

        self.client.run(everywhere())

    def pause(self) -> None:
        """Draw no token until `resume`; requests stay."""
        super().pause()
        self._all(self._hold)

    def resume(self) -> None:
        """Go on; a request under way continues with the weights there are now."""
        if self._paused:
            super().resume()
            self._all(self._go_on)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every weight that an update may bring, by its published name; a tied head has none."""
        return self.shapes

    def update_weights(self, update: WeightUpdate) -> None:
        """Bring new weights to all servers. Completions under way go on with them, from a cache that is computed again.

        Raises:
            RuntimeError: a server refuses them.
        """
        parent, tensors = self.files.path, list(update.tensors)
        if tensors:
            self._keep(replace(update, tensors=tensors))
        self.adapters = None
        if update.adapters:
            self.adapters = parent / f"adapters-{next(self.names)}"
            self.adapters.mkdir()
            write_adapters(update.adapters, self.adapters)
        self.ranks = {name: len(adapter.a) for name, adapter in update.adapters.items()}
        self.version, self.updated = update.version, True
        self._all(self._exchange)
        for folder in {*parent.iterdir()} - {self.weights, self.adapters}:
            shutil.rmtree(folder)

    def weight_hashes(self) -> list[WeightHash]:
        """Of every server."""
        found: dict[str, list[WeightHash]] = {}

        async def ask(server: Server) -> None:
            found[server.name] = [held._replace(holder=server.name) for held in await self._hashes(server)]

        self._all(ask)
        return [held for hashes in found.values() for held in hashes]

    async def _exchange(self, server: Server) -> None:
        """Take the weights that there are now, between two tokens.

        Under other adapters what is under way begins again: a completion has one name for them from first to last.
        """
        async with server.change:
            while server.under_way and self._adapter_name() != server.adapters:
                await self._abort_all([(server, name) for name in server.wire_ids.values()])
                await asyncio.sleep(_ABORT_S)
            if not self._paused:
                await self._hold(server)
            await self._take(server)
            if not self._paused:
                await self._go_on(server)

    async def _take(self, server: Server) -> None:
        await self._load(server)
        server.adapters = self._adapter_name()
        await self._name_version(server)

    def sleep(self) -> None:
        """Have servers that were started here give back the GPU's memory; one that was there keeps it.

        Raises:
            RuntimeError: there are requests.
        """
        super().sleep()
        if self.own and not self.on_cpu:
            self._all(lambda server: self._set_memory(server, asleep=True))

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._asleep and self.own and not self.on_cpu:
            self._all(lambda server: self._set_memory(server, asleep=False))
        super().wake()

    def close(self) -> None:
        """End the servers that were started here, and remove the files."""
        for server in self.servers:
            if server.process is not None:
                server.process.end()
        self.client.close()
        self.files.close()
