"""One suite for every engine: what `RolloutEngine.generate` and `load_weights` promise, whichever it is."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from atomrl.rollout.hf import HFEngine
from atomrl.rollout.native import NativeEngine
from atomrl.stages import PromptBatch, Sample, SamplingParams
from tests.tiny import make_tiny_model

EOS = 2
STORY = ", there was a little girl named Lily. She loved to play outside in the park."


def native(path, tokenizer, concurrent, use_kernel):
    options = {"dtype": torch.float32, "device": "cpu", "max_concurrent_completions": concurrent}
    engine = NativeEngine.from_pretrained(path, tokenizer, use_kernel=use_kernel, **options)
    if use_kernel and engine.decoder.kernels is None:
        pytest.skip("no C++ compiler to build the kernel with")
    return engine


ENGINES = {
    "hf": lambda path, tokenizer, concurrent: HFEngine.from_pretrained(
        path, tokenizer, dtype=torch.float32, device="cpu", max_concurrent_completions=concurrent
    ),
    "native": lambda path, tokenizer, concurrent: native(path, tokenizer, concurrent, False),
    "native+kernel": lambda path, tokenizer, concurrent: native(path, tokenizer, concurrent, True),
}
# Both head layouts, odd sizes, biases, a scaled rope, one key-value head for all and one for each.
MODELS = {
    "llama": {"architecture": "llama", "head_dim": 24, "num_hidden_layers": 1, "tie_word_embeddings": False},
    "qwen2": {"architecture": "qwen2", "num_key_value_heads": 1},
    "qwen3": {"architecture": "qwen3", "head_dim": 16},
    "llama-biased": {
        "architecture": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.fixture(scope="session", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), scale=0.2, **MODELS[request.param])


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plain"), "llama", seed=3, scale=0.2)


@pytest.fixture(params=ENGINES)
def make_engine(request):
    """folder, rows at once -> engine"""
    made = []

    def make(path: Path, concurrent: int = 64):
        made.append(ENGINES[request.param](str(path), AutoTokenizer.from_pretrained(path), concurrent))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def make_seeded(make_engine, request):
    if request.node.callspec.params["make_engine"] == "hf":
        pytest.skip("generate draws from one stream for the whole batch")
    return make_engine


def batch(*prompts: list[int], ids: list[str] | None = None) -> PromptBatch:
    ids = ids or [f"p{index}" for index in range(len(prompts))]
    samples = tuple(Sample(sample_id=name, prompt="", ground_truth="") for name in ids)
    return PromptBatch(samples=samples, prompt_ids=tuple(ids), prompt_token_ids=tuple(tuple(p) for p in prompts))


def random_prompts(count: int, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(5, 102, (length,), generator=generator).tolist() for length in lengths]


def completions(rollouts):
    return [completion for group in rollouts.completions for completion in group]


def tokens(rollouts):
    return [[completion.token_ids for completion in group] for group in rollouts.completions]


@lru_cache(maxsize=2)
def reference_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@torch.no_grad()
def reference_logits(folder: Path, prompt, completion) -> torch.Tensor:
    """Float64 logits of each completion token's distribution, from a plain forward pass of transformers."""
    ids = torch.tensor([[*prompt, *completion]])
    return reference_model(folder)(ids).logits[0, len(prompt) - 1 : -1]


def largest_logprob_error(folder: Path, rollouts, temperature: float) -> float:
    """Absolute, and relative where a log-prob is below -1."""
    worst = 0.0
    for prompt, group in zip(rollouts.prompt_token_ids, rollouts.completions, strict=True):
        for completion in group:
            logits = reference_logits(folder, prompt, completion.token_ids)
            expected = (logits / temperature).log_softmax(-1)
            expected = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            error = (expected - torch.tensor(completion.logprobs)).abs() / expected.abs().clamp(min=1)
            worst = max(worst, float(error.max()))
    return worst


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_logprobs_are_the_models_at_the_sampling_temperature(make_engine, folder, temperature):
    engine = make_engine(folder, concurrent=7)
    prompts = batch([7], [5, 6, 7, 8, 9], *random_prompts(2, longest=80), [9] * 33)
    sampling = SamplingParams(completions_per_prompt=3, max_completion_tokens=70, temperature=temperature)
    rollouts = engine.generate(prompts, sampling)
    assert max(len(completion.token_ids) for completion in completions(rollouts)) > 40
    assert largest_logprob_error(folder, rollouts, temperature) < 1e-5


