"""Plain text as a stream of chunks, so that a file larger than memory can be read."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from atomrl.data.problems import DataError

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
