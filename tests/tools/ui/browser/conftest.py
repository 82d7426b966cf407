"""A real browser on a real server on runs that this code made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.ui.made import EVIL, finish, log_step, make_run, record_tokens, serving

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
REQUIRED = os.environ.get("ATOMRL_UI_TESTS") == "required"
"""Set by `make test-ui`: what is missing is then a failure, and not a reason to skip."""
PATIENCE_S = 120.0
CONFIG = {
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "eval": "train.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_completion_tokens": 6},
    "reward": {"functions": [{"function": "exact_match"}]},
    "train": {"steps": 4, "learning_rate": 1e-3},
}


def missing(what: str):
    if REQUIRED:
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def browser():
    for package in ("playwright", "starlette", "orjson", "uvicorn"):
        try:
            __import__(package)
        except ImportError:
            missing(f"{package} is not installed: make test-ui has an environment with it")
    from playwright.sync_api import sync_playwright

    path = os.environ.get("ATOMRL_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        missing("there is no chromium: apt-get install chromium, or name one in ATOMRL_BROWSER")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


def atomrl(*arguments: str, cwd: Path, **more):
    return subprocess.Popen([sys.executable, "-m", "atomrl.cli.main", *arguments], cwd=cwd, **more)


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """A folder with a tiny model, data and three runs: one that AtomRL made, one with a finding, one with a text that
    would run if it were taken for markup."""
    from tests.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("project")
    make_tiny_model(folder / "model")
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1), "data_source": "sums"} for k in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "c.yaml").write_text(json.dumps(CONFIG))
    made = atomrl("train", "c.yaml", "run_name=real", cwd=folder, stderr=subprocess.PIPE)
    assert made.wait(timeout=600) == 0, made.stderr.read().decode()
    for seed in (1, 2):
        seeded = make_run(folder / "runs" / f"seed-{seed}", seed=seed)
        record_tokens(seeded, 1)
        finish(seeded)
    sick = make_run(folder / "runs" / "sick", train={"steps": 10, "learning_rate": 0.5})
    finding = {"id": "length_limit", "severity": "error", "step": 4, "what": "Half is cut.", "advice": "Raise it."}
    (sick / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    evil = make_run(folder / "runs" / "evil", model={"path": EVIL}, algorithm={"name": EVIL})
    log_step(evil, 7, text=EVIL + "\u202e\u0007")
    (evil / "findings.jsonl").write_text(json.dumps({**finding, "what": EVIL, "advice": EVIL, "id": EVIL}) + "\n")
    with (evil / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 8, EVIL: 1.0, f"reward/{EVIL}/mean": 0.5, "critic/score/mean": 0.5}) + "\n")
    return folder


@pytest.fixture(scope="session")
def server(project):
    with serving(project / "runs", "--allow-launch", cwd=project) as (client, _):
        yield client


class Tab:
    """A tab that records errors, warnings and requests to other hosts. Set `may_miss` before you remove a run that it
    shows: requests for the run then fail with 404 at any time until the tab is closed."""

    def __init__(self, page, client) -> None:
        self.page, self.client, self.faults, self.may_miss = page, client, [], False
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", self._logged)
        page.on("request", lambda request: self._asked(request.url))
        page.goto(client.address)

    def _logged(self, line) -> None:
        if line.type in ("error", "warning") and not (self.may_miss and "404" in line.text):
            self.faults.append(line.text)

    def _asked(self, url: str) -> None:
        if not url.startswith(("data:", self.client.base)):
            self.faults.append(f"asks {url}")

    def open(self, path: str, wait: str | None = None):
        """Go to a page; `{name}` in its path is the id of a run."""
        for name in ("real", "seed-1", "seed-2", "sick", "evil"):
            if f"{{{name}}}" in path:
                path = path.replace(f"{{{name}}}", self.client.id_of(name))
        self.page.goto(f"{self.client.base}/#{path}")
        if wait:
            self.page.wait_for_selector(wait)
        return self.page


@pytest.fixture
def tab(browser, server):
    """Opens tabs; the test fails if one of them recorded a fault."""
    made = []

    def opened(client=server, **options) -> Tab:
        made.append(Tab(new_page(browser, **options), client))
        return made[-1]

    yield opened
    for one in made:
        one.page.context.close()
        assert one.faults == []


def new_page(browser, **options):
    """A page of a browser of its own, in which whatever is waited for has two minutes to come about."""
    context = browser.new_context(locale="en", **options)
    context.set_default_timeout(1000 * PATIENCE_S)
    return context.new_page()


def until(holds, seconds: float = PATIENCE_S) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)
