"""`atomrl plan`: whether it fits is said by the exit code, and a probe leaves nothing."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from atomrl.algorithms import objective_of
from atomrl.cli.main import main
from atomrl.cli.plan import print_forecast
from atomrl.config import ConfigError, load_config
from atomrl.planner.forecast import Forecast, forecast
from atomrl.planner.probe import ProbeResult, measure
from atomrl.trainer import prepare_run
from atomrl.trainer.memory import memory_by_phase

CONFIG = {
    "run_name": "first",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 6},
    "reward": {"functions": ["./mine.py:ends_with_e"]},
    "train": {"steps": 20, "learning_rate": 1e-3},
}


@pytest.fixture
def folder(working_directory):
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1)} for k in range(6)]
    place = working_directory(CONFIG, train=rows, eval=rows[:3])
    code = "def ends_with_e(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n"
    (place / "mine.py").write_text(code)
    (place / "json.py").write_text("raise RuntimeError('a file beside the run hides the standard library')")
    return place


def test_small_steps_that_fit_do_not_stand_for_long_rows_that_do_not(folder, monkeypatch):
    measured = SimpleNamespace(measured=SimpleNamespace(peak_bytes=1))
    monkeypatch.setattr("atomrl.planner.forecast.forecast", lambda *given: measured)
    monkeypatch.setattr("atomrl.cli.plan.print_forecast", lambda *given: None)
    for size, code in (("1MiB", 1), ("900GiB", 0)):
        assert main(["plan", "c.yaml", "--probe", "--memory", size]) == code


def test_the_largest_phase_decides(folder):
    config = load_config("c.yaml")
    memory = memory_by_phase(config, prepare_run(config).algorithm)
    assert memory.peak == memory.process + memory.resident + max(memory.phases.values())
    wide = load_config("c.yaml", ["train.tokens_per_micro_batch=100000"])
    more = memory_by_phase(wide, prepare_run(wide).algorithm)
    assert more.largest == "update" and more.phases["update"] > memory.phases["update"]
    assert more.phases["rollout"] == memory.phases["rollout"] and more.resident == memory.resident


RANKED = {
    "two ranks": (["type=fsdp", "ranks=2"], 3 / 2 + 1),
    "eight ranks": (["type=fsdp", "ranks=8"], 3 / 8 + 1),
    "copies": (["type=fsdp", "ranks=2", "replicas=2"], 3 + 1),
    "in the CPU's memory": (["type=fsdp", "ranks=2", "cpu_offload=true"], 1),
    "megatron": (["type=megatron", "ranks=4", "tensor=2"], 1 / 2 + 2 / 4 + 1),
}


@pytest.mark.parametrize("name", RANKED)
def test_a_plan_of_ranks_shows_the_first_rank(folder, name):
    """A share of weights and moments, and the engine's weights."""
    overrides, expected = RANKED[name]
    config = load_config("c.yaml", [f"backend.{override}" for override in overrides])
    alone = load_config("c.yaml")
    weights = memory_by_phase(alone, prepare_run(alone).algorithm).resident / 4
    memory = memory_by_phase(config, objective_of({"name": "grpo"}), config.backend.ranks)
    assert memory.resident == pytest.approx(expected * weights, rel=1e-3)
    assert memory.phases["rollout"] < memory.phases["update"]


def test_it_says_whose_memory_it_is(folder, capsys):
    assert main(["plan", "c.yaml", "backend.type=fsdp", "backend.ranks=2", "backend.replicas=2"]) == 0
    assert "at the longest rows, of the first of 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "code", "said"), [("8GiB", 0, ": fits"), ("1MiB", 1, "does not fit\n")])
def test_exit_code_and_advice(folder, capsys, size, code, said):
    assert main(["plan", "c.yaml", "--memory", size]) == code
    printed = capsys.readouterr().out
    assert said in printed and "<- peak" in printed and "a step: 2 prompts x 2 completions" in printed


