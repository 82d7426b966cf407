"""What has to be true of a critic, found before weights are loaded and before the run's folder is made."""

from __future__ import annotations

from typing import Any

from atomrl.config import ConfigError, RunConfig
from atomrl.models.gpt import unsupported
from atomrl.models.loading import load_tokenizer, model_config_only, resolve_folder
from atomrl.models.scalar import is_classifier
from atomrl.protocols import Algorithm


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
