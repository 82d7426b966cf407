"""Pictures through the vision tower of a transformers model: `Vision`, for trainer and engine alike.

The families here share one interface: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5. A prompt has one token for each
feature of a picture (`image_token_id`); the model puts the features in their place, and gives the tokens positions in
time, height and width (M-RoPE), which transformers computes from the grids and from the type of each token.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from atomrl.config import ConfigError
from atomrl.types import Image

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""`model_type` of the models that are trained on pictures."""
LEAST = "5.19"
"""Version of transformers from which models take features that were computed before (`mm_encoder_outputs`)."""
FEATURE_BYTES = 1 << 30
"""Bytes of features that a frozen tower keeps, in the CPU's memory."""


class Patches(Protocol):
    """Reads pictures as patches (`data.images.ImageReader`)."""

    image_token: int
    """Token of a picture, once for each feature."""

    def __call__(self, image: Image) -> tuple[Tensor, Tensor]:
        """Return the patches [P, D] of a picture, and its grid [3]."""

    def patches(self, image: Image) -> int:
        """Return the number of patches of a picture."""

    def tokens(self, image: Image) -> int:
        """Return the number of tokens of a picture."""


def why_no_images(config: Any, path: object) -> str | None:
    """Return why a model cannot be trained on pictures; None if it can."""
    if config.model_type in FAMILIES and getattr(config, "vision_config", None) is not None:
        return None
    kinds = "Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5"
    if getattr(config, "vision_config", None) is None:
        return f"{path} ({config.model_type}) reads text alone; use a model with a vision tower ({kinds})"
    return f"{path} ({config.model_type}) is trained on text alone here; pictures need {kinds}"


def media_tokens(config: Any) -> tuple[int, ...]:
    """Return the tokens that stand for pictures, films and sound, or mark their places; a model must not sample them.

    Args:
        config: transformers config of a whole model.
    """
    names = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "vision_end_token_id")
    return tuple(sorted({token for name in names if isinstance(token := getattr(config, name, None), int)}))


class Vision:
    """Computes the features of pictures.

    A frozen tower computes each picture once, by itself, and keeps its features, up to `FEATURE_BYTES`: so they depend
    neither on other pictures nor on what was computed before. A trained one computes the distinct pictures of a
    micro-batch together.

    Args:
        inner: a transformers model of one of `FAMILIES`.
        read: reads the patches of a picture.

    Raises:
        ConfigError: this version of transformers does not take features.
    """

    def __init__(self, inner: Any, read: Patches) -> None:
        if "mm_encoder_outputs" not in inspect.signature(inner.base_model.forward).parameters:
            raise ConfigError(f"pictures need transformers {LEAST} or later: pip install -U transformers")
        self.inner, self.read = inner, read
        self.image_token: int = inner.config.image_token_id
        self.computed = 0
        """Pictures that the tower has computed."""
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._bytes = 0

    @property
    def trained(self) -> bool:
        """True if a weight of the tower is trained."""
        return any(weight.requires_grad for weight in self.inner.base_model.visual.parameters())

    def forget(self) -> None:
        """Drop the features, after the tower's weights have changed."""
        self._kept.clear()
        self._bytes = 0

    def inputs(self, tokens: Tensor, images: Sequence[Sequence[Image]]) -> dict[str, Any]:
        """Return the model's arguments for rows with pictures; none if no row has any.

        Args:
            tokens: [B, T], each picture's tokens included.
            images: [B] pictures of each row, in the order of their tokens.

        Raises:
            ValueError: a row has more or fewer tokens of pictures than features.
        """
        flat = [image for row in images for image in row]
        if not flat:
            return {}
        distinct = {image.name: image for image in flat}
        found: dict[str, tuple[Any, Tensor]]
        if self.trained and torch.is_grad_enabled():
            found = dict(zip(distinct, self._computed([*distinct.values()], tokens.device), strict=True))
        else:
            with torch.no_grad():
                found = {name: self._frozen(image, tokens.device) for name, image in distinct.items()}
        sizes = {name: len(features.pooler_output[0]) for name, (features, _) in found.items()}
        places = tokens == self.image_token
        for number, (has, row) in enumerate(zip(places.sum(1).tolist(), images, strict=True)):
            if has != (needs := sum(sizes[image.name] for image in row)):
                raise ValueError(f"row {number} has {has} tokens of pictures, but its pictures have {needs} features")
        return {
            "mm_encoder_outputs": {"image": _joined([found[image.name][0] for image in flat])},
            "image_grid_thw": torch.stack([found[image.name][1] for image in flat]),
            "mm_token_type_ids": places.int(),
        }

    def _frozen(self, image: Image, device: torch.device) -> tuple[Any, Tensor]:
        """Return the features of a picture and its grid, from what is kept if possible."""
        if image.name in self._kept:
            self._kept.move_to_end(image.name)
            features, grid = self._kept[image.name]
            return _map(features, lambda tensor: tensor.to(device)), grid.to(device)
        [(features, grid)] = self._computed([image], device)
        if not self.trained:
            self._keep(image.name, features, grid)
        return features, grid

    def _computed(self, images: Sequence[Image], device: torch.device) -> list[tuple[Any, Tensor]]:
        """Compute the features of pictures in one pass; return those of each picture, and its grid."""
        self.computed += len(images)
        read = [self.read(image) for image in images]
        patches, grids = torch.cat([each for each, _ in read]), torch.stack([grid for _, grid in read])
        features = self.inner.base_model.get_image_features(
            patches.to(device, self.dtype), grids.to(device), return_dict=True
        )
        return [(_part(features, number), grid.to(device)) for number, (_, grid) in enumerate(read)]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tower's weights."""
        weight: Tensor = next(self.inner.base_model.visual.parameters())
        return weight.dtype

    def _keep(self, name: str, features: Any, grid: Tensor) -> None:
        self._kept[name] = _map(features, lambda tensor: tensor.cpu()), grid.cpu()
        self._bytes += _size(self._kept[name][0])
        while self._bytes > FEATURE_BYTES and len(self._kept) > 1:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._bytes -= _size(dropped)


def _part(features: Any, number: int) -> Any:
    """Return the features of one picture of several, as far as the language model reads them."""
    part = copy.copy(features)
    for name in ("last_hidden_state", "hidden_states", "attentions"):
        if getattr(part, name, None) is not None:
            setattr(part, name, None)
    part.pooler_output = (features.pooler_output[number],)
    if getattr(features, "deepstack_features", None) is not None:
        part.deepstack_features = [(layer[number],) for layer in features.deepstack_features]
    return part


def _map(features: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the features of a picture with `change` applied to their tensors."""
    made = copy.copy(features)
    made.pooler_output = tuple(change(part) for part in features.pooler_output)
    if getattr(features, "deepstack_features", None) is not None:
        made.deepstack_features = [tuple(change(part) for part in layer) for layer in features.deepstack_features]
    return made


def _joined(parts: Sequence[Any]) -> Any:
    """Return the features of several pictures as those of one call."""
    joined = copy.copy(parts[0])
    joined.pooler_output = tuple(part.pooler_output[0] for part in parts)
    if getattr(joined, "deepstack_features", None) is not None:
        layers = range(len(joined.deepstack_features))
        joined.deepstack_features = [tuple(part.deepstack_features[layer][0] for part in parts) for layer in layers]
    return joined


def _size(features: Any) -> int:
    layers = getattr(features, "deepstack_features", None) or []
    return sum(part.nbytes for part in (*features.pooler_output, *(each for layer in layers for each in layer)))
