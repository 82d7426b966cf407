"""Steps beside other processes: with all threads, with one, and as the run chooses.

    python benchmarks/busy_machine.py                          the whole table, about 12 minutes on two cores
    python benchmarks/busy_machine.py --sizes quickstart       the quickstart's GRPO alone, about 4 minutes
    python benchmarks/busy_machine.py --conditions quiet one --rounds 3

Needs a machine that nobody else uses. In each condition (quiet, beside one and two processes that compute for ever,
and two runs at once, which both have the same setting) the settings take turns within one run, a step each; of the
quickstart's short steps, some in a row. The quickstart's model is trained for a few steps first, so that it ends its
completions; 77M is that of benchmarks/train_step.py, with that tokenizer. Prints seconds a step, the median and the
range, what the run chose over the best of the row (`first`: the steps in which it tries both, apart), and whether runs
of two steps end with the same weights with 1 thread and with all.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from atomrl.common import threads  # noqa: E402
from atomrl.config import load_config, merge_trees, read_yaml  # noqa: E402
from atomrl.trainer import Options, prepare_run  # noqa: E402

SETTINGS = ("all", "one", "chosen")
BUSY = {"quiet": 0, "one": 1, "two": 2, "runs": 0}
SIZES: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "77M": {
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 8, "max_completion_tokens": 24},
        "train": {"tokens_per_micro_batch": 512},
    },
}
IN_A_ROW = {"quickstart": 8, "77M": 1}
"""Steps of one turn: a trial of the chooser takes about a second, and should fall into the first turn alone."""
QUIET = {
    "eval": {"every_steps": 0, "before": False, "after": False},
    "checkpoint": {"every_steps": 0},
    "tracking": {"save_rollouts": False, "log_completions": 0},
}


def by_length(prompts: list[Any], completions: list[str], **columns: Any) -> list[float | None]:
    """So that groups are mixed, whatever the model says."""
    return [float(len(text) % 2) for text in completions]


def make_models(folder: Path) -> dict[str, Path]:
    """The quickstart's model after 60 steps of its warm start, and a random one of 77M."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    tree = merge_trees(read_yaml(ROOT / "configs" / "quickstart_sft.yaml"), QUIET)
    changes = {"run_name": "warm", "output_dir": str(folder), "train": {"steps": 60}}
    small = Path(prepare_run(load_config(merge_trees(tree, changes))).execute()["model"])
    large = shutil.copytree(small, folder / "77M")
    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
    config = Qwen2Config(
        vocab_size=AutoModelForCausalLM.from_pretrained(small).config.vocab_size,
        intermediate_size=2048, max_position_embeddings=512, **shape,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(large)
    return {"quickstart": small, "77M": large}


def tree_of(size: str, model: Path, folder: Path, steps: int) -> dict[str, Any]:
    tree = merge_trees(read_yaml(ROOT / "configs" / "quickstart.yaml"), QUIET)
    name = f"{size}-{os.getpid()}-{time.monotonic_ns()}"
    changes = {
        "run_name": name,
        "output_dir": str(folder),
        "model": {"path": str(model), "device": "cpu"},
        "reward": {"functions": ["by_length"]},
        "train": {"steps": steps, "schedule": "constant", "warmup_ratio": 0.0, "learning_rate": 1e-6},
    }
    return merge_trees(merge_trees(tree, changes), SIZES[size])


class Turns:
    """Gives each step its setting, and keeps its time.

    Args:
        order: condition and setting of each step.
        start: begins a condition with a setting; what it returns ends it.
    """

    def __init__(self, order: list[tuple[str, str]], start: Any) -> None:
        self.order, self.start, self.now, self.end = order, start, ("", ""), lambda: None
        self.found: dict[tuple[str, str], list[float]] = {}
        self.choosing: Any = None

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 1:
            self.choosing = threads.adapting
        elif step - 2 < len(self.order):
            self.found.setdefault(self.order[step - 2], []).append(metrics["timing_s/step"])
        if step - 1 < len(self.order):
            self._begin(*self.order[step - 1])
        else:
            self.end()

    def _begin(self, condition: str, setting: str) -> None:
        kept = (condition, setting if condition == "runs" else "")
        if kept != self.now:
            self.end()
            self.now, self.end = kept, self.start(condition, setting)
        use(setting, self.choosing)


def use(setting: str, choosing: Any) -> None:
    """Have the next step compute so."""
    threads.adapting = choosing if setting == "chosen" else None
    torch.set_num_threads(1 if setting == "one" else FULL)
    if choosing is not None:
        choosing.set = torch.get_num_threads()


def neighbour(size: str, model: Path, folder: Path, setting: str) -> None:
    """A run that goes on until it is killed."""
    choosing: list[Any] = []

    def after(step: int, metrics: Mapping[str, float]) -> None:
        if step == 1:
            choosing.append(threads.adapting)
            use(setting, choosing[0])
            (folder / f"ready-{os.getpid()}").touch()

    run(tree_of(size, model, folder, 100_000), after)


def run(tree: Mapping[str, Any], *callbacks: Any) -> Path:
    config = load_config(tree)
    prepare_run(config, {"by_length": by_length}).execute(Options(callbacks=callbacks))
    return config.run_dir


def measure(
    size: str, model: Path, folder: Path, conditions: list[str], rounds: int
) -> dict[tuple[str, str], list[float]]:
    def start(condition: str, setting: str) -> Any:
        commands = [[sys.executable, "-c", "while True: pass"]] * BUSY[condition]
        if condition == "runs":
            place = [str(model), str(folder), setting]
            commands = [[sys.executable, __file__, "--neighbour", size, *place]]
        processes = [subprocess.Popen(command) for command in commands]
        if condition == "runs":
            while not (folder / f"ready-{processes[0].pid}").exists() and processes[0].poll() is None:
                time.sleep(0.2)
        time.sleep(4 if condition == "quiet" else 1)

        def end() -> None:
            for process in processes:
                process.kill()
                process.wait()

        return end

    order = []
    for condition in conditions:
        # the first choice of a condition is shown apart: a trial is part of it
        turns = {"two": 2, "runs": 2}.get(condition, rounds)
        if condition == "runs":
            order += [(condition, setting) for setting in SETTINGS for _ in range(turns + (setting == "chosen"))]
        else:
            order += [(condition, "chosen"), *((condition, setting) for _ in range(turns) for setting in SETTINGS)]
    turns_of = Turns([turn for turn in order for _ in range(IN_A_ROW[size])], start)
    run(tree_of(size, model, folder, len(turns_of.order) + 1), turns_of)
    return turns_of.found


def weights(size: str, model: Path, folder: Path, count: int) -> str:
    """Return a hash of the weights after two steps with a number of threads."""

    def after(step: int, metrics: Mapping[str, float]) -> None:
        use("one" if count == 1 else "all", None)

    threads.FIXED_BY = ("PATH",)  # what is set: nothing is chosen
    torch.set_num_threads(count)
    path = run(tree_of(size, model, folder, 2), after)
    return hashlib.sha256((path / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--conditions", nargs="+", choices=list(BUSY), default=list(BUSY))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbour", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    shown = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what runs print
    if arguments.neighbour:
        size, model, folder, setting = arguments.neighbour
        neighbour(size, Path(model), Path(folder), setting)
        return 0
    if any(os.environ.get(name) for name in threads.FIXED_BY) or FULL < 2:
        raise SystemExit(f"nothing to choose: one core, or the environment sets {' or '.join(threads.FIXED_BY)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = make_models(folder)
        for size in arguments.sizes:
            found = measure(size, models[size], folder, arguments.conditions, arguments.rounds)
            print(
                f"\n{size}, seconds a step\n\n| | {FULL} threads | 1 thread | chosen | chosen over the best |",
                file=shown,
            )
            print("|---|---|---|---|---|", file=shown)
            for condition in arguments.conditions:
                rows = [found[condition, setting] for setting in SETTINGS]
                first, rows[2] = rows[2][: IN_A_ROW[size]], rows[2][IN_A_ROW[size] :]
                middle = [statistics.median(row) for row in rows]
                cells = [f"{m:.2f} ({min(row):.2f} to {max(row):.2f})" for m, row in zip(middle, rows, strict=True)]
                cells[2] += f", first {statistics.mean(first):.2f}"
                print(
                    f"| {condition} | {' | '.join(cells)} | {middle[2] / min(middle[:2]):.2f} |", file=shown, flush=True
                )
        for size in arguments.sizes:
            same = len({weights(size, models[size], folder, count) for count in (1, FULL)}) == 1
            print(
                f"\n{size}: weights with 1 and with {FULL} threads are {'the same' if same else 'NOT the same'}",
                file=shown,
            )
    return 0


FULL = torch.get_num_threads()

if __name__ == "__main__":
    sys.exit(main())
