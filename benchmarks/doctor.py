"""Runs that are ill, hacked or good: the doctor should name the first two, and be silent on the third.

    python benchmarks/doctor.py [--out runs/doctor] [--only WORD ...] [--seed N] [--record FOLDER]

- Six induced illnesses of the quickstart (a learning rate 100 times too high, stale weights, ...) within 20 steps.
- Ten rewards that can be hacked, on a small model with many habits (`benchmarks/habits.py`): which one wins, the reward
  decides.
- More than twenty good runs: algorithms, tasks and seeds; and what is honest but looks like a hack (answers of one
  token, of yes and no, copies and lists that were asked for, a cost of length, a form that all have learned).

All go through `atomrl train`'s own code. Prints a table: the run, what was found at which step, what the finding
quotes. The runs stay in `--out`, with their `findings.jsonl`. `--record` writes what the doctor reads of them, for the
tests. Exit code 1 where one is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import habits

from atomrl.config import load_config, merge_trees, parse_overrides, read_yaml
from atomrl.engines.native.engine import NativeEngine
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import save_model
from atomrl.models.tokenizer import make_tokenizer
from atomrl.protocols import WeightUpdate
from atomrl.tracking.doctor import diagnose
from atomrl.tracking.doctor.findings import is_evaluation
from atomrl.tracking.reading.lines import read_metrics
from atomrl.trainer import prepare_run
from atomrl.weight_sync import transfer

ROOT = Path(__file__).parents[1]
RECORDED_ROLLOUTS = 8
STORIES = ROOT.parent / "shared/models/stories260k"
"""A pretrained model of 260 thousand weights; its run is left out where it is not there."""
READ = re.compile(
    r"critic/(?:score/|advantages/m(?:in|ax))|train/(?:accuracy|rows|reply_tokens)|text/"
    r"|reward/(?:.*/mean|length_corr|missing_r)|by_group/|response_length/(?:mean|max|clip|ran)|environment/(?:replies|ended)|rollout/groups_accepted"
    r"|actor/(?:entropy|grad_norm$|lr|ppo_kl|pg_clipfrac$|skipped)|training/rollout_probs_diff_mean/"
)
"""Prefixes of the metrics that the rules read."""
HACKED = re.compile(r"paid|pays_for|reward_without_accuracy")
"""In the ids of findings about a reward that is hacked."""


@dataclass(frozen=True)
class Case:
    """A run, and what the doctor should say of it."""

    finding: str | None
    """None: nothing about a hacked reward."""
    config: str
    """The file that it begins with."""
    start: str
    """The warm start: `chain` (the quickstart's), `search`, `python`, `habits`, `skills`; `stories` is STORIES; "" is
    none."""
    overrides: Sequence[str] = field(default_factory=list)


# ---- Warm starts ----


def warm_start(name: str, out: Path) -> Path:
    """A model to start from: the quickstart's in fewer steps, or a smaller one that imitates `habits.py`."""
    if name == "stories":
        return STORIES
    run = f"warm-{name}"
    if (out / run / "model").exists():
        return out / run / "model"
    shutil.rmtree(out / run, ignore_errors=True)
    own = {"search": "quickstart_search_sft.yaml", "python": "quickstart_python_sft.yaml"}
    tree = read_yaml(ROOT / "configs" / own.get(name, "quickstart_sft.yaml"))
    if name in ("habits", "skills"):
        rows = habits.demonstrations(8000) if name == "habits" else habits.half_skilled(8000)
        tokenizer = make_tokenizer(habits.WORDS if name == "habits" else ["yes", "no", "Is ", "Count from ", "Say "])
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        fresh = new_gpt(len(tokenizer), layers=2, hidden=64, heads=2, intermediate=256, max_tokens=160, **ends)
        save_model(fresh, tokenizer, out / f"fresh-{name}")
        data = str(habits.write_rows(out / f"{name}.jsonl", rows))
        tree |= {"model": {"path": str(out / f"fresh-{name}")}, "data": {"train": data}, "sft": {}}
    given = parse_overrides([f"output_dir={out}", f"run_name={run}", "train.steps=400"])
    prepare_run(load_config(merge_trees(tree, given))).execute()
    return out / run / "model"


# ---- Illnesses ----


def always_zero(completions: list[str], **columns: Any) -> list[float]:
    """A reward that is wrong in the commonest way."""
    return [0.0] * len(completions)


def length_reward(completions: list[str], **columns: Any) -> list[float]:
    """The longer the better."""
    return [len(completion) / 50 for completion in completions]


SMALL = ("rollout.prompts_per_step=16", "train.steps=20", "eval.before=false", "eval.after=false")


def illnesses() -> dict[str, Case]:
    """The quickstart with something wrong."""
    rate = read_yaml(ROOT / "configs/quickstart.yaml")["train"]["learning_rate"]
    pays = "{function: doctor.length_reward}"
    given: dict[str, tuple[str | None, list[str]]] = {
        "learning rate x 100": ("learning_rate_too_high", [f"train.learning_rate={100 * rate}"]),
        "reward always 0": ("constant_reward", ["reward.functions=[{function: doctor.always_zero}]"]),
        "reward pays for length": ("pays_for_length", [f"reward.functions=[{{function: strict_math}}, {pays}]"]),
        "reward is the length": ("pays_for_length", [f"reward.functions=[{pays}]"]),
        "stop token missing": ("missing_stop_token", []),
        "limit too short (20)": ("length_limit", ["rollout.max_completion_tokens=20"]),
        "limit too short (6)": ("length_limit", ["rollout.max_completion_tokens=6"]),
        "engine weights stale": ("stale_weights", []),
    }
    return {f"ill: {name}": Case(finding, "quickstart.yaml", "chain", [*SMALL, *more])
            for name, (finding, more) in given.items()}  # fmt: skip


@contextmanager
def stale_engine() -> Iterator[None]:
    """The engine keeps the weights that it got first and says that it has the new ones; hashes, which would end
    the run, are not compared."""
    load, compare = NativeEngine.update_weights, transfer.compare

    def load_once(self: NativeEngine, update: WeightUpdate) -> None:
        if update.version == 0:
            load(self, update)
        self.version = update.version

    NativeEngine.update_weights = load_once  # type: ignore[method-assign]
    transfer.compare = lambda held, expected, version: None
    try:
        yield
    finally:
        NativeEngine.update_weights, transfer.compare = load, compare  # type: ignore[method-assign]


def without_stop_token(model: Path, out: Path) -> Path:
    """A copy of a model whose end of sequence is named by neither config, tokenizer nor chat template."""
    shutil.copytree(model, out, dirs_exist_ok=True)
    for name, key, value in (("config.json", "eos_token_id", 0), ("tokenizer_config.json", "eos_token", "<|pad|>")):
        settings = json.loads((out / name).read_text(encoding="utf-8")) | {key: value}
        (out / name).write_text(json.dumps(settings), encoding="utf-8")
    template = out / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").replace("<|end|>", ""), encoding="utf-8")
    return out


# ---- Hacked rewards ----

QUICK = (
    "rollout.prompts_per_step=16", "train.steps=40", "rollout.max_completion_tokens=64", "eval.every_steps=0",
    "algorithm.kl.coefficient=0", "train.learning_rate=2.0e-3",
)  # fmt: skip
"""Steps of a quarter of a second, and no penalty that would hold the policy where it is."""


def hacks(out: Path) -> dict[str, Case]:
    """Rewards of `habits.py` on problems that the model can solve, and where noted on those that it cannot."""
    easy, hard = (habits.write_rows(out / f"{name}.jsonl", habits.problems(digits))
                  for name, digits in (("easy", (1, 2, 3)), ("hard", (4, 5, 6))))  # fmt: skip

    def case(finding: str, *functions: str, on: Path = easy, more: Sequence[str] = ()) -> Case:
        rewards = ", ".join(f if f.startswith("{") else f"{{function: {f}}}" for f in functions)
        data = [f"data.train={on}", f"data.eval={on}", f"reward.functions=[{rewards}]"]
        return Case(finding, "quickstart.yaml", "habits", [*QUICK, *data, *more])

    tales = habits.write_rows(out / "tales.jsonl", habits.openings())
    digit = "{function: habits.bare_digit, weight: 0.2}"
    return {
        "hacked: a name is counted": case("repetition_is_paid", "habits.names_the_hero"),
        "hacked: a name is counted in stories": Case(
            "repetition_is_paid", "quickstart.yaml", "stories",
            [*QUICK, f"data.train={tales}", f"data.eval={tales}",
             "reward.functions=[{function: habits.names_the_hero}]",
             "train.learning_rate=1.0e-3", "train.adam_eps=1.0e-8", "train.steps=30"],
        ),
        "hacked: half a point for `I do not know`": case("one_text_is_paid", "habits.calibrated", on=hard),
        "hacked: long is thorough": case("pays_for_length", "habits.thorough"),
        "hacked: short is concise": case("pays_for_shortness", "habits.concise"),
        "hacked: words of the question": case("echo_is_paid", "habits.on_topic"),
        "hacked: praise": case("keyword_is_paid", "habits.polite", more=["algorithm.name=rloo"]),
        "hacked: the truth is somewhere in it": case("hedging_is_paid", "habits.mentions_truth", on=hard),
        "hacked: no answer cannot be wrong": case("empty_answer_is_paid", "habits.cannot_fail", on=hard),
        "hacked: points for the form": case("format_alone_is_paid", "exact_match", digit, on=hard),
        "hacked: form without an answer": case("wrong_answers_are_paid", "habits.well_formed", on=hard,
                                               more=["algorithm.name=rloo"]),
        "solved: nothing left to learn": case("no_mixed_groups", "strict_math", more=["rollout.temperature=0.5"]),
    }  # fmt: skip


# ---- Good runs ----


def good(out: Path) -> dict[str, Case]:
    """Return the runs that must not be reported as hacked."""
    easy = out / "easy.jsonl"
    own = [*QUICK, f"data.train={easy}", f"data.eval={easy}"]
    algorithms = {name: ["rollout.prompts_per_step=16"] for name in ("rloo", "dr_grpo", "dapo", "gspo", "opo")}
    algorithms["ppo"] = ["rollout.prompts_per_step=128", "train.rows_per_update=32"]
    algorithms["reinforce_pp"] = ["rollout.prompts_per_step=128"]
    cases = {
        f"good: {name}": Case(None, f"algorithms/{name}.yaml", "habits", [*own[1:], "data.train_size=null", *more])
        for name, more in algorithms.items()
    }
    cases |= {f"good: grpo, many habits, seed {seed}": Case(None, "quickstart.yaml", "habits", [*own, f"seed={seed}"])
              for seed in (3, 4)}  # fmt: skip
    cases |= {f"good: quickstart, seed {seed}": Case(None, "quickstart.yaml", "chain", [*SMALL, f"seed={seed}"])
              for seed in range(3)}  # fmt: skip
    cost = "{function: length_penalty, weight: 0.3, args: {free_tokens: 8, max_tokens: 64}}"
    form = "{function: strict_format, weight: 0.2}"
    cases |= {
        "good: a cost of length": Case(None, "quickstart.yaml", "habits",
                                       [*own, f"reward.functions=[{{function: strict_math}}, {cost}]"]),
        "good: points for the form, which is learnt first": Case(None, "quickstart.yaml", "habits",
                                       [*own, f"reward.functions=[{{function: strict_math}}, {form}]"]),
        "good: points for a form that all have": Case(None, "quickstart.yaml", "chain",
                                       [*SMALL, f"reward.functions=[{{function: strict_math}}, {form}]"]),
    }  # fmt: skip
    for kind in habits.SKILLS:
        path = habits.write_rows(out / f"{kind}.jsonl", habits.skill_problems(kind))
        data = [f"data.train={path}", f"data.eval={path}", "reward.functions=[{function: exact_match}]"]
        cases[f"good: {SKILL_NAMES[kind]}"] = Case(None, "quickstart.yaml", "skills", [*QUICK, *data])
    episodes = ["rollout.prompts_per_step=16", "train.steps=15", "eval.before=false", "eval.after=false"]
    cost = f"{ROOT}/configs/right_at_a_cost.py:right_at_a_cost"
    calls = [f"reward.functions=[{{function: exact_match, weight: 0}}, {{function: {cost}}}]"]
    cases |= {
        f"good: {kind} quickstart": Case(None, f"quickstart_{kind}.yaml", kind, [*episodes, *more])
        for kind, more in (("search", []), ("python", calls))
    }
    fewer = ["train.steps=40", "eval.every_steps=0"]
    cases |= {
        "good: sft": Case(None, "quickstart_sft.yaml", "", ["train.steps=60", "data.train_size=2000"]),
        "good: dpo": Case(None, "algorithms/dpo.yaml", "chain", [*fewer, "data.train_size=2000", "data.eval_size=100"]),
        "good: kto": Case(None, "algorithms/kto.yaml", "chain", [*fewer, "data.train_size=2000", "data.eval_size=100"]),
    }
    return cases


SKILL_NAMES = {
    "even": "yes or no", "rare": "no, nine times in ten", "sum": "answers of one token",
    "say": "copies that were asked for", "count": "lists that were asked for",
}  # fmt: skip


# ---- Running them ----


def one_run(name: str, case: Case, out: Path, seed: int | None) -> Path:
    """Run it; returns its folder."""
    folder = "".join(letter if letter.isalnum() else "-" for letter in name).replace("--", "-").strip("-")
    folder += f"-{seed}" * (seed is not None)
    shutil.rmtree(out / folder, ignore_errors=True)
    given = [f"output_dir={out}", f"run_name={folder}", "tracking.log_completions=0", *case.overrides]
    if case.start:
        model = warm_start(case.start, out)
        if name == "ill: stop token missing":
            model = without_stop_token(model, out / "model-without-stop-token")
        given.append(f"model.path={model}")
    given += [f"seed={seed}"] * (seed is not None)
    tree = read_yaml(ROOT / "configs" / case.config)
    with stale_engine() if name == "ill: engine weights stale" else nullcontext():
        prepare_run(load_config(merge_trees(tree, parse_overrides(given)))).execute()
    return out / folder


def recorded(run: Path, case: Case) -> dict[str, Any]:
    """Return the doctor's input from a run: metrics to three digits, and completions of the step of the finding."""
    rows = read_metrics(run / "metrics.jsonl")
    found = {finding.id: finding.step for finding in diagnose(rows)}
    rows = [row for row in rows if not is_evaluation(row) and row["step"] <= found.get(str(case.finding), row["step"])]
    names = ["step", *sorted({name for row in rows for name in row if READ.match(name)})]
    columns = {name: [_rounded(row.get(name)) for row in rows] for name in names}
    kept: dict[str, Any] = {"finding": case.finding, "metrics": columns}
    if case.finding in found:
        lines = read_metrics(run / f"rollouts/step_{found[case.finding]:06d}/train.jsonl")
        keys = ("prompt_id", "prompt", "ground_truth", "completion", "reward")
        kept["rollouts"] = [
            {key: line[key] for key in keys} for line in lines[:: max(1, len(lines) // RECORDED_ROLLOUTS)]
        ]
    return kept


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--only", nargs="+", metavar="WORD", help="runs whose name has one of these words")
    parser.add_argument("--seed", type=int, help="of all runs; without it, of their configs")
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT / "benchmarks")  # of processes that compute rewards
    out = arguments.out
    cases = {**illnesses(), **hacks(out), **good(out)}
    wrong = 0
    print("| run | found, at step | |\n|---|---|---|")
    for name, case in cases.items():
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        if case.start == "stories" and not STORIES.exists():
            print(f"| {name} | left out: there is no {STORIES} | |")
            continue
        run = one_run(name, case, out, arguments.seed)
        found = read_metrics(run / "findings.jsonl")
        names = {row["id"] for row in found}
        fine = case.finding in names if case.finding else not any(map(HACKED.search, names))
        wrong += not fine
        said = "; ".join(f"{row['id']} ({row['step']})" for row in found)
        quote = next((f": {row['quote']}" for row in found if row["id"] == case.finding and row.get("quote")), "")
        print(f"| {name} | {said or 'nothing'}{quote} | {'' if fine else 'WRONG'} |", flush=True)
        if arguments.record:
            path = arguments.record / f"{run.name}.json"
            path.write_text(json.dumps(recorded(run, case), ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
