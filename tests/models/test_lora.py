"""Adapters: peft's layout, merging, the reference."""

import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from atomrl.backends.roles import save_role
from atomrl.config import ConfigError, LoraConfig, ModelConfig, RunConfig
from atomrl.engines.hf import HFEngine
from atomrl.models.loading import fill_weights, load_policy, load_tokenizer, model_config_only, model_weights
from atomrl.models.lora import adapter_state, adapter_weights, adapters_disabled, export, save_adapters
from atomrl.trainer.build import build_engine
from atomrl.trl.inputs import lora_section
from tests.models.gpt2 import TOKENS, save_gpt2
from tests.tiny import make_tiny_model


@pytest.fixture(params=["qwen2", "gpt2"])
def base(request, tmp_path):
    folder = tmp_path / "base"
    return save_gpt2(folder) if request.param == "gpt2" else make_tiny_model(folder, request.param)


def adapted(base, dtype="float32", quantization=None, **config):
    policy = load_policy(base, dtype=dtype, lora=LoraConfig(**({"rank": 4} | config)), quantization=quantization).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    return policy


def test_fresh_adapters_change_nothing_and_alone_are_trained(base):
    policy = load_policy(base, dtype="float32", lora=LoraConfig(rank=4)).eval()
    torch.testing.assert_close(policy(TOKENS), load_policy(base, dtype="float32").eval()(TOKENS))
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    assert not any("lm_head" in name or "embed" in name for name in trained)


def test_peft_loads_what_is_saved(base, tmp_path):
    policy = adapted(base)
    logits = policy(TOKENS)
    save_adapters(policy, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, logits, atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    names = [load_file(tmp_path / name / "adapter_model.safetensors").keys() for name in ("adapter", "theirs")]
    assert names[0] == names[1]


def test_weights_and_adapters_apart_make_the_model(base):
    policy = adapted(base)
    weights, adapters = dict(model_weights(policy)), adapter_weights(policy)
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    assert weights.keys() | {"lm_head.weight"} == plain.state_dict().keys() | {"lm_head.weight"}
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in weights.items())
    plain.load_state_dict({name: with_adapter(name, weights, adapters) for name in weights}, strict=False)
    torch.testing.assert_close(plain(TOKENS).logits, policy(TOKENS), atol=1e-4, rtol=1e-4)


def with_adapter(name, weights, adapters):
    if name not in adapters:
        return weights[name]
    delta = adapters[name].scale * adapters[name].b @ adapters[name].a
    return weights[name] + (delta.T if name.startswith("transformer.h.") else delta)  # GPT-2 has [in, out]


def test_a_folder_of_adapters_is_loaded_as_the_merged_model(base, tmp_path):
    policy, folder = adapted(base), tmp_path / "adapter"
    save_adapters(policy, folder)
    load_tokenizer(make_tiny_model(tmp_path / "other")).save_pretrained(folder)
    assert model_config_only(folder).model_type == model_config_only(base).model_type
    torch.testing.assert_close(load_policy(folder, dtype="float32")(TOKENS), policy(TOKENS), atol=1e-4, rtol=1e-4)
    weights, adapters = dict(model_weights(policy)), adapter_weights(policy)
    model = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    config = RunConfig(run_name="r", model=model, data={"train": "d"})
    engine = build_engine(config, str(folder), load_tokenizer(base.parent / "other"))
    if isinstance(engine, HFEngine):
        weight = dict(engine.model.named_parameters())["transformer.h.0.attn.c_attn.weight"]
        torch.testing.assert_close(weight, with_adapter("transformer.h.0.attn.c_attn.weight", weights, adapters))
    else:
        head = engine.model.layers[0].output.weight.t()
        torch.testing.assert_close(head, with_adapter("model.layers.0.self_attn.o_proj.weight", weights, adapters))


def test_export_merges_adapters(tmp_path):
    base = make_tiny_model(tmp_path / "base")
    policy = adapted(base)
    save_adapters(policy, tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "merged")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(exported(TOKENS).logits, policy(TOKENS), atol=1e-4, rtol=1e-4)


def test_export_has_the_tokenizer_that_was_trained_with(tmp_path):
    folder = make_tiny_model(tmp_path / "base")
    policy, tokenizer = adapted(folder), load_tokenizer(folder)
    tokenizer.eos_token = "<|endoftext|>"
    save_role("policy", policy, tokenizer, tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "merged")
    assert load_tokenizer(tmp_path / "merged").eos_token == "<|endoftext|>"
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [2, 0]


