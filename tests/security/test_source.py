"""Constructs that the source must not contain, found in its syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    [*(p for d in ("atomrl", "benchmarks", "examples") for p in (ROOT / d).rglob("*.py")), ROOT / "train.py"]
)

EXECUTES = {"eval", "exec", "compile", "__import__", "execfile"}
MAY_EXECUTE = {"atomrl/trl/unsloth_functions.py"}  # its `create_locked_down_function` is for that; scripts call it
PARSES_BY_EVAL = {"sympify", "parse_expr", "parse_latex", "literal_eval_unsafe"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
SERVES = {"socketserver", "http.server", "xmlrpc", "wsgiref", "flask", "fastapi", "uvicorn", "multiprocessing.managers"}
MAY_LISTEN = {  # on 127.0.0.1, or between the machines of a cluster that a config names
    "atomrl/weight_sync/broadcast.py",
    "atomrl/engines/server_process.py",
    "atomrl/environments/retrieval/server.py",
    "atomrl/tools/ui/server.py",
}
MAY_SERVE = {"atomrl/environments/retrieval/server.py", "atomrl/tools/ui/server.py"}
OPENS_A_PORT = {"bind", "listen", "create_server", "start_server", "serve_forever", "Listener"}
MAY_UNPICKLE = {"atomrl/rewards/workers.py", "atomrl/environments/worker.py"}
MAY_UNPICKLE |= {"benchmarks/simulate_cluster.py", "benchmarks/ranks.py"}
"""Requests to a worker of rewards or environments are pickled by the trainer that started it; replies are JSON. The
simulation times what it pickled itself, and the benchmark of ranks speaks with its own processes."""


PICKLES_FOR_WORKERS = {"atomrl/common/workers.py", "atomrl/environments/pool.py"}
"""Modules that pickle messages to their workers. They unpickle nothing."""


def faults(source: str, path: str = "x.py") -> list[str]:
    """A line for each thing that is not allowed."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        for fault in [*_of_import(node), *_of_call(node, path), *_of_default(node)]:
            if not (path in MAY_SERVE and fault == "imports uvicorn, a server"):
                calls.append(f"{path}:{getattr(node, 'lineno', 0)}: {fault}")
    return calls


def _of_import(node: ast.AST):
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        if node.module in PICKLES:
            yield f"takes {node.names[0].name} from {node.module}"
        for alias in node.names:
            if alias.name in PARSES_BY_EVAL | {"system", "popen"}:
                yield f"imports {alias.name}"
    for name in names:
        if any(name == module or name.startswith(f"{module}.") for module in SERVES):
            yield f"imports {name}, a server"


def _of_call(node: ast.AST, path: str):
    if not isinstance(node, ast.Call):
        return
    name, short = ast.unparse(node.func), ast.unparse(node.func).rpartition(".")[2]
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if (name in EXECUTES and path not in MAY_EXECUTE) or short in PARSES_BY_EVAL:
        yield f"calls {name}"
    for_its_worker = name == "pickle.dumps" and path in PICKLES_FOR_WORKERS
    if name.partition(".")[0] in PICKLES and path not in MAY_UNPICKLE and not for_its_worker:
        yield f"calls {name}"
    if name == "torch.load" and keywords.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
        yield "numpy.load with allow_pickle"
    if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        yield f"calls {name}; yaml.safe_load is safe"
    if keywords.get("trust_remote_code", "False") not in ("False", "None") and keywords["trust_remote_code"] == "True":
        yield "trusts remote code of its own accord"
    if keywords.get("shell", "False") != "False" or name in ("os.system", "os.popen", "subprocess.getoutput"):
        yield f"{name} runs a shell"
    of_inspect = name == "signature.bind"  # whether a function takes arguments
    if short in OPENS_A_PORT and path not in MAY_LISTEN and not of_inspect:
        yield f"calls {name}, which opens a port"
    if short == "recv" and not node.args and path not in MAY_UNPICKLE:
        yield f"calls {name}(), which unpickles what it receives"


def _of_default(node: ast.AST):
    """`trust_remote_code=True` as a default."""
    if isinstance(node, ast.FunctionDef):
        plain = node.args.args[len(node.args.args) - len(node.args.defaults) :]
        pairs = [
            *zip(plain, node.args.defaults, strict=True),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            if argument.arg == "trust_remote_code" and default is not None and ast.unparse(default) != "False":
                yield "trusts remote code by default"
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        if ast.unparse(node.target) == "trust_remote_code" and ast.unparse(node.value) != "False":
            yield "trusts remote code by default"
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and ast.unparse(value) == "True":
                yield "trusts remote code of its own accord"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_source_is_clean(path):
    found = faults(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    assert not found, "CONTRIBUTING.md: data is never executed, and few files may open a port:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(text)",
        "compile(text, 'x', 'exec')",
        "sympy.sympify(text)",
        "from sympy import sympify",
        "from sympy.parsing.sympy_parser import parse_expr",
        "import pickle\npickle.load(file)",
        "import pickle\npickle.Unpickler(file).load()",
        "from pickle import loads",
        "marshal.loads(data)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "settings = {'trust_remote_code': True}",
        "class C:\n    trust_remote_code: bool = True",
        "def f(path, trust_remote_code=True): ...",
        "def f(path, *, trust_remote_code=True): ...",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "from os import system",
        "socket.socket().bind(('', 80))",
        "server.listen()",
        "import http.server",
        "from multiprocessing.managers import BaseManager",
        "connection.recv()",
    ],
)
def test_the_scan_can_fail(source):
    assert faults(source)


def test_the_scan_lets_pass_what_is_harmless():
    source = """
model.eval(); re.compile(x); torch.compile(f); torch.load(p, weights_only=True); load(p, trust_remote_code=trust)
try: ...
except pickle.UnpicklingError: ...
signature.bind(None); control.recv(8, socket.MSG_WAITALL); connection.recv_bytes(); subprocess.run(["g++", name])
"""
    assert faults(source) == []
