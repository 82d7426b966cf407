"""How fast the web interface is, with a real browser on made runs of real sizes.

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

from tests.ui.made import Client, make_run, record_tokens, serving

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


def measure_tokens(browser: Any, root: Path, client: Client, repeat: int) -> dict[str, float]:
    """The tokens of a completion of 4,000: from the click until they stand there, and until other colours do."""
    record_tokens(make_run(root / "long", steps=1), 1, times=4000 // 3 + 1)
    page = browser.new_page()
    page.goto(client.address)
    page.wait_for_selector("text=long")
    page.goto(f"{client.base}/#/run/{client.id_of('long')}/rollouts/1/train/1")
    page.wait_for_selector(".members li")
    button = page.locator(".members > li").nth(1).get_by_role("button", name="Tokens")

    def shown() -> None:
        button.click()
        page.wait_for_selector(".tokens.coloured span >> nth=3999")

    times = []
    for _ in range(repeat):
        times.append(seconds(shown))
        button.click()
    shown()
    colours = [page.evaluate(COLOUR, name) / 1000 for _ in range(repeat) for name in ("ratio", "reference")]
    page.close()
    return {
        "4,000 tokens: shown and coloured (s)": statistics.median(times),
        "4,000 tokens: coloured by another number (s)": statistics.median(colours),
    }


STEP = """
import sys, time
from pathlib import Path
from tests.ui.made import log_step
from atomrl.reading.lock import hold
folder, busy, times = Path(sys.argv[1]), [], []
hold(folder)
for step in range(100, 200):
    started = time.process_time(), time.perf_counter()
    sum(n * n for n in range(1_000_000))
    log_step(folder, step)
    times.append(time.perf_counter() - started[1])
print(sorted(times)[50])
"""


def measure_a_step(browser: Any, root: Path, client: Client, repeat: int) -> dict[str, float]:
    """A stand-in for a training step (0.1 s of work on one core, then what a run writes), alone and while a page shows
    it: what the server and the browser take away from it."""
    alone, watched = [], []
    for number in range(repeat):
        folder = make_run(root / f"step-{number}", steps=1)

        def run(folder: Path = folder) -> float:
            done = subprocess.run([sys.executable, "-c", STEP, str(folder)], capture_output=True, text=True, check=True)
            return float(done.stdout)

        alone.append(run())
        shutil.rmtree(folder)
        make_run(folder, steps=1)
        page = browser.new_page()
        page.goto(client.address)
        page.wait_for_selector(f"text=step-{number}")
        page.goto(f"{client.base}/#/run/{client.id_of(folder.name)}")
        page.wait_for_selector(".chart canvas")
        watched.append(run())
        page.close()
    least = min(alone)
    return {"a step while it is watched (% slower)": 100 * (min(watched) - least) / least}


def assets_kb() -> float:
    static = Path(__file__).parents[1] / "atomrl" / "ui" / "static"
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
