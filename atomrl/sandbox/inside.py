"""Test harness inside the sandbox, for tests that call a solution's functions. Uses only the standard library.

There are two processes, each in its own box: one has the solution and serves calls, the other runs the tests. They
exchange plain values as JSON. So a solution that manipulates its own process (`==`, `assert`, frames, modules, file
descriptors, exit code) cannot affect the tests, and cannot see the expected results.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import sys
import types

TYPE_CHECKING = False  # importing typing would take a third of a box's start-up time
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, BinaryIO

HERE = os.path.dirname(os.path.abspath(__file__))
MAX_LINE = 1 << 24
PASSED, FAILED, UNSERVED = "passed", "failed", "unserved"


class NoValue(BaseException):
    """A test used an object of the solution as a value (comparison, arithmetic, ...), or the solution has died."""


class CannotSend(BaseException):
    """A test passed the solution an argument that is not a plain value."""


class SolutionStopped(RuntimeError):
    """The solution raised StopIteration. In `__next__` of its iterator this is the end; raised by a function, it would
    end a `map` or a loop of the test, which would then compare nothing."""


class Remote:
    """Proxy for an object in the solution's process. Supports calls, attributes and iteration.

    Comparisons and conversions raise `NoValue`, because the solution could define them as it likes.
    """

    _channel: CallChannel
    _key: int

    def __init__(self, channel: CallChannel, key: int) -> None:
        self.__dict__.update(_channel=channel, _key=key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.call(self._key, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._channel.get(self._key, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._channel.get(self._key, "__iter__")()
        while True:
            try:
                value = iterator.__next__()
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        try:
            return self._channel.get(self._key, "__next__")()
        except SolutionStopped:
            raise StopIteration from None

    def _refuse(self, *_: Any) -> Any:
        self._channel.misused = True
        raise NoValue("an object of the solution's own class cannot be judged")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __contains__ = _refuse
    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __float__ = __int__ = _refuse
    __index__ = __str__ = __repr__ = __format__ = _refuse


def encode(value: Any, other: Callable[[Any], int]) -> Any:
    """Encode a value for JSON. `other` returns a key for an object that is not a plain value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):  # convert subclasses without calling their methods
        plain: Any = int if isinstance(value, int) else float if isinstance(value, float) else str
        return plain.__add__(value, plain())
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, other) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    return {"remote": other(value)}


def decode(data: Any, remote: Callable[[int], Any]) -> Any:
    """Decode a value from `encode`. `remote` returns the object or proxy of a key."""
    if isinstance(data, list):
        return [decode(item, remote) for item in data]
    if not isinstance(data, dict):
        return data
    [(kind, parts)] = data.items()
    if kind == "remote":
        return remote(parts)
    if kind == "bytes":
        return bytes.fromhex(parts)
    if kind in ("complex", "range"):
        return {"complex": complex, "range": range}[kind](*parts)
    if kind == "dict":
        return {decode(key, remote): decode(item, remote) for key, item in parts}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item, remote) for item in parts)


# ---- The solution's process ----


def serve_programs() -> None:
    """Serve calls of the tests on the original stdin and stdout. The solution's own streams are /dev/null."""
    reader, writer = _take_streams()
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def answer(reply: Any) -> None:
        writer.write(json.dumps(reply).encode() + b"\n")
        writer.flush()

    try:
        solution = _load_solution()
        answer({"value": {"tuple": sorted(name for name in vars(solution) if not name.startswith("__"))}})
    except BaseException as error:
        answer(_error_reply(error))
        return
    for line in reader:
        try:
            verb, key, *rest = json.loads(line)
            target: Any = solution if key is None else objects[key]
            if verb == "get":
                answer({"value": encode(getattr(target, rest[0]), keep)})
            else:
                args, kwargs = (decode(part, objects.__getitem__) for part in rest)
                value = target(*args, **kwargs)
                answer({"value": encode(value, keep), "args": encode(list(args), keep)})
        except BaseException as error:
            answer(_error_reply(error))


