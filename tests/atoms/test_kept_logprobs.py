"""Log-probs over the tokens that top-p and top-k kept, as ragged lists, against padded and dense ones."""

import pytest
import torch
import torch.nn.functional as F

from atomrl.atoms.logprobs import kept_token_logprobs, row_logprobs

COUNTS = torch.tensor([5, 1, 3, 23, 1, 2, 9, 1, 4])


def ragged(seed=1):
    """[9] tokens of a vocabulary of 23, each drawn from its own number of ids."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(9, 6, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(23, 6, generator=generator, dtype=torch.float64).requires_grad_()
    lists = [torch.randperm(23, generator=generator)[:count] for count in COUNTS.tolist()]
    tokens = torch.stack([ids[torch.randint(len(ids), (), generator=generator)] for ids in lists])
    return hidden, head, tokens, lists


def padded_reference(hidden, head, lists, tokens, temperature):
    """Logits [N, K] of the ids padded to the longest list, the padding at -inf."""
    ids = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=-1)
    logits = F.linear(hidden, head).gather(1, ids.clamp(min=0)) / temperature
    logs = logits.masked_fill(ids < 0, -torch.inf).log_softmax(1)
    entropy = -(logs.exp() * logs.masked_fill(ids < 0, 0.0)).sum(1)
    return logs.masked_fill(ids != tokens[:, None], 0.0).sum(1), entropy


def masked_vocabulary(hidden, head, lists, tokens, temperature):
    """The whole vocabulary, what was not kept at -inf."""
    out = torch.ones(len(lists), 23, dtype=torch.bool)
    for row, ids in enumerate(lists):
        out[row, ids] = False
    logs = (F.linear(hidden, head) / temperature).masked_fill(out, -torch.inf).log_softmax(1)
    return logs.gather(1, tokens[:, None])[:, 0], -(logs.exp() * logs.masked_fill(out, 0.0)).sum(1)


@pytest.mark.parametrize("reference", [padded_reference, masked_vocabulary])
@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_values_and_gradients(reference, chunk, with_entropy):
    hidden, head, tokens, lists = ragged()
    actual, own = kept_token_logprobs(hidden, head, tokens, torch.cat(lists).int(), COUNTS, 0.7, chunk, with_entropy)
    wanted, entropy = reference(hidden, head, lists, tokens, 0.7)
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.randn(2, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    theirs, ours = (wanted * weights[0]).sum(), (actual * weights[0]).sum()
    if with_entropy:
        torch.testing.assert_close(own, entropy, rtol=1e-12, atol=1e-12)
        theirs, ours = theirs + (entropy * weights[1]).sum(), ours + (own * weights[1]).sum()
    gradients = (torch.autograd.grad(total, (hidden, head)) for total in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    assert (actual[COUNTS == 1] == 0).all()


def test_a_token_that_was_not_kept_cannot_have_been_drawn():
    hidden, head, tokens, lists = ragged()
    tokens[2] = next(v for v in range(23) if v not in lists[2])
    actual, _ = kept_token_logprobs(hidden, head, tokens, torch.cat(lists), COUNTS)
    assert actual[2] == -torch.inf and actual.isfinite().sum() == 8
    actual[torch.arange(9) != 2].sum().backward()
    assert hidden.grad.isfinite().all() and head.grad.isfinite().all()


def test_a_token_without_candidates_and_no_tokens():
    hidden, head = torch.randn(2, 6, requires_grad=True), torch.randn(23, 6)
    actual, _ = kept_token_logprobs(hidden, head, torch.tensor([4, 4]), torch.tensor([4, 9]), torch.tensor([2, 0]))
    assert actual[1] == -torch.inf and actual[0].isfinite()
    actual[0].backward()
    assert hidden.grad.isfinite().all()
    none = torch.zeros(0, dtype=torch.long)
    logprobs, entropy = kept_token_logprobs(hidden[:0], head, none, none, none, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    with pytest.raises(ValueError, match="candidate_counts add up"):
        kept_token_logprobs(hidden, head, torch.tensor([4, 4]), torch.tensor([4, 9]), torch.tensor([2, 1]))


def test_memory_is_for_what_was_kept():
    """One token that keeps all of a large vocabulary does not widen the others."""
    tokens, vocabulary = 200, 5000
    counts = torch.ones(tokens, dtype=torch.long)
    counts[3] = vocabulary
    drawn = torch.arange(tokens)
    ids = torch.cat([torch.arange(vocabulary) if row == 3 else drawn[row : row + 1] for row in range(tokens)])
    hidden, head = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocabulary, 4)
    largest = []

    def pack(tensor):
        largest.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        actual, _ = kept_token_logprobs(hidden, head, drawn, ids, counts, chunk_tokens=10)
    assert max(largest) <= max(len(ids), head.numel()) < tokens * vocabulary / 40
    assert (actual[counts == 1] == 0).all() and actual[3] < 0


def test_rows_take_the_candidates_of_their_own():
    hidden, head = torch.randn(2, 4, 6), torch.randn(9, 6)
    tokens = torch.randint(0, 9, (2, 4))
    mask = torch.tensor([[False, False, True, True], [False, True, False, False]])
    counts = torch.tensor([[0, 0, 2, 1], [0, 3, 0, 0]])
    lists = {(0, 2): [0, 1], (0, 3): [0], (1, 1): [0, 4, 2]}
    lists = {at: [int(tokens[at] + more) % 9 for more in own] for at, own in lists.items()}
    ids = torch.cat([torch.tensor(own) for own in lists.values()]).int()
    narrower = mask & torch.tensor([[True, True, False, True], [True, True, True, True]])
    for wanted in (mask, narrower):
        actual, _ = row_logprobs(hidden, head, tokens, wanted, candidate_ids=ids, candidate_counts=counts)
        for i, t in wanted.nonzero().tolist():
            own = (head @ hidden[i, t - 1])[lists[i, t]]
            assert actual[i, t] == pytest.approx(own.log_softmax(0)[0].item(), abs=1e-5)
        assert (actual[~wanted] == 0).all()
