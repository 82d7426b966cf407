"""Loading and saving in Hugging Face layout."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from atomrl.algorithms import objective_of
from atomrl.config import ConfigError, load_config
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.requests import EngineOptions
from atomrl.models import loading
from atomrl.models.gpt import GPT, new_gpt
from atomrl.models.loading import (
    compute_dtype,
    load_policy,
    load_tokenizer,
    load_transformers,
    model_config_only,
    read_safetensors,
    resolve_folder,
    save_model,
)
from atomrl.models.transformers_model import HFModel
from atomrl.trainer.build import build_engine
from atomrl.trainer.memory import memory_estimate
from tests.models.gpt2 import TOKENS, save_gpt2
from tests.tiny import make_tiny_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_load_save_load(tmp_path, architecture, tied):
    folder = make_tiny_model(tmp_path / "a", architecture, tie_word_embeddings=tied)
    policy, tokenizer = load_policy(folder, dtype="float32"), load_tokenizer(folder)
    assert isinstance(policy, GPT)
    save_model(policy, tokenizer, tmp_path / "b")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert again.dtype == torch.float32
    for logits in (policy(TOKENS), again(TOKENS).logits, load_policy(tmp_path / "b", dtype="float32")(TOKENS)):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert theirs("1 + 1").input_ids == tokenizer("1 + 1").input_ids
    assert theirs.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("head_dim", [None, 16])
def test_fresh_gpt_is_loaded_by_transformers(tmp_path, head_dim):
    model = new_gpt(95, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=head_dim, eos_token_id=2)
    save_model(model, None, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), atol=1e-5, rtol=1e-5)
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 2


def test_saving_in_another_dtype_leaves_the_model_alone(tmp_path):
    model = new_gpt(95, layers=1, hidden=32, heads=1)
    save_model(model, None, tmp_path, dtype=torch.bfloat16)
    assert model_config_only(tmp_path).dtype == torch.bfloat16
    assert {tensor.dtype for _, tensor in read_safetensors(tmp_path)} == {torch.bfloat16}
    assert model.head_weight.dtype == torch.float32


def test_a_real_model_has_the_logits_of_transformers(shared_dir):
    folder = shared_dir / "models" / "stories260k"
    policy = load_policy(folder, dtype="float32")
    tokens = torch.tensor([load_tokenizer(folder)("Once upon a time").input_ids])
    expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    torch.testing.assert_close(policy(tokens), expected, atol=1e-4, rtol=1e-5)


def test_other_families_go_through_transformers_and_say_so(tmp_path, caplog):
    folder = save_gpt2(tmp_path / "a")
    with caplog.at_level(logging.WARNING):
        policy = load_policy(folder, dtype="float32")
    assert isinstance(policy, HFModel) and "gpt2" in caplog.text
    expected = AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits
    policy.eval()
    torch.testing.assert_close(policy(TOKENS), expected)
    save_model(policy, None, tmp_path / "b")
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()(TOKENS).logits, expected)


def test_logits_that_the_head_alone_does_not_make_are_refused(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma2Config(vocab_size=95, intermediate_size=32, head_dim=16, final_logit_softcapping=0.1, **shape)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="logits"):
        load_policy(tmp_path, dtype="float32")


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "a/b/c"])
def test_a_folder_that_is_absent_is_named(path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_policy(path)


@pytest.mark.parametrize("path", ["run/quikstart/model", "./runs/quickstart/modell", "quikstart"])
def test_an_absent_folder_is_shown_with_its_place_and_the_nearest_one(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "runs/quickstart/model").mkdir(parents=True)
    (tmp_path / "quickstart").mkdir()
    with pytest.raises(ConfigError) as raised:
        resolve_folder(path)
    said, near = str(raised.value), "quickstart" if path == "quikstart" else "runs/quickstart/model"
    assert f"looked in {tmp_path / path}" in said and f"did you mean {near!r}?" in said


def test_an_absent_folder_without_a_similar_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/a/b", "./elsewhere", "~/models/a", tmp_path / "runs/a"):
        with pytest.raises(ConfigError, match=re.escape(f"(looked in {tmp_path / path})")):
            resolve_folder(path)


def test_folder_without_config(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_policy(tmp_path)


def test_hub_name_that_cannot_be_had(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"not a folder.*no route to host"):
        model_config_only("nobody/nothing-of-that-name")


def test_a_hub_model_is_fetched_once_for_its_tokenizer_and_once_whole(tmp_path, monkeypatch):
    """Loading the tokenizer fetches no weights, and the cache then gives that folder as it is."""
    whole, snapshot = make_tiny_model(tmp_path / "whole"), tmp_path / "snapshot"
    asked = []

    def snapshot_download(name, revision, allow_patterns):
        asked.append((name, revision))
        for file in whole.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                snapshot.mkdir(exist_ok=True)
                shutil.copy(file, snapshot)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    load_tokenizer("someone/fetched-once")
    assert not (snapshot / "model.safetensors").exists()
    assert isinstance(load_policy("someone/fetched-once", dtype="float32"), GPT)
    assert len(asked) == 2
    model_config_only("someone/fetched-once@refs/pr/1")
    assert asked[2:] == [("someone/fetched-once", "refs/pr/1")]
    tree = {"run_name": "r", "model": {"path": "someone/fetched-once", "dtype": "float32"}, "data": {"train": "d"}}
    for engine in ("native", "hf"):
        config = load_config(tree | {"rollout": {"engine": engine}})
        build_engine(config, "someone/fetched-once", load_tokenizer("someone/fetched-once"))
    assert len(asked) == 3


def test_a_runs_folder_names_that_of_its_model(tmp_path):
    make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "model"))):
        load_policy(tmp_path)


def test_weights_that_do_not_fit_their_config(tmp_path):
    folder = make_tiny_model(tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    with pytest.raises(ConfigError, match="do not fit"):
        load_policy(folder)


@pytest.mark.parametrize("has", [True, False])
def test_dtype_is_bfloat16_only_where_there_are_instructions_for_it(has, monkeypatch, caplog):
    monkeypatch.setattr("atomrl.models.loading.has_bfloat16", lambda device: has)
    device = "cpu:7"  # a warning is given once per device, and no other test names this one
    names = ("auto", "float32", "bfloat16")
    fast = torch.bfloat16 if has else torch.float32
    assert [compute_dtype(name, device) for name in names] == [fast, torch.float32, fast]
    assert ("no bfloat16 instructions" in caplog.text) is not has
    assert compute_dtype(torch.bfloat16) == torch.bfloat16
    with pytest.raises(ConfigError, match="float16"):
        compute_dtype("float16")


def test_bfloat16_instructions_count_only_where_onednn_may_use_them(monkeypatch):
    """With ONEDNN_MAX_CPU_ISA=AVX2 its packed weights were an error when the engine loaded."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for may in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda may=may: may)
        assert loading.has_bfloat16("cpu") is may


