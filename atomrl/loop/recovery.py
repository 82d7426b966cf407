"""A run's folder and state: opening both, and what a checkpoint has beside model and optimizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from atomrl.config import RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.stream import PromptStream
from atomrl.loop.sync import Progress, Save
from atomrl.models.loading import resolve_folder
from atomrl.protocols import TrainingBackend
from atomrl.tracking.resume import model_identity, tokenizer_identity
from atomrl.tracking.run_directory import RunDirectory

STATE = "progress.json"
"""In every checkpoint: how far the run is."""


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
    """The run's folder (`RunDirectory.create`; `now` is the `identity`), and how far it is."""
    run = RunDirectory.create(config, resume, allow_changes, now)
    if run.first_step == 1:
        return run, Progress()
    state = run.checkpoint_folder(run.first_step - 1) / STATE
    return run, Progress(**json.loads(state.read_text(encoding="utf-8")))


def saver(trainer: TrainingBackend) -> Save:
    """Writes model, optimizer and progress into a folder."""

    def save(folder: Path, progress: Progress) -> None:
        trainer.save(folder)
        (folder / STATE).write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")

    return save
