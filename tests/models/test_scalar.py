"""Critics and reward models against transformers' own classes."""

import peft
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    LlamaConfig,
    MistralConfig,
)

from atomrl.config import ConfigError
from atomrl.models.loading import load_tokenizer
from atomrl.models.scalar import GPTScalar, HFScalar, load_scalar, save_scalar
from tests.tiny import make_tiny_model

TOKENS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0], [4, 3, 0, 0, 0]])
LENGTHS = torch.tensor([5, 3, 2])


@pytest.fixture(params=["llama", "qwen2"])
def saved(request, tmp_path):
    """A reward model with a score that is not 0, and its folder."""
    base = make_tiny_model(tmp_path / "base", request.param)
    model = load_scalar(base, dtype="float32")
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    save_scalar(model, load_tokenizer(base), tmp_path / "scalar")
    return model, tmp_path / "scalar"


def test_scores_are_those_of_transformers(saved):
    model, folder = saved
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    attention = torch.arange(5) < LENGTHS[:, None]
    padded = TOKENS.masked_fill(~attention, theirs.config.pad_token_id)
    expected = theirs(input_ids=padded, attention_mask=attention.long()).logits[:, 0]
    torch.testing.assert_close(model.scores(TOKENS, LENGTHS), expected, atol=1e-5, rtol=1e-5)
    again = load_scalar(folder, dtype="float32")
    assert isinstance(again, GPTScalar)
    torch.testing.assert_close(again.scores(TOKENS, LENGTHS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pad", [None, 0, 2])
@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig])
def test_the_score_is_at_the_token_where_transformers_takes_it(tmp_path, family, pad):
    """The last one that is not the pad token, which in many models is the end of sequence."""
    config = family(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_labels=1, initializer_range=0.3, pad_token_id=pad, eos_token_id=2,
    )  # fmt: skip
    theirs = AutoModelForSequenceClassification.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    rows = [[1, 9, 8, 7, 2], [1, 9, 8, 7], [1, 9, 2, 2], [1, 0, 9, 0], [2, 2]]
    expected = [theirs(torch.tensor([row])).logits.item() for row in rows]
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    scores = (
        load_scalar(tmp_path, dtype="float32", trainable=False).eval().scores(tokens, torch.tensor([5, 4, 4, 4, 2]))
    )
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_values_are_the_numbers_before_each_token(saved):
    model, _ = saved
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]).bool()
    values = model.values(TOKENS, mask, torch.tensor([2, 1, 1]))
    for row in range(3):
        for at in range(5):
            wanted = mask[row, at] and at > 0
            prefix = model.scores(TOKENS[row : row + 1, :at], torch.tensor([at]))[0] if wanted else torch.tensor(0.0)
            torch.testing.assert_close(values[row, at], prefix, atol=1e-5, rtol=1e-5)


def test_a_fresh_score_is_0_and_learns(tmp_path):
    model = load_scalar(make_tiny_model(tmp_path, "llama"), dtype="float32")
    assert model.scores(TOKENS, LENGTHS).tolist() == [0, 0, 0]
    model.scores(TOKENS, LENGTHS).sum().backward()
    assert model.score.weight.grad.abs().max() > 0


def test_a_classifier_of_another_family_scores_whole_texts(tmp_path):
    config = DebertaV2Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1
    )
    theirs = DebertaV2ForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    model = load_scalar(tmp_path, dtype="float32")
    assert isinstance(model, HFScalar)
    attention = (torch.arange(5) < LENGTHS[:, None]).long()
    expected = theirs(input_ids=TOKENS * attention, attention_mask=attention).logits[:, 0]
    torch.testing.assert_close(model.eval().scores(TOKENS, LENGTHS), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="causal"):
        model.values(TOKENS, TOKENS > 0, LENGTHS)
    save_scalar(model, None, tmp_path / "again")
    again = load_scalar(tmp_path / "again", dtype="float32").eval()
    torch.testing.assert_close(again.scores(TOKENS, LENGTHS), expected, atol=1e-5, rtol=1e-5)


def test_several_labels_are_refused(tmp_path):
    config = DebertaV2Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    DebertaV2ForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="3 labels"):
        load_scalar(tmp_path)


def test_the_score_is_read_from_other_files_too(tmp_path):
    """Weights in *.bin, and adapters that were trained on a reward model."""
    path = make_tiny_model(tmp_path / "model")
    inner = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    inner.save_pretrained(tmp_path / "scored")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_bytes((tmp_path / "scored" / "config.json").read_bytes())
    torch.save(inner.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    expected = inner.score.weight.detach().clone()
    settings = peft.LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["q_proj"])
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scored")
    adapted = peft.get_peft_model(base, settings)
    with torch.no_grad():
        base.score.modules_to_save.default.weight.mul_(2)
    adapted.save_pretrained(tmp_path / "adapters")
    for name, factor in (("scored", 1), ("bin", 1), ("adapters", 2)):
        assert torch.equal(load_scalar(tmp_path / name, dtype="float32").score.weight, factor * expected), name
