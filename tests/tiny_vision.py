"""Tiny random vision-language models in Hugging Face layout, and pictures for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny import CHARACTERS

PAD, END, START, STOP, IMAGE, VIDEO = range(6)
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": END, "pad_token_id": PAD, "tie_word_embeddings": True,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "qwen2_5_vl": (
        {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
        TOWER | {"fullatt_block_indexes": [1], "window_size": 56},
        14,
    ),
    "qwen3_vl": (
        {"head_dim": 8, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        16,
    ),
    "qwen3_5": (
        {
            "head_dim": 8,
            "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True,
                                       "partial_rotary_factor": 1.0},
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
        TOWER | {"num_position_embeddings": 16},
        16,
    ),
}  # fmt: skip
"""Model type -> fields of its text config and of its vision config, and the size of its patches."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, after the special ones."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [byte_level.pre_tokenize_str(character)[0][0] for character in "\n" + CHARACTERS]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(SPECIAL + characters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[PAD], eos_token=SPECIAL[END], chat_template=TEMPLATE
    )


def make_tiny_vision_model(folder: Path, family: str = "qwen2_5_vl", seed: int = 0, wide: bool = False) -> Path:
    """Save a random model, whose logits depend on the picture, with tokenizer and image processor.

    Args:
        wide: heads of 32 numbers, which vLLM's kernels for CPUs need.
    """
    text, vision, patch = FAMILIES[family]
    if wide:
        rope = text["rope_parameters"] | {"mrope_section": [8, 4, 4]}
        text = text | {"head_dim": 32, "hidden_size": 128, "rope_parameters": rope}
        vision = vision | {"out_hidden_size": 128, "hidden_size": 64}
    tokenizer = make_tokenizer()
    tokens = {"image": IMAGE, "video": VIDEO, "vision_start": START, "vision_end": STOP}
    shape = AutoConfig.for_model(
        family,
        text_config=TEXT | text | {"vocab_size": len(tokenizer)},
        vision_config=vision | {"patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2},
        tie_word_embeddings=True,
        **{f"{name}_token_id": token for name, token in tokens.items()},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(shape)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (6 * patch) ** 2}
    Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 56, height: int = 56) -> Image.Image:
    """A picture of one colour with noise, different for each seed."""
    rng = np.random.default_rng(seed)
    colour = rng.integers(0, 236, 3, dtype=np.uint8)
    return Image.fromarray(colour + rng.integers(0, 20, (height, width, 3), dtype=np.uint8))
