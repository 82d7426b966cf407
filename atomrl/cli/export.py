"""`atomrl export`: write a checkpoint as a plain model folder."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from atomrl.cli.main import Run
from atomrl.cli.model_argument import model_folder
from atomrl.common.files import new_folder


def add_export(parser: argparse.ArgumentParser) -> Run:
    """Write a checkpoint as a plain model folder that transformers and serving engines load; adapters are merged.

    For a RUN it is the run's model or, before the run has ended, its newest complete checkpoint.

    atomrl export runs/quickstart                                          # to runs/quickstart/exported
    atomrl export runs/quickstart my_model
    atomrl export runs/quickstart/checkpoints/step_000060 my_model
    """
    parser.add_argument("checkpoint", metavar="RUN|CHECKPOINT", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="a new folder (of a run: RUN/exported)")
    parser.add_argument("--base", help="base model of the adapters, if it was moved")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="allow code of the base model to run, as in training"
    )
    return export_model


def export_model(arguments: argparse.Namespace) -> int:
    """Copy the model's files, or merge its adapters and report the rounding error."""
    from atomrl.tracking.checkpoint_format import MANIFEST, PROGRESS

    checkpoint, note = model_folder(arguments.checkpoint), ""
    if checkpoint == arguments.checkpoint and arguments.out is None:
        raise ValueError(f"{checkpoint} is not the folder of a run: give OUT, a new folder")
    out = arguments.out or arguments.checkpoint / "exported"
    with new_folder(out) as folder:
        if (checkpoint / "adapter_config.json").is_file():
            from atomrl.models.lora import export

            error = export(checkpoint, folder, arguments.base, arguments.trust_remote_code)
            note = f"adapters change the weights by {error.added:.2%}; rounding error {error.rounding:.2%}"
            if error.quantization:
                note += f"; error of the {error.quantization} base, whose weights are exported: {error.of_base:.2%}"
        elif (checkpoint / "config.json").is_file():
            for path in checkpoint.iterdir():
                if path.is_file() and path.name not in (MANIFEST, PROGRESS):
                    shutil.copy2(path, folder)
        else:
            raise ValueError(f"{checkpoint} is not a checkpoint: it has neither config.json nor adapter_config.json")
    if note:
        print(note, file=sys.stderr)
    print(out)
    return 0
