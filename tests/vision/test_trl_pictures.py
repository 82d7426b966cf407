"""Trainers of `atomrl.trl` on pictures: rows of TRL's layouts, a model by name and as an object with its processor."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from atomrl.data.files import DataError
from atomrl.models.loading import load_tokenizer
from atomrl.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from tests.light_rewards import letter_reward
from tests.tiny_vision import make_tiny_vision_model, picture

ASKED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what colour?"}]}
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "red"}]}
SMALL = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "use_cpu": True,
    "learning_rate": 0.01,
    "save_strategy": "no",
}


class Processor:
    """A processor with the members that trainers read; that of transformers needs a video processor too."""

    def __init__(self, tokenizer, image_processor):
        self.tokenizer, self.image_processor = tokenizer, image_processor


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_vision_model(tmp_path_factory.mktemp("trl") / "model")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture(7).save("seven.png")


def weights(result):
    return load_file(Path(result["model"]) / "model.safetensors")


GIVEN = {
    "pillow": lambda seed: {"prompt": [ASKED], "image": picture(seed)},
    "a list": lambda seed: {"prompt": [ASKED], "images": [picture(seed)]},
    "a path": lambda seed: {"prompt": "<image>what colour?", "images": ["seven.png"]},
    "in the message": lambda seed: {
        "prompt": [{"role": "user", "content": [{"type": "image", "image": picture(seed)}, ASKED["content"][1]]}]
    },
}


@pytest.mark.parametrize("given", GIVEN)
def test_grpo_trains_on_pictures(model, given):
    seen = []

    def reward(completions, images, **columns):
        seen.extend(Path(path).is_file() for paths in images for path in paths)
        return [float(sum(map(ord, str(text)))) for text in completions]

    config = GRPOConfig("out", max_completion_length=4, num_generations=2, **SMALL)
    rows = [GIVEN[given](seed) for seed in range(2)]
    trainer = GRPOTrainer(str(model), reward_funcs=reward, args=config, train_dataset=rows)
    before = load_file(model / "model.safetensors")
    after = weights(trainer.train())
    assert all(seen) and len(seen) >= 2
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any("visual" in name for name in changed) and any("layers" in name for name in changed)


def test_pictures_may_come_after_rows_of_text(model):
    rows = [{"prompt": "what?"}, {"prompt": [ASKED], "image": picture(1)}]
    config = GRPOConfig("out", num_generations=2, **SMALL)
    GRPOTrainer(str(model), reward_funcs=letter_reward, args=config, train_dataset=rows)
    rows.append({"prompt": [ASKED], "images": ["gone.png"]})
    with pytest.raises(DataError, match=r"gone\.png"):
        GRPOTrainer(str(model), reward_funcs=letter_reward, args=config, train_dataset=rows)


def test_sft_of_a_model_given_with_its_processor_sees_the_picture(model):
    """Its tower is frozen, and stays as it is."""
    processor = Processor(load_tokenizer(model), AutoImageProcessor.from_pretrained(model, backend="pil"))
    trained = []
    for seed in (1, 2):
        loaded = AutoModelForImageTextToText.from_pretrained(model)
        loaded.model.visual.requires_grad_(False)
        rows = [{"messages": [ASKED, ANSWER], "images": [picture(seed)]}] * 2
        trainer = SFTTrainer(
            loaded, args=SFTConfig(f"out-{seed}", **SMALL), train_dataset=rows, processing_class=processor
        )
        trained.append(weights(trainer.train()))
    changed = [name for name in trained[0] if not trained[0][name].equal(trained[1][name])]
    assert changed and not any("visual" in name for name in changed)
