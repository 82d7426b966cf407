"""Batches that say nothing, or nonsense: losses stay finite, weights stay where they are, and it is counted."""

import math
from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.backends.local import LocalBackend
from atomrl.backends.optimizer import Diverged
from atomrl.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from atomrl.data.rows import to_rows
from atomrl.trainer.loop import compute_advantages, update_policy
from atomrl.trainer.report.metrics import rollout_metrics, update_metrics
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.types import Problem, Segment, Trajectory
from tests.backends.batches import make_algorithm, make_batch, weights_of
from tests.tiny import make_tiny_model

NAN = float("nan")
WITH_REFERENCE = make_algorithm(needs=frozenset({"ref_logprobs"}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("signal") / "base"))


TWO_UPDATES = RunConfig(
    run_name="two",
    model=ModelConfig(path="-"),
    data=DataConfig(train="-"),
    rollout=RolloutConfig(prompts_per_step=2, completions_per_prompt=1),
    train=TrainConfig(rows_per_update=1),
)


def make(folder, **train):
    config = TrainConfig(**({"learning_rate": 0.01, "weight_decay": 0.1} | train))
    return LocalBackend(ModelConfig(path=folder, dtype="float32"), config, WITH_REFERENCE, total_updates=20)


def completion(tokens, origin="model", finish="stop"):
    logprobs = tuple(-1.0 for _ in tokens) if origin == "model" else None
    return Segment(origin=origin, token_ids=tuple(tokens), logprobs=logprobs, policy_version=0), finish


def rewarded(groups, rewards, prompt=(5, 6, 7)):
    return [
        Trajectory(
            prompt_id=str(p),
            index=index,
            problem=Problem(problem_id=str(p), prompt="p", ground_truth=""),
            segments=(Segment(origin="prompt", token_ids=prompt), segment),
            text="x",
            finish_reason=finish,
            reward=reward,
            reward_parts={"r": reward},
            part_weights={"r": 1.0},
        )
        for p, (group, given) in enumerate(zip(groups, rewards, strict=True))
        for index, ((segment, finish), reward) in enumerate(zip(group, given, strict=True))
    ]


FULL, EMPTY = completion((8, 9, 10)), completion(())
MASKED = completion((8, 9, 10), origin="environment")
CUT = completion((8, 9, 10, 11), finish="length")
SILENT = {
    "empty completions": (rewarded([[EMPTY, EMPTY]] * 2, [[1.0, 0.0]] * 2), {"training/updates": 0}),
    "all tokens masked": (rewarded([[MASKED, MASKED]] * 2, [[1.0, 0.0]] * 2), {"training/updates": 0}),
    "groups of one": (rewarded([[FULL], [CUT]], [[1.0], [0.0]]), {"actor/empty_updates": 2}),
    "equal rewards": (
        rewarded([[FULL, CUT]] * 2, [[0.3, 0.3]] * 2),
        {"actor/empty_updates": 2, "by_group/frac_mixed": 0, "by_group/frac_all_good": 1},
    ),
    "all overlong": (
        rewarded([[CUT, CUT]] * 2, [[0.0, 0.0]] * 2),
        {"actor/empty_updates": 2, "response_length/clip_ratio": 1, "by_group/frac_all_bad": 1},
    ),
    "no rewards": (rewarded([[FULL, CUT]] * 2, [[None, None]] * 2), {"training/updates": 0, "reward/missing": 4}),
    "prompts that fill the row": (
        rewarded([[FULL, CUT]], [[1.0, 0.0]], prompt=tuple(range(5, 25))),
        {"training/updates": 0},
    ),
}


def step(backend, algorithm, batch, number):
    rows = to_rows(batch, max_row_tokens=16)
    credited = compute_advantages(backend, algorithm, rows, {}, TWO_UPDATES, Stopwatch())
    results = update_policy(backend, algorithm, credited, TWO_UPDATES, number, Stopwatch())
    return rollout_metrics(batch, credited) | update_metrics(results)