def _load_solution() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("solution", os.path.join(HERE, "solution.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module
    sys.setrecursionlimit(10_000)
    spec.loader.exec_module(module)
    return module


def _error_reply(error: BaseException) -> dict[str, list[str]]:
    return {"raised": [type(error).__name__, str(error)[:300]]}


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes to the other process, and replace stdin and stdout by /dev/null."""
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    return reader, writer


# ---- The tests' process ----


class CallChannel:
    """The tests' connection to the solution's process. Replies are untrusted: they are decoded to plain values only."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self.reader, self.writer = reader, writer
        # misused: a test used a `Remote` as a value; lost: the solution's process is gone
        self.misused = self.lost = False

    def receive(self) -> tuple[Any, Any]:
        """Receive a reply: (value, list of the arguments after the call).

        An exception of the solution is raised here, if it is a built-in one that Python itself does not catch; any
        other becomes a RuntimeError.
        """
        try:
            answer = json.loads(self.reader.readline(MAX_LINE))
            if "raised" not in answer:
                value, after = (decode(answer.get(part, []), self._remote) for part in ("value", "args"))
                return value, after if isinstance(after, list) else []
            name, text = map(str, answer["raised"])
        except Exception:
            raise self._disconnected() from None
        if name in ("StopIteration", "StopAsyncIteration"):
            raise SolutionStopped(f"{name}: {text}")
        kind = getattr(builtins, name, None)
        if (
            isinstance(kind, type)
            and issubclass(kind, Exception)
            and not issubclass(kind, UnicodeError | ExceptionGroup)
        ):
            raise kind(text)
        raise RuntimeError(f"{name}: {text}")

    def get(self, key: int | None, name: str) -> Any:
        """Return an attribute of a remote object, or of the solution's module (key None)."""
        return self._request("get", key, name)[0]

    def call(self, key: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a remote object. Changes to list, dict and set arguments are applied to the test's objects."""
        value, after = self._request("call", key, encode(list(args), _remote_key), encode(kwargs, _remote_key))
        for old, new in zip(args, after, strict=False):
            if isinstance(old, list) and isinstance(new, list):
                old[:] = new
            elif isinstance(old, dict | set) and type(old) is type(new):
                old.clear()
                old.update(new)
        return value

    def _request(self, *message: Any) -> tuple[Any, Any]:
        try:
            self.writer.write(json.dumps(message).encode() + b"\n")
            self.writer.flush()
        except OSError:
            raise self._disconnected() from None
        return self.receive()

    def _remote(self, key: Any) -> Remote:
        if type(key) is not int:
            raise TypeError
        return Remote(self, key)

    def _disconnected(self) -> NoValue:
        self.lost = True
        return NoValue("the solution's process ended, or sent an invalid reply")


def _remote_key(value: Any) -> int:
    if isinstance(value, Remote):
        return value._key
    raise CannotSend(f"a {type(value).__name__} cannot be passed to a solution in another process")


def test() -> None:
    """Run the tests and write one verdict per line to the original stderr, until the solution's process is lost."""
    verdicts = os.fdopen(os.dup(2), "w", encoding="utf-8")
    channel = CallChannel(*_take_streams())
    os.dup2(1, 2)
    with open(os.path.join(HERE, "tests.json"), encoding="utf-8") as file:
        plan = json.load(file)
    try:
        names, load_error = channel.receive()[0], ""
    except BaseException as error:
        names, load_error = (), f"the solution cannot be loaded: {type(error).__name__}: {error}"
    module = types.ModuleType("solution")
    module.__dict__["__getattr__"] = lambda name: channel.get(None, name)
    sys.modules["solution"] = module
    for number, source in enumerate(plan["tests"]):
        verdict, message = (
            (FAILED, load_error) if load_error else _judge(channel, number, source, names, plan["entries"])
        )
        verdicts.write(json.dumps([verdict, message[:300]]) + "\n")
        verdicts.flush()
        if channel.lost:
            return


def _judge(channel: CallChannel, number: int, source: str, names: Any, entries: list[str]) -> tuple[str, str]:
    """Run one test and return (verdict, message)."""
    import runpy

    channel.misused = False
    path = os.path.join(os.environ["HOME"], f"test_{number}.py")
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(source)
    try:
        modules, free = _free_names(source)
        from_solution = [name for name in free if name in entries or (name in names and not hasattr(builtins, name))]
        namespace = {name: channel.get(None, name) for name in from_solution}
        namespace |= {name: importlib.import_module(name) for name in modules}
        runpy.run_path(path, init_globals=namespace, run_name="tests")
    except CannotSend as error:
        return UNSERVED, str(error)
    except BaseException as error:
        return FAILED, f"{type(error).__name__}: {error}"
    # The test may have caught the NoValue itself.
    return (FAILED, "there was no value to judge") if channel.lost or channel.misused else (PASSED, "")


def _free_names(source: str) -> tuple[list[str], list[str]]:
    """Return (modules, other names) that a test uses without defining them.

    Modules are names used only with attributes. They must be in the standard library and are imported here; they are
    never taken from the solution. The other names are the solution's or built-in.

    Raises:
        CannotSend: such a name is not in the standard library (`np.allclose`). It is not taken from the solution, which
            could replace the function that compares its results.
    """
    import ast

    nodes = [*ast.walk(ast.parse(source))]
    loads = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    owners = [node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    free = [name for name in dict.fromkeys(loads) if name not in bound]
    modules = [name for name in free if loads.count(name) == owners.count(name) and not hasattr(builtins, name)]
    for name in modules:
        if name not in sys.stdlib_module_names:
            raise CannotSend(f"{name!r} is not imported by the test, and is not a function of the solution")
    return modules, [name for name in free if name not in modules]


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    if os.path.exists(os.path.join(HERE, "solution.py")):
        serve_programs()
    else:
        test()
