"""Pictures of a data set: read and checked once (`ImageStore`), and turned into the input of a vision tower
(`ImageReader`).

A row holds references (`types.Image`). The files are copied to the run's folder once each, under their SHA-256, so that
a resumed run, a rollout pool and the records need no other file. Needs Pillow (the extra `vision`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.common.errors import reraise_as
from atomrl.common.files import write_bytes
from atomrl.data.columns import IMAGES, PLACE
from atomrl.data.files import DataError, RawRow
from atomrl.data.stored import Records
from atomrl.types import Image, Problem

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = {"PNG": "png", "JPEG": "jpg", "MPO": "jpg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff"}
"""Formats that are read, by Pillow's name, and the suffixes of their files in the run's folder."""
MOST_PIXELS = 100_000_000
"""Most pixels of a picture: decoded, it takes three bytes for each."""
STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk0")
"""First characters of PNG, JPEG, GIF, WebP and BMP files in base64."""
INDEX = "index.json"
"""File in the folder of pictures: path -> name, for a resumed run whose files are gone."""
PATCH_BYTES = 256 << 20
"""Bytes of pictures that an `ImageReader` keeps as patches."""


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


class ImageStore:
    """Reads the pictures of rows, checks them, and copies them to a run's folder.

    Args:
        folder: folder of the run's pictures; nothing is written before `write`.
        field: column with pictures; None: `images` or `image`.
        reader: of the model, which checks that it can read a picture; None: not checked.
    """

    def __init__(self, folder: str | Path, field: str | None = None, reader: ImageReader | None = None) -> None:
        self.folder, self.field, self.reader = Path(folder), field, reader
        self._contents: dict[str, Path | int] = {}
        """Name -> its file, or its place among the records."""
        self._records = Records()
        self._images: dict[str, Image] = {}
        self._read: dict[Path, tuple[tuple[int, int], Image]] = {}
        """File -> its time and size, and the picture: a data set may name a file in many rows."""
        self._paths: dict[str, str] = {}
        """Path -> name, of the pictures that are in files of their own."""
        self._stored: dict[str, str] = {}
        with suppress(OSError, ValueError):
            self._stored = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))

    def __len__(self) -> int:
        """Number of distinct pictures."""
        return len(self._images)

    def describe(self) -> list[str]:
        """Describe the pictures, for a dry run; empty without any."""
        if not self._images or self.reader is None:
            return []
        sizes = [self.reader.tokens(image) for image in self._images.values()]
        return [f"pictures: {len(sizes)} distinct, of {min(sizes)} to {max(sizes)} tokens; their rows are padded"]

    def row(self, raw: RawRow) -> dict[str, Any]:
        """Return a row with its pictures as a tuple in the column `images`, and `<image>` for each in its messages.

        Raises:
            DataError: a picture cannot be read, or the row has two columns of them.
        """
        assert raw.row is not None
        row, found = dict(raw.row), dict[str, list[Any]]()
        for name in [self.field] if self.field else [IMAGES, "image"]:
            if name in row and (values := _listed(row.pop(name))):
                found[f"column {name!r}"] = values
        for name, value in row.items():
            if _has_parts(value):
                parts = list[Any]()
                row[name] = [_without_parts(message, parts) for message in value]
                if parts:
                    found[f"the messages of {name!r}"] = parts
        read = {name: self._all(name, values, raw) for name, values in found.items()}
        if len({*read.values()}) > 1:  # chosen and rejected may repeat the prompt with its pictures
            raise DataError(f"{' and '.join(read)} have different pictures; give them once")
        return row | ({IMAGES: next(iter(read.values()))} if read else {})

    def _all(self, name: str, values: Sequence[Any], raw: RawRow) -> tuple[Image, ...]:
        pictures = []
        for number, value in enumerate(values, start=1):
            with reraise_as(DataError, f"{name}: picture {number}", DataError):
                pictures.append(self._one(value, f"{raw.place}/{number}", Path(raw.folder)))
        return tuple(pictures)

    def _one(self, value: Any, place: str, folder: Path) -> Image:
        if isinstance(value, Mapping):
            content, path = value.get("bytes"), value.get("path")
            value = content if content is not None else path
        if isinstance(value, str) and value.startswith("data:"):
            head, _, text = value.partition(",")
            if not head.endswith(";base64"):
                raise DataError(f"the URL {value[:30]!r} is not in base64")
            value = _from_base64(text)
        elif isinstance(value, str) and value.startswith(STARTS) and len(value) > 40:
            value = _from_base64(value)
        elif isinstance(value, str):
            return self._file(value, folder)
        elif hasattr(value, "save") and hasattr(value, "mode"):  # an image of Pillow, of a data set in memory
            buffer = io.BytesIO()
            value.save(buffer, "PNG")
            value = buffer.getvalue()
        if not isinstance(value, bytes | bytearray):
            raise DataError(f"must be a path, bytes, base64 or an image of datasets, not {type(value).__name__}")
        image = self._checked(bytes(value), place)
        if image.name not in self._contents:
            self._contents[image.name] = len(self._records)
            self._records.append(bytes(value))
        return image

    def _file(self, text: str, folder: Path) -> Image:
        if text.startswith(("http://", "https://")):
            raise DataError(f"{text[:80]} is on the web: download the pictures, and give their paths")
        path = (folder / text.removeprefix("file://")).absolute()
        try:
            status = path.stat()
            if path in self._read and self._read[path][0] == (status.st_mtime_ns, status.st_size):
                return self._read[path][1]
            content = path.read_bytes()
        except OSError as error:
            stored = self._stored.get(str(path), "")
            if not stored or not (kept := self.folder / stored).is_file():
                raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
            return self._checked(kept.read_bytes(), str(path))
        image = self._checked(content, str(path))
        self._paths[str(path)] = image.name
        self._read[path] = (status.st_mtime_ns, status.st_size), image
        self._contents.setdefault(image.name, path)
        return image

    def _checked(self, content: bytes, source: str) -> Image:
        """Return the reference of a picture, which is decoded once to see that it can be."""
        digest, picture = hashlib.sha256(content).hexdigest(), opened(content)
        name = f"{digest}.{SUFFIXES[picture.format]}"
        if name not in self._images:
            if not (self.folder / name).is_file():  # else an earlier attempt of the run has decoded it
                decoded(content)
            if picture.format == "TIFF":
                picture.load()  # which turns it
            turned = picture.getexif().get(0x0112) in (5, 6, 7, 8)
            width, height = reversed(picture.size) if turned else picture.size
            image = Image(name=name, height=height, width=width, source=source, folder=str(self.folder.absolute()))
            if self.reader is not None:
                self.reader.tokens(image)
            self._images[name] = image
        return replace(self._images[name], source=source)

    def content(self, name: str) -> bytes:
        """Return the bytes of a picture's file.

        Raises:
            DataError: the file has changed since it was read.
        """
        if (stored := self.folder / name).is_file():
            return stored.read_bytes()
        at = self._contents[name]
        if isinstance(at, int):
            return self._records[at]
        content = at.read_bytes()
        if hashlib.sha256(content).hexdigest() != name.partition(".")[0]:
            raise DataError(f"{at} has changed since the run began to read its data: start it again")
        return content

    def write(self) -> None:
        """Write the pictures that the folder does not have yet, and the paths that they came from."""
        if not self._images:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self._images:
            if not (self.folder / name).is_file():
                write_bytes(self.folder / name, self.content(name))
        if self._stored != (known := self._stored | self._paths):
            write_bytes(self.folder / INDEX, json.dumps(known, indent=1).encode())
            self._stored = known

    def in_folder(self, problem: Problem, folder: str | Path) -> Problem:
        """Return a problem whose pictures are in another folder, and write them there: for a trial of the rewards
        before the run has a folder."""
        for image in problem.images:
            (Path(folder) / image.name).write_bytes(self.content(image.name))
        moved = tuple(replace(image, folder=str(folder)) for image in problem.images)
        columns = {**problem.columns, IMAGES: [image.path for image in moved]} if moved else problem.columns
        return replace(problem, images=moved, columns=columns)


def _listed(value: Any) -> list[Any]:
    """Return the pictures of a column, none for null and empty ones."""
    values = [*value] if isinstance(value, list | tuple) else [value]
    return [each for each in values if each is not None and each != ""]


def _has_parts(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in value
    )


def _without_parts(message: Any, found: list[Any]) -> Any:
    """Replace the pictures among the parts of a message by `<image>`, and add those that are given there to `found`."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            if message.get("role") == "assistant":
                raise DataError("a message of the assistant has a picture, which no model here writes")
            value = next((part[key] for key in ("image", "image_url", "url", "path", "base64") if part.get(key)), None)
            value = value.get("url", value) if isinstance(value, Mapping) else value
            if value is not None:
                found.append(value)
            part = {"type": "text", "text": PLACE}
        parts.append(part)
    return {**message, "content": parts}


