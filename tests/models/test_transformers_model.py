"""Models through transformers: computed as the engine computes them, saved as they are published."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from atomrl.config import ConfigError, LoraConfig
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import load_policy, model_weights, read_safetensors, save_model
from atomrl.models.published import published_weights
from atomrl.models.transformers_model import HFModel

SHAPE = {
    "vocab_size": 95,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
GROUPED = {**SHAPE, "num_key_value_heads": 1}
CONFIGS = {
    "mistral": lambda: transformers.MistralConfig(**GROUPED),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=95, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SHAPE),
}
TOKENS = torch.randint(0, 95, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def make(tmp_path):
    def save(family):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


@pytest.mark.parametrize("family", ["mistral", "gpt2", "olmo2", "mixtral"])
def test_in_bfloat16_a_policy_is_its_own_reference_at_the_start(make, family):
    """Mean |difference| was 0.0133 (Mistral), 0.008 (GPT-2, OLMo2): autocast kept residual stream and norms wide."""
    folder = make(family)
    policy = load_policy(folder, dtype=torch.bfloat16).eval()
    reference = load_policy(folder, dtype=torch.bfloat16, trainable=False).eval()
    assert isinstance(policy, HFModel) and policy.head_weight.dtype == torch.float32
    engine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    logprobs = [model(TOKENS).log_softmax(-1) for model in (policy, reference)]
    assert (logprobs[0] - logprobs[1]).abs().mean() == 0
    assert torch.equal(policy.forward_hidden(TOKENS), engine.base_model(TOKENS).last_hidden_state)
    # The engine's logits are rounded; which way a sum in the middle goes depends on the CPU's order of adding.
    torch.testing.assert_close(policy(TOKENS).bfloat16(), engine(TOKENS).logits, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "gpt2", "mixtral"])
def test_rounding_leaves_the_gradient_and_the_weights_alone(make, family):
    folder = make(family)
    policy = load_policy(folder, dtype=torch.bfloat16).train()
    pure = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    names = [name for name, _ in policy.inner.named_parameters()]

    def gradients():
        policy.zero_grad()
        policy.forward_hidden(TOKENS).float().square().sum().backward()
        return {name: p.grad for name, p in policy.inner.named_parameters() if p.grad is not None}

    first = gradients()
    pure.base_model(TOKENS).last_hidden_state.float().square().sum().backward()
    for name, parameter in pure.named_parameters():
        if parameter.grad is not None:
            assert first[name].dtype == torch.float32
            error = (first[name] - parameter.grad.float()).norm() / parameter.grad.float().norm()
            assert error < 1e-2, name  # rows of the embedding are added up in float32 here
    policy.inner.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert [name for name, _ in policy.inner.named_parameters()] == names
    assert all(p.dtype == torch.float32 for p in policy.parameters())


def saved_matrices(model):
    """Bytes that autograd keeps of matrices that do not depend on the number of tokens, beyond the weights."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.dim() == 2 and min(tensor.shape) >= 100 and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.forward_hidden(torch.ones(1, 2, dtype=torch.long))
    assert hidden.requires_grad
    return sum(kept.values())


def test_training_in_bfloat16_keeps_no_copy_of_the_weights():
    """No rounded copy of linear weights is saved for the backward pass; it would take 802,816 bytes here."""
    model = new_gpt(vocab_size=64, layers=2, hidden=128, heads=2)
    model.compute_dtype = torch.bfloat16
    assert saved_matrices(model) == 0
    model.compute_dtype = None
    weights = torch.randn(2, 17, 128, generator=torch.Generator().manual_seed(1))
    (model.forward_hidden(TOKENS % 64) * weights).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.compute_dtype = torch.bfloat16
    (model.forward_hidden(TOKENS % 64) * weights).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - expected[name]).norm() < 0.1 * expected[name].norm(), name


def test_training_in_bfloat16_through_transformers_keeps_no_copy_either(make, monkeypatch):
    policy, packed = load_policy(make("mistral"), dtype=torch.bfloat16), []
    hooks = torch.autograd.graph.saved_tensors_hooks
    monkeypatch.setattr(
        torch.autograd.graph,
        "saved_tensors_hooks",
        lambda pack, unpack: hooks(lambda saved: (packed.append(pack(saved)), packed[-1])[1], unpack),
    )
    policy.forward_hidden(TOKENS)
    matrices = [p for name, p in policy.inner.model.layers.named_parameters() if p.dim() == 2]
    masters = {id(item[0]) for item in packed if isinstance(item, tuple)}
    assert {id(p) for p in matrices} <= masters
    assert all(item.shape not in {p.shape for p in matrices} for item in packed if isinstance(item, torch.Tensor))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_neox"])
def test_saved_under_the_names_that_are_published(make, tmp_path, family):
    folder = make(family)
    published = load_file(folder / "model.safetensors")
    policy = load_policy(folder, dtype="float32").eval()
    assert policy.inner.state_dict().keys() != published.keys()
    save_model(policy, None, tmp_path / "again")
    saved = dict(read_safetensors(tmp_path / "again"))
    assert saved.keys() == published.keys() == dict(model_weights(policy)).keys()
    assert all(torch.equal(saved[name], published[name]) for name in published)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(again(TOKENS).logits, policy(TOKENS))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_neox", "gpt2"])
def test_published_weights_are_written_in_place(make, family):
    folder = make(family)
    inner = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: tensor.data_ptr() for name, tensor in inner.state_dict().items()}
    new = {name: torch.randn_like(tensor) for name, tensor in published_weights(inner).items()}
    with torch.no_grad():
        for name, tensor in published_weights(inner).items():
            tensor.copy_(new[name])
    assert {name: tensor.data_ptr() for name, tensor in inner.state_dict().items()} == before
    assert all(torch.equal(tensor, new[name]) for name, tensor in published_weights(inner).items())
    inner.save_pretrained(folder)
    stored = dict(read_safetensors(folder))
    assert all(torch.equal(tensor, new[name]) for name, tensor in stored.items())


def test_weights_under_adapters_of_a_mixture_of_experts_have_published_names(make):
    folder = make("mixtral")
    policy = load_policy(folder, dtype="float32", lora=LoraConfig(rank=2, target_modules=["q_proj"]))
    assert dict(model_weights(policy)).keys() == load_file(folder / "model.safetensors").keys()


def test_models_that_are_not_causal_are_refused(tmp_path):
    t5 = transformers.T5Config(vocab_size=95, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match=r"t5 .*causal"):
        load_policy(tmp_path / "t5")
    shape = {name: value for name, value in SHAPE.items() if name not in ("bos_token_id", "eos_token_id")}
    bert = transformers.BertConfig(**shape)
    transformers.BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match=r"bert .*causal"):
        load_policy(tmp_path / "bert")
    transformers.BertModel(bert).save_pretrained(tmp_path / "encoder")  # as sentence encoders are
    with pytest.raises(ConfigError, match=r"BertModel.*causal"):
        load_policy(tmp_path / "encoder")
    transformers.BertLMHeadModel(bert).save_pretrained(tmp_path / "bidirectional")
    with pytest.raises(ConfigError, match=r"bert .*attends to later tokens.*is_decoder"):
        load_policy(tmp_path / "bidirectional", dtype="float32")
