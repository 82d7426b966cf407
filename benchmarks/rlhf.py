"""RLHF as a whole, through the command line alone: warm start, pairs, reward model, then GRPO and PPO against it.

    python benchmarks/rlhf.py [--seeds 0 1 2] [--out runs/rlhf]
    python benchmarks/rlhf.py --docs      # what is finished: the picture into docs/images

For each seed: the warm start (configs/quickstart_sft.yaml); completions that it draws for training problems, labelled
right or wrong as people would (examples/rlhf/label_pairs.py); a reward model on those pairs; and GRPO and PPO whose
reward is that model's score and nothing else (configs/rlhf). The true accuracy, on held-out problems that no stage
trains on, is only watched. Held-out pairs are of other problems again.

What is finished is not run again. Prints a table, writes results.json and rlhf.png.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "rlhf")]

from label_pairs import label_pairs  # noqa: E402
from learning import one_run, run  # noqa: E402

from atomrl.common.files import write_jsonl  # noqa: E402
from atomrl.data.files import read_rows  # noqa: E402

CONFIGS = ROOT / "configs"
ALGORITHMS = ("grpo", "ppo")
PROBLEMS = {"pairs": ("train", 4000, 0), "held_out_pairs": ("eval", 500, 1000)}
"""Pairs -> split and number of the problems that they are drawn for, and what is added to the seed."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row.row for row in read_rows(path) if row.row is not None]


def make_pairs(name: str, model: Path, seed: int, folder: Path) -> Path:
    """Problems, four completions of each by the model, and pairs of a right and a wrong one."""
    out = folder / f"{name}.jsonl"
    if not out.exists():
        split, size, shift = PROBLEMS[name]
        log, problems, samples = folder / "runs.log", folder / f"{name}_problems.jsonl", folder / f"{name}_samples.json"
        make = ["data", "make", "chain", "--size", str(size), "--seed", str(seed + shift), "--split", split]
        run([*make, "--out", str(problems)], log)
        draw = ["--samples-per-prompt", "4", "--max-tokens", "48", "--dtype", "float32", "--seed", str(seed)]
        run(["eval", str(model), "--data", str(problems), *draw, "--out", str(samples)], log)
        write_jsonl(label_pairs(rows_of(samples.with_suffix(".jsonl"))), out)
    return out


def one_seed(seed: int, out: Path) -> dict[str, Any]:
    """All stages of one seed."""
    folder = out / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    where = [f"output_dir={folder}", f"seed={seed}"]
    start, scorer = folder / "warm-start/model", folder / "reward-model/model"
    one_run("warm-start", ["train", str(CONFIGS / "quickstart_sft.yaml"), *where], folder)
    pairs, held_out = (make_pairs(name, start, seed, folder) for name in PROBLEMS)
    where.append(f"model.path={start}")
    stage_2 = ["train", str(CONFIGS / "rlhf/reward_model.yaml"), *where]
    one_run("reward-model", [*stage_2, f"data.train={pairs}", f"data.eval={held_out}"], folder)
    for name in ALGORITHMS:
        config = CONFIGS / "rlhf" / f"{name}.yaml"
        changes = where + ([f"critic.path={scorer}"] if name == "ppo" else [])
        score = f"{{function: reward_model, args: {{path: {scorer}, dtype: float32}}}}"
        changes = [*changes, f"reward.functions=[{{function: strict_math, weight: 0}}, {score}]"]
        one_run(name, ["train", str(config), *changes], folder)
    return {
        "seed": seed,
        "reward_model": of_reward_model(folder, rows_of(pairs), rows_of(held_out)),
        **{name: of_training(folder / name) for name in ALGORITHMS},
    }


