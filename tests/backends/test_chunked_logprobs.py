"""No role of any back end holds the logits of all tokens, neither forward nor backward."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2Config

from atomrl.algorithms import objective_of
from atomrl.atoms import auxiliary_losses as distillation
from atomrl.atoms import logprobs
from atomrl.backends.local import LocalBackend
from tests.backends.batches import make_batch
from tests.backends.equality import case, run_ranks, settings_of, with_ranks
from tests.tiny import make_tiny_model

VOCABULARY, ROWS, TOKENS = 2048, 48, 24
CHUNKS = ("atomrl.atoms.logprobs.CHUNK_ELEMENTS", "atomrl.atoms.auxiliary_losses.DIVERGENCE_ELEMENTS")
ALGORITHMS = {
    "policy and reference": case("grpo", axes={"kl": {"coefficient": 0.1}}),
    "teacher": case("on_policy_distillation"),
    "teacher's distributions": case("gkd"),
    "transformers": case("grpo", model="other"),
}


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        made = function(*arguments, **(named or {}))
        sizes = [t.untyped_storage().nbytes() // 4 for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return made


def measure(backend, given):
    algorithm = objective_of({"name": given["name"], **given["axes"]}).resolved(max_completion_tokens=8)
    backend.train = backend.train.model_copy(update={"tokens_per_micro_batch": 10**6})
    backend.tokens_per_micro_batch = 10**6
    batch = make_batch(rows=ROWS, longest=TOKENS)
    with Largest() as seen:
        outputs = backend.forward_only(batch, algorithm.needs)
        backend.gradients(outputs, algorithm)
    return seen.numbers


def local(folder, given):
    return measure(LocalBackend(**settings_of(given, folder)), given)


def on_rank(folder, ranks):
    logprobs.CHUNK_ELEMENTS = distillation.DIVERGENCE_ELEMENTS = 64 * VOCABULARY
    results = {}
    for name, given in ALGORITHMS.items():
        backend, _ = with_ranks(given, folder, ranks)
        results[name] = measure(backend, given)
        backend.close()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("base", "teacher"):
        make_tiny_model(folder / name, vocab_size=VOCABULARY)
    shape = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "other")
    return folder


LOGITS = (make_batch(rows=ROWS, longest=TOKENS).loss_mask.sum() * VOCABULARY).item()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_process_never_holds_the_logits_of_all_tokens(folder, name, monkeypatch):
    for place in CHUNKS:
        monkeypatch.setattr(place, 64 * VOCABULARY)
    assert 64 * VOCABULARY <= local(folder, ALGORITHMS[name]) < LOGITS / 2
    for place in CHUNKS:
        monkeypatch.setattr(place, 10**9)
    assert local(folder, ALGORITHMS[name]) >= LOGITS, "which this would see"


@pytest.mark.slow
def test_two_ranks_never_hold_the_logits_of_all_tokens(folder, tmp_path):
    for results in run_ranks(partial(on_rank, folder), 2, tmp_path):
        assert max(results.values()) < LOGITS / 4, results  # of half of the rows
