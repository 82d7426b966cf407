"""`atomrl tune`: spaces that are checked, trials that are the same after a kill, a verdict that is honest."""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from atomrl.cli import tune as command
from atomrl.config import ConfigError, load_config
from atomrl.tools import tuning
from atomrl.tools.search_space import read_space, with_values
from atomrl.tools.tuning import Settings, is_worse_half, open_study, run_trial, tune, wait_until_free, why_pruned
from atomrl.tracking.reading.lock import is_locked
from atomrl.tracking.reading.studies import load_study

CONFIG = {
    "run_name": "first",
    "model": {"path": "model"},
    "data": {"train": "chain", "train_size": 100},
    "train": {"steps": 8, "learning_rate": 0.1},
}
# Stands for a run: its reward grows to a value that the learning rate decides, best at 0.01; above 0.5 it fails. After
# each step it does what PAUSE says.
FAKE = """
    import fcntl, json, math, pathlib, sys, time
    keys = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    rate, seed = json.loads(keys.get("train.learning_rate", "0.1")), json.loads(keys.get("seed", "0"))
    folder = pathlib.Path(json.loads(keys["output_dir"]), json.loads(keys["run_name"]))
    if rate > 0.5:
        sys.exit(1)
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("w")
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as a run does: it fails where another process writes it
    (folder / "config.yaml").write_text("{}")
    value = 1 - abs(math.log10(rate) + 2) / 2 + 0.001 * (seed % 7)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 9):
            file.write(json.dumps({"step": step, "critic/score/mean": value * step / 8}) + "\\n")
            file.flush()
            PAUSE
    (folder / "summary.json").write_text('{"finished": true}')
"""


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "space.yaml").write_text("train.learning_rate: {low: 1.0e-4, high: 1.0, log: true}\n")
    return tmp_path


ENDED_AT_HALF = "time.sleep(600 * (step == 4))"
"""A run that nobody ends takes ten minutes."""


def settings(place: Path, pause: str = "pass", out: str = "study", **given) -> Settings:
    script = place / "fake.py"
    script.write_text(textwrap.dedent(FAKE).replace("PAUSE", pause))
    given = {"runs": 8, "seeds": 3, "window": 2} | given
    return Settings(folder=place / out, command=[sys.executable, str(script)], **given)


def space(place: Path):
    return read_space(place / "space.yaml", load_config(CONFIG))


def trials(folder: Path) -> list[tuple[int, dict[str, float], str]]:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.study import load_study

    study = load_study(study_name="tune", storage=JournalStorage(JournalFileBackend(str(folder / "study.journal"))))
    return [(trial.number, trial.params, trial.state.name) for trial in study.trials]


def test_a_better_trial_is_found_and_reported(place):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    said = []
    result = tune(load_config(CONFIG), space(place), settings(place), said.append)
    assert result["better"] and result["gain"] > result["interval"]
    assert abs(math.log10(result["best"]["train.learning_rate"]) + 2) < 1  # 0.1 is as the config has it
    assert 2 <= len(result["finals"]) <= 4 and all(len(values) == 3 for values in result["finals"].values())
    assert result["seeds"] == [1000, 1001, 1002]
    best = yaml.safe_load((place / "study/best.yaml").read_text())
    assert best["train"]["learning_rate"] == result["best"]["train.learning_rate"]
    assert "is better than the original config" in said[-1]
    assert {state for _, _, state in trials(place / "study")} <= {"COMPLETE", "FAIL", "PRUNED"}


def test_a_budget_too_small_for_the_finals_is_refused_before_the_first_trial(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ConfigError, match=r"pip install 'atomrl\[tune\]'"):
        tune(load_config(CONFIG), space(place), settings(place))
    assert not (place / "study").exists()


def test_a_study_without_improvement_says_so(place):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    config = load_config(CONFIG | {"train": {"steps": 8, "learning_rate": 0.01}})
    (place / "space.yaml").write_text("train.weight_decay: [0.0, 0.1]\n")
    said = []
    result = tune(config, read_space(place / "space.yaml", config), settings(place, runs=3), said.append)
    assert (
        not result["better"]
        and result["gain"] == 0
        and "is not clearly better than the original config: +0.0000" in said[-1]
    )


def test_choices_are_what_they_were_also_where_they_are_long(place):
    config = load_config(CONFIG)
    given = ["a " * 60, "a " * 60 + "b", "two\nlines"]
    (place / "space.yaml").write_text(json.dumps({"data.system_prompt": given}))
    space = read_space(place / "space.yaml", config)
    drawn = [space.suggest(Drawn(place)) for place in range(2)]  # type: ignore[arg-type]
    assert [one["data.system_prompt"] for one in drawn] == given[:2]
    assert space.values_of({"data.system_prompt": json.dumps(given[2])}) == {"data.system_prompt": given[2]}


