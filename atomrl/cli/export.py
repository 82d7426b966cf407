"""Write a checkpoint as a plain model folder that transformers and serving engines load; adapters are merged.

atomrl export runs/quickstart/checkpoints/step_000060 my_model
"""

import argparse
import shutil
import sys
from pathlib import Path

from atomrl.files import new_folder

TRAINER_FILES = ("MANIFEST.json", "progress.json")
"""Beside its folders, what only the trainer reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument("--base", help="the model under the adapters, where it is not where it was")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="code beside that model may run, as in training"
    )


def run(arguments: argparse.Namespace) -> int:
    checkpoint, out, merged = arguments.checkpoint, arguments.out, ""
    with new_folder(out) as folder:
        if (checkpoint / "adapter_config.json").is_file():
            from atomrl.models.lora import export

            error = export(checkpoint, folder, arguments.base, arguments.trust_remote_code)
            merged = (
                f"adapters add {error.added:.2%} to the weights; rounding what is written loses {error.rounding:.2%}"
            )
            if error.quantization:
                merged += (
                    f"; those of the {error.quantization} base, which are kept, are {error.of_base:.2%} off its own"
                )
        elif (checkpoint / "config.json").is_file():
            for path in checkpoint.iterdir():
                if path.is_file() and path.name not in TRAINER_FILES:
                    shutil.copy2(path, folder)
        else:
            run = f"; it is a run, whose model is {checkpoint / 'model'}" if (checkpoint / "model").is_dir() else ""
            raise ValueError(f"{checkpoint} is no checkpoint: it has neither config.json nor adapter_config.json{run}")
    if merged:
        print(merged, file=sys.stderr)
    print(out)
    return 0
