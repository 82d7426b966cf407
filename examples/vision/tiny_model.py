"""Make a tiny Qwen2.5-VL with random weights for the vision quickstart: `python examples/vision/tiny_model.py FOLDER`.

Its pictures are those of the task `shapes`, 32 x 32 pixels: 16 patches, 4 tokens.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from atomrl.data.tasks.shapes import CELL, CELLS, WORDS
from atomrl.models.tokenizer import make_tokenizer

MEDIA = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
HIDDEN, PATCH = 96, CELL


def make(folder: Path, seed: int = 0) -> None:
    """Save the model, its tokenizer and its image processor."""
    tokenizer = make_tokenizer(WORDS)
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *MEDIA]})
    start, stop, image, video = tokenizer.convert_tokens_to_ids(MEDIA)
    ids = {"image": image, "video": video, "vision_start": start, "vision_end": stop}
    shape = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
            "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": HIDDEN,
            "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": CELLS * PATCH,
            "fullatt_block_indexes": [0, 1],
        },
        tie_word_embeddings=True,
        **{f"{name}_token_id": token for name, token in ids.items()},
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": (CELLS * CELL) ** 2, "longest_edge": (CELLS * CELL) ** 2}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
