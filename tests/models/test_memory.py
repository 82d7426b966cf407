"""Memory of activations against what autograd keeps, and what the process and a GPU hold."""

import torch

from atomrl.common.memory import process_memory
from atomrl.common.metrics import values
from atomrl.models.gpt import new_gpt
from atomrl.models.memory import activation_bytes_per_token
from atomrl.models.process_memory import memory_metrics


def test_activations_are_about_what_autograd_keeps():
    model = new_gpt(vocab_size=64, layers=1, hidden=64, heads=2, kv_heads=1)
    tokens, kept = torch.randint(0, 64, (4, 100)), {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer = model.model.layers[0]
    x = torch.randn(400, 64, requires_grad=True)
    calls = []
    handle = layer.register_forward_pre_hook(lambda layer, given: calls.append(given))
    model.forward_hidden(tokens)
    handle.remove()
    ((_, attend, *_),) = calls
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x, attend)
    estimate = activation_bytes_per_token(model.config, 100, 4, on_cpu=True)[0] * tokens.numel()
    assert out.shape == x.shape
    assert 0.7 < sum(kept.values()) / estimate < 1.3


def test_what_this_process_has_grows_with_what_it_holds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    before = values(memory_metrics())
    assert before.keys() == {"perf/cpu_memory_used_gb"}, "no GPU is asked for what it never began"
    held = torch.ones(2**26)
    assert values(memory_metrics())["perf/cpu_memory_used_gb"] > before["perf/cpu_memory_used_gb"] + 0.2
    assert process_memory("VmHWM") >= process_memory("VmRSS") - 2**20 > held.nbytes


def test_a_gpu_s_peak_is_that_since_it_was_last_asked(monkeypatch):
    peaks = [3 * 2**30, 2**30]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: peaks[0] + 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.pop(0))
    metrics = [values(memory_metrics()) for _ in range(2)]
    assert [row["perf/max_memory_allocated_gb"] for row in metrics] == [3.0, 1.0]
    assert [row["perf/max_memory_reserved_gb"] for row in metrics] == [4.0, 2.0]
