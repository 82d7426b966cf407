"""Write a checkpoint as a plain model folder that transformers and serving engines load; adapters are merged.

atomrl export runs/quickstart/checkpoints/step_000100 my_model
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

TRAINER_FILES = ("MANIFEST.json", "progress.json")
"""Beside its folders, what only the trainer reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument("--base", help="the model under the adapters, where it is not where it was")


def run(arguments: argparse.Namespace) -> int:
    checkpoint, out = arguments.checkpoint, arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; name a new folder")
    adapters = (checkpoint / "adapter_config.json").is_file()
    if not adapters and not (checkpoint / "config.json").is_file():
        raise ValueError(f"{checkpoint} is no checkpoint: it has neither config.json nor adapter_config.json")
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if adapters:
            from atomrl.models.lora import export

            export(checkpoint, aside, base=arguments.base)
        else:
            folders = {path.name for path in checkpoint.iterdir() if path.is_dir()}
            shutil.copytree(checkpoint, aside, ignore=shutil.ignore_patterns(*TRAINER_FILES, *folders))
        if out.exists():
            out.rmdir()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(out)
    return 0
