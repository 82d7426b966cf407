"""Text as one long row of token ids on disk, read through a memory map: nanoGPT's data format, with a description.

FOLDER/
  train.bin, val.bin   token ids as little-endian uint16 (uint32 where the vocabulary is larger than 65,536)
  meta.json            tokenizer, counts of tokens, characters and bytes, and the SHA-256 of each file
  tokenizer/           the tokenizer, as transformers loads it
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from atomrl.data.problems import DataError
from atomrl.data.text import text_chunks

FORMAT = 1
META, TOKENIZER = "meta.json", "tokenizer"
Split = Literal["train", "val"]
CHUNKS_AT_ONCE = 8


@dataclass(frozen=True)
class SplitMeta:
    """What a token file holds."""

    tokens: int
    characters: int
    bytes: int
    """Of the text, in UTF-8."""
    sha256: str
    """Of the token file."""


@dataclass(frozen=True)
class TokenMeta:
    """`meta.json`."""

    tokenizer: str
    """How it was asked for."""
    vocab_size: int
    dtype: str
    sources: dict[str, int]
    """Name of each text file -> its size in bytes."""
    train: SplitMeta
    val: SplitMeta
    format: int = FORMAT


def prepare_tokens(
    paths: Sequence[str | Path], tokenizer: Any, name: str, out: str | Path, val_fraction: float = 0.1
) -> TokenMeta:
    """Tokenize text files into a folder for `atomrl pretrain`; the text is read as a stream.

    Each file is a document: the tokenizer's end-of-sequence token follows it, where it has one. The last
    `val_fraction` of the text, by bytes and to the end of a line, is the validation split.

    Args:
        tokenizer: a fast Hugging Face tokenizer; it is saved with the tokens.
        name: of the tokenizer, for the record.
        out: the folder, which must not exist yet; it appears complete or not at all.

    Raises:
        DataError: a file is absent, empty or not UTF-8, the folder exists, the fraction is not between 0 and 1, or a
            split is left without a token.
    """
    out = Path(out)
    if not 0 < val_fraction < 1:
        raise DataError(f"the validation split must be a fraction between 0 and 1, not {val_fraction}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists already; name a new folder, or remove it")
    for path in paths:
        next(iter(text_chunks(path)))
    sizes = {str(path): Path(path).stat().st_size for path in paths}
    dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        splits = _write_splits(paths, tokenizer, dtype, aside, round(sum(sizes.values()) * (1 - val_fraction)))
        names = {Path(path).name: size for path, size in sizes.items()}
        meta = TokenMeta(name, len(tokenizer), dtype, names, train=splits["train"], val=splits["val"])
        tokenizer.save_pretrained(aside / TOKENIZER)
        (aside / META).write_text(json.dumps(asdict(meta), indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return meta


def _write_splits(
    paths: Sequence[str | Path], tokenizer: Any, dtype: str, folder: Path, train_bytes: int
) -> dict[str, SplitMeta]:
    writers = {"train": _Writer(folder / "train.bin", dtype), "val": _Writer(folder / "val.bin", dtype)}
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    done = 0
    for path in paths:
        pieces = _pieces(path, train_bytes - done)
        while batch := list(islice(pieces, CHUNKS_AT_ONCE)):
            encoded = tokenizer([text for _, text in batch], add_special_tokens=False, verbose=False)["input_ids"]
            for (split, text), ids in zip(batch, encoded, strict=True):
                writers[split].write(ids, text)
                done += len(text.encode())
        writers["train" if done < train_bytes else "val"].write(end, "")
    metas = {name: writer.close() for name, writer in writers.items()}
    for name, meta in metas.items():
        if meta.characters == 0:
            raise DataError(f"the {name} split has no text: there is too little of it for a split; give more")
    return metas


def _pieces(path: str | Path, train_bytes: int) -> Iterator[tuple[str, str]]:
    """(split, text) of a file of which the first `train_bytes` are for training; the cut is after a line."""
    for chunk in text_chunks(path):
        size = len(chunk.encode())
        if train_bytes <= 0:
            yield "val", chunk
        elif size <= train_bytes:
            yield "train", chunk
        else:
            near = len(chunk.encode()[:train_bytes].decode(errors="ignore"))
            cut = chunk.find("\n", near) + 1 or chunk.rfind("\n", 0, near) + 1 or near
            for split, text in (("train", chunk[:cut]), ("val", chunk[cut:])):
                if text:
                    yield split, text
        train_bytes -= size


class _Writer:
    """Appends token ids to a file, and counts."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.file, self.dtype, self.hash = path.open("wb"), dtype, hashlib.sha256()
        self.tokens = self.characters = self.bytes = 0

    def write(self, ids: Sequence[int], text: str) -> None:
        raw = np.asarray(ids, dtype=np.dtype(self.dtype).newbyteorder("<")).tobytes()
        self.file.write(raw)
        self.hash.update(raw)
        self.tokens += len(ids)
        self.characters += len(text)
        self.bytes += len(text.encode())

    def close(self) -> SplitMeta:
        self.file.close()
        return SplitMeta(self.tokens, self.characters, self.bytes, self.hash.hexdigest())