def test_export_scales_as_peft_does(tmp_path):
    base = make_tiny_model(tmp_path / "base")
    save_adapters(adapted(base), tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_rslora": false', '"use_rslora": true'))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path).eval()
    export(tmp_path, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(TOKENS).logits, theirs(TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_adapters_of_another_model_are_refused(tmp_path):
    save_adapters(adapted(make_tiny_model(tmp_path / "base")), tmp_path / "adapter")
    for other in (save_gpt2(tmp_path / "gpt2"), make_tiny_model(tmp_path / "wide", hidden_size=64)):
        with pytest.raises(ConfigError, match="base model"):
            export(tmp_path / "adapter", tmp_path / "merged", base=other)


def test_another_base_of_the_same_shapes_is_said(tmp_path, caplog):
    base, other = make_tiny_model(tmp_path / "base"), make_tiny_model(tmp_path / "other", rope_theta=5000.0)
    save_adapters(adapted(base), tmp_path / "adapter")
    shutil.copytree(base, tmp_path / "moved")
    export(tmp_path / "adapter", tmp_path / "same", base=tmp_path / "moved")
    assert not caplog.records
    export(tmp_path / "adapter", tmp_path / "merged", base=other)
    assert "differ from those that the adapters" in caplog.text


def test_reference_is_the_model_without_adapters(base):
    policy, plain = adapted(base), load_policy(base, dtype="float32").eval()
    logits = policy(TOKENS)
    with adapters_disabled(policy):
        torch.testing.assert_close(policy(TOKENS), plain(TOKENS))
    assert torch.equal(policy(TOKENS), logits)
    assert (logits - plain(TOKENS)).abs().max() > 0.1


def test_load_back_and_refuse_others(base, tmp_path):
    policy = adapted(base)
    save_adapters(policy, tmp_path / "adapter")
    fresh = load_policy(base, dtype="float32", lora=LoraConfig(rank=4)).eval()
    fill_weights(adapter_state(fresh), tmp_path / "adapter")
    assert torch.equal(fresh(TOKENS), policy(TOKENS))
    with pytest.raises(ConfigError, match=r"adapter.*shape"):
        fill_weights(adapter_state(load_policy(base, lora=LoraConfig(rank=8))), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="another model"):
        fill_weights(adapter_state(fresh), tmp_path)


def test_frozen_weights_in_bfloat16_and_adapters_in_float32(base):
    policy = adapted(base, dtype=torch.bfloat16)
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in policy.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    policy(TOKENS).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in policy.parameters() if p.requires_grad)


def test_a_target_module_that_is_not_there_is_named(tmp_path):
    folder = make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="nothing_like_it"):
        load_policy(folder, lora=LoraConfig(target_modules=["nothing_like_it"]))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "targets, message",
    [
        (["q_proj", "lm_head"], "lm_head"),
        (["lm_head"], "lm_head"),
        (".*(q_proj|lm_head)", "lm_head is the output matrix|matches no module"),
        (["embed_tokens", "q_proj"], "embed_tokens is an embedding, which does not support adapters"),
        (["model.embed_tokens"], "embed_tokens is an embedding"),
        (["q_proj", "c_attn"], "'c_attn' matches no module of this model; linear layers: down_proj"),
        (["norm"], "model.norm is RMSNorm"),
        (["self_attn"], "self_attn is Attention"),
        ("(q_proj", "is not a regular expression"),
        ("q_proj", "'q_proj' matches no module"),
        ([], "target_modules"),
    ],
)
def test_targets_without_adapters_are_named(tmp_path, tied, targets, message):
    folder = make_tiny_model(tmp_path, tie_word_embeddings=tied)
    if tied and isinstance(targets, str) and "lm_head" in targets:
        pytest.skip("a built-in decoder has no module for a tied output matrix, so the expression names none")
    with pytest.raises(ConfigError, match=f"target_modules.*({message})"):
        load_policy(folder, lora=LoraConfig(target_modules=targets))


@pytest.mark.parametrize(
    "targets, layers",
    [
        ("all-linear", 14),
        (["q_proj", "up_proj"], 4),
        (["self_attn.q_proj"], 2),
        (["layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"], 2),
        (r".*layers\.1\..*(q|v)_proj", 2),
    ],
)
def test_names_paths_and_expressions(tmp_path, targets, layers):
    policy = load_policy(make_tiny_model(tmp_path / "m"), lora=LoraConfig(target_modules=targets))
    assert len(adapter_weights(policy)) == layers
    save_adapters(policy, tmp_path / "a")
    peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "m"), tmp_path / "a")
    assert len(load_file(tmp_path / "a" / "adapter_model.safetensors")) == 2 * layers


