"""Stop strings and the table of tokens that can complete one."""

import torch

from atomrl.engines.stop_rule import StopRule, completing_tokens
from atomrl.types import SamplingParams
from tests.tiny import make_tiny_tokenizer


class Counting:
    """A tokenizer that counts how often the vocabulary is decoded."""

    def __init__(self):
        self.inner, self.decoded = make_tiny_tokenizer(), 0

    def __len__(self):
        return len(self.inner)

    def decode(self, *args, **options):
        return self.inner.decode(*args, **options)

    def batch_decode(self, rows):
        self.decoded += len(rows)
        return self.inner.batch_decode(rows)


def test_the_vocabulary_is_decoded_once():
    """0.7 s for 151 thousand tokens in every call of generate, before."""
    completing_tokens.cache_clear()
    tokenizer = Counting()
    for seed in range(5):
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(stop=("ab", "c"), seed=seed, temperature=temperature)
            StopRule(sampling, (2,), tokenizer, 110, torch.device("cpu"))
    assert tokenizer.decoded == len(tokenizer)


def test_the_first_of_several_new_tokens_that_completes_one_counts():
    tokenizer = make_tiny_tokenizer()
    rule = StopRule(SamplingParams(stop=("bc",), min_completion_tokens=3), (2,), tokenizer, 102, torch.device("cpu"))
    rows = [tokenizer(text).input_ids for text in ("abcbcd", "aaaaaa", "bcabcx")]
    sequences, lengths = torch.tensor(rows), torch.full((3,), 6)
    assert rule.string_ends(sequences, torch.arange(3), lengths, window=6) == {0: 3, 2: 5}
    assert rule.string_ends(sequences, torch.arange(3), lengths, window=1) == {}
    assert rule.string_ends(sequences, torch.tensor([2, 0]), torch.tensor([5, 5]), window=2) == {0: 5, 1: 5}
