"""A micro-batch does not make the host wait for the device.

On the `meta` device there are no numbers: what would fetch one from a GPU, or make a shape of them, fails there.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MistralConfig

from atomrl.backends.collective import Collective
from atomrl.backends.local import LocalBackend
from atomrl.config import CriticConfig
from atomrl.data.rows import to_training_batches
from atomrl.types import RaggedIds
from tests.algorithms.batches import changed
from tests.backends.batches import make_algorithm
from tests.backends.equality import case, compared, make_models, pairs, settings_of, shared


def kept(seed):
    """Rows whose tokens were drawn from two each."""
    rows = shared(seed)
    drawn = rows.tokens[rows.loss_mask]
    ids = torch.stack([drawn, (drawn + 1) % 90], 1).flatten()
    return changed(rows, candidates=RaggedIds(rows.loss_mask.int() * 2, ids.int()))


CRITIC = {"critic": CriticConfig(path="base", learning_rate=1e-3)}
CASES = {
    "grpo": case("grpo", shared),
    "grpo, packed": case("grpo", shared, pack_rows=True),
    "grpo, packed and checkpointed": case("grpo", shared, pack_rows=True, checkpointed=True),
    "ppo and a critic": case("ppo", shared, **CRITIC),
    "ppo and a critic, packed": case("ppo", shared, pack_rows=True, **CRITIC),
    "grpo over what top-p kept": case("grpo", kept),
    "dapo": case("dapo", shared),
    "gspo": case("gspo", shared),
    "gkd": case("gkd", shared),
    "dpo": case("dpo", compared),
    "dpo, lengths desensitised": case("dpo", compared, axes={"score": {"ld_alpha": 0.5}}),
    "kto": case("kto", compared),
    "simpo": case("simpo", compared),
    "reward model": case("reward_model", pairs),
    "transformers": case("grpo", shared, model="mistral"),
    "transformers, packed": case("grpo", shared, model="mistral", pack_rows=True),
    "transformers of learnt positions": case("grpo", shared, model="other"),
    "transformers with windows": case("grpo", shared, model="windows"),
    "transformers and gkd": case("gkd", shared, model="mistral"),
}


class Copies(TorchDispatchMode):
    """Refuses copies to the device that wait for it."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            assert torch.device(kwargs.get("device") or "cpu").type == "cpu" or kwargs.get("non_blocking")
        return operation(*args, **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_models(tmp_path_factory.mktemp("models"))
    for name, window in (("mistral", None), ("windows", 6)):
        shape = {"vocab_size": 102, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = MistralConfig(**shape, num_attention_heads=4, num_key_value_heads=2, sliding_window=window)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


class Unread(Collective):
    """A collective whose sums are zeros on the CPU, so that no device is read."""

    def total(self, tensor):
        return torch.zeros(tensor.shape)


def on_meta(given, folder):
    """A back end that has left the CPU, its algorithm, and a batch."""
    settings = settings_of(given, folder)
    algorithm, backend = settings["algorithm"], LocalBackend(**settings)
    rows = given["rows"](0)
    credited = algorithm.advantages(backend.forward_only(rows, algorithm.needs))
    (batch,) = to_training_batches(credited, algorithm, updates=1, epochs=1, seed=0, step=0)
    for role in backend.roles.values():
        role.model.to("meta")
    backend.device, backend.collective = torch.device("meta"), Unread()
    return backend, algorithm, replace(batch, recorded=torch.arange(batch.rows))


@pytest.mark.parametrize("name", CASES)
def test_no_micro_batch_waits_for_the_device(folder, name):
    backend, algorithm, batch = on_meta(CASES[name], folder)
    for copies in (nullcontext(), Copies()):  # tables of positions are made once
        with copies:
            backend.forward_only(batch, algorithm.needs)
            backend.gradients(batch, algorithm)
    trained = [backend.roles[name].model for name in backend.trained]
    assert all(any(weight.grad is not None for weight in model.parameters()) for model in trained)


def test_a_loss_that_reads_a_number_would_fail(folder):
    backend, _, batch = on_meta(CASES["grpo"], folder)
    with pytest.raises(RuntimeError, match="item"):
        backend.gradients(batch, make_algorithm())


def test_a_copy_that_waits_would_fail():
    with Copies(), pytest.raises(AssertionError):
        torch.ones(2).to("meta")
