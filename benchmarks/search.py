"""The search quickstart for several seeds, with its controls and its two collapses, through the command line.

    python benchmarks/search.py [--seeds 0 1 2] [--out runs/search] [--questions 2000]
    python benchmarks/search.py --docs      # what is finished: the pictures into docs/images

For each seed: the warm start, GRPO, and `atomrl eval` on places of countries that no training has seen, 0 to 4 hops:
before, after, and after with a search that finds nothing. For the first seed also GRPO with what the searches find in
the loss; and, from a warm start of 600 steps, after which most groups of three hops have no right answer, with a cost
of 0.04 a search for right and for wrong answers, each normalised as GRPO does and as Dr. GRPO does, and with the cost
on right answers alone; for `--collapse-steps`.

What is finished is not run again. Prints tables, and what `atomrl doctor` finds in the collapses; writes `results.json`
and `search.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import fmean
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parents[1]
WARM, GRPO = ROOT / "configs/quickstart_search_sft.yaml", ROOT / "configs/quickstart_search.yaml"
HOPS = range(5)
COST, SHORT = 0.04, 600
ALL_ANSWERS = f"reward.functions=[exact_match, {{function: {__file__}:searches, weight: -{COST}}}]"
COLLAPSES = {
    "replies in the loss": [],
    "cost on all answers": [ALL_ANSWERS],
    "cost on all answers, dr_grpo": [ALL_ANSWERS, "algorithm.name=dr_grpo"],
    "cost on right answers": [f"environment.args.cost={COST}"],
}
REPLIES = "--replies-in-loss"


def searches(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return the number of searches of each completion: a reward whose weight is the cost of a search."""
    return [float(text.count("</search>")) for text in completions]


def put_replies_into_the_loss() -> None:
    """Have every token after the prompt trained on, as if the model had written it."""
    from dataclasses import replace

    import torch

    from atomrl.data.rows import to_rows
    from atomrl.trainer import rollout_training

    def rows_with_replies(*arguments: Any, **options: Any) -> Any:
        rows = to_rows(*arguments, **options)
        at = torch.arange(rows.tokens.shape[1])[None]
        after = (at >= rows.prompt_lengths[:, None]) & (at < rows.lengths[:, None])
        # the engine has no log-probs of what it did not draw
        return replace(rows, loss_mask=after, rollout=replace(rows.rollout, logprobs=None))

    rollout_training.to_rows = rows_with_replies  # type: ignore[attr-defined]


def atomrl(arguments: Sequence[str], log: Path, *options: str) -> dict[str, float]:
    """One command. Returns wall and CPU seconds.

    Raises:
        RuntimeError: it failed; its output is in `log`.
    """
    started, before = perf_counter(), getrusage(RUSAGE_CHILDREN)
    with log.open("a", encoding="utf-8") as output:
        command = [sys.executable, __file__, *options, "--atomrl", *arguments]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise RuntimeError(f"atomrl {' '.join(arguments)} failed; see {log}")
    after = getrusage(RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(perf_counter() - started, 1), "cpu_s": round(cpu, 1)}


def one_run(name: str, arguments: Sequence[str], folder: Path, *options: str) -> dict[str, float]:
    """A run of this name in `folder`, and what it took. A finished one is not run again."""
    cost_file = folder / f"{name}.json".replace(" ", "-")
    if not cost_file.exists():
        run_name = cost_file.stem
        shutil.rmtree(folder / run_name, ignore_errors=True)
        where = [f"output_dir={folder}", f"run_name={run_name}"]
        cost = atomrl([*arguments, *where], folder / "runs.log", *options)
        cost_file.write_text(json.dumps(cost) + "\n", encoding="utf-8")
    return json.loads(cost_file.read_text(encoding="utf-8"))


def evaluate(model: Path, out: Path, questions: int, *overrides: str) -> dict[str, dict[str, float]]:
    """Accuracy and searches by hops, of questions about places of the countries held out; temperature 1."""
    if not out.exists():
        hops = f"data.generator_args.hops={list(HOPS)}".replace(" ", "")
        limit = ["--limit", str(questions), "--out", str(out)]
        atomrl(["eval", str(model), "--config", str(GRPO), *limit, hops, *overrides], out.with_suffix(".log"))
    return by_hops(out.with_suffix(".jsonl"))


def by_hops(path: Path) -> dict[str, dict[str, float]]:
    """Summarize a file of completions by number of hops."""
    found = defaultdict(list)
    for line in path.read_text(encoding="utf-8").strip().split("\n"):  # splitlines() cuts at what a model may write
        row = json.loads(line)
        found[row["data_source"].removeprefix("places-")].append(row)
    return {
        hops: {
            "accuracy": fmean(float((row["reward_parts"].get("exact_match") or 0.0) >= 1.0) for row in rows),
            "searches": fmean(row["completion"].count("</search>") for row in rows),
            "questions": len(rows),
        }
        for hops, rows in sorted(found.items())
    }


def one_seed(seed: int, out: Path, questions: int, collapse_steps: int) -> dict[str, Any]:
    """Everything for one seed; with `collapse_steps`, the collapses too."""
    folder = out / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    started, trained = folder / "warm-start/model", folder / "grpo/model"
    train = ["train", str(GRPO), f"seed={seed}", f"model.path={started}"]
    warm = one_run("warm-start", ["train", str(WARM), f"seed={seed}"], folder)
    grpo = one_run("grpo", train, folder)
    result = {
        "seed": seed,
        "before": evaluate(started, folder / "before.json", questions),
        "after": evaluate(trained, folder / "after.json", questions),
        "empty retriever": evaluate(trained, folder / "empty.json", questions, "environment.args.empty=true"),
        "warm_start": warm,
        "grpo": grpo,
    }
    if collapse_steps:
        one_run("short-warm-start", ["train", str(WARM), f"seed={seed}", f"train.steps={SHORT}"], folder)
    for name, overrides in COLLAPSES.items() if collapse_steps else ():
        only = [f"train.steps={collapse_steps}", "eval.before=false", "eval.every_steps=0"]
        options = [REPLIES] if name == "replies in the loss" else []
        start = [] if options else [f"model.path={folder / 'short-warm-start/model'}"]
        one_run(name, [*train, *overrides, *start, *only], folder, *options)
        path = folder / name.replace(" ", "-") / "model"
        result[name] = evaluate(path, folder / f"{path.parent.name}-after.json", questions)
    return result


