"""One suite for every engine: what `RolloutEngine` promises, whichever it is."""

from __future__ import annotations

import atexit
import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig
from atomrl.engines.generation import generate, requests_of
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.native.step_ops import PlainOps
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions
from atomrl.engines.servers import ServerEngine
from atomrl.engines.sglang import SGLangEngine
from atomrl.engines.vllm import VLLMEngine
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.models.loading import read_weights
from atomrl.protocols import Adapter, WeightUpdate
from atomrl.types import SamplingParams
from atomrl.weight_sync import InProcessTransfer, WeightMismatch, tensor_hash
from atomrl.weight_sync.transfer import compare, dtypes_of, expected_hashes
from tests.engines.fake_sglang import FakeSGLang
from tests.prompts import logprobs_of, prompts_of, response
from tests.tiny import make_tiny_model

EOS = 2
STORY = ", there was a little girl named Lily. She loved to play outside in the park."


def options(concurrent, **others):
    return EngineOptions(torch.float32, "cpu", max_concurrent_completions=concurrent, **others)


def native(path, tokenizer, concurrent, use_kernel, ops=None):
    engine = NativeEngine.from_pretrained(path, tokenizer, options(concurrent), use_kernel=use_kernel, ops=ops)
    if use_kernel and engine.model.kernels is None:
        pytest.skip("no C++ compiler to build the kernel with")
    return engine


def skip_heads(path):
    config = json.loads((Path(path) / "config.json").read_text())
    if config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) % 32:
        pytest.skip("vLLM's attention on CPUs wants heads of 32, 64, ...")


@cache
def started(kind, path, tokenizer, **others):
    """One for each model, closed with the process: starting it takes seconds."""
    engine = kind.from_pretrained(path, tokenizer, options(256, **others))
    atexit.register(engine.close)
    return engine


def vllm(kind, path, tokenizer, **others):
    skip_heads(path)
    return as_new(started(kind, path, tokenizer, lora_rank=4, **others), path)


def vllm_cut(path, tokenizer):
    """Over two workers. One model is enough: of which parts there are several copies, `test_vllm_worker` tells."""
    if json.loads((Path(path) / "config.json").read_text())["model_type"] != "llama" or "plain" not in path:
        pytest.skip("of models that are cut over workers, one is tested")
    return vllm(VLLMEngine, path, tokenizer, tensor_parallel=2)


def sglang(path, tokenizer, way="files"):
    """A server of ours that speaks as SGLang does, or SGLang itself (`make test-sglang`), which has no LoRA on CPUs."""
    url, lora_rank = None, 0
    if reason := SGLangEngine.unsupported(AutoConfig.from_pretrained(path)):
        pytest.skip(reason)
    if find_spec("sglang") is None:
        url, lora_rank = fake_server(path, way), 4
    elif way == "collective":  # one server for both ways
        url = started(SGLangEngine, path, tokenizer).replicas[0].url
    server = (url,) if url else ()
    ways = {"server_weights": way} if way != "files" else {}
    return as_new(started(SGLangEngine, path, tokenizer, lora_rank=lora_rank, server=server, **ways), path)


@cache
def fake_server(path, way):
    server = FakeSGLang(path)
    atexit.register(server.close)
    return server.url


@cache
def started_replicas(path, tokenizer):
    """Two of the native engine for each model."""
    build = partial(native, path, tokenizer, 5, False)
    resources = {"rollout": {"num_cpus": 0.1}}
    return ReplicatedEngine(build, RayCluster(ClusterConfig(replicas=2, resources=resources), ["rollout"]))


def as_new(engine, path):
    engine.resume()
    engine.wake()
    engine.abort()
    state = [(name, tensor) for name, tensor in read_weights(path) if name in engine.weight_shapes()]
    engine.update_weights(WeightUpdate(version=0, tensors=state))
    return engine


