"""Sizes of every kind of config: composite ones, mixtures of experts, state space models, and malformed files."""

import json

import pytest
import torch
from transformers import AutoConfig

from atomrl.algorithms import objective_of
from atomrl.config import ConfigError, load_config
from atomrl.engines.server_weights import cpu_cache_bytes
from atomrl.models.loading import load_policy, load_transformers, model_config_only
from atomrl.models.memory import activation_bytes_per_token, count_parameters, empty_model, widths
from atomrl.models.shapes import auto_class, text_config
from atomrl.planner.gpus import gpu_of
from atomrl.planner.step_time import step_seconds
from atomrl.trainer.memory import memory_by_phase
from tests.tiny import make_tiny_model

SMALL = {"vocab_size": 102, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
DENSE = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2}
EXPERTS = DENSE | {"num_experts_per_tok": 2}
MODELS = {
    "llama": (DENSE, 64),
    "gpt2": (SMALL | {"n_inner": None}, 128),
    "mamba": ({"vocab_size": 102, "hidden_size": 32, "num_hidden_layers": 2}, 64),
    "gemma3": ({"text_config": DENSE | {"head_dim": 8}}, 64),
    "mistral3": ({"text_config": DENSE | {"model_type": "mistral"}}, 64),
    "gemma4_text": (DENSE, 64),
    "mixtral": (EXPERTS | {"num_local_experts": 4}, 2 * 64),
    "gpt_oss": (EXPERTS | {"num_local_experts": 4, "head_dim": 8}, 2 * 64),
    "olmoe": (EXPERTS | {"num_experts": 4}, 2 * 64),
    "qwen2_moe": (
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}, 2 * 24 + 40
    ),
    "deepseek_v2": (EXPERTS | {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_shared_experts": 2}, 4 * 24),
    "qwen3_5_moe": (
        {
            "text_config": SMALL
            | {"num_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_key_value_heads": 2}
        },
        2 * 24 + 40,
    ),
}  # fmt: skip
"""Model type -> fields of its config, and the width of the MLP that a token runs through."""


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_config_is_planned(tmp_path, kind):
    fields, inner = MODELS[kind]
    AutoConfig.for_model(kind, **fields).save_pretrained(tmp_path)
    shape = model_config_only(tmp_path)
    assert text_config(shape).hidden_size == widths(shape)[0] == 32
    assert widths(shape)[3] == inner
    assert cpu_cache_bytes(shape, 2, torch.float32) > 0
    config = load_config({"run_name": "a", "model": {"path": str(tmp_path)}, "data": {"train": "x.jsonl"}})
    memory = memory_by_phase(config, objective_of({"name": "grpo"}), 1, "cuda", 2)
    assert memory.resident > 4 * count_parameters(shape)
    assert sum(step_seconds(config, shape, gpu_of("A100"), 2).values()) > 0
    assert type(empty_model(shape)) is auto_class(shape)._model_mapping[type(shape)]


def test_activations_of_experts_are_those_that_autograd_keeps():
    """Within a factor of two; a single expert would be a quarter of it."""
    small = EXPERTS | {"num_local_experts": 8, "num_experts_per_tok": 4, "hidden_size": 64, "intermediate_size": 128}
    shape = AutoConfig.for_model("mixtral", **small)
    model, tokens, saved = auto_class(shape).from_config(shape).float(), 64, {}
    own = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.arange(tokens)[None], use_cache=False)
    measured = sum(storage.nbytes() for storage in saved.values()) / tokens / 2
    assert 0.7 < activation_bytes_per_token(shape, tokens, 4, on_cpu=False)[0] / measured < 2


MALFORMED = {
    "num_attention_heads is 0": {"num_attention_heads": 0},
    "num_key_value_heads is 0": {"num_key_value_heads": 0},
    "num_hidden_layers is -1": {"num_hidden_layers": -1},
    "vocab_size is 0": {"vocab_size": 0},
    "hidden_size": {"hidden_size": "32"},
    "hidden size": {"hidden_size": 33, "head_dim": None},
    "num_key_value_heads=3 does not divide num_attention_heads=4": {"num_key_value_heads": 3},
    "do not fit its config.json": {"vocab_size": 90},
    "config of model": {"model_type": "unheard_of"},
}


@pytest.mark.parametrize("chain", [["a"], ["a", "b"], ["a", "b", "c"]], ids=len)
def test_adapters_that_are_their_own_base_are_refused(tmp_path, chain):
    for name, base in zip(chain, chain[1:] + chain[:1], strict=True):
        (tmp_path / name).mkdir()
        settings = {"base_model_name_or_path": str(tmp_path / base), "peft_type": "LORA"}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
    for load in (model_config_only, load_transformers):
        with pytest.raises(ConfigError, match="are their own base: write the path of a full model"):
            load(tmp_path / "a") if load is model_config_only else load(tmp_path / "a", torch.float32)


@pytest.mark.parametrize("message", MALFORMED)
def test_a_malformed_config_is_named(tmp_path, message):
    folder = make_tiny_model(tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | MALFORMED[message]))
    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(folder, dtype="float32")
    assert str(tmp_path) in str(caught.value)
