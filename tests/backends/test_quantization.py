"""Training with a quantised base and with moments in 8 bits: the steps, going on exactly, and what is refused."""

from functools import partial

import pytest
import torch

from atomrl.backends.local import LocalBackend
from atomrl.common.metrics import values
from atomrl.config import ConfigError, LoraConfig, ModelConfig, TrainConfig, load_config
from atomrl.models.quantized import quantized_layers
from atomrl.trainer.checks.config import check_savers
from atomrl.trainer.memory import memory_estimate
from tests.backends.batches import make_algorithm, make_batch, weights_of
from tests.backends.comparison import compare
from tests.backends.equality import all_cases, case, compared, locally, make_models, run_ranks
from tests.models.test_quantized import other_family
from tests.tiny import make_tiny_model

pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")
CONFIG = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Wide enough that bitsandbytes keeps moments in 8 bits."""
    return str(make_tiny_model(tmp_path_factory.mktemp("base"), "qwen2", hidden_size=64, intermediate_size=128))


def make(folder, optimizer="adamw", needs=frozenset(), **model):
    return LocalBackend(
        ModelConfig(path=folder, dtype="float32", **model),
        TrainConfig(learning_rate=0.01, optimizer=optimizer),
        make_algorithm(needs=needs),
        total_updates=10,
    )


def steps(backend, count, first=0):
    return [values(backend.train_step(make_batch(seed=first + i), make_algorithm())) for i in range(count)]


ADAPTED = {"lora": LoraConfig(rank=64, dropout=0.1)}
SETTINGS = {
    "nf4": ADAPTED | {"quantization": "nf4"},
    "int8": ADAPTED | {"quantization": "int8"},
    "nf4, 8 bits": ADAPTED | {"quantization": "nf4", "optimizer": "adamw8bit"},
    "8 bits": {"optimizer": "adamw8bit"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_run_continues_exactly(folder, settings, tmp_path):
    whole = make(folder, **settings)
    steps(whole, 2)
    whole.save(tmp_path)
    expected = steps(whole, 3, first=2)
    again = make(folder, **settings)
    steps(again, 1, first=7)  # other weights and moments than those that are loaded
    again.load(tmp_path)
    assert steps(again, 3, first=2) == expected
    assert all(torch.equal(tensor, weights_of(whole)[name]) for name, tensor in weights_of(again).items())


def test_the_base_stays_and_is_the_reference(folder):
    backend = make(folder, needs=frozenset({"ref_logprobs"}), lora=LoraConfig(rank=4), quantization="nf4")
    before = [layer.weight.clone() for layer in quantized_layers(backend.policy.model)]
    reference = backend.forward_only(make_batch(), {"ref_logprobs"}).ref_logprobs
    steps(backend, 2)
    assert all(torch.equal(a, b.weight) for a, b in zip(before, quantized_layers(backend.policy.model), strict=True))
    batch = make_batch()
    assert torch.equal(backend.forward_only(batch, {"ref_logprobs"}).ref_logprobs, reference)
    assert not torch.equal(backend.forward_only(batch, {"old_logprobs"}).old_logprobs, reference)


def test_moments_take_a_quarter(folder):
    plain, small = make(folder), make(folder, optimizer="adamw8bit")
    sizes = {}
    for name, backend in {"plain": plain, "small": small}.items():
        metrics = steps(backend, 3)
        state = backend.policy.optimizer.state()
        large = {
            key: t
            for key, t in state.items()
            if backend.policy.optimizer.weights[key.partition("/")[2]].numel() >= 4096
        }
        sizes[name] = sum(tensor.nbytes for tensor in large.values())
        assert metrics[-1]["actor/grad_norm"] > 0
    assert sizes["small"] < 0.26 * sizes["plain"]
    moved = [(a - b).abs().max() for a, b in zip(weights_of(plain).values(), weights_of(small).values(), strict=True)]
    assert 0 < max(moved) < 0.02, "as far as two steps of Adam may differ"


def test_moments_of_another_optimizer_are_refused(folder, tmp_path):
    backend = make(folder)
    steps(backend, 1)
    backend.save(tmp_path)
    with pytest.raises(ConfigError, match="another optimizer's moments"):
        make(folder, optimizer="adamw8bit").load(tmp_path)


ON_RANKS = {
    "nf4": case("grpo", lora=LoraConfig(rank=4), axes={"kl": {"coefficient": 0.1}}, quantization="nf4"),
    "int8": case("grpo", lora=LoraConfig(rank=4), quantization="int8", checkpointed=True),
    "transformers": case("dpo", compared, model="stable", lora=LoraConfig(rank=4), quantization="nf4"),
}


@pytest.mark.slow
def test_two_ranks_make_the_steps_of_one_process(tmp_path):
    make_models(tmp_path)
    other_family(tmp_path / "stable")
    (tmp_path / "out").mkdir()
    two = run_ranks(partial(all_cases, ON_RANKS, tmp_path), 2, tmp_path / "out")
    for name, given in ON_RANKS.items():
        compare([rank[name] for rank in two], locally(given, tmp_path))


REFUSED = {
    "paged": (
        {"train": {"optimizer": "paged_adamw8bit"}, "model": {"path": "m", "device": "cpu"}},
        "paging needs a GPU",
    ),
    "offload": ({"model": {"path": "m", "device": "cpu", "activation_offload": True}}, "no effect on a CPU"),
    "ranks": ({"train": {"optimizer": "adamw8bit"}, "backend": {"type": "fsdp"}}, "does not support sharding"),
    "fresh": (
        {
            "model": {"quantization": "nf4", "lora": {}},
            "sft": {"gpt": {}},
        },
        "a fresh model",
    ),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_savers(load_config(CONFIG | changes))


def test_without_the_package(monkeypatch, folder):
    monkeypatch.setattr("atomrl.trainer.checks.config.find_spec", lambda name: None)
    config = load_config(CONFIG | {"model": {"path": folder, "lora": {}, "quantization": "nf4"}})
    with pytest.raises(ConfigError, match="nf4: bitsandbytes"):
        check_savers(config)


def test_the_estimate_is_what_is_held(tmp_path):
    folder = make_tiny_model(tmp_path, hidden_size=256, intermediate_size=704, head_dim=64)
    changes = {"model": {"path": str(folder), "dtype": "bfloat16", "lora": {"rank": 8}, "quantization": "nf4"}}
    config = load_config(CONFIG | changes | {"train": {"optimizer": "adamw8bit"}})
    backend = make(str(folder), "adamw8bit", lora=config.model.lora, quantization="nf4")
    steps(backend, 1)
    parts = memory_estimate(
        config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})}), make_algorithm()
    )
    held = sum(parameter.nbytes for parameter in backend.policy.model.parameters())
    assert held == pytest.approx(parts["trainer weights"], rel=0.01)
