"""The local back end: dtypes, checkpointing, models of other families."""

import pytest
import torch

from atomrl.backends.local import LocalBackend
from atomrl.backends.rank_actors import BackendInActor
from atomrl.common.metrics import values
from atomrl.config import ConfigError, ModelConfig, TrainConfig
from tests.backends.batches import follow_outputs, make_algorithm, make_batch, weights_of
from tests.models.gpt2 import save_gpt2
from tests.tiny import make_tiny_model


def make(folder, train=None, **model):
    train = TrainConfig(**({"learning_rate": 1e-3} | (train or {})))
    model = ModelConfig(path=str(folder), **({"dtype": "float32"} | model))
    return LocalBackend(model, train, make_algorithm(), total_updates=10)


@pytest.fixture(autouse=True)
def bfloat16_is_bfloat16(monkeypatch):
    """Also on a machine that has no instructions for it."""
    monkeypatch.setattr("atomrl.models.loading.has_bfloat16", lambda device: True)


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "base")


def test_bfloat16_trains_float32_master_weights(folder):
    """Steps far below bfloat16's resolution add up."""
    backend, batch = make(folder, {"learning_rate": 1e-5}, dtype="bfloat16"), make_batch()
    start = {name: tensor.clone() for name, tensor in weights_of(backend).items()}
    for _ in range(10):
        backend.train_step(batch, make_algorithm())
    for name, tensor in weights_of(backend).items():
        assert tensor.dtype == torch.float32
        moved = (tensor - start[name]).abs()
        assert 0 < moved.max() < 2e-4, name
    assert backend.policy.model.forward_hidden(batch.tokens).dtype == torch.bfloat16


def test_bfloat16_gradients_add_up_in_float32(folder):
    """Many micro-batches lose no more than one does."""
    gradients = {}
    for name, model, train in [
        ("exact", {"dtype": "float32"}, {}),
        ("whole", {"dtype": "bfloat16"}, {}),
        ("parts", {"dtype": "bfloat16"}, {"rows_per_micro_batch": 1}),
    ]:
        backend = make(folder, train, **model)
        backend.gradients(make_batch(rows=64), make_algorithm())
        gradients[name] = torch.cat([p.grad.flatten() for p in backend.policy.model.parameters()])
        assert gradients[name].dtype == torch.float32
    errors = {name: (gradients[name] - gradients["exact"]).norm().item() for name in ("whole", "parts")}
    assert errors["parts"] < 1.5 * errors["whole"]


def test_a_models_own_dropout_is_off_while_it_trains(tmp_path):
    """GPT-2 has 0.1 by default: the log-probs of the update would not be those of the policy that sampled."""
    backend, batch = make(save_gpt2(tmp_path)), make_batch()
    batch = backend.forward_only(batch, frozenset({"old_logprobs"}))
    assert backend.policy.model.training
    pairs = []
    follow_outputs(
        backend, lambda micro, outputs: (pairs.append((outputs["logprobs"], micro.old_logprobs)), outputs)[1]
    )
    backend.gradients(batch, make_algorithm())
    for logprobs, old in pairs:
        torch.testing.assert_close(logprobs.detach(), old)
    assert pairs
    assert backend.policy.model.config.resid_pdrop == 0.1


def test_a_back_end_in_a_process_of_its_own_tells_the_memory_of_that(folder):
    served = BackendInActor(lambda: make(folder))
    metrics = values(served.train_step(make_batch(), make_algorithm()))
    assert {"actor/grad_norm", "perf/cpu_memory_used_gb"} <= metrics.keys()


def test_gradient_checkpointing_gives_the_same_step(folder):
    steps = []
    for checkpointing in (False, True):
        backend = make(folder, gradient_checkpointing=checkpointing)
        steps.append((values(backend.train_step(make_batch(), make_algorithm())), weights_of(backend)))
    assert steps[0][0] == steps[1][0]
    assert all(torch.equal(tensor, steps[1][1][name]) for name, tensor in steps[0][1].items())


def test_trains_models_of_other_families(tmp_path):
    backend = make(save_gpt2(tmp_path / "base", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), dtype="bfloat16")
    batch = make_batch()
    assert backend.policy.model.forward_hidden(batch.tokens).dtype == torch.bfloat16, (
        "the head's product is not in float32"
    )
    losses = [values(backend.train_step(batch, make_algorithm()))["actor/pg_loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    backend.save(tmp_path / "checkpoint")
    again = make(tmp_path / "base", dtype="bfloat16")
    again.load(tmp_path / "checkpoint")
    assert values(again.train_step(batch, make_algorithm())) == values(backend.train_step(batch, make_algorithm()))


def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path):
    make(folder).save(tmp_path / "checkpoint")
    other = make(make_tiny_model(tmp_path / "other", hidden_size=64))
    with pytest.raises(ConfigError, match="another model"):
        other.load(tmp_path / "checkpoint")


def test_a_server_finds_only_the_model_in_a_checkpoint(folder, tmp_path):
    make(folder).save(tmp_path / "checkpoint")
    assert [file.name for file in (tmp_path / "checkpoint").glob("*.safetensors")] == ["model.safetensors"]


def test_weight_decay_is_on_matrices_alone(folder):
    backend, batch = make(folder, {"weight_decay": 0.5, "learning_rate": 0.1}), make_batch()
    start = {name: tensor.clone() for name, tensor in weights_of(backend).items()}
    # A gradient of exactly 0 would be no update at all; this one is far below Adam's eps.
    backend.train_step(make_batch(advantages=batch.advantages * 1e-20), make_algorithm())
    for name, tensor in weights_of(backend).items():
        expected = start[name] * (0.95 if tensor.dim() == 2 else 1.0)
        torch.testing.assert_close(tensor, expected)
