"""What vLLM's own workers do for us: take new weights by their published names, and read back those they compute with.

vLLM mixes `WeightReader` into its worker (`worker_extension_cls`), so it is there in process and behind the server.
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
from atomrl.weight_sync.channels import WEIGHTS
from atomrl.weight_sync.transfer import hash_of_rows, row_sums, tensor_hash

WORKER_EXTENSION = f"{__name__}.WeightReader"
_COLUMNS = 256
# Its kernels for bfloat16 use a CPU's tiles, for which a process has to ask the system once; it does not by itself.
torch.cpu._init_amx()


class Place(NamedTuple):
    """Where the part of a matrix that a worker holds lies in the whole one."""

    first_row: int
    rows: int
    first_column: int
    columns: int


class Piece(NamedTuple):
    """A worker's part of a published weight."""

    tensor: Tensor
    place: Place | None
    """None: all of it."""


class PieceHash(NamedTuple):
    """What a worker says of a piece, in values that also travel as JSON."""

    name: str
    dtype: str
    value: int | None
    """`tensor_hash` of a whole weight; None where it cannot be read, or is a part."""
    place: Place | None = None
    sums: str | None = None
    """Of a part: its `row_sums`, int32 in base64."""


class WeightReader:
    """A worker's own weights by their published names; called by `collective_rpc`."""

    model_runner: Any

    def load_published(self, weights: Iterable[tuple[str, Tensor]] | str) -> None:
        """Take new weights in place.

        vLLM before 0.26 does not look for them beneath its adapters, and has to be given its own names there.

        Args:
            weights: under their published names; or the folder that they lie in (`checkpoints.write_weights`).
        """
        given = load_file(Path(weights) / WEIGHTS).items() if isinstance(weights, str) else weights
        model = self.model_runner.get_model()
        self.model_runner.reload_weights(weights_iterator=_renamed(model, given))
        head = _beneath(getattr(model, "lm_head", None))
        if hasattr(head, "cpu_linear"):  # packed for a CPU; some versions leave that of a tied head as it was
            head.quant_method.process_weights_after_loading(head)

    def published_hashes(
        self, shapes: Mapping[str, Sequence[int]], tied: bool, ranks: Mapping[str, int]
    ) -> list[PieceHash]:
        """What this worker holds of every weight; `whole_hashes` puts together what all of them say.

        Args:
            shapes: of the published weights.
            tied: the head has no name of its own: its copy comes under the embedding's.
            ranks: of the adapters in use, by the name of the weight that they sit on.
        """
        model, dtype = self.model_runner.get_model(), self.model_runner.model_config.dtype
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        found = [_hashed(name, piece, dtype) for name, piece in _held(model, sizes, tied)]
        return found + [_hashed(name, piece, None) for name, piece in _adapters(model, sizes, ranks)]


def whole_hashes(workers: Sequence[Sequence[Sequence[Any]]], shapes: Mapping[str, Sequence[int]]) -> list[WeightHash]:
    """The hashes of published weights from what each worker holds of them (`WeightReader.published_hashes`).

    Under tensor parallelism a worker has some rows or columns of a matrix, and several may have the same ones. Of a
    weight of which not all is there the hash is None; one that is there twice, also in part, comes twice.

    Args:
        workers: the answer of each.
        shapes: of the published weights.

    Example:
        >>> from atomrl.weight_sync.transfer import row_sums, tensor_hash
        >>> weight, halves = torch.arange(12.0).view(4, 3), [Place(0, 2, 0, 3), Place(2, 2, 0, 3)]
        >>> pieces = [Piece(weight[:2], halves[0]), Piece(weight[2:], halves[1])]
        >>> [found] = whole_hashes([[_hashed("w", piece, torch.float32)] for piece in pieces], {"w": (4, 3)})
        >>> found.value == tensor_hash(weight, torch.float32)
        True
    """
    by_name: dict[tuple[str, str], list[PieceHash]] = {}
    for found in (PieceHash(*item) for worker in workers for item in worker):
        by_name.setdefault((found.name, found.dtype), []).append(found)
    return [
        WeightHash(name, getattr(torch, dtype), value)
        for (name, dtype), found in by_name.items()
        for value in [item.value for item in found if item.value is not None] or _joined(found, shapes.get(name))
    ]


def _joined(found: Sequence[PieceHash], shape: Sequence[int] | None) -> list[int | None]:
    """The hashes of a weight that workers hold in pieces: as many as a piece has copies."""
    copies: dict[Place, list[Tensor]] = {}
    for item in found:
        if item.place is not None and item.sums is not None:
            sums = torch.frombuffer(bytearray(b64decode(item.sums)), dtype=torch.int32)
            copies.setdefault(Place(*item.place), []).append(sums)
    rows = max((place.first_row + place.rows for place in copies), default=0)
    columns = max((place.first_column + place.columns for place in copies), default=0)
    whole = rows * columns if shape is None else math.prod(shape)  # of an adapter the shape is not known
    if not copies or sum(place.rows * place.columns for place in copies) != whole:
        return [None]
    values: list[int | None] = []
    for number in range(max(map(len, copies.values()))):
        total = torch.zeros(rows, dtype=torch.int32)
        for place, same in copies.items():
            total[place.first_row : place.first_row + place.rows] += same[number % len(same)]
        values.append(hash_of_rows(total))
    return values


