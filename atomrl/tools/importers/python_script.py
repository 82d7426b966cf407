"""Static evaluation of a Python script: values of names and arguments of calls, without running it."""

import ast
import builtins
import operator
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.tools.importers.sources import Settings, text_of

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_SIGNS: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
_DTYPES = {"bfloat16", "float16", "float32", "half", "float"}
_OPTIONAL = ("dataset_config", "model_revision", "attn_implementation", "lora_target_modules")
"""Fields of TRL's classes whose default is None."""
PARSERS = ("parse_args_and_config", "parse_args_into_dataclasses", "parse_yaml_file", "parse_json_file", "parse_dict")
"""Methods of `HfArgumentParser` and `TrlParser` that return instances of the parser's classes."""


class Unknown(ValueError):
    """A value is only known when the script runs."""


@dataclass(frozen=True)
class Binding:
    """A statement that binds a name."""

    statement: ast.AST
    """The assignment, import, definition or parameter."""
    value: ast.expr | None
    """The assigned expression; None if it is not a plain assignment."""
    direct: bool
    """True if it is executed whenever the scope is: not in a condition or loop."""


class PythonScript:
    """A script that is parsed and never run.

    Args:
        path: the file.
        flags: its command line, for values from `argparse` or `HfArgumentParser`; None if it is unknown.

    Raises:
        ConfigError: it cannot be read, or is not valid Python; with the line.
    """

    def __init__(self, path: Path, flags: Settings | None = None) -> None:
        self.path, self.flags, self.text = path, flags or {}, text_of(path)
        self.has_command_line = flags is not None
        self.used: set[str] = set()
        """Flags that the script itself reads."""
        self.notes: list[str] = []
        """Notes on assumed values, such as defaults of environment variables."""
        try:
            self.module = ast.parse(self.text, str(path))
        except SyntaxError as error:
            raise ConfigError(f"{path}:{error.lineno}: not valid Python: {error.msg}") from None
        self.parents = {child: node for node in ast.walk(self.module) for child in ast.iter_child_nodes(node)}
        self._bindings: dict[ast.AST, dict[str, list[Binding]]] = {}
        self._arguments_of: dict[tuple[ast.AST, str], ast.expr] = {}

    # ---- Names ----

    def place(self, node: ast.AST) -> str:
        """Return file and line of a node: `file.py:12`."""
        return f"{self.path.name}:{getattr(node, 'lineno', 1)}"

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function, class or module that contains a node."""
        while not isinstance(node := self.parents[node], _SCOPES):
            pass
        return node

    def bindings(self, scope: ast.AST) -> dict[str, list[Binding]]:
        """Return the bindings of each name in a function, class or module, in the order of the lines."""
        if scope not in self._bindings:
            bindings: dict[str, list[Binding]] = {}
            for name, binding in _bound_in(scope):
                bindings.setdefault(name, []).append(binding)
            self._bindings[scope] = bindings
        return self._bindings[scope]

    def lookup(self, name: str, at: ast.AST) -> Binding | None:
        """Find the binding of a name at a node; None if there is none.

        A name that is bound conditionally, or several times and read in another function, has no value.
        """
        own = scope = self.scope(at)
        while True:
            bindings = self.bindings(scope).get(name, []) if not isinstance(scope, ast.ClassDef) or scope is own else []
            if scope is own and not isinstance(scope, ast.Lambda):
                line = (getattr(at, "lineno", 0), getattr(at, "col_offset", 0))
                bindings = [one for one in bindings if _is_before(one.statement, line, at)]
            if bindings:
                last = bindings[-1]
                sure = last.direct and (scope is own or len(bindings) == 1)
                return last if sure else Binding(last.statement, None, False)
            if isinstance(scope, ast.Module):
                return None
            scope = self.scope(scope)

    def imports(self) -> dict[str, str]:
        """Return the imported names, anywhere in the script -> their dotted names."""
        names: dict[str, str] = {}
        for node in ast.walk(self.module):
            if isinstance(node, ast.Import):
                names |= {
                    one.asname or one.name.partition(".")[0]: one.name if one.asname else "" for one in node.names
                }
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                names |= {(one.asname or one.name): f"{module}.{one.name}" for one in node.names}
        return {name: full or name for name, full in names.items()}

    @cached_property
    def _imported(self) -> dict[str, str]:
        return self.imports()

    def called(self, node: ast.expr) -> str:
        """Return the last part of a callee's dotted name; import aliases are resolved."""
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.Name):
            return self._imported.get(function.id, function.id).rpartition(".")[2]
        return function.attr if isinstance(function, ast.Attribute) else ""

    # ---- Calls ----

    def calls(self, names: Collection[str]) -> list[ast.Call]:
        """Return all calls of some names, by line."""
        calls = [n for n in ast.walk(self.module) if isinstance(n, ast.Call) and self.called(n) in names]
        return sorted(calls, key=lambda call: (call.lineno, call.col_offset))

    def resolved(self, node: ast.expr) -> ast.expr:
        """Follow a name to the expression that it is bound to; the node itself if it is not a name or has no value."""
        for _ in range(20):
            if not isinstance(node, ast.Name):
                return node
            target = self._parameter(node)
            if target is None:
                binding = self.lookup(node.id, node)
                if binding is None or binding.value is None:
                    return node
                target = binding.value
            node = target
        return node

    def arguments(self, call: ast.Call, positional: Collection[str] = ()) -> dict[str, ast.expr]:
        """Return the arguments of a call by name; `**` of a dict is expanded.

        Args:
            positional: names of the positional arguments; further ones are named by their index.

        Raises:
            ConfigError: `*` or `**` of a value that is only known when the script runs.
        """
        names, arguments = list(positional), {}
        for place, value in enumerate(call.args):
            if isinstance(value, ast.Starred):
                raise self.only_when_run(value, self.called(call))
            arguments[names[place] if place < len(names) else str(place)] = value
        for keyword in call.keywords:
            if keyword.arg is not None:
                arguments[keyword.arg] = keyword.value
                continue
            mapping = self.resolved(keyword.value)
            if isinstance(mapping, ast.Dict) and all(isinstance(key, ast.Constant) for key in mapping.keys):
                keys = [str(key.value) for key in mapping.keys if isinstance(key, ast.Constant)]
                arguments |= dict(zip(keys, mapping.values, strict=True))
            elif isinstance(mapping, ast.Call) and self.called(mapping) == "dict" and not mapping.args:
                arguments |= self.arguments(mapping)
            else:
                raise self.only_when_run(
                    ast.Starred(keyword.value, lineno=keyword.value.lineno), self.called(call), "**"
                )
        return arguments

    def set_later(self, call: ast.Call) -> dict[str, ast.expr]:
        """Return the attributes that the script sets on the result of a call, in the statements after it.

        Raises:
            ConfigError: it may be set, or not: within a condition, a loop, another function.
        """
        statement = self.parents[call]
        owner = _target(statement)
        if owner is None or getattr(statement, "value", None) is not call:
            return {}
        scope, attributes = self.scope(statement), {}
        for node in ast.walk(self.module):
            changed: ast.stmt | ast.expr | None = None
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                own = [one for one in targets if isinstance(one, ast.Attribute) and _is(one.value, owner)]
                plain = len(targets) == 1 and isinstance(node, ast.Assign)
                if own and plain and self.scope(node) is scope and self._runs_always(node, scope):
                    assert isinstance(node, ast.Assign)
                    attributes[own[0].attr] = node.value
                elif own:
                    changed = node
            elif isinstance(node, ast.Call) and self.called(node) in ("setattr", "replace"):
                changed = node if node.args and _is(node.args[0], owner) else None
            if changed is not None:
                text = ast.unparse(changed).splitlines()[0]
                raise ConfigError(
                    f"{self.path}:{changed.lineno}: {text}: known only when it runs; write the value into the call"
                )
        return attributes

    def _runs_always(self, node: ast.AST, scope: ast.AST) -> bool:
        while (parent := self.parents[node]) is not scope:
            if not isinstance(parent, ast.With) and not _is_main_guard(parent):
                return False
            node = parent
        return True

    def only_when_run(self, node: ast.expr, called: str, name: str = "*") -> ConfigError:
        """Return the error for an argument that affects training and is only known when the script runs."""
        text = ast.unparse(node)
        return ConfigError(
            f"{self.path}:{node.lineno}: {called}({name}={text}) is known only when it runs; write its value"
        )

    # ---- Values ----

    def value(self, node: ast.expr) -> Any:
        """Evaluate an expression.

        Supports literals, arithmetic, concatenated and formatted texts, names bound to such values, paths
        (`os.path.join`, `Path(...) / ...`), torch dtypes, environment variables with a default, and parsed arguments of
        the command line.

        Raises:
            Unknown: the value is only known when the script runs.
        """
        try:
            return self._value(node)
        except RecursionError:
            raise Unknown(ast.unparse(node)) from None
        except (ArithmeticError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise Unknown(f"{ast.unparse(node)}: {error}") from None

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            target = self.resolved(node)
            if target is node:
                raise Unknown(node.id)
            return self._value(target)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items = [self._value(item) for item in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {self._value(key): self._value(value) for key, value in pairs if key is not None}
        if isinstance(node, ast.UnaryOp):
            inner = self._value(node.operand)
            return _SIGNS[type(node.op)](inner)
        if isinstance(node, ast.BinOp):
            return self._joined(type(node.op), self._value(node.left), self._value(node.right))
        if isinstance(node, ast.JoinedStr):
            return "".join(self._formatted(part) for part in node.values)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.Call):
            return self._result(node)
        raise Unknown(ast.unparse(node))

    @staticmethod
    def _joined(kind: type[ast.operator], left: Any, right: Any) -> Any:
        numbers = all(isinstance(side, int | float) for side in (left, right))
        texts = all(isinstance(side, str) for side in (left, right))
        if numbers and kind in _OPERATORS and not (kind is ast.Pow and abs(right) > 64):
            return _OPERATORS[kind](left, right)
        if texts and kind in (ast.Add, ast.Div):
            return left + right if kind is ast.Add else os.path.join(left, right)
        raise Unknown("neither numbers nor texts")

    def _formatted(self, part: ast.expr) -> str:
        if not isinstance(part, ast.FormattedValue):
            return str(self._value(part))
        form = "" if part.format_spec is None else str(self._value(part.format_spec))
        if len(form) > 8 or any(int(number) > 99 for number in re.findall(r"\d+", form)):
            raise Unknown(ast.unparse(part))  # a width that would fill the memory
        value = self._value(part.value)
        return format(repr(value) if part.conversion == ord("r") else value, form)

    def _item(self, node: ast.Subscript) -> Any:
        if ast.unparse(node.value) == "os.environ":
            if self._value(node.slice) == "HOME":
                return os.path.expanduser("~")
            raise Unknown(ast.unparse(node))
        return self._value(node.value)[self._value(node.slice)]

    def _attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name):
            if node.value.id == "torch" and node.attr in _DTYPES:
                return {"half": "float16", "float": "float32"}.get(node.attr, node.attr)
            if (parsed := self._parsed(node.value)) is not None:
                return self._from_command_line(node, parsed)
        raise Unknown(ast.unparse(node))

    def _result(self, node: ast.Call) -> Any:
        name, arguments = ast.unparse(node.func), node.args
        if name in ("os.path.join", "Path", "pathlib.Path", "str", "os.path.expanduser", "os.fspath") and arguments:
            parts = [str(self._value(part)) for part in arguments]
            return os.path.expanduser(os.path.join(*parts)) if name != "str" else parts[0]
        if name == "Path.home":
            return os.path.expanduser("~")
        if name in ("os.environ.get", "os.getenv") and arguments:
            variable = self._value(arguments[0])
            if variable == "HOME":
                return os.path.expanduser("~")
            if len(arguments) == 2:
                default = self._value(arguments[1])
                self.notes.append(
                    f"{self.place(node)}: {variable} is an environment variable: its default {default!r} was used"
                )
                return default
        if name in ("int", "float", "list", "tuple") and len(arguments) == 1 and not node.keywords:
            return {"int": int, "float": float, "list": list, "tuple": tuple}[name](self._value(arguments[0]))
        if name == "dict" and not arguments:
            return {key: self._value(value) for key, value in self.arguments(node).items()}
        raise Unknown(ast.unparse(node))

    # ---- The command line ----

    def parsed_class(self, node: ast.expr) -> str | None:
        """Return the class of an object that an argument parser returns, such as `GRPOConfig` from `TrlParser`."""
        parsed = self._parsed(node) if isinstance(node, ast.Name) else None
        return parsed.rpartition(".")[2] if parsed else None

    def _parsed(self, node: ast.Name) -> str | None:
        """Return the class of an object from an argument parser; "" for argparse's namespace, None for others."""
        for _ in range(20):  # follow function parameters to their arguments
            argument = self._parameter(node)
            if not isinstance(argument, ast.Name):
                break
            node = argument
        binding = self.lookup(node.id, node)
        statement = binding.statement if binding else None
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call | ast.Subscript):
            return None
        call = statement.value.value if isinstance(statement.value, ast.Subscript) else statement.value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return None
        if call.func.attr in ("parse_args", "parse_known_args"):
            return ""
        if call.func.attr not in PARSERS:
            return None
        maker = self.resolved(call.func.value)
        kinds = self.arguments(maker, ["dataclass_types"]) if isinstance(maker, ast.Call) else {}
        classes = self.resolved(kinds["dataclass_types"]) if "dataclass_types" in kinds else None
        names = [self.called(one) for one in classes.elts] if isinstance(classes, ast.Tuple | ast.List) else None
        if names is None:
            names = [self.called(classes)] if classes is not None else []
        target = statement.targets[0]
        places = [_named(one) for one in target.elts] if isinstance(target, ast.Tuple) else [_named(target)]
        place = places.index(node.id) if node.id in places else len(names)
        return names[place] if place < len(names) else None

    def _from_command_line(self, node: ast.Attribute, parsed: str) -> Any:
        """Return the value of `args.name`: from the command line, else the default of the script or of TRL."""
        self.used.add(node.attr)
        if node.attr in self.flags:
            return self.flags[node.attr]
        if self.has_command_line and parsed and node.attr in _OPTIONAL:
            return None
        default = self._field_default(parsed, node.attr) if parsed else self._argparse_default(node.attr)
        value = self._value(default) if isinstance(default, ast.expr) else default
        if value is None:
            raise Unknown(f"{ast.unparse(node)}: from the command line")
        if not self.has_command_line:
            self.notes.append(
                f"{self.place(node)}: {ast.unparse(node)} is from the command line: its default {value!r} was used"
            )
        return value

    def _argparse_default(self, name: str) -> ast.expr | bool | None:
        for call in self.calls(["add_argument"]):
            flags = [one.value for one in call.args if isinstance(one, ast.Constant)]
            arguments = self.arguments(call)
            dest = arguments.get("dest")
            named = [str(flag).lstrip("-").replace("-", "_") for flag in flags]
            if name in named or (isinstance(dest, ast.Constant) and dest.value == name):
                action = arguments.get("action")
                if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
                    return bool(action.value == "store_false")
                return arguments.get("default")
        return None

    def _field_default(self, class_name: str, name: str) -> ast.expr | str | None:
        for node in ast.walk(self.module):
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and _is(field.target, name) and field.value is not None:
                        made = field.value
                        return self.arguments(made).get("default") if isinstance(made, ast.Call) else made
        return {"dataset_train_split": "train", "dataset_test_split": "test"}.get(name)

    # ---- Functions of the script ----

    def returned(self, call: ast.Call) -> ast.expr | None:
        """Return the expression that a function of the script returns for a call, with its parameters bound; None if it
        is not a function of the script, or has several returns."""
        if not isinstance(call.func, ast.Name):
            return None
        binding = self.lookup(call.func.id, call)
        function = binding.statement if binding else None
        if not isinstance(function, ast.FunctionDef):
            return None
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
        returns = [node for node in returns if self.scope(node) is function and node.value is not None]
        if len(returns) != 1:
            return None
        self._bind(function, call)
        return returns[0].value

    def _bind(self, function: ast.FunctionDef, call: ast.Call) -> None:
        """Bind the parameters of a function to the arguments of a call, or their defaults."""
        own = function.args
        names = [one.arg for one in (*own.posonlyargs, *own.args)]
        arguments = dict(zip(names[len(names) - len(own.defaults) :], own.defaults, strict=True))
        arguments |= {
            one.arg: value for one, value in zip(own.kwonlyargs, own.kw_defaults, strict=True) if value is not None
        }
        arguments |= self.arguments(call, names)
        self._arguments_of |= {(function, name): value for name, value in arguments.items()}

    def _parameter(self, node: ast.Name) -> ast.expr | None:
        """Return the argument of a parameter, from the call that `returned` went through or the only call there is."""
        scope = self.scope(node)
        if not isinstance(scope, ast.FunctionDef) or len(self.bindings(scope).get(node.id, ())) != 1:
            return None
        if not isinstance(self.bindings(scope)[node.id][0].statement, ast.arg):
            return None
        if (scope, node.id) not in self._arguments_of:
            calls = self.calls([scope.name])
            if len(calls) != 1:  # ambiguous
                return None
            self._bind(scope, calls[0])
        return self._arguments_of.get((scope, node.id))


