"""Pictures of a data set: read and checked once, and copied to the run's folder.

A row holds references (`types.Image`). The files are copied once each, under their SHA-256, so that a resumed run, a
rollout pool and the records need no other file. `image_reader.ImageReader` turns them into the input of a vision tower.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from atomrl.common.errors import reraise_as
from atomrl.common.files import write_bytes
from atomrl.data.columns import IMAGES, PLACE
from atomrl.data.files import DataError, RawRow
from atomrl.data.image_reader import ImageReader
from atomrl.data.pictures import SUFFIXES, content_of, decoded, opened
from atomrl.data.stored import Records
from atomrl.types import Image, Problem

INDEX = "index.json"
"""File in the folder of pictures: path -> name, for a resumed run whose files are gone."""


class ImageStore:
    """Reads the pictures of rows, checks them, and copies them to a run's folder.

    Args:
        folder: folder of the run's pictures; nothing is written before `write`.
        field: column with pictures; None: `images` or `image`.
        reader: of the model, which checks that it can read a picture; None: not checked.
        replies: the replies of an environment may have pictures too.
    """

    def __init__(
        self,
        folder: str | Path,
        field: str | None = None,
        reader: ImageReader | None = None,
        replies: bool = False,
    ) -> None:
        self.folder, self.field, self.reader, self.replies = Path(folder), field, reader, replies
        self._contents: dict[str, Path | int] = {}
        """Name -> its file, or its place among the records."""
        self._records = Records()
        self._images: dict[str, Image] = {}
        """SHA-256 -> picture."""
        self._read: dict[Path, tuple[tuple[int, int], Image]] = {}
        """File -> its time and size, and the picture: a data set may name a file in many rows."""
        self._paths: dict[str, str] = {}
        """Path -> name, of the pictures that are in files of their own."""
        self._stored: dict[str, str] = {}
        with suppress(OSError, ValueError):
            self._stored = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))

    def __len__(self) -> int:
        """Number of distinct pictures of the data."""
        return len(self._images)

    def __bool__(self) -> bool:
        """True if rows have pictures, or may get some from an environment."""
        return bool(self._images) or self.replies

    def describe(self) -> list[str]:
        """Describe the pictures, for a dry run; empty without any."""
        lines = ["pictures: replies of the environment may have some; their rows are padded"] if self.replies else []
        if self._images and self.reader is not None:
            sizes = [self.reader.tokens(image) for image in self._images.values()]
            found = f"{len(sizes)} distinct, of {min(sizes)} to {max(sizes)} tokens"
            lines.append(f"pictures: {found}; their rows are padded")
        return lines

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
                row[name] = [without_parts(message, parts) for message in value]
                if given := [picture for picture in parts if picture is not None]:
                    found[f"the messages of {name!r}"] = given
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
        content = content_of(value)
        if isinstance(content, str):
            return self._file(content, folder)
        image = self._checked(content, place)
        if image.name not in self._contents:
            self._contents[image.name] = len(self._records)
            self._records.append(content)
        return image

    def _file(self, text: str, folder: Path) -> Image:
        path = (folder / text).absolute()
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
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._images:
            self._images[digest] = reference(content, source, self.folder, self.reader)
        return replace(self._images[digest], source=source)

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
        for name in [image.name for image in self._images.values()]:
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


def reference(content: bytes, source: str, folder: Path, reader: ImageReader | None) -> Image:
    """Return the reference of a picture, which is decoded once to see that it can be.

    Args:
        content: the bytes of its file.
        source: origin, for messages.
        folder: folder of the run's pictures. The file is not written.
        reader: checks that the model can read it; None: not checked.

    Raises:
        DataError: it cannot be read.
    """
    picture = opened(content)
    name = f"{hashlib.sha256(content).hexdigest()}.{SUFFIXES[picture.format]}"
    if not (folder / name).is_file():  # else it has been decoded before
        decoded(content)
    if picture.format == "TIFF":
        picture.load()  # which turns it
    turned = picture.getexif().get(0x0112) in (5, 6, 7, 8)
    width, height = reversed(picture.size) if turned else picture.size
    image = Image(name=name, height=height, width=width, source=source, folder=str(folder.absolute()))
    if reader is not None:
        reader.tokens(image)
    return image


def _listed(value: Any) -> list[Any]:
    """Return the pictures of a column, none for null and empty ones."""
    values = [*value] if isinstance(value, list | tuple) else [value]
    return [each for each in values if each is not None and each != ""]


def _has_parts(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in value
    )


def without_parts(message: Any, found: list[Any]) -> Any:
    """Replace the pictures among the parts of a message by `<image>`, and add them to `found`: None for one that is not
    given there."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            if message.get("role") == "assistant":
                raise DataError("a message of the assistant has a picture, which no model here writes")
            value = next((part[key] for key in ("image", "image_url", "url", "path", "base64") if part.get(key)), None)
            found.append(value.get("url", value) if isinstance(value, Mapping) else value)
            part = {"type": "text", "text": PLACE}
        parts.append(part)
    return {**message, "content": parts}
