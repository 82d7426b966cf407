"""`ServerEngine`: what engines behind an HTTP server share."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
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

from atomrl.common.errors import ServiceGone, said_as
from atomrl.common.files import TemporaryFolder, new_folder
from atomrl.engines.http import Client, HttpAnswer, Server, ServerGone, ServerProcess, checked, take_answer
from atomrl.engines.requests import EngineOptions, RequestEngine, RequestState, StopRule, eos_token_ids
from atomrl.models.loading import base_path, model_config_only, read_weights, resolve_folder
from atomrl.protocols import WeightHash, WeightUpdate
from atomrl.types import FinishReason, GenerationOutput, GenerationRequest, SamplingParams
from atomrl.weight_sync.channels import write_adapters, write_update

# --------------------------------------------------------------------------------------------------------------------
# Weights as files, for engines that read them from disk; and what is known of a model before that.

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MOST_CPU_CACHE, _SPARE_CACHE = 4 * 2**30, 2**26


def published_shapes(folder: str, config: Any, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Every weight of a model in a folder, by its published name; a tied head has none."""
    weights = read_weights(folder, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights}
    if is_tied(config):
        shapes.pop(HEAD, None)
    return shapes


def is_tied(config: Any) -> bool:
    """Whether a model's head is its embedding."""
    return bool(getattr(config, "tie_word_embeddings", False))


def write_weights(update: WeightUpdate, folder: Path, dtype: torch.dtype, tied: bool) -> Path:
    """Write an update's weights as safetensors into a folder, which is then whole: it is renamed into place.

    Args:
        update: its tensors are read; its adapters are not written.
        folder: to be made.
        dtype: that they are cast to.
        tied: write the embedding under the head's name too, without which vLLM and SGLang keep the old head.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> update = WeightUpdate(version=3, tensors=[("model.embed_tokens.weight", torch.ones(2, 2))])
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = write_weights(update, Path(parent) / "3", torch.float32, tied=True)
        ...     sorted(load_file(folder / "model.safetensors"))
        ['lm_head.weight', 'model.embed_tokens.weight']
    """
    tensors = weights_for_engines(update, dtype, tied)
    with new_folder(folder) as aside:
        write_update(WeightUpdate(update.version, tensors.items()), aside)
    return folder


def weights_for_engines(
    update: WeightUpdate, dtype: torch.dtype, tied: bool, copy: bool = False
) -> dict[str, torch.Tensor]:
    """An update's weights on the CPU, as engines of others take them; arguments as of `write_weights`."""
    tensors = {name: tensor.detach().to("cpu", dtype, copy=copy).contiguous() for name, tensor in update.tensors}
    return tensors | ({HEAD: tensors[EMBEDDING]} if tied and EMBEDDING in tensors else {})


