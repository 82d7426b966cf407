"""Write files that survive a crash of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atomrl.common.files import write_text
from atomrl.tracking.checkpoints import disk_full_named


def write_json_durably(path: Path, value: Any) -> None:
    """Write a value as JSON (`write_durably`)."""
    write_durably(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def write_durably(path: Path, text: str) -> None:
    """Write a file of the run, and wait until it is on the disk.

    Raises:
        OSError: the disk is full; the message names the folder and what to do.
    """
    with disk_full_named(path.parent, f"{path.name} was not written"):
        write_text(path, text, flush=True)
