"""Trainers of `atomrl.trl` on pictures: rows of TRL's layouts, a model by name and as an object with its processor."""

import json
import shutil
from pathlib import Path

import pytest
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from atomrl.config import ConfigError
from atomrl.data.files import DataError
from atomrl.models.loading import load_tokenizer
from atomrl.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from atomrl.trl.unsloth import FastVisionModel
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


def test_a_model_has_its_processor_in_one_file_or_the_other(model, tmp_path):
    """transformers 5 saves `processor_config.json`. A model that is saved after training has it, too."""
    folder = shutil.copytree(model, tmp_path / "newer")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    loaded = AutoModelForImageTextToText.from_pretrained(folder)
    rows = [{"messages": [ASKED, ANSWER], "images": [picture(1)]}] * 2
    trainer = SFTTrainer(loaded, args=SFTConfig("out", **SMALL), train_dataset=rows, processing_class=str(folder))
    trainer.train()
    trainer.save_model("saved")
    size = AutoImageProcessor.from_pretrained("saved", backend="pil").size
    assert dict(size) == dict(AutoImageProcessor.from_pretrained(model, backend="pil").size)


PICTURED = [{"messages": [ASKED, ANSWER], "images": [picture(1)]}] * 2
WRITTEN = [{"messages": [{"role": "user", "content": "what colour?"}, ANSWER]}] * 2


def adapted(model, **parts):
    return FastVisionModel.get_peft_model(AutoModelForImageTextToText.from_pretrained(model), r=2, **parts)


def ends(model):
    names = [name.partition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name]
    return {name.rpartition(".")[2] for name in names if "visual" not in name}, any("visual" in name for name in names)


ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("parts", "names", "tower"),
    [
        ({}, ATTENTION | MLP, True),
        ({"finetune_vision_layers": False}, ATTENTION | MLP, False),
        ({"finetune_vision_layers": False, "finetune_mlp_modules": False}, ATTENTION, False),
        ({"finetune_language_layers": False}, set(), True),
        ({"target_modules": ["q_proj", "up_proj"], "finetune_attention_modules": False}, {"up_proj"}, True),
    ],
)
def test_unsloth_selects_layers_by_parts(model, parts, names, tower):
    assert ends(adapted(model, **parts)) == (names, tower)


def test_adapters_of_a_tower_are_refused_with_pictures(model):
    """Text alone does not train them, so they are left as they are."""
    given = {"processing_class": str(model)}
    with pytest.raises(ConfigError, match=r"vision tower has adapters \(.*visual.*finetune_vision_layers=False"):
        SFTTrainer(adapted(model), args=SFTConfig("out"), train_dataset=PICTURED, **given)
    language = adapted(model, finetune_vision_layers=False, finetune_mlp_modules=False)
    for name, one, rows in (("pictures", language, PICTURED), ("text", adapted(model), WRITTEN)):
        trainer = SFTTrainer(one, args=SFTConfig(name, **SMALL), train_dataset=rows, **given)
        before = {key: weight.clone() for key, weight in one.state_dict().items()}
        trained = trainer.train()
        changed = {key for key, weight in one.state_dict().items() if not weight.equal(before[key])}
        assert changed and all(".lora_" in key and "visual" not in key for key in changed)
        assert set(trainer.config.model.lora.target_modules) == (ATTENTION if name == "pictures" else ATTENTION | MLP)
        assert trained["steps"] == 1


@pytest.mark.parametrize(
    ("targets", "said"),
    [("all-linear", r"differs from TRL: adapters are on the language model alone"), (["q_proj"], None)],
)
def test_a_peft_config_that_reaches_the_tower_is_said(model, targets, said):
    settings = LoraConfig(r=2, target_modules=targets)
    trainer = SFTTrainer(str(model), args=SFTConfig("out"), train_dataset=PICTURED, peft_config=settings)
    assert any("vision tower" in line for line in trainer.notes()) == bool(said)
    pattern = LoraConfig(r=2, target_modules=r".*visual.*qkv")
    with pytest.raises(ConfigError, match="vision tower has adapters"):
        SFTTrainer(str(model), args=SFTConfig("out"), train_dataset=PICTURED, peft_config=pattern)