def free_names(node: ast.AST) -> dict[str, ast.Name]:
    """Return the names that a definition or expression reads but does not bind; annotations are ignored.

    Example:
        >>> sorted(free_names(ast.parse("def f(a, b: Text = one):\\n    c = a\\n    return [two(x) for x in c]")))
        ['one', 'two']
    """
    annotations = {
        id(inner)
        for part in ast.walk(node)
        for field in ("annotation", "returns")
        if isinstance(noted := getattr(part, field, None), ast.AST)
        for inner in ast.walk(noted)
    }
    read: dict[str, ast.Name] = {}
    bound: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and id(part) not in annotations:
            if isinstance(part.ctx, ast.Load):
                read.setdefault(part.id, part)
            else:
                bound.add(part.id)
        elif isinstance(part, ast.arg):
            bound.add(part.arg)
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            bound.add(part.name or "")
        elif isinstance(part, ast.Import | ast.ImportFrom):
            bound |= {(one.asname or one.name).partition(".")[0] for one in part.names}
    return {name: place for name, place in read.items() if name not in bound and not hasattr(builtins, name)}


def _bound_in(scope: ast.AST) -> Iterator[tuple[str, Binding]]:
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        own = scope.args
        for one in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg):
            if one is not None:
                yield one.arg, Binding(one, None, True)
    body = [scope.body] if isinstance(scope, ast.Lambda) else getattr(scope, "body", [])
    for statement in body:
        yield from _bound_by(statement, True)


