"""Runs for the tests of the web interface, and a server on them."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from atomrl.common.files import write_text

EVIL = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
"""Markup that would run if a page inserted a text as HTML."""


def make_run(folder: Path, steps: int = 6, seed: int = 0, name: str | None = None, **config: Any) -> Path:
    """A run's folder as a run of GRPO leaves it, which has been killed."""
    folder.mkdir(parents=True)
    tree = {
        "run_name": name or folder.name, "output_dir": str(folder.parent), "seed": seed,
        "model": {"path": "model"}, "data": {"train": "chain"},
        "algorithm": {"name": "grpo"}, "train": {"steps": 10, "learning_rate": 1e-3},
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(tree | config))
    (folder / "env.json").write_text(
        json.dumps({"command": "atomrl train c.yaml", "time": "2026-01-01T00:00:00+00:00"})
    )
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"step": 0, "val-core/sums/acc/mean@1": 0.25}) + "\n")
    for step in range(1, steps + 1):
        log_step(folder, step)
    return folder


def finish(folder: Path) -> None:
    """Write the `summary.json` of a run that reached its last step."""
    (folder / "summary.json").write_text(json.dumps({"finished": True}))


def log_step(folder: Path, step: int, text: str = "it is") -> None:
    """One more step, with its completions."""
    row = {
        "step": step, "critic/score/mean": step / 10, "train/accuracy": step / 20, "actor/entropy": 1 / step,
        "response_length/mean": 5.0, "by_group/frac_mixed": 0.5, "actor/grad_norm": 0.1, "timing_s/step": 2.0,
        "timing_s/gen": 1.0,
    }  # fmt: skip
    rows = [
        {
            "step": step, "prompt_id": f"0:p{prompt}", "completion_index": index, "data_source": "sums",
            "prompt": f"{prompt} + {index // 4} = ?", "ground_truth": str(prompt), "completion": f"{text} {index}",
            "prompt_tokens": 4, "completion_tokens": 3 + index, "token_ids": [5, 6, 7],
            "reward": float(index < prompt + 1), "reward_parts": {"exact_match": 1.0}, "reward_failures": {},
            "advantage": (1.0 if index < prompt + 1 else -1.0), "finish_reason": "length" if index == 3 else "stop",
            "policy_version": step - 1, "policy_versions": [step - 1],
        }
        for prompt in range(2)
        for index in range(4)
    ]  # fmt: skip
    lines = "".join(json.dumps(one) + "\n" for one in rows)
    write_text(folder / "rollouts" / f"step_{step:06d}" / "train.jsonl", lines)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def record_tokens(folder: Path, step: int, times: int = 1) -> None:
    """The recorded tokens of a step's first group: the third token of the second completion is clipped, the second of
    the third is masked, and the fourth was cut to two. `times`: each completion as often over."""
    from safetensors.numpy import save_file

    sizes = [3, 3, 3, 2]
    mask, clipped = np.ones(11, bool), np.zeros(11, bool)
    mask[7], clipped[5] = False, True
    log_ratio = np.linspace(-0.5, 0.5, 11, dtype=np.float32) * mask
    tables = {
        "row/lengths": np.array(sizes, np.int32) + 4, "row/prompt_lengths": np.full(4, 4, np.int32),
        "row/trajectory_index": np.arange(4, dtype=np.int32), "row/group_ids": np.zeros(4, np.int32),
        "row/rewards": np.array([1, 0, 0, 0], np.float32), "row/prompt": np.zeros(4, np.int32),
        "row/update": np.zeros(4, np.int32),
        "token/tokens": np.array([5, 6, 7] * 3 + [5, 6], np.int32), "token/loss_mask": mask, "token/clipped": clipped,
        "token/advantages": np.repeat(np.array([1, -1, -1, -1], np.float32), sizes) * mask,
        "token/logprobs": -np.ones(11, np.float32), "token/ref_logprobs": np.full(11, -1.5, np.float32),
        "token/log_ratio": log_ratio, "token/gap": np.full(11, 1e-4, np.float32) * mask,
        "token/loss": np.where(mask, 0.25, 0).astype(np.float32), "prompt_tokens": np.arange(4, dtype=np.int32),
        "prompt_sizes": np.array([4], np.int32),
    }  # fmt: skip
    path = folder / "rollouts" / f"step_{step:06d}" / "train.jsonl"
    if times > 1:
        for name in [name for name in tables if name.startswith("token/")]:
            rows = np.split(tables[name], np.cumsum(sizes)[:-1])
            tables[name] = np.concatenate([np.tile(row, times) for row in rows])
        tables["row/lengths"] = np.array(sizes, np.int32) * times + 4
        write_text(path, path.read_text().replace("[5, 6, 7]", json.dumps([5, 6, 7] * times)))
    save_file(tables, path.with_name("tokens.safetensors"), {"state": "{}"})


