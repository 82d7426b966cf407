"""The divergence in chunks against the plain one: values, gradients, and what is kept for the backward pass."""

import pytest
import torch

from atomrl.atoms.auxiliary_losses import fused_generalised_jsd, generalised_jsd


def make(tokens, vocabulary, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, 3), (vocabulary, 3), (tokens, 5), (vocabulary, 5)
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2], made[3]


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_value_and_gradient_are_those_of_whole_logits(beta, chunk):
    hidden, head, *teacher = made = make(9, 31, torch.float32)
    weights = torch.linspace(-1, 1, 9)
    plain = generalised_jsd(hidden @ head.T, teacher[0] @ teacher[1].T, beta, 0.7)
    expected = torch.autograd.grad((weights * plain).sum(), (hidden, head))
    actual = fused_generalised_jsd(*made, beta, 0.7, chunk)
    torch.testing.assert_close(actual, plain, atol=1e-6, rtol=1e-5)
    for mine, theirs in zip(torch.autograd.grad((weights * actual).sum(), (hidden, head)), expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_gradients_by_finite_differences():
    hidden, head, *teacher = make(6, 7, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: fused_generalised_jsd(h, w, *teacher, 0.3, 0.7, 4), (hidden, head))


def test_without_tokens_there_is_a_gradient_of_zeros():
    hidden, head, *teacher = make(0, 7, torch.float32)
    fused_generalised_jsd(hidden, head, *teacher).sum().backward()
    assert hidden.grad.shape == (0, 3) and not head.grad.any()


def test_nothing_of_the_vocabulary_is_kept_of_each_token():
    tokens, vocabulary = 40, 300
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    hidden, head, *teacher = make(tokens, vocabulary, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        generalised_jsd(hidden @ head.T, teacher[0] @ teacher[1].T)
        assert max(kept) == tokens * vocabulary, "which this would see"
        kept.clear()
        fused_generalised_jsd(hidden, head, *teacher, chunk_tokens=8)
    assert max(kept) == vocabulary * 5, "the teacher's output matrix"