def cpu_cache_tokens(config: Any, rows: int, dtype: torch.dtype) -> int:
    """Tokens of keys and values that an engine on a CPU keeps: what all rows may need, and at most 4 GiB."""
    return min(rows * int(config.max_position_embeddings), _MOST_CPU_CACHE // cache_bytes_per_token(config, dtype))


def cpu_cache_bytes(config: Any, rows: int, dtype: torch.dtype) -> int:
    """The same in bytes, with a little to spare."""
    return cpu_cache_tokens(config, rows, dtype) * cache_bytes_per_token(config, dtype) + _SPARE_CACHE


def cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Of keys and values in all layers."""
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * int(width) * dtype.itemsize


# --------------------------------------------------------------------------------------------------------------------
# `ServerCalls`: what an engine behind a server does by that server's own interface.


class ServerCalls(RequestEngine):
    """One method for each thing that is asked of a server; `ServerEngine` says when."""

    options: EngineOptions
    shapes: Mapping[str, tuple[int, ...]]
    """Of the published weights."""
    adapters: Path | None
    """Where those of the last update lie."""
    ranks: dict[str, int]
    """Of the adapters, by the name of the weight that they sit on."""
    mark: str
    """Of this engine among all that may give a server weights."""

    @property
    def label(self) -> str:
        """What servers call the weights that there are now."""
        return f"{self.version}@{self.mark}"

    def _command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """What starts a server on a port of 127.0.0.1, and its environment beside ours."""
        raise NotImplementedError

    async def _check(self, server: Server) -> None:
        """That a server which is up can do what is needed; RuntimeError where not."""
        raise NotImplementedError

    async def _generate(self, server: Server, state: RequestState, name: str) -> HttpAnswer:
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


log = logging.getLogger(__name__)
_RESTARTS = 3
_START_S = 600.0
_ABORT_S = 0.05


def as_flags(arguments: Mapping[str, Any], negative: bool = False) -> list[str]:
    """Arguments of a server's command, as words of a command line.

    Args:
        negative: it knows `--no-NAME`, for those that are False; else they are left out.

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


class ServerEngine(ServerCalls):
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
        self.shapes = published_shapes(folder, config, options.trust_remote_code)
        self.tied = is_tied(config)
        self.own, self.on_cpu = not options.server, torch.device(options.device).type == "cpu"
        self.files, self.mark = TemporaryFolder("update"), os.urandom(4).hex()
        self.updated = False  # servers have been given no other weights than they start with
        self.weights: Path | None = None
        self.adapters, self.ranks = None, {}
        self.answers: queue.SimpleQueue[tuple[RequestState, HttpAnswer | Exception]] = queue.SimpleQueue()
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
                given = read_weights(path, trust_remote_code=options.trust_remote_code)
                weights = ((name, tensor) for name, tensor in given if name in engine.shapes)
                engine.update_weights(WeightUpdate(version=0, tensors=weights))
            except BaseException:
                engine.close()
                raise
        return engine

    def _keep(self, update: WeightUpdate) -> None:
        """Lay out new weights for all servers, also for those that start again later."""
        folder = self.files.path / f"weights-{next(self.names)}"
        self.weights = write_weights(update, folder, self.options.dtype, self.tied)

    def _new(self, url: str | None) -> Server:
        slots, kind = asyncio.Semaphore(self.options.max_concurrent_completions), type(self).__name__
        wait_s = self.options.server_timeout_s
        if url is not None:
            return Server(kind, url, slots, wait_s)
        process = ServerProcess(self._command)
        return Server(kind, process.url, slots, wait_s, process)

    async def _ready(self, server: Server) -> None:
        """Wait until a server is up, and ask what it can do."""
        limit_s = _START_S if server.process else self.options.server_timeout_s
        await self.client.until_up(server, self.health_path, limit_s)
        await self._check(server)
        await self._name_version(server)

    async def _repair(self, server: Server, life: int, error: ServerGone) -> None:
        """Have a server that failed up again with the current weights, once for all who noticed in its `life`."""
        async with server.change:
            while server.life == life:
                if error.away and server.process is None:
                    with said_as(RuntimeError, "rollout", ServiceGone):
                        await asyncio.sleep(server.outage.pause_s(str(error)))
                else:
                    server.restarts += 1
                    if server.restarts > _RESTARTS:
                        times = f"failed {server.restarts} times in a row"
                        raise RuntimeError(f"{server.name} {times}: {error}{server.last_words}")
                    words = server.last_words
                    log.warning("%s failed, and what it held is drawn again: %s%s", server.name, error, words)
                try:
                    await self._revive(server)
                    server.life += 1
                except ServerGone as again:
                    error = again

    async def _revive(self, server: Server) -> None:
        """Start a server of our own again, or wait for one that is there; bring it to where it was."""
        if server.process is not None:
            await asyncio.to_thread(server.process.end)
            server.process = await asyncio.to_thread(ServerProcess, self._command)
            server.url = server.process.url
        elif not await self.client.healthy(server, self.health_path):
            raise ServerGone(f"{self.health_path}: it is not well", away=True)
        server.adapters = server.group = None
        await self._ready(server)
        await self._hold(server)  # one that failed once may be drawing
        if self.updated:
            await self._take(server)
        if not self._paused:
            await self._go_on(server)

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        return StopRule(sampling, self.eos, self.tokenizer, self.config.vocab_size, torch.device("cpu"))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests in, each group by one server, and what continues another by the one that has drawn that.

        Raises:
            ValueError: as in every engine. None of the requests is then taken in.
        """
        super().submit(requests)
        owners = {state.request.group_id: server for server in self.servers for state in server.held.values()}
        homes = {name: server for server in self.servers for name in server.kept}
        while self.waiting:
            state = self.waiting.popleft()
            group, before = state.request.group_id, state.request.continues or ""
            server = homes.get(before) or owners.get(group) or min(self.servers, key=lambda server: server.load)
            owners[group] = server
            server.kept.discard(before)
            server.held[state.request.request_id] = state
            self.client.start(self._draw(server, state))

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Give up requests (None: all), and return what they have so far; forget where the finished ones were drawn."""
        names = None if request_ids is None else list(request_ids)
        for server in self.servers:
            server.kept.difference_update(server.kept.copy() if names is None else names)
        return super().abort(names)

    async def _draw(self, server: Server, state: RequestState) -> None:
        """Have a request drawn until it is, and hand it to `poll`."""
        try:
            async with server.slots:
                self.answers.put((state, await self._drawn(server, state)))
        except Exception as error:
            self.answers.put((state, error))

    async def _drawn(self, server: Server, state: RequestState) -> HttpAnswer:
        while server.holds(state):
            life = server.life
            try:
                answer = await self._attempt(server, state)
            except ServerGone as error:
                server.wire_ids.pop(state.request.request_id, None)
                if server.holds(state):
                    await self._repair(server, life, error)
                continue
            except TimeoutError:
                if not self._paused:
                    raise
                continue
            # What the server gave up for other adapters is drawn once more.
            if answer.reason != "abort" or not server.holds(state):
                server.restarts = 0
                server.outage.answered()
                return answer
        return HttpAnswer((), (), (), "abort")

    async def _attempt(self, server: Server, state: RequestState) -> HttpAnswer:
        name = f"atomrl-{id(self):x}-{next(self.names)}"
        async with server.change:
            if not server.holds(state):
                return HttpAnswer((), (), (), "abort")
            server.under_way += 1
            server.wire_ids[state.request.request_id] = name
            adapters = server.adapters
        try:
            answer = checked(await self._generate(server, state, name), server, self.mark)
        finally:
            server.under_way -= 1
        wanted = server.holds(state) and adapters == self._adapter_name()
        if answer.reason == "abort" and wanted:
            raise ServerGone("it gave up a completion by itself")
        return answer

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        finished: list[tuple[RequestState, FinishReason]] = []
        with suppress(queue.Empty):
            while not finished or not self.answers.empty():
                state, answer = self.answers.get(timeout=None if end == math.inf else max(0.0, end - time.monotonic()))
                if self.held.get(state.request.request_id) is state:  # not given up in the meantime
                    for server in self.servers:
                        server.forget(state, finished=True)
                    finished.append((state, take_answer(state, answer)))
        return finished

    def _withdraw(self, states: Sequence[RequestState]) -> None:
        """Have the servers give up what they draw, and keep what they have drawn."""
        names = self.client.run(self._let_go(states))
        missing = {id(state) for _, _, state in names}
        end = time.monotonic() + self.options.server_timeout_s
        held_back: list[tuple[RequestState, HttpAnswer | Exception]] = []
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
            if isinstance(answer, HttpAnswer):
                take_answer(state, replace(answer, reason="abort"))
        for item in held_back:
            self.answers.put(item)

    async def _let_go(self, states: Sequence[RequestState]) -> list[tuple[Server, str, RequestState]]:
        """Forget requests; which of them are being drawn, and their names there. (Not on the caller's thread: between
        two of these steps a request could reach its server, or the server go.)"""
        pairs = [(server, state) for server in self.servers for state in states if server.holds(state)]
        names = [(server, server.wire_ids.get(state.request.request_id), state) for server, state in pairs]
        for server, state in pairs:
            server.forget(state)
        return [(server, name, state) for server, name, state in names if name is not None]

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
        self._all(self._settle)

    def resume(self) -> None:
        """Go on; a request under way continues with the weights there are now."""
        if self._paused:
            super().resume()
            self._all(self._settle)

    async def _settle(self, server: Server) -> None:
        """Hold, or go on; not while it is repaired, which ends with the same."""
        async with server.change:
            await (self._hold if self._paused else self._go_on)(server)

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
        self.client.close()  # first, since to its tasks the end of a server is one to be mended
        for server in self.servers:
            if server.process is not None:
                server.process.end()
        self.files.close()