def test_experts_without_adapters_are_said(tmp_path, caplog):
    load_policy(make_tiny_model(tmp_path, "qwen3_moe"), lora=LoraConfig())
    assert "the weights of experts are not linear layers and get no adapters" in caplog.text


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("whole", [{}, {"modules_to_save": ["lm_head", "embed_tokens"]}])
def test_adapters_of_others_on_the_output_matrix_are_merged_or_refused(tmp_path, tied, whole):
    """peft and TRL can train adapters of a tied matrix, but no folder can hold the merged weights."""
    make_tiny_model(tmp_path / "base", tie_word_embeddings=tied)
    targets = ["q_proj"] if whole else ["q_proj", "lm_head", "embed_tokens"]
    settings = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=targets, **whole)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    if tied:
        with pytest.raises(ConfigError, match=r"(lm_head|embed_tokens).*base model"):
            load_policy(tmp_path / "adapter", dtype="float32")
        return
    expected = theirs(TOKENS).logits
    loaded = load_policy(tmp_path / "adapter", dtype="float32")
    torch.testing.assert_close(loaded(TOKENS), expected, atol=1e-4, rtol=1e-4)
    export(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)


def test_unmerged_adapters_give_what_the_model_adds(base):
    policy, logprobs = adapted(base), []
    adapters = adapter_weights(policy)
    inner = getattr(policy, "inner", policy)
    layers = [name.removesuffix(".lora_A.default") for name, _ in inner.named_modules()]
    names = {f"{name}.weight" for name in layers if f"{name}.lora_A.default" in dict(inner.named_modules())}
    assert adapters.keys() == names
    for name, adapter in adapters.items():
        layer = inner.get_submodule(name.removesuffix(".weight"))
        x = torch.randn(3, adapter.a.shape[1])
        added = adapter.scale * (x @ adapter.a.T) @ adapter.b.T
        torch.testing.assert_close(layer.base_layer(x) + added, layer(x))
        logprobs.append(adapter.b.abs().sum())
    assert all(logprobs) and {a.a.dtype for a in adapters.values()} == {torch.float32}
    assert adapter_weights(load_policy(base, dtype="float32")) == {}


def test_adapters_on_adapters_are_refused(base, tmp_path):
    """peft would put those onto the base without the ones between."""
    save_adapters(adapted(base), tmp_path / "first")
    with pytest.raises(ConfigError, match="MERGED"):
        adapted(tmp_path / "first", rank=2)
    merged, plain = (load_policy(path, dtype="float32")(TOKENS) for path in (tmp_path / "first", base))
    assert (merged - plain).abs().max() > 0.1, "without model.lora all weights are trained, from the sum"


def test_merged_weights_are_rounded_once(base, tmp_path):
    """A policy is trained in float32 and computes in bfloat16; its reference has only the latter."""
    save_adapters(adapted(base), tmp_path)
    trained = load_policy(tmp_path, dtype=torch.bfloat16)
    frozen = load_policy(tmp_path, dtype=torch.bfloat16, trainable=False)
    assert {weight.dtype for weight in frozen.parameters()} == {torch.bfloat16}
    assert torch.equal(trained(TOKENS), frozen(TOKENS))


@pytest.mark.parametrize("field", [{"bias": "all"}, {"rank_pattern": {"q_proj": 4}}])
def test_fields_of_peft_that_would_be_passed_over_are_refused(field):
    with pytest.raises(ConfigError, match=f"peft_config.*{next(iter(field))}"):
        lora_section(peft.LoraConfig(r=4, **field))
    known = peft.LoraConfig(r=4, target_modules=".*_proj", task_type="CAUSAL_LM")
    assert lora_section(known) == {"rank": 4, "alpha": 8, "dropout": 0.0, "target_modules": ".*_proj"}


def test_equal_adapters_are_equal_files(tmp_path):
    """safetensors writes metadata in an order that differs from call to call."""
    policy = load_policy(str(make_tiny_model(tmp_path / "model")), dtype="float32", lora=LoraConfig(rank=2))
    files = set()
    for place in map(str, range(10)):
        save_adapters(policy, tmp_path / place)
        files.add((tmp_path / place / "adapter_model.safetensors").read_bytes())
    assert len(files) == 1 and load_file(tmp_path / "0" / "adapter_model.safetensors")


WHOLE = {"modules_to_save": ["lm_head", "embed_tokens"]}


