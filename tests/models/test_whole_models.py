"""Checkpoints with a vision tower, trained on text: what is trained, what is saved, what an engine samples with."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from atomrl.config import ConfigError, LoraConfig
from atomrl.engines.hf import HFEngine
from atomrl.engines.requests import EngineOptions
from atomrl.models.loading import load_policy, load_tokenizer, save_model
from atomrl.models.lora import adapter_weights, export, save_adapters
from atomrl.models.memory import count_parameters, trained_parameters
from atomrl.models.shapes import is_whole
from atomrl.protocols import WeightUpdate
from tests.tiny import make_tiny_tokenizer

TEXT = {
    "vocab_size": 102, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
FAMILIES = {
    "qwen2_5_vl": (
        {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}, TOWER | {"fullatt_block_indexes": [0]}, {}
    ),
    "qwen3_vl": (
        {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
        TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}, {},
    ),
    "qwen3_5": (
        {
            "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0},
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
        TOWER | {"num_position_embeddings": 16}, {},
    ),
    "gemma3": ({"layer_types": ["sliding_attention", "full_attention"]}, SIGLIP, {"mm_tokens_per_image": 4}),
    "mistral3": ({"model_type": "mistral"}, SIGLIP | {"model_type": "pixtral", "head_dim": 8}, {}),
    "internvl": (
        {"model_type": "qwen2"}, SIGLIP | {"model_type": "internvl_vision", "image_size": [28, 28],
                                           "patch_size": [14, 14]}, {},
    ),
}  # fmt: skip
"""Model type -> fields of its text config, its vision config, and others."""
TOKENS = torch.arange(20).view(2, 10) + 5


@pytest.fixture(params=FAMILIES)
def whole(request, tmp_path):
    """A tiny checkpoint with a vision tower."""
    text, vision, other = FAMILIES[request.param]
    torch.manual_seed(0)
    shape = transformers.AutoConfig.for_model(
        request.param, text_config=TEXT | text, vision_config=vision, tie_word_embeddings=True, **other
    )
    AutoModelForImageTextToText.from_config(shape).save_pretrained(tmp_path / "whole")
    make_tiny_tokenizer().save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "preprocessor_config.json").write_text('{"image_processor_type": "Any"}')
    return tmp_path / "whole"


def in_tower(name):
    return any(part in name for part in ("vis", "project"))


def test_it_is_saved_as_the_class_that_it_was_with_its_tower_unchanged(whole, tmp_path):
    policy = load_policy(whole, dtype="float32")
    frozen = {name for name, weight in policy.named_parameters() if not weight.requires_grad}
    assert frozen and all(in_tower(name) for name in frozen)
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert trained_parameters(policy.config) == trained < count_parameters(policy.config)
    before, optimizer = load_file(whole / "model.safetensors"), torch.optim.SGD(policy.parameters(), 0.1)
    policy(TOKENS).square().mean().backward()
    optimizer.step()
    save_model(policy, load_tokenizer(whole), tmp_path / "saved")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: (weight.shape, weight.dtype) for name, weight in after.items()} == {
        name: (weight.shape, weight.dtype) for name, weight in before.items()
    }
    assert {name for name in after if torch.equal(after[name], before[name])} == {n for n in after if in_tower(n)}
    source, saved = (json.loads((folder / "config.json").read_text()) for folder in (whole, tmp_path / "saved"))
    assert saved["architectures"] == source["architectures"] and saved["model_type"] == source["model_type"]
    processor = (folder / "preprocessor_config.json" for folder in (whole, tmp_path / "saved"))
    assert len({file.read_text() for file in processor}) == 1
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(input_ids=TOKENS).logits, policy(TOKENS))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]], ids=str)
def test_adapters_leave_the_tower_alone_and_are_merged_into_the_whole_model(whole, tmp_path, targets):
    lora = LoraConfig(rank=2, alpha=4, target_modules=targets)
    policy = load_policy(whole, dtype="float32", lora=lora)
    adapters = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert adapters and not any(in_tower(name) for name in adapters)
    for weight in policy.parameters():
        if weight.requires_grad:
            weight.data.add_(0.05)
    save_adapters(policy, tmp_path / "adapters")
    export(tmp_path / "adapters", tmp_path / "merged")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(again(input_ids=TOKENS).logits, policy(TOKENS), atol=1e-4)
    options = EngineOptions(dtype=torch.float32, device="cpu", max_concurrent_completions=2)
    engine = HFEngine.from_pretrained(str(whole), load_tokenizer(whole), options)
    engine.update_weights(WeightUpdate(version=1, tensors=[], adapters=adapter_weights(policy)))
    assert torch.allclose(engine.model(input_ids=TOKENS).logits, policy(TOKENS), atol=1e-4)


def test_a_model_that_reads_its_prompt_in_both_directions_is_refused(tmp_path):
    shape = transformers.PaliGemmaConfig(
        text_config=TEXT | {"model_type": "gemma"}, vision_config=SIGLIP | {"projection_dim": 32}, projection_dim=32
    )
    transformers.PaliGemmaForConditionalGeneration(shape).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"paligemma.*attends to later tokens"):
        load_policy(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("kind", "named", "expected"),
    [
        ("qwen3_5", ["Qwen3_5ForConditionalGeneration"], True), ("qwen3_5", ["Qwen3_5ForCausalLM"], False),
        ("qwen3_5", None, True), ("qwen3_5_text", ["Qwen3_5ForCausalLM"], False), ("gemma3_text", None, False),
        ("gemma3", ["Gemma3ForConditionalGeneration"], True), ("llama", ["LlamaForCausalLM"], False),
    ],
)  # fmt: skip
def test_the_class_of_a_name_that_text_and_whole_models_share(kind, named, expected):
    shape = transformers.AutoConfig.for_model(kind)
    shape.architectures = named
    assert is_whole(shape) is expected
