"""Programs that try to get out, to stay, to see or to use what is not theirs: none does, as root or as another user."""

from __future__ import annotations

import ast
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sandbox import attacks
from tests.sandbox.attacks import ATTACKS, CALLS, MANY, QUICK, SECRET, WITH_PROCESSES, calls_of, faults_of, source_of

ROOT = Path(__file__).parents[2]
UNCONTAINED = [
    "fork once", "network: udp", "environment of the parent", "the parent's files", "write into the host", "proc",
    "vfork by subprocess", "signal the host's processes",
]  # fmt: skip
"""Those that an ordinary process achieves without any harm."""


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A folder of this process's, with tests that a program would like to read."""
    monkeypatch.setenv("A_SECRET", SECRET)
    folder = tmp_path / "canary"
    folder.mkdir()
    folder.joinpath("tests.json").write_text('["assert f(1) == 2"]')
    return folder


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_contained(name, sandbox, canary):
    assert faults_of(source_of(ATTACKS[name], str(canary)), QUICK, canary) == []


@pytest.mark.parametrize("name", WITH_PROCESSES)
def test_it_is_contained_with_processes_of_its_own(name, sandbox, canary):
    assert faults_of(source_of(WITH_PROCESSES[name], str(canary)), MANY, canary) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are those of x86_64")
@pytest.mark.parametrize("limits", [QUICK, MANY], ids=["alone", "with processes"])
def test_the_kernel_offers_it_nothing_else(limits, sandbox, canary):
    assert faults_of(calls_of(CALLS), limits, canary) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("name", UNCONTAINED)
def test_without_a_sandbox_it_would_succeed(name, canary):
    """The attacks are real."""
    roomy = replace(QUICK, cpu_s=30, wall_s=60)  # it ends by itself
    faults = faults_of(source_of(ATTACKS[name], str(canary)), roomy, canary, sandbox="none")
    assert any(attacks.BROKE in fault or "secret" in fault for fault in faults)


def test_secrets_of_the_environment_are_seen_without_a_sandbox_only(sandbox, canary):
    source = (
        "import glob, os\nprint(dict(os.environ))\n"
        "for path in [f'/proc/{os.getppid()}/environ', *glob.glob('/proc/*/environ')]:\n"
        "    try: print(open(path).read())\n    except OSError: pass"
    )
    trainer = (
        f"from atomrl.sandbox import run\nprint([run({source!r}, sandbox=s).stdout for s in ('bubblewrap', 'none')])"
    )
    environment = {**os.environ, "A_SECRET": SECRET}
    done = subprocess.run([sys.executable, "-c", trainer], capture_output=True, text=True, env=environment, check=True)
    boxed, bare = ast.literal_eval(done.stdout)
    assert "HOME" in boxed and SECRET not in boxed and SECRET in bare


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_is_as_safe(sandbox):
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None or sys.version_info[:2] != _version(python):
        pytest.skip("there is no Python of this version that every user can run")
    import pyseccomp

    packages = Path(tempfile.mkdtemp(prefix="atomrl-for-another-user-"))
    packages.chmod(0o755)
    folder = packages / "canary"
    folder.mkdir()
    shutil.copy(pyseccomp.__file__, packages)
    shutil.copytree(ROOT / "atomrl" / "common", packages / "atomrl" / "common")
    shutil.copytree(ROOT / "atomrl" / "sandbox", packages / "atomrl" / "sandbox")
    shutil.copytree(ROOT / "tests" / "sandbox", packages / "tests" / "sandbox")
    for name in ("atomrl/__init__.py", "tests/__init__.py"):
        shutil.copy(ROOT / name, packages / name)
    folder.joinpath("tests.json").write_text("[]")
    os.chown(folder, 65534, 65534)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    done = subprocess.run(
        [*nobody, python, "-m", "tests.sandbox.attacks", str(folder)],
        cwd=packages, env={"A_SECRET": SECRET, "PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip
    shutil.rmtree(packages)
    if "cannot be run safely" in done.stderr:
        pytest.skip(f"no sandbox for other users: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert (
        len(results) == len({**ATTACKS, **WITH_PROCESSES}) + 1 and {name: f for name, f in results.items() if f} == {}
    )


def _version(python):
    shown = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
    return tuple(map(int, shown.stdout.split()))
