"""A run whose trainer, reward model and engines are actors, with a judge, is killed and goes on."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from atomrl.models.loading import load_tokenizer
from atomrl.models.scalar import load_scalar, save_scalar
from benchmarks.faults import TrainingRun, prepare
from tests.rewards.services import Service, judgement

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
PROBLEMS, COMPLETIONS, STEPS = 64, 4, 32  # four problems a step: two epochs


@pytest.fixture
def service():
    def judge(handler: BaseHTTPRequestHandler, body: Any) -> None:
        asked = body["messages"][0]["content"]
        judgement(json.dumps({"score": sum(map(ord, asked)) % 8}))(handler, body)

    service = Service(judge)
    yield service
    service.close()


@pytest.fixture
def folder(tmp_path, service) -> Path:
    prepare(tmp_path)
    model = load_scalar(tmp_path / "model", dtype="float32")
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    save_scalar(model, load_tokenizer(tmp_path / "model"), tmp_path / "judge")
    config = yaml.safe_load((tmp_path / "c.yaml").read_text())
    judge = {"base_url": f"{service.url}/v1", "model": "m", "prompt": "{prompt} {completion}"}
    config["reward"] = {
        "functions": [
            {"function": "reward_model", "args": {"path": str(tmp_path / "judge"), "dtype": "float32"}},
            {"function": "llm_judge", "weight": 0.1, "args": judge},
        ]
    }
    config["cluster"]["resources"]["reward"] = {"num_cpus": 0.1}
    config["train"]["steps"] = STEPS
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def killed_and_resumed(folder: Path, *more: str) -> TrainingRun:
    run = TrainingRun(folder, "run", *more)
    try:
        run.until_step(10)  # there are checkpoints of 4 and 8
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert run.gone_after("ours", 30) < 10
        run = TrainingRun(folder, "run", *more, "--resume")
        assert run.process.wait(900) == 0, run.log.read_text()[-2000:]
    finally:
        run.end()
    return run


def test_step_by_step_to_the_last_bit(folder):
    whole = TrainingRun(folder, "whole")
    try:
        assert whole.process.wait(900) == 0, whole.log.read_text()[-2000:]
    finally:
        whole.end()
    assert killed_and_resumed(folder).weights() == whole.weights()


def test_asynchronous_with_nothing_lost_or_doubled(folder):
    run = killed_and_resumed(folder, "asynchronous={max_staleness: 2}")
    stored = sorted((run.out / "run" / "checkpoints").glob("step_*/progress.json"))
    assert json.loads(stored[-1].read_text())["pending"] == []
    rows = [
        json.loads(line)
        for path in (run.out / "run").glob("rollouts/*/train.jsonl")
        for line in path.read_text().splitlines()
    ]
    groups = Counter(row["prompt_id"] for row in rows)
    assert set(groups.values()) == {COMPLETIONS} and len(groups) == 2 * PROBLEMS
    problems = Counter(name.partition(":")[2] for name in groups)
    assert len(problems) == PROBLEMS and set(problems.values()) == {2}
    assert not any(row.get("reward_failures") for row in rows)