def test_another_type_of_a_choice_has_its_own_defaults(place):
    config = load_config(CONFIG | {"algorithm": {"name": "grpo", "advantage": {"type": "grpo", "eps": 0.5}}})
    (place / "space.yaml").write_text(
        "algorithm.advantage.type: [grpo, grpo_no_std, gdpo]\nalgorithm.kl.type: [k1, k3]\n"
    )
    assert len(read_space(place / "space.yaml", config).ends()) == 5
    assert with_values(config, {"algorithm.advantage.type": "grpo"}).algorithm.advantage.eps == 0.5
    other = with_values(config, {"algorithm.kl.coefficient": 0.2, "algorithm.kl.type": "k1",
                                 "algorithm.advantage.type": "gdpo"})  # fmt: skip
    fresh = load_config(CONFIG | {"algorithm": {"name": "grpo", "advantage": {"type": "gdpo"}}})
    assert other.algorithm.advantage == fresh.algorithm.advantage
    assert (other.algorithm.kl.type, other.algorithm.kl.coefficient) == ("k1", 0.2)


class Drawn:
    """Stands for a trial: the choice at a place."""

    def __init__(self, place: int) -> None:
        self.place = place

    def suggest_categorical(self, key: str, choices: list[str]) -> str:
        return choices[self.place]


@pytest.mark.parametrize("metric", ["val-core/chain/acc/mean@1", "nothing"])
def test_a_metric_of_evaluations(place, metric):
    run = place / "study/runs/trial_000"
    run.mkdir(parents=True)
    rows = [{"step": 4, "critic/score/mean": 0.1}, {"step": 4, "val-core/chain/acc/mean@1": 0.25}]
    rows += [{"step": 8, "critic/score/mean": 0.1}, {"step": 8, "val-core/chain/acc/mean@1": 0.75}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "summary.json").write_text('{"finished": true}')
    given = settings(place, metric=metric)
    if metric == "nothing":
        with pytest.raises(ConfigError, match="critic/score/mean, val-core"):
            run_trial(8, {}, "trial_000", given)
    else:
        assert run_trial(8, {}, "trial_000", given).value == 0.5
        assert run_trial(8, {}, "trial_000", settings(place, metric=f"-{metric}")).value == -0.5


def test_a_metric_that_there_is_not_ends_a_study_in_its_first_steps(place):
    given = settings(place, ENDED_AT_HALF, metric="critic/score/maen")
    given.folder.mkdir()
    with pytest.raises(ConfigError, match="'critic/score/mean'"):
        run_trial(8, {"train.learning_rate": 0.01}, "trial_000", given, lambda place, value: False)
    rows = (place / "study/runs/trial_000/metrics.jsonl").read_text().splitlines()
    assert 3 <= len(rows) <= 4


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({}, "critic/score/mean"),
        ({"algorithm": {"name": "dpo"}}, "rewards/accuracies"),
        ({"sft": {}}, "-sft/nll_per_token"),
        ({"pretrain": {}}, "-train/loss"),
    ],
)
def test_the_default_metric_of_a_study(changes, metric):
    assert command.default_metric(load_config({**CONFIG, **changes}).kind) == metric


def test_bad_trials_end_at_half(place, monkeypatch):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    # A trial waits at half and at three quarters until it was asked about; a final is asked about nothing.
    waits = "while step in (4, 6) and folder.name.startswith('trial') and not (folder / f'asked_{step}').exists(): "
    given = settings(place, waits + "time.sleep(0.02)", runs=4, seeds=1)
    ask = tuning.why_pruned

    def asked(last, folder, settings, judge, judged):
        ended = ask(last, folder, settings, judge, judged)
        for rung in judged if not ended else ():
            (folder / f"asked_{rung}").touch()
        return ended

    monkeypatch.setattr(tuning, "why_pruned", asked)
    tune(load_config(CONFIG), space(place), given, lambda line: None)
    pruned = [number for number, _, state in trials(place / "study") if state == "PRUNED"]
    lengths = [len((place / f"study/runs/trial_{n:03d}/metrics.jsonl").read_text().splitlines()) for n in pruned]
    assert pruned and set(lengths) <= {4, 6}


def test_trials_in_which_the_doctor_finds_an_error_are_invalid_and_it_is_named(place):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    finding = {"id": "pays_for_length", "severity": "error", "step": 2, "what": "It pays for length.", "advice": ""}
    found = f"(folder / 'findings.jsonl').write_text({json.dumps(finding)!r})"
    said = []
    with pytest.raises(ConfigError, match=r"finished \(2 ended by the doctor \(pays_for_length\)\)"):
        tune(load_config(CONFIG), space(place), settings(place, f"rate < 1 and {found}", runs=2), said.append)
    assert all("ended by the doctor (pays_for_length)" in line for line in said)
    assert {state for *_, state in trials(place / "study")} == {"FAIL"}


