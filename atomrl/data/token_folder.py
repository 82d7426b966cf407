"""Token ids on disk, read through a memory map: nanoGPT's data format, with a description.

FOLDER/
  train.bin, val.bin   token ids as little-endian uint16 (uint32 where the vocabulary is larger than 65,536)
  meta.json            tokenizer, counts of tokens, characters and bytes, and the SHA-256 of each file
  tokenizer/           the tokenizer, as transformers loads it
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from atomrl.common.errors import reraise_as
from atomrl.common.files import new_folder, sha256
from atomrl.data.files import DataError, DataNotHere
from atomrl.data.text import CHUNK_CHARACTERS, text_chunks

META, TOKENIZER = "meta.json", "tokenizer"
Split = Literal["train", "val"]
CHUNKS_AT_ONCE = 64
PIECES = 20_000
"""A small text is read in about this many chunks: the train split ends with a chunk."""


class SplitMeta(BaseModel):
    """Sizes and hash of a token file."""

    tokens: int
    characters: int
    bytes: int
    """Bytes of the text in UTF-8."""
    sha256: str
    """Hash of the token file."""


class TokenMeta(BaseModel):
    """Content of `meta.json`."""

    tokenizer: str
    """The name that was passed to `prepare_tokens`."""
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    sources: dict[str, int]
    """Name of each text file -> its size in bytes."""
    train: SplitMeta
    val: SplitMeta
    format: Literal[1] = 1


def prepare_tokens(
    paths: Sequence[str | Path], tokenizer: Any, name: str, out: str | Path, val_fraction: float = 0.1
) -> TokenMeta:
    """Tokenize text files into a folder for pretraining. The text is read as a stream.

    Each file is a document, followed by the tokenizer's end-of-sequence token if it has one. The last `val_fraction`
    of the text, by bytes and rounded to a chunk, is the validation split.

    Args:
        tokenizer: a fast Hugging Face tokenizer; it is saved with the tokens.
        name: name of the tokenizer for `meta.json`.
        out: the folder, which must not exist; it is renamed into place when complete.

    Raises:
        DataError: a file does not exist, is empty or not UTF-8, the fraction is not between 0 and 1, or a split has no
            text.
        ValueError: the folder exists.
    """
    if not 0 < val_fraction < 1:
        raise DataError(f"the validation split must be a fraction between 0 and 1, not {val_fraction}")
    with new_folder(Path(out)) as folder:
        for path in paths:
            next(iter(text_chunks(path)))
        meta = _write_splits(paths, tokenizer, name, folder, val_fraction)
        tokenizer.save_pretrained(folder / TOKENIZER)
        (folder / META).write_text(meta.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return meta


def _write_splits(
    paths: Sequence[str | Path], tokenizer: Any, name: str, folder: Path, val_fraction: float
) -> TokenMeta:
    total = sum(Path(path).stat().st_size for path in paths)
    dtype: Literal["uint16", "uint32"] = "uint16" if len(tokenizer) <= 2**16 else "uint32"
    train_bytes = round(total * (1 - val_fraction))
    counts = {"train": Counter[str](), "val": Counter[str]()}
    with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
        for text, ids in _encoded(paths, tokenizer, min(CHUNK_CHARACTERS, 1 + total // PIECES)):
            split, file = ("train", train) if counts["train"]["bytes"] < train_bytes else ("val", val)
            file.write(np.asarray(ids, dtype=np.dtype(dtype).newbyteorder("<")).tobytes())
            counts[split].update(tokens=len(ids), characters=len(text), bytes=len(text.encode()))
    for split, count in counts.items():
        if not count["characters"]:
            raise DataError(f"the {split} split is empty: the text is too short to split; add more text")
    splits = {split: SplitMeta(**count, sha256=sha256(folder / f"{split}.bin")) for split, count in counts.items()}
    sources = {Path(path).name: Path(path).stat().st_size for path in paths}
    return TokenMeta(tokenizer=name, vocab_size=len(tokenizer), dtype=dtype, sources=sources, **splits)


def _encoded(paths: Sequence[str | Path], tokenizer: Any, characters: int) -> Iterator[tuple[str, list[int]]]:
    """Yield chunks of text with their token ids; after each document its end-of-sequence token."""
    for path in paths:
        chunks = text_chunks(path, characters)
        while batch := list(islice(chunks, CHUNKS_AT_ONCE)):
            yield from zip(batch, tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"], strict=True)
        yield "", [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


class TokenFolder:
    """Tokens written by `prepare_tokens`, memory-mapped.

    Attributes:
        meta: its `meta.json`.
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            DataNotHere: the folder does not exist.
            DataError: it was not written by `prepare_tokens`, or a file has changed since.
        """
        self.path = Path(path)
        if not (self.path / META).is_file():
            reason = (
                "has no meta.json"
                if self.path.is_dir()
                else "is not a folder"
                if self.path.exists()
                else "does not exist"
            )
            kind = DataError if self.path.exists() else DataNotHere
            raise kind(f"{path} {reason}; create it with: atomrl data prepare FILE... --out {path}")
        with reraise_as(DataError, f"{self.path / META} is corrupted; prepare the text again", ValueError):
            self.meta = TokenMeta.model_validate_json((self.path / META).read_text(encoding="utf-8"))
        item = np.dtype(self.meta.dtype).newbyteorder("<")
        self._maps: dict[str, np.ndarray] = {}
        for name, split in (("train", self.meta.train), ("val", self.meta.val)):
            file = self.path / f"{name}.bin"
            size = file.stat().st_size if file.is_file() else -1
            if size != split.tokens * item.itemsize or sha256(file) != split.sha256:
                raise DataError(f"{file} was changed since it was written (see meta.json); prepare the text again")
            self._maps[name] = np.memmap(file, dtype=item, mode="r")

    @property
    def identity(self) -> str:
        """A hash of all tokens of both splits."""
        return hashlib.sha256(f"{self.meta.train.sha256}{self.meta.val.sha256}".encode()).hexdigest()

    def windows(self, split: Split, count: int, length: int, seed: int, step: int) -> Tensor:
        """Draw `count` random windows of `length` tokens, [count, length] int64; deterministic in the arguments.

        Raises:
            DataError: the split is shorter than a window.
        """
        tokens = self._maps[split]
        self.check_length(split, length)
        digest = hashlib.blake2b(f"{seed}/{split}/{step}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        starts = torch.randint(len(tokens) - length + 1, (count,), generator=generator).tolist()
        rows = [torch.from_numpy(tokens[start : start + length].astype("int64")) for start in starts]
        return torch.stack(rows)

    def check_length(self, split: Split, length: int) -> None:
        """Check that the split has at least one window of `length` tokens.

        Raises:
            DataError: it is shorter.
        """
        if len(self._maps[split]) < length:
            raise DataError(
                f"{self.path / split}.bin has {len(self._maps[split])} tokens, fewer than one window of "
                f"pretrain.window_tokens={length}: shorten the window, or prepare more text"
            )

    def bits(self, split: Split, nats_per_token: float) -> dict[str, float]:
        """Convert a loss in nats per token to bits per byte and per character of the split's text.

        For example, at 4 bytes per token, ln 2 nats per token are 0.25 bits per byte.
        """
        meta: SplitMeta = getattr(self.meta, split)
        bits = nats_per_token / math.log(2) * meta.tokens
        return {"bits_per_byte": bits / meta.bytes, "bits_per_character": bits / meta.characters}
