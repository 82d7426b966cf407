"""Weights on their way from ranks to an engine: a part at a time, once all names and shapes are known to fit."""

import weakref
from contextlib import closing
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

from atomrl.backends.fsdp import FSDPBackend
from atomrl.backends.local import LocalBackend
from atomrl.backends.rank_group import start_ranks
from atomrl.common.metrics import values
from atomrl.config import FSDPConfig, LoraConfig, ModelConfig, TrainConfig
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.requests import EngineOptions
from atomrl.weight_sync import InProcessTransfer
from tests.backends.batches import make_algorithm, make_batch
from tests.backends.equality import make_models
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow
PART_BYTES = 20_000


class InSmallParts(FSDPBackend):
    engine_part_bytes = PART_BYTES


def settings(path, lora):
    return {
        "model": ModelConfig(path=str(path), dtype="float32", lora=lora),
        "train": TrainConfig(learning_rate=0.01),
        "algorithm": make_algorithm(),
        "total_updates": 9,
    }


def build(given, tensor, ranks, device):
    return InSmallParts(FSDPConfig(type="fsdp", tensor=tensor), collective=ranks, device=device, **given)


def ranked(path, lora=None, tensor=1):
    group = FSDPConfig(type="fsdp", ranks=2, tensor=tensor, timeout_s=300)
    return closing(start_ranks(partial(build, settings(path, lora), tensor), group, "cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("model", "named"),
    [("base", {}), ("untied", {}), ("other", {}), ("base", {"lora": LoraConfig(rank=3)}), ("base", {"tensor": 2})],
    ids=["ours", "untied", "transformers", "adapters", "tensor"],
)
def test_an_update_has_the_weights_of_one_process(folder, model, named):
    expected = dict(LocalBackend(**settings(folder / model, named.get("lora"))).weight_update(0).tensors)
    with ranked(folder / model, **named) as both:
        for version in (1, 2):
            update = both.weight_update(version)
            assert (update.outline is None) == ("lora" in named)
            weights = dict(update.tensors)
            assert weights.keys() == expected.keys() and bool(update.adapters) == ("lora" in named)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def test_accelerates_fsdp_variables_leave_no_rank_without_weights(folder, monkeypatch):
    """transformers would have them sent by the first rank of a machine."""
    expected = dict(LocalBackend(**settings(folder / "other", None)).weight_update(0).tensors)
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    with ranked(folder / "other") as both:
        weights = dict(both.weight_update(1).tensors)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def test_rank_0_has_a_part_at_a_time(folder):
    with ranked(folder / "base") as both:
        seen, most = [], 0
        for _, tensor in both.weight_update(1).tensors:
            seen.append((weakref.ref(tensor), tensor.nbytes))
            most = max(most, sum(size for there, size in seen if there() is not None))
        largest, whole = max(size for _, size in seen), sum(size for _, size in seen)
        assert len(both.trainer.own.backend.parts) > 4
        assert most <= PART_BYTES + largest < whole / 2  # with the last one read of the part before


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_an_engine_takes_what_the_ranks_have_learned(folder, kind):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    engine = kind.from_pretrained(str(folder / "base"), tokenizer, EngineOptions(torch.bfloat16, "cpu", 4))
    with ranked(folder / "base") as both:
        transfer = InProcessTransfer(both, engine)
        before = engine.weight_hashes()
        transfer(0)  # verified by hashes of what was read
        assert engine.weight_hashes() == before
        for version in (1, 2):
            both.train_step(make_batch(), make_algorithm())
            both.free_memory()  # as before engines wake
            transfer(version)
        assert engine.version == 2 and engine.weight_hashes() != before


def test_wrong_shapes_are_refused_before_a_gather_and_the_ranks_continue(folder, tmp_path):
    other = make_tiny_model(tmp_path / "wide", "qwen2", intermediate_size=96)
    engine = NativeEngine.from_pretrained(
        str(other), AutoTokenizer.from_pretrained(other), EngineOptions(torch.float32, "cpu", 4)
    )
    before = engine.weight_hashes()
    with ranked(folder / "base") as both:
        with pytest.raises(ValueError, match=r"gate_proj\.weight.*shape"):
            InProcessTransfer(both, engine)(1)
        assert engine.weight_hashes() == before and engine.version != 1
        assert values(both.train_step(make_batch(), make_algorithm()))["actor/grad_norm"] > 0


def test_an_update_that_is_not_read_to_its_end_leaves_no_rank_waiting(folder):
    with ranked(folder / "base") as both:
        names = [name for name, _ in zip(range(3), both.weight_update(1).tensors, strict=False)]
        assert len(names) == 3
        assert values(both.train_step(make_batch(), make_algorithm()))["actor/grad_norm"] > 0
        assert len(dict(both.weight_update(2).tensors)) > 3
