"""What only the config's schema can answer: it needs torch, so another process answers, which ends when it is idle."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

IDLE_S = 120.0
KEPT = 64


class Questions:
    """Asks the process, and starts it when it is needed.

    Args:
        imports: without effect, for callers that still give it: nothing is imported to look at a config.
    """

    def __init__(self, imports: bool = False) -> None:
        del imports
        self._command = [sys.executable, "-P", "-m", "atomrl.ui.answers"]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None
        self._known: dict[str, dict[str, Any]] = {}

    def about(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`kind` of run, `changed` (key -> default and value), `equation` (a page of text); of a config that this
        version does not take, `errors`."""
        question = json.dumps({"config": config}, default=str)
        if question not in self._known:
            answer = self._ask(question)
            if "failed" in answer:
                return answer
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[question] = answer
        return self._known[question]

    def check(self, text: str) -> dict[str, Any]:
        """The same of a config's text, with the command line that runs it; `errors` has a line for each mistake.
        Of one in the six-section layout, `own` is the same in AtomRL's."""
        return self._ask(json.dumps({"yaml": text}))

    def advantages(self, config: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        """What a run's algorithm makes of the rewards of a step, as `arithmetic.advantages` says it; of a config that
        this version does not take, `errors`."""
        return self._ask(json.dumps({"config": config, "step": step}, default=str))

    def token(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """How a token's part of the loss was made, as `arithmetic.token` says it; of a config that this version does
        not take, `errors`."""
        return self._ask(json.dumps({"config": config, "token": row}, default=str))

    def close(self) -> None:
        """End the process; who waits for an answer gets none."""
        if self._process is not None:
            self._process.kill()
        with self._lock:
            self._end()

    def _ask(self, question: str) -> dict[str, Any]:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            try:
                if self._process is None:
                    self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert self._process.stdin is not None and self._process.stdout is not None
                self._process.stdin.write(question.encode() + b"\n")
                self._process.stdin.flush()
                answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            except (OSError, ValueError) as error:
                self._end()
                return {"failed": f"the process that knows configs has ended: {error}"}
            self._timer = threading.Timer(IDLE_S, self.close)
            self._timer.daemon = True
            self._timer.start()
            return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
