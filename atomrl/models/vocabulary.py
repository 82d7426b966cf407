"""Tokenizers for plain text: characters, and GPT-2's."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.config import ConfigError
from atomrl.models.tokenizer import SPECIAL_TOKENS, chat_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def text_tokenizer(name: str, characters: Sequence[str] = ()) -> Any:
    """The tokenizer of a name: `char`, `gpt2`, or what `load_tokenizer` takes; also GPT-2's files by themselves.

    Args:
        name: `gpt2` downloads GPT-2's vocabulary through tiktoken. Without a network: a folder with a Hugging Face
            tokenizer, with GPT-2's `encoder.json` and `vocab.bpe` (or `vocab.json` and `merges.txt`), or a file
            `*.tiktoken`.
        characters: of the text, for `char`.

    Raises:
        ConfigError: it is not there, and what to do.
    """
    path = Path(name)
    if name == "char":
        return char_tokenizer(characters)
    if path.suffix in (".pkl", ".pickle"):
        raise ConfigError(
            f"{name} is a pickle, which can run code when it is opened; give the text that the characters come from "
            "(--text FILE), or the characters as JSON (--characters FILE)"
        )
    if name == "gpt2" and not path.exists():
        return byte_pair_tokenizer(_downloaded_ranks())
    if path.is_file():
        return byte_pair_tokenizer(_read_ranks(path))
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        if (path / vocabulary).is_file() and (path / merges).is_file() and not (path / "tokenizer.json").is_file():
            return _from_merges(path / vocabulary, path / merges)
    from atomrl.models.loading import load_tokenizer

    tokenizer = load_tokenizer(name)
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer of {name} has no tokenizer.json, which a token file needs")
    return tokenizer


def char_tokenizer(characters: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token for each character; any other is written as the tokens of its bytes. With a chat template.

    Returns:
        Pad is 0, end of sequence 1; then the tokens of the chat template, the characters, and 256 bytes.

    Example:
        >>> tokenizer = char_tokenizer(["a", "b", "é"])
        >>> tokenizer.convert_ids_to_tokens(tokenizer("abé!")["input_ids"])
        ['a', 'b', 'é', '<0x21>']
        >>> tokenizer.decode(tokenizer("ab é!")["input_ids"])
        'ab é!'
    """
    tokens = [*SPECIAL_TOKENS, *characters, *(f"<0x{byte:02X}>" for byte in range(256))]
    return chat_tokenizer(_characters({token: index for index, token in enumerate(tokens)}, byte_fallback=True))


def plain_char_tokenizer(ids: Mapping[str, int]) -> PreTrainedTokenizerFast:
    """Characters with the ids of a model that has no other token: nanoGPT's. Other characters have no token at all,
    and are left out of a text; there is no end-of-sequence token.

    Example:
        >>> plain_char_tokenizer({"a": 0, "b": 1})("abba")["input_ids"]
        [0, 1, 1, 0]
    """
    return _wrapped(_characters(ids, byte_fallback=False))


def byte_pair_tokenizer(ranks: Mapping[bytes, int]) -> PreTrainedTokenizerFast:
    """GPT-2's way of byte-pair encoding, from tiktoken's table of token -> rank.

    Example:
        >>> ranks = {bytes([byte]): byte for byte in range(256)} | {b"he": 256, b"ll": 257, b"hell": 258}
        >>> byte_pair_tokenizer(ranks)("hello")["input_ids"]
        [258, 111]
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    written = bytes_to_unicode()  # printable bytes as themselves, others as letters

    def text(token: bytes) -> str:
        return "".join(written[byte] for byte in token)

    merges = [_last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    return _gpt2({text(token): rank for token, rank in ranks.items()}, [(text(a), text(b)) for a, b in merges])


def read_characters(path: str | Path) -> dict[str, int]:
    """Characters and their ids from JSON: a list or text in the order of the ids, or an object (nanoGPT's `stoi`).

    Raises:
        ConfigError: the file is absent or holds something else.
    """
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--characters {path}: not readable as JSON: {error}") from None
    tree = tree.get("stoi", tree) if isinstance(tree, dict) else tree
    ids = {character: index for index, character in enumerate(tree)} if isinstance(tree, list | str) else tree
    if not isinstance(ids, dict) or any(not isinstance(c, str) or len(c) != 1 for c in ids):
        raise ConfigError(f"--characters {path}: must hold single characters, as a list or as an object of their ids")
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str):
        raise ConfigError(f"--characters {path}: the ids must be 0 to {len(ids) - 1}, each once")
    return ids


def _characters(ids: Mapping[str, int], byte_fallback: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE(dict(ids), merges=[], byte_fallback=byte_fallback))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _gpt2(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _wrapped(tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def _wrapped(tokenizer: Any, **special: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that become this token in the last merge: those left when only lower ranks are merged."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, ranks[token]), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, index = min(pairs)
        if rank >= ranks[token]:
            raise ConfigError(f"the table of ranks has no way to make the token {token!r}")
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts[0], parts[1]


def _from_merges(vocabulary: Path, merges: Path) -> PreTrainedTokenizerFast:
    from tokenizers import models

    try:
        return _gpt2(*models.BPE.read_file(str(vocabulary), str(merges)))
    except Exception as error:  # tokenizers raises plain exceptions
        raise ConfigError(f"{vocabulary} and {merges} are no GPT-2 vocabulary: {error}") from None


def _read_ranks(path: Path) -> dict[bytes, int]:
    """A file of tiktoken: a token in base 64 and its rank on each line."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no *.tiktoken file of tokens in base 64 and ranks: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ConfigError(f"{path} is no whole table of ranks: they must be 0, 1, 2, ... and have every byte")
    return ranks


def _downloaded_ranks() -> dict[bytes, int]:
    """GPT-2's table, which tiktoken downloads once."""
    try:
        import tiktoken
    except ImportError:
        raise ConfigError("the gpt2 tokenizer needs tiktoken: pip install 'atomrl[pretrain]'") from None
    try:
        return tiktoken.get_encoding("gpt2")._mergeable_ranks
    except Exception as error:  # those of requests, and its own
        raise ConfigError(
            f"tiktoken could not download GPT-2's vocabulary ({type(error).__name__}). Without a network give in place "
            "of `gpt2` a folder that has it (tokenizer.json, or encoder.json and vocab.bpe, or vocab.json and "
            "merges.txt) or a file r50k_base.tiktoken; or set TIKTOKEN_CACHE_DIR to a folder where tiktoken keeps it"
        ) from None
