"""Distillation: its gradients are those of divergences, a policy comes to its teacher, and a wrong teacher is
refused."""

import json
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F

from atomrl.algorithms import objective_of
from atomrl.backends.local import LocalBackend
from atomrl.batches import RolloutFields, RowBatch, TrainingBatch
from atomrl.common.metrics import values
from atomrl.config import ConfigError, ModelConfig, TrainConfig, load_config
from atomrl.models.memory import count_parameters
from atomrl.protocols import ModelOutputs
from atomrl.trainer import prepare_run
from atomrl.trainer.checks.config import check_companions
from atomrl.trainer.memory import memory_estimate
from tests.backends.batches import make_algorithm, make_batch
from tests.tiny import make_tiny_model, make_tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "student")
    make_tiny_model(folder / "teacher", seed=1)
    return folder


def make_rows():
    batch = make_batch()
    return RowBatch(**{item.name: getattr(batch, item.name) for item in fields(RowBatch)})


def backend(folder, teacher="teacher", **train):
    return LocalBackend(
        ModelConfig(path=str(folder / "student"), dtype="float32", device="cpu"),
        TrainConfig(steps=60, learning_rate=3e-3, **train),
        make_algorithm(outputs=frozenset({"teacher_distributions"})),
        total_updates=60,
        temperature=0.8,
        teacher=str(folder / teacher),
    )


