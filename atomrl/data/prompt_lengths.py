"""A file with the number of tokens of each prompt, so that a resumed run need not tokenize the data set again."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

from atomrl.common.files import write_bytes
from atomrl.data.stored import HEAD


def write_lengths(path: Path, key: str, lengths: Sequence[int]) -> None:
    """Write numbers of tokens, with a key that names what they depend on."""
    body = _little_endian(array("i", lengths)).tobytes()
    write_bytes(path, _head(key, body) + body)


def read_lengths(path: Path, key: str, count: int) -> Sequence[int] | None:
    """Read what `write_lengths` wrote; None if there is no file of this key and number, or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body = content[HEAD:]
    if len(body) != 4 * count or content[:HEAD] != _head(key, body):
        return None
    return _little_endian(array("i", body))


def _head(key: str, body: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + b"\0" + body, digest_size=HEAD).digest()


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