ENGINES = {
    "replicas": lambda path, tokenizer, concurrent: as_new(started_replicas(path, tokenizer), path),
    "vllm": lambda path, tokenizer, concurrent: vllm(VLLMEngine, path, tokenizer),
    "vllm-cut": lambda path, tokenizer, concurrent: vllm_cut(path, tokenizer),
    "vllm-server": lambda path, tokenizer, concurrent: vllm(VLLMServerEngine, path, tokenizer),
    "sglang": lambda path, tokenizer, concurrent: sglang(path, tokenizer),
    "sglang-collective": lambda path, tokenizer, concurrent: sglang(path, tokenizer, "collective"),
    "hf": lambda path, tokenizer, concurrent: HFEngine.from_pretrained(path, tokenizer, options(concurrent)),
    "native": lambda path, tokenizer, concurrent: native(path, tokenizer, concurrent, False),
    "native+kernel": lambda path, tokenizer, concurrent: native(path, tokenizer, concurrent, True),
    "native+pages": lambda path, tokenizer, concurrent: native(path, tokenizer, concurrent, False, PlainOps()),
}
NEEDS = {"vllm": "vllm", "vllm-cut": "vllm", "vllm-server": "vllm", "replicas": "ray"}
SHARED = {"vllm", "vllm-cut", "vllm-server", "sglang", "sglang-collective", "replicas"}
"""Those that tests share, since starting one takes seconds."""
COMPUTE_ALONE = (ReplicatedEngine, ServerEngine)
"""They draw between two polls too, so completions may have ended by themselves."""
# Both head layouts, odd sizes, biases, a scaled rope, one key-value head for all and one for each.
MODELS = {
    "llama": {"architecture": "llama", "head_dim": 24, "num_hidden_layers": 1, "tie_word_embeddings": False},
    "qwen2": {"architecture": "qwen2", "num_key_value_heads": 1},
    "qwen3": {"architecture": "qwen3", "head_dim": 16},
    "qwen3-untied": {"architecture": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
    "llama-biased": {
        "architecture": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "head_dim": 32,
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
    return make_tiny_model(tmp_path_factory.mktemp("plain"), "llama", seed=3, scale=0.2, head_dim=32)


@lru_cache(maxsize=32)
def tokenizer_of(path: str):
    return AutoTokenizer.from_pretrained(path)


AS_ANOTHER = "sglang-collective"
"""Draws as `sglang` does, and takes weights in another way, which test_sglang_faults.py has too."""


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name == AS_ANOTHER else name for name in ENGINES])
def make_engine(request):
    """folder, rows at once -> engine"""
    needs = NEEDS.get(request.param)
    if needs and find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed; `make distributed` has it")
    made = []

    def make(path: Path, concurrent: int = 64):
        engine = ENGINES[request.param](str(path), tokenizer_of(str(path)), concurrent)
        if request.param not in SHARED:
            made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def make_seeded(make_engine):
    def make(path: Path, concurrent: int = 64):
        engine = make_engine(path, concurrent)
        if not engine.seeded:
            pytest.skip("what shares a batch can change a completion")
        return engine

    return make


def skip_refused(engine, sampling):
    """Each engine says itself which log-probs it cannot give."""
    if reason := getattr(engine, "refused", lambda _: None)(sampling):
        with pytest.raises(ValueError, match=re.escape(reason)):
            generate(engine, prompts_of([5]), sampling)
        pytest.skip(reason)


def check_same(engine, before, after):
    """Equal, but for rounding where the engine computes alone: what shares a batch is then left to chance."""
    if isinstance(engine, ServerEngine):
        assert not engine.seeded or tokens(after) == tokens(before)
        pairs = zip(before, after, strict=True) if engine.seeded else ()
        assert all(logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-5) for one, other in pairs)
    else:
        assert after == before


def random_prompts(count: int, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(5, 102, (length,), generator=generator).tolist() for length in lengths]


def tokens(trajectories):
    return [response(trajectory) for trajectory in trajectories]


@lru_cache(maxsize=2)
def reference_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@torch.no_grad()
def reference_logits(folder: Path, prompt, completion) -> torch.Tensor:
    """Float64 logits of each completion token's distribution, from a plain forward pass of transformers."""
    ids = torch.tensor([[*prompt, *completion]])
    return reference_model(folder)(ids).logits[0, len(prompt) - 1 : -1]


def largest_logprob_error(folder: Path, trajectories, temperature: float) -> float:
    """Absolute, and relative where a log-prob is below -1."""
    worst = 0.0
    for trajectory in trajectories:
        drawn = response(trajectory)
        logits = reference_logits(folder, trajectory.segments[0].token_ids, drawn)
        expected = (logits / temperature).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(drawn)[:, None])[:, 0]
        error = (expected - torch.tensor(logprobs_of(trajectory))).abs() / expected.abs().clamp(min=1)
        worst = max(worst, float(error.max()))
    return worst


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_logprobs_are_the_models_at_the_sampling_temperature(make_engine, folder, temperature):
    engine = make_engine(folder, concurrent=7)
    prompts = prompts_of([7], [5, 6, 7, 8, 9], *random_prompts(2, longest=80), [9] * 33)
    sampling = SamplingParams(completions_per_prompt=3, max_completion_tokens=70, temperature=temperature)
    rollouts = generate(engine, prompts, sampling)
    assert max(len(response(completion)) for completion in rollouts) > 40
    assert largest_logprob_error(folder, rollouts, temperature) < 1e-5


@pytest.mark.parametrize("minimum", [0, 10])
def test_logprobs_of_cut_distributions_are_of_the_whole_vocabulary(make_engine, plain_folder, minimum):
    sampling = SamplingParams(max_completion_tokens=20, top_p=0.8, top_k=10, min_completion_tokens=minimum)
    engine = make_engine(plain_folder)
    skip_refused(engine, sampling)
    rollouts = generate(engine, prompts_of(*random_prompts(6)), sampling)
    assert largest_logprob_error(plain_folder, rollouts, 1.0) < 1e-5


