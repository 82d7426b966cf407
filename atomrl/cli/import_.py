"""`atomrl import`: convert a script, config or checkpoint of another library."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.cli.main import Run
from atomrl.common.files import check_writable, new_folder

if TYPE_CHECKING:
    from atomrl.tools.importers import Imported

OF_CONFIGS = ("library", "trainer", "processes", "gpus", "memory")
OF_CHECKPOINTS = ("tokenizer", "text", "characters")


def add_import(parser: argparse.ArgumentParser) -> Run:
    """Convert a script, config or checkpoint of another library.

    A shell script or YAML file of TRL, verl, OpenRLHF, LLaMA-Factory or SkyRL becomes a config, with its rewards in a
    file beside it. A report lists what every key was converted to, and where the run will differ. Nothing in the file
    is executed; a Python script is converted by running it, with atomrl run. --gpus and --memory adapt the config to
    other hardware than the script's. A checkpoint of nanoGPT (*.pt) becomes a model folder.

    atomrl import run_qwen.sh --out qwen.yaml --gpus 1 --memory 24GiB
    atomrl import dpo.yaml --trainer dpo --processes 8 --out our_dpo.yaml
    atomrl import out/ckpt.pt --out gpt2-small
    atomrl import out-shakespeare-char/ckpt.pt --out shakespeare --text data/shakespeare_char/input.txt
    """
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML or .sh; or nanoGPT's ckpt.pt")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="OUT", help="the YAML file, or model folder, to write"
    )
    add = parser.add_argument_group("scripts and configs").add_argument
    add(
        "--from",
        dest="library",
        choices=("verl", "trl", "openrlhf", "llamafactory", "skyrl"),
        help="library of the file, if it cannot be inferred",
    )
    add("--trainer", choices=("grpo", "rloo", "sft", "dpo", "reward"), help="TRL trainer, if it cannot be inferred")
    add("--processes", type=int, metavar="N", help="number of TRL's processes, if it cannot be inferred")
    add("--gpus", type=int, metavar="N", help="number of GPUs to plan for, instead of the script's")
    add("--memory", metavar="SIZE", help="memory of each GPU, as in 24GiB, or its name: 4090")
    add = parser.add_argument_group("checkpoints of nanoGPT").add_argument
    add("--tokenizer", metavar="gpt2|FOLDER", help="default: gpt2 if the vocabulary is GPT-2's")
    add("--text", type=Path, metavar="FILE", help="text of a character model, for its vocabulary")
    add("--characters", type=Path, metavar="FILE", help="its vocabulary as JSON: a list, or nanoGPT's stoi")
    return import_file


def import_file(arguments: argparse.Namespace) -> int:
    """Import a config or, by the suffix .pt, a checkpoint. Options of the other kind are errors."""
    checkpoint = arguments.file.suffix == ".pt"
    for name in OF_CONFIGS if checkpoint else OF_CHECKPOINTS:
        if getattr(arguments, name) is not None:
            option = "--from" if name == "library" else f"--{name}"
            raise ValueError(
                f"{option} is for {'scripts and configs' if checkpoint else 'checkpoints of nanoGPT (*.pt)'}"
            )
    return import_nanogpt(arguments) if checkpoint else import_config(arguments)


def import_config(arguments: argparse.Namespace) -> int:
    """Convert another library's script or config, and print the report on its keys."""
    from atomrl.config import ConfigError
    from atomrl.tools.importers import import_config as read

    imported = read(arguments.file, arguments.library, arguments.processes, arguments.trainer, arguments.out)
    if arguments.gpus is not None or arguments.memory is not None:
        imported = adapt_to_hardware(imported, 1 if arguments.gpus is None else arguments.gpus, arguments.memory)
    texts = {arguments.out: imported.yaml()}
    texts |= {arguments.out.parent / name: text for name, text in imported.files.items()}
    for path in texts:
        if path.exists():
            raise ConfigError(f"{path} already exists; remove it, or set another --out")
        check_writable(path)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(imported.report())
    count = len(imported.to_do)
    to_do = f"; {count} {'item' if count == 1 else 'items'} left to you, above" if count else ""
    print(
        f"{', '.join(map(str, texts))}: written{to_do}. What it means: `atomrl explain {arguments.out}`; whether it "
        f"runs: `atomrl train {arguments.out} --dry-run`"
    )
    return 0