def test_logprobs_of_cut_distributions_are_of_the_whole_vocabulary(make_engine, plain_folder):
    sampling = SamplingParams(max_completion_tokens=20, top_p=0.8, top_k=10, min_completion_tokens=10)
    rollouts = make_engine(plain_folder).generate(batch(*random_prompts(6)), sampling)
    assert largest_logprob_error(plain_folder, rollouts, 1.0) < 1e-5


def test_greedy_takes_the_most_likely_token(make_engine, folder):
    rollouts = make_engine(folder).generate(
        batch(*random_prompts(4)), SamplingParams(max_completion_tokens=40, temperature=0)
    )
    for prompt, completion in zip(rollouts.prompt_token_ids, completions(rollouts), strict=True):
        logits = reference_logits(folder, prompt, completion.token_ids)
        assert logits.argmax(-1).tolist() == list(completion.token_ids)
    assert largest_logprob_error(folder, rollouts, 1.0) < 1e-5


def test_real_model_continues_a_story(make_engine, shared_dir):
    path = shared_dir / "models" / "stories260k"
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = batch(tokenizer("Once upon a time").input_ids, tokenizer("Tom").input_ids)
    engine = make_engine(path)
    greedy = engine.generate(prompts, SamplingParams(max_completion_tokens=60, temperature=0))
    assert completions(greedy)[0].text.startswith(STORY)
    sampled = engine.generate(prompts, SamplingParams(completions_per_prompt=4, max_completion_tokens=100))
    assert largest_logprob_error(path, sampled, 1.0) < 1e-5


def test_counts_order_and_groups(make_engine, plain_folder):
    prompts = batch(*random_prompts(5), ids=list("abcde"))
    sampling = SamplingParams(completions_per_prompt=3, max_completion_tokens=12)
    rollouts = make_engine(plain_folder, concurrent=4).generate(prompts, sampling)
    assert rollouts.prompt_ids == tuple("abcde")
    assert rollouts.prompt_token_ids == prompts.prompt_token_ids
    assert [len(group) for group in rollouts.completions] == [3] * 5
    assert all(1 <= len(completion.token_ids) <= 12 for completion in completions(rollouts))
    assert len({completion.token_ids for completion in rollouts.completions[0]}) > 1
    # Greedy completions equal those of the prompt run alone, so each belongs to its own prompt.
    greedy = SamplingParams(completions_per_prompt=2, max_completion_tokens=12, temperature=0)
    engine = make_engine(plain_folder, concurrent=4)
    together = tokens(engine.generate(prompts, greedy))
    alone = [tokens(engine.generate(batch(list(prompt)), greedy))[0] for prompt in prompts.prompt_token_ids]
    assert together == alone


def test_no_prompts_give_no_completions(make_engine, plain_folder):
    assert make_engine(plain_folder).generate(batch(), SamplingParams()).completions == ()


def test_finish_reasons_and_texts(make_engine, plain_folder):
    engine = make_engine(plain_folder)
    sampling = SamplingParams(completions_per_prompt=16, max_completion_tokens=30)
    found = completions(engine.generate(batch(*random_prompts(4)), sampling))
    assert {completion.finish_reason for completion in found} == {"stop", "length"}
    for completion in found:
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == EOS
        else:
            assert len(completion.token_ids) == 30
        assert EOS not in completion.token_ids[:-1]
        assert completion.text == engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_stop_tokens_end_a_completion_and_are_kept(make_engine, plain_folder):
    stops = tuple(range(40, 60))
    sampling = SamplingParams(completions_per_prompt=16, max_completion_tokens=200, stop_token_ids=stops)
    for completion in completions(make_engine(plain_folder).generate(batch(*random_prompts(4)), sampling)):
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] in (*stops, EOS)
        assert not set(completion.token_ids[:-1]) & {*stops, EOS}


def test_stop_strings_end_a_completion_and_are_kept(make_engine, plain_folder):
    prompts = batch(*random_prompts(4))
    engine = make_engine(plain_folder)
    free = engine.generate(prompts, SamplingParams(max_completion_tokens=60, temperature=0, ignore_eos=True))
    texts = [engine.tokenizer.decode(completion.token_ids) for completion in completions(free)]
    stops = tuple(dict.fromkeys((texts[0][20:23], texts[1][30:32])))
    sampling = SamplingParams(max_completion_tokens=60, temperature=0, ignore_eos=True, stop=stops)
    for whole, completion in zip(completions(free), completions(engine.generate(prompts, sampling)), strict=True):
        prefixes = [engine.tokenizer.decode(whole.token_ids[:end]) for end in range(1, 61)]
        ends = [end for end, text in enumerate(prefixes, start=1) if any(stop in text for stop in stops)]
        assert completion.token_ids == whole.token_ids[: min(ends, default=60)]
        assert completion.finish_reason == ("stop" if ends else "length")


