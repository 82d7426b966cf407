"""What runs in the sandbox when the functions of a solution are called by tests: it needs nothing but Python.

There are two processes, each in a box of its own. One has the solution and answers calls. The other has the tests,
which see only what the calls return: plain values, rebuilt here from JSON. What the solution does in its process, to
the meaning of `==` or `assert`, to its frames, modules, descriptors or exit code, does not reach the tests; and what
they compare with does not reach the solution.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import sys
import types

TYPE_CHECKING = False  # typing takes a third of the time that a box takes
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, BinaryIO

HERE = os.path.dirname(os.path.abspath(__file__))
MAX_LINE = 1 << 24
PASSED, FAILED, UNSERVED = "passed", "failed", "unserved"


class NoValue(BaseException):
    """A test did something else with an object of the solution's own than to call it, or the solution is gone."""


class CannotSend(BaseException):
    """A test calls the solution with something that is no plain value."""


class Remote:
    """An object that stayed in the solution's process: it can be called, has attributes and can be gone through.

    It is equal to nothing, and neither true nor false: only plain values are judged.
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
        return self._channel.get(self._key, "__next__")()

    def _refuse(self, *_: Any) -> Any:
        self._channel.misused = True
        raise NoValue("an object of the solution's own class is no value that could be judged")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __contains__ = _refuse
    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __float__ = __int__ = _refuse
    __index__ = __str__ = __repr__ = __format__ = _refuse


def encode(value: Any, other: Callable[[Any], int]) -> Any:
    """A value as JSON; what is no plain one by `other`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):  # of a subclass: what it is made of
        plain: Any = int if isinstance(value, int) else float if isinstance(value, float) else str
        return plain.__add__(value, plain())
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    for many in (tuple, set, frozenset):
        if isinstance(value, many):
            return {many.__name__: [encode(item, other) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    return {"remote": other(value)}


def decode(data: Any, remote: Callable[[int], Any]) -> Any:
    """The value again; `remote` finds one that was no plain one."""
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


def serve() -> None:
    """Answer calls, on what stdin and stdout were; the solution gets others, that lead nowhere."""
    reader, writer = _take_streams()
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def answer(reply: Any) -> None:
        writer.write(json.dumps(reply).encode() + b"\n")
        writer.flush()

    try:
        solution = _load_solution()
        answer({"value": {"tuple": sorted(name for name in vars(solution) if not name.startswith("__"))}})
    except BaseException as error:
        answer(_raised(error))
        return
    for line in reader:
        try:
            verb, key, *rest = json.loads(line)
            target: Any = solution if key is None else kept[key]
            if verb == "get":
                answer({"value": encode(getattr(target, rest[0]), keep)})
            else:
                args, kwargs = (decode(part, kept.__getitem__) for part in rest)
                value = target(*args, **kwargs)
                answer({"value": encode(value, keep), "args": encode(list(args), keep)})
        except BaseException as error:
            answer(_raised(error))


def _load_solution() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("solution", os.path.join(HERE, "solution.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module
    sys.setrecursionlimit(10_000)
    spec.loader.exec_module(module)
    return module


def _raised(error: BaseException) -> dict[str, list[str]]:
    return {"raised": [type(error).__name__, str(error)[:300]]}


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Streams to who is on the other side; what is printed or read from now on does not get there."""
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return reader, writer


# ---- The tests' process ----


class CallChannel:
    """To the solution's process. Nothing that comes from there is believed to be more than a value."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self.reader, self.writer = reader, writer
        self.misused = self.lost = False

    def hear(self) -> tuple[Any, Any]:
        """A value, and what has become of the arguments; what the solution raised, where it is an exception that Python
        knows, is raised here."""
        try:
            answer = json.loads(self.reader.readline(MAX_LINE))
            if "raised" not in answer:
                value, after = (decode(answer.get(part, []), self._remote) for part in ("value", "args"))
                return value, after if isinstance(after, list) else []
            name, text = map(str, answer["raised"])
        except Exception:
            raise self._gone() from None
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            raise kind(text)
        raise RuntimeError(f"{name}: {text}")

    def get(self, key: int | None, name: str) -> Any:
        """An attribute of an object of the solution's process, or of the solution itself."""
        return self._ask("get", key, name)[0]

    def call(self, key: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call one of its objects; what it does to lists that it is given is done to the test's."""
        value, after = self._ask("call", key, encode(list(args), _key_of), encode(kwargs, _key_of))
        for old, new in zip(args, after, strict=False):
            if isinstance(old, list) and isinstance(new, list):
                old[:] = new
            elif isinstance(old, dict | set) and type(old) is type(new):
                old.clear()
                old.update(new)
        return value

    def _ask(self, *message: Any) -> tuple[Any, Any]:
        try:
            self.writer.write(json.dumps(message).encode() + b"\n")
            self.writer.flush()
        except OSError:
            raise self._gone() from None
        return self.hear()

    def _remote(self, key: Any) -> Remote:
        if type(key) is not int:
            raise TypeError
        return Remote(self, key)

    def _gone(self) -> NoValue:
        self.lost = True
        return NoValue("the solution's process ended, or answered with what is no value")


def _key_of(value: Any) -> int:
    if isinstance(value, Remote):
        return value._key
    raise CannotSend(f"a {type(value).__name__} cannot be given to a solution in another process")


def test() -> None:
    """Run test after test, and say of each on what stderr was what came of it, until the solution is lost."""
    verdicts = os.fdopen(os.dup(2), "w", encoding="utf-8")
    channel = CallChannel(*_take_streams())
    os.dup2(1, 2)
    with open(os.path.join(HERE, "tests.json"), encoding="utf-8") as file:
        plan = json.load(file)
    try:
        names, broken = channel.hear()[0], ""
    except BaseException as error:
        names, broken = (), f"the solution cannot be loaded: {type(error).__name__}: {error}"
    module = types.ModuleType("solution")
    module.__dict__["__getattr__"] = lambda name: channel.get(None, name)
    sys.modules["solution"] = module
    for number, source in enumerate(plan["tests"]):
        word, message = (FAILED, broken) if broken else _judge(channel, number, source, names, plan["entries"])
        verdicts.write(json.dumps([word, message[:300]]) + "\n")
        verdicts.flush()
        if channel.lost:
            return


def _judge(channel: CallChannel, number: int, source: str, names: Any, entries: list[str]) -> tuple[str, str]:
    """What came of one test, and why."""
    import runpy

    channel.misused = False
    path = os.path.join(os.environ["HOME"], f"test_{number}.py")
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(source)
    try:
        modules, taken = _free_names(source)
        wanted = [name for name in taken if name in entries or (name in names and not hasattr(builtins, name))]
        given = {name: channel.get(None, name) for name in wanted}
        given |= {name: importlib.import_module(name) for name in modules}
        runpy.run_path(path, init_globals=given, run_name="tests")
    except CannotSend as error:
        return UNSERVED, str(error)
    except BaseException as error:
        return FAILED, f"{type(error).__name__}: {error}"
    return (FAILED, "there was no value to judge") if channel.lost or channel.misused else (PASSED, "")


def _free_names(source: str) -> tuple[list[str], list[str]]:
    """Names that a test uses and does not have: those of Python's own modules, which are the real ones whatever the
    solution calls so; and those of the solution.

    Raises:
        CannotSend: a name of nothing but attributes is used and is no such module (`np.allclose`). The solution could
            call so what judges its results.
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
            raise CannotSend(f"{name!r} is not imported by the test, and no function of the solution's")
    return modules, [name for name in free if name not in modules]


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    if os.path.exists(os.path.join(HERE, "solution.py")):
        serve()
    else:
        test()
