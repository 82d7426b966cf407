"""Algorithms in the real loop, on a tiny random model: every config trains, and what some ask of the loop is there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atomrl import assembly
from atomrl.algorithms.table import ALGORITHMS, PREFERENCES, build_algorithm
from atomrl.config import build_config, merge_trees, read_yaml
from atomrl.data.rows import to_rows
from atomrl.loop.report import Stopwatch
from atomrl.loop.sync import NoSignal, Progress, collect, train
from atomrl.objective.compose import COEFFICIENT
from tests.loop.test_sync import make_parts, saver, weights
from tests.tiny import make_tiny_model

CONFIGS = Path(__file__).parents[2] / "configs" / "algorithms"
EXTRA_AXES = {
    "pass_at_k": {"advantage": {"k": 2}},  # of 4 completions
    "corrected": {"correction": "token_tis", "selection": "random", "kl": {"coefficient": 0.1, "target": 0.01}},
    "several corrections": {"correction": [{"type": "token_tis", "normalised": True}, "kl_rejection", "second_moment"]},
    "by prompt": {"aggregate": "prompt_mean", "correction": {"type": "kl_rejection", "bound": 1.0}},
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
    functions = [{**item, "function": "tests.letters.letter_reward"} for item in tree["reward"]["functions"]]
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
    return build_config(merge_trees(tree, changes))


def test_every_algorithm_has_a_config_of_its_name():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*ALGORITHMS, *PREFERENCES}
    for path in CONFIGS.glob("*.yaml"):
        tree = read_yaml(path)
        assert tree["algorithm"]["name"] == tree["run_name"] == path.stem
        build_config(tree)


@pytest.mark.parametrize("name", dict.fromkeys([*ALGORITHMS, "online_dpo", *EXTRA_AXES]))
def test_every_config_trains_a_step(model, tmp_path, name, monkeypatch):
    monkeypatch.setattr("atomrl.tracking.curves.draw_curves", lambda *args: None)  # most of the time, and not asked for
    tree = read_yaml(CONFIGS / f"{'grpo' if name in EXTRA_AXES and name not in ALGORITHMS else name}.yaml")
    config = small(model, tmp_path, tree, **EXTRA_AXES.get(name, {}))
    summary = assembly.train(config)
    assert summary["finished"]
    (row,) = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert row["actor/grad_norm"] > 0 and "actor/skipped_updates" not in row
    assert row["training/updates"] == (2 if "rows_per_update" in tree["train"] else 1)


def test_dynamic_sampling_trains_on_mixed_groups_only_and_fills_the_batch(model, tmp_path):
    """The reward makes every other group constant; also where only a completion without a row differs."""
    dapo = build_algorithm("dapo", {}, max_completion_tokens=12)
    parts, _ = make_parts(model, tmp_path, algorithm=dapo)
    scored, drawn = parts.rewards, []

    def half_constant(rollouts):
        rewarded = scored(rollouts)
        drawn.extend(rewarded.prompt_ids)
        groups = [
            (0.3,) * len(group) if len(drawn) % 2 == place % 2 else group
            for place, group in enumerate(rewarded.rewards)
        ]
        completions = tuple(
            (replace(group[0], token_ids=(), logprobs=(), loss_mask=()), *group[1:]) if place == 1 else group
            for place, group in enumerate(rewarded.completions)
        )
        odd = [(0.0, 1.0, 1.0, 1.0) if place == 1 else group for place, group in enumerate(groups)]
        return replace(rewarded, rewards=tuple(odd), completions=completions)

    parts = replace(parts, rewards=half_constant)
    rewarded = collect(parts, 6, 1, Stopwatch())
    assert len(rewarded.samples) == 6 and len(drawn) > 6
    assert all(min(group) < max(group) for group in rewarded.rewards)
    credited = dapo.advantages(to_rows(rewarded))
    for group in range(6):
        own = credited.advantages[credited.group_ids == group]
        assert own.max() > 0 > own.min()


def test_dynamic_sampling_stops_where_the_data_has_no_signal(model, tmp_path):
    parts, _ = make_parts(model, tmp_path, algorithm=build_algorithm("dapo", {}, max_completion_tokens=12))
    scored = parts.rewards

    def constant(rollouts):
        rewarded = scored(rollouts)
        return replace(rewarded, rewards=tuple((0.3,) * len(group) for group in rewarded.rewards))

    with pytest.raises(NoSignal, match="dapo accepted 0 of 60 groups and needs 3"):
        collect(replace(parts, rewards=constant), 3, 1, Stopwatch())


def test_remax_is_compared_with_the_greedy_completion(model, tmp_path):
    remax = build_algorithm("remax", {"kl": {"coefficient": 0.0}})
    parts, _ = make_parts(model, tmp_path, algorithm=remax)
    rewarded = collect(parts, 3, 1, Stopwatch())
    greedy = parts.engine.generate(
        parts.processor.to_prompt_batch(list(zip(rewarded.prompt_ids, rewarded.samples, strict=True))),
        replace(parts.sampling, temperature=0.0, completions_per_prompt=1),
    )
    expected = tuple(group[0] for group in parts.rewards(greedy).rewards)
    assert rewarded.baseline_rewards == pytest.approx(expected)
    rows = to_rows(rewarded)
    credited = remax.advantages(rows)
    for i in range(rows.rows):
        own = credited.advantages[i][credited.loss_mask[i]]
        assert torch.allclose(own, rows.rewards[i] - expected[int(rows.group_ids[i])], atol=1e-6)
    assert [len(group) for group in rewarded.completions] == [4, 4, 4], "the greedy one is not trained on"


def test_a_greedy_completion_without_a_reward_gives_no_signal(model, tmp_path):
    remax = build_algorithm("remax", {"kl": {"coefficient": 0.0}})
    parts, _ = make_parts(model, tmp_path, algorithm=remax)
    rewarded = collect(parts, 3, 1, Stopwatch())
    rows = to_rows(replace(rewarded, baseline_rewards=(None, 0.1, None)))
    credited = remax.advantages(rows)
    assert not credited.advantages[rows.group_ids != 1].any() and credited.advantages[rows.group_ids == 1].any()


def test_an_adaptive_coefficient_survives_a_restart(model, tmp_path):
    axes = {"kl": {"type": "k2", "coefficient": 0.5, "target": 1e-6, "horizon": 20.0}}

    def run(folder, steps, progress, checkpoint=None):
        algorithm = build_algorithm("grpo", axes)
        parts, plan = make_parts(model, folder, algorithm=algorithm)
        trainer = type(parts.trainer)
        parts = replace(parts, trainer=with_reference(trainer, model, plan))
        if checkpoint is not None:
            parts.trainer.load(checkpoint)
        train(parts, replace(plan, steps=steps, save_every_steps=1), progress, saver(parts))
        return parts

    whole, progress = run(tmp_path / "whole", 3, Progress()), Progress()
    run(tmp_path / "first", 2, progress)
    folder = tmp_path / "first" / "step_2"
    saved = json.loads((folder / "progress.json").read_text())
    assert saved["algorithm_state"][COEFFICIENT] != 0.5
    second = run(tmp_path / "second", 3, Progress(**saved), folder)
    assert second.algorithm.state == whole.algorithm.state
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, weights(whole)[name])


def with_reference(backend, model, plan):
    from atomrl.config import ModelConfig, TrainConfig

    train_config = TrainConfig(steps=4, learning_rate=3e-3, tokens_per_micro_batch=128)
    return backend(ModelConfig(path=model, dtype="float32"), train_config, total_updates=8, needs_reference=True)