def test_greedy_takes_the_most_likely_token(make_engine, folder):
    rollouts = generate(
        make_engine(folder), prompts_of(*random_prompts(4)), SamplingParams(max_completion_tokens=40, temperature=0)
    )
    for completion in rollouts:
        logits = reference_logits(folder, completion.segments[0].token_ids, response(completion))
        assert logits.argmax(-1).tolist() == list(response(completion))
    assert largest_logprob_error(folder, rollouts, 1.0) < 1e-5


def test_real_model_continues_a_story(make_engine, shared_dir):
    path = shared_dir / "models" / "stories260k"
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = prompts_of(tokenizer("Once upon a time").input_ids, tokenizer("Tom").input_ids)
    engine = make_engine(path)
    greedy = generate(engine, prompts, SamplingParams(max_completion_tokens=60, temperature=0))
    assert greedy[0].text.startswith(STORY)
    sampled = generate(engine, prompts, SamplingParams(completions_per_prompt=4, max_completion_tokens=100))
    assert largest_logprob_error(path, sampled, 1.0) < 2e-5  # float32 over 100 tokens of a real model


def test_counts_order_and_groups(make_engine, plain_folder):
    prompts = prompts_of(*random_prompts(5), ids=list("abcde"))
    sampling = SamplingParams(completions_per_prompt=3, max_completion_tokens=12)
    rollouts = generate(make_engine(plain_folder, concurrent=4), prompts, sampling)
    assert [(t.prompt_id, t.index) for t in rollouts] == [(name, index) for name in "abcde" for index in range(3)]
    assert [t.segments[0].token_ids for t in rollouts[::3]] == [prompt.token_ids for prompt in prompts]
    assert all(1 <= len(response(completion)) <= 12 for completion in rollouts)
    assert len({response(completion) for completion in rollouts[:3]}) > 1
    # Greedy completions equal those of the prompt run alone, so each belongs to its own prompt.
    greedy = SamplingParams(completions_per_prompt=2, max_completion_tokens=12, temperature=0)
    engine = make_engine(plain_folder, concurrent=4)
    together = tokens(generate(engine, prompts, greedy))
    alone = [tokens(generate(engine, [prompt], greedy)) for prompt in prompts]
    assert together == [row for group in alone for row in group]


def test_no_prompts_give_no_completions(make_engine, plain_folder):
    assert generate(make_engine(plain_folder), prompts_of(), SamplingParams()) == []


def test_finish_reasons_and_texts(make_engine, plain_folder):
    engine = make_engine(plain_folder)
    sampling = SamplingParams(completions_per_prompt=16, max_completion_tokens=30)
    outputs = generate(engine, prompts_of(*random_prompts(4)), sampling)
    assert {completion.finish_reason for completion in outputs} == {"stop", "length"}
    for completion in outputs:
        if completion.finish_reason == "stop":
            assert response(completion)[-1] == EOS
        else:
            assert len(response(completion)) == 30
        assert EOS not in response(completion)[:-1]
        written = response(completion)[:-1] if completion.finish_reason == "stop" else response(completion)
        assert completion.text == tokenizer_of(str(plain_folder)).decode(written), "special tokens too, but for the end"


def test_stop_tokens_end_a_completion_and_are_kept(make_engine, plain_folder):
    stops = tuple(range(40, 60))
    sampling = SamplingParams(completions_per_prompt=16, max_completion_tokens=200, stop_token_ids=stops)
    for completion in generate(make_engine(plain_folder), prompts_of(*random_prompts(4)), sampling):
        assert completion.finish_reason == "stop"
        assert response(completion)[-1] in (*stops, EOS)
        assert not set(response(completion)[:-1]) & {*stops, EOS}


def test_stop_strings_end_a_completion_and_are_kept(make_engine, plain_folder):
    prompts = prompts_of(*random_prompts(4))
    engine, tokenizer = make_engine(plain_folder), tokenizer_of(str(plain_folder))
    free = generate(engine, prompts, SamplingParams(max_completion_tokens=60, temperature=0, ignore_eos=True))
    texts = [tokenizer.decode(response(completion)) for completion in free]
    stops = tuple(dict.fromkeys((texts[0][20:23], texts[1][30:32])))
    sampling = SamplingParams(max_completion_tokens=60, temperature=0, ignore_eos=True, stop=stops)
    for whole, completion in zip(free, generate(engine, prompts, sampling), strict=True):
        prefixes = [tokenizer.decode(response(whole)[:end]) for end in range(1, 61)]
        ends = [end for end, text in enumerate(prefixes, start=1) if any(stop in text for stop in stops)]
        assert response(completion) == response(whole)[: min(ends, default=60)]
        assert completion.finish_reason == ("stop" if ends else "length")


def test_stop_string_over_several_tokens_of_a_real_tokenizer(make_engine, shared_dir):
    path = shared_dir / "models" / "stories260k"
    engine = make_engine(path)
    prompts = prompts_of(tokenizer_of(str(path))("Once upon a time").input_ids)
    stops = ("named Lily", "girl named")
    sampling = SamplingParams(max_completion_tokens=60, temperature=0, stop=stops)
    completion = generate(engine, prompts, sampling)[0]
    assert completion.text == ", there was a little girl named"
    assert completion.finish_reason == "stop"


