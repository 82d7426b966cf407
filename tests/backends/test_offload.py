"""Activations in the CPU's memory until the backward pass: the same gradient to the last bit."""

import pytest
import torch

from atomrl.backends.local import LocalBackend
from atomrl.config import LoraConfig, ModelConfig, TrainConfig
from atomrl.models import offloading as offload
from tests.backends.batches import make_algorithm, make_batch
from tests.models.gpt2 import save_gpt2
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {"ours": make_tiny_model(place / "ours", "qwen2"), "transformers": save_gpt2(place / "other")}


@pytest.fixture
def held(monkeypatch):
    """Whatever was put away: all, however small."""
    tensors, empty_like = [], torch.empty_like
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: tensors.append(a[0]) or empty_like(*a, **k))
    return tensors


def gradients(folder, **model):
    settings = ModelConfig(**({"path": str(folder), "dtype": "float32"} | model))
    backend = LocalBackend(settings, TrainConfig(tokens_per_micro_batch=40), make_algorithm(), total_updates=2)
    backend.gradients(make_batch(rows=8, vocabulary=60), make_algorithm())
    return {name: w.grad for name, w in backend.policy.model.named_parameters() if w.grad is not None}


KINDS = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "adapters": {"lora": LoraConfig(rank=4)},
    "rounded": {"dtype": "bfloat16", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["ours", "transformers"])
def test_gradients_are_the_same_to_the_bit(folders, model, kind, held):
    expected = gradients(folders[model], **KINDS[kind])
    held.clear()
    offloaded = gradients(folders[model], **KINDS[kind], activation_offload=True)
    assert offloaded.keys() == expected.keys() and len(offloaded) > 10
    assert all(torch.equal(grad, expected[name]) for name, grad in offloaded.items())
    layers_inputs = [tensor for tensor in held if tensor.dim() >= 2]
    assert layers_inputs and not any(isinstance(tensor, torch.nn.Parameter) for tensor in held)


def test_weights_and_their_views_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
    with offload.offloading():
        assert offload.put(weight).data_ptr() == weight.data_ptr()
        y = torch.addmm(x, x, weight.T)
        small = offload.put(x.detach())
    assert isinstance(small, tuple) and torch.equal(offload.get(small), x)
    y.sum().backward()
    assert offload.put(x.detach()[:1]).numel() == 4, "outside nothing is put away"
