"""`atomrl doctor`: diagnose a run, this machine, or a rollout engine on it."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.cli.main import Run

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from atomrl.engines.requests import RequestEngine

PROBLEMS = 1
EXTRAS = {
    "peft": "adapters (model.lora)",
    "matplotlib": "curves.png, atomrl compare --plot",
    "tensorboard": "tracking.sinks=[tensorboard]",
    "wandb": "tracking.sinks=[wandb]",
    "reasoning-gym": "data.train=reasoning_gym:NAME",
    "math-verify": "the boxed reward",
    "pyarrow": "Parquet files",
    "bm25s": "atomrl data serve",
    "faiss-cpu": "atomrl data serve --encoder",
}
"""Optional packages and the features that need them."""
CORE = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "pyyaml", "rich", "jaxtyping", "numpy")
_IMPORT_S = 300.0


def add_doctor(parser: argparse.ArgumentParser) -> Run:
    """Diagnose a run: outcome, problems, what to try. Without a run: what is installed and what will be used.

    Exit code 1 if there are findings.

    atomrl doctor runs/quickstart     # a run that is finished, under way, or was killed
    atomrl doctor                     # this machine
    atomrl doctor --engine sglang     # whether an engine works here; with a config, for its model too
    """
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="the folder of a run; none: this machine")
    parser.add_argument("--engine", metavar="NAME", help="check this rollout engine; RUN may be a config")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else on stdout")
    return run_doctor


def run_doctor(arguments: argparse.Namespace) -> int:
    """Diagnose a run, an engine, or this machine."""
    if arguments.engine is not None:
        return show([(arguments.engine, check_engine(arguments.engine, arguments.run))], arguments.json)
    if arguments.run is not None:
        return diagnose_run(arguments.run, arguments.json)
    # Environment variables are never printed: they may hold secrets.
    parts = (("installed", installed()), ("hardware", hardware()), ("will be used", chosen_defaults()))
    return show(parts, arguments.json)


def diagnose_run(folder: Path, as_json: bool = False) -> int:
    """Print the outcome of a run, the error that ended it, if any, and all findings, from its folder."""
    from atomrl.tracking.doctor import MOST_CHECKS, diagnose
    from atomrl.tracking.doctor.quotes import quote
    from atomrl.tracking.reading.lines import ReadError, metrics_of, read_mapping, read_metrics
    from atomrl.tracking.reading.run import Run as LoadedRun
    from atomrl.tracking.reading.run import find_runs, is_run, load_run
    from atomrl.tracking.reading.state import FAILURE
    from atomrl.tracking.reading.summary import completions_of, outcome

    if not is_run(folder) and any(True for _ in find_runs(folder)):
        load_run(folder)  # raises: it names the runs below the folder
    failure = read_mapping(folder / FAILURE, [])
    if failure and not as_json:
        print(f"an error ended the run: {failure.get('error')}\n(full traceback: {folder / FAILURE})")
    rows = read_metrics(folder / "metrics.jsonl") if failure else metrics_of(folder)
    checked = []
    for number, row in enumerate(rows, start=1):
        if (numbers := finite_row(row)) is None:
            raise ReadError(
                f"{folder}/metrics.jsonl, row {number}, is not a row of a run: it needs a step and numbers, not "
                f"{str(row)[:80]}"
            )
        checked.append(numbers)
    findings = diagnose(checked)
    run = LoadedRun(folder, rows)
    if len(rows) > MOST_CHECKS:  # not every step was checked here; the run itself did
        findings += [finding for finding in run.findings if finding.id not in {one.id for one in findings}]
    findings = [replace(each, quote=quote(each.id, completions_of(run, each.step))) for each in findings]
    found = PROBLEMS if findings or failure else 0
    if as_json:
        error = failure.get("error") if failure else None
        content = {"run": str(folder), "status": run.state.status, "outcome": [*outcome(run)], "error": error}
        print(json.dumps({**content, "findings": [{**asdict(each), "page": each.page} for each in findings]}))
        return found
    print(*outcome(run), sep="\n")
    print(*findings, sep="\n", end="\n" if findings else "")
    if not found:
        print("the doctor found no problems")
    return found


def finite_row(row: Any) -> dict[str, float | None] | None:
    """Return a row with None for numbers that are infinite, NaN or too large. None if it has no step, or a value that
    is neither a number nor null."""
    from atomrl.tracking.reading.metrics import as_float

    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    with suppress(TypeError, OverflowError):
        if math.isfinite(sum(row.values())):  # quicker than a look at each value; holds for ordinary rows
            return row
    if not all(value is None or isinstance(value, int | float) for value in row.values()):
        return None
    return {name: value if math.isfinite(as_float(value)) else None for name, value in row.items()}


def show(parts: Iterable[tuple[str, Iterable[tuple[str, str]]]], as_json: bool = False) -> int:
    """Print names and texts under their titles. Returns exit code 1 if a text begins with `broken`."""
    broken = 0
    if as_json:
        content = {title: dict(lines) for title, lines in parts}
        print(json.dumps(content))
        return PROBLEMS if any(text.startswith("broken") for each in content.values() for text in each.values()) else 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for title, lines in parts:
        for index, (name, text) in enumerate(lines):
            head = f"{title if index == 0 else '':<14}{name:<15} "
            wrapped = (
                textwrap.wrap(text, columns - len(head), break_long_words=False) if columns > 2 * len(head) else []
            )
            print(head + f"\n{' ' * len(head)}".join(wrapped or [text]))
            broken += text.startswith("broken")
    return PROBLEMS if broken else 0


def installed() -> Iterator[tuple[str, str]]:
    """Yield versions of Python, AtomRL, and required and optional packages."""
    import platform

    from atomrl import __version__
    from atomrl.tracking.environment import installed_version

    yield "python", platform.python_version()
    yield "atomrl", __version__
    for package in CORE:
        yield package, installed_version(package) or f"broken: not installed (pip install {package})"
    for package, purpose in EXTRAS.items():
        yield package, installed_version(package) or f"not installed (pip install {package}); for {purpose}"


def hardware() -> Iterator[tuple[str, str]]:
    """Yield CPU, instruction set, memory, GPUs and free disk space."""
    import torch

    from atomrl.common.memory import available_memory
    from atomrl.tracking.environment import describe_environment

    machine = describe_environment()
    yield "cpu", f"{machine['cpu']}, {machine['cpus']} cores, torch uses {torch.get_num_threads()} threads"
    yield "instructions", torch.backends.cpu.get_cpu_capability()
    yield "memory", f"{machine['memory_gib']} GiB, {available_memory() / 2**30:.1f} GiB available"
    unused = Path("/proc/driver/nvidia/version").exists()
    none = f"found, but torch {torch.__version__} cannot use it: install a CUDA build" if unused else "none"
    yield "gpu", "; ".join(machine["gpus"]) or none
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free here"


def chosen_defaults() -> Iterator[tuple[str, str]]:
    """Yield device, dtype, engine, trainer and kernels of a run with the default config, each with the reason."""
    from atomrl.engines.native.cpu_kernels import load_kernels
    from atomrl.models.loading import compute_dtype
    from atomrl.trainer.build import device_name

    device = device_name()
    dtype = str(compute_dtype("auto", device)).removeprefix("torch.")
    has = "has" if dtype == "bfloat16" else "has no"
    yield "device", device
    yield "dtype", f"{dtype} (model.dtype=auto: this {device} {has} bfloat16 instructions)"
    yield "engine", "vLLM on a GPU if it is installed; else native for Llama, Qwen2 and Qwen3, hf for other models"
    yield "trainer", "one process, AdamW on float32 weights"
    if device == "cuda":
        yield "kernels", "torch's (the C++ kernels are for CPUs)"
    elif load_kernels() is not None:
        yield "kernels", "the C++ kernels: they compile here"
    else:
        yield "kernels", "torch's: the C++ kernels do not compile here (install g++ for faster rollouts)"


def check_engine(name: str, config_path: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the findings about an engine and, with a config, about its model; faults begin with `broken`.

    Raises:
        ConfigError: the engine is unknown, or the config is invalid.
    """
    from atomrl.common.functions import imports_forbidden
    from atomrl.config import ConfigError, load_config
    from atomrl.trainer.build import ENGINES, model_path

    if name not in ENGINES:
        raise ConfigError(f"--engine: unknown engine {name!r}; valid: {', '.join(ENGINES)}")
    engine = ENGINES[name]
    with imports_forbidden():
        config = load_config(config_path) if config_path else None
    servers = config.rollout.server if config else ()
    if servers:
        for url in servers:
            yield "server", health(url + engine.health_path)
        yield "package", "not needed: the servers have it"
        return
    if engine.package is None:
        if config is not None:
            yield "model", own_model(engine, model_path(config), config.model.trust_remote_code)
        yield "package", "none: it is part of AtomRL"
        return
    yield "cuda", cuda()
    names = metadata.packages_distributions().get(engine.package)  # vLLM for CPUs has another distribution name
    if not names:
        yield engine.package, f"broken: not installed (pip install 'atomrl[{engine.package}]')"
        return
    installed = metadata.distribution(names[0])
    yield engine.package, f"{installed.version} ({installed.metadata['Name']})"
    try:
        engine.check_version()
    except ImportError as error:
        yield "version", f"broken: {error}"
    yield from unmet_requirements(installed)
    archs = supported(engine.probe)
    if isinstance(archs, str):
        yield "import", f"broken: {archs}"
        return
    yield "import", f"works; supports {len(archs)} architectures"
    if config is not None:
        yield "model", model_kind(model_path(config), config.model.trust_remote_code, archs)


