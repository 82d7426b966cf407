"""GPT against transformers: logits and gradients for every variation of the architecture."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from atomrl.atoms.logprobs import token_entropy
from atomrl.models import gpt
from atomrl.models.decoder_spec import unsupported
from atomrl.models.gpt import GPT, new_gpt

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama-biases-tied": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-own-head-size": LlamaConfig(**SHAPE, head_dim=32),
    "llama-rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-tied-mha": Qwen2Config(**{**SHAPE, "num_key_value_heads": 4}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
}


def pair(config):
    """The transformers model with random weights (biases and norms too) and a GPT with the same."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
    ours = GPT(config)
    state = theirs.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    ours.load_state_dict(state)
    return ours, theirs


@pytest.mark.parametrize("attention", ["bmm", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_those_of_transformers(name, attention, monkeypatch):
    monkeypatch.setattr(gpt, "BMM_MAX_TOKENS", 512 if attention == "bmm" else 0)
    ours, theirs = pair(CONFIGS[name])
    tokens = torch.randint(0, 50, (3, 17))
    a, b = ours(tokens), theirs(tokens).logits
    assert (a - b).abs().max() / b.abs().max() < 1e-5
    direction = torch.randn_like(a)
    (a * direction).sum().backward()
    (b * direction).sum().backward()
    gradients = dict(ours.named_parameters())
    for parameter_name, parameter in theirs.named_parameters():
        error = (gradients[parameter_name].grad - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, parameter_name


def test_padding_changes_nothing_before_it():
    ours, _ = pair(CONFIGS["qwen2"])
    tokens = torch.randint(0, 50, (1, 9))
    padded = torch.cat([tokens, torch.zeros(1, 5, dtype=torch.long)], dim=1)
    torch.testing.assert_close(ours(padded)[:, :9], ours(tokens), atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_no_gradient():
    ours, _ = pair(CONFIGS["llama"])
    tokens, gradients = torch.randint(0, 50, (2, 9)), []
    for checkpointing in (False, True):
        ours.gradient_checkpointing = checkpointing
        ours.zero_grad()
        ours(tokens).square().sum().backward()
        gradients.append([parameter.grad for parameter in ours.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_bfloat16_computes_on_float32_weights():
    ours, theirs = pair(CONFIGS["llama"])
    tokens = torch.randint(0, 50, (2, 12))
    exact = theirs(tokens).logits
    theirs_rough = theirs.to(torch.bfloat16)(tokens).logits.float()
    ours.compute_dtype = torch.bfloat16
    logits = ours(tokens)
    assert logits.dtype == torch.float32
    assert (logits.float() - exact).norm() <= 1.2 * (theirs_rough - exact).norm()
    logits.float().square().sum().backward()
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in ours.parameters())


def test_unsupported_parts_of_a_model_are_named():
    assert "mistral" in unsupported(MistralConfig())
    assert "sliding" in unsupported(Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0))
    assert unsupported(LlamaConfig(attention_dropout=0.1)) is None  # the policy that is trained samples without any
    with pytest.raises(ValueError, match="rope_type"):
        GPT(LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_new_gpt_starts_near_uniform_and_repeats(family):
    models = [new_gpt(40, layers=2, hidden=64, heads=2, kv_heads=1, family=family, seed=seed) for seed in (3, 3, 4)]
    tokens = torch.randint(0, 40, (4, 20))
    logits = [model(tokens) for model in models]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    assert token_entropy(logits[0]).mean() > 0.8 * math.log(40)
    assert torch.isfinite(logits[0]).all()


def test_new_gpt_refuses_shapes_that_do_not_divide():
    with pytest.raises(ValueError, match="kv_heads"):
        new_gpt(40, hidden=96, heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="family"):
        new_gpt(40, family="gpt5")
    with pytest.raises(ValueError, match="head_dim=16"):
        new_gpt(40, hidden=64, heads=2, head_dim=16, family="qwen2")


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_compiled_layers_are_two_graphs_each_for_rows_of_any_shape(monkeypatch, packed, checkpointing):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda layer: compiler(layer, fullgraph=True, backend="aot_eager"))
    compiled, plain = (new_gpt(40, layers=2, hidden=64, heads=2, kv_heads=1, family="qwen2") for _ in range(2))
    compiled.compile_layers()
    for shape in [(2, 9), (3, 9), (2, 14), (4, 5)]:
        tokens, results = torch.randint(40, shape, generator=torch.Generator().manual_seed(0)), []
        for model in (compiled, plain):
            model.zero_grad()
            model.pack_rows, model.gradient_checkpointing = packed, checkpointing
            hidden = model.forward_hidden(tokens)
            (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
            results.append((hidden, {name: p.grad for name, p in model.named_parameters()}))
        torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
