"""Checks of the config, the models, the optimizer and the ranks."""

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.common.errors import reraise_as
from atomrl.common.redaction import register_secrets
from atomrl.common.secrets import check_unmasked
from atomrl.config import ConfigError, RunConfig
from atomrl.models.decoder_spec import unsupported
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import load_tokenizer, model_config_only, resolve_folder
from atomrl.models.lora import refuse_adapted, trained_places
from atomrl.models.memory import empty_model
from atomrl.models.quantized import linears
from atomrl.models.scalar import is_classifier
from atomrl.models.shapes import is_whole, text_config, tower_weights
from atomrl.models.transformers_model import check_causal, check_trainable
from atomrl.models.vision import why_no_images
from atomrl.protocols import Algorithm, needs_teacher
from atomrl.tracking.doctor.findings import EVALUATED
from atomrl.trainer.build import device_name, rank_total, ranked_kind
from atomrl.trainer.checks.engine import check_engine_beside
from atomrl.trainer.cluster import cluster_roles

log = logging.getLogger(__name__)


def check_secrets(config: RunConfig) -> None:
    """Check that the config has its secrets: a run's own `config.yaml` can be looked at, but not trained with. Register
    them, so that messages do not contain them (`without_secrets`).

    Raises:
        ConfigError: a secret was left out.
    """
    try:
        check_unmasked(config.to_tree(secrets=True))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    register_secrets(config.secrets)


def check_unused(config: RunConfig) -> None:
    """Warn about settings in sections that this kind of run does not read."""
    tree = config.model_dump(mode="json", exclude_defaults=True, include=set(config.unused_sections))
    names = [f"{section}.{key}" for section, keys in tree.items() for key in (keys if isinstance(keys, dict) else [""])]
    if names:
        log.warning(
            "%s: without effect in this kind of run (%s)", ", ".join(name.rstrip(".") for name in names), config.kind
        )


def check_policy(config: RunConfig) -> None:
    """Check that the policy is a causal language model. A reward model may start from other models.

    Raises:
        ConfigError: it is not.
    """
    if config.model.path is not None and config.kind != "reward-model":
        try:
            shape = model_config_only(config.model.path, config.model.trust_remote_code)
            check_causal(shape, config.model.path)
            if unsupported(shape) is not None:
                empty = empty_model(shape, config.model.trust_remote_code)
                check_trainable(empty)
                tower_weights(empty)  # raises if it is not known
            if is_whole(shape) and text_config(shape) is not shape and why_no_images(shape, config.model.path):
                log.warning(
                    "model.path: %s has a vision tower: the run is on text only, and the tower is saved unchanged",
                    config.model.path,
                )
        except ConfigError as error:
            raise type(error)(f"model.path: {error}") from error


def check_adapters(config: RunConfig) -> None:
    """Check that the policy or reward model can have the LoRA adapters of `model.lora`.

    Raises:
        ConfigError: it cannot.
    """
    model = config.model
    if model.lora is None or model.path is None:
        return
    refuse_adapted(model.path)
    scores = isinstance(config.algorithm, RewardModelObjective)
    empty = empty_model(model_config_only(model.path, model.trust_remote_code), model.trust_remote_code, scores)
    trained_places(empty, None if scores else empty.get_output_embeddings().weight, model.lora)


def check_companions(config: RunConfig, algorithm: Algorithm, path: str, tokenizer: Any) -> None:
    """Check that the teacher and the critic of an algorithm are available and have the policy's vocabulary.

    Args:
        config: config of the run.
        algorithm: decides whether there is a teacher or a critic.
        path: folder or hub name of the policy, from which the critic starts by default.
        tokenizer: the policy's tokenizer.

    Raises:
        ConfigError: `teacher.path` is missing; a model is not available; its vocabulary differs; or the critic's model
            is not supported (`check_critic`).
    """
    starts: dict[str, str] = {}
    if needs_teacher(algorithm):
        if config.teacher is None:
            raise ConfigError(f"teacher.path: is required by algorithm.name={algorithm.name}")
        starts["teacher.path"] = config.teacher.path
    if "values" in algorithm.needs:
        starts["critic.path"] = config.critic.path or path
    for key, start in starts.items():
        ours, trusted = tokenizer.get_vocab(), config.model.trust_remote_code
        with reraise_as(ConfigError, key, ConfigError):
            shape, folder = model_config_only(start, trusted), resolve_folder(start, weights=False)
            size, own = (text_config(each).vocab_size for each in (model_config_only(path, trusted), shape))
            has_tokenizer = key == "teacher.path" or any(folder.glob("tokenizer*"))  # optional for a critic
            theirs = load_tokenizer(start, trusted).get_vocab() if has_tokenizer else ours
        if key == "critic.path":
            check_critic(start, shape)
        if own != size or theirs != ours:
            differ = [word for word in ours.keys() | theirs.keys() if ours.get(word) != theirs.get(word)]
            token = min(differ, default=None)
            raise ConfigError(
                f"{key}: {start} must have the vocabulary of the policy {path}, whose tokens it reads: "
                + (
                    f"{own} embeddings instead of {size}"
                    if token is None
                    else f"{token!r} is token {theirs.get(token)} instead of {ours.get(token)}"
                )
                + "; use a model of the same family, or one that was trained from the policy"
            )


def check_critic(start: str, shape: Any) -> None:
    """Check that a critic can be initialized from a model.

    Raises:
        ConfigError: its architecture is not implemented in `atomrl.models`, or it has several labels.
    """
    if (reason := unsupported(shape)) is not None:
        raise ConfigError(f"critic.path: {start} cannot be used as a critic: {reason}")
    if is_classifier(shape) and shape.num_labels != 1:
        raise ConfigError(f"critic.path: {start} has {shape.num_labels} labels; a critic needs one")


