"""Combining the weight hashes of vLLM workers that each have a part."""

from base64 import b64encode

import pytest
import torch

from atomrl.engines.vllm_worker import PieceHash, Place, whole_hashes
from atomrl.weight_sync.hashes import row_sums, tensor_hash

ROWS, COLUMNS = 12, 8


def part(weight, place):
    """A worker's answer for its part, also as JSON from a server."""
    own = weight[place.first_row :, place.first_column :][: place.rows, : place.columns]
    sums = row_sums(own, torch.float32, place.first_column)
    return list(PieceHash("w", "float32", None, place, b64encode(sums.numpy().tobytes()).decode()))


def by_rows(weight, workers, parts=None):
    """As many parts as workers, or fewer, which several workers then share."""
    parts = parts or workers
    size = len(weight) // parts
    return [[part(weight, Place(rank * parts // workers * size, size, 0, weight.shape[1]))] for rank in range(workers)]


def by_columns(weight, workers):
    size = weight.shape[1] // workers
    return [[part(weight, Place(0, len(weight), rank * size, size))] for rank in range(workers)]


def values(workers, shape=(ROWS, COLUMNS)):
    return [held.value for held in whole_hashes(workers, {"w": shape})]


@pytest.fixture
def weight():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("workers", [2, 4])
def test_parts_of_a_matrix_give_the_hash_of_the_whole(weight, workers):
    whole = tensor_hash(weight, torch.float32)
    assert values(by_rows(weight, workers)) == values(by_columns(weight, workers)) == [whole]
    assert values(by_rows(weight, 3)[::-1]) == [whole]


def test_a_bias_is_cut_along_its_only_dimension():
    bias = torch.arange(8.0)
    parts = by_columns(bias[None], 2)
    assert values(parts, (8,)) == [tensor_hash(bias, torch.float32)]


def test_every_copy_of_a_replicated_weight_is_compared(weight):
    """Fewer key heads than workers, and norms, which every worker has in full."""
    whole, other = tensor_hash(weight, torch.float32), weight.clone()
    assert values(by_rows(weight, 4, parts=2)) == [whole, whole]
    other[ROWS - 1, 0] += 1
    copies = by_rows(weight, 4, parts=2)[:3] + by_rows(other, 4, parts=2)[3:]
    assert values(copies) == [whole, tensor_hash(other, torch.float32)]
    assert values([[["w", "float32", 7]], [["w", "float32", 8]]]) == [7, 8]


def test_one_changed_element_of_one_part_is_found(weight):
    other = weight.clone()
    other[5, 5] += 1
    mixed = by_columns(weight, 2)[:1] + by_columns(other, 2)[1:]
    assert values(mixed) == [tensor_hash(other, torch.float32)] != [tensor_hash(weight, torch.float32)]


def test_incomplete_weights_have_no_hash(weight):
    assert values(by_rows(weight, 4)[:3]) == [None]
    assert values([[["w", "float32", None]]] * 2) == [None]
    assert values([[["w", "float32", None]], [["w", "float32", 7]]]) == [7]  # a layer that only one worker has
