"""The trust region's step in the local back end: exact Fisher-vector products, the bound, and when it does not step."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from atomrl.algorithms import objective_of
from atomrl.atoms.kl import distribution_kl
from atomrl.atoms.natural_gradient import fisher_vector_product, flat
from atomrl.backends.local import LocalBackend
from atomrl.backends.optimizer import Diverged
from atomrl.common.metrics import values
from atomrl.config import ConfigError, CriticConfig, LoraConfig, ModelConfig, TrainConfig
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import save_model
from atomrl.protocols import UpdateOutput
from tests.backends.batches import make_algorithm, make_batch, weights_of

VOCABULARY = 9
DISTRIBUTIONS = frozenset({"distributions"})
SHAPES = {
    "grouped, tied": {"kv_heads": 1, "tied": True},
    "biases, untied": {"family": "qwen2", "tied": False, "kv_heads": 2},
}


@pytest.fixture
def make(tmp_path):
    """A back end on a tiny model, in float64 unless said otherwise."""

    def build(
        shape="grouped, tied", algorithm=None, *, float64=True, train=None, lora=None, temperature=1.0, **settings
    ):
        folder = tmp_path / shape.replace(",", "").replace(" ", "-")
        if not folder.exists():
            if shape == "gpt2":
                torch.manual_seed(0)
                config = GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=32)
                AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
            else:
                options = {"layers": 2, "hidden": 8, "heads": 2, "intermediate": 4}
                save_model(new_gpt(VOCABULARY, **options, **SHAPES[shape]), None, folder)
        model = ModelConfig(path=str(folder), dtype="float32", lora=lora)
        settings |= {"total_updates": 4, "temperature": temperature}
        backend = LocalBackend(model, TrainConfig(**(train or {})), algorithm or make_algorithm(), **settings)
        if float64:
            backend.policy.model.double()
            backend.policy.optimizer.weights = {
                n: w for n, w in backend.policy.model.named_parameters() if w.requires_grad
            }
        backend.folder = folder
        return backend

    return build


def small_batch(**changes):
    return make_batch(rows=4, longest=7, vocabulary=VOCABULARY, **changes)


def trust_region(name="trpo", **update):
    """Without a critic unless the name brings one."""
    return objective_of({"name": name, "advantage": "rloo", "update": {"type": "trust_region", **update}}).resolved()


def seen_by_an_update(backend, batch):
    """Return the arguments of an algorithm's own update: parameters, micro-batches and the forward pass."""
    seen = []
    backend.train_step(batch, make_algorithm(update=lambda _, *given: seen.append(given) or UpdateOutput({})))
    return seen[0]


def snapshot(backend):
    return {name: tensor.clone() for name, tensor in weights_of(backend).items()}


def same(backend, kept):
    return all(torch.equal(tensor, kept[name]) for name, tensor in weights_of(backend).items())


