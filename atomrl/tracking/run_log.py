"""What a run says, kept in its folder."""

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from atomrl.tracking.environment import without_secrets


class RunLog(logging.Handler):
    """What a run says, appended to a file as plain text, each with the time; a context in which warnings are added too.

    A file that cannot be written, as on a full disk, ends no run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = path

    def note(self, text: str) -> None:
        """Add a text; the values of the environment's secrets are left out."""
        text = without_secrets(text).rstrip()
        with suppress(OSError), self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Add a warning. It is on the terminal too, as it is where no handler is set."""
        self.note(f"{record.levelname.lower()}: {record.getMessage()}")
        own = logging.getLogger("atomrl").handlers
        if logging.lastResort and not logging.getLogger().handlers and all(isinstance(one, RunLog) for one in own):
            logging.lastResort.handle(record)

    def __enter__(self) -> Self:
        logging.getLogger("atomrl").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("atomrl").removeHandler(self)
