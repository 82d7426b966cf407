"""Blocks of demonstrations. The expected blocks are those of TRL 1.16's `pack_dataset` (`trl/data_utils.py`)."""

import json

import numpy as np
import pytest

from atomrl.config import DataConfig
from atomrl.data.files import DataError
from atomrl.data.given import demonstration_reader
from atomrl.data.packing import Example, packed
from atomrl.data.problems import load_problems
from atomrl.data.processor import DataProcessor
from atomrl.data.tokenized import TokenizedSamples
from atomrl.models.loading import load_tokenizer
from tests.tiny import make_tiny_model

LENGTHS = (5, 2, 3, 1, 4, 9, 2)
BLOCKS = {
    "bfd": [[0, 1, 2, 3], [40, 41, 42, 43], [50, 51, 52, 53], [20, 21, 22, 30], [10, 11, 60, 61]],
    "bfd_split": [
        [0, 1, 2, 3], [40, 41, 42, 43], [50, 51, 52, 53], [54, 55, 56, 57], [20, 21, 22, 4], [10, 11, 60, 61], [30, 58],
    ],
    "wrapped": [[0, 1, 2, 3], [4, 10, 11, 20], [21, 22, 30, 40], [41, 42, 43, 50], [51, 52, 53, 54], [55, 56, 57, 58],
                [60, 61]],
}  # fmt: skip


@pytest.mark.parametrize("strategy", BLOCKS)
def test_blocks_are_those_of_trl(strategy):
    rows = [np.arange(length, dtype=np.int32) + 10 * number for number, length in enumerate(LENGTHS)]
    blocks = packed([Example(row, row % 2 == 0) for row in rows], 4, strategy)
    assert [[token for row in block for token in row.tokens.tolist()] for block in blocks] == BLOCKS[strategy]
    assert all((row.learned == (row.tokens % 2 == 0)).all() for block in blocks for row in block)
    assert max(len(block) for block in blocks) == (1 if strategy == "wrapped" else 2)


def test_packing_ends_with_a_thousand_rows_as_trls_does():
    rows = [np.array([number], dtype=np.int32) for number in range(1001)]
    assert [len(row.tokens) for (row,) in packed([Example(row, row > 0) for row in rows], 999, "wrapped")] == [
        999,
        1,
        1,
    ]


@pytest.mark.parametrize(("strategy", "rows"), [("bfd", [[12], [6, 6]]), ("bfd_split", [[12], [6, 6], [2]])])
def test_a_step_takes_blocks(tmp_path, strategy, rows):
    tokenizer = load_tokenizer(make_tiny_model(tmp_path / "model"))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abcde", "vwxyz", "a long row of")))
    data = DataConfig(train=str(path))
    report = load_problems(data, convert=demonstration_reader("prompt", "completion"), completions="demonstrate")

    def samples(size):
        return TokenizedSamples(
            report, DataProcessor(tokenizer, data), "demonstrations", max_row_tokens=size, packing=strategy
        )

    made = samples(12)
    assert [made.rows([(unit.problem_id, unit)]).lengths.tolist() for unit in made.units] == rows
    with pytest.raises(DataError, match=r"train\.max_row_tokens"):
        samples(None)
