"""What a program in the sandbox sees of this machine: a Python and the libraries that it is linked with, read-only."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_LIBRARY = re.compile(r"(/\S+) \(0x")
_HELPERS = ("prlimit", "setpriv")


def interpreter() -> str:
    """The Python that runs this program; of a virtual environment, the one that it was made from."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def helper(name: str) -> str:
    """Where a program is that the sandbox is made with.

    Raises:
        FileNotFoundError: it is not installed.
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin:/usr/sbin:/sbin")
    if found is None:
        package = "bubblewrap" if name == "bwrap" else "util-linux"
        raise FileNotFoundError(f"{name} is not installed, of the package {package} (`apt install {package}`)")
    return os.path.realpath(found)


@functools.cache
def mounts() -> tuple[str, ...]:
    """The part of bubblewrap's command line that shows Python, and hides the packages that are installed for it.

    Raises:
        FileNotFoundError: a program that is needed is not installed.
    """
    prefix, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    programs = [interpreter(), *map(helper, _HELPERS)]
    shown = {*map(Path, programs), *_libraries(programs)}
    # The libraries of Python's own modules are beside its standard library where it does not take the system's.
    shown |= {Path(os.__file__).parent} if prefix == Path("/usr") else {prefix / "lib"}
    outer = sorted(path for path in shown if path.exists() and not shown & {*path.parents})
    command: list[str] = []
    for folder in sorted({parent for path in outer for parent in path.parents if parent != Path("/")}):
        command += ["--dir", str(folder)]
    for path in outer:
        command += ["--ro-bind", str(path), str(path)]
    for name in ("site-packages", "dist-packages"):
        for place in ("lib/python3", f"lib/{version}", f"lib64/{version}"):
            folder = prefix / place / name
            if folder.is_dir() and {*folder.parents} & {*outer}:
                command += ["--size", "4096", "--tmpfs", str(folder), "--remount-ro", str(folder)]
    return tuple(command)


def _libraries(programs: list[str]) -> set[Path]:
    """The folders of the libraries that programs are linked with, and the loader itself."""
    listed = subprocess.run([helper("ldd"), *programs], capture_output=True, text=True, check=False).stdout
    paths = [Path(path) for path in _LIBRARY.findall(listed)]
    return {path if path.name.startswith("ld-") else path.parent for path in paths}