@pytest.mark.parametrize("size", ["lots", "24", "GiB"])
def test_a_size_that_is_none(folder, capsys, size):
    assert main(["plan", "c.yaml", "--memory", size]) == 2
    assert "24GiB" in capsys.readouterr().err


def test_a_signal_of_no_prompt_is_refused_before_anything_runs(folder, capsys):
    assert main(["plan", "c.yaml", "--signal", "0"]) == 2
    assert "--signal 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_probe_measures_and_leaves_nothing(folder, capsys):
    before = sorted(path.name for path in folder.iterdir())
    assert main(["plan", "c.yaml", "--probe", "--signal", "4"]) == 0
    printed = capsys.readouterr().out
    assert "measured on a few small steps" in printed and " evaluations; checkpoints" in printed
    assert "4 prompts x 2 completions, before training" in printed
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.slow
def test_a_small_step_is_scaled_to_the_real_one(folder):
    changes = ["rollout.prompts_per_step=6", "rollout.max_concurrent_completions=4", "train.tokens_per_micro_batch=64"]
    config = load_config("c.yaml", [*changes, "train.rows_per_update=6"])
    estimate = forecast(config, prepare_run(config))
    assert estimate.measured.steps[-1]["train/rows"] == 4 and estimate.measured.steps[-1]["training/updates"] == 2
    assert config.rollout.prompts_per_step * config.rollout.completions_per_prompt == 3 * 4
    once = estimate.measured.mean("timing_s/update_actor")
    assert estimate.seconds["update_actor"] == pytest.approx(3 * once)
    assert estimate.seconds["gen"] == pytest.approx(3 * estimate.measured.mean("timing_s/gen"))
    assert estimate.at_limit >= 0.9 * estimate.step_seconds
    assert estimate.run_seconds > 20 * estimate.step_seconds  # and two evaluations


@pytest.mark.parametrize(("evaluations", "said"), [(2, " with 2 evaluations; checkp"), (0, "; evaluations, checkp")])
def test_it_says_whether_evaluations_are_counted(capsys, evaluations, said):
    print_forecast(Forecast(ProbeResult((), 1, False), {}, 0.0, 60.0, evaluations, 0.0), 2, "here")
    assert said in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("enough_s", "steps"), [(0.0, 3), (1000.0, 5)])
def test_a_probe_ends_by_the_clock_or_its_steps(folder, enough_s, steps):
    """A mean over two steps of milliseconds is unreliable: on such a machine they differ by half."""
    assert len(measure(load_config("c.yaml"), {"train": {"steps": 5}}, enough_s).steps) == steps


@pytest.mark.slow
def test_without_weights_random_ones_are_measured(folder, capsys):
    model = Path("model").resolve()
    shapes = folder / "shape"
    shapes.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (shapes / file.name).write_bytes(file.read_bytes())
    config = load_config("c.yaml", ["model.path=shape"])
    measured = measure(config, {"train": {"steps": 1}})
    assert measured.random_weights and len(measured.steps) == 1 and measured.peak_bytes > 2**20
    assert main(["plan", "c.yaml", "model.path=shape", "--signal", "2"]) == 2
    assert "weights are not on this machine" in capsys.readouterr().err


@pytest.mark.slow
def test_a_probe_of_a_run_finds_the_functions_of_the_run(folder, monkeypatch):
    (folder / "run").mkdir()
    data = {name: str(folder / f"{name}.jsonl") for name in ("train", "eval")}
    tree = CONFIG | {"model": CONFIG["model"] | {"path": str(folder / "model")}, "data": CONFIG["data"] | data}
    (folder / "run/config.yaml").write_text(json.dumps(tree))
    (folder / "run/env.json").write_text(json.dumps({"functions_in": [str(folder)]}))
    monkeypatch.chdir(folder / "run")
    assert len(measure(load_config(folder / "run"), {"train": {"steps": 1}}).steps) == 1


@pytest.mark.slow
def test_a_probe_that_fails_says_why(folder):
    with pytest.raises(ConfigError, match=r"probe failed:(.|\n)*none\.jsonl"):
        measure(load_config("c.yaml"), {"data": {"train": "none.jsonl"}})
