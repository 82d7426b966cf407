"""Pictures as a model reads them: the input of its vision tower."""

from __future__ import annotations

import platform
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.common.errors import reraise_as
from atomrl.data.files import DataError
from atomrl.data.pictures import decoded, pillow
from atomrl.types import Image

if TYPE_CHECKING:
    from torch import Tensor

PATCH_BYTES = 256 << 20
"""Bytes of pictures that an `ImageReader` keeps as patches."""


class ImageReader:
    """Turns pictures into patches, by the settings beside a model, and places in a prompt into its tokens.

    It can be sent to other processes.

    Args:
        folder: folder of the run's pictures.
        model: folder of the model, with its preprocessor_config.json or processor_config.json.
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
        files = [Path(self.model) / name for name in ("preprocessor_config.json", "processor_config.json")]
        return f"{self.limits} {next((file.read_text(encoding='utf-8') for file in files if file.is_file()), '')}"

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
        try:
            content = (path := self.folder / image.name).read_bytes()
        except OSError as error:
            raise DataError(
                f"picture {path} ({image.source}) cannot be read on {platform.node()}: {error.strerror}; all machines "
                "of a run must see its folder (output_dir)"
            ) from None
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
