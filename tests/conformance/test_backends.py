"""Conformance suite of training back ends; to add one, add a maker to `BACKENDS`."""

from contextlib import ExitStack
from dataclasses import replace
from threading import Event

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from atomrl.backends.checkpoints import BackgroundCheckpoints
from atomrl.backends.fsdp import FSDPBackend
from atomrl.backends.local import LocalBackend
from atomrl.batches import PreferenceFields, RolloutFields
from atomrl.common.metrics import Sum, values
from atomrl.config import ConfigError, FSDPConfig, LoraConfig, MegatronConfig, ModelConfig, TrainConfig
from atomrl.models.loading import load_tokenizer
from atomrl.protocols import UpdateOutput
from atomrl.types import RaggedIds
from tests.backends.batches import make_algorithm, make_batch, weights_of, written
from tests.backends.one_rank import one_rank
from tests.tiny import make_tiny_model

ENTROPY = frozenset({"logprobs", "entropy"})
WITH_REFERENCE = make_algorithm(needs=frozenset({"ref_logprobs"}))


def make_local(folder, algorithm=None, *, lora=None, train=None, dtype="float32", **settings):
    return LocalBackend(
        ModelConfig(path=str(folder), dtype=dtype, lora=lora),
        TrainConfig(**({"learning_rate": 0.01} | (train or {}))),
        algorithm or make_algorithm(),
        **({"total_updates": 4, "tokenizer": load_tokenizer(folder)} | settings),
    )


def make_fsdp(folder, algorithm=None, *, lora=None, train=None, dtype="float32", **settings):
    """A rank that is the only one; more are held against one process in tests/backends/test_fsdp.py."""
    return FSDPBackend(
        FSDPConfig(type="fsdp"),
        ModelConfig(path=str(folder), dtype=dtype, lora=lora),
        TrainConfig(**({"learning_rate": 0.01} | (train or {}))),
        algorithm or make_algorithm(),
        **({"total_updates": 4, "tokenizer": load_tokenizer(folder), "device": "cpu"} | settings),
    )


def make_megatron(folder, algorithm=None, *, lora=None, train=None, dtype="float32", **settings):
    """Likewise; more are held against one process in tests/backends/test_megatron.py."""
    from atomrl.backends.megatron.backend import MegatronBackend

    return MegatronBackend(
        MegatronConfig(type="megatron"),
        ModelConfig(path=str(folder), dtype=dtype, lora=lora),
        TrainConfig(**({"learning_rate": 0.01} | (train or {}))),
        algorithm or make_algorithm(),
        **({"total_updates": 4, "tokenizer": load_tokenizer(folder), "device": "cpu"} | settings),
    )


BACKENDS = {"local": make_local, "fsdp": make_fsdp, "megatron": make_megatron}


@pytest.fixture(params=list(BACKENDS))
def make(request, tmp_path):
    if request.param == "megatron":
        pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")
    folder = make_tiny_model(tmp_path / "base", "qwen2")
    with ExitStack() as stack:
        given = {} if request.param == "local" else {"collective": stack.enter_context(one_rank())}
        yield from maker(request.param, folder, given)


def maker(kind, folder, given):

    def build(algorithm=None, **settings):
        backend = BACKENDS[kind](folder, algorithm, **given, **settings)
        built.append(backend)
        return backend

    built = []
    build.folder, build.kind = folder, kind
    yield build
    for backend in built:
        backend.close()


def snapshot(backend):
    return {name: tensor.clone() for name, tensor in weights_of(backend).items()}


def plain_logprobs(model, batch, temperature=1.0):
    logprobs = F.log_softmax(model(batch.tokens).logits[:, :-1] / temperature, dim=-1)
    picked = logprobs.gather(-1, batch.tokens[:, 1:, None])[..., 0]
    return F.pad(picked, (1, 0)) * batch.loss_mask