def test_nothing_stops_before_the_minimum(make_engine, plain_folder):
    stop = tuple(range(40, 60))
    shared = {"completions_per_prompt": 16, "max_completion_tokens": 40, "stop_token_ids": stop}
    engine = make_engine(plain_folder)
    free = generate(engine, prompts_of(*random_prompts(4)), SamplingParams(**shared))
    assert any(len(response(completion)) < 20 for completion in free)
    held = SamplingParams(**shared, min_completion_tokens=20, stop=("a", "b", "c"))
    skip_refused(engine, held)
    for completion in generate(engine, prompts_of(*random_prompts(4)), held):
        assert len(response(completion)) >= 20
        assert not {*stop, EOS} & set(response(completion)[:20])


def test_ignore_eos_continues(make_engine, plain_folder):
    sampling = SamplingParams(completions_per_prompt=16, max_completion_tokens=40, ignore_eos=True)
    outputs = generate(make_engine(plain_folder), prompts_of(*random_prompts(4)), sampling)
    assert {(len(response(completion)), completion.finish_reason) for completion in outputs} == {(40, "length")}
    assert any(EOS in response(completion) for completion in outputs)


def test_top_k_of_one_is_greedy(make_engine, plain_folder):
    engine, prompts = make_engine(plain_folder), prompts_of(*random_prompts(4))
    greedy = generate(engine, prompts, SamplingParams(max_completion_tokens=30, temperature=0))
    sampling = SamplingParams(max_completion_tokens=30, top_k=1)
    skip_refused(engine, sampling)
    one = generate(engine, prompts, sampling)
    assert tokens(one) == tokens(greedy)


def first_tokens(engine, prompt, **sampling) -> Counter:
    draws = 1024 if isinstance(engine, ServerEngine) else 4096  # an HTTP request each
    sampling = SamplingParams(completions_per_prompt=draws, max_completion_tokens=1, **sampling)
    return Counter(response(completion)[0] for completion in generate(engine, prompts_of(prompt), sampling))


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 7}, {"top_p": 0.9, "top_k": 20, "temperature": 2.0}])
def test_cut_sampling_draws_the_kept_set_in_proportion(make_engine, plain_folder, cut):
    engine = make_engine(plain_folder, concurrent=4096)
    skip_refused(engine, SamplingParams(**cut))
    prompt = random_prompts(1)[0]
    scores = reference_logits(plain_folder, prompt, [5])[0] / cut.get("temperature", 1.0)
    order = scores.argsort(descending=True)[: cut.get("top_k", len(scores))]
    # SGLang's top-p is of the whole distribution, that of the others of what top-k left
    probabilities = scores.softmax(-1)[order] if isinstance(engine, SGLangEngine) else scores[order].softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    order = order[before < cut.get("top_p", 1.0)]
    drawn = first_tokens(engine, prompt, **cut)
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
    engine, prompts = make_engine(plain_folder), prompts_of(*random_prompts(3))
    if isinstance(engine, ServerEngine) and not engine.seeded:
        pytest.skip("it ignores seeds here")

    def draw(**changes):
        shared = {"completions_per_prompt": 4, "max_completion_tokens": 20, "seed": 1, "step": 1}
        return tokens(generate(engine, prompts, SamplingParams(**(shared | changes))))

    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = draw()
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's random state is untouched
    torch.manual_seed(1)
    assert draw() == first
    assert draw(seed=2) != first
    assert draw(step=2) != first


def test_completions_do_not_depend_on_company(make_engine, folder):
    prompts, ids = random_prompts(5), list("abcde")
    sampling = SamplingParams(completions_per_prompt=3, max_completion_tokens=40, seed=4)
    engine = make_engine(folder, concurrent=64)
    if isinstance(engine, ServerEngine) and not engine.seeded:
        pytest.skip("it ignores seeds here")
    together = tokens(generate(engine, prompts_of(*prompts, ids=ids), sampling))
    backwards = generate(make_engine(folder, concurrent=64), prompts_of(*prompts[::-1], ids=ids[::-1]), sampling)
    assert [row for start in (12, 9, 6, 3, 0) for row in tokens(backwards)[start : start + 3]] == together
    for concurrent in (2, 7):  # fewer rows at once than completions, even than a group
        few = generate(make_engine(folder, concurrent=concurrent), prompts_of(*prompts, ids=ids), sampling)
        assert tokens(few) == together
    alone = generate(make_engine(folder), prompts_of(prompts[3], ids=[ids[3]]), sampling)
    assert tokens(alone) == together[9:12]


def test_very_long_beside_very_short(make_engine, plain_folder):
    prompts = prompts_of([7], [8] * 380, [9, 10])
    sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=132, ignore_eos=True)
    rollouts = generate(make_engine(plain_folder), prompts, sampling)
    assert largest_logprob_error(plain_folder, rollouts, 1.0) < 1e-5


