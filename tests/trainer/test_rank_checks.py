"""Models that ranks cannot train are refused before a run: all that the run uses, and no others."""

from typing import get_args

import pytest

from atomrl.algorithms import objective_of
from atomrl.config import BackendConfig, ConfigError, load_config
from atomrl.trainer import prepare_run
from atomrl.trainer.build import RANKED, ranked_kind
from atomrl.trainer.checks.config import check_ranks, check_savers
from tests.models.gpt2 import save_gpt2
from tests.tiny import make_tiny_model

DATA = {"train": "arithmetic", "train_size": 8, "max_prompt_tokens": 256}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 96}
    return {
        "even": str(make_tiny_model(folder / "even", "qwen2")),
        "odd": str(make_tiny_model(folder / "odd", "qwen2", **odd)),
        "gpt2": str(save_gpt2(folder / "gpt2")),
    }


def check(models, algorithm="grpo", teacher=None, critic=None, **backend):
    tree = {"run_name": "r", "model": {"path": models["even"], "pack_rows": True}, "data": DATA}
    tree |= {"backend": {"type": "fsdp", "ranks": 2, **backend}, "algorithm": {"name": algorithm}}
    tree |= {"teacher": {"path": models[teacher]}} if teacher else {}
    tree |= {"critic": {"path": models[critic]}} if critic else {}
    check_ranks(load_config(tree), objective_of({"name": algorithm}))


@pytest.mark.parametrize("cut", ["sequence", "tensor"])
def test_teacher_and_critic_are_cut_too(models, cut):
    check(models, "gkd", teacher="even", **{cut: 2})
    for algorithm, role in (("gkd", "teacher"), ("ppo", "critic")):
        with pytest.raises(ConfigError, match=f"backend.{cut}=2.*odd"):
            check(models, algorithm, **{role: "odd", cut: 2})


@pytest.mark.parametrize("cut", ["sequence", "tensor"])
def test_a_critic_that_is_not_used_is_not_looked_at(models, cut):
    check(models, critic="odd", **{cut: 2})


@pytest.mark.parametrize("cut", ["sequence", "tensor"])
def test_a_fresh_model_is_cut_too(cut):
    def prepare(heads):
        gpt = {"layers": 1, "hidden": 96, "heads": heads, "intermediate": 96}
        tree = {
            "run_name": "r",
            "data": DATA | {"train": "calculation"},
            "sft": {"gpt": gpt},
            "model": {"pack_rows": True},
        }
        return prepare_run(load_config(tree | {"backend": {"type": "fsdp", "ranks": 3, cut: 3}}))

    prepare(3)
    with pytest.raises(ConfigError, match=f"backend.{cut}=3.*sft.gpt"):
        prepare(2)


def quantised(path, kind, **more):
    model = {"path": path, "lora": {}, "quantization": kind}
    return load_config({"run_name": "r", "model": model, "data": DATA, **more})


def test_a_model_without_linear_layers_has_none_to_quantise(models):
    check_savers(quantised(models["even"], "int8"))
    with pytest.raises(ConfigError, match=r"nn.Linear layers"):
        check_savers(quantised(models["gpt2"], "int8"))


def test_impossible_settings_are_refused_before_missing_packages(models, monkeypatch):
    monkeypatch.setattr("atomrl.trainer.checks.config.find_spec", lambda name: None)
    megatron = {"backend": {"type": "megatron", "ranks": 1}}
    config = quantised(models["even"], "nf4", rollout={"engine": "native"}, **megatron)
    with pytest.raises(ConfigError, match="Megatron's layers"):
        prepare_run(config)
    eight = {"run_name": "r", "model": {"path": models["even"]}, "data": DATA, "train": {"optimizer": "adamw8bit"}}
    with pytest.raises(ConfigError, match="does not support sharding"):
        check_savers(load_config(eight | megatron))


def test_each_section_has_its_back_end_in_the_table():
    kinds = {kind.model_fields["type"].annotation: kind for kind in get_args(BackendConfig)}
    assert {get_args(type_)[0] for type_ in kinds} == RANKED.keys()
    for type_, kind in kinds.items():
        (name,) = get_args(type_)
        settings = kind(type=name)
        assert settings.choices.keys() <= kind.model_fields.keys()
        chosen = ranked_kind(settings)
        assert callable(chosen) and callable(chosen.check) and callable(chosen.memory)
