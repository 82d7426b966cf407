"""`RunLog` writes the log of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from atomrl.common.redaction import without_secrets


class RunLog(logging.Handler):
    """Appends messages to a text file, with the time. As a context manager it records the package's warnings too.

    Write errors, such as a full disk, are ignored.

    Args:
        is_here: returns False once the run's folder is another one; nothing is written then.
    """

    def __init__(self, path: Path, is_here: Callable[[], bool] = lambda: True) -> None:
        super().__init__(logging.WARNING)
        self.path, self.is_here = path, is_here

    def note(self, text: str) -> None:
        """Append a text, with secrets redacted."""
        text = without_secrets(text).rstrip()
        if not self.is_here():
            return
        with suppress(OSError), self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Append a warning. Without other handlers it is printed too, as `logging` does without any handler."""
        self.note(f"{record.levelname.lower()}: {record.getMessage()}")
        handlers = logging.getLogger("atomrl").handlers
        if logging.lastResort and not logging.getLogger().handlers and all(isinstance(h, RunLog) for h in handlers):
            logging.lastResort.handle(record)

    def __enter__(self) -> Self:
        logging.getLogger("atomrl").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("atomrl").removeHandler(self)