def test_an_engine_is_reused_with_other_sizes(make_engine, plain_folder):
    engine = make_engine(plain_folder, concurrent=8)
    for count, per_prompt, length in ((2, 2, 8), (5, 4, 70), (1, 1, 3)):
        sampling = SamplingParams(completions_per_prompt=per_prompt, max_completion_tokens=length)
        rollouts = generate(engine, prompts_of(*random_prompts(count)), sampling)
        assert largest_logprob_error(plain_folder, rollouts, 1.0) < 1e-5


def test_bad_prompts_and_settings_are_refused(make_engine, plain_folder):
    engine = make_engine(plain_folder)
    with pytest.raises(ValueError, match=r"'p1/0'.* has no tokens"):
        generate(engine, prompts_of([5], []), SamplingParams())
    with pytest.raises(ValueError, match=r"'p0/0'.*context of 512"):
        generate(engine, prompts_of([5] * 300), SamplingParams(max_completion_tokens=256))
    with pytest.raises(ValueError, match="vocabulary of 102"):
        generate(engine, prompts_of([5]), SamplingParams(stop_token_ids=(102,)))
    with pytest.raises(ValueError, match="stop string"):
        generate(engine, prompts_of([5]), SamplingParams(stop=("",)))
    request = requests_of(prompts_of([5])[0], SamplingParams())[0]
    engine.submit([request])
    with pytest.raises(ValueError, match="already exists"):
        engine.submit([request])
    engine.abort()
    assert engine.poll() == []  # nothing of what was refused has stayed


class Trainer:
    """Gives the weights of a transformers model, as a trainer does."""

    def __init__(self, model, adapters=None):
        self.state, self.adapters = dict(model.state_dict()), adapters or {}

    def weight_update(self, version, adapters_alone=False):
        tensors = () if adapters_alone else self.state.items()
        return WeightUpdate(version=version, tensors=tensors, adapters=self.adapters)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def changed_folder(folder, tmp_path):
    model = load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_new_weights_are_used(make_engine, folder, changed_folder):
    changed = load(changed_folder)
    engine, prompts = make_engine(folder), prompts_of(*random_prompts(3))
    sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=20)
    old = generate(engine, prompts, sampling)
    assert {t.segments[1].policy_version for t in old} == {0}
    InProcessTransfer(Trainer(changed), engine)(version=4)
    for tensor in changed.state_dict().values():
        tensor.zero_()  # the engine has its own copy
    new = generate(engine, prompts, sampling)
    assert {t.segments[1].policy_version for t in new} == {4} and engine.version == 4
    assert largest_logprob_error(changed_folder, new, 1.0) < 1e-5
    assert [logprobs_of(t) for t in new] != [logprobs_of(t) for t in old]


def test_bad_weights_are_refused_and_change_nothing(make_engine, folder):
    engine, prompts = make_engine(folder), prompts_of(*random_prompts(3))
    sampling = SamplingParams(max_completion_tokens=20)
    before = generate(engine, prompts, sampling)
    trainer = Trainer(load(folder))
    good = {name: tensor * 2 for name, tensor in trainer.state.items() if name in engine.weight_shapes()}
    layer = "model.layers.0.mlp.up_proj.weight"
    adapter = Adapter(a=torch.ones(2, 7), b=torch.ones(64, 2), scale=1.0)
    refused = [
        (
            {name: tensor for name, tensor in good.items() if name != "model.norm.weight"},
            {},
            r"norm\.weight is missing",
        ),
        (good | {"model.extra": torch.zeros(1)}, {}, r"model\.extra is unexpected"),
        (good | {layer: torch.zeros(3, 3)}, {}, r"mlp\.up_proj\.weight has shape \(3, 3\), not"),
        (good, {layer: adapter}, r"adapter of .*up_proj\.weight has shapes \(2, 7\)"),
        (good, {"model.other": adapter}, r"adapter of model\.other.*no such weight"),
        ({}, {}, "is missing"),
    ]
    for trainer.state, trainer.adapters, message in refused:
        with pytest.raises(ValueError, match=message):
            InProcessTransfer(trainer, engine)(version=1)
    after = generate(engine, prompts, sampling)
    assert engine.version == 0
    check_same(engine, before, after)


def random_adapters(shapes, scale=0.5):
    generator = torch.Generator().manual_seed(3)
    return {
        name: Adapter(
            a=torch.randn(4, shape[1], generator=generator) * 0.1,
            b=torch.randn(shape[0], 4, generator=generator) * 0.1,
            scale=scale,
        )
        for name, shape in shapes.items()
        if "proj" in name and len(shape) == 2 and "k_proj" not in name  # fused parts with and without one
    }


def merge(folder, adapters, target):
    model = load(folder)
    with torch.no_grad():
        for name, adapter in adapters.items():
            model.get_parameter(name).add_(adapter.b @ adapter.a * adapter.scale)
    model.save_pretrained(target)
    return target


def with_adapters(engine):
    if not getattr(engine, "supports_lora", True):  # replicas have those of their engine
        pytest.skip("the engine takes no adapters (supports_lora)")
    if isinstance(engine, SGLangEngine) and not engine.options.lora_rank:
        pytest.skip("SGLang's kernels for adapters (--enable-lora) are for GPUs alone; the server here has none")
    return engine


