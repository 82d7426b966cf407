"""Tiny random models in Hugging Face layout, with tokenizer and chat template, for tests and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SPECIAL_TOKENS = ["<|endoftext|>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
CHARACTERS = "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character (102 with the special ones); pad 0, bos 1 (never added), eos 2.

    It is a byte-level BPE without merges, because transformers rebuilds the tokenizer of a Qwen2 folder as one.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [byte_level.pre_tokenize_str(character)[0][0] for character in "\t\n" + CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(
    folder: Path,
    architecture: Literal["llama", "qwen2", "qwen3", "qwen3_moe"] = "llama",
    *,
    seed: int = 0,
    scale: float = 0.3,
    **config: Any,
) -> Path:
    """Save a random model (float32, about 20 thousand parameters) and its tokenizer; returns `folder`.

    `scale` is the standard deviation of the weights: large enough that logits differ and greedy text is no loop.
    Any further keyword goes into the model's config, e.g. `tie_word_embeddings=False`, `hidden_size=64`.
    """
    tokenizer = make_tiny_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": scale,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_CONFIGS[architecture](**(shape | config)), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # created as zeros, which would hide a forgotten bias
                torch.nn.init.normal_(parameter, std=scale)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def make_tiny_deberta(folder: Path, labels: int = 1, seed: int = 0, **config: Any) -> Path:
    """Save a random DeBERTa-v2 sequence classifier with a tokenizer of letters and digits, which makes pairs."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification, DebertaV2Tokenizer

    special = [(token, 0.0) for token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")]
    letters = [(letter, -3.0) for letter in "▁abcdefghijklmnopqrstuvwxyz0123456789+-*=?.,<>/"]
    tokenizer = DebertaV2Tokenizer(vocab=special + letters, unk_id=3)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.5,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
        "num_labels": labels,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        DebertaV2ForSequenceClassification(DebertaV2Config(**(shape | config))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