def test_a_hacked_trial_sets_no_bar_and_has_no_value(place):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    from optuna.trial import TrialState

    given = settings(place)
    given.folder.mkdir()
    study = open_study(given.folder)
    hacked, honest = study.ask(), study.ask()
    hacked.report(0.9, 1)
    study.tell(hacked, state=TrialState.FAIL)
    honest.report(0.4, 1)
    assert not is_worse_half(study, honest.number, 1)
    (given.folder / "study.yaml").write_text("metric: critic/score/mean\n")
    assert [row.value for row in load_study(given.folder).trials] == [None, 0.4]


def test_a_hacked_final_does_not_count(place):
    finding = {"id": "pays_for_length", "severity": "error", "step": 4, "what": "It pays for length.", "advice": ""}
    given = settings(place, f"(folder / 'findings.jsonl').write_text({json.dumps(finding)!r})")
    given.folder.mkdir()
    final = run_trial(8, {"train.learning_rate": 0.01}, "final_trial_000_seed_1000", given)
    assert final.value is None and final.text == "ended by the doctor (pays_for_length)"


def test_a_second_process_on_a_study_is_refused(place):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    settings(place, "time.sleep(600)")
    child = study_of_its_own(place, runs=2)
    try:
        until(lambda: (place / "killed/runs/trial_000/metrics.jsonl").exists())
        with pytest.raises(ConfigError, match=rf"another process \(process {child.pid} on .*\) runs the study"):
            tune(load_config(CONFIG), space(place), settings(place, out="killed", runs=2, seeds=1), print)
        assert len(trials(place / "killed")) == 1 and child.poll() is None
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_a_trial_that_ends_before_it_is_pruned_counts_as_pruned(place):
    rate = {"train.learning_rate": 0.01}
    given = settings(place)
    given.folder.mkdir()
    for _ in range(2):  # and where the study is killed before it is told
        assert run_trial(8, rate, "trial_000", given, lambda at, value: at == 2).pruned
    assert not run_trial(8, rate, "trial_001", given, lambda at, value: False).pruned


def test_the_worse_half_is_ended_at_three_quarters_too(place):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    study, ended = open_study(place), []
    for values in ((0.5, 0.6), (0.7, 0.4), (0.1, 0.0)):  # the second is well at half, and worse at three quarters
        trial = study.ask()
        for number, value in enumerate(values, 1):
            trial.report(value, number)
            if is_worse_half(study, trial.number, number):
                ended.append((trial.number, number))
                break
        study.tell(trial, values[-1])
    assert ended == [(1, 2), (2, 1)]


def test_a_trial_to_be_pruned_when_the_study_was_killed_is_pruned(place):
    """The reported values decide, so the answer is the same after a restart."""
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    given = settings(place, runs=2, seeds=1)
    given.folder.mkdir()
    study = open_study(given.folder)
    rate = {"train.learning_rate": 0.01}
    study.enqueue_trial(rate)
    first = study.ask()
    first.suggest_float("train.learning_rate", 1e-4, 1.0, log=True)
    first.report(2.0, 1)  # better than any
    study.tell(first, 2.0)
    study.enqueue_trial(rate)
    second = study.ask()
    second.suggest_float("train.learning_rate", 1e-4, 1.0, log=True)
    second.report(0.5, 1)  # and killed here
    tune(load_config(CONFIG), space(place), given, lambda line: None)
    assert [state for *_, state in trials(place / "study")] == ["COMPLETE", "PRUNED"]


def test_the_time_that_a_study_lay_killed_is_not_of_its_budget(place):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    given = settings(place, runs=3, seeds=1, budget_s=3600)
    given.folder.mkdir()
    study = open_study(given.folder)
    study.ask().suggest_float("train.learning_rate", 1e-4, 1.0, log=True)
    journal = given.folder / "study.journal"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        if "datetime_start" in line:
            line["datetime_start"] = "2020-01-01T00:00:00.000000"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tune(load_config(CONFIG), space(place), given, lambda line: None)
    assert len(trials(place / "study")) == 3


def test_each_place_is_asked_about_once(place):
    run = place / "run"
    run.mkdir()
    asked: list[tuple[int, float]] = []
    done: set[int] = set()
    for step in range(1, 9):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "critic/score/mean": float(step)}) + "\n")
        for _ in range(2):
            assert not why_pruned(8, run, settings(place), lambda *given: asked.append(given) or False, done)
    assert asked == [(1, 3.5), (2, 5.5)]  # means over the last two steps


