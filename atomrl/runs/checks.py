"""What has to be true of the models beside the policy, found before weights are loaded."""

from __future__ import annotations

from typing import Any

from atomrl.config import ConfigError, RunConfig
from atomrl.models.loading import load_tokenizer, model_config_only, resolve_folder
from atomrl.models.scalar import is_classifier
from atomrl.models.spec import unsupported
from atomrl.protocols import Algorithm
from atomrl.runs.build import engine_class, needs_teacher


def check_teacher(config: RunConfig, algorithm: Algorithm, path: str, tokenizer: Any) -> None:
    """That there is a teacher where the algorithm needs one, and that a token means the same to it as to the policy.

    Args:
        config: of the run.
        algorithm: that it asks for.
        path: the policy's folder or hub name.
        tokenizer: the policy's.

    Raises:
        ConfigError: the config names no teacher; it is not there, or has no tokenizer beside it; or its vocabulary is
            another one.
    """
    if not needs_teacher(algorithm):
        return
    if config.teacher is None:
        raise ConfigError(f"teacher.path: is required by algorithm.name={algorithm.name}")
    theirs = config.teacher.path
    try:
        sizes = [model_config_only(one, config.model.trust_remote_code).vocab_size for one in (path, theirs)]
        vocabulary = load_tokenizer(theirs, config.model.trust_remote_code).get_vocab()
    except ConfigError as error:
        raise ConfigError(f"teacher.path: {error}") from None
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"teacher.path: {theirs} gives {sizes[1]} tokens a probability and the policy {path} {sizes[0]}; "
            "they must share a vocabulary"
        )
    ours = tokenizer.get_vocab()
    if vocabulary != ours:
        token = min(key for key in ours.keys() | vocabulary.keys() if ours.get(key) != vocabulary.get(key))
        raise ConfigError(
            f"teacher.path: the tokenizer of {theirs} is another than the policy's: {token!r} is token "
            f"{vocabulary.get(token)} for the teacher and {ours.get(token)} for the policy; take a teacher of the "
            "same family, or one that was trained from the policy"
        )


def check_critic(config: RunConfig, algorithm: Algorithm, path: str, tokenizer: Any) -> None:
    """That the model that a critic starts from is there, and reads the policy's tokens one after the other.

    Args:
        config: of the run.
        algorithm: that may ask for a critic.
        path: the policy's folder or hub name, where the critic starts unless the config says otherwise.
        tokenizer: the policy's.

    Raises:
        ConfigError: it is not there; it is no decoder that this package computes itself; it has several labels; or its
            vocabulary is another one.
    """
    if "values" not in algorithm.needs:
        return
    start = config.critic.path or path
    try:
        shape = model_config_only(start, config.model.trust_remote_code)
        size = model_config_only(path, config.model.trust_remote_code).vocab_size
        folder = resolve_folder(start, weights=False)
        vocabulary = tokenizer.get_vocab()
        if config.critic.path is not None and any(folder.glob("tokenizer*")):
            vocabulary = load_tokenizer(start, config.model.trust_remote_code).get_vocab()
    except ConfigError as error:
        raise ConfigError(f"critic.path: {error}") from None
    reason = unsupported(shape)
    if reason is not None:
        raise ConfigError(f"critic.path: {start} cannot be a critic, which gives every token a value: {reason}")
    if is_classifier(shape) and shape.num_labels != 1:
        raise ConfigError(f"critic.path: {start} has {shape.num_labels} labels; a critic has one")
    if shape.vocab_size != size or vocabulary != tokenizer.get_vocab():
        raise ConfigError(
            f"critic.path: {start} has another vocabulary than the policy {path}, whose tokens a critic reads"
        )


def check_engine(config: RunConfig, path: str) -> None:
    """That there is the engine, and that it can tell what top-p and top-k kept, where log-probs are to be over that.

    Raises:
        ConfigError: there is none of this name, or it cannot.
    """
    engine = engine_class(config.rollout, path, config.model)
    if config.rollout.logprobs_over == "kept" and not engine.returns_candidates:
        raise ConfigError(f"rollout.logprobs_over=kept: {engine.__name__} does not tell which tokens were kept")