def test_adapters_are_added_and_replaced(make_engine, folder, tmp_path):
    engine, prompts = with_adapters(make_engine(folder)), prompts_of(*random_prompts(3))
    sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=20)
    trainer = Trainer(load(folder), random_adapters(engine.weight_shapes()))
    transfer = InProcessTransfer(trainer, engine)
    for version, scale in ((1, 0.5), (2, -1.0)):
        trainer.adapters = random_adapters(engine.weight_shapes(), scale)
        transfer(version)
        trainer.state = {}  # the base is sent once
        merged = merge(folder, trainer.adapters, tmp_path / str(version))
        assert largest_logprob_error(merged, generate(engine, prompts, sampling), 1.0) < 1e-5
    engine.update_weights(WeightUpdate(version=3, adapters={}))
    assert largest_logprob_error(folder, generate(engine, prompts, sampling), 1.0) < 1e-5


def all_outputs(engine):
    outputs = {}
    while finished := engine.poll():
        outputs |= {output.request_id: output for output in finished}
    return outputs


def output_tokens(output):
    return [token for segment in output.segments for token in segment.token_ids]


def test_abort_gives_what_there_is(make_engine, plain_folder):
    engine = make_engine(plain_folder, concurrent=4)
    short = requests_of(prompts_of([5, 6])[0], SamplingParams(completions_per_prompt=2, max_completion_tokens=3))
    long = SamplingParams(completions_per_prompt=6, max_completion_tokens=200, ignore_eos=True)
    rest = requests_of(prompts_of([7, 8, 9], ids=["q"])[0], long)
    engine.submit([*short, *rest])
    first = engine.poll()
    computes_alone = isinstance(engine, COMPUTE_ALONE)
    assert computes_alone or {output.request_id for output in first} <= {"p0/0", "p0/1"}
    aborted = engine.abort(["q/0", "q/5", "unknown"])
    assert sorted(output.request_id for output in aborted) == ["q/0", "q/5"]
    assert computes_alone or {output.finish_reason for output in aborted} == {"abort"}
    others = all_outputs(engine)
    assert {output.request_id for output in first} | others.keys() == {"p0/0", "p0/1", *(f"q/{i}" for i in range(1, 5))}
    assert {len(output_tokens(others[f"q/{index}"])) for index in range(1, 5)} == {200}
    whole = tokens(generate(engine, prompts_of([7, 8, 9], ids=["q"]), long))
    for output in aborted:
        drawn = output_tokens(output)
        assert output.text == tokenizer_of(str(plain_folder)).decode(drawn)
        if engine.seeded:
            assert (computes_alone or len(drawn) < 200) and tuple(drawn) == whole[int(output.request_id[-1])][
                : len(drawn)
            ]
    if engine.seeded and not computes_alone:  # another process may not have begun with it
        assert aborted[0].segments
    assert engine.abort() == [] and engine.poll() == []


def test_pause_and_resume_change_nothing(make_engine, plain_folder):
    engine = make_engine(plain_folder, concurrent=5)
    prompts, sampling = prompts_of(*random_prompts(3)), SamplingParams(completions_per_prompt=3, seed=2)
    if isinstance(engine, ServerEngine) and not engine.seeded:
        pytest.skip("it ignores seeds here")
    expected = {t.trajectory_id: response(t) for t in generate(engine, prompts, sampling)}
    engine.submit([request for prompt in prompts for request in requests_of(prompt, sampling)])
    outputs = {output.request_id: output for output in engine.poll()}
    engine.pause()
    assert engine.poll() == [] and engine.poll() == []
    engine.resume()
    outputs |= all_outputs(engine)
    assert {name: tuple(output_tokens(output)) for name, output in outputs.items()} == expected


def test_a_poll_may_end_before_a_completion_does(make_seeded, plain_folder):
    engine = make_seeded(plain_folder, concurrent=5)
    prompts = prompts_of(*random_prompts(2))
    sampling = SamplingParams(completions_per_prompt=4, max_completion_tokens=150, ignore_eos=True, seed=2)
    expected = {t.trajectory_id: response(t) for t in generate(engine, prompts, sampling)}
    engine.submit([request for prompt in prompts for request in requests_of(prompt, sampling)])
    polls = []
    while sum(map(len, polls)) < len(expected):
        polls.append(engine.poll(0.0))
    assert isinstance(engine, COMPUTE_ALONE) or not polls[0], "150 tokens take longer"
    tokens = {output.request_id: tuple(output_tokens(output)) for outputs in polls for output in outputs}
    assert tokens == expected and engine.poll(0.0) == []


def test_sleep_and_wake(make_engine, plain_folder):
    engine, prompts = make_engine(plain_folder), prompts_of(*random_prompts(3))
    sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=20)
    before = generate(engine, prompts, sampling)
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        generate(engine, prompts, sampling)
    engine.wake()
    check_same(engine, before, generate(engine, prompts, sampling))
    engine.submit(requests_of(prompts[0], sampling))
    with pytest.raises(RuntimeError, match="has 2 unfinished"):
        engine.sleep()
    engine.abort()