def unmet_requirements(installed: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """Yield requirements of a distribution that are missing or have another version.

    The package may work nevertheless, so these are not faults; the import decides.
    """
    from packaging.requirements import Requirement

    for line in installed.requires or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield (
                requirement.name,
                f"missing: {installed.metadata['Name']} requires it (pip install '{format_requirement(requirement)}')",
            )
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield requirement.name, f"{version}, but {installed.metadata['Name']} requires {requirement.specifier}"


def format_requirement(requirement: Requirement) -> str:
    """Format a requirement as pip takes it, without its marker."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def supported(probe: str) -> list[str] | str:
    """Import an engine's package in a subprocess, and return the architectures that it supports, or the error."""
    code = f"{probe}\nimport json; print(json.dumps(sorted(archs)))"
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"the import took more than {_IMPORT_S:g} s"
    if result.returncode:
        return (result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1]
    archs: list[str] = json.loads(result.stdout.splitlines()[-1])
    return archs


def model_kind(path: str, trust_remote_code: bool, archs: Iterable[str]) -> str:
    """Describe whether a model's architecture is among the supported ones."""
    from atomrl.models.loading import model_config_only

    names = model_config_only(path, trust_remote_code).architectures or ["unknown"]
    if missing := [arch for arch in names if arch not in set(archs)]:
        return f"broken: {path} is a {missing[0]}, which it does not support; use rollout.engine=hf"
    return f"{path} ({names[0]}) is supported"


def own_model(engine: type[RequestEngine], path: str, trust_remote_code: bool) -> str:
    """Describe whether one of AtomRL's own engines supports a model."""
    from atomrl.models.loading import model_config_only

    reason = engine.unsupported(model_config_only(path, trust_remote_code))
    return f"{path}: {reason}; hf is used instead" if reason else f"{path} is supported"


def health(url: str) -> str:
    """Request a server's health page, and describe the result."""
    import httpx

    try:
        status = httpx.get(url, timeout=10.0, trust_env=False).status_code
    except httpx.HTTPError as error:
        return f"broken: {url}: {type(error).__name__} {error}"
    return f"{url}: ok" if status == 200 else f"broken: {url}: status {status}"


def cuda_devices() -> int:
    """Return the number of CUDA devices that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda() -> str:
    """Describe torch, the CUDA version it was built for, and the number of GPUs it can use."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    return f"torch {torch.__version__} is built for {build} and sees {cuda_devices()} GPUs"
