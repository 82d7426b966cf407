"""What has to be true of a teacher, found before weights are loaded and before the run's folder is made."""

from __future__ import annotations

from typing import Any

from atomrl.config import ConfigError, RunConfig
from atomrl.models.loading import load_tokenizer, model_config_only
from atomrl.protocols import Algorithm


def needs_teacher(algorithm: Algorithm) -> bool:
    """Whether an algorithm looks at a teacher."""
    return any(name.startswith("teacher") for name in algorithm.needs | algorithm.outputs)


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