def test_frozen_weights_are_kept_in_the_compute_dtype(tmp_path):
    folder = make_tiny_model(tmp_path)
    trained, frozen = (load_policy(folder, dtype=torch.bfloat16, trainable=trainable) for trainable in (True, False))
    assert trained.head_weight.dtype == torch.float32 and trained.head_weight.requires_grad
    assert frozen.head_weight.dtype == torch.bfloat16 and not frozen.head_weight.requires_grad
    assert torch.equal(trained(TOKENS), frozen(TOKENS))


def in_shards(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_a_loaded_model_does_not_keep_its_file_mapped(tmp_path):
    """One parameter that is a view of the file keeps all of it in memory."""
    folder = make_tiny_model(tmp_path / "model")
    model = load_policy(folder, dtype="float32")
    assert model.model.embed_tokens.weight.device.type == "cpu"
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_a_stray_file_beside_the_index_does_not_matter(tmp_path):
    folder = in_shards(make_tiny_model(tmp_path))
    expected = load_policy(folder, dtype="float32")(TOKENS)
    save_file({"model.norm.weight": torch.zeros(32), "other": torch.zeros(2)}, folder / "consolidated.safetensors")
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "model.safetensors")
    assert torch.equal(load_policy(folder, dtype="float32")(TOKENS), expected)
    settings = {"dtype": torch.float32, "device": "cpu", "max_concurrent_completions": 2}
    engine = NativeEngine.from_pretrained(str(folder), load_tokenizer(folder), EngineOptions(**settings))
    norm = dict(load_policy(folder).named_parameters())["model.norm.weight"]
    assert torch.equal(engine.model.norm, norm)
    engine = HFEngine.from_pretrained(str(folder), load_tokenizer(folder), EngineOptions(**settings))
    assert torch.equal(
        engine.model.model.norm.weight, dict(load_policy(folder).named_parameters())["model.norm.weight"]
    )


def test_a_stray_file_does_not_matter_to_a_model_of_transformers_either(tmp_path):
    folder = in_shards(save_gpt2(tmp_path))
    expected = load_policy(folder, dtype="float32")(TOKENS)
    state = load_transformers(folder, torch.float32).state_dict()
    save_file({name: torch.ones_like(weight) for name, weight in state.items()}, folder / "model.safetensors")
    assert torch.equal(load_policy(folder, dtype="float32")(TOKENS), expected)
    load_transformers(folder, torch.float32).save_pretrained(tmp_path / "again")
    assert "transformers_weights" not in (tmp_path / "again" / "config.json").read_text()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_shard_that_is_cut_short_is_named(tmp_path, family):
    folder = in_shards(make_tiny_model(tmp_path) if family == "llama" else save_gpt2(tmp_path))
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=f"{shard.name}.*damaged"):
        load_policy(folder)
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name} is missing"):
        load_policy(folder)


def test_a_tokenizer_with_more_tokens_than_embeddings(tmp_path):
    folder = make_tiny_model(tmp_path)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["one more"], special_tokens=True)  # never written by a model: Gemma 3 has such a one
    tokenizer.save_pretrained(folder)
    load_tokenizer(folder)
    tokenizer.add_tokens(["and another"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="102 embeddings"):
        load_tokenizer(folder)


def test_end_of_sequence_of_the_config_where_the_tokenizer_has_none(tmp_path):
    folder = make_tiny_model(tmp_path)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"], settings["pad_token"]
    file.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_in_trainer_engine_and_estimate_where_it_is_trusted(tmp_path):
    folder = make_tiny_model(tmp_path)
    (folder / "own.py").write_text(REMOTE)
    file = folder / "config.json"
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "own", "auto_map": own}))
    tree = {"run_name": "r", "model": {"path": str(folder), "dtype": "float32"}, "data": {"train": "d"}}
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_policy(folder, dtype="float32")
    config = load_config(tree | {"model": tree["model"] | {"trust_remote_code": True}})
    policy = load_policy(folder, dtype="float32", trust_remote_code=True).eval()
    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    engine = build_engine(config, str(folder), tokenizer)
    torch.testing.assert_close(engine.model(TOKENS).logits, policy(TOKENS))
    assert memory_estimate(config, objective_of({"name": "grpo"}).resolved())["engine weights"] == 4 * sum(
        p.numel() for p in policy.parameters()
    )
