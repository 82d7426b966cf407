"""A run's folder and state: opening both, and what a checkpoint has beside model and optimizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atomrl.config import RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.stream import PromptStream
from atomrl.loop.sync import Progress, Save
from atomrl.models.loading import resolve_folder
from atomrl.protocols import TrainingBackend
from atomrl.tracking.resume import identity_changes, model_identity, tokenizer_identity
from atomrl.tracking.run_directory import RunDirectory

STATE = "progress.json"
"""In every checkpoint: how far the run is, and what it was trained on."""


def identity(stream: PromptStream, processor: DataProcessor, model: str | Path) -> dict[str, str]:
    """Hashes of what a config only names: the problems, the prompt made of the first of them (chat template, system
    prompt), tokenizer and model."""
    first = [prompt.token_ids for prompt in processor.to_prompts([("0", stream.samples[0])])]
    return {
        "data (data.train)": stream.fingerprint,
        "prompts (chat template, system prompt)": hashlib.sha256(repr(tuple(first)).encode()).hexdigest(),
        "tokenizer (model.tokenizer, or beside model.path)": tokenizer_identity(processor.tokenizer),
        "model (model.path)": model_identity(resolve_folder(model)),
    }


def open_run(
    config: RunConfig, resume: bool, now: Mapping[str, str], allow_changes: bool = False
) -> tuple[RunDirectory, Progress]:
    """The run's folder, and how far it is.

    Args:
        now: hashes of what the run trains on (`identity`).
        allow_changes: resume although config or identity differ.

    Raises:
        ConfigError: the folder exists (or not, to resume), or something differs.
    """

    def differs(checkpoint: Path) -> list[str]:
        return identity_changes(_state(checkpoint)["identity"], now)

    run = RunDirectory.create(config, resume, allow_changes, differs)
    if run.first_step == 1:
        return run, Progress()
    state = _state(run.checkpoint_folder(run.first_step - 1))
    del state["identity"]
    return run, Progress(**state)


def saver(trainer: TrainingBackend, now: Mapping[str, str]) -> Save:
    """Writes model, optimizer and progress into a folder."""

    def save(folder: Path, progress: Progress) -> None:
        trainer.save(folder)
        state = asdict(progress) | {"identity": dict(now)}
        (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    return save


def _state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state
