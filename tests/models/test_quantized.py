"""A base in 4 or 8 bits: its memory, its gradient, what an engine draws with, and what is exported."""

import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from atomrl.cli.main import main
from atomrl.config import ConfigError, LoraConfig, ModelConfig, RunConfig
from atomrl.models.gpt import GPT
from atomrl.models.loading import load_policy, load_tokenizer, model_weights
from atomrl.models.lora import adapters_disabled, export, save_adapters
from atomrl.models.quantized import QuantizedLinear, quantize, quantized_layers
from atomrl.models.transformers_model import HFModel
from atomrl.protocols import WeightUpdate
from atomrl.trainer.build import build_engine
from atomrl.weight_sync.transfer import InProcessTransfer
from tests.models.gpt2 import TOKENS, save_gpt2
from tests.models.test_lora import adapted
from tests.tiny import make_tiny_model

pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")
KINDS = pytest.mark.parametrize("kind", ["nf4", "int8"])


@pytest.fixture(params=["qwen2", "stablelm"])
def base(request, tmp_path):
    if request.param == "qwen2":
        return make_tiny_model(tmp_path / "base", "qwen2")
    return other_family(tmp_path / "base")


def other_family(folder):
    """A model that is computed by transformers."""
    from transformers import StableLmConfig

    torch.manual_seed(0)
    shape = StableLmConfig(
        vocab_size=102, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    make_tiny_model(folder)  # its tokenizer
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


@KINDS
def test_both_kinds_of_model_are_quantised_but_for_embedding_and_output(base, kind):
    policy, plain = adapted(base, quantization=kind), load_policy(base, dtype="float32")
    assert type(policy) is (GPT if "qwen2" in (base / "config.json").read_text() else HFModel)
    linears = [m for m in plain.modules() if isinstance(m, nn.Linear) and m.weight is not plain.head_weight]
    assert len(list(quantized_layers(policy))) == len(linears) > 10
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    with adapters_disabled(policy):
        gap = (policy(TOKENS) - plain(TOKENS)).norm() / plain(TOKENS).norm()
    assert 0 < gap < (0.5 if kind == "nf4" else 0.05)


@KINDS
@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_is_that_of_a_layer_with_these_weights(kind, bias):
    torch.manual_seed(0)
    layer = nn.Linear(96, 33, bias=bias).requires_grad_(False)
    quantised, plain = QuantizedLinear(layer, kind), nn.Linear(96, 33, bias=bias)
    plain.load_state_dict(quantised.state_dict())
    x = torch.randn(5, 96, requires_grad=True)
    y, same = quantised(x), plain(x)
    assert torch.equal(y, same)
    grad = torch.randn_like(y)
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(same, x, grad)[0])


@pytest.mark.parametrize("shape", [(64, 32), (33, 96), (48, 80), (31, 33), (3, 2)])
def test_weights_are_as_near_as_four_bits_allow(shape):
    """bitsandbytes 0.50 gives wrong ones on a CPU where rows are no multiple of 64."""
    torch.manual_seed(0)
    layer = nn.Linear(*shape, bias=False)
    nn.init.normal_(layer.weight)
    error = (QuantizedLinear(layer, "nf4").weight - layer.weight).norm() / layer.weight.norm()
    assert error < 0.12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (33, 96), (31, 33), (3, 2), (129, 257)])
def test_a_cpu_dequantizes_to_the_values_of_bitsandbytes_with_and_without_its_kernel(shape, dtype, monkeypatch):
    torch.manual_seed(0)
    layer = QuantizedLinear(nn.Linear(*shape, bias=False, dtype=dtype), "nf4")
    with_kernel, wide = layer.weight, torch.zeros(shape[1], shape[0] + 3, dtype=dtype)
    layer.weight_in(dtype, out=wide[:, :-3])
    monkeypatch.setattr("atomrl.models.quantized.usable", lambda _: False)
    assert torch.equal(layer.weight, with_kernel)
    assert torch.equal(wide[:, :-3], with_kernel) and not wide[:, -3:].any()


def test_nf4_takes_a_quarter_of_bfloat16():
    layer = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
    size = sum(parameter.nbytes for parameter in QuantizedLinear(layer, "nf4").parameters())
    assert size <= 1.1 * layer.weight.nbytes / 4
    half = sum(parameter.nbytes for parameter in QuantizedLinear(layer, "int8").parameters())
    assert half <= 1.01 * layer.weight.nbytes / 2


def test_a_full_weight_is_freed_before_the_next_one_is_quantized(monkeypatch):
    """Or a GPU would hold the whole base beside its codes while it is loaded."""
    full, counts, create = weakref.WeakSet(), [], QuantizedLinear.__init__

    def counted(self, linear, kind):
        full.add(linear)
        counts.append(len(full))
        create(self, linear, kind)

    monkeypatch.setattr(QuantizedLinear, "__init__", counted)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    quantize(model, torch.empty(0), "int8", torch.device("cpu"))
    assert counts == [1, 1, 1]


