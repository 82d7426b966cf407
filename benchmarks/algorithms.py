"""Every online algorithm on one task, from one warm-started checkpoint, with equal tokens.

    python benchmarks/algorithms.py                          # all of atomrl.algorithms, three seeds
    python benchmarks/algorithms.py grpo gspo --seeds 0      # some of them
    python benchmarks/algorithms.py examples/objectives/*.yaml
    python benchmarks/algorithms.py --docs                   # what is finished, into docs/
    python benchmarks/algorithms.py --docs --plot            # table and pictures of docs/ anew, from its numbers

A run is an algorithm's own config (configs/algorithms/NAME.yaml) with a few keys changed for all alike (`sized`): 128
completions a step, a constant learning rate (so that it does not matter to it how many steps a run has), the model, the
seed. It ends with the first step at which the completions that were drawn, for training, for groups that were refused
and for baselines, have `--tokens` tokens together. For that its engine is the native one with a counter, which asks the
loop to stop as Ctrl-C does. Held-out problems are the same before and after; three seeds have three sets of them.

Each run is a process of its own and leaves OUT/NAME-seed-S.json; one that is there, made with the same config, is not
made again. The gain's standard error is that of the problems' differences, after minus before, of all seeds together.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from atomrl.algorithms import ALGORITHMS, PREFERENCES
from atomrl.config import load_config, merge_trees, read_yaml

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "algorithms"
ONLINE = [*ALGORITHMS, *(name for name, objective in PREFERENCES.items() if objective.online)]
WARM_START = "runs/quickstart-warm-start/model"
ROWS_PER_STEP = 128
MAX_STEPS = 400
"""A run that has not sampled its tokens by then is a failure."""
CURVES = ("tokens", "reward", "length", "entropy", "kl", "seconds")
"""Metrics of each step in a result. `reward` and `length` are of all completions that were drawn, those in groups that
were refused among them."""
Drawn = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""A sampled completion: the prompt's tokens, its own, and their log-probs."""


