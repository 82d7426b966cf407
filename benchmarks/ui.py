"""Speed of the web interface, in a real browser with generated runs of real sizes.

    python benchmarks/ui.py                       all of it, with the bars that it should stay under
    python benchmarks/ui.py --runs 5 --steps 500  small, to see that it works

It needs the environment of `make test-ui` and a chromium (`ATOMRL_BROWSER`). Figures are medians of `--repeat` tries
unless they are said to be something else.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.tools.ui.made import Client, make_run, record_tokens, serving

METRICS = 46
BARS = {
    "first paint of all runs, cold (s)": 8.0,
    "first paint of all runs, warm (s)": 1.5,
    "rollouts: index (s)": 3.0,
    "rollouts: first page (s)": 0.2,
    "rollouts: filter by text (s)": 0.5,
    "rollouts: filter by numbers (s)": 0.5,
    "a new point is seen, p95 (s)": 1.0,
    "server when idle, one page open (% of a core)": 1.0,
    "browser's heap (MB)": 100.0,
    "server's memory, at its peak (MB)": 250.0,
    "assets, compressed (KB)": 120.0,
    "a step while it is watched (% slower)": 1.0,
    "4,000 tokens: shown and coloured (s)": 0.2,
    "4,000 tokens: coloured by another number (s)": 0.2,
}


def write_runs(root: Path, runs: int, steps: int) -> None:
    """Runs with curves of the size of a real GRPO run's."""
    rng = random.Random(0)
    names = ["critic/score/mean", "train/accuracy", "actor/entropy", "response_length/mean", "timing_s/step"]
    names += [f"group_{n % 7}/metric_{n}" for n in range(METRICS - len(names))]
    for number in range(runs):
        folder = make_run(root / f"run-{number:03d}", steps=0, seed=number, train={"steps": steps})
        with (folder / "metrics.jsonl").open("a") as file:
            for step in range(1, steps + 1):
                file.write(json.dumps({"step": step} | {name: rng.random() for name in names}) + "\n")
        (folder / "summary.json").write_text('{"finished": true}')


