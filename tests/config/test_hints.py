"""Hints for unknown config keys."""

import pytest

from atomrl.config import ConfigError, known_keys, load_config
from atomrl.config.keys import suggestion


@pytest.mark.parametrize(
    ("given", "answer"),
    [  # a key of the section that begins like it, or is near it
        ("eval.evry", "'eval.every_steps'"),
        ("eval.every", "'eval.every_steps'"),
        ("checkpoint.every", "'checkpoint.every_steps'"),
        ("eval.temp", "'eval.temperature'"),
        # the nearest name of another library
        ("lrr", "'train.learning_rate'"),
        ("train.lrr", "'train.learning_rate'"),
        ("critic.lrr", "'critic.learning_rate'"),
        ("preference.bta", "(in DPO and its family algorithm.loss.beta)"),
        ("train.epoch", "'train.total_epochs'"),
        # a key of another section, of nearly the same name
        ("sft.promt_field", "'data.prompt_field'"),
        ("preference.promt_field", "'data.prompt_field'"),
        # names of other libraries
        ("max_len", "'train.max_row_tokens'"),
        ("rollout.tensor_parallel_size", "'rollout.tensor_parallel' (of an engine; of a trainer backend.tensor)"),
        ("rollout.tensor_model_parallel_size", "'rollout.tensor_parallel'"),
        ("importance_sampling_level", "'algorithm.ratio' (token or sequence)"),
        ("micro_rollout_batch_size", "'train.rows_per_micro_batch'"),
        ("zero_stage", "'backend.type'"),
        ("colocate_all_models", "'cluster.placement'"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_is_meant(given, answer):
    assert answer in str(suggestion(given.split("."), known_keys()))


@pytest.mark.parametrize("given", ["delta", "attn_implementation", "rollout.mode"])
def test_keys_without_a_counterpart_suggest_no_other_key(given):
    assert suggestion(given.split("."), known_keys()) is None


def test_unknown_keys_of_a_backend_without_a_type_are_named_beside_it():
    tree = {"run_name": "r", "data": {"train": "d"}, "model": {"path": "m"}, "backend": {"rankz": 2, "tensor": 1}}
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    assert str(caught.value).splitlines()[1:] == [
        "  backend.type: is required",
        "  unknown key 'backend.rankz'; did you mean 'backend.ranks'?",
    ]