def table(results: Sequence[dict[str, Any]], what: str, name: str) -> str:
    """A row for each seed, a column for each number of hops."""
    lines = [f"| {what}, {name} | " + " | ".join(map(str, HOPS)) + " |", "|---" * (len(HOPS) + 1) + "|"]
    for result in results:
        if what in result:
            figures = " | ".join(f"{result[what][str(hops)][name]:.3f}" for hops in HOPS)
            lines.append(f"| seed {result['seed']} | {figures} |")
    return "\n".join(lines)


def collapses(result: dict[str, Any], folder: Path) -> str:
    """Describe each collapse: searches by hops at its end, and the doctor's findings."""
    from atomrl.tracking.doctor import diagnose
    from atomrl.tracking.reading.lines import metrics_of

    lines = ["| searches, by hops | " + " | ".join(map(str, HOPS)) + " | the doctor |", "|---" * (len(HOPS) + 2) + "|"]
    for name in COLLAPSES:
        if name in result:
            figures = " | ".join(f"{result[name][str(hops)]['searches']:.3f}" for hops in HOPS)
            found = diagnose(metrics_of(folder / name.replace(" ", "-")))
            named = ", ".join(f"{finding.id} (step {finding.step})" for finding in found)
            lines.append(f"| {name} | {figures} | {named or 'nothing'} |")
    return "\n".join(lines)


def history(run: Path, name: str) -> dict[str, list[tuple[int, float]]]:
    """By hops: (step, accuracy or searches) of the completions that were drawn in training."""
    found = defaultdict(list)
    for folder in sorted((run / "rollouts").glob("step_*")):
        if (folder / "train.jsonl").exists():
            for hops, figures in by_hops(folder / "train.jsonl").items():
                found[hops].append((int(folder.name.removeprefix("step_")), figures[name]))
    return found


def draw(results: Sequence[dict[str, Any]], out: Path, picture: Path) -> None:
    """Searches and accuracy by hops over the steps of all seeds, and the searches of the collapses that were run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = out / f"seed-{results[0]['seed']}"
    undone = [name for name in COLLAPSES if (first / name.replace(" ", "-")).exists()]
    figure, axes = plt.subplots(1, 3 if undone else 2, figsize=(15 if undone else 10, 4.4))
    colors = {"0": "#9a9a9a", "1": "#2b5fd0", "2": "#2f9e62", "3": "#d0762b", "4": "#a13bb3"}
    for axis, name in zip(axes, ("searches", "accuracy"), strict=False):
        for index, result in enumerate(results):
            for hops, points in sorted(history(out / f"seed-{result['seed']}/grpo", name).items()):
                label = None if index else f"{hops} hops"
                axis.plot(*zip(*points, strict=True), color=colors[hops], alpha=0.8, linewidth=1, label=label)
        axis.set_title(f"{name.capitalize()} in training, {len(results)} seeds", loc="left")
    axes[0].legend(frameon=False, ncol=2, loc="center right", bbox_to_anchor=(1.0, 0.76))
    styles = {"grpo": "#2b5fd0"} | dict(zip(COLLAPSES, ("#c0392b", "#d0762b", "#2f9e62", "#9a9a9a"), strict=True))
    for name, color in styles.items() if undone else ():
        runs = history(first / name.replace(" ", "-"), "searches")
        if points := [(s, fmean(v)) for s, *v in zip(*_columns(runs), strict=True)] if runs else []:
            axes[2].plot(*zip(*points[:60], strict=True), color=color, linewidth=1, label=name)
    if undone:
        axes[2].set_title("Searches, all questions", loc="left")
        axes[2].legend(frameon=False)
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def _columns(runs: dict[str, list[tuple[int, float]]]) -> list[list[float]]:
    """Steps, then the values of each number of hops."""
    series = list(runs.values())
    return [[step for step, _ in series[0]], *([value for _, value in points] for points in series)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=2000, help="of an evaluation, of all hops together")
    parser.add_argument("--collapse-steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    parser.add_argument("--docs", action="store_true", help="write the picture into docs/images")
    arguments = parser.parse_args()
    results = []
    for seed in arguments.seeds:
        steps = 0 if results else arguments.collapse_steps
        results.append(one_seed(seed, arguments.out, arguments.questions, steps))
    for what in ("before", "after", "empty retriever", *COLLAPSES):
        for name in ("accuracy", "searches"):
            print(table(results, what, name), end="\n\n")
    if arguments.collapse_steps:
        print(collapses(results[0], arguments.out / f"seed-{results[0]['seed']}"), end="\n\n")
    for result in results:
        print(f"seed {result['seed']}: warm start {result['warm_start']}, GRPO {result['grpo']}")
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, arguments.out, ROOT / "docs/images/search.png" if arguments.docs else arguments.out / "search.png")


if __name__ == "__main__":
    if "--atomrl" in sys.argv:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, str(ROOT))
        from atomrl.cli.main import main as command

        place = sys.argv.index("--atomrl")
        if REPLIES in sys.argv[:place]:
            put_replies_into_the_loss()
        sys.exit(command(sys.argv[place + 1 :]))
    main()