def write_rollouts(folder: Path, count: int) -> None:
    """Completions of 3 KB, 64 a step, in groups of 8."""
    rng = random.Random(1)
    words = [f"word{n}" for n in range(500)]
    for step in range(1, count // 64 + 1):
        path = folder / "rollouts" / f"step_{step:06d}" / "train.jsonl"
        path.parent.mkdir(parents=True)
        with path.open("w") as file:
            for place in range(64):
                length = rng.randint(100, 300)
                row = {
                    "step": step, "prompt_id": f"0:{(step * 8 + place // 8) % 5000}", "completion_index": place % 8,
                    "data_source": "sums", "prompt": " ".join(words[(step + place // 8) % 400 :][:60]),
                    "ground_truth": "7", "completion": " ".join(rng.choices(words, k=length)),
                    "prompt_tokens": 60, "completion_tokens": length,
                    "token_ids": [rng.randint(0, 50_000) for _ in range(length)], "reward": float(rng.random() < 0.4),
                    "reward_parts": {"math": 1.0}, "reward_failures": {}, "advantage": rng.gauss(0, 1),
                    "finish_reason": "stop", "policy_version": step, "policy_versions": [step],
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_memory_mb(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def measure_rollouts(client: Client, repeat: int) -> dict[str, float]:
    run = client.id_of("run-000")

    def ask(query: str) -> float:
        return seconds(lambda: client.get(f"/api/runs/{run}/rollouts?limit=50&{query}").json)

    found = {"rollouts: index (s)": ask("")}
    questions = {
        "first page": "sort=reward&descending=true",
        "filter by text": "text=word17%20word",
        "filter by numbers": "min_reward=1&max_advantage=-1&sort=length",
    }
    for name, query in questions.items():
        found[f"rollouts: {name} (s)"] = statistics.median(ask(query) for _ in range(repeat))
    return found


def measure_pages(browser: Any, root: Path, client: Client, process: int, repeat: int) -> dict[str, float]:
    """First paints, live points, memory and idle work."""

    def painted(page: Any) -> None:
        page.goto(f"{client.base}/#/")
        page.reload()
        page.wait_for_selector("table.runs tbody tr")

    page = browser.new_page()
    page.goto(client.address)
    found = {"first paint of all runs, cold (s)": seconds(lambda: painted(page))}
    found["first paint of all runs, warm (s)"] = statistics.median(
        seconds(lambda: painted(page)) for _ in range(repeat)
    )
    before, started = cpu_seconds(process), time.perf_counter()
    page.wait_for_timeout(10_000)
    found["server when idle, one page open (% of a core)"] = (
        100 * (cpu_seconds(process) - before) / (time.perf_counter() - started)
    )
    live = make_run(root / "live", steps=3)
    page.wait_for_selector("text=live")
    page.goto(f"{client.base}/#/run/{client.id_of('live')}")
    page.wait_for_selector(".chart canvas")
    page.wait_for_timeout(500)
    waits = []
    for step in range(4, 4 + 10 * repeat):
        row = {"step": step, "critic/score/mean": step / 10, "timing_s/step": 1.0}
        with (live / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        waits.append(seconds(lambda step=step: page.wait_for_selector(f".plot[aria-label*='(step {step})']")))  # type: ignore[misc]
        time.sleep(random.random())
    found["a new point is seen, p95 (s)"] = sorted(waits)[int(0.95 * len(waits))]
    for path in ("/", f"/run/{client.id_of('run-000')}/charts", f"/run/{client.id_of('run-000')}/rollouts"):
        page.goto(f"{client.base}/#{path}")
        page.wait_for_timeout(2000)
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    found["browser's heap (MB)"] = session.send("Runtime.getHeapUsage")["usedSize"] / 2**20
    page.close()
    return found


COLOUR = """async (name) => {
  const select = [...document.querySelectorAll("select")].find((one) => [...one.options].some((o) => o.value === name));
  const started = performance.now();
  select.value = name;
  select.dispatchEvent(new Event("change", { bubbles: true }));
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return performance.now() - started;
}"""


SHOW = """async (count) => {
  const button = document.querySelectorAll(".members > li")[1].querySelector("button[aria-expanded]");
  const started = performance.now();
  button.click();
  while (document.querySelectorAll(".tokens.coloured span").length < count) await new Promise(requestAnimationFrame);
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const took = performance.now() - started;
  button.click();
  return took;
}"""


def measure_tokens(browser: Any, root: Path, client: Client, repeat: int) -> dict[str, float]:
    """The tokens of a completion of 4,000: from the click until they are painted, and until other colours are."""
    record_tokens(make_run(root / "long", steps=1), 1, times=4000 // 3 + 1)
    page = browser.new_page()
    page.goto(client.address)
    page.wait_for_selector("text=long")
    page.goto(f"{client.base}/#/run/{client.id_of('long')}/rollouts/1/train/1")
    page.wait_for_selector(".members li")
    times = [page.evaluate(SHOW, 4000) / 1000 for _ in range(repeat)]
    page.locator(".members > li").nth(1).get_by_role("button", name="Tokens").click()
    page.wait_for_selector(".tokens.coloured span >> nth=3999")
    colours = [page.evaluate(COLOUR, name) / 1000 for _ in range(repeat) for name in ("ratio", "reference")]
    page.close()
    return {
        "4,000 tokens: shown and coloured (s)": statistics.median(times),
        "4,000 tokens: coloured by another number (s)": statistics.median(colours),
    }


STEP = """
import statistics, sys, time
from pathlib import Path
import torch
from tests.tools.ui.made import log_step
from atomrl.tracking.reading.lines import acquire_lock
torch.set_num_threads(1)
folder, step = Path(sys.argv[1]), 100
acquire_lock(folder)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters())
rows = torch.randn(1024, 512)
for line in sys.stdin:
    times = []
    for step in range(step, step + 40):
        started = time.perf_counter()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        log_step(folder, step + 1)
        times.append(time.perf_counter() - started)
    step += 1
    print(statistics.median(times), flush=True)
"""


def measure_a_step(browser: Any, root: Path, client: Client, repeat: int) -> dict[str, float]:
    """A training step of some 0.1 s on one thread, and what a run writes at its end, in turns of 40 with a page that
    shows the run and without: what the server and the browser take away from it."""
    folder = make_run(root / "watched", steps=1)
    command = [sys.executable, "-c", STEP, str(folder)]
    changes = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None and run.stdout is not None

        def median() -> float:
            print(file=run.stdin, flush=True)
            return float(run.stdout.readline())  # type: ignore[union-attr]

        median()  # the first steps are slower than others
        for _ in range(2 * repeat):
            alone = median()
            page = browser.new_page()
            page.goto(client.address)
            page.wait_for_selector("text=watched")
            page.goto(f"{client.base}/#/run/{client.id_of(folder.name)}")
            page.wait_for_selector(".chart canvas")
            changes.append(median() / alone)
            page.close()
        run.stdin.close()
    return {"a step while it is watched (% slower)": 100 * (statistics.median(changes) - 1)}


def assets_kb() -> float:
    static = Path(__file__).parents[1] / "atomrl" / "tools" / "ui" / "static"
    sent = [path for path in static.rglob("*") if path.suffix in (".js", ".css", ".html", ".svg")]
    return sum(len(gzip.compress(path.read_bytes())) for path in sent) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=100_352)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    found = {"assets, compressed (KB)": assets_kb()}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        root = Path(folder)
        write_runs(root, arguments.runs, arguments.steps)
        write_rollouts(root / "run-000", arguments.rollouts)
        path = os.environ.get("ATOMRL_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        with serving(root) as (client, process):
            found |= measure_pages(browser, root, client, process.pid, arguments.repeat)
            found |= measure_rollouts(client, arguments.repeat)
            found |= measure_tokens(browser, root, client, arguments.repeat)
            found |= measure_a_step(browser, root, client, arguments.repeat)
            found["server's memory, at its peak (MB)"] = peak_memory_mb(process.pid)
        browser.close()
    for name, bar in BARS.items():
        print(f"{name:<48}{found[name]:>10.3f}   at most {bar:g}{'' if found[name] <= bar else '   MISSED'}")


if __name__ == "__main__":
    main()