def test_stop_string_over_several_tokens_of_a_real_tokenizer(make_engine, shared_dir):
    path = shared_dir / "models" / "stories260k"
    engine = make_engine(path)
    prompts = batch(engine.tokenizer("Once upon a time").input_ids)
    stops = ("named Lily", "girl named")
    sampling = SamplingParams(max_completion_tokens=60, temperature=0, stop=stops)
    completion = completions(engine.generate(prompts, sampling))[0]
    assert completion.text == ", there was a little girl named"
    assert completion.finish_reason == "stop"


def test_nothing_stops_before_the_minimum(make_engine, plain_folder):
    stop = tuple(range(40, 60))
    shared = {"completions_per_prompt": 16, "max_completion_tokens": 40, "stop_token_ids": stop}
    engine = make_engine(plain_folder)
    free = completions(engine.generate(batch(*random_prompts(4)), SamplingParams(**shared)))
    assert any(len(completion.token_ids) < 20 for completion in free)
    held = SamplingParams(**shared, min_completion_tokens=20, stop=("a", "b", "c"))
    for completion in completions(engine.generate(batch(*random_prompts(4)), held)):
        assert len(completion.token_ids) >= 20
        assert not {*stop, EOS} & set(completion.token_ids[:20])


def test_ignore_eos_goes_on(make_engine, plain_folder):
    sampling = SamplingParams(completions_per_prompt=16, max_completion_tokens=40, ignore_eos=True)
    found = completions(make_engine(plain_folder).generate(batch(*random_prompts(4)), sampling))
    assert {(len(completion.token_ids), completion.finish_reason) for completion in found} == {(40, "length")}
    assert any(EOS in completion.token_ids for completion in found)


def test_top_k_of_one_is_greedy(make_engine, plain_folder):
    engine, prompts = make_engine(plain_folder), batch(*random_prompts(4))
    greedy = engine.generate(prompts, SamplingParams(max_completion_tokens=30, temperature=0))
    one = engine.generate(prompts, SamplingParams(max_completion_tokens=30, top_k=1))
    assert tokens(one) == tokens(greedy)


