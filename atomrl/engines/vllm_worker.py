"""`WeightReader`, an extension of vLLM's workers: load weights by published names, and hash the weights in use.

vLLM mixes it into its worker class (`worker_extension_cls`), in process and behind its server. A worker that has a part
of a matrix sends partial sums; `whole_hashes` combines them.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from atomrl.protocols import WeightHash
from atomrl.weight_sync.files import WEIGHTS
from atomrl.weight_sync.hashes import hash_of_rows, row_sums, tensor_hash

WORKER_EXTENSION = f"{__name__}.WeightReader"
_COLUMNS = 256
"""Columns of the identity multiplied at once by `_multiplied`."""
# vLLM's bfloat16 kernels use AMX tiles, for which a process must ask the system once; vLLM does not.
torch.cpu._init_amx()


class Place(NamedTuple):
    """Position of a worker's part within the whole matrix."""

    first_row: int
    rows: int
    first_column: int
    columns: int


class Piece(NamedTuple):
    """A worker's part of a published weight."""

    tensor: Tensor
    place: Place | None
    """None: the whole weight."""


class PieceHash(NamedTuple):
    """Hash of a piece, in JSON values."""

    name: str
    dtype: str
    value: int | None
    """`tensor_hash` of a whole weight; None for a part, or if it cannot be read."""
    place: Place | None = None
    sums: str | None = None
    """`row_sums` of a part, int32 in base64."""


class WeightReader:
    """Worker extension; its methods are called by `collective_rpc`."""

    model_runner: Any

    def load_published(self, weights: Iterable[tuple[str, Tensor]] | str) -> None:
        """Load new weights in place.

        Args:
            weights: by published name; or a folder written by `servers.write_weights`.
        """
        published = load_file(Path(weights) / WEIGHTS).items() if isinstance(weights, str) else weights
        model = self.model_runner.get_model()
        self.model_runner.reload_weights(weights_iterator=_renamed(model, published))
        head = _base_layer(_head(model))
        if hasattr(head, "cpu_linear"):  # on a CPU some versions do not pack a tied head again
            head.quant_method.process_weights_after_loading(head)

    def published_hashes(
        self, shapes: Mapping[str, Sequence[int]], tied: str | None, ranks: Mapping[str, int]
    ) -> list[PieceHash]:
        """Hash this worker's part of every weight.

        Args:
            shapes: of the published weights.
            tied: the embedding's name, if the head has none; the head's hash is returned under it too.
            ranks: of the adapters in use, by the name of the weight that they adapt.
        """
        model, dtype = self.model_runner.get_model(), self.model_runner.model_config.dtype
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        hashes = [_hashed(name, piece, dtype) for name, piece in _held(model, sizes, tied)]
        return hashes + [_hashed(name, piece, None) for name, piece in _adapters(model, sizes, ranks)]


def whole_hashes(workers: Sequence[Sequence[Sequence[Any]]], shapes: Mapping[str, Sequence[int]]) -> list[WeightHash]:
    """Combine the workers' hashes (`WeightReader.published_hashes`) to hashes of the published weights.

    With tensor parallelism a worker has some rows or columns of a matrix, and several workers may have the same ones.
    An incomplete weight has the hash None; a weight of which some part exists twice is returned twice.

    Args:
        workers: result of each worker.
        shapes: of the published weights.

    Example:
        >>> from atomrl.weight_sync.hashes import row_sums, tensor_hash
        >>> weight, halves = torch.arange(12.0).view(4, 3), [Place(0, 2, 0, 3), Place(2, 2, 0, 3)]
        >>> pieces = [Piece(weight[:2], halves[0]), Piece(weight[2:], halves[1])]
        >>> [combined] = whole_hashes([[_hashed("w", piece, torch.float32)] for piece in pieces], {"w": (4, 3)})
        >>> combined.value == tensor_hash(weight, torch.float32)
        True
    """
    by_name: dict[tuple[str, str], list[PieceHash]] = {}
    for piece in (PieceHash(*item) for worker in workers for item in worker):
        by_name.setdefault((piece.name, piece.dtype), []).append(piece)
    return [
        WeightHash(name, getattr(torch, dtype), value)
        for (name, dtype), pieces in by_name.items()
        for value in [piece.value for piece in pieces if piece.value is not None] or _joined(pieces, shapes.get(name))
    ]