def one_step(backend, algorithm):
    """An update of six rows with the algorithm's own weights and advantages, and its metrics."""
    rows = backend.forward_only(make_rows(), algorithm.advantage_inputs)
    credited = algorithm.advantages(rows)
    batch = TrainingBatch(
        **(vars(credited) | {"loss_weights": algorithm.loss_weights(credited.loss_mask, credited.group_ids)})
    )
    return values(backend.train_step(batch, algorithm))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_step_of_gkd_has_the_gradient_of_the_divergence_of_plain_transformers(folder, beta):
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("student", "teacher")
    )
    batch = make_batch()
    before = batch.loss_mask.clone()
    before[:, 0] = False
    q, p = (F.softmax(model(batch.tokens).logits[:, :-1] / 0.8, dim=-1)[before[:, 1:]] for model in (student, teacher))
    p = p.detach()
    if beta in (0.0, 1.0):
        over, under = (p, q) if beta == 0.0 else (q, p)
        divergence = (over * (over.log() - under.log())).sum(-1)
    else:
        m = beta * p + (1 - beta) * q
        divergence = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
    divergence.mean().backward()
    expected = torch.stack([weight.grad.norm() for weight in student.parameters()]).norm()
    metrics = one_step(
        backend(folder, rows_per_micro_batch=3),
        objective_of({"name": "gkd", "distillation": {"beta": beta}}).resolved(),
    )
    assert metrics["actor/distillation_loss"] == pytest.approx(divergence.mean().item(), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(expected.item(), rel=1e-3)


def test_over_all_tokens_the_advantage_has_the_gradient_of_the_reverse_kl():
    """One row for each token of the vocabulary, weighed by how likely the policy is to draw it."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(0)
    algorithm = objective_of({"name": "on_policy_distillation"}).resolved()
    logprobs = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    column = F.pad(logprobs[:, None], (1, 0))
    rows = replace(
        make_rows(),
        tokens=torch.zeros(7, 2, dtype=torch.long),
        loss_mask=torch.tensor([[False, True]]).expand(7, 2),
        lengths=torch.full((7,), 2),
        prompt_lengths=torch.ones(7, dtype=torch.long),
        group_ids=torch.arange(7),
        rewards=torch.rand(7),
        truncated=torch.zeros(7, dtype=torch.bool),
        rollout=RolloutFields(),
        old_logprobs=column.detach(),
        teacher_logprobs=F.pad(teacher[:, None], (1, 0)),
    )
    credited = algorithm.advantages(rows)
    weights = F.pad(logprobs.detach().exp()[:, None], (1, 0))
    batch = TrainingBatch(**(vars(credited) | {"loss_weights": weights}))
    result = algorithm.loss(ModelOutputs(logprobs=column), batch)
    torch.testing.assert_close(torch.autograd.grad(result.loss, logits)[0], wanted)
    assert values(result.metrics)["actor/teacher_kl"] == pytest.approx((logprobs.detach() - teacher).mean().item())


@pytest.mark.parametrize(
    ("name", "metric"), [("gkd", "actor/distillation_loss"), ("on_policy_distillation", "actor/teacher_kl")]
)
def test_a_policy_that_is_its_teacher_learns_nothing(folder, name, metric):
    metrics = one_step(backend(folder, teacher="student"), objective_of({"name": name}).resolved())
    assert metrics[metric] == pytest.approx(0, abs=1e-6) and metrics.get("actor/grad_norm", 0) < 1e-5


@pytest.mark.parametrize("name", ["gkd", "on_policy_distillation"])
def test_neither_rewards_nor_groups_have_a_part_in_it(folder, name):
    algorithm, trainer = objective_of({"name": name}).resolved(), backend(folder)
    rows = trainer.forward_only(make_rows(), algorithm.advantage_inputs)
    other = replace(rows, rewards=rows.rewards + torch.randn(rows.rows), group_ids=torch.zeros_like(rows.group_ids))
    assert torch.equal(algorithm.advantages(rows).advantages, algorithm.advantages(other).advantages)


def test_a_policy_comes_to_its_teacher(folder):
    trainer, algorithm = backend(folder), objective_of({"name": "gkd"}).resolved()
    seen = [one_step(trainer, algorithm)["actor/distillation_loss"] for _ in range(40)]
    assert seen[-1] < 0.3 * seen[0]


def config(folder, teacher, name="gkd"):
    return load_config(
        {
            "run_name": "r",
            "output_dir": str(folder / "runs"),
            "model": {"path": str(folder / "student"), "device": "cpu", "dtype": "float32"},
            "teacher": teacher and {"path": str(folder / teacher)},
            "data": {"train": "chain", "train_size": 8},
            "algorithm": {"name": name},
        }
    )


def test_a_teacher_of_another_vocabulary_is_refused_before_there_is_a_run(folder):
    make_tiny_model(folder / "larger", vocab_size=128)
    make_tiny_model(folder / "without")
    for file in (folder / "without").glob("tokenizer*"):
        file.unlink()
    make_tiny_model(folder / "other")
    tokenizer = make_tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    names = state["model"]["vocab"]
    names["a"], names["b"] = names["b"], names["a"]
    (folder / "other" / "tokenizer.json").write_text(json.dumps(state))
    for teacher, message in (
        (None, "teacher.path: is required by algorithm.name=gkd"),
        ("nowhere", "teacher.path: model folder .*nowhere does not exist"),
        (
            "larger",
            "teacher.path: .*larger must have the vocabulary of the policy .*: 128 embeddings instead of 102",
        ),
        ("without", "teacher.path: model .*without has no tokenizer"),
        ("other", "'a' is token 73 instead of 72"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare_run(config(folder, teacher))
    assert not (folder / "runs").exists()


def test_an_algorithm_that_needs_no_teacher_does_not_look_at_it(folder):
    check_companions(
        config(folder, "nowhere"), objective_of({"name": "grpo"}).resolved(), str(folder / "student"), None
    )


def test_the_estimate_of_memory_has_the_teacher_and_its_distributions(folder):
    from transformers import AutoConfig

    plain = memory_estimate(config(folder, "teacher"), objective_of({"name": "grpo"}))
    parts = memory_estimate(config(folder, "teacher"), objective_of({"name": "gkd"}))
    assert parts["teacher"] == 4 * count_parameters(AutoConfig.from_pretrained(folder / "teacher"))
    assert parts["distributions"] == 10 * 3072 * 102 * 4
    assert parts["total"] == plain["total"] + parts["teacher"] + parts["distributions"]
