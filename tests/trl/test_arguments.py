"""GRPOArgs: checked as they are set, and what each becomes."""

import pytest

from atomrl.config import ConfigError, load_config, merge_trees
from atomrl.config.keys import renamed
from atomrl.trl import GRPOArgs
from atomrl.trl.arguments import NAMES as NAMES_HERE
from atomrl.trl.arguments import hint
from atomrl.trl.inputs import lora_section

NAMES = {
    "lr", "num_generations", "output_dir", "device", "save_steps", "epoch", "max_prompt_length", "max_generate_length",
    "reward_weights", "beta", "clip_eps", "gradient_accumulation_steps", "num_iterations", "batch_size",
    "temperature", "seed", "max_steps", "loss_type", "scale_rewards",
}  # fmt: skip


def config_of(args):
    return load_config(merge_trees(args.to_tree(), {"run_name": "r", "model": {"path": "m"}, "data": {"train": "d"}}))


def test_the_arguments_are_these():
    assert set(GRPOArgs.model_fields) == NAMES


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("lrr", "lr"), ("num_generation", "num_generations"), ("learning_rate", "lr"), ("epochs", "epoch"),
     ("max_completion_length", "max_generate_length"), ("clip_epsilon", "clip_eps"), ("betta", "beta"),
     ("epsilon", "clip_eps"),
     ("clip_range", "clip_eps"), ("total_training_steps", "max_steps"), ("save_freq", "save_steps")],
)  # fmt: skip
def test_an_unknown_argument_is_an_error_with_the_nearest(name, nearest):
    with pytest.raises(AttributeError, match=f"'{name}'.*'{nearest}'"):
        setattr(GRPOArgs(), name, 1)
    with pytest.raises(AttributeError, match=f"'{nearest}'"):
        GRPOArgs(**{name: 1})
    with pytest.raises(AttributeError, match="output_dir, device"):
        GRPOArgs().zzzzqqqq = 1


@pytest.mark.parametrize(
    ("name", "answer"),
    [("warmup_ratio", "train.warmup_ratio"), ("max_grad_norm", "train.max_grad_norm"),
     ("logging_steps", "tracking.log_every_steps"), ("lr_scheduler_type", "train.schedule"),
     ("eval_steps", "eval.every_steps"), ("gradient_checkpointing", "model.gradient_checkpointing"),
     ("steps_per_generation", "did you mean 'batch_size (prompts"),
     ("reward_funcs", "an argument of GRPOTrainer: reward_funcs")],
)  # fmt: skip
def test_unknown_arguments_name_the_config_key(name, answer):
    with pytest.raises(AttributeError) as caught:
        setattr(GRPOArgs(), name, 1)
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0), ("lr", "fast"), ("lr", float("nan")), ("num_generations", 1), ("num_generations", 2.5), ("epoch", 0),
     ("save_steps", -1), ("max_prompt_length", 0), ("max_generate_length", 0), ("beta", -0.1), ("clip_eps", -1),
     ("gradient_accumulation_steps", 0), ("num_iterations", 0), ("batch_size", 0), ("reward_weights", 2.0),
     ("reward_weights", [1, "x"]), ("output_dir", 3), ("device", None)],
)  # fmt: skip
def test_a_bad_value_is_named_by_its_argument_and_changes_nothing(name, value):
    args = GRPOArgs()
    before = getattr(args, name)
    with pytest.raises(ConfigError, match=rf"^GRPOArgs\.{name}"):
        setattr(args, name, value)
    assert getattr(args, name) == before
    with pytest.raises(ConfigError, match=rf"^GRPOArgs\.{name}"):
        GRPOArgs(**{name: value})


def test_the_config_key_of_each_argument():
    args = GRPOArgs(
        lr=1e-3, num_generations=3, device="cpu", save_steps=7, max_prompt_length=11, beta=0.5, clip_eps=0.1
    )
    args.max_generate_length, args.num_iterations, args.batch_size, args.gradient_accumulation_steps = 13, 2, 5, 4
    config = config_of(args)
    assert (config.train.learning_rate, config.train.schedule, config.train.epochs_per_step) == (1e-3, "constant", 2)
    assert (config.rollout.completions_per_prompt, config.rollout.max_completion_tokens) == (3, 13)
    assert config.rollout.prompts_per_step == 5 * 4
    assert config.train.rows_per_micro_batch == 5 * 3
    assert config.train.tokens_per_micro_batch == 5 * 3 * (11 + 13)  # so that rows alone limit
    assert config.train.rows_per_update is None
    assert (config.model.device, config.checkpoint.every_steps, config.data.max_prompt_tokens) == ("cpu", 7, 11)
    axes = config.algorithm.axes
    assert (axes["clip"].low, axes["clip"].high, axes["kl"].coefficient) == (0.1, 0.1, 0.5)
    assert (axes["loss_agg"].type, axes["advantage"].type) == ("token_mean", "grpo")


def test_dr_grpo_in_trls_words():
    config = config_of(GRPOArgs(loss_type="dr_grpo", scale_rewards=False, temperature=0.7, seed=5))
    axes = config.algorithm.axes
    assert (axes["loss_agg"].type, axes["advantage"].type) == ("constant_length", "grpo_no_std")
    assert (config.rollout.temperature, config.seed) == (0.7, 5)


def test_adapters_in_pefts_words():
    from peft import LoraConfig

    expected = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    assert lora_section({"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}) == expected
    given = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"])
    assert lora_section(given) == expected | {"dropout": 0.0} and lora_section(None) is None
    for bad in ({"rank": 4}, LoraConfig(use_dora=True), 16):
        with pytest.raises(ConfigError, match="peft_config"):
            lora_section(bad)


def test_a_path_is_a_folders_name(tmp_path):
    assert GRPOArgs(output_dir=tmp_path).output_dir == str(tmp_path)


def test_messages_name_arguments_in_place_of_keys():
    assert {"lr", "epoch", "max_generate_length", "clip_eps", "save_steps", "device"} <= set(NAMES_HERE.values())
    for key, name in NAMES_HERE.items():
        assert renamed(f"{key}=3 is wrong", NAMES_HERE) == f"{name}=3 is wrong"
    assert renamed("a device of the coefficient", NAMES_HERE) == "a device of the coefficient"


def test_a_hint_of_the_doctor_names_arguments_and_says_where_there_is_none():
    said = hint("Try: algorithm.clip.high=0.28, a lower train.learning_rate, or algorithm.kl.coefficient=0.001.")
    assert said.startswith("Try: algorithm.clip.high=0.28, a lower lr, or beta=0.001.")
    assert said.endswith("(not arguments here; keys of a config for `atomrl train`: algorithm.clip.high)")
    assert hint("Try: harder problems (data.train), another reward (reward.functions).") == (
        "Try: harder problems (train_dataset), another reward (reward_funcs)."
    )
