"""The loop's parts with completions that a test writes, and a back end that only counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from atomrl.algorithms import objective_of
from atomrl.batches import RowBatch, TrainingBatch
from atomrl.common.metrics import Count, Metrics
from atomrl.config import DataConfig, RunConfig, load_config
from atomrl.data.curriculum import Curriculum, CurriculumState, RewardFilter
from atomrl.data.curriculum_setup import GROUP_FILTER
from atomrl.data.processor import DataProcessor
from atomrl.data.prompt_stream import PromptStream
from atomrl.engines.fake import FakeEngine
from atomrl.trainer.loop import Progress, Save, fit
from atomrl.trainer.rollout_training import RolloutTraining
from atomrl.trainer.sources import EngineSource
from atomrl.types import Problem, SamplingParams, Trajectory
from tests.tiny import make_tiny_tokenizer


def planned(
    steps: int = 4, prompts_per_step: int = 3, updates_per_epoch: int = 1, epochs_per_step: int = 1, save: int = 0
) -> RunConfig:
    """A config of groups of four with these numbers."""
    rows = 4 * prompts_per_step
    tree = {
        "run_name": "run",
        "model": {"path": "-"},
        "data": {"train": "-"},
        "rollout": {"prompts_per_step": prompts_per_step, "completions_per_prompt": 4},
        "train": {"steps": steps, "rows_per_update": rows // updates_per_epoch, "epochs_per_step": epochs_per_step},
        "checkpoint": {"every_steps": save},
        "reward": {"functions": [{"function": "exact_match"}]},
    }
    return load_config(tree)


def curriculum_of(stream: PromptStream, algorithm: Any) -> Curriculum:
    """The curriculum of a run without a section `curriculum`."""
    keeps = algorithm.keeps_group
    return Curriculum(stream, {GROUP_FILTER: RewardFilter(keeps)} if keeps else {})


class Record:
    """Keeps what a run would write."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows, self.rollouts, self.saved = folder, [], [], []
        self.tokens: dict[int, Mapping[str, Any]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append({"step": step, **metrics})

    def log_rollouts(self, step: int, trajectories: Sequence[Trajectory], advantages: Mapping[int, float]) -> None:
        self.rollouts.append((step, list(trajectories), dict(advantages)))

    def log_tokens(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, float]) -> None:
        self.tokens[step] = tensors

    @contextlib.contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        folder = self.folder / f"step_{step}"
        folder.mkdir(parents=True)
        yield folder
        self.saved.append(step)


class CountingTrainer:
    """Makes no update, and keeps the batches that it was to make one on."""

    concurrent = False

    def __init__(self) -> None:
        self.batches: list[TrainingBatch] = []

    def forward_only(self, rows: RowBatch, needs: object) -> RowBatch:
        return rows

    def train_step(self, batch: TrainingBatch, algorithm: object) -> Metrics:
        self.batches.append(batch)
        return {"actor/made": Count()}

    def token_numbers(self) -> dict[str, Tensor]:
        return {}

    def free_memory(self) -> None:
        pass


class Transfer:
    """A weight transfer that only sets the engine's version."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.versions = engine, []

    def __call__(self, version: int) -> None:
        self.versions.append(version)
        self.engine.version = version


def make_parts(
    folder: Path,
    write: Callable[[Problem, int], str],
    reward: Callable[[Trajectory], float | None],
    algorithm: Any = None,
    **sampling: Any,
) -> RolloutTraining:
    """A training whose completions are `write(sample, index)` and whose rewards are `reward(trajectory)`."""
    tokenizer = make_tiny_tokenizer()
    problems = [Problem(problem_id=str(n), prompt=f"write {n}.", ground_truth="") for n in range(40)]
    by_prompt = {f"write {problem.problem_id}.": problem for problem in problems}

    def complete(prompt: tuple[int, ...], index: int) -> list[int]:
        text = tokenizer.decode(prompt)
        problem = next(problem for start, problem in by_prompt.items() if start in text)
        return [*tokenizer.encode(write(problem, index), add_special_tokens=False), tokenizer.eos_token_id]

    def score(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        rewards = [reward(item) for item in trajectories]
        pairs = zip(trajectories, rewards, strict=True)
        return [
            replace(item, reward=value, reward_parts={"r": value}, part_weights={"r": 1.0}) for item, value in pairs
        ]

    engine = FakeEngine(complete, tokenizer)
    algorithm = algorithm or objective_of({"name": "grpo"}).resolved()
    processor = DataProcessor(tokenizer, DataConfig(train="x.jsonl"))
    return RolloutTraining(
        source=EngineSource(
            engine=engine,
            algorithm=algorithm,
            curriculum=curriculum_of(PromptStream(problems, seed=0, shuffle=False), algorithm),
            processor=processor,
            rewards=score,
            sampling=SamplingParams(**{"completions_per_prompt": 4, "max_completion_tokens": 12} | sampling),
        ),
        transfer=Transfer(engine),
        trainer=CountingTrainer(),  # type: ignore[arg-type]  # the loop uses no more of it
        algorithm=algorithm,
        processor=processor,
        record=Record(folder),
        config=planned(),
        progress=Progress(),
    )


def train(parts: RolloutTraining, config: RunConfig, progress: Progress, save: Save) -> bool:
    """The remaining steps of a run."""
    parts = replace(parts, config=config, progress=progress)
    parts.source.curriculum.load(CurriculumState(progress.position, progress.pending, progress.curriculum))
    if parts.source.engine.version != progress.step:
        parts.transfer(progress.step)
    return fit(parts, config, progress, save)


def run_step(parts: RolloutTraining, config: RunConfig, progress: Progress) -> dict[str, float]:
    """The metrics of the first step."""
    steps = config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})})
    train(parts, steps, progress, lambda folder, now: None)
    row = parts.record.rows[-1]
    return {name: value for name, value in row.items() if name != "step"}