@pytest.mark.parametrize("shape", [*SHAPES, "gpt2"])
def test_the_fisher_vector_product_equals_the_dense_fisher_matrix(make, shape):
    """The matrix is built from its definition: the gradient of every log-prob in every place, by a backward pass."""
    backend, batch = make(shape, train={"rows_per_micro_batch": 3}, temperature=1.3), small_batch()
    parameters, micros, outputs = seen_by_an_update(backend, batch)
    assert len(micros) == 2
    logprobs = (backend.policy.model(batch.tokens)[:, :-1] / 1.3).log_softmax(-1)
    size = sum(p.numel() for p in parameters)
    dense = torch.zeros(size, size, dtype=torch.float64)
    for row, place in (batch.loss_mask[:, 1:]).nonzero().tolist():
        rows = torch.stack([
            flat([torch.zeros_like(w) if g is None else g for w, g in zip(parameters, gradients, strict=True)])
            for gradients in (
                torch.autograd.grad(logprobs[row, place, token], parameters, retain_graph=True, allow_unused=True)
                for token in range(VOCABULARY)
            )
        ])  # fmt: skip
        p = logprobs[row, place].detach().exp()
        dense += batch.loss_weights[row, place + 1] * (rows.T * p) @ rows
    vectors = torch.randn(size, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    product = torch.zeros_like(vectors)
    for micro in micros:
        weights = micro.loss_weights[micro.loss_mask].double()
        for column, vector in enumerate(vectors.T):
            product[:, column] += fisher_vector_product(
                lambda forward, micro=micro: outputs(micro, DISTRIBUTIONS, plain=forward).distributions.logprobs(),
                weights,
                parameters,
                vector,
            )
    expected = dense @ vectors
    assert expected.abs().max() > 0.1
    assert (product - expected).abs().max() <= 1e-12 * expected.abs().max()


def policy(backend, batch):
    """Its distributions, [N, V]."""
    _, (micro,), outputs = seen_by_an_update(backend, batch)
    with torch.no_grad():
        return outputs(micro, DISTRIBUTIONS).distributions.logprobs()


@pytest.mark.parametrize("bound", [1e-3, 0.3])
@pytest.mark.parametrize("shape", [*SHAPES, "gpt2"])
def test_the_measured_kl_is_within_the_bound_and_near_it(make, shape, bound):
    backend, batch = make(shape, float64=False), small_batch()
    before = policy(backend, batch)
    metrics = values(backend.train_step(batch, trust_region(kl_bound=bound)))
    kl = distribution_kl(before, policy(backend, batch)).mean().item()
    assert metrics["actor/accepted"] == 1.0 and metrics["actor/surrogate_gain"] > 0
    assert metrics["actor/kl"] == pytest.approx(kl, rel=1e-4) and metrics["actor/kl_bound"] == bound
    assert kl <= bound
    assert kl >= 0.5 * bound or shape == "gpt2" or bound > 0.1  # where the KL is far from quadratic
    assert "actor/lr" not in metrics and metrics["actor/grad_norm"] > 0 and 0 <= metrics["actor/cg_residual"] < 1


def test_the_learning_rate_has_no_part_in_it_and_steps_add_up_to_learning(make):
    batch = small_batch(advantages=small_batch().loss_mask * 1.0)
    results = []
    for train in ({"learning_rate": 1.0, "weight_decay": 0.5, "max_grad_norm": 1e-6}, {"learning_rate": 1e-9}):
        backend = make(train=train)
        gains = [values(backend.train_step(batch, trust_region()))["actor/surrogate_gain"] for _ in range(3)]
        results.append((gains, snapshot(backend)))
    assert results[0][0] == results[1][0] and min(results[0][0]) > 0
    assert all(torch.equal(results[0][1][name], tensor) for name, tensor in results[1][1].items())
    chosen = policy(backend, batch).gather(1, batch.tokens[batch.loss_mask][:, None]).mean()
    assert chosen > policy(make(), batch).gather(1, batch.tokens[batch.loss_mask][:, None]).mean() + 0.1


@pytest.mark.parametrize(
    "split", [{"rows_per_micro_batch": 1}, {"rows_per_micro_batch": 3}, {"tokens_per_micro_batch": 14}]
)
def test_any_split_into_micro_batches_gives_the_same_step(make, split):
    whole, parts = make(), make(train=split)
    algorithm = trust_region(cg_iterations=3)  # many iterations that do not converge multiply rounding errors
    expected, metrics = (values(backend.train_step(small_batch(), algorithm)) for backend in (whole, parts))
    assert metrics == pytest.approx(expected, rel=1e-10, abs=1e-12) and metrics["actor/accepted"] == 1.0
    theirs = weights_of(whole)
    for name, tensor in weights_of(parts).items():
        assert (tensor - theirs[name]).abs().max() <= 1e-12


def test_a_step_that_is_refused_restores_the_weights_bit_for_bit(make):
    """The quadratic model overshoots a bound this wide, and nothing shorter is tried."""
    backend = make(float64=False)
    kept = snapshot(backend)
    metrics = values(backend.train_step(small_batch(), trust_region(kl_bound=8.0, backtracks=0)))
    assert metrics["actor/accepted"] == metrics["actor/kl"] == metrics["actor/surrogate_gain"] == 0.0
    assert metrics["actor/grad_norm"] > 0 and same(backend, kept)


@pytest.mark.parametrize("call", [1, 8, 15])
def test_memory_that_runs_out_anywhere_ends_in_the_same_step(make, monkeypatch, call):
    """In the gradient, in the products and in the search: the weights are those of before, and it starts again."""
    expected = make(train={"rows_per_micro_batch": 2})
    metrics = values(expected.train_step(small_batch(), trust_region()))
    backend = make()
    model, calls = backend.policy.model, []
    forward = model.stream_states

    def scarce(tokens, stream):
        calls.append(len(tokens))
        if len(calls) == call:
            raise torch.OutOfMemoryError("out of memory")
        return forward(tokens, stream)

    monkeypatch.setattr(model, "stream_states", scarce)
    retried = values(backend.train_step(small_batch(), trust_region()))
    assert calls[call - 1] == 4 and calls[-1] < 4, len(calls)
    assert retried.pop("actor/out_of_memory") == 1.0 and retried == pytest.approx(metrics, rel=1e-7, abs=1e-12)
    theirs = weights_of(expected)
    assert all((tensor - theirs[name]).abs().max() <= 1e-9 for name, tensor in weights_of(backend).items())


def test_an_error_in_the_search_leaves_the_weights(make, monkeypatch):
    backend = make()
    kept, seen, model = snapshot(backend), [], backend.policy.model
    forward = model.stream_states

    def broken(tokens, stream):
        seen.append(len(tokens))
        if not same(backend, kept):  # a step is being tried
            raise KeyboardInterrupt
        return forward(tokens, stream)

    monkeypatch.setattr(model, "stream_states", broken)
    with pytest.raises(KeyboardInterrupt):
        backend.train_step(small_batch(), trust_region())
    assert len(seen) > 10 and same(backend, kept)


NOTHING = {"actor/accepted": 0.0, "actor/kl": 0.0, "actor/surrogate_gain": 0.0, "actor/backtracks": 0.0}


@pytest.mark.parametrize("empty", ["no advantage", "no token"])
def test_a_batch_without_a_signal_makes_no_step(make, empty):
    mask = small_batch().loss_mask
    zeros = {"advantages": mask * 0.0} if empty == "no advantage" else {
        "loss_mask": mask & False, "advantages": mask * 0.0, "loss_weights": mask * 0.0}  # fmt: skip
    backend, batch = make(train={"rows_per_micro_batch": 3}), small_batch(**zeros)
    kept = snapshot(backend)
    metrics = values(backend.train_step(batch, trust_region()))
    assert metrics.items() >= {**NOTHING, "actor/empty_updates": 1.0, "actor/grad_norm": 0.0}.items()
    assert same(backend, kept)


def test_a_bad_gradient_makes_no_step_and_the_third_in_a_row_stops_the_run(make):
    backend, good = make(), small_batch()
    bad = small_batch(advantages=good.advantages * math.nan)
    kept = snapshot(backend)
    for _ in range(2):
        metrics = values(backend.train_step(bad, trust_region()))
        assert metrics.items() >= {**NOTHING, "actor/skipped_updates": 1.0}.items() and "actor/grad_norm" not in metrics
        assert same(backend, kept)
    backend.train_step(good, trust_region())
    for _ in range(2):
        backend.train_step(bad, trust_region())
    with pytest.raises(Diverged):
        backend.train_step(bad, trust_region())


def critic_batch(seed=0):
    batch = small_batch(seed=seed)
    return small_batch(seed=seed, values=batch.advantages * 0.5, returns=batch.advantages * 2)


def test_a_critic_is_trained_by_its_own_optimizer(make):
    """The policy's step is the one that it is without a critic; the critic learns the returns, at its own rate."""
    algorithm = objective_of({"name": "trpo"}).resolved()
    assert algorithm.update is not None and "values" in algorithm.outputs
    backend, alone = (
        make(algorithm=algorithm, critic=CriticConfig(learning_rate=0.05), float64=False),
        make(float64=False),
    )
    metrics = values(backend.train_step(critic_batch(), algorithm))
    expected = values(alone.train_step(small_batch(), trust_region()))
    assert {name: metrics[name] for name in expected} == expected and same(alone, snapshot(backend))
    assert metrics["critic/lr"] == 0.05 and metrics["critic/grad_norm"] > 0
    losses = [values(backend.train_step(critic_batch(), algorithm))["critic/vf_loss"] for _ in range(5)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("critic", "lora"), [(None, None), (CriticConfig(learning_rate=0.01), LoraConfig(rank=2))], ids=["plain", "both"]
)
def test_continues_bit_for_bit(make, tmp_path, critic, lora):
    algorithm = objective_of({"name": "trpo"}).resolved() if critic else trust_region()
    batches = [critic_batch(seed=seed) for seed in range(4)]
    straight = make(algorithm=algorithm, float64=False, critic=critic, lora=lora)
    for batch in batches[:2]:
        straight.train_step(batch, algorithm)
    straight.save(tmp_path / "checkpoint")
    expected = [values(straight.train_step(batch, algorithm)) for batch in batches[2:]]
    resumed = make(algorithm=algorithm, float64=False, critic=critic, lora=lora)
    resumed.train_step(batches[3], algorithm)
    resumed.load(tmp_path / "checkpoint")
    assert [values(resumed.train_step(batch, algorithm)) for batch in batches[2:]] == expected
    assert same(straight, snapshot(resumed)) and all(m["actor/accepted"] for m in expected)


def test_a_surrogate_takes_its_ratio_to_the_old_policy_if_there_were_updates_before(make):
    """With several updates in a step the ratio is to the step's start, the KL to the update's."""
    backend, batch = make(), small_batch()
    _, (micro,), outputs = seen_by_an_update(backend, batch)
    with torch.no_grad():
        old = outputs(micro, frozenset({"logprobs"})).logprobs
    first, second = (
        values(backend.train_step(small_batch(old_logprobs=old), trust_region())) for _ in range(2)
    )  # fmt: skip
    assert first["actor/ppo_kl"] == 0.0 != second["actor/ppo_kl"]
    assert second["actor/pg_loss"] == pytest.approx(first["actor/pg_loss"] - first["actor/surrogate_gain"], rel=1e-6)


def test_a_model_without_a_forward_derivative_is_refused_before_the_run(make, monkeypatch):
    make("gpt2", trust_region(), float64=False)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    monkeypatch.setattr(GPT2MLP, "forward", lambda self, x: Backward.apply(self.c_proj(self.c_fc(x))))
    with pytest.raises(ConfigError, match=r"algorithm\.update"):
        make("gpt2", trust_region(), float64=False)


REFUSED = [
    ({"kl_bound": 0}, "algorithm.update.kl_bound: should be greater than 0"),
    ({"cg_iterations": 0}, "algorithm.update.cg_iterations: should be greater than 0"),
    ({"backtrack_ratio": 1.0}, "algorithm.update.backtrack_ratio: should be less than 1"),
    ({"bound": 1.0}, "did you mean"),
    ({"damping": -1.0}, "algorithm.update.damping: should be greater than or equal to 0"),
]


@pytest.mark.parametrize(("setting", "message"), REFUSED)
def test_settings_without_sense_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        trust_region(**setting)
