"""The model that a command gets: a model folder, a checkpoint, or the folder of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from atomrl.cli.arguments import check_config, check_exists


def check_inputs(arguments: argparse.Namespace) -> None:
    """Check that the files of `--config` and `--data` exist, before the libraries that read them are imported. For the
    folder of a run take its model, and its config unless another is given.

    Raises:
        ValueError: one does not exist, or the run has no model yet.
    """
    run = Path(vars(arguments)["model.path"])
    if (run / "config.yaml").is_file() and not (run / "config.json").is_file():
        model = model_folder(run)
        if model == run:
            raise ValueError(f"{run} has no model and no complete checkpoint")
        vars(arguments)["model.path"] = str(model)
        arguments.config = arguments.config or str(run)
    if arguments.config is not None:
        from atomrl.common.yaml_files import config_file

        check_config(arguments)
        arguments.config = config_file(arguments.config)
    data = getattr(arguments, "data.eval", None)
    if data is not None:
        check_exists(data, "--data: data file")


def model_folder(path: Path) -> Path:
    """Return the folder of the model of a run: the final one, or its newest complete checkpoint; else `path` itself."""
    if (path / "model").is_dir():
        return path / "model"
    if not (path / "checkpoints").is_dir():
        return path
    from atomrl.tracking.checkpoints import checkpoint_fault, step_folders

    folders = step_folders(path / "checkpoints")
    return next((folder for _, folder in reversed(folders) if checkpoint_fault(folder) is None), path)