def adapt_to_hardware(imported: Imported, gpus: int, memory: str | None) -> Imported:
    """Adapt an imported config to other hardware than the script's; its `hardware` note states the cost.

    Args:
        gpus: number of GPUs.
        memory: memory of each, or the name of the card; None: only the number changes.

    Raises:
        ConfigError: the card or the model's shape is unknown, or no setting makes it fit.
    """
    from atomrl.cli.plan import trade_lines
    from atomrl.common.memory import readable
    from atomrl.config import ConfigError, load_config, merge_trees
    from atomrl.planner.fit import find_fitting, merged
    from atomrl.planner.gpus import gpu_of
    from atomrl.planner.plan import plan_on

    if gpus < 1:
        raise ConfigError(f"--gpus {gpus}: must be at least 1")
    tree = {key: value for key, value in imported.tree.items() if key != "backend"}
    tree |= {"backend": {"type": "fsdp"}} if gpus > 1 else {}
    config = load_config(tree, name=str(imported.source))
    hardware = f"{imported.gpus} GPU{'s' * (imported.gpus > 1)}"
    if memory is None:
        note = f"{hardware} in the script, {gpus} here: the same batches and numbers; --memory SIZE plans what fits"
        return replace(imported, tree=tree, config=config, hardware=note)
    # Plan for the new GPUs, and the script's own number of them for comparison.
    gpu = gpu_of(f"{gpus}x{memory}")
    plan = plan_on(config, gpu)
    theirs = plan_on(load_config({**tree, "backend": {"type": "fsdp"}}), replace(gpu, count=imported.gpus))
    solution = find_fitting(plan)
    if solution is None:
        raise ConfigError(
            f"{hardware} in the script: on {gpu} no setting makes it fit ({readable(plan.memory.peak).strip()} of "
            f"{readable(plan.budget).strip()}): use a smaller model, or more memory"
        )
    chosen, smaller = solution
    peak, budget = readable(smaller.memory.peak).strip(), readable(smaller.budget).strip()
    others = f" instead of {theirs.step_seconds:.0f} s on {imported.gpus} of these GPUs" if imported.gpus > 1 else ""
    note = f"{hardware} in the script, planned for {gpu}: {peak} of {budget} at the longest rows; a step takes "
    note += f"{smaller.step_seconds:.0f} s{others} (estimated, every completion at its limit)"
    note += "; changed for it: " + ", ".join(map(str, chosen)) if chosen else "; the same batches and numbers"
    tree = merge_trees(tree, merged(chosen))
    return replace(
        imported,
        tree=tree,
        config=load_config(tree, name=str(imported.source)),
        hardware=note,
        planned=tuple(trade_lines(plan, chosen)),
    )


def import_nanogpt(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint of nanoGPT into a model folder in Hugging Face layout."""
    from atomrl.models.nanogpt import read_nanogpt, to_gpt2
    from atomrl.models.older_readers import make_readable

    source, target = arguments.file, arguments.out
    with new_folder(target) as folder:
        sizes, weights = read_nanogpt(source)
        tokenizer = tokenizer_for(arguments, sizes)
        model = to_gpt2(sizes, weights, tokenizer.eos_token_id)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        make_readable(folder)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{target}: GPT-2 of {sizes['n_layer']} layers, {count:,} parameters, {len(tokenizer)} tokens")
    return 0


def tokenizer_for(arguments: argparse.Namespace, sizes: Mapping[str, int]) -> Any:
    """Load the tokenizer of an option, or GPT-2's if the model has its vocabulary.

    Raises:
        ConfigError: no option is given and the vocabulary is not GPT-2's, or the tokenizer does not fit the model.
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
            f"the vocabulary of {size} is not GPT-2's: set --tokenizer. For a character model give the text that "
            "it was trained on (--text input.txt), or its characters as JSON (--characters FILE): nanoGPT keeps them "
            "in meta.pkl, a pickle, which is not opened because this can run code"
        )
    tokenizer = text_tokenizer(arguments.tokenizer or "gpt2")
    if len(tokenizer) > size:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, but the model a vocabulary of {size}")
    return tokenizer
