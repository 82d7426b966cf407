"""A checkpoint with a vision tower in vLLM, on text: its weights under their published names, and its completions."""

from __future__ import annotations

import json
from contextlib import closing
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from atomrl.engines.generation import generate
from atomrl.engines.hf import HFEngine
from atomrl.engines.requests import EngineOptions
from atomrl.engines.vllm import VLLMEngine
from atomrl.models.loading import load_policy, load_tokenizer, model_weights
from atomrl.protocols import WeightUpdate
from atomrl.types import SamplingParams
from atomrl.weight_sync.transfer import compare, dtypes_of, expected_hashes
from tests.models.test_whole_models import FAMILIES, TEXT
from tests.prompts import logprobs_of, prompts_of, response
from tests.tiny import make_tiny_tokenizer

pytestmark = [
    pytest.mark.short,
    pytest.mark.usefixtures("vllm"),
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's class imports torchvision"),
]
TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
OPTIONS = EngineOptions(torch.float32, "cpu", max_concurrent_completions=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen2.5-VL with heads of 32, which vLLM's kernels for CPUs want."""
    path, tokenizer = tmp_path_factory.mktemp("whole"), make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    text, vision, other = FAMILIES["qwen2_5_vl"]
    rope = text["rope_parameters"] | {"mrope_section": [8, 4, 4]}
    sizes = {"head_dim": 32, "hidden_size": 128, "vocab_size": len(tokenizer), "rope_parameters": rope}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    shape = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=TEXT | text | sizes,
        vision_config=vision | {"out_hidden_size": 128, "patch_size": 14, "spatial_merge_size": 2},
        tie_word_embeddings=True,
        **dict(zip(names, tokenizer.convert_tokens_to_ids(TOKENS), strict=True)),
        **other,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(shape).save_pretrained(path)
    tokenizer.save_pretrained(path)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    processor |= {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 784, "longest_edge": 7056}}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def test_its_trained_weights_arrive_and_it_draws_what_transformers_draws(folder, monkeypatch):
    """The tied embedding has a prefix, and vLLM other names for it and for the layers."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    policy, tokenizer = load_policy(folder, dtype="float32"), load_tokenizer(folder)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.05 * torch.randn_like(weight) * weight.requires_grad)
    update = WeightUpdate(version=1, tensors=list(model_weights(policy)))
    drawn = []
    for kind in (VLLMEngine, HFEngine):
        with closing(kind.from_pretrained(str(folder), tokenizer, OPTIONS)) as engine:
            assert engine.weight_shapes().keys() == {name for name, _ in update.tensors}
            engine.update_weights(update)
            held = engine.weight_hashes()
            compare(held, expected_hashes(update.tensors, dtypes_of(held)), 1)
            unread = {weight.name for weight in held if weight.value is None}
            assert all("visual" in name for name in unread)
            sampling = SamplingParams(max_completion_tokens=12, temperature=0.0)
            drawn.append(generate(engine, prompts_of([5, 9, 20, 33], [40, 41, 7]), sampling))
    for one, other in zip(*drawn, strict=True):
        assert response(one) == response(other)
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-4)
