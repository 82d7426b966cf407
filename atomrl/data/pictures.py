"""Decode pictures. Needs Pillow (the extra `vision`)."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Mapping
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.data.files import DataError

SUFFIXES = {"PNG": "png", "JPEG": "jpg", "MPO": "jpg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff"}
"""Formats that are read, by Pillow's name, and the suffixes of their files in the run's folder."""
STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk0")
"""First characters of PNG, JPEG, GIF, WebP and BMP files in base64."""
THUMBNAIL = 96
"""Most pixels of a side of a thumbnail."""
MOST_PIXELS = 100_000_000
"""Most pixels of a picture: decoded, it takes three bytes for each."""


def pillow() -> Any:
    """Import Pillow.

    Raises:
        DataError: it is not installed.
    """
    with reraise_as(DataError, "pictures need Pillow: pip install 'atomrl[vision]'", ImportError):
        from PIL import Image as module
    return module


def content_of(value: Any) -> bytes | str:
    """Return the bytes of the file of a picture, or its path.

    Args:
        value: bytes, base64, a data URL, a path, an image of Pillow, or a mapping of `datasets` with bytes or a path.

    Raises:
        DataError: it is something else, or an address on the web.
    """
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
        value = content if content is not None else path
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and value.startswith("data:"):
        head, _, text = value.partition(",")
        if not head.endswith(";base64"):
            raise DataError(f"the URL {value[:30]!r} is not in base64")
        return _from_base64(text)
    if isinstance(value, str) and value.startswith(STARTS) and len(value) > 40:
        return _from_base64(value)
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise DataError(f"{value[:80]} is on the web: download the pictures, and give their paths")
    if isinstance(value, str):
        return value.removeprefix("file://")
    if hasattr(value, "save") and hasattr(value, "mode"):  # an image of Pillow
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return buffer.getvalue()
    if not isinstance(value, bytes | bytearray):
        raise DataError(f"must be a path, bytes, base64 or an image of Pillow, not {type(value).__name__}")
    return bytes(value)


def _from_base64(text: str) -> bytes:
    with reraise_as(DataError, "not valid base64", binascii.Error, ValueError):
        return base64.b64decode(text, validate=True)


def decoded(content: bytes) -> Any:
    """Decode a picture: RGB, turned as EXIF says, on white where it is transparent.

    Raises:
        DataError: it is damaged, animated, too large or of a format that is not read; without the place.
    """
    module = pillow()
    picture = opened(content)
    from PIL import ImageOps

    with reraise_as(DataError, "the picture is damaged or cut short", Exception):  # decoders raise many kinds
        picture.load()
        picture = ImageOps.exif_transpose(picture)
    if picture.mode in ("I", "F"):
        raise DataError(f"the picture has pixels of {picture.mode!r} (32 bits); save it with 8 bits per colour")
    if picture.mode.startswith("I;16"):
        picture = picture.point(lambda value: value / 256, "L")
    if "transparency" in picture.info or picture.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        front = picture.convert("RGBA")
        picture = module.new("RGBA", front.size, (255, 255, 255, 255))
        picture.alpha_composite(front)
    return picture.convert("RGB")


def thumbnail(content: bytes) -> bytes:
    """Return a picture, decoded, as a PNG with at most `THUMBNAIL` pixels a side."""
    picture, file = decoded(content), io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(file, "PNG")
    return file.getvalue()


def opened(content: bytes) -> Any:
    """Open a picture without decoding it.

    Raises:
        DataError: it is animated, too large or of a format that is not read.
    """
    module = pillow()
    if not content:
        raise DataError("the picture is empty (0 bytes)")
    formats = sorted({*SUFFIXES} - {"MPO"})  # that of many phones is found as a JPEG
    try:
        module.init()
        picture = module.open(io.BytesIO(content), formats=formats)
    except module.DecompressionBombError:
        raise DataError(f"the picture has more than {MOST_PIXELS:,} pixels; make it smaller") from None
    except Exception:  # decoders raise many kinds, and Pillow's message names an object in memory
        raise DataError(f"not a picture that can be read (formats: {', '.join(formats)})") from None
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise DataError(f"the picture has {width} x {height} pixels, more than {MOST_PIXELS:,}; make it smaller")
    if picture.format != "MPO" and (frames := getattr(picture, "n_frames", 1)) > 1:
        raise DataError(f"the picture is animated or has pages ({frames} frames); give one as a picture of its own")
    return picture