def moved(policy, seed=1):
    """Change all that is trained."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return policy


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_modules_beside_adapters_are_those_of_peft(tmp_path, family):
    """The built-in decoder and a model of transformers."""
    base = make_tiny_model(tmp_path / "base", family, tie_word_embeddings=False)
    lora = LoraConfig(rank=4, target_modules=["q_proj"], **WHOLE)
    policy, plain = load_policy(base, dtype="float32", lora=lora).eval(), load_policy(base, dtype="float32").eval()
    before = plain(TOKENS)
    torch.testing.assert_close(policy(TOKENS), before)
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad and ".lora_" not in name}
    assert {name.split(".")[-2] for name in trained} == {"lm_head", "embed_tokens"}
    moved(policy)
    expected = policy(TOKENS)
    with adapters_disabled(policy):
        torch.testing.assert_close(policy(TOKENS), before)
    assert torch.equal(policy(TOKENS), expected)
    assert model_weights_of(policy).keys() == model_weights_of(plain).keys()

    save_adapters(policy, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    names = [load_file(tmp_path / name / "adapter_model.safetensors").keys() for name in ("adapter", "theirs")]
    assert names[0] == names[1]
    export(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)


def model_weights_of(policy):
    return dict(model_weights(policy))


def test_modules_are_rounded_from_float32(tmp_path):
    base = make_tiny_model(tmp_path, tie_word_embeddings=False)
    policy = load_policy(base, dtype=torch.bfloat16, lora=LoraConfig(rank=4, **WHOLE)).eval()
    assert policy.head_weight.dtype == torch.float32
    assert torch.equal(policy(TOKENS), load_policy(base, dtype=torch.bfloat16, lora=LoraConfig(rank=4)).eval()(TOKENS))


def test_modules_that_cannot_be_trained_beside_adapters_are_refused(tmp_path):
    untied = make_tiny_model(tmp_path / "untied", tie_word_embeddings=False)
    other = make_tiny_model(tmp_path / "mixture", "qwen3_moe", tie_word_embeddings=False)
    whole = LoraConfig(rank=2, target_modules=["q_proj"], **WHOLE)
    for path, lora, options, message in (
        (make_tiny_model(tmp_path / "tied"), {"modules_to_save": ["embed_tokens"]}, {}, "ties embedding"),
        (untied, {"modules_to_save": ["q_proj"]}, {}, "q_proj is in modules_to_save and in target_modules"),
        (untied, {"modules_to_save": ["v_proj"], "target_modules": ["q_proj"]}, {"quantization": "int8"}, "quantised"),
        (other, whole.model_dump(), {"dtype": torch.bfloat16}, "model.dtype=float32"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_policy(path, lora=LoraConfig(**lora), **({"dtype": "float32"} | options))


@pytest.mark.parametrize("rslora", [False, True])
def test_training_starts_from_adapters_of_peft(tmp_path, rslora):
    """Their settings are read from the folder; the reference is the base, or the adapters at the start."""
    base = make_tiny_model(tmp_path / "base", tie_word_embeddings=False)
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", use_rslora=rslora, **WHOLE
    )
    theirs = moved(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    start, expected = str(tmp_path / "adapter"), theirs(TOKENS).logits
    plain = load_policy(base, dtype="float32").eval()(TOKENS)
    for reference, given in (("base", plain), ("start", expected)):
        policy = load_policy(base, dtype="float32", lora=LoraConfig(start=start, reference=reference)).eval()
        torch.testing.assert_close(policy(TOKENS), expected, atol=1e-4, rtol=1e-4)
        moved(policy, seed=2)
        changed = policy(TOKENS)
        with adapters_disabled(policy):
            torch.testing.assert_close(policy(TOKENS), given, atol=1e-4, rtol=1e-4)
        assert torch.equal(policy(TOKENS), changed) and not torch.allclose(changed, expected, atol=1e-2)
        save_adapters(policy, tmp_path / reference)
        names = [load_file(tmp_path / name / "adapter_model.safetensors").keys() for name in ("adapter", reference)]
        assert names[0] == names[1]


def test_adapters_of_other_settings_are_not_started_from(tmp_path):
    base = make_tiny_model(tmp_path / "base")
    save_adapters(load_policy(base, lora=LoraConfig(rank=4, alpha=8)), tmp_path / "a")
    start = str(tmp_path / "a")
    assert LoraConfig(start=start).model_dump(include={"rank", "alpha"}) == {"rank": 4, "alpha": 8.0}
    with pytest.raises(ValueError, match=r"alpha=16.* have 8"):
        LoraConfig(start=start, alpha=16)
    with pytest.raises(ValueError, match="reference=start: needs start"):
        LoraConfig(reference="start")
    settings = tmp_path / "a" / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"alpha_pattern": {}', '"alpha_pattern": {"q_proj": 3}'))
    with pytest.raises(ValueError, match="alpha_pattern"):
        LoraConfig(start=start)
