"""The quickstart's learning, for several seeds and with its controls, through the command line alone.

    python benchmarks/learning.py [--seeds 0 1 2] [--out runs/learning] [--problems 500]

For each seed: the warm start, GRPO, and `atomrl eval` on held-out problems (of the eval split, which is disjoint from
training by a hash of the content) before and after, sampled at temperature 1 and greedy; the trained model with its
reasoning taken away (`<think></think><answer>` is forced, or the hasty `<think>easy</think><answer>` that it has seen,
and the answer alone is scored); and GRPO for as many steps
from the same start with rewards that are random (a hash of the prompt and the completion's number decides).

What is finished is not run again. Prints a table, writes `results.json` and `learning.png`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLANK, HASTY = "<think></think><answer>", "<think>easy</think><answer>"


def random_reward(prompts: list[Any], completions: list[str], seed: int = 0, **columns: Any) -> list[float]:
    """1 or 0 by a hash of the prompt and the place in the batch, as often as the untrained model is right.

    Not of the completion: equal completions would then share their reward, and the style that repeats itself more would
    be moved by the skew of the rewards, which is no noise.
    """
    places = enumerate(zip(prompts, completions, strict=True))
    return [float(hashlib.blake2b(f"{seed}|{i}|{p}".encode(), digest_size=1).digest()[0] < 85) for i, (p, _) in places]


def run(arguments: list[str], log: Path) -> tuple[float, float]:
    """One `atomrl` command. Returns seconds and peak resident memory in MB.

    Raises:
        RuntimeError: it failed; its output is in `log`.
    """
    started = time.perf_counter()
    with log.open("a", encoding="utf-8") as output:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
        command = [sys.executable, "-m", "atomrl.cli.main", *arguments]
        child = os.posix_spawn(
            sys.executable,
            command,
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, output.fileno(), n) for n in (1, 2)],
        )
        _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"atomrl {' '.join(arguments)} failed; see {log}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def one_run(name: str, arguments: list[str], folder: Path) -> dict[str, float]:
    """A run of this name in `folder`: its seconds and peak memory. A finished one is not run again."""
    cost_file = folder / f"{name}.json"
    if not cost_file.exists():
        shutil.rmtree(folder / name, ignore_errors=True)
        seconds, peak_mb = run([*arguments, f"run_name={name}"], folder / "runs.log")
        cost_file.write_text(json.dumps({"seconds": seconds, "peak_mb": peak_mb}) + "\n", encoding="utf-8")
    return json.loads(cost_file.read_text(encoding="utf-8"))


def evaluate(model: Path, out: Path, problems: int, *options: str) -> dict[str, float]:
    """The figures of `atomrl eval` by name."""
    if not out.exists():
        base = ["eval", str(model), "--data", "chain", "--limit", str(problems), "--max-tokens", "48"]
        base += ["--samples-per-prompt", "1" if "--temperature" in options else "4"]
        run([*base, "--out", str(out), *options], out.with_suffix(".log"))
    figures = json.loads(out.read_text(encoding="utf-8"))["overall"]
    return {name: figure["mean"] for name, figure in figures.items()}


def one_seed(seed: int, out: Path, problems: int) -> dict[str, Any]:
    """Everything for one seed; what is in `out` already is not run again."""
    folder = out / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    result_file = folder / "result.json"
    if result_file.exists():
        return json.loads(result_file.read_text(encoding="utf-8"))
    where = [f"output_dir={folder}", f"seed={seed}"]
    started = folder / "warm-start/model"
    warm = one_run("warm-start", ["train", str(ROOT / "configs/quickstart_sft.yaml"), *where], folder)
    train = ["train", str(ROOT / "configs/quickstart.yaml"), f"model.path={started}", *where]
    grpo = one_run("grpo", train, folder)
    trained = folder / "grpo/model"
    before = evaluate(started, folder / "before.json", problems)
    after = evaluate(trained, folder / "after.json", problems)
    answer_alone = ("--reward", "exact_match", "--response-prefix")
    result = {
        "seed": seed,
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "greedy_before": evaluate(started, folder / "greedy.json", problems, "--temperature", "0")["accuracy"],
        "format_before": before["format"],
        "format_after": after["format"],
        "reasoning_tokens_before": before["reasoning_tokens"],
        "reasoning_tokens_after": after["reasoning_tokens"],
        "accuracy_blanked": evaluate(trained, folder / "blank.json", problems, *answer_alone, BLANK)["accuracy"],
        "accuracy_hasty": evaluate(trained, folder / "hasty.json", problems, *answer_alone, HASTY)["accuracy"],
        "warm_start_s": round(warm["seconds"], 1),
        "grpo_s": round(grpo["seconds"], 1),
        "peak_mb": round(max(warm["peak_mb"], grpo["peak_mb"])),
    }
    draws = f"{{function: learning.random_reward, args: {{seed: {seed}}}}}"
    functions = f"reward.functions=[{draws}, {{function: strict_math, weight: 0}}]"
    one_run("random", [*train, functions, "eval.before=false", "eval.after=false", "eval.every_steps=0"], folder)
    result["accuracy_random_reward"] = evaluate(folder / "random/model", folder / "control.json", problems)["accuracy"]
    result_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def draw(results: list[dict[str, Any]], out: Path) -> None:
    """Reward, held-out accuracy, length and entropy of all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "Reward": "reward/strict_math/mean",
        "Held-out accuracy": "val-core/chain/acc/mean@1",
        "Completion length (tokens)": "response_length/mean",
        "Entropy (nats per token)": "actor/entropy",
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 7))
    styles = {"grpo": ("#2b5fd0", "GRPO"), "random": ("#9a9a9a", "random rewards")}
    for axis, (title, name) in zip(axes.flat, panels.items(), strict=True):
        for kind, (color, label) in styles.items():
            for index, result in enumerate(results):
                metrics = out / f"seed-{result['seed']}" / kind / "metrics.jsonl"
                rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
                points = [(row["step"], row[name]) for row in rows if name in row]
                if points:
                    axis.plot(*zip(*points, strict=True), color=color, alpha=0.8, label=None if index else label)
        axis.set_title(title, loc="left")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out / "learning.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    arguments = parser.parse_args()
    results = []
    for seed in arguments.seeds:
        results.append(one_seed(seed, arguments.out, arguments.problems))
        print(json.dumps(results[-1]), flush=True)
    names = [name for name in results[0] if name != "seed"]
    print("| | " + " | ".join(f"seed {result['seed']}" for result in results) + " |")
    print("|---" * (len(results) + 1) + "|")
    for name in names:
        print(f"| {name} | " + " | ".join(f"{result[name]:.3g}" for result in results) + " |")
    (arguments.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(results, arguments.out)


if __name__ == "__main__":
    main()
