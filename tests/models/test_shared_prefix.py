"""States of a micro-batch with shared prompts, against plain rows in float64."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from atomrl.atoms.logprobs import row_logprobs
from atomrl.models import attention, gpt
from atomrl.models import kernel_library as cpp
from atomrl.models import stream as shared_prefix
from atomrl.models.attention import Spans
from atomrl.models.gpt import GPT
from atomrl.models.kernel_switches import plain_formulas
from atomrl.models.stream import make_stream, states_before

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama-mha-untied": LlamaConfig(**(SHAPE | {"num_key_value_heads": 4})),
    "qwen2-tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3-one-key-head": Qwen3Config(**(SHAPE | {"num_key_value_heads": 1}), head_dim=8),
}


def make_model(name="qwen2-tied"):
    torch.manual_seed(0)
    model = GPT(CONFIGS[name]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
    return model


def make_rows(groups, seed=0, holes=False):
    """`groups`: (prompt length, completion lengths). Rows of groups are mixed up, padding is random tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(number, prompt, c) for number, (prompt, completions) in enumerate(groups) for c in completions]
    order = torch.randperm(len(rows), generator=generator).tolist()
    width = max(prompt + c for _, prompt, c in rows)
    prompts = [torch.randint(0, 23, (prompt,), generator=generator) for prompt, _ in groups]
    tokens = torch.randint(0, 23, (len(rows), width), generator=generator)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    lengths = torch.zeros(len(rows), dtype=torch.int64)
    for at, index in enumerate(order):
        number, prompt, c = rows[index]
        tokens[at, :prompt] = prompts[number]
        lengths[at] = prompt
        mask[at, prompt : prompt + c] = True
    if holes:
        mask &= torch.rand(mask.shape, generator=generator) < 0.5
    return tokens, mask, lengths


def results(model, tokens, mask, lengths, shared):
    model.zero_grad()
    with nullcontext() if shared else plain_formulas():  # also while a checkpointed layer is computed again
        hidden = states_before(model, tokens, mask, lengths)[0] if shared else model.forward_hidden(tokens)
        logprobs, entropy = row_logprobs(hidden, model.head_weight, tokens, mask, 0.7, with_entropy=True)
        weights = torch.linspace(-1, 1, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
        (weights * logprobs + 0.3 * weights.cos() * entropy).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return logprobs.detach(), entropy.detach(), gradients


def check(model, rows):
    expected, actual = (results(model, *rows, shared) for shared in (False, True))
    torch.testing.assert_close(actual[0], expected[0], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-10, rtol=1e-10)
    for name, gradient in expected[2].items():
        assert (actual[2][name] - gradient).norm() <= 1e-10 * gradient.norm() + 1e-14, name


GROUPS = {
    "even": [(5, [4] * 8), (5, [4] * 8)],
    "ragged": [(5, [4, 9, 1, 7]), (3, [2, 2]), (7, [3]), (1, [6, 1, 1]), (4, [1, 1])],
    "groups of one": [(5, [4]), (3, [6])],
    "one token each": [(6, [1, 1, 1])],
}


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_plain_rows(name, groups, attention, monkeypatch):
    model = make_model(name)
    monkeypatch.setattr(shared_prefix, "LEAST_SAVING", 0.0)
    monkeypatch.setattr(gpt, "BMM_MAX_TOKENS", 512 if attention == "explicit" else 0)
    check(model, make_rows(GROUPS[groups]))


def plain_varlen(q, k, v, begin_q, begin_k, most_q, most_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """`varlen_attn` of torch 2.12 and later in plain PyTorch; of more keys than queries the last query sees the last
    key."""
    assert window_size == (-1, 0) and enable_gqa == (q.shape[1] > k.shape[1]) and begin_q.dtype == torch.int32
    parts = []
    for row in range(len(begin_q) - 1):
        own, keys = slice(begin_q[row], begin_q[row + 1]), slice(begin_k[row], begin_k[row + 1])
        a, b, c = (x.transpose(0, 1) for x in (q[own], k[keys], v[keys]))
        assert a.shape[1] <= most_q and b.shape[1] <= most_k
        seen = torch.ones(a.shape[1], b.shape[1], dtype=torch.bool).tril(b.shape[1] - a.shape[1])
        mixed = torch.nn.functional.scaled_dot_product_attention(a, b, c, seen, scale=scale, enable_gqa=enable_gqa)
        parts.append(mixed.transpose(0, 1))
    return torch.cat(parts)


def plain_varlen_of_2_11(q, k, v, begin_q, begin_k, most_q, most_k, *, return_aux=None, scale=None, window_size=None):
    """`varlen_attn` of torch 2.11: its signature, and the grouped heads that its FlashAttention takes unsaid."""
    grouped = q.shape[1] > k.shape[1]
    return plain_varlen(
        q, k, v, begin_q, begin_k, most_q, most_k, scale=scale, window_size=window_size, enable_gqa=grouped
    )


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kernel", [plain_varlen, plain_varlen_of_2_11], ids=["2.12", "2.11"])
def test_attention_of_variable_length_equals_plain_rows(name, groups, kernel, monkeypatch):
    monkeypatch.setattr(shared_prefix, "LEAST_SAVING", 0.0)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "NAMES_GROUPS", kernel is plain_varlen)
    monkeypatch.setattr(shared_prefix.Stream, "to", lambda stream, _: replace(stream, spans=Spans.of(stream.blocks)))
    check(make_model(name), make_rows(GROUPS[groups]))


@settings(max_examples=25, phases=[Phase.generate])
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=8)), min_size=1, max_size=5
    ),
    seed=st.integers(0, 10**6),
    holes=st.booleans(),
    checkpointing=st.booleans(),
)
def test_any_groups_of_rows_have_the_states_of_plain_rows(groups, seed, holes, checkpointing):
    model = make_model()
    model.gradient_checkpointing = checkpointing
    rows = make_rows(groups, seed, holes)
    if rows[1].any():
        check(model, rows)


