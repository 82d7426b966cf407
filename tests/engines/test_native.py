"""NativeEngine: unsupported models, scheduling, preemption, loading and rounding of weights."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen2Config

from atomrl.config import ConfigError
from atomrl.engines.generation import generate, requests_of
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.native.step_ops import PlainOps
from atomrl.engines.requests import EngineOptions
from atomrl.models.decoder_spec import Unsupported, unsupported
from atomrl.protocols import WeightUpdate
from atomrl.types import SamplingParams
from tests.prompts import logprobs_of, prompts_of, response
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", seed=1, scale=0.2)


def load(folder, *, concurrent=64, dtype=torch.float32, use_kernel=True):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = EngineOptions(dtype, "cpu", max_concurrent_completions=concurrent)
    ops = PlainOps() if use_kernel == "pages" else None
    return NativeEngine.from_pretrained(str(folder), tokenizer, options, use_kernel=use_kernel is True, ops=ops)


PROMPTS = prompts_of(*[tuple(range(5 + index, 15 + 3 * index)) for index in range(6)])


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
def test_unsupported_models_are_refused_with_the_reason(config, reason, tmp_path):
    assert reason in unsupported(config)
    config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=f"{reason}.*hf engine"):
        NativeEngine.from_pretrained(
            str(tmp_path), None, EngineOptions(torch.float32, "cpu", max_concurrent_completions=1)
        )


def test_llama_and_qwen2_are_supported():
    assert unsupported(LlamaConfig()) is None
    assert unsupported(Qwen2Config()) is None


@pytest.mark.parametrize("use_kernel", [True, False, "pages"])
def test_a_prompt_is_run_once_for_its_group(folder, use_kernel, monkeypatch):
    engine = load(folder, concurrent=5, use_kernel=use_kernel)  # no group of 4 fits beside another
    seen, prefill = [], engine.batch.cache.prefill
    monkeypatch.setattr(
        engine.batch.cache, "prefill", lambda prompts, groups: seen.extend(prompts) or prefill(prompts, groups)
    )
    generate(engine, PROMPTS, SamplingParams(completions_per_prompt=4, max_completion_tokens=30))
    assert sorted(seen) == sorted(prompt.token_ids for prompt in PROMPTS)


@pytest.mark.parametrize("concurrent", [6, 200])
def test_only_unfinished_rows_are_computed(folder, concurrent, monkeypatch):
    engine = load(folder, concurrent=concurrent)
    sizes = []
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: sizes.append(len(hidden)) or logits(hidden))
    rollouts = generate(engine, PROMPTS, SamplingParams(completions_per_prompt=8, max_completion_tokens=60))
    lengths = [trajectory.response_tokens for trajectory in rollouts]
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
    assert generate(load(tmp_path), PROMPTS, sampling) == generate(load(folder), PROMPTS, sampling)


@pytest.mark.parametrize("use_kernel", [True, False, "pages"])
def test_bfloat16_rounds_the_weights_and_stays_near(folder, use_kernel):
    engine = load(folder, dtype=torch.bfloat16, use_kernel=use_kernel)
    rollouts = generate(engine, PROMPTS, SamplingParams(completions_per_prompt=4, max_completion_tokens=40))
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(torch.float64)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    errors = {rounded: [], exact: []}
    for trajectory in rollouts:
        ids, start = torch.tensor([trajectory.token_ids]), trajectory.prompt_tokens
        for model, distances in errors.items():
            with torch.no_grad():
                logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(-1, ids[0, start:, None])[:, 0]
            distances.append((expected - torch.tensor(logprobs_of(trajectory))).abs())
    to_rounded, to_exact = (float(torch.cat(distances).mean()) for distances in errors.values())
    assert to_rounded < 0.02
    assert to_exact > to_rounded  # the weights were rounded, and nearly all of the error is that rounding


def test_growing_completions_keep_their_keys(folder):
    """Longer than the initial cache, with head size and lengths that are no multiple of a block."""
    for use_kernel in (True, False, "pages"):
        sampling = SamplingParams(max_completion_tokens=300, ignore_eos=True, temperature=0)
        long = generate(load(folder, use_kernel=use_kernel), PROMPTS, sampling)
        short = SamplingParams(max_completion_tokens=90, ignore_eos=True, temperature=0)
        for one, other in zip(long, generate(load(folder), PROMPTS, short), strict=True):
            assert response(one)[:90] == response(other)


@pytest.mark.parametrize("use_kernel", [True, False, "pages"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_weights_that_have_diverged_are_named(folder, use_kernel, top_p):
    engine = load(folder, use_kernel=use_kernel)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    good = state["model.norm.weight"]
    sampling = SamplingParams(completions_per_prompt=2, max_completion_tokens=5, top_p=top_p)
    before = generate(engine, PROMPTS, sampling)
    engine.update_weights(WeightUpdate(version=1, tensors=[("model.norm.weight", good * float("nan"))]))
    with pytest.raises(ValueError, match="diverged"):
        generate(engine, PROMPTS, sampling)
    engine.update_weights(WeightUpdate(version=0, tensors=[("model.norm.weight", good)]))
    assert generate(engine, PROMPTS, sampling) == before  # nothing of it has stayed


@pytest.mark.parametrize("use_kernel", [True, False, "pages"])
def test_rows_that_diverged_leave_nothing_behind(tmp_path, use_kernel):
    """Also where they are aborted, so that nobody has looked at them."""
    folder = make_tiny_model(tmp_path, "qwen2", seed=1, scale=0.2, tie_word_embeddings=False)
    engine = load(folder, concurrent=8, use_kernel=use_kernel)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    good = state["model.embed_tokens.weight"]
    bad = good.index_fill(0, torch.tensor([50]), float("nan"))
    sampling = SamplingParams(completions_per_prompt=6, max_completion_tokens=40)
    before = generate(engine, PROMPTS, sampling)
    fine, poor = (
        replace(prompt, prompt_id=name) for prompt, name in zip(prompts_of((7,), (50,) * 40), "ab", strict=True)
    )
    engine.update_weights(WeightUpdate(version=1, tensors=[("model.embed_tokens.weight", bad)]))
    engine.submit(requests_of(fine, SamplingParams(max_completion_tokens=30, ignore_eos=True)))
    engine.submit(requests_of(poor, replace(sampling, completions_per_prompt=5, ignore_eos=True)))
    assert len(engine.poll()) == 1
    assert any(output.segments for output in engine.abort())
    engine.update_weights(WeightUpdate(version=0, tensors=[("model.embed_tokens.weight", good)]))
    assert generate(engine, PROMPTS, sampling) == before


def test_requests_of_a_group_have_one_prompt(folder):
    engine = load(folder)
    first, second = (requests_of(prompt, SamplingParams())[0] for prompt in prompts_of((5, 6), (5, 7)))
    with pytest.raises(ValueError, match=r"'p0'.*another prompt"):
        engine.submit([first, replace(second, group_id="p0")])
    assert not engine.held


CUTS = [{}, {"top_k": 9, "logprobs_over": "kept"}, {"min_completion_tokens": 7}, {"stop": ("a", "}*")}]


@pytest.mark.parametrize("use_kernel", [True, False, "pages"])
@pytest.mark.parametrize("cut", CUTS)
def test_looking_for_the_end_less_often_changes_nothing(folder, use_kernel, cut):
    sampling = SamplingParams(completions_per_prompt=4, max_completion_tokens=45, **cut)
    often, seldom = (load(folder, concurrent=10, use_kernel=use_kernel) for _ in range(2))
    seldom.batch.check_every = 8
    for one, other in zip(generate(often, PROMPTS, sampling), generate(seldom, PROMPTS, sampling), strict=True):
        assert (one.token_ids, one.finish_reason, one.text) == (other.token_ids, other.finish_reason, other.text)
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-5)
        for mine, theirs in zip(one.segments, other.segments, strict=True):
            if mine.candidates is not None:
                assert torch.equal(mine.candidates.counts, theirs.candidates.counts)
                assert torch.equal(mine.candidates.ids, theirs.candidates.ids)


@pytest.mark.parametrize("use_kernel", [False, "pages"])
@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.7)])
def test_the_host_does_not_wait_for_each_token(folder, monkeypatch, temperatures, use_kernel):
    """On a GPU, reading a value synchronizes, and so does a copy from the host."""
    engine = load(folder, use_kernel=use_kernel)
    engine.batch.check_every = 8
    requests = [
        replace(request, request_id=f"{request.request_id} {temperature}")
        for temperature in temperatures
        for prompt in PROMPTS
        for request in requests_of(
            prompt,
            SamplingParams(
                completions_per_prompt=4, max_completion_tokens=48, ignore_eos=True, temperature=temperature
            ),
        )
    ]
    looks, copies, tensor = [], [], torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **named: copies.append(1) or tensor(*args, **named))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "unique"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, plain=plain, name=name: looks.append(name) or plain(*args)
        )
    engine.submit(requests)
    assert len(engine.poll()) == len(requests)
    # Per look for the end a nonzero and its tolist; at the end the lengths, tokens and log-probs.
    assert len(looks) <= 2 * (1 + 48 // 8) + 2 + 3 * len(requests)
    per_token = len([name for name in looks if name not in ("tolist", "cpu")]) / 48
    assert per_token <= 0.2  # 6 before
    assert len(copies) < 48


def drained(engine):
    """Poll to the end: outputs by request, and the number of errors."""
    outputs, failures = {}, 0
    for _ in range(100):
        try:
            for output in engine.poll() if engine.held else ():
                (segment,) = output.segments
                ids = segment.candidates and segment.candidates.ids.tolist()
                outputs[output.request_id] = segment.token_ids, ids, segment.logprobs
        except InterruptedError:
            failures += 1
            assert len(engine.batch.rows) + len(engine.waiting) == len(engine.held)
    return outputs, failures


@pytest.mark.parametrize("logprobs_over", ["vocabulary", "kept"])
@pytest.mark.parametrize(
    "use_kernel,fault",
    [(how, fault) for how in (True, "pages") for fault in ("prefill", "restore", "reserve", "logits")]
    + [("pages", "allocate")],
)
def test_an_error_while_completions_enter_loses_none(folder, monkeypatch, fault, logprobs_over, use_kernel):
    """They are requeued, with those that were in the batch."""
    engine = load(folder, concurrent=5, use_kernel=use_kernel)
    options = {"completions_per_prompt": 4, "ignore_eos": True, "top_k": 5, "logprobs_over": logprobs_over}
    samplings = [SamplingParams(max_completion_tokens=most, **options) for most in (6, 15)]
    pairs = zip(PROMPTS, samplings * len(PROMPTS), strict=False)
    requests = sorted((one for pair in pairs for one in requests_of(*pair)), key=lambda one: one.request_id[::-1])
    engine.submit(requests)
    undisturbed, _ = drained(engine)
    engine.submit(requests)
    assert 0 < len(engine.poll()) < 5
    if fault == "restore":
        engine.batch.requeue()
    owner = engine.model if fault == "logits" else engine.batch.cache
    before, calls = getattr(owner, fault), []

    def fails_once(*args):
        calls.append(fault)
        if len(calls) == 1:
            raise InterruptedError
        return before(*args)

    monkeypatch.setattr(owner, fault, fails_once)
    outputs, failures = drained(engine)
    assert failures == 1 and len(calls) > 1 and len(outputs) > 15 and not engine.held
    for name, (*drawn, logprobs) in outputs.items():
        *same, expected = undisturbed[name]
        assert drawn == same and logprobs == pytest.approx(expected, abs=1e-5)


SHORT = [
    {"ignore_eos": True},
    {"top_k": 5, "logprobs_over": "kept"},
    {"stop": ("a", "}*"), "min_completion_tokens": 3},
]


def finished(engine, requests):
    """Outputs by request: tokens, candidates and reason; and log-probs."""
    engine.submit(requests)
    outputs = {}
    while engine.held:
        for output in engine.poll():
            (segment,) = output.segments
            ids = segment.candidates and segment.candidates.ids.tolist()
            outputs[output.request_id] = (segment.token_ids, ids, output.finish_reason), segment.logprobs
    return outputs


@pytest.mark.parametrize("options", SHORT)
@pytest.mark.parametrize("use_kernel, fault", [
    *((how, fault) for how in (True, False) for fault in ("reserve", "enlarge", "prefill", "decode", "logits")),
    *(("pages", fault) for fault in ("grow", "allocate", "prefill", "attend", "logits", "capture", "free_except")),
])  # fmt: skip
def test_memory_that_runs_out_halves_the_rows_and_changes_no_completion(
    folder, monkeypatch, caplog, use_kernel, fault, options
):
    """In the cache, prefill, a step, its capture or sampling, and between two checks."""
    alike = {"completions_per_prompt": 4, "max_completion_tokens": 40, **options}
    engine, other = (load(folder, concurrent=8, use_kernel=use_kernel) for _ in range(2))
    engine.batch.check_every = other.batch.check_every = 8
    requests = [request for prompt in PROMPTS[:2] for request in requests_of(prompt, SamplingParams(**alike))]
    expected = finished(other, requests)
    if fault == "capture":
        if not options.get("ignore_eos"):
            pytest.skip("PyTorch knows no padded rows, so all must end at once")
        engine.batch.graphs.capture = lambda run: run
    batch = engine.batch
    owners = [engine.model, batch.cache, *((batch.step.ops, batch.graphs) if use_kernel == "pages" else ())]
    (owner,) = [each for each in owners if hasattr(each, fault)]
    before, calls = getattr(owner, fault), []

    def fails(*args):
        calls.append(fault)
        if len(calls) in (1, 6):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return before(*args)

    monkeypatch.setattr(owner, fault, fails)
    outputs = finished(engine, requests)
    assert outputs.keys() == expected.keys() and len(calls) > 1
    for name, (drawn, logprobs) in outputs.items():
        assert drawn == expected[name][0]
        assert logprobs == pytest.approx(expected[name][1], abs=1e-5)
    failures = 1 + (len(calls) >= 6)
    messages = [record.message for record in caplog.records if "out of memory" in record.message]
    assert len(messages) == failures and "rollout.max_concurrent_completions=4" in messages[0]
    assert engine.batch.max_rows == 8 >> failures
    assert not engine.batch.groups and not engine.batch.rows and not engine.waiting


def test_a_single_completion_that_does_not_fit_is_an_error_that_names_the_keys(folder, monkeypatch):
    engine = load(folder, concurrent=8, use_kernel="pages")
    monkeypatch.setattr(engine.batch.cache, "prefill", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    requests = requests_of(PROMPTS[0], SamplingParams(completions_per_prompt=4))
    engine.submit(requests)
    with pytest.raises(ConfigError, match=r"rollout\.max_completion_tokens"):
        engine.poll()
    assert len(engine.waiting) == len(engine.held) == 4
    assert len(engine.abort()) == 4 and not engine.batch.groups


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_a_sleeping_engine_frees_gpu_memory(folder, kind, monkeypatch):
    """PyTorch would keep it for this process."""
    options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=4)
    engine, freed = kind.from_pretrained(str(folder), AutoTokenizer.from_pretrained(folder), options), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    engine.sleep()
    engine.wake()
    assert not freed
    monkeypatch.setattr(type(engine.model), "device", torch.device("cuda"), raising=False)
    monkeypatch.setitem(vars(engine.model), "device", torch.device("cuda"))
    engine.sleep()
    assert freed == [True]
