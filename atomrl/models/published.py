"""Published weight names of a transformers model."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from atomrl.models.adapted import is_added


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return storage and offset of a tensor; works on the meta device too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class _View(Tensor):
    """A tensor whose `contiguous` does not copy, so that the parts into which transformers splits it stay views."""

    def contiguous(self, *_: Any, **__: Any) -> Tensor:
        return self


def published_weights(inner: Any, weights: Iterable[tuple[str, Tensor]] | None = None) -> dict[str, Tensor]:
    """Return weights by the names of published checkpoints, which serving engines use.

    transformers 5 renames and fuses weights of some families when it loads them (mixtures of experts, GPT-NeoX). This
    reverts it by transformers' own table. Parts of fused weights are views, so that they can be written in place. A few
    families whose published weights combine several of transformers' weights keep transformers' names.

    Args:
        inner: a transformers model.
        weights: its weights by transformers' names; None: its state dict. Tied weights are returned once.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = dict(inner.state_dict().items() if weights is None else weights)
    first: dict[tuple[int, int], str] = {}
    for name, tensor in state.items():
        first.setdefault(_place(tensor), name)
    state = {name: tensor.detach() for name, tensor in state.items() if first[_place(tensor)] == name}
    reverted = revert_weight_conversion(inner, {name: tensor.as_subclass(_View) for name, tensor in state.items()})
    storages = {_place(tensor)[0] for tensor in state.values()}
    if any(_place(tensor)[0] not in storages for tensor in reverted.values()):
        return state
    return {name: tensor.as_subclass(Tensor) for name, tensor in reverted.items()}


def published_names(inner: Any) -> dict[str, str]:
    """Return the published name of each weight that is not a part or a sum of others, by transformers' name.

    Layers beneath adapters have the names that they have without them.
    """
    state = {name.replace(".base_layer.", "."): weight for name, weight in inner.state_dict().items()}
    state = {name: weight for name, weight in state.items() if not is_added(name)}
    by_place = {_place(weight): name for name, weight in published_weights(inner, state.items()).items()}
    return {name: by_place.get(_place(weight), name) for name, weight in state.items()}
