"""Runs whose reward is a service: the same as with a function, and what it costs; from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atomrl.cli.main import main
from tests.arithmetic import arithmetic_run, trained_weights
from tests.light_rewards import code_points
from tests.rewards.services import Service, answer, drop, judgement, send
from tests.tiny import make_tiny_model

SECRET = "hush-9f86d081884c"


def served(handler, body):
    answer({"scores": code_points(None, body["completions"])})(handler, body)


def judged(handler, body):
    text = body["messages"][0]["content"].partition(">\n")[2].partition("\n</")[0]
    judgement(json.dumps({"score": code_points(None, [text])[0]}))(handler, body)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("run") / "model", scale=0.2)


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", SECRET)
    service = Service(served)
    yield service
    service.close()


def train(folder: Path, name: str, reward: str, *more: str) -> int:
    return main(["train", *arithmetic_run(folder, name, reward), "eval.before=false", *more])


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    lines = (folder.parent / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def http(service: Service, more: str = "") -> str:
    return f"{{function: http, args: {{url: '{service.url}', batch_size: 5, api_key_env: SERVICE_KEY{more}}}}}"


def judge(service: Service, more: str = "") -> str:
    args = f"base_url: '{service.url}/v1', model: m, prompt: '{{prompt}} {{completion}}', api_key_env: SERVICE_KEY"
    prices = "price_per_million_input_tokens: 10, price_per_million_output_tokens: 100"
    return f"{{function: llm_judge, args: {{{args}, max_tokens: 20, {prices}{more}}}}}"


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_a_run_is_the_same_as_with_the_function_itself(folder, service, capfd):
    assert train(folder, "here", "{function: tests.light_rewards.code_points}", "train.steps=2") == 0
    service.deeds = [drop, send(SECRET.encode(), 503)]
    assert train(folder, "there", http(service), "train.steps=2") == 0
    assert trained_weights(folder, "there") == trained_weights(folder, "here")
    last = metrics(folder, "there")[-1]
    # 16 completions by 5 are 4 requests in each of 2 steps
    assert (last["reward/http/requests"], last["reward/http/retries"], last["reward/missing"]) == (10, 2, 0)
    summary = json.loads((folder.parent / "runs" / "there" / "summary.json").read_text())
    assert summary["reward/http/requests"] == 10
    assert all(headers["Authorization"] == f"Bearer {SECRET}" for headers, _, _ in service.requests)
    shown = capfd.readouterr()
    assert not files_with(SECRET, folder.parent) and SECRET not in shown.out + shown.err
    assert files_with("SERVICE_KEY", folder.parent / "runs" / "there")  # its name is in the config


def test_failures_are_no_zeros_and_are_counted(folder, service):
    service.deeds = [send(SECRET.encode(), 400)]  # repeats the key
    assert train(folder, "gaps", http(service), "train.steps=1") == 0
    (only,) = metrics(folder, "gaps")
    lost = only["reward/http/errors"]  # 16 completions are sent as 5, 5, 5 and 1, at once: either may come first
    assert lost in (1, 5) and (only["reward/missing"], only["train/rows"]) == (lost, 16 - lost)
    rollouts = next((folder.parent / "runs" / "gaps" / "rollouts").rglob("*.jsonl")).read_text()
    assert "HTTP 400: ***" in rollouts and not files_with(SECRET, folder.parent)


def test_a_judge_stops_the_run_at_its_bound_and_the_run_continues_with_a_higher_one(folder, service, capsys):
    service.usual = judged
    assert train(folder, "judged", judge(service, ", max_cost: 0.08"), "checkpoint.every_steps=1") == 2
    assert "max_cost=0.08 could be exceeded" in capsys.readouterr().err
    done = metrics(folder, "judged")
    cost = 0.002  # 100 tokens in and 10 out
    assert 1 <= len(done) < 4
    for row in done:
        assert row["reward/llm_judge/cost"] == pytest.approx(cost * row["reward/llm_judge/requests"])
        assert row["reward/llm_judge/judge_input_tokens"] == 100 * row["reward/llm_judge/requests"]
    stopped_at = len(service.requests)
    assert stopped_at * cost <= 0.08
    more = ("checkpoint.every_steps=1", "--resume", "--allow-changes")
    assert train(folder, "judged", judge(service, ", max_cost: 9"), *more) == 0
    summary = json.loads((folder.parent / "runs" / "judged" / "summary.json").read_text())
    assert summary["finished"] and summary["reward/llm_judge/requests"] == len(service.requests) > stopped_at
    assert summary["reward/llm_judge/cost"] == pytest.approx(cost * len(service.requests))
    assert not files_with(SECRET, folder.parent)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("{url: 'ftp://x'}", "reward 'http': args.url: must be the address of a service"),
        ("{url: 'http://x', api_key_env: NOT_SET_ANYWHERE}", "variable NOT_SET_ANYWHERE is not set"),
    ],
)
def test_a_dry_run_says_what_is_wrong(folder, args, message, capsys):
    assert train(folder, "dry", f"{{function: http, args: {args}}}", "--dry-run") == 2
    assert message in capsys.readouterr().err


def test_from_the_command_line(tmp_path, service, capsys):
    rows = [{"prompt": "p", "completion": text, "ground_truth": ""} for text in ("a", "b", "a")]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["reward", "http", str(file), "--out", str(out), f"url={service.url}"]) == 0
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [6.0, 0.0, 6.0]
    assert "reward/http/requests: 1" in capsys.readouterr().out
    service.usual = judged
    arguments = [f"base_url={service.url}/v1", "model=m", "prompt={prompt} {completion}"]
    assert main(["reward", "llm_judge", str(file), "--out", str(out), *arguments]) == 0
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [6.0, 0.0, 6.0]
    assert "reward/llm_judge/judge_cached: 1" in capsys.readouterr().out
