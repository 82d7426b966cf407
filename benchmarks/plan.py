"""`atomrl plan --probe` against the run itself: peak memory, and seconds of a step, on configs of several kinds.

    python benchmarks/plan.py [--configs quickstart hf ...] [--steps 6] [--rounds 2] [--out FILE]

Each config is planned, then run for some steps in a process of its own, on the model of the quickstart's warm start
(`make quickstart` makes it) or on a GPT of random weights; so in turns, for a machine's speed changes from minute to
minute, and what is compared is the mean over the rounds. The bar: 15% of the memory, 25% of the time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from atomrl.config import RunConfig, load_config, merge_trees
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import load_tokenizer, save_model
from atomrl.planner.forecast import forecast
from atomrl.planner.probe import measure
from atomrl.trainer import prepare_run

ROOT = Path(__file__).parents[1]
WARM = "runs/quickstart-warm-start/model"
LONG = {"rollout": {"max_completion_tokens": 256, "min_completion_tokens": 200}, "model": {"path": "MEDIUM"}}
SMALL = {"rollout": {"prompts_per_step": 8}, "data": {"train_size": 500, "eval_size": 20}}
CONFIGS: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "77M full": {"model": {"path": "MEDIUM"}, **SMALL},
    "77M LoRA": {"model": {"path": "MEDIUM", "lora": {"rank": 16}}, **SMALL},
    "DPO": {"algorithm": {"name": "dpo"}, "train": {"rows_per_update": 64}},
    "PPO with critic": {"algorithm": {"name": "ppo"}},
    "hf engine": {"rollout": {"engine": "hf", "prompts_per_step": 16}},
    "long completions": merge_trees(SMALL, LONG),
    "at accumulation": {"train": {"rows_per_update": 128, "tokens_per_micro_batch": 512}},
}


def medium(folder: Path) -> str:
    """A GPT of 77 million parameters with the quickstart's tokenizer."""
    tokenizer = load_tokenizer(WARM)
    shape = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 4, "intermediate": 2048}
    model = new_gpt(vocab_size=len(tokenizer), **shape)
    save_model(model, tokenizer, folder)
    return str(folder)


def both(config: RunConfig, steps: int) -> dict[str, float]:
    """Return memory and time of a config by `plan --probe`, and of some real steps."""
    planned = forecast(config, prepare_run(config))
    real = measure(config, {"train": {"steps": steps}})
    return {
        "planned_mib": planned.measured.peak_bytes / 2**20,
        "real_mib": real.peak_bytes / 2**20,
        "planned_s": planned.step_seconds,
        "real_s": real.mean("timing_s/step"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    base, rows = load_config(ROOT / "configs/quickstart.yaml").to_tree(), []
    with tempfile.TemporaryDirectory() as place:
        path = (
            medium(Path(place, "medium")) if any("77M" in name or "long" in name for name in arguments.configs) else ""
        )
        for name in arguments.configs:
            tree = base if "algorithm" not in CONFIGS[name] else {k: v for k, v in base.items() if k != "algorithm"}
            tree = merge_trees(tree, CONFIGS[name])
            if tree["model"]["path"] == "MEDIUM":
                tree["model"]["path"] = path
            config = load_config(tree)
            rounds = [both(config, arguments.steps) for _ in range(arguments.rounds)]
            row = {key: sum(one[key] for one in rounds) / len(rounds) for key in rounds[0]}
            rows.append({"config": name, **row, "rounds": rounds})
            memory, seconds = row["planned_mib"] / row["real_mib"] - 1, row["planned_s"] / row["real_s"] - 1
            print(f"{name:<18} memory {row['planned_mib']:7.0f} | {row['real_mib']:7.0f} MiB ({memory:+.0%})   "
                  f"step {row['planned_s']:6.3f} | {row['real_s']:6.3f} s ({seconds:+.0%})", flush=True)  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
