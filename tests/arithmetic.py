"""A short run on arithmetic, for tests of where its parts run."""

from __future__ import annotations

from pathlib import Path


def arithmetic_run(model: Path, name: str, reward: str) -> list[str]:
    """Arguments of `atomrl train` for four steps: config and overrides. It writes to `runs/NAME` beside the model.

    Args:
        reward: an item of `reward.functions`.
    """
    path = model.parent / f"{name}.yaml"
    path.write_text("data: {train: arithmetic}\nrun_name: x\n")
    settings = {
        "run_name": name,
        "output_dir": str(model.parent / "runs"),
        "model.path": str(model),
        "model.dtype": "float32",
        "model.device": "cpu",
        "data.train": "arithmetic",
        "data.train_size": 64,
        "rollout.prompts_per_step": 4,
        "rollout.completions_per_prompt": 4,
        "rollout.max_completion_tokens": 24,
        "reward.functions": f"[{reward}]",
        "train.steps": 4,
        "train.learning_rate": 0.001,
    }
    return [str(path), *(f"{key}={value}" for key, value in settings.items())]


def trained_weights(model: Path, name: str) -> bytes:
    """Return the weights of the policy at the end of a run."""
    return (model.parent / "runs" / name / "model" / "model.safetensors").read_bytes()
