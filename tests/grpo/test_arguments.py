"""GRPOArgs: checked as they are set, and what each becomes."""

import pytest

from atomrl.config import ConfigError, build_config, merge_trees
from atomrl.grpo import GRPOArgs
from atomrl.grpo.arguments import TABLE, name_arguments

NAMES = {
    "lr", "num_generations", "output_dir", "device", "save_steps", "epoch", "max_prompt_length", "max_generate_length",
    "reward_weights", "beta", "clip_eps", "gradient_accumulation_steps", "num_iterations", "batch_size",
}  # fmt: skip


def config_of(args):
    return build_config(merge_trees(args.to_tree(), {"run_name": "r", "model": {"path": "m"}, "data": {"train": "d"}}))


def test_the_arguments_are_these():
    assert set(GRPOArgs.model_fields) == NAMES


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("lrr", "lr"), ("num_generation", "num_generations"), ("learning_rate", "lr"), ("epochs", "epoch"),
     ("max_completion_length", "max_generate_length"), ("clip_epsilon", "clip_eps"), ("betta", "beta")],
)  # fmt: skip
def test_an_unknown_argument_is_an_error_with_the_nearest(name, nearest):
    with pytest.raises(AttributeError, match=f"no argument '{name}'; did you mean '{nearest}'"):
        setattr(GRPOArgs(), name, 1)
    with pytest.raises(AttributeError, match=f"did you mean '{nearest}'"):
        GRPOArgs(**{name: 1})
    with pytest.raises(AttributeError, match="there are output_dir, device"):
        GRPOArgs().zzzzqqqq = 1


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


def test_what_each_argument_becomes():
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
    assert config.algorithm.axes == {"clip": {"low": 0.1, "high": 0.1}, "kl": {"coefficient": 0.5}}


def test_a_path_is_a_folders_name(tmp_path):
    assert GRPOArgs(output_dir=tmp_path).output_dir == str(tmp_path)


def test_messages_name_arguments_in_place_of_keys():
    for name, key in TABLE.items():
        assert name_arguments(f"{key}=3 is wrong") == f"{name}=3 is wrong"
    assert name_arguments("max_completion_tokens=256 leaves no room") == "max_generate_length=256 leaves no room"
    assert name_arguments("a device of the coefficient") == "a device of the coefficient"
