"""Scripts of TRL with peft: modules trained beside adapters, reward models, and adapters that were trained before."""

import peft
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from atomrl.config import ConfigError
from atomrl.trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from tests.tiny import make_tiny_model

SMALL = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.01, "use_cpu": True, "report_to": "none"}
TEXTS = [{"text": f"{n} and {n}"} for n in range(8)]
PAIRS = [{"prompt": f"say {n}", "chosen": "aaa", "rejected": "bbb"} for n in range(8)]
WHOLE = ["lm_head", "embed_tokens"]
TOKENS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", tie_word_embeddings=False))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("given", ["name", "object"])
def test_modules_to_save_are_trained(model, given):
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=WHOLE, task_type="CAUSAL_LM")
    args = SFTConfig(output_dir="out", **SMALL)
    if given == "name":
        trainer = SFTTrainer(model, args=args, train_dataset=TEXTS, peft_config=settings)
    else:
        wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), settings)
        trainer = SFTTrainer(wrapped, args=args, train_dataset=TEXTS)
    trainer.train()
    trainer.save_model("saved")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), "saved").eval()
    base, trained = AutoModelForCausalLM.from_pretrained(model), theirs.get_base_model()
    assert not torch.equal(trained.get_output_embeddings().weight, base.get_output_embeddings().weight)
    own = trainer.model.eval()
    torch.testing.assert_close(own(TOKENS).logits, theirs(TOKENS).logits)
    assert given == "name" or own is wrapped


def test_a_peft_model_from_a_folder_is_the_reference_too(model):
    """As in TRL, which copies the adapters."""
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    first = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), settings)
    with torch.no_grad():
        for weight in first.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    first.save_pretrained("first")
    base = AutoModelForCausalLM.from_pretrained(model)
    given = peft.PeftModel.from_pretrained(base, "first", is_trainable=True)
    args = DPOConfig(output_dir="out", beta=0.5, **SMALL)
    trainer = DPOTrainer(given, args=args, train_dataset=PAIRS)
    trainer.train()
    assert trainer.config.model.lora.reference == "start"
    history = trainer.state.log_history
    assert history[0]["loss"] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-5), "policy and reference"
    assert history[1]["loss"] < history[0]["loss"]


@pytest.mark.parametrize("given", ["name", "object"])
def test_a_reward_model_is_trained_with_adapters(model, given):
    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    args = RewardConfig(output_dir="out", **(SMALL | {"max_steps": 8}))
    if given == "name":
        trainer = RewardTrainer(model, args=args, train_dataset=PAIRS, peft_config=settings)
    else:
        classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        wrapped = peft.get_peft_model(classifier, settings)
        trainer = RewardTrainer(wrapped, args=args, train_dataset=PAIRS)
    assert not any("score head" in note for note in trainer.notes())
    trainer.train()
    assert trainer.state.log_history[-1]["loss"] < 0.5
    tokenizer, own = trainer.tokenizer, trainer.model.eval()
    inputs = tokenizer([f"say 1aaa{tokenizer.eos_token}", f"say 1bbb{tokenizer.eos_token}"], return_tensors="pt")
    good, bad = own(**inputs).logits[:, 0].tolist()
    assert good > bad and own.config.num_labels == 1


def test_a_score_head_that_trl_would_not_train_is_said(model):
    settings = peft.LoraConfig(r=4, task_type="CAUSAL_LM")
    args = RewardConfig(output_dir="out", **SMALL)
    trainer = RewardTrainer(model, args=args, train_dataset=PAIRS, peft_config=settings)
    assert any("score head" in note for note in trainer.notes())


def test_a_loaded_model_has_the_adapters_before_training(model):
    settings = peft.LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(model)
    trainer = DPOTrainer(base, args=DPOConfig(output_dir="out", **SMALL), train_dataset=PAIRS, peft_config=settings)
    wrapped = trainer.model
    assert 0 < wrapped.get_nb_trainable_parameters()[0] < base.num_parameters()
    trainer.train()
    trained = {name: weight for name, weight in wrapped.named_parameters() if "lora_B" in name}
    assert trainer.model is wrapped and all(weight.abs().sum() > 0 for weight in trained.values())


@pytest.mark.parametrize(("tied", "module"), [(False, "nothing"), (True, "lm_head")])
def test_modules_that_are_not_there_are_refused(tmp_path, tied, module):
    model = str(make_tiny_model(tmp_path / "model", tie_word_embeddings=tied))
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    if not tied:
        settings.target_modules, settings.modules_to_save = {module}, None
    with pytest.raises(ConfigError, match=module):
        SFTTrainer(
            AutoModelForCausalLM.from_pretrained(model), args=SFTConfig(output_dir="out", **SMALL),
            train_dataset=TEXTS, peft_config=settings,
        ).train()  # fmt: skip


def test_what_trl_trains_of_a_loaded_model_is_said(model):
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), settings).save_pretrained("first")
    frozen = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), "first")
    half = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for given, said in ((frozen, "without is_trainable"), (half, "TRL bfloat16"), ("first", "are merged")):
        trainer = SFTTrainer(given, args=SFTConfig(output_dir="out", **SMALL), train_dataset=TEXTS)
        assert any(said in note for note in trainer.notes()), said


def test_what_trl_does_with_the_end_of_a_row_is_said(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.eos_token
    args = RewardConfig(output_dir="out", pad_token=end, **SMALL)
    trainer = RewardTrainer(model, args=args, train_dataset=PAIRS)
    assert any(f"ends with {end}: TRL at the token before" in note for note in trainer.notes())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    args = SFTConfig(output_dir="out", **SMALL)
    trainer = SFTTrainer(model, args=args, train_dataset=TEXTS, processing_class=tokenizer)
    assert any(f"one more {end}" in note for note in trainer.notes())