def test_the_backward_pass_keeps_no_weights():
    layer, kept = QuantizedLinear(nn.Linear(64, 64), "nf4"), []
    x = torch.randn(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer(x)
    assert not kept


@KINDS
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_keep_no_weight_of_the_base_and_dequantize_it_once_a_pass(
    tmp_path, monkeypatch, kind, dropout, checkpointing
):
    folder = make_tiny_model(tmp_path, "qwen2")
    lora = LoraConfig(rank=2, alpha=4, dropout=dropout)
    policy = load_policy(folder, dtype="float32", lora=lora, quantization=kind)
    policy.gradient_checkpointing = checkpointing
    policy.train()
    count, weights = 0, {tuple(layer.weight.shape) for layer in quantized_layers(policy)}
    own, kept, dequantize = {p.untyped_storage()._cdata for p in policy.parameters()}, [], QuantizedLinear.weight_in

    def counted(layer, dtype):
        nonlocal count
        count += 1
        return dequantize(layer, dtype)

    def keep(saved):
        if saved.untyped_storage()._cdata not in own:
            kept.append(tuple(saved.shape))
        return saved

    monkeypatch.setattr(QuantizedLinear, "weight_in", counted)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        states = policy.forward_hidden(TOKENS[:1, :5])
    assert kept and not weights & {shape for kept_shape in kept for shape in (kept_shape, kept_shape[::-1])}
    states.sum().backward()
    layers = len(list(quantized_layers(policy)))
    assert count <= layers * (3 if checkpointing else 2)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_draws_with_the_quantised_base(base, kind, dtype):
    class Trainer:
        def __init__(self, policy):
            self.policy = policy

        def weight_update(self, version, adapters_alone=False):
            from atomrl.models.lora import adapter_weights

            return WeightUpdate(version, () if adapters_alone else model_weights(self.policy), adapter_weights(policy))

    policy = adapted(base, dtype, quantization=kind)
    name = str(dtype).removeprefix("torch.")
    model = ModelConfig(path=str(base), dtype=name, device="cpu", lora=LoraConfig(rank=4))
    config = RunConfig(run_name="r", model=model, data={"train": "d"})
    engine = build_engine(config, str(base), load_tokenizer(base))
    transfer = InProcessTransfer(Trainer(policy), engine)
    transfer(1)  # ends with an error where the engine's weights are not the policy's
    transfer(2)
    held = dict(engine.model.held()) if hasattr(engine.model, "held") else dict(engine.model.named_parameters())
    layer = next(quantized_layers(policy))
    key = next(key for key, m in getattr(policy, "inner", policy).named_modules() if m is layer)
    own = held[key.removesuffix(".base_layer") + ".weight"].float()
    assert torch.equal(own, layer.weight.float())


@KINDS
def test_the_export_is_the_trained_policy(base, kind, tmp_path, capsys):
    policy = adapted(base, quantization=kind)
    save_adapters(policy, tmp_path / "adapter")
    load_tokenizer(base).save_pretrained(tmp_path / "adapter")
    error = export(tmp_path / "adapter", tmp_path / "merged")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(exported(TOKENS).logits, policy(TOKENS), atol=1e-4, rtol=1e-4)
    assert error.quantization == kind and error.rounding == 0 < error.added
    low, high = (0.05, 0.15) if kind == "nf4" else (0.001, 0.02)
    assert low < error.of_base < high
    again = load_policy(tmp_path / "adapter", dtype="float32").eval()
    torch.testing.assert_close(again(TOKENS), policy(TOKENS), atol=1e-4, rtol=1e-4)
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out'}\n" and f"error of the {kind} base" in printed.err


def test_a_base_in_bfloat16_is_exported_as_it_was_quantised(tmp_path):
    base = make_tiny_model(tmp_path / "base", "qwen2")
    policy = adapted(base, torch.bfloat16, quantization="nf4")
    save_adapters(policy, tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "merged")
    merged = dict(model_weights(load_policy(tmp_path / "merged", dtype="float32")))
    layer = policy.model.layers[0].mlp.down_proj
    trained = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    torch.testing.assert_close(merged["model.layers.0.mlp.down_proj.weight"], trained, atol=1e-6, rtol=1e-6)


def test_a_header_that_is_not_known_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    base = make_tiny_model(tmp_path / "base")
    save_adapters(adapted(base, quantization="int8"), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "base_quantization": "fp2", "base_dtype": "float32"})
    with pytest.raises(ConfigError, match="unknown"):
        export(tmp_path / "adapter", tmp_path / "merged")


def test_models_that_cannot_be_quantized_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trained; set model\.lora"):
        ModelConfig(path="x", quantization="nf4")
    with pytest.raises(ValueError, match="remove compile"):
        ModelConfig(path="x", quantization="nf4", lora=LoraConfig(), compile=True)
    with pytest.raises(ConfigError, match=r"nn.Linear layers \(GPT-2"):
        load_policy(save_gpt2(tmp_path / "gpt2"), lora=LoraConfig(rank=4), quantization="int8")