def test_an_update_of_an_engine_has_the_models_weights(make):
    theirs = AutoModelForCausalLM.from_pretrained(make.folder).state_dict()
    update = make().weight_update(version=3)
    weights = dict(update.tensors)
    assert update.version == 3 and not update.adapters
    assert weights.keys() | {"lm_head.weight"} == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights.items())


def test_an_update_of_an_engine_has_adapters_apart(make):
    """Base weights as they were, and adapters that are what the trainer has learned."""
    backend = make(lora=LoraConfig(rank=4, alpha=8))
    for _ in range(2):
        backend.train_step(make_batch(), make_algorithm())
    theirs = AutoModelForCausalLM.from_pretrained(make.folder).state_dict()
    update, merged = backend.weight_update(version=1), weights_of(backend)
    weights = dict(update.tensors)
    assert weights.keys() == merged.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in weights.items()
    )
    assert update.adapters and all(adapter.a.shape[0] == 4 for adapter in update.adapters.values())
    for name, tensor in merged.items():
        adapter = update.adapters.get(name)
        expected = weights[name] if adapter is None else weights[name] + adapter.scale * adapter.b @ adapter.a
        torch.testing.assert_close(tensor, expected)
    alone = backend.weight_update(version=2, adapters_alone=True)
    assert not list(alone.tensors) and alone.adapters.keys() == update.adapters.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", [{}, {"tokens_per_micro_batch": 30}, {"rows_per_micro_batch": 3}], ids=str)
@pytest.mark.parametrize("outputs", [frozenset({"logprobs"}), ENTROPY], ids=["logprobs", "entropy"])
def test_old_log_probs_are_those_of_the_loss_to_the_last_bit(make, monkeypatch, dtype, split, outputs):
    """Where the same rows are in the same micro-batches. In others the products have other shapes, and other sums."""
    monkeypatch.setattr("atomrl.models.loading.has_bfloat16", lambda device: True)
    backend, batch, seen = make(dtype=dtype, train=split), make_batch(rows=9, longest=30), []
    annotated = backend.forward_only(batch, frozenset({"old_logprobs"}))

    def loss(outputs, micro):
        seen.append(torch.equal(outputs.logprobs, micro.old_logprobs))
        return make_algorithm().loss(outputs, micro)

    backend.train_step(annotated, make_algorithm(loss=loss, outputs=outputs))
    assert seen and all(seen)


