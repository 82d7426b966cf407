"""nanoGPT's model, as small as it goes, to write checkpoints as nanoGPT does."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class Config:
    block_size: int = 16
    vocab_size: int = 20
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = True


class LayerNorm(nn.Module):
    def __init__(self, size, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(width, 2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(torch.ones(length, length).tril() == 0, float("-inf"))
        return self.c_proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(rows, length, width))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = LayerNorm(config.n_embd, config.bias), Attention(config)
        self.ln_2, self.mlp = LayerNorm(config.n_embd, config.bias), MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": LayerNorm(config.n_embd, config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for parameter in self.parameters():  # also norms and biases, which begin as ones and zeros
            nn.init.normal_(parameter, std=0.3)

    def forward(self, tokens):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def save_checkpoint(model: NanoGPT, path, prefix: str = "") -> dict:
    """Write a checkpoint as nanoGPT's train.py does; `prefix` is that of torch.compile."""
    checkpoint = {
        "model": {prefix + name: tensor for name, tensor in model.state_dict().items()},
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "model_args": asdict(model.config),
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.47),
        "config": {"out_dir": "out", "dataset": "shakespeare_char", "learning_rate": 1e-3},
    }
    torch.save(checkpoint, path)
    return checkpoint
