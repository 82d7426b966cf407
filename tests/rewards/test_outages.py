"""A function of one's own that asks a service: its calls are repeated while that is away; and a whole run over it."""

from __future__ import annotations

import json

import pytest

from atomrl.cli.main import main
from atomrl.common import outages
from atomrl.config import RewardConfig
from atomrl.rewards.compute import build_rewards
from atomrl.rewards.errors import RewardStop
from tests.arithmetic import arithmetic_run, trained_weights
from tests.rewards.batches import failures, rollouts, values
from tests.rewards.services import Service, send
from tests.rewards.test_service_runs import http, served
from tests.tiny import make_tiny_model


@pytest.fixture
def asking(monkeypatch, tmp_path):
    monkeypatch.setattr(outages, "FIRST_S", 0.02)
    monkeypatch.setattr(outages, "LOG_EVERY_S", 0.0)
    built = []

    def make(how, times, wait_s=60.0):
        args = {"folder": str(tmp_path), "how": how, "times": times}
        item = {"function": "tests.rewards.misbehaving.asks", "args": args}
        built.append(build_rewards(RewardConfig(functions=[item], wait_s=wait_s), patience=None))
        return built[-1]

    yield make
    for rewards in built:
        rewards.close()


@pytest.mark.parametrize("how", ["refused", "wrapped", "503", "slow"])
def test_calls_are_repeated_until_the_service_answers(asking, how, caplog):
    rewards = asking(how, times=3)
    assert values(rewards(rollouts({"a": ["x", "yy"]}))) == ((1.0, 2.0),)
    assert "the service of reward 'asks' is unavailable (" in caplog.text and "is available again" in caplog.text


def test_a_service_that_stays_unavailable_ends_the_run(asking):
    with pytest.raises(RewardStop, match=r"'asks'.*reward.wait_s=0.2"):
        asking("refused", times=10**6, wait_s=0.2)(rollouts({"a": ["x"]}))


@pytest.mark.parametrize("how", ["alarm", "pipe", "own"])
def test_errors_of_its_own_are_no_outage(asking, how):
    assert [kind for kind, _ in failures(asking(how, times=10**6)(rollouts({"a": ["x"]})))] == ["error"]


def test_a_run_whose_service_stays_unavailable_ends_and_continues_as_if_it_had_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SERVICE_KEY", "k")
    monkeypatch.setattr(outages, "FIRST_S", 0.02)
    folder, service = make_tiny_model(tmp_path / "model", scale=0.2), Service(served)
    one = ["eval.before=false", "reward.wait_s=0.3"]
    assert main(["train", *arithmetic_run(folder, "whole", http(service)), *one]) == 0

    def fails_in_the_third_step(handler, body):
        (served if len(service.requests) <= 10 else send(b"<html>Bad gateway", 502))(handler, body)

    service.requests.clear()
    service.usual = fails_in_the_third_step
    run = ["train", *arithmetic_run(folder, "broken", http(service)), *one]
    assert main(run) == 2
    said = capsys.readouterr().err
    assert "has been unavailable for" in said and "HTTP 502: <html>Bad gateway" in said
    metrics = (tmp_path / "runs" / "broken" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]
    service.usual = served
    assert main([*run, "--resume"]) == 0
    assert trained_weights(folder, "broken") == trained_weights(folder, "whole")
    service.close()
