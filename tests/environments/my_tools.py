"""Tools of the tests, as a user would write them."""

import asyncio
import json
import os
import threading
import time
from typing import Literal

from atomrl.sandbox import SandboxError

together = threading.Barrier(3)


def weather(city: str, unit: Literal["C", "F"] = "C") -> dict:
    """The weather of a city.

    Args:
        city: its name
        unit: of the temperature
    """
    return {"city": city, "temperature": 21, "unit": unit}


def divide(a: int, b: int) -> float:
    """Divides.

    Args:
        a: the dividend
        b: the divisor
    """
    return a / b


async def slow(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "done"


def meet(name: str) -> str:
    """Waits for two others.

    Args:
        name: who comes
    """
    together.wait(60)
    return f"{name} came"


def shop(item: str, currency: str) -> str:
    """Price of a thing.

    Args:
        item: the thing
        currency: of the price
    """
    return f"{item}: 3 {currency}"


def down(query: str) -> str:
    """Asks a service.

    Args:
        query: what
    """
    raise ConnectionError("the service is down")


def boxless(query: str) -> str:
    """Runs a program where there is no sandbox.

    Args:
        query: what
    """
    raise SandboxError("no namespaces for you")


def much() -> str:
    """Says more than anybody reads."""
    return "z" * 10_000_000


def die() -> str:
    """Ends the process."""
    os._exit(3)


def hang(seconds: float) -> str:
    """Takes its time, and does not let itself be cancelled.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "at last"


def gives_up() -> str:
    """Asks a service that does not answer."""
    raise TimeoutError("the service is silent")


def circle() -> list:
    """Returns what JSON has no form for."""
    cycle: list = []
    cycle.append(cycle)
    return cycle


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no words")


def wordless() -> str:
    """Raises what has no words."""
    raise Unprintable


def numbers(values: list) -> str:
    """Says how many there are.

    Args:
        values: any
    """
    return f"{len(values)} \ud800"


def nothing_said(x: int) -> int:
    return x


class Counter:
    """An environment as TRL has them."""

    def __init__(self, step: int = 1):
        self.step = step

    def reset(self, prompt, target, **row):
        self.target, self.count, self.closed = target, 0, False
        return f" Count to {target}."

    def increment(self, by: int = 1) -> str:
        """Increments the counter.

        Args:
            by: how much
        """
        self.count += by * self.step
        return str(self.count)

    def _hidden(self):
        raise NotImplementedError

    def get_reward(self) -> float:
        return float(self.count == self.target)


class Bare:
    """Nothing to call."""

    def reset(self, **row) -> None:
        pass


class Rowless:
    def reset(self) -> None:
        pass


class Rewardless(Bare):
    def look(self) -> str:
        """Look around."""
        return "nothing"


class Notes:
    """An object whose parts are one thread's."""

    def __init__(self):
        self.made, self.seen = threading.get_ident(), []

    def reset(self, **row):
        self._at_home()

    def _at_home(self):
        assert threading.get_ident() == self.made

    def note(self, word: str, seconds: float = 0.0) -> str:
        """Notes a word.

        Args:
            word: the word
            seconds: how long it takes
        """
        self._at_home()
        time.sleep(seconds)
        self.seen.append(word)
        return " ".join(self.seen)

    def get_reward(self) -> float:
        self._at_home()
        return float(len(self.seen))

    def close(self):
        self._at_home()


MCP_SERVER = '''
import asyncio, os, sys
from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    """Fails."""
    raise ToolError("no such luck")

@server.tool()
def overdrawn() -> str:
    """Is refused by the server."""
    raise MCPError(code=-32050, message="no credit left")

@server.tool()
async def hang(seconds: float = 60.0) -> str:
    """Hangs."""
    await asyncio.sleep(seconds)
    return "late"

@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(1)

@server.tool()
def secret() -> str:
    """Return what the tool sees of the environment."""
    return f"{os.environ.get('GIVEN')} {os.environ.get('HIDDEN')}"

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''


def called(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def wait_until(condition, limit_s=120.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
