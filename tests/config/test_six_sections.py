"""Each key of the six-section layout, changed alone, has its effect on the config."""

import copy

import pytest
import torch

from atomrl.config import ConfigError, load_config
from atomrl.config.six_sections import TABLE, is_alternative_layout, translate

BASE = {
    "model_config": {"model_name_or_path": "m", "use_lora": True},
    "generation_config": {"group_size": 4},
    "train_config": {"train_dataset": "t.jsonl", "rollout_batch_size": 32},
}

EFFECTS = {
    "model_config.model_name_or_path": ("other", "model.path", "other"),
    "model_config.dtype": ("bfloat16", "model.dtype", "bfloat16"),
    "model_config.use_lora": (False, "model.lora", None),
    "model_config.lora_rank": (3, "model.lora.rank", 3),
    "model_config.lora_alpha": (5, "model.lora.alpha", 5.0),
    "model_config.lora_dropout": (0.1, "model.lora.dropout", 0.1),
    "model_config.lora_target_modules": (["q_proj"], "model.lora.target_modules", ["q_proj"]),
    "generation_config.group_size": (8, "rollout.completions_per_prompt", 8),
    "generation_config.temperature": (0.7, "rollout.temperature", 0.7),
    "generation_config.top_p": (0.9, "rollout.top_p", 0.9),
    "generation_config.min_tokens": (4, "rollout.min_completion_tokens", 4),
    "generation_config.max_tokens": (77, "rollout.max_completion_tokens", 77),
    "generation_config.stop_tokens": (["</answer>"], "rollout.stop", ["</answer>"]),
    "advantage_config.mode": ("raw", "algorithm.advantage.type", "raw"),
    "advantage_config.advantage_eps": (0.5, "algorithm.advantage.eps", 0.5),
    "train_config.n_grpo_steps": (7, "train.steps", 7),
    "train_config.train_dataset": ("u.jsonl", "data.train", "u.jsonl"),
    "train_config.eval_dataset": ("e.jsonl", "data.eval", "e.jsonl"),
    "train_config.truncate_max_length": (300, "train.max_row_tokens", 300),
    "train_config.learning_rate": ("1e-5", "train.learning_rate", 1e-5),  # YAML reads 1e-5 as text
    "train_config.rollout_batch_size": (64, "rollout.prompts_per_step", 16),
    "train_config.epochs_per_rollout_batch": (3, "train.epochs_per_step", 3),
    "train_config.train_batch_size": (16, "train.rows_per_update", 16),
    "train_config.micro_train_batch_size": (2, "train.rows_per_micro_batch", 2),
    "train_config.adam_beta1": (0.8, "train.adam_beta1", 0.8),
    "train_config.adam_beta2": (0.95, "train.adam_beta2", 0.95),
    "train_config.gradient_checkpoint": (True, "model.gradient_checkpointing", True),
    "train_config.max_grad_norm": (0.3, "train.max_grad_norm", 0.3),
    "train_config.lr_scheduler_type": ("cosine", "train.schedule", "cosine"),
    "train_config.warmup_ratio": (0.05, "train.warmup_ratio", 0.05),
    "train_config.min_lr_ratio": (0.1, "train.min_lr_ratio", 0.1),
    "train_config.return_token_entropy": (False, "train.report_entropy", False),
    "loss_config.loss_level": ("sequence", "algorithm.loss_agg.type", "sequence_mean"),
    "loss_config.clip_range_left": (0.11, "algorithm.clip.low", 0.11),
    "loss_config.clip_range_right": (0.31, "algorithm.clip.high", 0.31),
    "model_config.gpu_memory_utilization": (0.5, "rollout.gpu_memory_utilization", 0.5),
    "wandb_config.enabled": (True, "tracking.sinks", ["wandb"]),
    "wandb_config.project": ("p", "tracking.wandb_project", "p"),
    "wandb_config.entity": ("e", "tracking.wandb_entity", "e"),
    "wandb_config.run_name": ("named", "run_name", "named"),
    "wandb_config.tags": (["a"], "tracking.wandb_tags", ["a"]),
    "wandb_config.log_interval": (3, "tracking.log_every_steps", 3),
    "wandb_config.eval_interval": (5, "eval.every_steps", 5),
    "wandb_config.save_interval": (6, "checkpoint.every_steps", 6),
}
PLACEMENT = {"model_num_gpus": 1, "rollout_num_gpus": 2}


def changed(key, value):
    tree = copy.deepcopy(BASE)
    section, _, name = key.partition(".")
    tree.setdefault(section, {})[name] = value
    return tree


def load(tree):
    translated, notes = translate(tree, "six.yaml", "file-name")
    return load_config(translated, name="six.yaml"), notes


def value_at(config, key):
    value = config.to_tree()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


@pytest.mark.parametrize("key", EFFECTS)
def test_each_key_has_its_effect(key):
    given, target, expected = EFFECTS[key]
    before, after = load(BASE)[0], load(changed(key, given))[0]
    assert value_at(after, target) == expected
    assert value_at(before, target) != expected


def test_every_key_is_tested():
    assert set(TABLE) == set(EFFECTS) | {f"model_config.{name}" for name in PLACEMENT}


def test_only_the_named_key_changes():
    """But for the three keys whose meaning depends on others."""
    together = {"generation_config.group_size", "train_config.truncate_max_length", "model_config.use_lora"}
    base = load(BASE)[0].model_dump()
    for key, (given, target, _) in EFFECTS.items():
        if key in together:
            continue
        after = load(changed(key, given))[0].model_dump()
        section = target.partition(".")[0]
        assert [name for name in base if base[name] != after[name]] == [section], key


