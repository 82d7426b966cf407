"""Plain text as a stream of chunks, so that a file larger than memory can be read."""

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

from atomrl.common.errors import said_as
from atomrl.common.files import new_folder, sha256
from atomrl.data.files import DataError, DataNotHere

CHUNK_CHARACTERS = 2**16


def text_chunks(path: str | Path, characters: int = CHUNK_CHARACTERS) -> Iterator[str]:
    """The text of a UTF-8 file in pieces of about `characters`, which joined are the file.

    A piece ends with a single line end between two words where there is one: no tokenizer that splits at white space
    has a token across it, so the pieces have the tokens of the whole. A byte-order mark is left out; line ends stay
    as they are.

    Raises:
        DataError: the file is absent, empty, or not UTF-8 (with the byte).
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"text file {path} does not exist" if not path.exists() else f"{path} is not a file")
    rest, empty = "", True
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while block := file.read(characters):
                empty = False
                rest += block
                end = _last_cut(rest)
                if end:
                    yield rest[:end]
                    rest = rest[end:]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} (save it as UTF-8)") from None
    if rest:
        yield rest
    if empty:
        raise DataError(f"text file {path} is empty")


def _last_cut(text: str) -> int:
    """Where to cut; 0 to read on first. A text without line ends is cut at white space, or else anywhere."""
    at = len(text) - 1
    while (at := text.rfind("\n", 1, at)) > 0:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
    if len(text) < 4 * CHUNK_CHARACTERS:
        return 0
    return text.rfind(" ") if " " in text[len(text) // 2 :] else len(text)


def distinct_characters(paths: Sequence[str | Path]) -> list[str]:
    """Every character of some files, in the order of their code points."""
    found: set[str] = set()
    for path in paths:
        for chunk in text_chunks(path):
            found |= set(chunk)
    return sorted(found)


# --------------------------------------------------------------------------------------------------------------------
# Text as one long row of token ids on disk, read through a memory map: nanoGPT's data format, with a description.
#
# FOLDER/
#   train.bin, val.bin   token ids as little-endian uint16 (uint32 where the vocabulary is larger than 65,536)
#   meta.json            tokenizer, counts of tokens, characters and bytes, and the SHA-256 of each file
#   tokenizer/           the tokenizer, as transformers loads it

META, TOKENIZER = "meta.json", "tokenizer"
Split = Literal["train", "val"]
CHUNKS_AT_ONCE = 64
PIECES = 20_000
"""A small text is read in about so many: the cut between the splits is at the end of one."""


class SplitMeta(BaseModel):
    """What a token file holds."""

    tokens: int
    characters: int
    bytes: int
    """Of the text, in UTF-8."""
    sha256: str
    """Of the token file."""


class TokenMeta(BaseModel):
    """`meta.json`."""

    tokenizer: str
    """How it was asked for."""
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
    """Tokenize text files into a folder for pretraining; the text is read as a stream.

    Each file is a document: the tokenizer's end-of-sequence token follows it, where it has one. The last
    `val_fraction` of the text, by bytes and to the end of a line, is the validation split.

    Args:
        tokenizer: a fast Hugging Face tokenizer; it is saved with the tokens.
        name: of the tokenizer, for the record.
        out: the folder, which must not exist yet; it appears complete or not at all.

    Raises:
        DataError: a file is absent, empty or not UTF-8, the fraction is not between 0 and 1, or a split is left
            without a token.
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
    for split, found in counts.items():
        if not found["characters"]:
            raise DataError(f"the {split} split has no text: there is too little of it for a split; give more")
    splits = {split: SplitMeta(**found, sha256=sha256(folder / f"{split}.bin")) for split, found in counts.items()}
    sources = {Path(path).name: Path(path).stat().st_size for path in paths}
    return TokenMeta(tokenizer=name, vocab_size=len(tokenizer), dtype=dtype, sources=sources, **splits)


def _encoded(paths: Sequence[str | Path], tokenizer: Any, characters: int) -> Iterator[tuple[str, list[int]]]:
    """Pieces of text with their tokens, and the end of each document."""
    for path in paths:
        chunks = text_chunks(path, characters)
        while batch := list(islice(chunks, CHUNKS_AT_ONCE)):
            yield from zip(batch, tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"], strict=True)
        yield "", [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


class TokenFolder:
    """A folder that `prepare_tokens` wrote, open for reading.

    Attributes:
        meta: its `meta.json`.
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            DataNotHere: there is no such folder.
            DataError: it was not written by `prepare_tokens`, or a file is not what was written.
        """
        self.path = Path(path)
        if not (self.path / META).is_file():
            what = (
                "has no meta.json" if self.path.is_dir() else "is no folder" if self.path.exists() else "does not exist"
            )
            kind = DataError if self.path.exists() else DataNotHere
            raise kind(f"{path} {what}; make it of text files with: atomrl data prepare FILE... --out {path}")
        with said_as(DataError, f"{self.path / META} is damaged; prepare the text again", ValueError):
            self.meta = TokenMeta.model_validate_json((self.path / META).read_text(encoding="utf-8"))
        item = np.dtype(self.meta.dtype).newbyteorder("<")
        self._maps: dict[str, np.ndarray] = {}
        for name, split in (("train", self.meta.train), ("val", self.meta.val)):
            file = self.path / f"{name}.bin"
            size = file.stat().st_size if file.is_file() else -1
            if size != split.tokens * item.itemsize or sha256(file) != split.sha256:
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
