"""Whether a rollout engine works on this machine, with its servers and for a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from atomrl.engines.requests import RequestEngine

_IMPORT_S = 300.0


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