def test_the_effect_reaches_what_the_run_is_made_of():
    from atomrl.trainer.build import train_sampling

    config, _ = load(
        {
            "model_config": {"model_name_or_path": "m"},
            "generation_config": {"group_size": 4, "temperature": 0.7, "min_tokens": 2, "stop_tokens": [5, 6]},
            "train_config": {
                "train_dataset": "t", "rollout_batch_size": 32, "train_batch_size": 8, "epochs_per_rollout_batch": 2,
                "n_grpo_steps": 9, "micro_train_batch_size": 2, "truncate_max_length": 300,
            },
            "wandb_config": {"eval_interval": 3, "save_interval": 4},
        }
    )  # fmt: skip
    sampling, train = train_sampling(config), config.train
    assert (train.steps, config.items_per_step, config.updates_per_epoch, config.updates_per_step) == (9, 8, 4, 8)
    assert (config.eval.every_steps, config.checkpoint.every_steps, train.max_row_tokens) == (3, 4, 300)
    assert (sampling.completions_per_prompt, sampling.temperature, sampling.min_completion_tokens) == (4, 0.7, 2)
    assert sampling.stop_token_ids == (5, 6) and sampling.stop == ()
    # Rows alone limit a micro-batch, and a prompt may be as long as leaves one token to train on.
    assert config.train.tokens_per_micro_batch == 600 and config.data.max_prompt_tokens == 299


@pytest.mark.parametrize("name", PLACEMENT)
def test_gpus_that_are_not_there_are_answered_with_one_line(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config, notes = load(changed(f"model_config.{name}", PLACEMENT[name]))
    assert config == load(BASE)[0] and load(BASE)[1] == []
    (note,) = notes
    assert name in note and "no GPU" in note and "\n" not in note
    with pytest.raises(ConfigError, match=rf"model_config\.{name}: .*got -1"):
        load(changed(f"model_config.{name}", -1))


@pytest.mark.parametrize(
    ("model", "rollout", "trainer", "replicas", "device"),
    [
        (1, 2, 1, 2, "auto"),
        (2, 2, 1, 2, "auto"),
        (2, None, None, None, "cuda"),
        (0, 1, 0, 1, "auto"),
        (None, 3, 1, 3, "auto"),
        (1, 0, None, None, "cuda"),
        (0, None, None, None, "cpu"),
        (None, None, None, None, "auto"),
    ],
)
def test_gpus_are_given_to_trainer_and_engines(model, rollout, trainer, replicas, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    tree = copy.deepcopy(BASE)
    tree["model_config"] |= {"model_num_gpus": model, "rollout_num_gpus": rollout}
    config, notes = load(tree)
    assert notes == [] and config.model.device == device
    assert (config.backend.ranks if config.backend else 1) == max(model or 1, 1)
    if replicas is None:
        assert config.cluster is None
    else:
        resources = config.cluster.resources
        assert (resources["trainer"].num_gpus, config.cluster.replicas) == (trainer, replicas)
        assert resources["rollout"].num_gpus == 1


def test_absent_and_null_keys_keep_the_defaults():
    tree = {
        "model_config": {"model_name_or_path": "m", "dtype": None},
        "generation_config": None,
        "train_config": {"train_dataset": "t", "eval_dataset": None},
        "wandb_config": {"entity": None, "run_name": None, "enabled": False},
    }
    assert load(tree)[0] == load_config({"run_name": "file-name", "model": {"path": "m"}, "data": {"train": "t"}})


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("train_config.learning_rat", 1, r"unknown key 'train_config.learning_rat'; .*'train_config.learning_rate'\?"),
        ("train_config.temprature", 1, r"did you mean 'generation_config.temperature'"),
        ("trian_config", {}, r"unknown key 'trian_config'; did you mean 'train_config'"),
        ("generation_config.temperature", "hot", r"generation_config.temperature.*: .*got 'hot'"),
        ("advantage_config.mode", "gae", r"advantage_config.mode.*: .*got 'gae'"),
        ("loss_config.loss_level", "word", r"loss_config.loss_level.*: .*got 'word'"),
        ("train_config.train_dataset", None, r"train_config.train_dataset: is required"),
        ("train_config.rollout_batch_size", 30, r"rollout_batch_size=30 .* not a multiple of .*group_size=4"),
        ("train_config.train_batch_size", 24, r"train_config.train_batch_size=24 does not divide the 32 rows"),
        ("model_config.lora_target_modules", 3, r"model_config.lora_target_modules.*: .*got 3"),
        ("generation_config", 3, r"generation_config: .*got 3"),
    ],
)  # fmt: skip
def test_mistakes_are_named(key, value, message):
    tree = changed(key, value) if "." in key else {**copy.deepcopy(BASE), key: value}
    with pytest.raises(ConfigError, match=message) as caught:
        load(tree)
    assert "six.yaml" in str(caught.value)


def test_a_missing_section_is_named():
    with pytest.raises(ConfigError, match=r"model_name_or_path(.|\n)*train_dataset"):
        load({"loss_config": {}})


def test_layouts_are_distinguished_by_their_keys():
    assert is_alternative_layout(BASE) and is_alternative_layout({"loss_config": {}})
    assert not is_alternative_layout({"model": {}, "train": {}, "run_name": "r"})
