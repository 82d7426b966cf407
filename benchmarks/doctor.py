"""Six induced illnesses, each to be named by the doctor within 20 steps, and three healthy runs, to be silent on.

    python benchmarks/doctor.py [--out runs/doctor] [--warm-start MODEL] [--only NAME ...]

All runs are the quickstart's (configs/quickstart.yaml, with fewer prompts a step), from one warm start, through
`atomrl train`'s own code. Without `--warm-start` the quickstart's is made first, in fewer steps. A run has two forms
where an illness has: a reward that pays for length beside the real one or in its place, a limit that cuts some or all.
Prints a table; the runs stay in `--out`, with their `findings.jsonl`. Exit code 1 where one is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from atomrl.config import build_config, merge_trees, parse_overrides, read_yaml
from atomrl.protocols import WeightUpdate
from atomrl.reading.lines import read_metrics
from atomrl.rollout.native import NativeEngine
from atomrl.runs import prepare_run

ROOT = Path(__file__).parents[1]
STEPS = 20
SMALL = ("rollout.prompts_per_step=16", f"train.steps={STEPS}", "eval.before=false", "eval.after=false")
HEALTHY = [f"healthy, seed {seed}" for seed in range(3)]


def always_zero(completions: list[str], **columns: Any) -> list[float]:
    """A reward that is wrong in the commonest way."""
    return [0.0] * len(completions)


def length_reward(completions: list[str], **columns: Any) -> list[float]:
    """The longer the better."""
    return [len(completion) / 50 for completion in completions]


def illnesses(learning_rate: float) -> dict[str, tuple[str, list[str]]]:
    """Name -> (what the doctor should find, overrides of the config)."""
    pays = "{function: doctor.length_reward}"
    return {
        "learning rate x 100": ("learning_rate_too_high", [f"train.learning_rate={100 * learning_rate}"]),
        "reward always 0": ("constant_reward", ["reward.functions=[{function: doctor.always_zero}]"]),
        "reward pays for length": ("pays_for_length", [f"reward.functions=[{{function: strict_math}}, {pays}]"]),
        "reward is the length": ("pays_for_length", [f"reward.functions=[{pays}]"]),
        "stop token missing": ("missing_stop_token", []),
        "limit too short (20)": ("length_limit", ["rollout.max_completion_tokens=20"]),
        "limit too short (6)": ("length_limit", ["rollout.max_completion_tokens=6"]),
        "engine weights stale": ("stale_weights", []),
    }


@contextmanager
def stale_engine() -> Iterator[None]:
    """The engine keeps the weights that it got first, and says that it has the new ones."""
    load = NativeEngine.update_weights

    def load_once(self: NativeEngine, update: WeightUpdate) -> None:
        if update.version == 0:
            load(self, update)
        self.version = update.version

    NativeEngine.update_weights = load_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        NativeEngine.update_weights = load  # type: ignore[method-assign]


def without_stop_token(model: Path, out: Path) -> Path:
    """A copy of a model that names its padding as the end of a sequence, as models with a new chat format often do."""
    shutil.copytree(model, out, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        if (out / name).exists():
            settings = json.loads((out / name).read_text(encoding="utf-8")) | {"eos_token_id": 0}
            (out / name).write_text(json.dumps(settings), encoding="utf-8")
    return out


def one_run(name: str, model: Path, out: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """Run it and read what the doctor wrote."""
    folder = name.replace(" ", "-").replace(",", "")
    shutil.rmtree(out / folder, ignore_errors=True)
    if name == "stop token missing":
        model = without_stop_token(model, out / "model-without-stop-token")
    given = parse_overrides([*SMALL, f"output_dir={out}", f"run_name={folder}", f"model.path={model}", *overrides])
    config = build_config(merge_trees(read_yaml(ROOT / "configs/quickstart.yaml"), given))
    with stale_engine() if name == "engine weights stale" else nullcontext():
        prepare_run(config).execute()
    path = out / folder / "findings.jsonl"
    return read_metrics(path) if path.exists() else []


def warm_start(out: Path) -> Path:
    """A model that already answers in the right form, from the quickstart's recipe in fewer steps."""
    overrides = parse_overrides([f"output_dir={out}", "run_name=warm-start", "train.steps=400"])
    if not (out / "warm-start/model").exists():
        shutil.rmtree(out / "warm-start", ignore_errors=True)
        prepare_run(build_config(merge_trees(read_yaml(ROOT / "configs/quickstart_sft.yaml"), overrides))).execute()
    return out / "warm-start/model"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--warm-start", type=Path)
    parser.add_argument("--only", nargs="+")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    os.environ["PYTHONPATH"] = str(ROOT / "benchmarks")  # of processes that compute rewards
    model = arguments.warm_start or warm_start(arguments.out)
    rate = read_yaml(ROOT / "configs/quickstart.yaml")["train"]["learning_rate"]
    cases: dict[str, tuple[str | None, list[str]]] = {**illnesses(rate)}
    cases |= {name: (None, [f"seed={seed}"]) for seed, name in enumerate(HEALTHY)}
    lines, wrong = [], 0
    for name, (expected, overrides) in cases.items():
        if arguments.only and name not in arguments.only:
            continue
        found = {row["id"]: row["step"] for row in one_run(name, model, arguments.out, overrides)}
        good = expected in found and found[expected] <= STEPS if expected else not found
        wrong += not good
        others = ", ".join(f"{other} ({step})" for other, step in found.items() if other != expected)
        named = f"{expected}, step {found.get(expected, 'never')}" if expected else "nothing"
        lines.append(f"| {name} | {named} | {others or '-'} | {'as it should be' if good else 'WRONG'} |")
    print("| run | named | also | |\n|---|---|---|---|", *lines, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
