"""Decode pictures. Needs Pillow (the extra `vision`)."""

from __future__ import annotations

import io
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.data.files import DataError

SUFFIXES = {"PNG": "png", "JPEG": "jpg", "MPO": "jpg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff"}
"""Formats that are read, by Pillow's name, and the suffixes of their files in the run's folder."""
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


def opened(content: bytes) -> Any:
    """Open a picture without decoding it.

    Raises:
        DataError: it is animated, too large or of a format that is not read.
    """
    module = pillow()
    if not content:
        raise DataError("the picture is empty (0 bytes)")
    formats = sorted({*SUFFIXES} - {"MPO"})  # that of many phones is found as a JPEG
    with reraise_as(DataError, f"not a picture that can be read (formats: {', '.join(formats)})", Exception):
        module.init()
        picture = module.open(io.BytesIO(content), formats=formats)
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise DataError(f"the picture has {width} x {height} pixels, more than {MOST_PIXELS:,}; make it smaller")
    if picture.format != "MPO" and (frames := getattr(picture, "n_frames", 1)) > 1:
        raise DataError(f"the picture is animated or has pages ({frames} frames); give one as a picture of its own")
    return picture
