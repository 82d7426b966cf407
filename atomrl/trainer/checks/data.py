"""Checks of problems, groups and the rollout pool: can anything be learned?"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing

from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError, RunConfig
from atomrl.data.files import DataError
from atomrl.data.images import ImageStore
from atomrl.data.messages import COMPLETIONS
from atomrl.data.tasks import is_generator
from atomrl.models.loading import model_config_only
from atomrl.models.vision import why_no_images
from atomrl.objectives import PolicyObjective
from atomrl.objectives.choice import Custom
from atomrl.pool.store import RolloutPool
from atomrl.protocols import Algorithm, needs_teacher
from atomrl.trainer.build import engine_class, model_path, ranked_kind, why_no_pictures
from atomrl.trainer.own_functions.random_rows import random_rows, with_inputs
from atomrl.types import Problem

log = logging.getLogger(__name__)


LARGE_GROUP = 8
"""Completions per prompt with which every algorithm has something to compare."""


def check_held_out(config: RunConfig, train: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    """Warn if evaluation problems are in the training data too. Generated tasks are not checked."""
    if not held_out or is_generator(config.data.eval or ""):
        return

    def content(problem: Problem) -> str:
        return repr((problem.prompt, [image.name for image in problem.images], problem.columns.get(COMPLETIONS)))

    # Collect only training problems that are held out too: the training data may be large.
    contents = {content(problem) for problem in held_out}
    trained = {key for problem in train if (key := content(problem)) in contents}
    both = [problem.problem_id for problem in held_out if content(problem) in trained]
    if both:
        log.warning(
            "data.eval: %d of %d problems are in data.train as well (such as %s), so evaluations do not measure "
            "generalization",
            len(both), len(held_out), both[0],
        )  # fmt: skip


def check_image_engine(config: RunConfig, images: ImageStore | None) -> None:
    """Check that model and engine take the pictures of data and replies, if there are any.

    Args:
        images: those of the data; None: the model reads text alone.

    Raises:
        ConfigError: one does not, or the model has no image processor.
    """
    if images is None and config.environment is not None and config.environment.images:
        path = model_path(config)
        why = why_no_images(model_config_only(path, config.model.trust_remote_code), path)
        raise ConfigError(f"environment.images: {why}; remove the key")
    if not images:
        return
    if images.reader is not None:
        with reraise_as(ConfigError, "environment.images", DataError):
            _ = images.reader.processor
    engine, _ = engine_class(config.rollout, model_path(config), config.model)
    if reason := why_no_pictures(engine, config):
        raise ConfigError(reason)


def check_images(config: RunConfig, images: ImageStore | None, algorithm: Algorithm, path: str | None) -> None:
    """Check that all parts of a run support the pictures of its data.

    Args:
        images: those of the data; None: the model reads text alone.

    Raises:
        ConfigError: a part does not, or a setting of pictures has nothing to apply to.
    """
    data, model, backend = config.data, config.model, config.backend
    if config.kind == "rl":
        check_image_engine(config, images)
    if not images:
        keys = {"data.images_field": data.images_field, "data.min_pixels": data.min_pixels}
        keys |= {"data.max_pixels": data.max_pixels, "model.freeze_vision": None if model.freeze_vision else False}
        if key := next((key for key, value in keys.items() if value is not None), None):
            why = None if path is None else why_no_images(model_config_only(path, model.trust_remote_code), path)
            raise ConfigError(f"{key}: {why or 'no row of the data has a picture'}; remove the key")
        return
    if config.kind == "reward-model":
        raise ConfigError("algorithm.name=reward_model: reward models read text alone; remove the pictures of the data")
    if "values" in algorithm.needs | algorithm.outputs:
        raise ConfigError(
            f"algorithm.name={algorithm.name}: a critic reads text alone; use an algorithm without one, such as grpo"
        )
    if algorithm.update is not None:
        raise ConfigError("algorithm.update: a trust region does not support pictures; use update: optimizer")
    if backend is not None and not ranked_kind(backend).supports_images:
        raise ConfigError(f"backend.type={backend.type}: trains on text alone; use backend.type=fsdp")
    if backend is not None and backend.ranks_per_row > 1:
        raise ConfigError(
            "backend.sequence, backend.tensor: rows with pictures are not split over ranks; remove them (ranks then "
            "share the rows)"
        )
    if model.pack_rows:
        raise ConfigError("model.pack_rows=true: rows with pictures are padded; remove it")
    if needs_teacher(algorithm) and config.teacher is not None:
        theirs = model_config_only(config.teacher.path, model.trust_remote_code)
        ours = model_config_only(str(path), model.trust_remote_code)
        why = why_no_images(theirs, config.teacher.path)
        if why is None and (theirs.model_type, theirs.image_token_id) != (ours.model_type, ours.image_token_id):
            why = f"{config.teacher.path} reads pictures otherwise than {path}; use a model of the same family"
        if why:
            raise ConfigError(f"teacher.path: {why}")


def check_row_limit(prompt_tokens: Sequence[int], max_row_tokens: int | None) -> None:
    """Check that `train.max_row_tokens` leaves room for completions; warn if it does not for some prompts.

    Args:
        prompt_tokens: length of every prompt.
        max_row_tokens: `train.max_row_tokens`.

    Raises:
        ConfigError: it leaves none for any prompt.
    """
    over = sum(tokens >= max_row_tokens for tokens in prompt_tokens) if max_row_tokens is not None else 0
    if not over:
        return
    if over == len(prompt_tokens):
        raise ConfigError(
            f"train.max_row_tokens={max_row_tokens}: every prompt is at least this long "
            f"({min(prompt_tokens)} to {max(prompt_tokens)}), so no completion would be trained on; raise it above "
            "the length of prompt plus completion"
        )
    log.warning(
        "train.max_row_tokens=%d: %d of %d prompts are at least this long; their completions are not trained on",
        max_row_tokens, over, len(prompt_tokens),
    )  # fmt: skip


def check_group_size(algorithm: Algorithm, completions_per_prompt: int) -> None:
    """Check that groups of this size can have advantages other than 0.

    Calls `algorithm.advantages` on rows with random rewards and inputs: with this group size and, if all advantages
    are 0, with `LARGE_GROUP`. If those are 0 too, the loss does not use advantages, and the group size is fine.

    Raises:
        ConfigError: all advantages would be 0.
        ValueError: the algorithm itself refuses groups of this size.
    """
    if _has_advantage(algorithm, completions_per_prompt) is False and _has_advantage(algorithm, LARGE_GROUP):
        raise ConfigError(
            f"rollout.completions_per_prompt={completions_per_prompt}: {algorithm.name} compares the completions of a "
            "prompt; in groups of this size every advantage would be 0; "
            "use larger groups, or an algorithm.advantage that does not compare"
        )


def _has_advantage(algorithm: Algorithm, group_size: int) -> bool | None:
    """True if random rewards in groups of this size give an advantage that is not 0.

    None if the advantage is the user's own function and fails on these rows. `check_own_functions` has already called
    it with the rows of this run.
    """
    is_custom = isinstance(algorithm, PolicyObjective) and isinstance(algorithm.advantage, Custom)
    rows = with_inputs(random_rows(groups=4, group_size=group_size), algorithm.advantage_inputs)
    try:
        return bool(algorithm.advantages(rows).advantages.any())
    except Exception:
        if is_custom:
            return None
        raise


def check_temperature(config: RunConfig) -> None:
    """Warn if all completions of a prompt would be the same."""
    rollout = config.rollout
    if rollout.temperature == 0 and rollout.completions_per_prompt > 1 and config.environment is None:
        log.warning(
            "rollout.temperature=0: all %d completions of a prompt will be the same, so their advantages are 0; use "
            "rollout.temperature=1",
            rollout.completions_per_prompt,
        )


def check_pool(config: RunConfig, identity: Mapping[str, str]) -> None:
    """Check that an existing rollout pool was filled with the same tokenizer, model and so on (`identity`).

    Raises:
        PoolError: it was not, or the file is not a pool.
    """
    if config.pool_file.exists():
        with closing(RolloutPool(config.pool_file, config.pool)) as pool:
            pool.check_identity(identity, adopt=False)
