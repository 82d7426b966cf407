"""Algorithms in the real loop, on a tiny random model: every config trains, and what some ask of the loop is there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atomrl.algorithms import ALGORITHMS, PREFERENCES, objective_of
from atomrl.config import load_config, merge_trees, read_yaml
from atomrl.objectives.policy import COEFFICIENT
from atomrl.trainer import prepare_run
from atomrl.trainer.loop import Progress
from atomrl.weight_sync import InProcessTransfer
from tests.tiny import make_tiny_model
from tests.trainer.scripted import planned, train
from tests.trainer.test_sync import make_parts, saver, weights

CONFIGS = Path(__file__).parents[2] / "configs" / "algorithms"
EXTRA_AXES = {
    "pass_at_k": {"advantage": {"k": 2}},  # of 4 completions
    "corrected": {"rollout_is": "token_tis", "token_filter": "random", "kl": {"coefficient": 0.1, "target": 0.01}},
    "several corrections": {"rollout_is": [{"type": "token_tis", "normalised": True}, "kl_rejection", "second_moment"]},
    "by prompt": {"loss_agg": "prompt_mean", "rollout_is": {"type": "kl_rejection", "bound": 1.0}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder / "teacher", "llama", seed=1)
    return str(make_tiny_model(folder, "llama"))


def small(model, folder, tree, **axes):
    """A config with everything made small; what makes it the algorithm it is stays."""
    ones = tree["rollout"]["completions_per_prompt"] == 1
    update = {"rows_per_update": 4} if "rows_per_update" in tree["train"] else {}
    functions = [{**item, "function": "tests.light_rewards.letter_reward"} for item in tree["reward"]["functions"]]
    changes = {
        "output_dir": str(folder),
        "model": {"path": model, "device": "cpu"},
        **({"teacher": {"path": f"{model}/teacher"}} if "teacher" in tree else {}),
        "data": {"train_size": 30, "eval": None, "eval_size": None},
        "rollout": {
            "prompts_per_step": 8 if ones else 2,
            "completions_per_prompt": 1 if ones else 4,
            "max_completion_tokens": 10,
        },
        "reward": {"functions": functions},
        "train": {"steps": 1, **update},
        "eval": {"every_steps": 0, "before": False, "after": False},
        "tracking": {"save_rollouts": False},
        "algorithm": axes,
    }
    return load_config(merge_trees(tree, changes))


def test_every_algorithm_has_a_config_of_its_name():
    shipped, named = {path.stem for path in CONFIGS.glob("*.yaml")}, {*ALGORITHMS, *PREFERENCES}
    assert not named - shipped, f"add configs/algorithms/NAME.yaml for {sorted(named - shipped)}"
    assert not shipped - named, f"no algorithm has the name of configs {sorted(shipped - named)}"
    for path in CONFIGS.glob("*.yaml"):
        tree = read_yaml(path)
        assert tree["algorithm"]["name"] == tree["run_name"] == path.stem
        load_config(tree)


@pytest.mark.parametrize("name", dict.fromkeys([*ALGORITHMS, "online_dpo", *EXTRA_AXES]))
def test_every_config_trains_a_step(model, tmp_path, name, monkeypatch):
    monkeypatch.setattr(
        "atomrl.tracking.reading.plots.draw_curves", lambda *args: None
    )  # most of the time, and not asked for
    tree = read_yaml(CONFIGS / f"{'grpo' if name in EXTRA_AXES and name not in ALGORITHMS else name}.yaml")
    config = small(model, tmp_path, tree, **EXTRA_AXES.get(name, {}))
    summary = prepare_run(config).execute()
    assert summary["finished"]
    (row,) = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert row["actor/grad_norm"] > 0 and "actor/skipped_updates" not in row
    assert row["training/updates"] == (2 if "rows_per_update" in tree["train"] else 1)


def test_an_adaptive_coefficient_survives_a_restart(model, tmp_path):
    axes = {"kl": {"type": "k2", "coefficient": 0.5, "target": 1e-6, "horizon": 20.0}}

    def run(folder, steps, progress, checkpoint=None):
        algorithm = objective_of({"name": "grpo", **axes}).resolved()
        parts, _ = make_parts(model, folder, algorithm=algorithm)
        trainer = type(parts.trainer)
        trainer = with_reference(trainer, model, algorithm)
        parts = replace(parts, trainer=trainer, transfer=InProcessTransfer(trainer, parts.source.engine))
        if checkpoint is not None:
            parts.trainer.load(checkpoint)
        train(parts, planned(steps=steps, updates_per_epoch=2, save=1), progress, saver(parts))
        return parts

    never_stopped, progress = Progress(), Progress()
    whole = run(tmp_path / "whole", 3, never_stopped)
    run(tmp_path / "first", 2, progress)
    folder = tmp_path / "first" / "step_2"
    saved = json.loads((folder / "progress.json").read_text())
    assert saved["algorithm_state"][COEFFICIENT] != 0.5
    resumed = Progress(**saved)
    second = run(tmp_path / "second", 3, resumed, folder)
    assert resumed.algorithm_state == never_stopped.algorithm_state
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, weights(whole)[name])


def with_reference(backend, model, algorithm):
    from atomrl.config import ModelConfig, TrainConfig

    train_config = TrainConfig(steps=4, learning_rate=3e-3, tokens_per_micro_batch=128)
    return backend(ModelConfig(path=model, dtype="float32"), train_config, algorithm, total_updates=8)