def _bound_by(node: ast.AST, direct: bool) -> Iterator[tuple[str, Binding]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, Binding(node, None, direct)
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], Binding(node, None, direct)
        return
    if (name := _target(node)) is not None:
        yield name, Binding(node, getattr(node, "value", None), direct)
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.For | ast.NamedExpr | ast.withitem):
        for target in getattr(node, "targets", [getattr(node, "target", getattr(node, "optional_vars", None))]):
            for part in ast.walk(target) if target is not None else ():
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, Binding(node, None, direct)
    always = isinstance(node, ast.With | ast.withitem) or _is_main_guard(node) or isinstance(node, ast.expr)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr) or isinstance(child, ast.NamedExpr):
            yield from _bound_by(child, direct and always)


def _is_before(statement: ast.AST, line: tuple[int, int], at: ast.AST) -> bool:
    """Return whether a statement has been executed before a node is evaluated; definitions always have."""
    if isinstance(statement, ast.arg | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return True
    end = (getattr(statement, "end_lineno", 0) or 0, getattr(statement, "end_col_offset", 0) or 0)
    return end <= line and statement is not at


def _is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and not node.orelse


def _target(statement: ast.AST) -> str | None:
    """Return the name that an assignment binds, if it binds one name."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return _named(statement.targets[0])
    return _named(statement.target) if isinstance(statement, ast.AnnAssign) and statement.value else None


def _named(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
