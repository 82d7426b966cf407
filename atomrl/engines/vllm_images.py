"""Pictures in requests to vLLM, in process and behind its server.

vLLM gets the tokens of the row, each picture's included, and the patches that the trainer reads. It neither expands
places nor resizes pictures again: given expanded tokens and a picture, it expands them once more without an error. It
would also normalize the patches again, which `mm_device_do_normalize` turns off.
Needs vLLM 0.32 or later. A server gets the patches in vLLM's own encoding, so it must have the version of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from atomrl.models.vision import Patches
from atomrl.types import GenerationRequest, Image

if TYPE_CHECKING:
    from torch import Tensor

ENCODING = "vllm.entrypoints.scale_out.token_in_token_out.mm_serde"
"""vLLM's module that encodes patches for its server."""


def places(tokens: Sequence[int], images: Sequence[Image], read: Patches) -> list[tuple[int, int]]:
    """Return the first token of each picture and their number.

    Raises:
        ValueError: the prompt has more or fewer tokens of pictures than its pictures have.

    Example:
        >>> from types import SimpleNamespace
        >>> places([8, 5, 5, 8, 5, 5], ["a", "b"], SimpleNamespace(image_token=5, tokens=lambda image: 2))
        [(1, 2), (4, 2)]
    """
    found, at = [], 0
    for image in images:
        while at < len(tokens) and tokens[at] != read.image_token:
            at += 1
        found.append((at, read.tokens(image)))
        at += found[-1][1]
    has, needs = list(tokens).count(read.image_token), sum(length for _, length in found)
    if has != needs or any(tokens[start : start + size].count(read.image_token) != size for start, size in found):
        raise ValueError(f"a prompt has {has} tokens of pictures, but its pictures have {needs} features")
    return found


def _item(image: Image, read: Patches, dtype: torch.dtype) -> Any:
    """Return a picture as vLLM's model reads it: its patches in the model's dtype, and its grid."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    patches, grid = read(image)
    values: dict[str, Tensor] = {"pixel_values": patches.to(dtype), "image_grid_thw": grid[None]}
    kinds = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([len(patches)])),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(values, kinds)["image"][0]


def multimodal(request: GenerationRequest, read: Patches, dtype: torch.dtype) -> Any:
    """Return the prompt of a request with pictures, for vLLM in this process."""
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    ranges = places(request.prompt_token_ids, request.images, read)
    return mm_input(
        prompt_token_ids=list(request.prompt_token_ids),
        mm_kwargs=MultiModalKwargsItems({"image": [_item(image, read, dtype) for image in request.images]}),
        mm_hashes={"image": [image.name for image in request.images]},
        mm_placeholders={"image": [PlaceholderRange(offset=start, length=length) for start, length in ranges]},
    )


def features(request: GenerationRequest, read: Patches, dtype: torch.dtype) -> dict[str, Any]:
    """Return the pictures of a request as `features` of vLLM's `/inference/v1/generate`."""
    encode = import_module(ENCODING).encode_mm_kwargs_item
    ranges = places(request.prompt_token_ids, request.images, read)
    return {
        "mm_hashes": {"image": [image.name for image in request.images]},
        "mm_placeholders": {"image": [{"offset": start, "length": length} for start, length in ranges]},
        "kwargs_data": {"image": [encode(_item(image, read, dtype)) for image in request.images]},
    }


def check_prompt(read_as: Sequence[int] | None, request: GenerationRequest, engine: str) -> None:
    """Check that vLLM read a prompt with pictures as the row has it.

    Args:
        read_as: the prompt's tokens, as vLLM returns them.
        engine: its name for the message.

    Raises:
        RuntimeError: it did not.
    """
    if read_as is None or list(read_as) != list(request.prompt_token_ids):
        raise RuntimeError(f"{engine} read {request.request_id} as another prompt than the row has")


@lru_cache(maxsize=4)
def banned_words(tokenizer: Any, tokens: tuple[int, ...]) -> tuple[str, ...]:
    """Return the texts of tokens that must not be sampled, for vLLM's `bad_words`.

    Raises:
        ValueError: the tokenizer does not encode such a text as its token.
    """
    words = tuple(map(str, tokenizer.convert_ids_to_tokens(list(tokens))))
    for word, token in zip(words, tokens, strict=True):
        if tokenizer.encode(word, add_special_tokens=False) != [token]:
            raise ValueError(f"the tokenizer does not encode {word!r} as the one token {token}, so vLLM cannot ban it")
    return words
