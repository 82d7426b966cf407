"""Weights that a run publishes, and an engine that follows them."""

import pytest
import torch

from atomrl.algorithms.table import objective_of
from atomrl.config import LoraConfig, ModelConfig, TrainConfig
from atomrl.pool.weights import PublishedWeights, WeightFollower
from atomrl.rollout.native import NativeEngine
from atomrl.rollout.requests import EngineOptions
from atomrl.training.local import LocalBackend
from atomrl.weights import InProcessTransfer
from tests.tiny import make_tiny_model, make_tiny_tokenizer


def backend(path, **model):
    config = ModelConfig(path=str(path), dtype="float32", **model)
    algorithm = objective_of("grpo", {}).resolved()
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
    from atomrl.rollout.generate import generate
    from atomrl.types import Sample, SamplingParams

    prompts = DataProcessor(make_tiny_tokenizer(), DataConfig(train="-")).to_prompts(
        [("0:a", Sample(sample_id="a", prompt="1+1=", ground_truth=""))]
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
    with pytest.raises(ValueError, match="the weights were refused"):
        WeightFollower(engine(other), PublishedWeights(tmp_path)).update()


def test_who_reads_while_it_is_replaced_reads_the_old(tmp_path):
    from safetensors import safe_open

    published, trainer = PublishedWeights(tmp_path), backend(make_tiny_model(tmp_path / "model"))
    published.write(trainer, 1, "r")
    with safe_open(published.path, framework="pt") as opened:
        name = next(iter(opened.keys()))
        old = trainer.policy.model.state_dict()[name].clone()
        with torch.no_grad():
            for parameter in trainer.policy.model.parameters():
                parameter.add_(1.0)
        published.write(trainer, 2, "r")
        assert opened.get_tensor(name).equal(old)
    assert not list(tmp_path.glob(".*"))
