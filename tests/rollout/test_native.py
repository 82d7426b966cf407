"""What is the native engine's own: what it refuses, how it schedules, how it reads and rounds weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen2Config

from atomrl.rollout.native import NativeEngine, Unsupported
from atomrl.stages import PromptBatch, Sample, SamplingParams
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", seed=1, scale=0.2)


def load(folder, *, concurrent=64, dtype=torch.float32, use_kernel=True):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"max_concurrent_completions": concurrent, "use_kernel": use_kernel}
    return NativeEngine.from_pretrained(str(folder), tokenizer, dtype=dtype, device="cpu", **options)


def batch(*prompts):
    names = tuple(f"p{index}" for index in range(len(prompts)))
    samples = tuple(Sample(sample_id=name, prompt="", ground_truth="") for name in names)
    return PromptBatch(samples=samples, prompt_ids=names, prompt_token_ids=tuple(prompts))


PROMPTS = batch(*[tuple(range(5 + index, 15 + 3 * index)) for index in range(6)])


@pytest.mark.parametrize(
    "config,reason",
    [
        (GPT2Config(), "model_type 'gpt2'"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act 'gelu'"),
        (Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=2), "sliding-window"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_parameters",
        ),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(config, reason, tmp_path):
    assert reason in NativeEngine.supports(config)
    config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=f"{reason}.*use the hf engine"):
        NativeEngine.from_pretrained(
            str(tmp_path), None, dtype=torch.float32, device="cpu", max_concurrent_completions=1
        )


def test_supported_families():
    assert NativeEngine.supports(LlamaConfig()) is None
    assert NativeEngine.supports(Qwen2Config()) is None


@pytest.mark.parametrize("use_kernel", [True, False])
def test_a_prompt_is_run_once_for_its_group(folder, use_kernel, monkeypatch):
    engine = load(folder, concurrent=5, use_kernel=use_kernel)  # no group of 4 fits beside another
    seen = []
    cache_for = engine.cache_for

    def recording(*arguments):
        cache = cache_for(*arguments)
        prefill = cache.prefill
        monkeypatch.setattr(cache, "prefill", lambda prompts, groups: seen.extend(prompts) or prefill(prompts, groups))
        return cache

    monkeypatch.setattr(engine, "cache_for", recording)
    engine.generate(PROMPTS, SamplingParams(completions_per_prompt=4, max_completion_tokens=30))
    assert sorted(seen) == sorted(PROMPTS.prompt_token_ids)


@pytest.mark.parametrize("concurrent", [6, 200])
def test_only_unfinished_rows_are_computed(folder, concurrent, monkeypatch):
    engine = load(folder, concurrent=concurrent)
    sizes = []
    logits = engine.decoder.logits
    monkeypatch.setattr(engine.decoder, "logits", lambda hidden: sizes.append(len(hidden)) or logits(hidden))
    rollouts = engine.generate(PROMPTS, SamplingParams(completions_per_prompt=8, max_completion_tokens=60))
    lengths = [len(completion.token_ids) for group in rollouts.completions for completion in group]
    assert min(lengths) < 20 < max(lengths)
    # Every token after a completion's first is one row of one step; first tokens come from the prompts.
    assert sum(lengths) - len(lengths) <= sum(sizes) <= sum(lengths)
    assert max(sizes) <= concurrent


def test_weights_without_safetensors(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=10)
    assert load(tmp_path).generate(PROMPTS, sampling) == load(folder).generate(PROMPTS, sampling)


@pytest.mark.parametrize("use_kernel", [True, False])
def test_bfloat16_rounds_the_weights_and_stays_near(folder, use_kernel):
    engine = load(folder, dtype=torch.bfloat16, use_kernel=use_kernel)
    rollouts = engine.generate(PROMPTS, SamplingParams(completions_per_prompt=4, max_completion_tokens=40))
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(torch.float64)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    errors = {rounded: [], exact: []}
    for prompt, group in zip(rollouts.prompt_token_ids, rollouts.completions, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            for model, found in errors.items():
                with torch.no_grad():
                    logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                expected = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
                found.append((expected - torch.tensor(completion.logprobs)).abs())
    to_rounded, to_exact = (float(torch.cat(found).mean()) for found in errors.values())
    assert to_rounded < 0.02
    assert to_exact > to_rounded  # the weights were rounded, and nearly all of the error is that rounding


def test_growing_completions_keep_their_keys(folder):
    """Longer than the room that a cache starts with, at a head size and with lengths that no block divides."""
    for use_kernel in (True, False):
        sampling = SamplingParams(max_completion_tokens=300, ignore_eos=True, temperature=0)
        long = load(folder, use_kernel=use_kernel).generate(PROMPTS, sampling)
        short = SamplingParams(max_completion_tokens=90, ignore_eos=True, temperature=0)
        for group, other in zip(long.completions, load(folder).generate(PROMPTS, short).completions, strict=True):
            assert group[0].token_ids[:90] == other[0].token_ids


@pytest.mark.parametrize("use_kernel", [True, False])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_weights_that_have_diverged_are_named(folder, use_kernel, top_p):
    engine = load(folder, use_kernel=use_kernel)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    state["model.norm.weight"] = state["model.norm.weight"] * float("nan")
    engine.load_weights(state.items(), version=1)
    with pytest.raises(ValueError, match="diverged"):
        engine.generate(PROMPTS, SamplingParams(completions_per_prompt=2, max_completion_tokens=5, top_p=top_p))
