"""Import of nanoGPT checkpoints: equal logits, hostile files, and the result as the base of RL."""

import io
import json
import pickle
import string

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from atomrl.cli.main import main
from atomrl.models.tokenizer import char_tokenizer, text_tokenizer
from tests.models.nanogpt import Config, NanoGPT, save_checkpoint
from tests.models.test_vocabulary import save_openai, trained_bpe

CHARACTERS = string.digits + "+-= \n" + "abcde"  # 20, in no sorted order


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "characters.json").write_text(json.dumps(list(CHARACTERS)))
    return tmp_path


def make(path, prefix="", **config):
    torch.manual_seed(1)
    model = NanoGPT(Config(**config))
    return model, save_checkpoint(model, path, prefix)


def fails(capsys, checkpoint, out, *options):
    capsys.readouterr()
    assert main(["import", checkpoint, "--out", out, *options]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_logits_are_nanogpts(folder, bias, prefix):
    model, _ = make("ckpt.pt", prefix, bias=bias)
    assert main(["import", "ckpt.pt", "--out", "out", "--characters", "characters.json"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained("out")
    tokens = torch.randint(20, (3, 16))
    with torch.no_grad():
        ours, theirs = loaded(tokens).logits, model(tokens)
    assert theirs.std() > 0.3 and (ours - theirs).abs().max() < 1e-5
    assert {path.name for path in (folder / "out").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert tokenizer("1+2=\n")["input_ids"] == [CHARACTERS.index(character) for character in "1+2=\n"]
    assert loaded.config.eos_token_id is None and loaded.generation_config.eos_token_id is None


def test_an_untied_head_and_old_masks(folder):
    model, checkpoint = make("ckpt.pt")
    weights = dict(checkpoint["model"])
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1.0
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    torch.save(checkpoint | {"model": weights}, "ckpt.pt")
    assert main(["import", "ckpt.pt", "--out", "out", "--characters", "characters.json"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained("out")
    model.lm_head.weight = torch.nn.Parameter(weights["lm_head.weight"])
    tokens = torch.randint(20, (2, 7))
    assert not loaded.config.tie_word_embeddings
    assert torch.allclose(loaded(tokens).logits, model(tokens), atol=1e-5)


def test_the_base_of_reinforcement_learning(folder, caplog):
    """Plain prompts, no chat template, no end-of-sequence token; the hf engine takes over and says so."""
    make("ckpt.pt", block_size=32)
    assert main(["import", "ckpt.pt", "--out", "base", "--characters", "characters.json"]) == 0
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1)} for k in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run_name": "rl",
        "model": {"path": "base", "dtype": "float32"},
        "data": {"train": "train.jsonl"},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 6, "stop": ["\n"]},
        "reward": {"functions": [{"function": "tests.light_rewards.digit_reward"}]},
        "train": {"steps": 2, "learning_rate": 1e-3},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "c.yaml"]) == 0
    assert "using the hf engine" in caplog.text and "is trained with transformers" in caplog.text
    metrics = [json.loads(line) for line in (folder / "runs" / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["training/rollout_probs_diff_max"] < 1e-4 and metrics[-1]["actor/grad_norm"] > 0
    trained = AutoModelForCausalLM.from_pretrained(folder / "runs" / "rl" / "model").state_dict()
    base = AutoModelForCausalLM.from_pretrained("base").state_dict()
    assert any(not torch.equal(trained[name], base[name]) for name in base)
    assert main(["generate", "runs/rl/model", "--prompt", "1+1=", "--max-tokens", "4"]) == 0


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_nothing_in_a_hostile_file_runs(folder, capsys):
    _, checkpoint = make("ckpt.pt")
    trap = str(folder / "sprung")
    torch.load(io.BytesIO(saved({"model": Evil(trap)})), weights_only=False)["model"].close()  # opened without care
    assert (folder / "sprung").exists()
    (folder / "sprung").unlink()
    for number, content in enumerate(
        [
            saved(checkpoint | {"config": Evil(trap)}),
            saved(checkpoint | {"model": Evil(trap)}),
            saved(checkpoint | {"config": Evil(trap)}, _use_new_zipfile_serialization=False),
            pickle.dumps(checkpoint | {"config": Evil(trap)}),
        ]
    ):
        (folder / "evil.pt").write_bytes(content)
        error = fails(capsys, "evil.pt", f"out{number}", "--characters", "characters.json")
        assert "nothing in it was executed" in error and "weights_only" not in error
        assert not (folder / "sprung").exists() and not (folder / f"out{number}").exists()
    (folder / "meta.pkl").write_bytes(pickle.dumps(Evil(trap)))
    assert "is a pickle, which can run code" in fails(capsys, "ckpt.pt", "x", "--tokenizer", "meta.pkl")
    assert "not readable as JSON" in fails(capsys, "ckpt.pt", "x", "--characters", "meta.pkl")
    assert not (folder / "sprung").exists()


def saved(tree, **settings):
    buffer = io.BytesIO()
    torch.save(tree, buffer, **settings)
    return buffer.getvalue()


def test_what_is_no_checkpoint(folder, capsys):
    _, checkpoint = make("ckpt.pt")
    tokenizer = ("--characters", "characters.json")
    assert "absent.pt does not exist" in fails(capsys, "absent.pt", "out", *tokenizer)
    (folder / "half.pt").write_bytes((folder / "ckpt.pt").read_bytes()[:5000])
    for name, content in (("text.pt", b"hello"), ("empty.pt", b"")):
        (folder / name).write_bytes(content)
    for name in ("half.pt", "text.pt", "empty.pt"):
        error = fails(capsys, name, "out", *tokenizer)
        assert "was refused" in error or "not readable as a checkpoint" in error
    weights, sizes = checkpoint["model"], checkpoint["model_args"]
    for tree, message in (
        ({"state_dict": {}}, "no dictionary 'model'"),
        ([1], "no dictionary 'model'"),
        ({"model": weights}, "'model_args' must have the sizes"),
        (checkpoint | {"model_args": sizes | {"n_layer": "2"}}, "'model_args' must have the sizes"),
        (checkpoint | {"model_args": sizes | {"n_layer": -1}}, "'model_args' must have the sizes"),
        (checkpoint | {"model_args": sizes | {"n_head": 3}}, "n_head=3 does not divide n_embd=32"),
        (checkpoint | {"model_args": sizes | {"n_layer": 1}}, "transformer.h.1.ln_1.weight is unexpected"),
        (checkpoint | {"model_args": sizes | {"n_layer": 3}}, "transformer.h.2.ln_1.weight is missing"),
        (checkpoint | {"model_args": sizes | {"block_size": 8}}, "wpe.weight has shape (16, 32), not (8, 32)"),
        (checkpoint | {"model": weights | {"transformer.ln_f.weight": "x"}}, "transformer.ln_f.weight is not a tensor"),
        (checkpoint | {"model": {}}, "and 7 more"),
    ):
        torch.save(tree, "bad.pt")
        assert message in fails(capsys, "bad.pt", "out", *tokenizer)
    assert not (folder / "out").exists()


def test_tokenizers_that_do_not_fit(folder, capsys):
    make("ckpt.pt")
    (folder / "text.txt").write_text(CHARACTERS)
    (folder / "short.txt").write_text("abc")
    assert "they" not in fails(capsys, "ckpt.pt", "out") and "meta.pkl, a pickle" in fails(capsys, "ckpt.pt", "out")
    assert "3 characters, but the model has a vocabulary of 20" in fails(
        capsys, "ckpt.pt", "out", "--text", "short.txt"
    )
    assert "give one of" in fails(capsys, "ckpt.pt", "out", "--text", "text.txt", "--characters", "characters.json")
    char_tokenizer("ab").save_pretrained("large")
    assert "tokenizer has 262 tokens, but the model" in fails(capsys, "ckpt.pt", "out", "--tokenizer", "large")
    assert main(["import", "ckpt.pt", "--out", "out", "--text", "text.txt"]) == 0
    assert AutoTokenizer.from_pretrained("out")("0")["input_ids"] == [sorted(CHARACTERS).index("0")]
    assert "out already exists" in fails(capsys, "ckpt.pt", "out", "--text", "text.txt")


def test_gpt2s_vocabulary_takes_gpt2s_tokenizer(folder, capsys, monkeypatch):
    """The vocabulary that nanoGPT pads to 50304, with a tokenizer in a folder or (here without a network) by name."""
    make("ckpt.pt", vocab_size=50304, n_embd=4, n_head=1, n_layer=1)
    text_tokenizer(str(save_openai(trained_bpe("some text of some kind"), folder / "openai"))).save_pretrained("bpe")
    assert main(["import", "ckpt.pt", "--out", "out", "--tokenizer", "bpe"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained("out")
    assert loaded.config.eos_token_id == AutoTokenizer.from_pretrained("out").eos_token_id is not None
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    assert "openai-community/gpt2" in fails(capsys, "ckpt.pt", "other")