def _hashed(name: str, piece: Piece | None, dtype: torch.dtype | None) -> PieceHash:
    """Of a piece, as `dtype` or its own."""
    dtype = dtype or (torch.float32 if piece is None else piece.tensor.dtype)
    said = str(dtype).removeprefix("torch.")
    if piece is None:
        return PieceHash(name, said, None)
    if piece.place is None:
        return PieceHash(name, said, tensor_hash(piece.tensor, dtype))
    sums = row_sums(piece.tensor, dtype, piece.place.first_column)
    return PieceHash(name, said, None, piece.place, b64encode(sums.cpu().numpy().tobytes()).decode())


def _renamed(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights as vLLM's `load_weights` finds them where layers lie beneath adapters."""
    from vllm.lora.layers import BaseLayerWithLoRA

    looks_beneath = hasattr(BaseLayerWithLoRA, "load_weights")
    for name, tensor in weights:
        path, _, leaf = name.rpartition(".")
        layer = None if looks_beneath else _find(model, name)[0]
        yield (f"{path}.base_layer.{leaf}" if isinstance(layer, BaseLayerWithLoRA) else name), tensor


def _find(model: nn.Module, name: str) -> tuple[Any, int | None]:
    """The layer that has a published weight or its adapter, and its place there where vLLM has stacked several."""
    layers = dict(model.named_modules())
    path = name.rpartition(".")[0]
    if path in layers:
        return layers[path], None
    stacked: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    before, _, end = path.rpartition(".")
    for whole, parts in stacked.items():
        if end in parts and f"{before}.{whole}" in layers:
            return layers[f"{before}.{whole}"], parts.index(end)
    return None, None


def _held(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> Iterator[tuple[str, Piece | None]]:
    """Every published weight, and a tied head's copy under the embedding's name."""
    for name, shape in shapes.items():
        layer, part = _find(model, name)
        yield name, _read(_beneath(layer), name.rpartition(".")[2], part, shape)
    if tied:
        name = "model.embed_tokens.weight"
        yield name, _read(_beneath(model.get_submodule("lm_head")), "weight", None, shapes[name], head=True)


def _beneath(layer: Any) -> Any:
    """The layer that adapters sit on."""
    return getattr(layer, "base_layer", layer)


def _read(layer: Any, leaf: str, part: int | None, shape: tuple[int, ...], head: bool = False) -> Piece | None:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    multiplies = head or (leaf == "weight" and isinstance(layer, LinearBase | ParallelLMHead))
    tensor = _multiplied(layer) if multiplies else getattr(layer, leaf, None)
    if tensor is None:
        return None
    if (vocabulary := getattr(layer, "shard_indices", None)) is not None:  # padded, in each worker
        first, rows = vocabulary.org_vocab_start_index, vocabulary.num_org_elements
        return _placed(tensor[:rows], shape, first)
    if part is not None:
        sizes = layer.output_partition_sizes
        tensor = tensor[sum(sizes[:part]) : sum(sizes[: part + 1])]
    return _placed(tensor, shape, None, getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1))


def _placed(
    tensor: Tensor, shape: tuple[int, ...], first_row: int | None, rank: int = 0, workers: int = 1
) -> Piece | None:
    """A worker's part of a weight, cut by rows or by columns; None where it is no such part.

    Args:
        first_row: of the part; None: workers have parts of the same size in the order of their ranks, and of fewer
            parts than there are workers, each part some workers that follow each other.
    """
    whole = shape if len(shape) > 1 else (1, *shape)  # as `row_sums` takes it
    own = tensor.shape if tensor.dim() > 1 else (1, *tensor.shape)
    (rows, *rest), (all_rows, *all_rest) = own, whole
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
    """The matrix [out, in] that a layer multiplies with.

    On a CPU vLLM packs it for its kernels and drops the parameter. The product with the identity gives every element
    back exactly, since all other terms of its sum are zero; only the sign of a zero is lost.
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
    """A and B of the only adapter slot, named as in `WeightUpdate.parts`."""
    for name, rank in ranks.items():
        layer, part = _find(model, name)
        a, b = layer.lora_a_stacked[part or 0][0, 0], layer.lora_b_stacked[part or 0][0, 0]
        (outputs, inputs), worker = shapes[name], (layer.tp_rank, layer.tp_size)
        yield f"{name}.lora_A", _placed(a[:rank], (rank, inputs), None, *worker)
        yield f"{name}.lora_B", _placed(b[:, :rank], (outputs, rank), None, *worker)