def test_requests_come_in_while_others_run(make_seeded, plain_folder):
    engine = make_seeded(plain_folder, concurrent=6)
    first, second, third = prompts_of(*random_prompts(3))
    sampling = SamplingParams(completions_per_prompt=4, max_completion_tokens=60, seed=3)
    cut = SamplingParams(max_completion_tokens=30, temperature=0.5, top_k=20, logprobs_over="kept", seed=3)
    other, short = replace(cut, completions_per_prompt=4), replace(cut, max_completion_tokens=2)
    expected = {t.trajectory_id: response(t) for t in generate(engine, [first, second], sampling)}
    expected |= {t.trajectory_id: response(t) for t in generate(engine, [third], other)}
    engine.submit(requests_of(first, sampling)[:3])
    engine.submit(requests_of(replace(first, prompt_id="short"), short))
    outputs = {}
    while "short/0" not in outputs:
        outputs |= {output.request_id: output for output in engine.poll()}
    assert isinstance(engine, COMPUTE_ALONE) or len(outputs) <= 3
    del outputs["short/0"]
    engine.submit([*requests_of(third, other), *requests_of(first, sampling)[3:]])  # other settings in the same batch
    outputs |= {output.request_id: output for output in engine.poll()}
    engine.submit(requests_of(second, sampling)[::-1])
    outputs |= all_outputs(engine)
    assert {name: tuple(output_tokens(output)) for name, output in outputs.items()} == expected


def test_new_weights_in_the_middle_of_completions(make_engine, folder, changed_folder):
    """Each token has the version that drew it, and the log-prob of that version's policy."""
    engine = make_engine(folder, concurrent=5)
    prompts = prompts_of(*random_prompts(3))
    sampling = SamplingParams(completions_per_prompt=4, max_completion_tokens=60, seed=1)
    long = replace(sampling, max_completion_tokens=90, ignore_eos=True)
    engine.submit([request for prompt in prompts[:2] for request in requests_of(prompt, sampling)])
    engine.submit(requests_of(prompts[2], long))
    outputs, folders = [], [folder, changed_folder, folder]
    for version in (1, 2):
        outputs += engine.poll()
        InProcessTransfer(Trainer(load(folders[version])), engine)(version)
    outputs += all_outputs(engine).values()
    assert {output.request_id for output in outputs} == {f"p{i}/{j}" for i in range(3) for j in range(4)}
    versions = [segment.policy_version for output in outputs for segment in output.segments]
    computes_alone = isinstance(engine, COMPUTE_ALONE)
    assert set(versions) == {0, 1, 2} or (computes_alone and set(versions) <= {0, 1, 2})
    if engine.seeded and not computes_alone:
        assert max(len(output.segments) for output in outputs) >= 2
    starts = {prompt.prompt_id: prompt.token_ids for prompt in prompts}
    for output in outputs:
        drawn, begin = output_tokens(output), 0
        assert [segment.policy_version for segment in output.segments] == sorted(
            {segment.policy_version for segment in output.segments}
        )
        for segment in output.segments:
            logits = reference_logits(folders[segment.policy_version], starts[output.request_id[:2]], drawn)
            logits = logits[begin : begin + len(segment.token_ids)].log_softmax(-1)
            expected = logits.gather(-1, torch.tensor(segment.token_ids)[:, None])[:, 0]
            assert (expected - torch.tensor(segment.logprobs)).abs().max() < 1e-5 * max(1, expected.abs().max())
            begin += len(segment.token_ids)


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.8}, {"temperature": 0}])
def test_candidates_are_what_each_token_was_drawn_from(make_engine, plain_folder, cut):
    engine, prompts = make_engine(plain_folder, concurrent=5), prompts_of(*random_prompts(3))
    sampling = SamplingParams(completions_per_prompt=3, max_completion_tokens=30, logprobs_over="kept", **cut)
    skip_refused(engine, sampling)
    for trajectory in generate(engine, prompts, sampling):
        (segment,) = trajectory.segments[1:]
        scores = reference_logits(plain_folder, trajectory.segments[0].token_ids, segment.token_ids)
        candidates = segment.candidates
        assert candidates.ids.dtype == candidates.counts.dtype == torch.int32
        assert candidates.ids.untyped_storage().nbytes() == 4 * int(candidates.counts.sum())
        by_token = candidates.ids.split(candidates.counts.tolist())
        for row, ids, token, logprob in zip(scores, by_token, segment.token_ids, segment.logprobs, strict=True):
            order = row.argsort(descending=True)
            probabilities = row[order].softmax(-1)
            count = {"top_k": 5, "temperature": 1}.get(next(iter(cut))) or int(
                (probabilities.cumsum(-1) - probabilities < 0.8).sum()
            )
            assert len(set(ids.tolist())) == len(ids) == count
            assert (row[ids] - row[order[:count]]).abs().max() < 1e-5  # the order of two that are as likely may differ
            inside = row[ids.long()].log_softmax(-1)
            assert abs(float(inside[ids.tolist().index(token)]) - logprob) < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_have_diverged_are_named(make_engine, plain_folder, temperature):
    engine, sampling = make_engine(plain_folder), SamplingParams(max_completion_tokens=4, temperature=temperature)
    for number in ("nan", "inf"):
        state = AutoModelForCausalLM.from_pretrained(plain_folder, dtype=torch.float32).state_dict()
        state["model.norm.weight"][0] = float(number)
        tensors = [(name, tensor) for name, tensor in state.items() if name in engine.weight_shapes()]
        engine.update_weights(WeightUpdate(version=1, tensors=tensors))
        with pytest.raises(ValueError, match="diverged"):
            generate(engine, prompts_of((5, 6)), sampling)