def _joined(pieces: Sequence[PieceHash], shape: Sequence[int] | None) -> list[int | None]:
    """Hash a weight from its pieces; as many hashes as a piece has copies."""
    copies: dict[Place, list[Tensor]] = {}
    for item in pieces:
        if item.place is not None and item.sums is not None:
            sums = torch.frombuffer(bytearray(b64decode(item.sums)), dtype=torch.int32)
            copies.setdefault(Place(*item.place), []).append(sums)
    rows = max((place.first_row + place.rows for place in copies), default=0)
    columns = max((place.first_column + place.columns for place in copies), default=0)
    elements = rows * columns if shape is None else math.prod(shape)  # the shape of an adapter is unknown
    if not copies or sum(place.rows * place.columns for place in copies) != elements:
        return [None]
    values: list[int | None] = []
    for number in range(max(map(len, copies.values()))):
        total = torch.zeros(rows, dtype=torch.int32)
        for place, same in copies.items():
            total[place.first_row : place.first_row + place.rows] += same[number % len(same)]
        values.append(hash_of_rows(total))
    return values


def _hashed(name: str, piece: Piece | None, dtype: torch.dtype | None) -> PieceHash:
    """Hash a piece as `dtype` (None: its own)."""
    dtype = dtype or (torch.float32 if piece is None else piece.tensor.dtype)
    dtype_name = str(dtype).removeprefix("torch.")
    if piece is None:
        return PieceHash(name, dtype_name, None)
    if piece.place is None:
        return PieceHash(name, dtype_name, tensor_hash(piece.tensor, dtype))
    sums = row_sums(piece.tensor, dtype, piece.place.first_column)
    return PieceHash(name, dtype_name, None, piece.place, b64encode(sums.cpu().numpy().tobytes()).decode())


def _renamed(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Rename weights of layers with adapters: vLLM before 0.26 only finds them by the name of the base layer."""
    from vllm.lora.layers import BaseLayerWithLoRA

    finds_base_layer = hasattr(BaseLayerWithLoRA, "load_weights")
    for name, tensor in weights:
        path, _, leaf = name.rpartition(".")
        layer = None if finds_base_layer else _find(model, name)[0]
        yield (f"{path}.base_layer.{leaf}" if isinstance(layer, BaseLayerWithLoRA) else name), tensor


def _find(model: nn.Module, name: str) -> tuple[Any, int | None]:
    """Find the layer of a published weight or adapter, and the weight's index if vLLM has stacked several."""
    layers = dict(model.named_modules())
    stacked: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for path in (each.rpartition(".")[0] for each in (name, _own_name(model, name))):
        if path in layers:
            return layers[path], None
        before, _, end = path.rpartition(".")
        for fused, parts in stacked.items():
            if end in parts and f"{before}.{fused}" in layers:
                return layers[f"{before}.{fused}"], parts.index(end)
    return None, None


def _own_name(model: nn.Module, name: str) -> str:
    """Return vLLM's name of a published weight, whose prefix differs in models with a vision tower."""
    prefixes = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", None) or {}
    for before, after in prefixes.items():
        if after is not None and name.startswith(before):
            name = name.replace(before, after, 1)
    return name


def _held(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], tied: str | None
) -> Iterator[tuple[str, Piece | None]]:
    """Yield this worker's piece of every published weight; a tied head comes under the embedding's name."""
    for name, shape in shapes.items():
        layer, part = _find(model, name)
        yield name, _read(_base_layer(layer), name.rpartition(".")[2], part, shape)
    if tied is not None:
        yield tied, _read(_base_layer(_head(model)), "weight", None, shapes[tied], head=True)


