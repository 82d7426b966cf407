"""Weights that a run publishes, and an engine that follows them."""

import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from atomrl.algorithms import objective_of
from atomrl.backends.local import LocalBackend
from atomrl.config import LoraConfig, ModelConfig, TrainConfig
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.requests import EngineOptions
from atomrl.pool.weights import PublishedWeights, WeightFollower
from atomrl.weight_sync import InProcessTransfer, WeightMismatch
from tests.tiny import make_tiny_model, make_tiny_tokenizer


def backend(path, **model):
    config = ModelConfig(path=str(path), dtype="float32", **model)
    algorithm = objective_of({"name": "grpo"}).resolved()
    options = {"total_updates": 1, "device": "cpu", "temperature": 1.0, "seed": 0, "tokenizer": make_tiny_tokenizer()}
    trainer = LocalBackend(config, TrainConfig(), algorithm, **options)
    with torch.no_grad():
        for parameter in trainer.policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 10)
    return trainer


def engine(path):
    options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=4)
    return NativeEngine.from_pretrained(str(path), make_tiny_tokenizer(), options)


def text(engine):
    from atomrl.config import DataConfig
    from atomrl.data.processor import DataProcessor
    from atomrl.engines.generation import generate
    from atomrl.types import Problem, SamplingParams

    prompts = DataProcessor(make_tiny_tokenizer(), DataConfig(train="-")).to_prompts(
        [("0:a", Problem(problem_id="a", prompt="1+1=", ground_truth=""))]
    )
    return [part.logprobs for part in generate(engine, prompts, SamplingParams(max_completion_tokens=8))[0].segments]


@pytest.mark.parametrize("model", [{}, {"lora": LoraConfig(rank=2)}], ids=["whole", "adapters"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_that_follows_has_what_one_in_the_process_has(tmp_path, model, tied):
    path = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    trainer, published = backend(path, **model), PublishedWeights(tmp_path)
    following, given = engine(path), engine(path)
    before = text(following)
    follower = WeightFollower(following, published)
    assert not follower.update() and follower.run == ""
    published.write(trainer, 3, "run@1")
    assert follower.update() and follower.run == "run@1" and following.version == 3
    InProcessTransfer(trainer, given)(3)
    assert text(following) == text(given) != before
    assert not follower.update(), "nothing new"
    published.write(trainer, 2, "run@1")
    assert follower.update() and following.version == 2, "a run that was resumed is behind"
    published.write(trainer, 2, "run@2")
    assert follower.update() and follower.run == "run@2"


def test_weights_that_do_not_fit_are_refused(tmp_path):
    small, other = make_tiny_model(tmp_path / "a"), make_tiny_model(tmp_path / "b", hidden_size=64)
    PublishedWeights(tmp_path).write(backend(small), 1, "r")
    with pytest.raises(ValueError, match="weights were refused"):
        WeightFollower(engine(other), PublishedWeights(tmp_path)).update()


@pytest.fixture
def published(tmp_path):
    """A trainer, what it publishes, an engine that follows, and version 1 published."""
    path = make_tiny_model(tmp_path / "model")
    trainer, published = backend(path), PublishedWeights(tmp_path)
    published.write(trainer, 1, "r")
    return trainer, published, WeightFollower(engine(path), published)


def test_an_engine_of_another_version_is_found(published):
    _, _, follower = published
    load = follower.engine.update_weights
    follower.engine.update_weights = lambda update: load(replace(update, version=5))
    with pytest.raises(WeightMismatch, match="version 5, not 1"):
        follower.update()
    assert follower.run == ""


def test_an_engine_that_kept_its_weights_is_found(published):
    _, _, follower = published
    follower.engine.update_weights = lambda update: setattr(follower.engine, "version", update.version)
    with pytest.raises(WeightMismatch, match="weights of version 1"):
        follower.update()


def test_a_file_that_changed_on_the_disk_is_found(published):
    _, weights, follower = published
    (file,) = weights.folder.glob("*/model.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    save_file(tensors, file)
    with pytest.raises(WeightMismatch, match=r": model\.norm\.weight differs$"):
        follower.update()


def test_adapters_over_another_base_are_found(tmp_path):
    path, other = make_tiny_model(tmp_path / "a", seed=1), make_tiny_model(tmp_path / "b", seed=2)
    weights, trainer = PublishedWeights(tmp_path), backend(path, lora=LoraConfig(rank=2))
    for version in (1, 2):  # the second time adapters alone
        weights.write(trainer, version, "r")
        assert not list(weights.folder.glob("*/model.safetensors"))
        with pytest.raises(WeightMismatch, match=r"embed_tokens\.weight differs"):
            WeightFollower(engine(other), weights).update()
    assert WeightFollower(engine(path), weights).update()


def test_a_reader_gets_one_whole_version_while_weights_are_replaced(published):
    """Every weight has its version as its value."""
    trainer, weights, follower = published
    names = follower.engine.weight_shapes()
    stop = threading.Event()

    def publish() -> None:
        version = 1
        while not stop.is_set():
            version += 1
            with torch.no_grad():
                for parameter in trainer.policy.model.parameters():
                    parameter.fill_(version)
            weights.write(trainer, version, "r")

    writer = threading.Thread(target=publish)
    writer.start()
    seen, current = set(), ("r", 1)
    try:
        while len(seen) < 30:
            if latest := weights.read(current):
                _, update, _ = latest
                values = {float(value) for _, tensor in update.tensors for value in tensor.unique()}
                assert values == {update.version} and dict(update.tensors).keys() == names.keys()
                seen.add(update.version)
                current = ("r", update.version)
    finally:
        stop.set()
        writer.join()
    assert [path.name.isdigit() for path in weights.folder.iterdir()] == [True]  # and nothing else stays


def test_leftovers_of_a_kill_are_cleared(published):
    trainer, weights, follower = published
    for name in (".0", ".7.partial"):
        (weights.folder / name).mkdir()
    weights.write(trainer, 2, "r")
    assert [path.name for path in weights.folder.iterdir()] == ["2"]
    assert follower.update() and follower.engine.version == 2