class TokenFolder:
    """A folder that `prepare_tokens` wrote, open for reading.

    Attributes:
        meta: its `meta.json`.
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            DataError: it is no such folder, or a file is not what was written.
        """
        self.path = Path(path)
        if not (self.path / META).is_file():
            what = "has no meta.json" if self.path.is_dir() else "is no folder"
            raise DataError(f"{path} {what}; make it of text files with: atomrl data prepare FILE... --out {path}")
        try:
            tree = json.loads((self.path / META).read_text(encoding="utf-8"))
            if tree.get("format") != FORMAT:
                raise DataError(f"{self.path / META} has format {tree.get('format')}, not {FORMAT}; prepare it again")
            splits = {name: SplitMeta(**tree.pop(name)) for name in ("train", "val")}
            self.meta = TokenMeta(**tree, train=splits["train"], val=splits["val"])
            item = np.dtype(self.meta.dtype).newbyteorder("<")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.path / META} is damaged ({error}); prepare the text again") from None
        self._maps: dict[str, np.ndarray] = {}
        for name, split in splits.items():
            file = self.path / f"{name}.bin"
            if (
                not file.is_file()
                or file.stat().st_size != split.tokens * item.itemsize
                or _sha256(file) != split.sha256
            ):
                raise DataError(f"{file} is not what was written (see meta.json); prepare the text again")
            self._maps[name] = np.memmap(file, dtype=item, mode="r")

    @property
    def identity(self) -> str:
        """Stands for all tokens of both splits."""
        return hashlib.sha256(f"{self.meta.train.sha256}{self.meta.val.sha256}".encode()).hexdigest()

    def windows(self, split: Split, count: int, length: int, seed: int, step: int) -> Tensor:
        """`count` windows of `length` tokens at random places, [count, length] int64; the same for the same arguments.

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
        """Raise DataError where the split is shorter than a window of `length` tokens."""
        if len(self._maps[split]) < length:
            raise DataError(
                f"{self.path / split}.bin has {len(self._maps[split])} tokens, fewer than a window of "
                f"pretrain.window_tokens={length}: shorten the window, or prepare more text"
            )

    def bits(self, split: Split, nats_per_token: float) -> dict[str, float]:
        """A loss in nats per token as bits per byte and per character of the split's text.

        Example: at 4 bytes a token, ln 2 nats per token are a quarter of a bit per byte.
        """
        meta: SplitMeta = getattr(self.meta, split)
        bits = nats_per_token / math.log(2) * meta.tokens
        return {"bits_per_byte": bits / meta.bytes, "bits_per_character": bits / meta.characters}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
