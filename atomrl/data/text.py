"""Plain text for pretraining: read as a stream, tokenized into a folder, and drawn as windows of tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from atomrl.data.files import DataError

CHUNK_CHARACTERS = 2**16


def text_chunks(path: str | Path, characters: int = CHUNK_CHARACTERS) -> Iterator[str]:
    """Yield the text of a UTF-8 file in chunks of about `characters`, so that it need not fit into memory.

    Joined, the chunks are the file. A chunk ends with a single line end between two words where possible: no tokenizer
    that splits at white space has a token across it, so the chunks have the tokens of the whole text. A byte-order
    mark is dropped; line ends are unchanged.

    Raises:
        DataError: the file does not exist, is empty, or is not UTF-8 (with the byte).
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
    """Return where to cut; 0 to read more first. A text without line ends is cut at white space, else anywhere."""
    at = len(text) - 1
    while (at := text.rfind("\n", 1, at)) > 0:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
    if len(text) < 4 * CHUNK_CHARACTERS:
        return 0
    return text.rfind(" ") if " " in text[len(text) // 2 :] else len(text)


def distinct_characters(paths: Sequence[str | Path]) -> list[str]:
    """Return all characters of some files, sorted by code point."""
    characters: set[str] = set()
    for path in paths:
        for chunk in text_chunks(path):
            characters |= set(chunk)
    return sorted(characters)
