"""Runs side by side: groups of seeds by what differs, whether they can be told apart, sources of functions."""

import json

import pytest
import yaml

from atomrl.cli.main import main
from atomrl.tools.ui.compare import combine, run_data
from atomrl.tracking.reading import load_run
from atomrl.tracking.reading.comparison import difference, differing_keys, group_names, table


def make(
    folder, name, seed, rate, accuracy, source=None, function="strict_math", data=None, summary='{"finished": true}'
):
    run = folder / name
    run.mkdir()
    config = {
        "run_name": name, "seed": seed, "train": {"learning_rate": rate, "steps": 2},
        "reward": {"functions": [{"function": function, "weight": 1.0}]}, "data": data or {},
    }  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": 1, "critic/score/mean": accuracy}, {"step": 2, "val-core/sums/acc/mean@1": accuracy}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        (run / "summary.json").write_text(summary)
    if source is not None:
        (run / "functions").mkdir()
        (run / "functions" / "mine.py_f.py").write_text(source)
    return run


@pytest.fixture
def runs(tmp_path):
    low = [make(tmp_path, f"low-{seed}", seed, 0.1, value) for seed, value in enumerate((0.50, 0.52, 0.48))]
    high = [make(tmp_path, f"high-{seed}", seed, 0.2, value) for seed, value in enumerate((0.53, 0.51, 0.54))]
    return [load_run(path) for path in (*low, *high)]


def test_groups_of_seeds_are_named_by_what_differs(runs):
    lines = "\n".join(table(runs))
    assert "3 seeds: learning_rate=0.1" in lines and "3 seeds: learning_rate=0.2" in lines


def test_it_says_whether_groups_can_be_distinguished(runs, capsys):
    assert main(["compare", *(str(run.path) for run in runs)]) == 0
    printed = capsys.readouterr().out
    assert "accuracy: (learning_rate=0.2) - (learning_rate=0.1) = +0.0267 [95% -0.0" in printed
    assert "n = 3: not significant; about 5 seeds each needed" in printed


@pytest.mark.parametrize("summary", ["", '{"finished": false}'], ids=["killed", "stopped"])
def test_a_run_that_did_not_finish_is_no_seed(runs, tmp_path, summary):
    cut = load_run(make(tmp_path, "cut", 9, 0.1, 0.9, summary=summary))
    lines = "\n".join(table([*runs, cut]))
    assert "3 seeds: learning_rate=0.1" in lines and "= +0.0267 [95%" in lines
    assert f"left out of seeds and differences: cut ({cut.state.status}, step 1/2)" in lines
    found = combine([run_data(run, run.name, run.name) for run in (*runs, cut)])
    assert found["left_out"] == [6] and found["apart"][0]["difference"]["counts"] == (3, 3)


def test_the_interval_is_that_of_welch():
    """Checked by hand: means 1 and 3, variances 1 and 1, n = 3 each: t(4, .975) = 2.776, error sqrt(2/3)."""
    apart = difference([0.0, 1.0, 2.0], [2.0, 3.0, 4.0])
    assert apart.gain == 2.0 and apart.high - apart.gain == pytest.approx(2.7764 * (2 / 3) ** 0.5, rel=1e-4)
    assert not apart.clear and apart.seeds_needed == 4
    assert difference([0.0, 1.0, 2.0], [9.0, 10.0, 11.0]).clear
    assert difference([1.0], [2.0, 3.0]) is None and difference([1.0, 1.0], [1.0, 1.0]) is None


def test_a_functions_name_and_its_source_are_differences(tmp_path):
    first = load_run(make(tmp_path, "a", 0, 0.1, 0.5, "def f(): return 1\n", "./mine.py:f"))
    second = load_run(make(tmp_path, "b", 1, 0.1, 0.5, "def f(): return 2\n", "./mine.py:f"))
    third = load_run(make(tmp_path, "c", 2, 0.1, 0.5))
    assert differing_keys([first, second])["source of mine.py_f"] == ("def f(): return 1\n", "def f(): return 2\n")
    assert differing_keys([first, third])["reward.functions[0].function"] == ("./mine.py:f", "strict_math")
    shown = "\n".join(table([first, second]))
    assert "seeds:" not in shown and "source of mine.py_f" in shown  # another reward is another run


def test_other_held_out_problems_are_said(runs, tmp_path):
    said = "different problems or rewards"
    assert said not in "\n".join(table(runs))
    more = load_run(make(tmp_path, "more", 0, 0.1, 0.5, data={"train_size": 9}))
    assert said not in "\n".join(table([runs[0], more]))
    other = load_run(make(tmp_path, "other", 0, 0.1, 0.5, data={"eval_size": 9}))
    assert f"{said}: data.eval_size differ" in "\n".join(table([runs[0], other]))


def test_a_group_is_not_named_by_what_it_lacks():
    plain, custom = {"advantage.type": "grpo", "advantage.eps": 1e-6}, {"advantage.type": "custom"}
    assert group_names([plain, custom], ["a", "b"]) == ["type=grpo, eps=1e-06", "type=custom"]


def test_groups_are_named_by_settings_that_tell_them_apart():
    same = {"a": 1, "b": 1, "c": 1}
    names = group_names([same | {"d": 1}, same | {"d": 2}, {"a": 2, "b": 2, "c": 2, "d": 1}], ["x", "y", "z"])
    assert len(set(names)) == 3 and all("d=" in name for name in names)