def test_nothing_is_computed_twice_or_for_nothing():
    tokens, mask, lengths = make_rows([(5, [4] * 8), (3, [6])])
    stream = make_stream(tokens, mask, lengths)
    assert len(stream.source) == 5 + 8 * 3 + (3 + 5)
    assert len(stream.before) == 8 * 4 + 6


def test_prompts_are_shared_only_where_it_pays_and_they_are_the_same():
    tokens, mask, lengths = make_rows([(1, [60, 60])])
    assert len(make_stream(tokens, mask, lengths).source) == 2 * 60
    tokens, mask, lengths = make_rows([(5, [4, 4])])
    tokens[0, 4] = (tokens[1, 4] + 1) % 23
    assert len(make_stream(tokens, mask, lengths).source) == 2 * 8


def test_rows_without_a_wanted_token_cost_nothing():
    tokens, mask, lengths = make_rows([(5, [4, 4, 4])])
    mask[1] = False
    stream = make_stream(tokens, mask, lengths)
    assert len(stream.source) == 5 + 2 * 3
    check(make_model(), (tokens, mask, lengths))


def test_gradients_by_finite_differences():
    tokens, mask, lengths = make_rows([(3, [2, 4]), (2, [1, 3])])
    model = make_model()
    weight = model.model.layers[0].self_attn.k_proj.weight

    def loss(values):
        with torch.no_grad():
            weight.copy_(values)
        return states_before(model, tokens, mask, lengths)[0].pow(2).sum()

    start = weight.detach().clone()
    loss(start).backward()
    direction = torch.randn_like(start)
    slope = (loss(start + 1e-6 * direction) - loss(start - 1e-6 * direction)) / 2e-6
    assert slope.item() == pytest.approx((weight.grad * direction).sum().item(), rel=1e-6)


@pytest.mark.parametrize("groups", GROUPS)
def test_cpp_equals_pytorch_in_float32(groups, monkeypatch):
    if not cpp.usable(torch.zeros(1)):
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(shared_prefix, "LEAST_SAVING", 0.0)
    rows = make_rows(GROUPS[groups])
    exact, actual = results(make_model(), *rows, shared=False), results(make_model().float(), *rows, shared=True)
    torch.testing.assert_close(actual[0].double(), exact[0], atol=1e-5, rtol=1e-5)
    for name, gradient in exact[2].items():
        assert (actual[2][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