def log_evaluation(folder: Path, step: int, right: int) -> None:
    """An evaluation of four prompts, of which the first `right` were answered well."""
    rows = [
        {
            "step": step, "prompt_id": f"eval:{prompt}", "completion_index": 0, "data_source": "sums",
            "prompt": f"{prompt} + 1 = ?", "ground_truth": str(prompt + 1),
            "completion": f"it is {prompt + 1 if prompt < right else 'unclear'}", "prompt_tokens": 4,
            "completion_tokens": 3, "token_ids": [5, 6, 7], "reward": float(prompt < right), "reward_parts": {},
            "reward_failures": {}, "advantage": None, "finish_reason": "stop", "policy_version": step,
            "policy_versions": [step],
        }
        for prompt in range(4)
    ]  # fmt: skip
    path = folder / "rollouts" / f"step_{step:06d}" / "eval.jsonl"
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_study(folder: Path, trials: int = 8) -> Path:
    """A study of eight trials as `atomrl tune` leaves it, of which each fourth was ended early and the last failed."""
    from optuna.trial import TrialState

    from atomrl.tools.tuning import is_worse_half, open_study

    folder.mkdir(parents=True)
    space = {
        "train.learning_rate": {"low": 1e-4, "high": 0.1, "log": True, "step": None},
        "algorithm.name": ["grpo", "rloo"],
    }
    about = {"config": {}, "space": space, "metric": "critic/score/mean", "window": 10}
    (folder / "study.yaml").write_text(json.dumps(about))
    study = open_study(folder)
    for number in range(trials):
        study.enqueue_trial(
            {
                "train.learning_rate": 10 ** (-4 + 3 * number / trials),
                "algorithm.name": '"grpo"' if number % 2 else '"rloo"',
            }
        )
        trial = study.ask()
        rate = trial.suggest_float("train.learning_rate", 1e-4, 0.1, log=True)
        trial.suggest_categorical("algorithm.name", ['"grpo"', '"rloo"'])
        value = 0.9 - abs(np.log10(rate) + 2.5) / 4 + 0.02 * (number % 2)
        make_run(folder / "runs" / f"trial_{number:03d}", steps=1, train={"steps": 10, "learning_rate": rate})
        trial.set_user_attr("seconds", 12.5 + number)
        trial.report(value - 0.2, 1)
        if number == trials - 1:
            study.tell(trial, state=TrialState.FAIL)
        elif is_worse_half(study, number, 1):
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, value)
    finals = {"as_it_is": [0.7, 0.72], "trial_004": [0.8, 0.84]}
    note = "trial_004 is better than the original config: +0.1100 ± 0.0500 (95%), over 2 fresh seeds"
    result = {"seeds": [1000, 1001], "finals": finals, "winner": "trial_004", "better": True, "note": note}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a server, with its token unless told otherwise; a path is sent as it is given."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.address, self.host, self.port = address, parts.hostname or "", parts.port or 0
        self.base = f"http://{parts.netloc}"
        opened = self.ask("GET", f"/?{parts.query}")
        self.cookie = opened.headers["set-cookie"].partition(";")[0]

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in ({"Host": f"localhost:{self.port}"} | headers).items():
                connection.putheader(name.replace("_", "-"), value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, Cookie=self.cookie, **headers)

    def post(self, path: str, content: Any, **headers: str) -> Answer:
        own = {"Cookie": self.cookie, "Content_Type": "application/json", "X_Atomrl": "1"}
        return self.ask("POST", path, json.dumps(content).encode(), **(own | headers))

    def id_of(self, name: str) -> str:
        return str(next(run["id"] for run in self.get("/api/runs").json["runs"] if run["name"] == name))


@contextmanager
def serving(folder: Path, *options: str, cwd: Path | None = None) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """`atomrl ui` on a folder."""
    command = [sys.executable, "-m", "atomrl.cli.main", "ui", str(folder), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd)
    try:
        assert process.stdout is not None
        yield Client(process.stdout.readline().split()[1]), process
    finally:
        process.terminate()
        process.wait(timeout=300)
        process.stdout.close()
