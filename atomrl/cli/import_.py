"""Turn what other projects have into what this one takes: a checkpoint into a model folder, a config into a config.

Nothing in what is read is executed.

atomrl import nanogpt out/ckpt.pt gpt2-small
atomrl import nanogpt out/ckpt.pt gpt2-small --tokenizer FOLDER_WITH_GPT2S_TOKENIZER
atomrl import nanogpt out-shakespeare-char/ckpt.pt shakespeare --text data/shakespeare_char/input.txt
atomrl import config run_qwen.sh --from verl --out qwen.yaml
atomrl import config grpo.py --from trl --processes 8 --out grpo.yaml
atomrl import config dpo.yaml --from trl --trainer dpo --out our_dpo.yaml
atomrl import config train_ppo.sh --from openrlhf --out ppo.yaml
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atomrl.files import check_writable, new_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("nanogpt", "config"), help="what is read")
    parser.add_argument("source", type=Path, metavar="FILE", help="a checkpoint; of config: YAML, .sh, or TRL's .py")
    parser.add_argument("folder", type=Path, nargs="?", metavar="OUT", help="of nanogpt: the folder to write")
    add = parser.add_argument_group("nanogpt").add_argument
    add("--tokenizer", metavar="gpt2|FOLDER", help="default: gpt2 where the vocabulary is GPT-2's")
    add("--text", type=Path, metavar="FILE", help="the text of a character model: its characters")
    add("--characters", type=Path, metavar="FILE", help="they as JSON: a list, or nanoGPT's stoi")
    add = parser.add_argument_group("config").add_argument
    add("--from", dest="library", choices=("verl", "trl", "openrlhf"), help="whose config it is")
    add("--out", type=Path, metavar="FILE", help="the YAML file to write")
    add("--trainer", choices=("grpo", "sft", "dpo", "reward"), help="of TRL, where the file does not say whose it is")
    add("--processes", type=int, metavar="N", help="of TRL, where the file does not say how many there are")


def run(arguments: argparse.Namespace) -> int:
    return import_config(arguments) if arguments.kind == "config" else import_nanogpt(arguments)


def import_config(arguments: argparse.Namespace) -> int:
    """Write another library's config as one of ours, and say what became of every key."""
    from atomrl.config import ConfigError
    from atomrl.importers import import_config as read

    if arguments.library is None or arguments.out is None or arguments.folder is not None:
        raise ConfigError("atomrl import config FILE --from verl|trl|openrlhf --out FILE")
    if arguments.out.exists():
        raise ConfigError(f"{arguments.out} exists already; name another --out")
    check_writable(arguments.out)
    imported = read(arguments.source, arguments.library, arguments.processes, arguments.trainer)
    arguments.out.write_text(imported.yaml(), encoding="utf-8")
    print(imported.report())
    print(
        f"{arguments.out} is written; what it means: `atomrl explain {arguments.out}`, "
        f"`atomrl {imported.config.kind} {arguments.out} --dry-run`"
    )
    return 0


def import_nanogpt(arguments: argparse.Namespace) -> int:
    """Turn a checkpoint of nanoGPT into a folder in Hugging Face layout."""
    from atomrl.config import ConfigError
    from atomrl.models.nanogpt import read_nanogpt, to_gpt2

    if arguments.folder is None:
        raise ConfigError("atomrl import nanogpt CKPT.pt OUT")
    with new_folder(arguments.folder) as folder:
        sizes, weights = read_nanogpt(arguments.source)
        tokenizer = tokenizer_for(arguments, sizes)
        model = to_gpt2(sizes, weights, tokenizer.eos_token_id)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{arguments.folder}: GPT-2 of {sizes['n_layer']} layers, {count:,} parameters, {len(tokenizer)} tokens")
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