def of_reward_model(
    folder: Path, train: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Held-out accuracy before and after, and of pairs whose completions are both careful, both hasty, or differ."""
    summary = json.loads((folder / "reward-model/summary.json").read_text(encoding="utf-8"))
    scored = rows_of(folder / "reward-model" / f"rollouts/step_{summary['steps']:06d}/eval.jsonl")
    by_style: dict[str, list[float]] = {}
    for pair, row in zip(held_out, scored, strict=True):
        styles = {hasty(pair["chosen"]), hasty(pair["rejected"])}
        kind = "differ" if len(styles) == 2 else "hasty" if True in styles else "careful"
        chosen, rejected = row["rewards"]
        by_style.setdefault(kind, []).append((chosen > rejected) + (chosen == rejected) / 2)
    return {
        "pairs": len(train),
        "held_out": len(held_out),
        "before": summary["preference_accuracy_before"],
        "after": summary["preference_accuracy_after"],
        "by_style": {kind: [mean(values), len(values)] for kind, values in sorted(by_style.items())},
    }


def of_training(folder: Path) -> dict[str, Any]:
    """Figures of each evaluation of a run, the first and the last with standard errors over problems."""
    evaluations = {
        int(path.parent.name.removeprefix("step_")): rows_of(path)
        for path in sorted(folder.glob("rollouts/step_*/eval.jsonl"))
    }
    figures: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "accuracy": lambda row: float(row["correct"]),
        "reward": lambda row: row["reward_parts"]["reward_model"],
        "tokens": lambda row: float(row["completion_tokens"]),
        "format": lambda row: float(row["formatted"]),
        "hasty": lambda row: float(hasty(row["completion"])),
    }
    rows = {"before": evaluations[min(evaluations)], "after": evaluations[max(evaluations)]}
    return {
        "steps": sorted(evaluations),
        "curves": {
            name: [mean(list(map(of, evaluations[step]))) for step in sorted(evaluations)]
            for name, of in figures.items()
        },
        "errors": {
            when: {name: error(list(map(of, part))) for name, of in figures.items()} for when, part in rows.items()
        },
        "reward_by_kind": {when: by_kind(part) for when, part in rows.items()},
        "examples": [[row["completion"], row["correct"], row["reward"]] for row in rows["after"][:3]]
        + [[row["completion"], row["correct"], row["reward"]] for row in rows["after"] if not row["correct"]][:5],
    }


def by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Mean score and number of completions by style and truth."""
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kind = f"{'hasty' if hasty(row['completion']) else 'careful'}, {'right' if row['correct'] else 'wrong'}"
        kinds.setdefault(kind, []).append(row["reward_parts"]["reward_model"])
    return {kind: [mean(values), len(values)] for kind, values in sorted(kinds.items())}


def hasty(completion: str) -> bool:
    """Return True if a completion has no reasoning steps."""
    return "<think>easy</think>" in completion


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a column for each seed."""
    lines = [
        "| | " + " | ".join(f"seed {result['seed']}" for result in results) + " |",
        "|---" * (len(results) + 1) + "|",
    ]

    def add(label: str, cell: Callable[[Mapping[str, Any]], str]) -> None:
        lines.append(f"| {label} | " + " | ".join(map(cell, results)) + " |")

    add("pairs: training, held out", lambda r: "{pairs}, {held_out}".format(**r["reward_model"]))
    add("reward model: held-out accuracy", lambda r: "{before:.3f} → **{after:.3f}**".format(**r["reward_model"]))
    for kind, label in {"differ": "one careful, one hasty", "careful": "both careful", "hasty": "both hasty"}.items():
        add(
            f"... of pairs with {label}",
            lambda r, kind=kind: "{:.3f} ({})".format(*r["reward_model"]["by_style"].get(kind, (math.nan, 0))),
        )
    for name in ALGORITHMS:
        add(f"{name.upper()}, steps", lambda r, name=name: str(r[name]["steps"][-1]))
        for figure, label in {
            "reward": "model's reward",
            "accuracy": "true accuracy",
            "hasty": "share of hasty completions",
            "tokens": "tokens",
            "format": "right format",
        }.items():
            add(f"{name.upper()}: {label}", lambda r, name=name, figure=figure: change(r[name], figure))
    return "\n".join(lines)


def change(result: Mapping[str, Any], figure: str) -> str:
    """`0.35 ± 0.02 → 0.97 ± 0.01`."""
    digits = {"tokens": 1, "reward": 2}.get(figure, 3)
    values = result["curves"][figure]
    ends = zip((values[0], values[-1]), (result["errors"][when][figure] for when in ("before", "after")), strict=True)
    return " → ".join(f"{value:.{digits}f} ± {err:.{digits}f}" for value, err in ends)


def draw(results: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Reward and true accuracy over the steps, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, name in zip(axes, ALGORITHMS, strict=True):
        right = axis.twinx()
        for curve in (result[name] for result in results if name in result):
            (score,) = axis.plot(curve["steps"], curve["curves"]["reward"], "o-", color="tab:orange", alpha=0.7, ms=3)
            (truth,) = right.plot(curve["steps"], curve["curves"]["accuracy"], "s-", color="tab:blue", alpha=0.7, ms=3)
        axis.set(xlabel="step", title=f"{name.upper()} against the reward model")
        axis.set_ylabel("reward model's score", color="tab:orange")
        right.set_ylabel("true accuracy, held out", color="tab:blue")
        right.set_ylim(0, 1.02)
        axis.legend([score, truth], ["score: what is trained on", "true accuracy: only watched"], loc="lower right")
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/rlhf"))
    parser.add_argument("--docs", action="store_true", help="write the picture into docs/images")
    arguments = parser.parse_args()
    results = [one_seed(seed, arguments.out) for seed in arguments.seeds]
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, ROOT / "docs/images/rlhf.png" if arguments.docs else arguments.out / "rlhf.png")
    print(table(results))
    for result in results:
        for name in ALGORITHMS:
            print(f"\nseed {result['seed']}, {name}: score by kind {json.dumps(result[name]['reward_by_kind'])}")
            for text, correct, score in result[name]["examples"]:
                print(f"  {'right' if correct else 'wrong'} {score:+.2f}  {text}")


if __name__ == "__main__":
    main()
