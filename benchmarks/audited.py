"""The built-in rewards with an audit hook around each call: for `benchmarks/rewards.py`, in its worker processes."""

from __future__ import annotations

import ast
import json
import os
import sys
from typing import Any

from atomrl.rewards.table import POOLED, REWARDS

AUDIT_LOG = "ATOMRL_AUDIT_LOG"
PAYLOAD_MARK = "/tmp/atomrl_payload_was_run"
STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pty.spawn", "ctypes.dlopen",
          "socket.connect", "os.remove", "os.rename", "os.mkdir", "shutil.", "pickle.find_class")  # fmt: skip
WORDS = ("__import__", "open", "exec", "eval", "compile", "subprocess", "pathlib", "__class__", "write18", PAYLOAD_MARK)
"""Words of the payloads: no code that contains one may be compiled or run."""
_watching = False
_path = os.environ.get(AUDIT_LOG)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    global _watching
    if not _watching:
        return
    shown = ""
    if event == "compile":
        shown = repr(arguments[0])[:300]  # also what is only parsed
        if not any(word in shown for word in WORDS):
            return
    elif event == "exec":
        code: Any = arguments[0]
        shown = f"{getattr(code, 'co_names', '')} {getattr(code, 'co_consts', '')}"
        # sympy runs code of its own making (Integer(18) for a number, products of monomials): no word of a payload
        if getattr(code, "co_filename", "") != "<string>" or not any(word in shown for word in WORDS):
            return
    elif event == "open":
        mode, flags = str(arguments[1] or ""), int(arguments[2] or 0)
        if not (set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        shown = repr(arguments[:2])
    elif not event.startswith(STARTS):
        return
    _watching = False
    _write({"event": event, "what": shown or repr(arguments)[:200]})
    _watching = True


def _write(row: dict[str, Any]) -> None:
    with open(str(_path), "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _audited(name: str, function: Any) -> Any:

    def call(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        global _watching
        columns.pop("completion_tokens" if name != "length_penalty" else "", None)
        _watching = True
        try:
            return function(prompts, completions, **columns)
        finally:
            _watching = False

    return call


if _path is not None:
    for _pooled in POOLED.values():
        _pooled.warm_up()
    _write({"event": "hook"})
    sys.addaudithook(_hook)

for _name in REWARDS:
    globals()[_name] = _audited(_name, REWARDS[_name])


def _guilty(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Hands what a model wrote to the compiler, if only to parse it: the hook must see that."""
    for text in completions:
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            continue
    return [0.0] * len(completions)


guilty = _audited("guilty", _guilty)