@pytest.mark.parametrize("split", [{}, {"rows_per_micro_batch": 2}], ids=str)
def test_the_tokens_of_recorded_rows_are_kept(make, split):
    recorded = torch.tensor([-1, 2, -1, 0, 1, -1, -1])
    backend, batch = make(train=split), make_batch(rows=7, recorded=recorded)
    chosen = recorded.argsort()[-3:]
    with torch.no_grad():
        logprobs = plain_logprobs(AutoModelForCausalLM.from_pretrained(make.folder), batch)[chosen]
    algorithm = make_algorithm(outputs=ENTROPY)
    backend.train_step(batch, algorithm)
    numbers, weights = backend.token_numbers(), batch.loss_weights[chosen]
    assert numbers.keys() == {"logprobs", "entropy", "gradient", "loss", "advantage"}
    gradient, entropy = -weights * batch.advantages[chosen], numbers["entropy"] * batch.loss_mask[chosen]
    torch.testing.assert_close(numbers["logprobs"], logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(numbers["gradient"] * batch.loss_mask[chosen], gradient)
    torch.testing.assert_close(numbers["loss"], gradient * logprobs - 0.1 * weights * entropy, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(numbers["advantage"], batch.advantages[chosen])
    backend.train_step(make_batch(rows=7), algorithm)
    assert not backend.token_numbers(), "those of another update are not to be taken for its own"


def test_state_is_the_models(make):
    theirs = AutoModelForCausalLM.from_pretrained(make.folder).state_dict()
    for name, tensor in weights_of(make()).items():
        assert torch.equal(tensor, theirs[name]), name


def test_annotates_log_probs_of_policy_and_reference(make):
    batch = make_batch()
    backend = make(WITH_REFERENCE, temperature=0.7, train={"tokens_per_micro_batch": 30})
    expected = plain_logprobs(AutoModelForCausalLM.from_pretrained(make.folder), batch, 0.7).detach()
    backend.train_step(batch, make_algorithm())
    annotated = backend.forward_only(batch, frozenset({"old_logprobs", "ref_logprobs"}))
    torch.testing.assert_close(annotated.ref_logprobs, expected, atol=1e-4, rtol=1e-4)
    assert (annotated.old_logprobs - expected).abs().max() > 1e-3
    assert not annotated.old_logprobs.requires_grad
    assert backend.forward_only(batch, frozenset()).old_logprobs is None


def test_log_probs_are_over_the_candidates_of_each_token(make):
    """With all tokens as candidates: the same as without; with the token and one more: a choice between two."""
    backend, batch = make(), make_batch()
    every = torch.arange(102, dtype=torch.int32)
    counts = batch.loss_mask * 102
    all_of_them = RaggedIds(counts=counts, ids=every.repeat(int(batch.loss_mask.sum())))
    plain = backend.forward_only(batch, frozenset({"old_logprobs"})).old_logprobs
    logprobs = backend.forward_only(
        replace(batch, rollout=RolloutFields(candidates=all_of_them)), frozenset({"old_logprobs"})
    ).old_logprobs
    torch.testing.assert_close(logprobs, plain, atol=1e-5, rtol=1e-5)
    own = batch.tokens[batch.loss_mask].int()
    pairs = RaggedIds(counts=batch.loss_mask * 2, ids=torch.stack([own, (own + 1) % 102], 1).flatten())
    split = make(train={"rows_per_micro_batch": 2})
    logprobs = split.forward_only(
        replace(batch, rollout=RolloutFields(candidates=pairs)), frozenset({"old_logprobs"})
    ).old_logprobs
    logits = AutoModelForCausalLM.from_pretrained(make.folder)(batch.tokens).logits[:, :-1][batch.loss_mask[:, 1:]]
    own = own.long()[:, None]
    expected = torch.cat([logits.gather(1, own), logits.gather(1, (own + 1) % 102)], 1).log_softmax(1)[:, 0]
    torch.testing.assert_close(logprobs[batch.loss_mask], expected.detach(), atol=1e-4, rtol=1e-4)


def test_one_step_is_adamw_on_the_clipped_gradient(make):
    batch, model = make_batch(), AutoModelForCausalLM.from_pretrained(make.folder)
    (-(batch.loss_weights * batch.advantages * plain_logprobs(model, batch)).sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0).step()
    backend = make(train={"max_grad_norm": 0.05, "tokens_per_micro_batch": 40})
    metrics = values(backend.train_step(batch, make_algorithm()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["actor/lr"] == 0.01
    expected = model.state_dict()
    for name, tensor in weights_of(backend).items():
        # the first AdamW step is nearly lr * sign(gradient): entries whose gradient is noise may differ by 2 lr
        far = (tensor - expected[name]).abs() > 1e-4
        assert far.float().mean() < 0.001, name


@pytest.mark.parametrize("split", [{"tokens_per_micro_batch": 1}, {"rows_per_micro_batch": 2}])
@pytest.mark.parametrize("unit", ["row", "group"])
def test_no_split_changes_the_step(make, split, unit):
    batch, algorithm = make_batch(rows=8), make_algorithm(outputs=ENTROPY, row_unit=unit)
    whole, parts = make(), make(train=split)
    first, second = (values(backend.train_step(batch, algorithm)) for backend in (whole, parts))
    assert first == pytest.approx(second, rel=1e-4)
    assert first.keys() == {"actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr"}
    one, other = weights_of(whole), weights_of(parts)
    assert all(((tensor - other[name]).abs() > 1e-4).float().mean() < 0.001 for name, tensor in one.items())


def test_order_of_rows_and_padding_do_not_matter(make):
    batch = make_batch()
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    fields = {name: value[order] for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    wide = {name: F.pad(value, (0, 7)) if value.dim() == 2 else value for name, value in fields.items()}
    first = values(make().train_step(batch, make_algorithm()))
    second = values(make().train_step(make_batch(**wide), make_algorithm()))
    assert first == pytest.approx(second, rel=1e-4)


def test_groups_stay_together(make):
    seen = []

    def loss(outputs, micro):
        seen.append(set(micro.group_ids.tolist()))
        return make_algorithm().loss(outputs, micro)

    make(train={"rows_per_micro_batch": 3}).train_step(make_batch(rows=8), make_algorithm(loss=loss, row_unit="group"))
    assert sum(map(len, seen)) == len(set.union(*seen)) == 4
    assert len(seen) == 4


def test_pairs_of_a_group_may_part_from_each_other(make):
    """Where a batch names its pairs, they and not the groups are kept together."""
    seen, pairs = [], torch.tensor([0, 1, 0, 1, 2, 3, 3, 2])

    def loss(outputs, micro):
        seen.append(micro.pair_ids.tolist())
        return make_algorithm().loss(outputs, micro)

    preference = PreferenceFields(pair_ids=pairs)
    batch = make_batch(rows=8, preference=preference, group_ids=torch.zeros(8, dtype=torch.long))
    make(train={"rows_per_micro_batch": 2}).train_step(batch, make_algorithm(loss=loss, row_unit="pair"))
    assert sorted(seen) == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_nothing_to_learn_changes_nothing(make):
    backend, batch = make(), make_batch()
    before = snapshot(backend)
    nothing = torch.zeros_like(batch.loss_mask)
    metrics = values(backend.train_step(make_batch(loss_mask=nothing, loss_weights=nothing * 1.0), make_algorithm()))
    assert metrics["actor/grad_norm"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(backend).items())


def test_a_gradient_that_is_not_finite_is_left_out(make, caplog):
    backend, batch = make(), make_batch()
    before = snapshot(backend)
    poisoned = make_batch(advantages=torch.full_like(batch.advantages, float("nan")))
    metrics = backend.train_step(poisoned, make_algorithm())
    assert values(metrics)["actor/skipped_updates"] == 1.0 and "skipped update" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(backend).items())
    assert "actor/skipped_updates" not in backend.train_step(batch, make_algorithm())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, dropout=0.2)])
def test_continues_bit_for_bit(make, tmp_path, lora):
    settings = {"lora": lora, "train": {"schedule": "cosine", "warmup_ratio": 0.5, "learning_rate": 0.01}}
    batches = [make_batch(seed=seed) for seed in range(4)]
    straight = make(**settings)
    for batch in batches[:2]:
        straight.train_step(batch, make_algorithm())
    written(straight.save(tmp_path / "checkpoint"))
    expected = [values(straight.train_step(batch, make_algorithm())) for batch in batches[2:]]
    resumed = make(**settings, seed=5)
    resumed.train_step(batches[3], make_algorithm())
    resumed.load(tmp_path / "checkpoint")
    assert [values(resumed.train_step(batch, make_algorithm())) for batch in batches[2:]] == expected
    final = weights_of(resumed)
    assert all(torch.equal(tensor, final[name]) for name, tensor in weights_of(straight).items())


def test_a_checkpoint_before_the_first_step_resumes(make, tmp_path):
    """As a run whose first groups all had nothing to learn from."""
    started, other = make(), make(seed=5)
    written(started.save(tmp_path / "checkpoint"))
    other.train_step(make_batch(seed=1), make_algorithm())
    other.load(tmp_path / "checkpoint")
    expected, metrics = (values(backend.train_step(make_batch(), make_algorithm())) for backend in (started, other))
    assert metrics == expected
    final = weights_of(other)
    assert all(torch.equal(tensor, final[name]) for name, tensor in weights_of(started).items())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_a_checkpoint_is_of_the_step_that_began_it(make, tmp_path, lora, monkeypatch):
    """Whatever the next step does before it is written."""
    stepped, write = Event(), BackgroundCheckpoints.write_in_background
    monkeypatch.setattr(
        BackgroundCheckpoints,
        "write_in_background",
        lambda self, folder, jobs: write(self, folder, [stepped.wait, *jobs]),
    )
    backend, batch = make(lora=lora), make_batch()
    backend.train_step(batch, make_algorithm())
    then = backend.forward_only(batch, frozenset({"old_logprobs"})).old_logprobs
    wait = backend.save(tmp_path / "checkpoint")
    backend.train_step(batch, make_algorithm())
    stepped.set()
    written(wait)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    torch.testing.assert_close(plain_logprobs(model, batch).detach(), then, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_transformers_loads_a_checkpoint(make, tmp_path, lora):
    backend, batch = make(lora=lora), make_batch()
    backend.train_step(batch, make_algorithm())
    written(backend.save(tmp_path / "checkpoint"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    old = backend.forward_only(batch, frozenset({"old_logprobs"})).old_logprobs
    torch.testing.assert_close(plain_logprobs(model, batch).detach(), old, atol=1e-4, rtol=1e-4)
    assert load_tokenizer(make.folder)("1+1") == type(load_tokenizer(make.folder)).from_pretrained(
        tmp_path / "checkpoint"
    )("1+1")


def test_with_adapters_weights_are_merged_and_the_reference_is_free(make):
    backend, batch = make(WITH_REFERENCE, lora=LoraConfig(rank=4)), make_batch()
    model = AutoModelForCausalLM.from_pretrained(make.folder)
    start = plain_logprobs(model, batch).detach()
    for _ in range(3):
        backend.train_step(batch, make_algorithm())
    annotated = backend.forward_only(batch, frozenset({"old_logprobs", "ref_logprobs"}))
    torch.testing.assert_close(annotated.ref_logprobs, start, atol=1e-4, rtol=1e-4)
    model.load_state_dict(weights_of(backend), strict=False)
    torch.testing.assert_close(plain_logprobs(model, batch).detach(), annotated.old_logprobs, atol=1e-4, rtol=1e-4)
    assert (annotated.old_logprobs - start).abs().max() > 1e-2


def test_an_algorithm_may_bring_its_own_update(make):
    def sign_descent(algorithm, parameters, micro_batches, outputs):
        for micro in micro_batches:
            make_algorithm().loss(outputs(micro, frozenset({"logprobs"})), micro).loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(0.001 * parameter.grad.sign())
                parameter.grad = None
        return UpdateOutput({"own/parts": Sum(float(len(micro_batches)))})

    backend = make(train={"rows_per_micro_batch": 2})
    before = snapshot(backend)
    if make.kind != "local":
        with pytest.raises(ConfigError, match="needs all weights"):
            backend.train_step(make_batch(), make_algorithm(update=sign_descent))
        return
    metrics = values(backend.train_step(make_batch(), make_algorithm(update=sign_descent)))
    assert metrics == {"own/parts": 3.0}
    moved = [(tensor - before[name]).abs().max().item() for name, tensor in weights_of(backend).items()]
    assert max(moved) == pytest.approx(0.001, rel=1e-2)


def test_steps_lower_the_loss(make):
    backend, batch = make(train={"schedule": "constant"}), make_batch(advantages=make_batch().loss_mask * 1.0)
    losses = [values(backend.train_step(batch, make_algorithm()))["actor/pg_loss"] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


def test_refuses_what_it_cannot_do(make, tmp_path):
    backend = make()
    with pytest.raises(ValueError, match="values"):
        backend.forward_only(make_batch(), frozenset({"values"}))
    with pytest.raises(ValueError, match="without a reference"):
        backend.forward_only(make_batch(), frozenset({"ref_logprobs"}))
    with pytest.raises(ValueError, match="values"):
        backend.train_step(make_batch(), make_algorithm(outputs=frozenset({"logprobs", "values"})))
    with pytest.raises(ValueError, match="checkpoint"):
        backend.load(tmp_path)
