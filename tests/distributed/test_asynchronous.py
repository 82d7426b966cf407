"""The asynchronous loop with engines in Ray actors."""

from __future__ import annotations

import pytest

from atomrl.cli.main import main
from atomrl.tracking.reading.lines import read_metrics
from tests.trainer.test_recovery import PROBLEMS, folder, seen

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
assert folder  # a fixture


@pytest.mark.parametrize("policy", ["keep", "abort", "wait"])
def test_two_replicas_draw_while_the_trainer_learns(folder, policy):
    settings = f"asynchronous={{max_staleness: 2, on_update: {policy}, timeout_s: 120}}"
    cluster = "cluster={replicas: 2, resources: {rollout: {num_cpus: 0.1}}, timeout_s: 60}"
    assert main(["train", "c.yaml", settings, cluster, "data.eval=train.jsonl", "eval.every_steps=5"]) == 0
    run = folder / "runs" / "run"
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "async/staleness_max" in row]
    assert len(rows) == 12 and 0 < max(row["async/staleness_max"] for row in rows) <= 2
    counts = seen(run)
    assert len(counts) == PROBLEMS and set(counts.values()) == {2}, counts
