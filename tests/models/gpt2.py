"""A tiny GPT-2, a model of transformers' own, and tokens to compare models on."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = torch.randint(0, 90, (2, 11), generator=torch.Generator().manual_seed(0))


def save_gpt2(folder, **config):
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=95, n_embd=32, n_layer=2, n_head=2, **config)).save_pretrained(folder)
    return folder