def _head(model: nn.Module) -> Any:
    """Return the output matrix; in a model with a vision tower it is a part of its language model."""
    return next((layer for name, layer in model.named_modules() if name.rpartition(".")[2] == "lm_head"), None)


def _base_layer(layer: Any) -> Any:
    """Return the layer below an adapter."""
    return getattr(layer, "base_layer", layer)


def _read(layer: Any, leaf: str, part: int | None, shape: tuple[int, ...], head: bool = False) -> Piece | None:
    """Return this worker's piece of a weight; `part` is its index in a stacked layer, `shape` that of the whole."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    multiplies = head or (leaf == "weight" and isinstance(layer, LinearBase | ParallelLMHead))
    tensor = _multiplied(layer) if multiplies else getattr(layer, leaf, None)
    if tensor is None:
        return None
    if (vocabulary := getattr(layer, "shard_indices", None)) is not None:  # each worker's rows are padded
        first, rows = vocabulary.org_vocab_start_index, vocabulary.num_org_elements
        return _placed(tensor[:rows], shape, first)
    if part is not None:
        sizes = layer.output_partition_sizes
        tensor = tensor[sum(sizes[:part]) : sum(sizes[: part + 1])]
    return _placed(tensor, shape, None, getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1))


def _placed(
    tensor: Tensor, shape: tuple[int, ...], first_row: int | None, rank: int = 0, workers: int = 1
) -> Piece | None:
    """Locate a worker's part of a weight that is split by rows or by columns; None if it is neither.

    Args:
        first_row: of the part. None: workers have equal parts in the order of their ranks; with fewer parts than
            workers (key heads), consecutive workers share one.
    """
    total = shape if len(shape) > 1 else (1, *shape)  # as `row_sums` reads a vector
    own = tensor.shape if tensor.dim() > 1 else (1, *tensor.shape)
    (rows, *rest), (all_rows, *all_rest) = own, total
    columns, all_columns = math.prod(rest), math.prod(all_rest)
    if (rows, columns) == (all_rows, all_columns):
        return Piece(tensor, None)
    if first_row is not None:
        return Piece(tensor, Place(first_row, rows, 0, columns)) if columns == all_columns else None
    by_rows = columns == all_columns and all_rows % rows == 0
    if not by_rows and not (rows == all_rows and all_columns % columns == 0):
        return None
    parts = all_rows // rows if by_rows else all_columns // columns
    index = rank * parts // workers
    place = Place(index * rows, rows, 0, columns) if by_rows else Place(0, rows, index * columns, columns)
    return Piece(tensor, place)


def _multiplied(layer: Any) -> Tensor:
    """Return the matrix [out, in] that a layer multiplies with.

    On a CPU vLLM packs it for its kernels and drops the parameter. Multiplying by the identity restores every element
    exactly, since all other terms of its sum are zero; only the sign of a zero is lost.
    """
    weight: Tensor = layer.weight
    if not hasattr(layer, "cpu_linear"):
        return weight
    inputs = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
    identity = torch.eye(inputs, dtype=layer.params_dtype if weight.numel() == 0 else weight.dtype)
    columns = [layer.cpu_linear(rows, weight, None) for rows in identity.split(_COLUMNS)]
    return torch.cat(columns).t()


def _adapters(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], ranks: Mapping[str, int]
) -> Iterator[tuple[str, Piece | None]]:
    """Yield A and B of the only adapter slot, named as in `WeightUpdate.parts`."""
    for name, rank in ranks.items():
        layer, part = _find(model, name)
        a, b = layer.lora_a_stacked[part or 0][0, 0], layer.lora_b_stacked[part or 0][0, 0]
        (outputs, inputs), worker = shapes[name], (layer.tp_rank, layer.tp_size)
        yield f"{name}.lora_A", _placed(a[:rank], (rank, inputs), None, *worker)
        yield f"{name}.lora_B", _placed(b[:, :rank], (outputs, rank), None, *worker)
