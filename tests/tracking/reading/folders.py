"""Folders of runs, written by hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS, PROMPTS, GROUP = 3, 2, 2


def write_run(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    changes: Mapping[tuple[int, str, int], Mapping[str, Any]] | None = None,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    steps: int = STEPS,
) -> Path:
    """A run of some steps.

    Args:
        config: keys over a small one.
        environment: likewise, of `env.json`.
        changes: (step, prompt, completion) -> what that completion has instead.
        metrics: step -> what its metrics have instead.
    """
    folder.mkdir(parents=True)
    tree = {"run_name": folder.name, "seed": 0, "train": {"steps": steps, "learning_rate": 0.1}} | dict(config or {})
    (folder / "config.yaml").write_text(json.dumps(tree))
    identity = {"data (data.train)": "d0", "model (model.path)": "m0"}
    env = {"packages": {"torch": "2.13"}, "identity": identity, "time": folder.name} | dict(environment or {})
    (folder / "env.json").write_text(json.dumps(env))
    lines: list[dict[str, Any]] = [{"step": 0, "val-core/sums/acc/mean@1": 0.25}]
    for step in range(1, steps + 1):
        row = {"step": step, "critic/score/mean": step / 10, "timing_s/step": hash(folder.name) % 97}
        lines.append(row | dict((metrics or {}).get(step, {})))
        _write_rollouts(folder / "rollouts" / f"step_{step:06d}" / "train.jsonl", step, changes or {})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text('{"finished": true}')
    return folder


def _write_rollouts(path: Path, step: int, changes: Mapping[tuple[int, str, int], Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    rows = []
    for prompt in range(PROMPTS):
        for index in range(GROUP):
            row = {
                "step": step, "prompt_id": f"p{prompt}", "completion_index": index, "data_source": "sums",
                "prompt": f"{prompt} + {index}", "ground_truth": str(prompt), "completion": f"it is {step + index}",
                "prompt_tokens": 4, "completion_tokens": 3, "token_ids": [1, 2, 3 + step + index],
                "reward": float(index), "reward_parts": {"exact": float(index)}, "advantage": index - 0.5,
                "finish_reason": "stop", "policy_version": step,
            }  # fmt: skip
            rows.append(row | dict(changes.get((step, f"p{prompt}", index), {})))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