def readable(engine):
    if all(held.value is None for held in engine.weight_hashes()):
        pytest.skip("it gives no weights back, and says so when it takes some")
    return engine


def test_hashes_are_of_what_it_computes_with(make_engine, folder, changed_folder):
    """Read back by name, so they are the same in every engine, and other ones after other weights."""
    engine, trainer = readable(make_engine(folder)), Trainer(load(folder))
    InProcessTransfer(trainer, engine)(version=1)
    before = engine.weight_hashes()
    assert {held.name for held in before} == engine.weight_shapes().keys()
    expected = {name: tensor_hash(trainer.state[name], torch.float32) for name in engine.weight_shapes()}
    assert all(held.value == expected[held.name] and held.dtype == torch.float32 for held in before)
    InProcessTransfer(Trainer(load(changed_folder)), engine)(version=2)
    assert not {held.value for held in before} & {held.value for held in engine.weight_hashes()}


@pytest.mark.parametrize("what", ["whole weights", "adapters alone"])
def test_fifty_transfers_in_a_row_arrive(make_engine, plain_folder, what):
    """With other weights each time; an update that leaves the engine with other weights than were sent raises."""
    engine = readable(make_engine(plain_folder))
    trainer = Trainer(load(plain_folder))
    if what == "adapters alone":
        trainer.adapters = random_adapters(with_adapters(engine).weight_shapes())
    transfer, seen = InProcessTransfer(trainer, engine), set()
    for version in range(1, 51):
        changing = [adapter.b for adapter in trainer.adapters.values()] or trainer.state.values()
        for tensor in changing:
            tensor.mul_(1.001)
        transfer(version)
        held = engine.weight_hashes()
        if trainer.adapters and any(".lora_" in each.name and each.value is None for each in held):
            pytest.skip("it gives no adapters back, and says so when it takes some")
        seen.add(frozenset((each.name, each.value) for each in held))
    assert len(seen) == 50


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
@pytest.mark.parametrize("change", ["bit", "rows"])
def test_other_weights_than_the_trainers_are_found(make_engine, folder, name, change):
    """One flipped bit, or two swapped rows, of what the engine holds."""
    engine, sent = readable(make_engine(folder)), load(folder).state_dict()
    held = {key: sent[key].clone() for key in engine.weight_shapes()}
    if change == "bit":
        held[name].view(torch.int32).view(-1)[5] ^= 1
    else:
        held[name][[1, 3]] = held[name][[3, 1]] if held[name].dim() == 2 else held[name][[3, 1]] * torch.tensor([1, 2])
    engine.update_weights(WeightUpdate(version=1, tensors=held.items()))
    hashes = engine.weight_hashes()
    wanted = ((key, sent[key]) for key in engine.weight_shapes())
    with pytest.raises(WeightMismatch, match=f"version 1: {name} differs"):
        compare(hashes, expected_hashes(wanted, dtypes_of(hashes)), version=1)


def test_other_adapters_than_the_trainers_are_found(make_engine, folder):
    engine = with_adapters(readable(make_engine(folder)))
    trainer = Trainer(load(folder), random_adapters(engine.weight_shapes()))
    InProcessTransfer(trainer, engine)(version=1)
    if any(".lora_" in held.name and held.value is None for held in engine.weight_hashes()):
        pytest.skip("it gives no adapters back, and says so when it takes some")
    base = [(name, trainer.state[name]) for name in engine.weight_shapes()]
    sent = WeightUpdate(1, base, dict(trainer.adapters))
    name = "model.layers.0.mlp.down_proj.weight"
    other = replace(trainer.adapters[name], scale=0.25)
    engine.update_weights(WeightUpdate(2, (), trainer.adapters | {name: other}))
    held = engine.weight_hashes()
    with pytest.raises(WeightMismatch, match=rf": {name}.lora_B differs$"):
        compare(held, expected_hashes(sent.parts(), dtypes_of(held)), version=2)
    del trainer.adapters[name]
    engine.update_weights(WeightUpdate(3, (), trainer.adapters))
    held = engine.weight_hashes()
    with pytest.raises(WeightMismatch, match=rf": {name}.lora_A is missing, {name}.lora_B is missing$"):
        compare(held, expected_hashes(sent.parts(), dtypes_of(held)), version=3)
