"""Write a checkpoint as a plain model folder that transformers and serving engines load; adapters are merged.

atomrl export runs/quickstart/checkpoints/step_000100 my_model
"""

import argparse
import shutil
from pathlib import Path

from atomrl.files import new_folder

TRAINER_FILES = ("MANIFEST.json", "progress.json")
"""Beside its folders, what only the trainer reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument("--base", help="the model under the adapters, where it is not where it was")


def run(arguments: argparse.Namespace) -> int:
    checkpoint, out = arguments.checkpoint, arguments.out
    with new_folder(out) as folder:
        if (checkpoint / "adapter_config.json").is_file():
            from atomrl.models.lora import export

            export(checkpoint, folder, base=arguments.base)
        elif (checkpoint / "config.json").is_file():
            for path in checkpoint.iterdir():
                if path.is_file() and path.name not in TRAINER_FILES:
                    shutil.copy2(path, folder)
        else:
            raise ValueError(f"{checkpoint} is no checkpoint: it has neither config.json nor adapter_config.json")
    print(out)
    return 0