def _from_base64(text: str) -> bytes:
    with reraise_as(DataError, "not valid base64", binascii.Error, ValueError):
        return base64.b64decode(text, validate=True)


# --------------------------------------------------------------------------------------------------------------------
# Pictures as a model reads them.


class ImageReader:
    """Turns pictures into patches, by the settings beside a model, and places in a prompt into its tokens.

    It can be sent to other processes.

    Args:
        folder: folder of the run's pictures.
        model: folder of the model, with its preprocessor_config.json.
        config: the model's transformers config.
        min_pixels: a smaller picture is enlarged to it; None: the model's setting.
        max_pixels: a larger picture is reduced to it; None: the model's setting.
    """

    def __init__(
        self,
        folder: str | Path,
        model: str | Path,
        config: Any,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        self.folder, self.model = Path(folder), str(model)
        self.limits = min_pixels, max_pixels
        self.image_token: int = config.image_token_id
        self._around = tuple(getattr(config, f"vision_{side}_token_id", None) for side in ("start", "end"))
        self._kept = _Kept()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("processor", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._kept = _Kept()

    @cached_property
    def processor(self) -> Any:
        """The image processor of transformers, with Pillow's operations."""
        from transformers import AutoImageProcessor

        pillow()
        with reraise_as(DataError, f"model {self.model} has no image processor that can be used", Exception):
            processor = AutoImageProcessor.from_pretrained(self.model, backend="pil")
            size, (least, most) = dict(processor.size), self.limits
            size |= {"shortest_edge": least or size["shortest_edge"], "longest_edge": most or size["longest_edge"]}
            processor.size = type(processor.size)(**size)
        if size["shortest_edge"] > size["longest_edge"]:
            raise DataError(
                f"data.min_pixels={size['shortest_edge']} is more than data.max_pixels={size['longest_edge']} "
                "(null: the setting of the model)"
            )
        return processor

    @property
    def settings(self) -> str:
        """Settings on which tokens and patches depend, besides the picture."""
        file = Path(self.model) / "preprocessor_config.json"
        return f"{self.limits} {file.read_text(encoding='utf-8') if file.is_file() else ''}"

    def tokens(self, image: Image) -> int:
        """Return the number of tokens of a picture.

        Raises:
            DataError: its sides differ too much for the model.
        """
        return self.patches(image) // int(self.processor.merge_size) ** 2

    def patches(self, image: Image) -> int:
        """Return the number of patches of a picture."""
        with reraise_as(DataError, f"{image.source}: {image.width} x {image.height} pixels", ValueError):
            return int(self.processor.get_number_of_image_patches(image.height, image.width))

    def place(self, tokenizer: Any) -> str:
        """Return the text that stands for one picture in a prompt."""
        start, end = self._around
        tokens = [token for token in (start, self.image_token, end) if token is not None]
        return "".join(map(str, tokenizer.convert_ids_to_tokens(tokens)))

    def expanded(self, ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Repeat the token of each picture as often as it has features.

        Raises:
            DataError: there are more or fewer such tokens than pictures; without the place.
        """
        found = ids.count(self.image_token)
        if found != len(images):
            raise DataError(f"the text has {found} places of pictures after rendering, and {len(images)} pictures")
        rest = iter(images)
        return [
            each
            for token in ids
            for each in ([token] * self.tokens(next(rest)) if token == self.image_token else (token,))
        ]

    def __call__(self, image: Image) -> tuple[Tensor, Tensor]:
        """Return the patches [P, D] of a picture, and its grid [3] of time, height and width."""
        import torch

        if (kept := self._kept.get(image.name)) is not None:
            return kept
        with reraise_as(DataError, f"picture {self.folder / image.name} ({image.source})", OSError):
            content = (self.folder / image.name).read_bytes()
        with torch.inference_mode(False):  # an engine may read them before the trainer does
            made = self.processor(images=[decoded(content)], return_tensors="pt")
            patches, grid = torch.as_tensor(made["pixel_values"]), torch.as_tensor(made["image_grid_thw"][0])
        if len(patches) != self.patches(image):
            raise DataError(f"picture {image.name}: {len(patches)} patches, but its prompt was made for another number")
        self._kept.add(image.name, patches, grid)
        return patches, grid


class _Kept:
    """The patches of the pictures that were read last, up to `PATCH_BYTES`; engine and trainer may be two threads."""

    def __init__(self) -> None:
        self._lock, self._bytes = threading.Lock(), 0
        self._patches: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def get(self, name: str) -> tuple[Tensor, Tensor] | None:
        with self._lock:
            if name in self._patches:
                self._patches.move_to_end(name)
            return self._patches.get(name)

    def add(self, name: str, patches: Tensor, grid: Tensor) -> None:
        with self._lock:
            if name not in self._patches:
                self._bytes += patches.nbytes
            self._patches[name] = patches, grid
            while self._bytes > PATCH_BYTES and len(self._patches) > 1:
                _, (dropped, _) = self._patches.popitem(last=False)
                self._bytes -= dropped.nbytes