def check_fresh_tokenizer(config: RunConfig, tokenizer: Any) -> None:
    """Check that transformers loads the tokenizer of a fresh model (`config.gpt`) unchanged.

    Raises:
        ConfigError: transformers replaces the tokenizers of this model family by its own class.
    """
    if (shape := config.gpt) is None:
        return
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": shape.family}), encoding="utf-8")
        loaded = load_tokenizer(folder).get_vocab()
    if loaded != tokenizer.get_vocab():
        raise ConfigError(
            f"{config.kind}.gpt.family={shape.family}: transformers replaces the tokenizer of this family with its "
            "own class; use family llama"
        )


def check_best(config: RunConfig) -> None:
    """Check that a best checkpoint by an evaluation metric (`checkpoint.keep_best`) is possible.

    Warns if some evaluations are at steps without a checkpoint.

    Raises:
        ConfigError: the run has no evaluations, or none at a step with a checkpoint.
    """
    name, steps = config.checkpoint.keep_best, config.train.steps
    if name is None or not name.startswith(EVALUATED):
        return
    key = f"checkpoint.keep_best={name}"
    every, saved_every = config.eval.every_steps, config.checkpoint.every_steps
    evaluated = [*(range(every, steps, every) if every else ()), *[steps] * config.eval.after]
    if config.data.eval is None and config.kind != "pretrain":
        raise ConfigError(f"{key} is a metric of evaluations; set data.eval")
    if not evaluated:
        raise ConfigError(
            f"{key} is a metric of evaluations, but eval.every_steps={every} with eval.after=false disables them"
        )
    without = [step for step in evaluated if step < steps and (not saved_every or step % saved_every)]
    settings = f"eval.every_steps={every}, checkpoint.every_steps={saved_every}"
    advice = f"use a checkpoint.every_steps that divides eval.every_steps ({settings})"
    if len(without) == len(evaluated):
        raise ConfigError(f"{key}: no step is both evaluated and saved; {advice}")
    if without:
        log.warning(
            "%s: %d of %d evaluations (the first after step %d) are at steps without a checkpoint and cannot be "
            "the best; %s",
            key, len(without), len(evaluated), without[0], advice,
        )  # fmt: skip


def check_savers(config: RunConfig) -> None:
    """Check the settings that save memory: quantization, activation offload and 8-bit optimizers.

    Raises:
        ConfigError: one is not possible here, or would save nothing.
    """
    model, kind = config.model, config.train.optimizer
    on_cpu = device_name(model.device) == "cpu"
    in_8_bits = kind != "adamw"
    if model.quantization and config.gpt is not None:
        raise ConfigError("model.quantization: a fresh model (gpt) cannot be quantised; remove it")
    if model.quantization and model.path is not None:
        shape = model_config_only(model.path, model.trust_remote_code)
        empty = empty_model(shape, model.trust_remote_code)
        linears(empty, empty.get_output_embeddings().weight, model.quantization)
    if model.activation_offload and on_cpu:
        raise ConfigError("model.activation_offload: has no effect on a CPU; remove it")
    if kind == "paged_adamw8bit" and on_cpu:
        raise ConfigError("train.optimizer=paged_adamw8bit: paging needs a GPU (CUDA); use adamw8bit")
    if in_8_bits and config.backend is not None:
        raise ConfigError(f"train.optimizer={kind}: bitsandbytes does not support sharding; with backend use adamw")
    if (in_8_bits or model.quantization == "nf4") and find_spec("bitsandbytes") is None:
        key = f"train.optimizer={kind}" if in_8_bits else f"model.quantization={model.quantization}"
        raise ConfigError(f"{key}: bitsandbytes is not installed: pip install 'atomrl[quant]'")


def check_ranks(config: RunConfig, algorithm: Algorithm) -> None:
    """Check that the ranks of `config.backend` can be started and can train the run.

    Raises:
        ConfigError: they cannot.
    """
    if (backend := config.backend) is None:
        return
    device = device_name(config.model.device)
    backend.check_count(rank_total(config))
    ranked_kind(backend).check(backend, config.model, used_models(config, algorithm), device)
    check_engine_beside(config, rank_total(config))
    if algorithm.update is not None:
        raise ConfigError(
            f"backend: algorithm.update of {algorithm.name} needs forward-mode derivatives of the whole policy; remove "
            "the section backend"
        )
    if config.model.compile:
        raise ConfigError("model.compile: not supported with sharded weights; remove it")
    roles = set(cluster_roles(config, algorithm)) - {"rollout", "reward", "trainer"}
    if roles:
        raise ConfigError(
            f"cluster.resources: with a backend of several ranks, {', '.join(sorted(roles))} run on the ranks; remove "
            "them"
        )
    if config.cluster is not None and config.cluster.placement == "colocated":
        raise ConfigError(
            "cluster.placement=colocated needs a single trainer process; set cluster.resources.trainer to what each "
            "rank needs, or use split"
        )


def used_models(config: RunConfig, algorithm: Algorithm) -> dict[str, Any]:
    """Return the transformers configs of the trainer's models: path (config key for a fresh model) -> config."""
    shapes, paths = {}, [config.model.path]
    if config.gpt is not None:
        with torch.device("meta"):
            shapes[f"{config.kind}.gpt"] = new_gpt(vocab_size=1, **config.gpt.model_dump()).config
    if "values" in algorithm.needs:
        paths.append(config.critic.path)
    if needs_teacher(algorithm) and config.teacher is not None:
        paths.append(config.teacher.path)
    trusted = config.model.trust_remote_code
    return shapes | {path: model_config_only(path, trusted) for path in paths if path is not None}