@pytest.mark.parametrize("case", SILENT)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "gdpo", "kl_cov"])
def test_without_a_signal_nothing_moves(folder, name, case):
    """Also when Adam has momentum and weight decay is on."""
    algorithm = objective_of({"name": name}).resolved(report_entropy=True, max_completion_tokens=16)
    backend = make(folder)
    batch, counted = SILENT[case]
    lively = rewarded([[FULL, CUT], [CUT, FULL]], [[1.0, 0.0], [0.5, 0.25]])
    before_any = {key: tensor.clone() for key, tensor in weights_of(backend).items()}
    step(backend, algorithm, lively, 1)
    before = {key: tensor.clone() for key, tensor in weights_of(backend).items()}
    assert any(not torch.equal(tensor, before_any[key]) for key, tensor in before.items())
    metrics = step(backend, algorithm, batch, 2)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights_of(backend).items())
    for key, value in counted.items():
        assert metrics[key] == value, (key, metrics)
    step(backend, algorithm, lively, 3)
    moved = [not torch.equal(tensor, before[key]) for key, tensor in weights_of(backend).items()]
    assert any(moved), "and then it goes on"


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "gdpo", "kl_cov"])
def test_the_rounding_of_old_log_probs_is_no_signal(folder, name, monkeypatch):
    """On some CPUs, and in bfloat16, a row's log-probs depend on the rows that it is computed with."""
    algorithm = objective_of({"name": name}).resolved(report_entropy=True, max_completion_tokens=16)
    backend = make(folder)
    exact = backend.forward_only

    def rounded(rows, needs):
        rows = exact(rows, needs)
        return rows if rows.old_logprobs is None else replace(rows, old_logprobs=rows.old_logprobs * (1 + 1e-6))

    monkeypatch.setattr(backend, "forward_only", rounded)
    before = {key: tensor.clone() for key, tensor in weights_of(backend).items()}
    batch, counted = SILENT["groups of one"]
    metrics = step(backend, algorithm, batch, 1)
    assert metrics["actor/empty_updates"] == counted["actor/empty_updates"], metrics
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights_of(backend).items())


def test_three_gradients_in_a_row_that_are_not_finite_stop_the_run(folder):
    backend, algorithm = make(folder), make_algorithm()
    poisoned = make_batch(advantages=torch.full_like(make_batch().advantages, NAN))
    before = {key: tensor.clone() for key, tensor in weights_of(backend).items()}
    backend.train_step(poisoned, algorithm)
    backend.train_step(poisoned, algorithm)
    backend.train_step(make_batch(), algorithm)
    assert any(not torch.equal(tensor, before[key]) for key, tensor in weights_of(backend).items())
    for _ in range(2):
        assert backend.train_step(poisoned, algorithm)["actor/skipped_updates"].value == 1
    with pytest.raises(Diverged, match=r"3 updates.*update 5.*not finite"):
        backend.train_step(poisoned, algorithm)


def test_a_resumed_run_continues_counting(folder, tmp_path):
    backend, algorithm = make(folder), make_algorithm()
    poisoned = make_batch(advantages=torch.full_like(make_batch().advantages, NAN))
    backend.train_step(poisoned, algorithm)
    backend.train_step(poisoned, algorithm)
    backend.save(tmp_path)
    resumed = make(folder)
    resumed.load(tmp_path)
    with pytest.raises(Diverged):
        resumed.train_step(poisoned, algorithm)


def test_skipped_updates_of_a_step_are_summed(folder):
    """Two of three: not two thirds."""
    backend, algorithm = make(folder), make_algorithm()
    good, bad = make_batch(), make_batch(advantages=torch.full_like(make_batch().advantages, NAN))
    metrics = update_metrics([backend.train_step(batch, algorithm) for batch in (bad, good, bad)])
    assert metrics["actor/skipped_updates"] == 2 and metrics["training/updates"] == 3
