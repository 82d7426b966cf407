"""Turn a checkpoint of another project into a folder in Hugging Face layout. No code in the file is executed.

atomrl import nanogpt out/ckpt.pt gpt2-small
atomrl import nanogpt out/ckpt.pt gpt2-small --tokenizer FOLDER_WITH_GPT2S_TOKENIZER
atomrl import nanogpt out-shakespeare-char/ckpt.pt shakespeare --text data/shakespeare_char/input.txt
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atomrl.files import new_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("nanogpt",), help="what the checkpoint is")
    parser.add_argument("checkpoint", type=Path, metavar="CKPT.pt")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--tokenizer", metavar="gpt2|FOLDER", help="default: gpt2 where the vocabulary is GPT-2's")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text of a character model: its characters")
    parser.add_argument("--characters", type=Path, metavar="FILE", help="they as JSON: a list, or nanoGPT's stoi")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.models.nanogpt import read_nanogpt, to_gpt2

    with new_folder(arguments.out) as folder:
        sizes, weights = read_nanogpt(arguments.checkpoint)
        tokenizer = tokenizer_for(arguments, sizes)
        model = to_gpt2(sizes, weights, tokenizer.eos_token_id)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{arguments.out}: GPT-2 of {sizes['n_layer']} layers, {count:,} parameters, {len(tokenizer)} tokens")
    return 0


def tokenizer_for(arguments: argparse.Namespace, sizes: Mapping[str, int]) -> Any:
    """The tokenizer that was named, or GPT-2's for its vocabulary.

    Raises:
        ConfigError: none was named and the vocabulary is not GPT-2's, or it does not fit the model.
    """
    from atomrl.config import ConfigError
    from atomrl.data.text import distinct_characters
    from atomrl.models import nanogpt
    from atomrl.models.tokenizer import plain_char_tokenizer, read_characters, text_tokenizer

    size = sizes["vocab_size"]
    named = [name for name in ("tokenizer", "text", "characters") if getattr(arguments, name) is not None]
    if len(named) > 1:
        raise ConfigError(f"give one of --{' and --'.join(named)}")
    if arguments.text or arguments.characters:
        if arguments.characters:
            ids = read_characters(arguments.characters)
        else:
            ids = {character: index for index, character in enumerate(distinct_characters([arguments.text]))}
        if len(ids) != size:
            raise ConfigError(f"--{named[0]}: {len(ids)} characters, but the model has a vocabulary of {size}")
        return plain_char_tokenizer(ids)
    if not named and size not in (nanogpt.GPT2_VOCABULARY, nanogpt.GPT2_PADDED):
        raise ConfigError(
            f"the vocabulary of {size} is not GPT-2's, so name the tokenizer. For a character model give the text that "
            "it was trained on (--text input.txt), or its characters as JSON (--characters FILE): nanoGPT keeps them "
            "in meta.pkl, a pickle, which is not opened here because opening it can run code"
        )
    tokenizer = text_tokenizer(arguments.tokenizer or "gpt2")
    if len(tokenizer) > size:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, but the model a vocabulary of {size}")
    return tokenizer
