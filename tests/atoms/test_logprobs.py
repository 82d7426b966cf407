"""Chunked log-probs against the plain ones: values, gradients, entropy, temperature, masks."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atomrl.atoms.logprobs import (
    chunk_logit_gradient,
    chunk_logprobs,
    fused_token_logprobs,
    kept_token_logprobs,
    row_logprobs,
    token_entropy,
    token_logprobs,
)


def make(tokens=6, hidden=3, vocabulary=7, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return (
        torch.randn(tokens, hidden, dtype=dtype, requires_grad=True),
        torch.randn(vocabulary, hidden, dtype=dtype, requires_grad=True),
        torch.randint(0, vocabulary, (tokens,)),
    )


def test_plain_log_probs_by_hand():
    logits = torch.tensor([[0.0, 2.0]])
    # temperature 2 makes it [0, 1]: log p(1) = -log(1 + e^-1) = -0.3133, p = (0.2689, 0.7311)
    assert token_logprobs(logits, torch.tensor([1]), 2.0).item() == pytest.approx(-0.3132617)
    assert token_entropy(logits, 2.0).item() == pytest.approx(0.2689414 * 1.3132617 + 0.7310586 * 0.3132617, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("which", ["logprobs", "entropy", "both"])
def test_gradients_by_finite_differences(chunk, which):
    hidden, head, tokens = make()

    def compute(hidden, head):
        logprobs, entropy = fused_token_logprobs(hidden, head, tokens, 0.7, chunk, with_entropy=True)
        return {"logprobs": logprobs, "entropy": entropy, "both": (logprobs, entropy)}[which]

    assert torch.autograd.gradcheck(compute, (hidden, head))


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    chunk=st.integers(1, 10),
    temperature=st.floats(0.2, 3.0),
    seed=st.integers(0, 1000),
)
def test_fused_logprobs_and_entropy_equal_the_plain_ones(tokens, vocabulary, chunk, temperature, seed):
    hidden, head, ids = make(tokens, 4, vocabulary, seed=seed)
    logits = hidden @ head.T
    plain = (token_logprobs(logits, ids, temperature), token_entropy(logits, temperature))
    fused = fused_token_logprobs(hidden, head, ids, temperature, chunk, with_entropy=True)
    weights = torch.randn(2, tokens, dtype=torch.float64)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients = [
        torch.autograd.grad((weights[0] * a + weights[1] * b).sum(), (hidden, head)) for a, b in (fused, plain)
    ]
    torch.testing.assert_close(*gradients)


def test_bfloat16_products_have_float32_statistics_and_weight_gradient():
    hidden, head, tokens = make(64, 32, 500, torch.float32)
    exact = token_logprobs(hidden @ head.T, tokens)
    rough, _ = fused_token_logprobs(hidden.bfloat16(), head, tokens, chunk_tokens=10)
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().max() < 0.1
    gradient = torch.autograd.grad(rough.sum(), head)[0]
    expected = torch.autograd.grad(exact.sum(), head)[0]
    assert gradient.dtype == torch.float32
    assert (gradient - expected).norm() / expected.norm() < 0.01


def test_vocabulary_larger_than_a_gradient_block(monkeypatch):
    monkeypatch.setattr("atomrl.atoms.logprobs.VOCABULARY_BLOCK", 64)
    hidden, head, tokens = make(5, 8, 150, torch.float32)
    logprobs, _ = fused_token_logprobs(hidden.bfloat16(), head, tokens, chunk_tokens=2)
    plain = token_logprobs(F.linear(hidden.bfloat16(), head.bfloat16()), tokens)
    ours, theirs = (torch.autograd.grad(value.sum(), head)[0] for value in (logprobs, plain))
    assert (ours - theirs).norm() / theirs.norm() < 0.02


def test_a_second_backward_pass_gives_the_same_gradient():
    hidden, head, tokens = make()
    logprobs, _ = fused_token_logprobs(hidden, head, tokens)
    first = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(logprobs.sum(), hidden)[0], first)


def test_rows_are_indexed_by_the_token_itself():
    torch.manual_seed(0)
    hidden, head, tokens = torch.randn(2, 4, 3), torch.randn(5, 3), torch.randint(0, 5, (2, 4))
    mask = torch.tensor([[True, True, False, True], [False, False, True, False]])
    logprobs, entropy = row_logprobs(hidden, head, tokens, mask, with_entropy=True)
    for row, at in [(0, 1), (0, 3), (1, 2)]:
        distribution = F.log_softmax(head @ hidden[row, at - 1], dim=0)
        assert logprobs[row, at].item() == pytest.approx(distribution[tokens[row, at]].item(), abs=1e-6)
        assert entropy[row, at].item() == pytest.approx(-(distribution.exp() * distribution).sum().item(), abs=1e-6)
    elsewhere = torch.ones(2, 4, dtype=torch.bool)
    elsewhere[[0, 0, 1], [1, 3, 2]] = False
    assert (logprobs[elsewhere] == 0).all() and (entropy[elsewhere] == 0).all()  # position 0 has no log-prob


def test_garbage_off_the_mask_is_harmless():
    torch.manual_seed(0)
    head, tokens = torch.randn(5, 3, requires_grad=True), torch.randint(0, 5, (2, 4))
    mask = torch.tensor([[False, True, False, False], [False, False, True, True]])
    clean = torch.randn(2, 4, 3)
    dirty = clean.clone()
    dirty[0, 1:], dirty[1, 0], dirty[1, 3] = float("nan"), float("inf"), float("nan")
    gradients = []
    for hidden in (clean, dirty):
        logprobs, _ = row_logprobs(hidden, head, tokens, mask)
        gradients.append(torch.autograd.grad(logprobs.sum(), head)[0])
    torch.testing.assert_close(*gradients)


def test_nothing_masked_in_gives_zero_gradients():
    hidden, head, tokens = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True), None
    tokens = torch.zeros(2, 3, dtype=torch.long)
    logprobs, entropy = row_logprobs(hidden, head, tokens, torch.zeros(2, 3, dtype=torch.bool), with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert (logprobs == 0).all() and (hidden.grad == 0).all() and (head.grad == 0).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    hidden, head, tokens = make()
    with pytest.raises(ValueError, match="temperature"):
        fused_token_logprobs(hidden, head, tokens, temperature)


def test_logits_of_bfloat16_are_not_rounded_to_it():
    """Mean |error| against float64 of the same rounded inputs: 1.2e-2 nats with bfloat16 logits, 1e-6 without."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 256, generator=generator).bfloat16()
    head = torch.randn(1000, 256, generator=generator) * 0.3
    tokens = torch.randint(1000, (64,), generator=generator)
    exact = token_logprobs(hidden.double() @ head.bfloat16().double().T, tokens)
    rounded = token_logprobs((hidden.double() @ head.bfloat16().double().T).bfloat16(), tokens)
    assert (rounded - exact).abs().mean() > 5e-3
    kept = torch.arange(1000).repeat(64), torch.full((64,), 1000)
    for actual in (
        fused_token_logprobs(hidden, head, tokens)[0],
        fused_token_logprobs(hidden, head, tokens, chunk_tokens=16)[0],
        kept_token_logprobs(hidden, head, tokens, *kept)[0],
    ):
        assert (actual - exact).abs().max() < 1e-4


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_a_gpu_compiles_is_the_same(temperature, with_entropy):
    chance = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(size, 24, generator=chance) for size in (50, 301))
    states, tokens = hidden.clone().requires_grad_(), torch.randint(0, 301, (50,), generator=chance)
    wanted = fused_token_logprobs(states, head, tokens, temperature, 16, with_entropy)
    grads = [torch.randn(50, generator=chance) for part in wanted if part is not None]
    expected = torch.autograd.grad([part for part in wanted if part is not None], states, grads)[0]
    logprobs, log_norm, entropy = chunk_logprobs(hidden @ head.T, tokens, temperature, with_entropy)
    torch.testing.assert_close(logprobs, wanted[0].detach())
    grad_entropy = grads[1] if with_entropy else None
    if with_entropy:
        torch.testing.assert_close(entropy, wanted[1].detach(), atol=1e-4, rtol=1e-4)
    common = hidden @ head.T, tokens, log_norm, grads[0], entropy, grad_entropy
    delta = chunk_logit_gradient(*common, temperature, torch.float32)
    torch.testing.assert_close(delta @ head, expected, atol=1e-4, rtol=1e-4)
