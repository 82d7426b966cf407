"""Start, stop, resume and plan runs from a page. Each run is a process in a session of its own, so it continues if the
page or the server is closed."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atomrl.common.files import write_text
from atomrl.tools.ui.drafts import plan_problems, problems
from atomrl.tracking.reading import Run
from atomrl.tracking.reading.lines import owner
from atomrl.tracking.reading.run import Home, home_of

FOLDER = ".launches"
"""Subfolder with configs, logs and records of started runs. They cannot be in the run's own folder, which must be empty
at its start."""
ENDING_S = 60.0
"""Seconds that a run may take to exit after it wrote its summary."""
PLAN_S = 120.0

RUN = """
import json, sys
from atomrl.common.functions import search_in
sys.argv[0] = "atomrl"
for folder in json.loads(sys.argv.pop(1)):
    search_in(folder)
from atomrl.cli.main import main; sys.exit(main())
"""


class LaunchError(ValueError):
    """A run cannot be started, stopped or resumed; the message says why."""


class Launcher:
    """Starts, stops and resumes runs.

    Args:
        root: the folder that is served; runs are only started in it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._planned: tuple[tuple[str, str], dict[str, Any]] | None = None

    def refusal(self, run_dir: str) -> tuple[str, str] | None:
        """Return (config key, reason) if no run can be started in a folder, else None."""
        folder = Path(run_dir).resolve()
        if not folder.is_relative_to(self.root) or folder == self.root:
            return "output_dir", f"{folder} is not in {self.root}, which this page shows; set output_dir={self.root}"
        if (folder / "metrics.jsonl").exists():
            return "run_name", f"the run {folder.name} exists already; take another run_name"
        if folder.is_dir() and any(folder.iterdir()):
            return "run_name", f"the folder {folder} exists already, and is not empty; take another run_name"
        return None

    def start(self, text: str, run_dir: str, home: Home) -> dict[str, Any]:
        """Start a run.

        Args:
            text: its config, already validated and planned.
            run_dir: its folder, by the config.
            home: where the run was started that it is a variant of.

        Raises:
            LaunchError: the folder is outside of `root`, or the run exists.
        """
        folder = Path(run_dir).resolve()
        if refused := self.refusal(run_dir):
            raise LaunchError(refused[1])
        config = Path(f"{self._stem(folder.name)}.yaml")
        write_text(config, text)
        config.chmod(0o600)  # it may contain secrets, unlike the run's own folder
        return self._spawn(["train", str(config), *_where(folder)], folder, home)

    def resume(self, folder: Path) -> dict[str, Any]:
        """Resume a run from its newest checkpoint.

        Raises:
            LaunchError: it is running.
        """
        end = time.monotonic() + ENDING_S
        while owner(folder) is not None:  # a finished run may still be shutting down
            if not (folder / "summary.json").exists() or time.monotonic() > end:
                raise LaunchError("it is running")
            time.sleep(0.1)
        config, place = folder / "config.yaml", folder.resolve()
        if not config.is_file() or config.is_symlink():
            raise LaunchError("it has no config.yaml")
        home = home_of(Run(folder).environment)
        return self._spawn(["train", str(config.resolve()), *_where(place), "--resume"], place, home)

    def plan(self, text: str, home: Home) -> dict[str, Any]:
        """Run `atomrl plan` for a config: it loads data and rewards, but no weights.

        The newest result is cached, since a run is started after its plan was shown.

        Returns:
            `text`; `fits`, None without a plan; `late`, True after a timeout; `problems`, the reasons not to start the
            run, by key.
        """
        key = text, str(home)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._plan(text, home)
        return self._planned[1]

    def _plan(self, text: str, home: Home) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as place:
            config = Path(place, "config.yaml")
            config.write_text(text, encoding="utf-8")
            command = [sys.executable, "-P", "-c", RUN, json.dumps(home.functions_in), "plan", str(config)]
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=home.folder,
                    timeout=PLAN_S,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                message = f"no plan within {PLAN_S:.0f} s; ask for it in a terminal: atomrl plan"
                return {"text": message, "fits": None, "late": True, "problems": []}
        output, fits = (done.stdout + done.stderr).strip(), {0: True, 1: False}.get(done.returncode)
        if fits is None:
            reasons = problems(refusals(done.stderr, str(config)))
        else:
            reasons = [] if fits else plan_problems(output)
        return {"text": output, "fits": fits, "late": False, "problems": reasons}

    def stop(self, folder: Path) -> dict[str, Any]:
        """Ask a run to end after its current step.

        Raises:
            LaunchError: no process on this machine writes it.
        """
        process = owner(folder)
        if not process or process == os.getpid():
            raise LaunchError("no process on this machine writes it")
        try:
            os.kill(process, signal.SIGTERM)
        except OSError as error:
            raise LaunchError(f"process {process} cannot be asked: {error.strerror}") from None
        return {"process": process}

    def log_of(self, folder: Path) -> Path | None:
        """Return the log of the newest start of a run from a page, or None."""
        path, newest = str(folder.resolve()), None
        for record in sorted((self.root / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
            try:
                if json.loads(record.read_text(encoding="utf-8")).get("run") == path:
                    newest = record.with_suffix(".log")
            except (OSError, ValueError, AttributeError):
                continue
        return newest if newest is not None and newest.is_file() and not newest.is_symlink() else None

    def _stem(self, name: str) -> Path:
        safe = re.sub(r"[^\w.-]", "_", name)[:60]
        return self.root / FOLDER / f"{safe}.{time.strftime('%Y%m%d-%H%M%S')}.{secrets.token_hex(3)}"

    def _spawn(self, arguments: Sequence[str], folder: Path, home: Home) -> dict[str, Any]:
        command = [sys.executable, "-P", "-c", RUN, json.dumps(home.functions_in), *arguments]
        with self._lock:
            stem = self._stem(folder.name)
            stem.parent.mkdir(parents=True, exist_ok=True)
            with Path(f"{stem}.log").open("ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    cwd=home.folder,
                )  # fmt: skip
        threading.Thread(target=process.wait, daemon=True).start()  # reap it, so that it does not become a zombie
        shown = ["atomrl", *arguments]
        record = {"run": str(folder), "command": shown, "process": process.pid, "time": time.time()}
        write_text(Path(f"{stem}.json"), json.dumps(record) + "\n")
        return record | {"name": folder.relative_to(self.root).as_posix()}


def refusals(stderr: str, config: str) -> list[str]:
    """Return the lines of a command's error, without `error:` and the path of the config.

    Example:
        >>> refusals("error: c.yaml:\\n  train.steps: must be positive", "c.yaml")
        ['train.steps: must be positive']
    """
    lines = [line.strip().removeprefix("error: ").removeprefix(f"{config}:").strip() for line in stderr.splitlines()]
    return [line for line in lines if line]


def _where(folder: Path) -> list[str]:
    """Return the overrides that place a run in a folder; quoted, since a folder may be called 7."""
    return [f"output_dir={json.dumps(str(folder.parent))}", f"run_name={json.dumps(folder.name)}"]