@pytest.mark.slow
def test_a_study_that_was_killed_makes_the_same_trials(place):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    config = load_config(CONFIG)
    whole = settings(place, out="whole", runs=7, seeds=1)
    tune(config, space(place), whole, lambda line: None)
    settings(place, "time.sleep(600 * (folder.name == 'trial_003'))")
    child = study_of_its_own(place, runs=7)
    until(lambda: (place / "killed/runs/trial_003").exists())
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert len(trials(place / "killed")) < 7
    tune(config, space(place), settings(place, out="killed", runs=7, seeds=1), lambda line: None)
    assert trials(place / "killed") == trials(place / "whole")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a process with its parent on Linux alone")
def test_a_trial_ends_with_its_tuner(place):
    """Else it would go on, and its trial, which the next tuner cannot go on with then, would have failed."""
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    config, fast = load_config(CONFIG), settings(place, out="whole", runs=2, seeds=1)
    tune(config, space(place), fast, lambda line: None)
    settings(place, "time.sleep(600)")
    child = study_of_its_own(place, runs=2)
    until(lambda: (place / "killed/runs/trial_000/metrics.jsonl").exists())
    child.kill()  # and nothing else
    child.wait()
    tune(config, space(place), settings(place, out="killed", runs=2, seeds=1), lambda line: None)
    assert trials(place / "killed") == trials(place / "whole")


def study_of_its_own(place: Path, runs: int) -> subprocess.Popen[bytes]:
    """`tune` in a process, and session, of its own; the study is in `killed`."""
    (place / "c.json").write_text(json.dumps(CONFIG))
    code = f"""
        import json, sys
        from pathlib import Path
        from atomrl.config import load_config
        from atomrl.tools.tuning import Settings, tune
        from atomrl.tools.search_space import read_space, with_values
        place = Path({str(place)!r})
        config = load_config(json.loads((place / "c.json").read_text()))
        tune(config, read_space(place / "space.yaml", config), Settings(folder=place / "killed", runs={runs}, seeds=1,
             window=2, command=[sys.executable, str(place / "fake.py")]))
    """
    (place / "child.py").write_text(textwrap.dedent(code))
    return subprocess.Popen([sys.executable, str(place / "child.py")], start_new_session=True)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_is_still_ending_is_waited_for(place, monkeypatch):
    folder = place / "run"
    folder.mkdir()
    code = "from atomrl.tracking.reading.lock import acquire_lock; from pathlib import Path; "
    code += f"acquire_lock(Path({str(folder)!r}))"
    code += "; input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert other.stdin is not None
    until(lambda: is_locked(folder))
    monkeypatch.setattr("atomrl.tools.tuning.ENDING_S", 0.0)
    with pytest.raises(ConfigError, match=f"process {other.pid}"):
        wait_until_free(folder)
    monkeypatch.undo()
    monkeypatch.setattr("atomrl.tools.tuning.time", Waits(other.stdin.close))
    wait_until_free(folder)
    assert other.wait() != 0 and not is_locked(folder)


class Waits:
    """Stands for `time`: something is done before the first wait."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.monotonic = act, time.monotonic

    def sleep(self, seconds: float) -> None:
        self.act()
        time.sleep(seconds)


def test_sigterm_ends_a_study_as_ctrl_c_does(monkeypatch):
    monkeypatch.setattr("atomrl.config.load_config", lambda *arguments: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            command.tune(argparse.Namespace(config="c.yaml", overrides=[], runs=0, seeds=0, window=0))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_study_of_something_else_is_refused(place):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'atomrl[tune]'")
    given = settings(place, runs=1, seeds=1)
    tune(load_config(CONFIG), space(place), given, lambda line: None)
    with pytest.raises(ConfigError, match="another config, space"):
        tune(load_config(CONFIG | {"seed": 5}), space(place), given, lambda line: None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.learning_rat: [1.0, 2.0]", "train.learning_rate"),
        ("train.learning_rate: {low: 1.0, high: 0.1}", "must be below"),
        ("train.learning_rate: {low: 0.0, high: 0.1, log: true}", "above 0"),
        ("train.learning_rate: {low: 0.0, high: 0.1}", "greater than 0"),  # what the config does not take
        ("train.learning_rate: [0.1]", "several choices"),
        ("train.learning_rate: 0.1", "train.learning_rate=0.1: write a range"),
        ("train.learning_rate: {lo: 0.1, high: 1}", "}: low, lo: write a range"),
        ("train.learning_rate: {low: a, high: 1}", "}: low: write a range"),
        ("3: [1, 2]", "unknown key '3'"),
        ("train.steps: {low: 1.0, high: 9.0, step: 2}", "whole numbers"),
        ("algorithm.clip.high: [0.2, wide]", "algorithm"),
        ("algorithm.clip.high: [0.2, wide, 0.3]", "algorithm"),
    ],
)
def test_a_space_refuses_mistakes(place, text, message):
    (place / "space.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError, match=message):
        space(place)
