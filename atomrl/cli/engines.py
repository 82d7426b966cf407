"""`atomrl doctor --engine NAME`: whether a rollout engine works here, and what it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from atomrl.rollout.requests import RequestEngine

_IMPORT_S = 300.0


def examine_engine(name: str, config_path: Path | None) -> Iterator[tuple[str, str]]:
    """What there is to say of an engine, with the model of a config where one is given; faults begin with `broken`.

    Raises:
        ConfigError: there is no engine of this name, or the config is none.
    """
    from atomrl.cli.config_arguments import load_config
    from atomrl.config import ConfigError
    from atomrl.functions import only_looking
    from atomrl.runs.build import ENGINES, model_path

    if name not in ENGINES:
        raise ConfigError(f"--engine: unknown engine {name!r}; there are {', '.join(ENGINES)}")
    engine = ENGINES[name]
    with only_looking():
        config = load_config(config_path) if config_path else None
    servers = config.rollout.server if config else ()
    if servers:
        for url in servers:
            yield "server", health(url + engine.health_path)
        yield "package", "not needed here: the servers have it"
        return
    if engine.package is None:
        if config is not None:
            yield "model", own_model(engine, model_path(config), config.model.trust_remote_code)
        yield "package", "none: it is part of AtomRL"
        return
    yield "cuda", cuda()
    names = metadata.packages_distributions().get(engine.package)  # vLLM for CPUs is called otherwise
    if not names:
        yield engine.package, f"broken: not installed (pip install 'atomrl[{engine.package}]')"
        return
    installed = metadata.distribution(names[0])
    yield engine.package, f"{installed.version} ({installed.metadata['Name']})"
    try:
        engine.check_version()
    except ImportError as error:
        yield "version", f"broken: {error}"
    yield from unmet(installed)
    archs = supported(engine.probe)
    if isinstance(archs, str):
        yield "import", f"broken: {archs}"
        return
    yield "import", f"works; it knows {len(archs)} kinds of model"
    if config is not None:
        yield "model", model_kind(model_path(config), config.model.trust_remote_code, archs)


def unmet(installed: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """What a distribution asks for and is not here, or in another version.

    It may work all the same: so these are said, and the import decides.
    """
    for line in installed.requires or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield wanted.name, f"missing: {installed.metadata['Name']} asks for it (pip install '{bare(wanted)}')"
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            yield wanted.name, f"{version}, but {installed.metadata['Name']} asks for {wanted.specifier}"


def bare(wanted: Requirement) -> str:
    """A requirement as pip takes it."""
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    return f"{wanted.name}{extras}{wanted.specifier}"


def supported(probe: str) -> list[str] | str:
    """The kinds of model that a package knows, asked in a process of its own; or why it cannot be imported."""
    code = f"{probe}\nimport json; print(json.dumps(sorted(archs)))"
    try:
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"it was not imported within {_IMPORT_S:g} s"
    if found.returncode:
        return (found.stderr.strip().splitlines() or [f"status {found.returncode}"])[-1]
    archs: list[str] = json.loads(found.stdout.splitlines()[-1])
    return archs


def model_kind(path: str, trust_remote_code: bool, archs: Iterable[str]) -> str:
    """Whether a model is among the kinds that are known."""
    from atomrl.models.loading import model_config_only

    wanted = model_config_only(path, trust_remote_code).architectures or ["unknown"]
    if missing := [arch for arch in wanted if arch not in set(archs)]:
        return f"broken: {path} is a {missing[0]}, which it does not know; take rollout.engine=hf"
    return f"{path} ({wanted[0]}) is one of them"


def own_model(engine: type[RequestEngine], path: str, trust_remote_code: bool) -> str:
    """Whether an engine of AtomRL's own knows a model."""
    from atomrl.models.loading import model_config_only

    reason = engine.unsupported(model_config_only(path, trust_remote_code))
    return f"{path}: {reason}; hf takes its place" if reason else f"{path} is one that it knows"


def health(url: str) -> str:
    """Whether a server says that it is well."""
    import httpx

    try:
        status = httpx.get(url, timeout=10.0, trust_env=False).status_code
    except httpx.HTTPError as error:
        return f"broken: {url}: {type(error).__name__} {error}"
    return f"{url}: well" if status == 200 else f"broken: {url}: status {status}"


def cuda_devices() -> int:
    """How many CUDA devices torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda() -> str:
    """Torch, the CUDA that it is made for, and what it sees."""
    import torch

    made = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    return f"torch {torch.__version__} is made for {made} and sees {cuda_devices()} GPUs"
