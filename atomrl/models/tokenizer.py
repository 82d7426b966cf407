"""Tokenizers for models from scratch: words and bytes, characters, and GPT-2's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

GPT2 = "openai-community/gpt2"
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + ('<|end|>' if message['role'] == 'assistant' else '') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Create a tokenizer with a token for each word and each byte, and a chat template.

    Args:
        words: texts that are one token each. They are not special tokens, so decoding keeps them.

    Returns:
        A tokenizer that is saved as an ordinary `tokenizer.json`. Pad is 0, end of sequence 1.

    Example:
        >>> tokenizer = make_tokenizer(["<think>"])
        >>> tokenizer.convert_ids_to_tokens(tokenizer("<think>2+2")["input_ids"])
        ['<think>', '2', '+', '2']
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    return chat_tokenizer(tokenizer)


def chat_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Add SPECIAL_TOKENS and a chat template to a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        extra_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def text_tokenizer(name: str, characters: Sequence[str] = ()) -> Any:
    """Load a tokenizer by name: `char`, `gpt2`, or a folder or hub name.

    Args:
        name: `gpt2` is downloaded from the hub. Without a network, give a folder with a Hugging Face tokenizer, or with
            GPT-2's `encoder.json` and `vocab.bpe` (or `vocab.json` and `merges.txt`).
        characters: characters of the text, for `char`.

    Raises:
        ConfigError: the tokenizer does not exist or cannot be used.
    """
    from transformers import GPT2Tokenizer

    from atomrl.models.loading import load_tokenizer

    path = Path(name)
    if name == "char":
        return char_tokenizer(characters)
    if path.suffix in (".pkl", ".pickle"):
        raise ConfigError(
            f"{name} is a pickle, which can run code when it is opened; give the text with the characters (--text "
            "FILE), or the characters as JSON (--characters FILE)"
        )
    if path.is_file():
        raise ConfigError(f"the tokenizer {name} is a file: give the folder that has it, or a hub name")
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        if (path / vocabulary).is_file() and (path / merges).is_file() and not (path / "tokenizer.json").is_file():
            # tokenizers raises plain exceptions
            with reraise_as(ConfigError, f"{vocabulary} and {merges} in {path} are not a GPT-2 vocabulary", Exception):
                return GPT2Tokenizer(str(path / vocabulary), str(path / merges), pad_token="<|endoftext|>")
    try:
        tokenizer = load_tokenizer(GPT2 if name == "gpt2" and not path.exists() else name)
    except ConfigError as error:
        hint = "; without a network give a folder with encoder.json and vocab.bpe, or vocab.json and merges.txt"
        raise ConfigError(f"{error}{hint if name == 'gpt2' else ''}") from None
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer of {name} has no tokenizer.json, which a token file needs")
    return tokenizer


def char_tokenizer(characters: Sequence[str]) -> PreTrainedTokenizerFast:
    """Create a tokenizer with a token for each character, byte fallback for others, and a chat template.

    Returns:
        Ids: pad 0, end of sequence 1, the tokens of the chat template, the characters, 256 bytes.

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
    """Create nanoGPT's character tokenizer from its ids.

    Characters without an id are dropped from a text. There is no end-of-sequence token.

    Example:
        >>> plain_char_tokenizer({"a": 0, "b": 1})("abba")["input_ids"]
        [0, 1, 1, 0]
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = _characters(ids, byte_fallback=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def read_characters(path: str | Path) -> dict[str, int]:
    """Read characters and their ids from JSON: a list or string in order of the ids, or an object (nanoGPT's `stoi`).

    Raises:
        ConfigError: the file does not exist or has other content.
    """
    with reraise_as(ConfigError, f"--characters {path}: not readable as JSON", OSError, ValueError):
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    tree = tree.get("stoi", tree) if isinstance(tree, dict) else tree
    ids = {character: index for index, character in enumerate(tree)} if isinstance(tree, list | str) else tree
    if not isinstance(ids, dict) or any(not isinstance(c, str) or len(c) != 1 for c in ids):
        raise ConfigError(
            f"--characters {path}: must contain single characters, as a list or as an object of their ids"
        )
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str):
        raise ConfigError(f"--characters {path}: the ids must be 0 to {len(ids) - 1}, each once")
    return ids


def _characters(ids: Mapping[str, int], byte_fallback: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE(dict(ids), merges=[], byte_fallback=byte_fallback))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
