"""`ServerCalls`: what an engine behind a server does by that server's own interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from atomrl.protocols import WeightHash
from atomrl.rollout.http import HttpAnswer, Server
from atomrl.rollout.requests import EngineOptions, RequestEngine, RequestState


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
