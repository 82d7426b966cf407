"""How often the host waits for the device in a step: for each update and for each transfer, never for each micro-batch,
row, metric or weight."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from atomrl.backends.local import LocalBackend
from atomrl.config import CriticConfig, LoraConfig
from atomrl.engines.fake import FakeEngine
from atomrl.models.loading import model_weights
from atomrl.trainer.loop import compute_advantages, update_policy
from atomrl.trainer.report.metrics import update_metrics
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.report.tokens import TokenRecord
from atomrl.weight_sync import InProcessTransfer
from tests.backends.equality import case, settings_of, shared
from tests.tiny import make_tiny_model
from tests.trainer.counted_device import DEVICE, CountedDevice, allow_fused

CASES = {
    "one update": (case("grpo", shared), 1, 5),
    "two updates": (case("grpo", shared, axes={"kl": {"coefficient": 0.1}}), 2, 9),
    "adapters": (case("grpo", shared, lora=LoraConfig(rank=4), axes={"kl": {"coefficient": 0.1}}), 2, 9),
    "a critic": (case("ppo", shared, critic=CriticConfig(path="base", learning_rate=1e-3)), 1, 9),
}
"""Name -> what is trained, updates of a step, and waits: one for the metrics, two for hashes (of what was sent, and of
what the engine holds), one for each output without gradient, and for each update one for the norm of each trained
model's gradient and one for the numbers of recorded tokens."""


def waits_of(given, updates, folder, path, rows_per_micro_batch):
    """Those of the second step, when nothing is done for the first time."""
    settings = settings_of(given | {"train": {"rows_per_micro_batch": rows_per_micro_batch}}, folder)
    settings["model"] = settings["model"].model_copy(update={"path": str(folder / path)})
    algorithm, trainer = settings["algorithm"], LocalBackend(**settings)
    rows = replace(given["rows"](0), recorded=torch.arange(12))
    config = SimpleNamespace(updates_per_epoch=updates, updates_per_step=updates, seed=0)
    engine = FakeEngine(lambda prompt, index: prompt, None)
    engine.shapes = {name: tuple(weight.shape) for name, weight in model_weights(trainer.policy.model)}
    transfer, waits = InProcessTransfer(trainer, engine), {}
    with CountedDevice() as device:
        for role in trainer.roles.values():
            role.model.to(DEVICE)
        for name in trainer.trained:
            trainer.trained[name] = trainer.make_optimizer(name, trainer.roles[name].model, 1e-3, 9)
        trainer.device = DEVICE
        for step in (1, 2):
            device.waits.clear()
            tokens = TokenRecord()
            batch = compute_advantages(trainer, algorithm, rows, {}, config, Stopwatch())
            results = update_policy(trainer, algorithm, batch, config, step, Stopwatch(), tokens)
            waits = update_metrics(results)
            transfer(step)
    assert waits["actor/grad_norm"] > 0 and tokens.tensors()
    return device.waits


@pytest.mark.parametrize("name", CASES)
def test_waits_do_not_grow_with_micro_batches_or_weights(tmp_path, monkeypatch, name):
    allow_fused(monkeypatch)
    given, updates, waits = CASES[name]
    make_tiny_model(tmp_path / "base", "qwen2")
    make_tiny_model(tmp_path / "deep", "qwen2", num_hidden_layers=3)
    assert waits_of(given, updates, tmp_path, "base", rows_per_micro_batch=12).total() == waits
    many = waits_of(given, updates, tmp_path, "deep", rows_per_micro_batch=1)
    assert many.total() == waits, many


READS = {
    "a number": lambda x: float(x.sum()),
    "a choice": lambda x: bool((x > 0).any()),
    "a list": lambda x: x.tolist(),
    "a copy": lambda x: x.cpu(),
    "a mask": lambda x: x[x > 0.5],
    "places": lambda x: x.nonzero(),
    "a copy to the device that waits": lambda x: torch.ones(2).to(DEVICE),
}


@pytest.mark.parametrize("name", READS)
def test_each_way_to_wait_is_counted(name):
    with CountedDevice() as device:
        x = torch.ones(3, 4).to(DEVICE, non_blocking=True) * 2
        assert not device.waits
        READS[name](x)
    assert device.waits.total() == 1