def first_tokens(engine, prompt, draws: int = 4096, **sampling) -> Counter:
    sampling = SamplingParams(completions_per_prompt=draws, max_completion_tokens=1, **sampling)
    return Counter(completion.token_ids[0] for completion in completions(engine.generate(batch(prompt), sampling)))


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 7}, {"top_p": 0.9, "top_k": 20, "temperature": 2.0}])
def test_cut_sampling_draws_the_kept_set_in_proportion(make_engine, plain_folder, cut):
    prompt = random_prompts(1)[0]
    scores = reference_logits(plain_folder, prompt, [5])[0] / cut.get("temperature", 1.0)
    order = scores.argsort(descending=True)[: cut.get("top_k", len(scores))]
    probabilities = scores[order].softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    order = order[before < cut.get("top_p", 1.0)]
    drawn = first_tokens(make_engine(plain_folder, concurrent=4096), prompt, **cut)
    assert set(drawn) <= set(order.tolist())
    check_frequencies(drawn, order, scores[order].softmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(make_engine, plain_folder, temperature):
    prompt = random_prompts(1)[0]
    probabilities = (reference_logits(plain_folder, prompt, [5])[0] / temperature).softmax(-1)
    drawn = first_tokens(make_engine(plain_folder, concurrent=4096), prompt, temperature=temperature)
    check_frequencies(drawn, torch.arange(len(probabilities)), probabilities)


def check_frequencies(drawn: Counter, order: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square, rare tokens pooled, within five standard deviations of its mean."""
    total = sum(drawn.values())
    counts = torch.tensor([float(drawn[int(token)]) for token in order])
    expected = probabilities.float() * total
    common = expected >= 5
    counts = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    seen = expected > 0
    chi_square = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    freedom = int(seen.sum()) - 1
    assert freedom >= 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_same_seed_and_step_same_completions(make_engine, plain_folder):
    engine, prompts = make_engine(plain_folder), batch(*random_prompts(3))

    def draw(**changes):
        shared = {"completions_per_prompt": 4, "max_completion_tokens": 20, "seed": 1, "step": 1}
        return tokens(engine.generate(prompts, SamplingParams(**(shared | changes))))

    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = draw()
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's random state is untouched
    torch.manual_seed(1)
    assert draw() == first
    assert draw(seed=2) != first
    assert draw(step=2) != first


def test_completions_do_not_depend_on_company(make_seeded, folder):
    prompts, ids = random_prompts(5), list("abcde")
    sampling = SamplingParams(completions_per_prompt=3, max_completion_tokens=40, seed=4)
    together = tokens(make_seeded(folder, concurrent=64).generate(batch(*prompts, ids=ids), sampling))
    backwards = make_seeded(folder, concurrent=64).generate(batch(*prompts[::-1], ids=ids[::-1]), sampling)
    assert tokens(backwards)[::-1] == together
    for concurrent in (2, 7):  # fewer rows at once than completions, even than a group
        few = make_seeded(folder, concurrent=concurrent).generate(batch(*prompts, ids=ids), sampling)
        assert tokens(few) == together
    alone = make_seeded(folder).generate(batch(prompts[3], ids=[ids[3]]), sampling)
    assert tokens(alone)[0] == together[3]


def test_very_long_beside_very_short(make_engine, plain_folder):
    prompts = batch([7], [8] * 380, [9, 10])
    sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=132, ignore_eos=True)
    rollouts = make_engine(plain_folder).generate(prompts, sampling)
    assert largest_logprob_error(plain_folder, rollouts, 1.0) < 1e-5


def test_an_engine_is_reused_with_other_sizes(make_engine, plain_folder):
    engine = make_engine(plain_folder, concurrent=8)
    for count, per_prompt, length in ((2, 2, 8), (5, 4, 70), (1, 1, 3)):
        sampling = SamplingParams(completions_per_prompt=per_prompt, max_completion_tokens=length)
        rollouts = engine.generate(batch(*random_prompts(count)), sampling)
        assert largest_logprob_error(plain_folder, rollouts, 1.0) < 1e-5


def test_bad_prompts_and_settings_are_refused(make_engine, plain_folder):
    engine = make_engine(plain_folder)
    with pytest.raises(ValueError, match="'p1' has no tokens"):
        engine.generate(batch([5], []), SamplingParams())
    with pytest.raises(ValueError, match=r"'p0' has 300 tokens.*context of 512"):
        engine.generate(batch([5] * 300), SamplingParams(max_completion_tokens=256))
    with pytest.raises(ValueError, match="vocabulary of 102"):
        engine.generate(batch([5]), SamplingParams(stop_token_ids=(102,)))
    with pytest.raises(ValueError, match="stop string is empty"):
        engine.generate(batch([5]), SamplingParams(stop=("",)))


def test_new_weights_are_used(make_engine, folder, tmp_path):
    changed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(0.9)
    changed.save_pretrained(tmp_path)
    engine, prompts = make_engine(folder), batch(*random_prompts(3))
    sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=20)
    old = engine.generate(prompts, sampling)
    assert old.policy_version == 0
    engine.load_weights(changed.state_dict().items(), version=4)
    for tensor in changed.state_dict().values():
        tensor.zero_()  # the engine has its own copy
    new = engine.generate(prompts, sampling)
    assert new.policy_version == 4
    assert largest_logprob_error(tmp_path, new, 1.0) < 1e-5
    assert [c.logprobs for c in completions(new)] != [c.logprobs for c in completions(old)]


def test_bad_loads_are_refused_and_change_nothing(make_engine, folder):
    engine, prompts = make_engine(folder), batch(*random_prompts(3))
    sampling = SamplingParams(max_completion_tokens=20)
    before = engine.generate(prompts, sampling)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    good = {name: tensor * 2 for name, tensor in state.items()}
    missing = {name: tensor for name, tensor in good.items() if name != "model.norm.weight"}
    bad_shape = good | {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        engine.load_weights(missing.items(), version=1)
    with pytest.raises(ValueError, match=r"model\.extra is unexpected"):
        engine.load_weights((good | {"model.extra": torch.zeros(1)}).items(), version=1)
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight has shape \(3, 3\), not"):
        engine.load_weights(bad_shape.items(), version=1)
    after = engine.generate(prompts, sampling)
    assert after.policy_version == 0
    assert completions(after) == completions(before)