def sized(tree: Mapping[str, Any], model: str, seed: int, folder: Path) -> dict[str, Any]:
    """A config with what all runs have in common. The updates in a step stay as many as they were."""
    rollout, train = tree["rollout"], tree["train"]
    completions = rollout["completions_per_prompt"]
    rows = rollout["prompts_per_step"] * completions
    update = train.get("rows_per_update")
    changes = {
        "output_dir": str(folder),
        "seed": seed,
        "model": {"path": model},
        "data": {"eval_size": 250},
        "rollout": {"engine": "counted", "prompts_per_step": ROWS_PER_STEP // completions},
        "train": {
            "steps": MAX_STEPS,
            "schedule": "constant",
            "warmup_ratio": 0.0,
            "tokens_per_micro_batch": 1536,
            **({"rows_per_update": update * ROWS_PER_STEP // rows} if update else {}),
        },
        "eval": {"before": False, "after": False, "every_steps": 5, "samples_per_prompt": 4},
        "checkpoint": {"every_steps": 0},
        "tracking": {"save_rollouts": False},
    }
    return merge_trees(tree, changes)


def counting_engine(budget: int) -> Any:
    """The native engine; when the completions drawn in training have `budget` tokens, it asks for this step to be the
    last."""
    from atomrl.engines.native.engine import NativeEngine
    from atomrl.types import GenerationOutput, GenerationRequest

    class Counted(NativeEngine):
        tokens = 0
        by_step: ClassVar[dict[int, int]] = {}
        """step -> tokens drawn by its end"""
        drawn: ClassVar[dict[int, list[Drawn]]] = {}
        """step -> the sampled ones"""
        asked: ClassVar[dict[str, GenerationRequest]] = {}
        """Requests under way, by id."""

        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            super().submit(requests)
            Counted.asked |= {request.request_id: request for request in requests}

        def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
            outputs = super().poll(wait_s)
            for output in outputs:
                request = Counted.asked.pop(output.request_id)
                if not request.group_id.startswith("eval:"):
                    self.count(request, output)
            return outputs

        def count(self, request: GenerationRequest, output: GenerationOutput) -> None:
            tokens = [token for segment in output.segments for token in segment.token_ids]
            before, Counted.tokens = Counted.tokens, Counted.tokens + len(tokens)
            Counted.by_step[request.sampling.step] = Counted.tokens
            if request.sampling.temperature > 0 and tokens:
                logprobs = [value for segment in output.segments for value in segment.logprobs or ()]
                Counted.drawn.setdefault(request.sampling.step, []).append((request.prompt_token_ids, tokens, logprobs))
            if before < budget <= Counted.tokens:
                os.kill(os.getpid(), signal.SIGTERM)  # the loop ends the step under way and saves

    return Counted


def kl_to_start(drawn: Sequence[Drawn], start: Any) -> float:
    """Mean of log pi - log pi_start over tokens that pi drew, in nats per token."""
    import torch

    total, count = 0.0, 0
    with torch.inference_mode():
        for first in range(0, len(drawn), 64):
            part = drawn[first : first + 64]
            rows = [torch.tensor([*prompt, *token_ids]) for prompt, token_ids, _ in part]
            tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            logprobs = start(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
            for row, (prompt, token_ids, own) in zip(logprobs, part, strict=True):
                total += float(torch.tensor(own).sum() - row[len(prompt) - 1 : len(prompt) - 1 + len(token_ids)].sum())
                count += len(token_ids)
    return total / max(1, count)


def accuracy_by_problem(tree: Mapping[str, Any], model: str, folder: Path) -> list[float]:
    """The share of correct completions of each held-out problem."""
    from atomrl.cli.eval import evaluate_config

    config = load_config(merge_trees(tree, {"model": {"path": model}, "rollout": {"engine": "native"}}))
    result, _ = evaluate_config(config, "", folder / "eval.json")
    correct: dict[str, list[bool]] = {}
    for row in result.rows:
        correct.setdefault(row["prompt_id"], []).append(row["correct"])
    return [sum(own) / len(own) for own in correct.values()]


def one_run(tree: dict[str, Any], budget: int, result_file: Path) -> None:
    """Evaluate, train, evaluate; in a process of its own."""
    from transformers import AutoModelForCausalLM

    from atomrl.tracking.reading import plots as curves
    from atomrl.tracking.reading.lines import read_metrics
    from atomrl.trainer import prepare_run
    from atomrl.trainer.build import ENGINES

    started = time.perf_counter()
    curves.draw_curves = lambda *_: None  # a tenth of the time, and nobody looks at them
    config = load_config(tree)
    shutil.rmtree(config.run_dir, ignore_errors=True)
    folder, start_path = config.run_dir.parent, str(config.model.path)
    before = accuracy_by_problem(tree, start_path, folder)
    counted = counting_engine(budget)
    ENGINES["counted"] = counted
    summary = prepare_run(config).execute()
    if counted.tokens < budget:  # somebody stopped it, or MAX_STEPS are too few
        raise RuntimeError(f"{summary['steps']} steps drew {counted.tokens} tokens, fewer than {budget}")
    after = accuracy_by_problem(tree, summary["model"], folder)
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    steps = [row for row in rows if "timing_s/step" in row]
    start = AutoModelForCausalLM.from_pretrained(start_path)
    held_out = {row["step"]: value for row in rows for name, value in row.items() if "/acc/mean@4" in name}
    seconds = [sum(row["timing_s/step"] for row in steps[: i + 1]) for i in range(len(steps))]
    result = {
        "config": tree,
        "budget": budget,
        "before": before,
        "after": after,
        "tokens": [counted.by_step[row["step"]] for row in steps],
        "reward": [row["critic/score/mean"] for row in steps],
        "length": [row["response_length/mean"] for row in steps],
        "entropy": [row["actor/entropy"] for row in steps],
        "kl": [kl_to_start(counted.drawn[row["step"]], start) for row in steps],
        "seconds": seconds,
        "held_out": [[0, _mean(before)]]
        + [[counted.by_step[step], value] for step, value in held_out.items()]
        + [[counted.tokens, _mean(after)]],
        "wall_s": time.perf_counter() - started,
    }
    partial = result_file.with_suffix(".partial")
    partial.write_text(json.dumps(result) + "\n", encoding="utf-8")
    partial.replace(result_file)


def finished(result_file: Path, tree: dict[str, Any], budget: int) -> dict[str, Any] | None:
    """The result of a run; None where there is none of this config."""
    if not result_file.exists():
        return None
    result = json.loads(result_file.read_text(encoding="utf-8"))
    return result if (result["config"], result["budget"]) == (tree, budget) else None


def run_all(configs: Mapping[str, Path], seeds: Sequence[int], model: str, budget: int, out: Path) -> list[str]:
    """Every run that is not finished, seeds outermost. Returns the names of those that failed."""
    failed = []
    for seed in seeds:
        folder = out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in configs.items():
            tree = sized(read_yaml(path), model, seed, folder)
            result_file = out / f"{name}-seed-{seed}.json"
            if finished(result_file, tree, budget):
                continue
            load_config(tree)
            log = out / f"{name}-seed-{seed}.log"
            command = [sys.executable, __file__, "--one", json.dumps([tree, budget, str(result_file)])]
            with log.open("w", encoding="utf-8") as output:
                code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
            result = finished(result_file, tree, budget) if code == 0 else None
            if result is None:
                failed.append(f"{name}, seed {seed}: see {log}")
                print(f"seed {seed} {name:<22} FAILED, see {log}", flush=True)
                continue
            print(
                f"seed {seed} {name:<22} {_mean(result['before']):.3f} -> {_mean(result['after']):.3f}  "
                f"{len(result['tokens'])} steps, {result['wall_s']:.0f} s",
                flush=True,
            )
    return failed


def summarise(runs: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """Summarize an algorithm's runs for the table and the pages; curves are rounded."""
    before, after = ([value for run in runs for value in run[name]] for name in ("before", "after"))
    gains = [b - a for a, b in zip(before, after, strict=True)]
    gain, error = _mean(gains), _standard_error(gains)
    curves = [
        {name: [_rounded(value) for value in run[name]] for name in CURVES}
        | {"held_out": [[tokens, _rounded(value)] for tokens, value in run["held_out"]], "seed": seed}
        for run, seed in zip(runs, seeds, strict=True)
    ]
    return {
        "accuracy_before": [_rounded(_mean(before)), _rounded(_standard_error(before))],
        "accuracy_after": [_rounded(_mean(after)), _rounded(_standard_error(after))],
        "accuracy_after_by_seed": [_rounded(_mean(run["after"])) for run in runs],
        "gain": [_rounded(gain), _rounded(error)],
        "gain_in_standard_errors": round(gain / error, 1) if error else (math.inf if gain else 0.0),
        "problems": len(before),
        "budget": runs[0]["budget"],
        "tokens": [run["tokens"][-1] for run in runs],
        "steps": [len(run["tokens"]) for run in runs],
        **{f"{name}_start": _rounded(_mean([run[name][0] for run in runs])) for name in CURVES[1:-1]},
        **{f"{name}_end": _rounded(_mean([_mean(run[name][-3:]) for run in runs])) for name in CURVES[1:-1]},
        "train_s": round(min(run["seconds"][-1] for run in runs), 1),
        "curves": curves,
    }


def collect(configs: Mapping[str, Path], seeds: Sequence[int], model: str, budget: int, out: Path) -> dict[str, Any]:
    """Algorithm -> summary, of the runs that are finished."""
    summaries = {}
    for name, path in configs.items():
        runs = {}
        for seed in seeds:
            tree = sized(read_yaml(path), model, seed, out / f"seed-{seed}")
            if result := finished(out / f"{name}-seed-{seed}.json", tree, budget):
                runs[seed] = result
        if runs:
            summaries[name] = {"parents": parents_of(path)} | summarise(list(runs.values()), list(runs))
    return summaries


def parents_of(path: Path) -> list[str]:
    """The algorithms that a config's curves are shown with: those of its line `# Parents: a, b`, or grpo."""
    found = re.search(r"^# Parents: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].split(", ") if found else ["grpo"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def configs_of(names: Sequence[str]) -> dict[str, Path]:
    """Run name -> config: those named (algorithms, or YAML files), or all of the table.

    Raises:
        SystemExit: there is no such algorithm or file.
    """
    paths = [Path(name) if name.endswith(".yaml") else CONFIGS / f"{name}.yaml" for name in names or ONLINE]
    absent = [str(path) for path in paths if not path.is_file()]
    if absent:
        raise SystemExit(f"there is no {', '.join(absent)}; algorithms are {', '.join(ONLINE)}")
    return {read_yaml(path)["run_name"]: path for path in paths}


def check_models(configs: Mapping[str, Path], model: str) -> None:
    """Check that the initial model and the teachers exist.

    Raises:
        SystemExit: how to make the one that is not.
    """
    wanted = {model: "atomrl train configs/quickstart_sft.yaml"}
    teachers = (read_yaml(path).get("teacher") for path in configs.values())
    wanted |= {teacher["path"]: "atomrl train configs/quickstart.yaml" for teacher in teachers if teacher}
    for path, command in wanted.items():
        if not (Path(path) / "config.json").is_file():
            raise SystemExit(f"{path}: no model there; make it with: {command}")


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        tree, budget, result_file = json.loads(sys.argv[2])
        return one_run(tree, budget, Path(result_file))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", metavar="NAME|CONFIG.yaml", help="default: every algorithm of the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default=WARM_START, help=f"the checkpoint that all start from ({WARM_START})")
    parser.add_argument("--tokens", type=int, default=60_000, help="sampled in a run (60000)")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument(
        "--docs", action="store_true", help="write table, numbers and pictures into docs/, not into OUT"
    )
    parser.add_argument("--plot", action="store_true", help="run nothing: table and pictures from the numbers there")
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error(f"--tokens {arguments.tokens}: at least 1")
    configs = configs_of(arguments.configs)
    if not arguments.plot:
        check_models(configs, arguments.model)
    import algorithms_plot

    where = algorithms_plot.places(ROOT / "docs" if arguments.docs else arguments.out, arguments.docs)
    runs = (arguments.seeds, arguments.model, arguments.tokens, arguments.out)
    failed = [] if arguments.plot or arguments.docs else run_all(configs, *runs)
    old = json.loads(where.numbers.read_text(encoding="utf-8")) if where.numbers.exists() else {}
    summaries = old if arguments.plot else old | collect(configs, *runs)
    algorithms_plot.write(summaries, where)
    raise SystemExit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
