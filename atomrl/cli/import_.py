"""Turn what other projects have into what this one takes: a script or config into a config, a checkpoint into a folder.

A script of TRL, verl or OpenRLHF becomes a config, with its rewards in a file beside it; a report says what became of
every key, and in which numbers the run will differ. Nothing in what is read is executed. --gpus and --memory plan it
anew for other hardware than the script's.

atomrl import grpo.py --out grpo.yaml
atomrl import run_qwen.sh --out qwen.yaml --gpus 1 --memory 24GiB
atomrl import dpo.yaml --trainer dpo --processes 8 --out our_dpo.yaml
atomrl import train.py --out train.yaml -- --model_name_or_path Qwen/Qwen2.5-0.5B --learning_rate 1e-5
atomrl import nanogpt out/ckpt.pt gpt2-small
atomrl import nanogpt out/ckpt.pt gpt2-small --tokenizer FOLDER_WITH_GPT2S_TOKENIZER
atomrl import nanogpt out-shakespeare-char/ckpt.pt shakespeare --text data/shakespeare_char/input.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.files import check_writable, new_folder

if TYPE_CHECKING:
    from atomrl.importers import Imported

USAGE = "atomrl import FILE --out FILE, or atomrl import nanogpt CKPT.pt OUT"


def prepare(arguments: list[str]) -> list[str]:
    """Each flag behind `--`, which are those of the script, as one of `--flag`."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:place], *(f"--flag={word}" for word in arguments[place + 1 :])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="FILE", help="YAML, .sh, or TRL's .py; or: nanogpt CKPT.pt OUT")
    add = parser.add_argument_group("scripts and configs").add_argument
    add("--out", type=Path, metavar="FILE", help="the YAML file to write")
    add("--from", dest="library", choices=("verl", "trl", "openrlhf"), help="whose it is, where the file does not say")
    add("--trainer", choices=("grpo", "rloo", "sft", "dpo", "reward"), help="of TRL, where the file does not say")
    add("--processes", type=int, metavar="N", help="of TRL, where the file does not say how many there are")
    add("--gpus", type=int, metavar="N", help="plan for so many GPUs, in place of the script's")
    add("--memory", metavar="SIZE", help="what each of them has, as in 24GiB, or which card: 4090")
    add("--flag", action="append", default=[], help=argparse.SUPPRESS)
    add = parser.add_argument_group("nanogpt").add_argument
    add("--tokenizer", metavar="gpt2|FOLDER", help="default: gpt2 where the vocabulary is GPT-2's")
    add("--text", type=Path, metavar="FILE", help="the text of a character model: its characters")
    add("--characters", type=Path, metavar="FILE", help="they as JSON: a list, or nanoGPT's stoi")


def run(arguments: argparse.Namespace) -> int:
    return import_nanogpt(arguments) if arguments.words[0] == "nanogpt" else import_config(arguments)


def import_config(arguments: argparse.Namespace) -> int:
    """Write another library's script or config as one of ours, and say what became of every key."""
    from atomrl.config import ConfigError
    from atomrl.importers import import_config as read

    if arguments.out is None or len(arguments.words) != 1:
        raise ConfigError(USAGE)
    imported = read(
        arguments.words[0], arguments.library, arguments.processes, arguments.trainer, arguments.out, arguments.flag
    )
    if arguments.gpus is not None or arguments.memory is not None:
        imported = planned(imported, 1 if arguments.gpus is None else arguments.gpus, arguments.memory)
    texts = {arguments.out: imported.yaml()}
    texts |= {arguments.out.parent / name: text for name, text in imported.files.items()}
    for path in texts:
        if path.exists():
            raise ConfigError(f"{path} exists already; remove it, or name another --out")
        check_writable(path)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(imported.report())
    count = len(imported.to_do)
    left = f"; {count} {'thing is' if count == 1 else 'things are'} left to you, above" if count else ""
    print(
        f"{', '.join(map(str, texts))}: written{left}. What it means: `atomrl explain {arguments.out}`; "
        "whether it runs: "
        f"`atomrl {imported.config.kind} {arguments.out} --dry-run`"
    )
    return 0


def planned(imported: Imported, gpus: int, memory: str | None) -> Imported:
    """The config for other hardware than the script's, with the price in the first line.

    Args:
        gpus: how many there are.
        memory: of each, or which card; None: the number alone changes.

    Raises:
        ConfigError: there is no such card, the model's shape is not known, or no setting makes it fit.
    """
    from atomrl.cli.plan import trade_lines
    from atomrl.config import ConfigError, build_config, merge_trees
    from atomrl.runs.base import readable
    from atomrl.runs.fitting import fit, merged, plan_on
    from atomrl.runs.hardware import gpu_of

    if gpus < 1:
        raise ConfigError(f"--gpus {gpus}: give one at least")
    tree = {key: value for key, value in imported.tree.items() if key != "backend"}
    tree |= {"backend": {"type": "fsdp"}} if gpus > 1 else {}
    config = build_config(tree, str(imported.source))
    asked = f"{imported.gpus} GPU{'s' * (imported.gpus > 1)}"
    if memory is None:
        said = f"{asked} in the script, {gpus} here: the same batches and numbers; --memory SIZE plans what fits"
        return replace(imported, tree=tree, config=config, hardware=said)
    gpu = gpu_of(f"{gpus}x{memory}")
    plan = plan_on(config, gpu)
    theirs = plan_on(build_config({**tree, "backend": {"type": "fsdp"}}), replace(gpu, count=imported.gpus))
    found = fit(plan)
    if found is None:
        raise ConfigError(
            f"{asked} in the script: on {gpu} no setting makes it fit ({readable(plan.memory.peak).strip()} of "
            f"{readable(plan.budget).strip()}): take a smaller model, or more memory"
        )
    chosen, smaller = found
    taken, most = readable(smaller.memory.peak).strip(), readable(smaller.budget).strip()
    others = f" in place of {theirs.step_seconds:.0f} s on {imported.gpus} such cards" if imported.gpus > 1 else ""
    said = f"{asked} in the script, planned for {gpu}: {taken} of {most} at the longest rows; a step takes "
    said += f"{smaller.step_seconds:.0f} s{others} (estimated, every completion at its limit)"
    said += "; changed for it: " + ", ".join(map(str, chosen)) if chosen else "; the same batches and numbers"
    tree = merge_trees(tree, merged(chosen))
    return replace(
        imported,
        tree=tree,
        config=build_config(tree, str(imported.source)),
        hardware=said,
        planned=tuple(trade_lines(plan, chosen)),
    )


def import_nanogpt(arguments: argparse.Namespace) -> int:
    """Turn a checkpoint of nanoGPT into a folder in Hugging Face layout."""
    from atomrl.config import ConfigError
    from atomrl.models.nanogpt import read_nanogpt, to_gpt2

    if len(arguments.words) != 3:
        raise ConfigError(USAGE)
    source, target = map(Path, arguments.words[1:])
    with new_folder(target) as folder:
        sizes, weights = read_nanogpt(source)
        tokenizer = tokenizer_for(arguments, sizes)
        model = to_gpt2(sizes, weights, tokenizer.eos_token_id)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{target}: GPT-2 of {sizes['n_layer']} layers, {count:,} parameters, {len(tokenizer)} tokens")
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
