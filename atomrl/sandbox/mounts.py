"""Files that a program can see, read-only: a Python and the libraries that it is linked with."""

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
    """Return the path of this Python; in a virtual environment, of the Python that it was created from."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def helper(name: str) -> str:
    """Return the path of a program that the sandbox needs (bwrap, prlimit, setpriv, ldd).

    Raises:
        FileNotFoundError: it is not installed.
    """
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin:/usr/sbin:/sbin")
    if path is None:
        package = "bubblewrap" if name == "bwrap" else "util-linux"
        raise FileNotFoundError(f"{name} is not installed, of the package {package} (`apt install {package}`)")
    return os.path.realpath(path)


@functools.cache
def mounts() -> tuple[str, ...]:
    """Build bubblewrap's arguments that mount Python and hide its installed packages.

    Raises:
        FileNotFoundError: a required program is not installed.
    """
    prefix, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    programs = [interpreter(), *map(helper, _HELPERS)]
    shown = {*map(Path, programs), *_libraries(programs)}
    # A Python outside /usr has the libraries of its own modules next to its standard library.
    shown |= {Path(os.__file__).parent} if prefix == Path("/usr") else {prefix / "lib"}
    # Drop paths inside of other paths: they are mounted with them.
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
    """Return the folders of the libraries that programs are linked with, and the dynamic loader."""
    listed = subprocess.run([helper("ldd"), *programs], capture_output=True, text=True, check=False).stdout
    paths = [Path(path) for path in _LIBRARY.findall(listed)]
    return {path if path.name.startswith("ld-") else path.parent for path in paths}
