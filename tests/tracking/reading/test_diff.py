"""`atomrl compare --diff` finds what was changed, at its step, and nothing where nothing was."""

from pathlib import Path

import pytest

from atomrl.cli.main import main
from atomrl.tracking.reading import load_run
from atomrl.tracking.reading.diff import Comparison, diff_runs
from tests.tracking.reading.folders import write_run


def compared(tmp_path: Path, tolerance: float = 0.0, **given) -> Comparison:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", **given)
    return diff_runs(load_run(a), load_run(b), tolerance)


def test_the_same_run_twice(tmp_path):
    diff = compared(tmp_path)
    assert diff.same and diff.earliest is None and diff.steps == 4


def test_a_changed_token_is_found_at_its_place(tmp_path):
    changed = {"token_ids": [1, 9, 5], "completion": "it was 3"}
    diff = compared(tmp_path, changes={(2, "p1", 0): changed})
    [earliest] = diff.first.values()
    assert (earliest.part, earliest.step, earliest.rollout, earliest.token) == ("tokens", 2, ("p1", 0), 1)
    assert "id 2 | 9" in earliest.what and "A 'it is 2'" in earliest.what and "B 'it was 3'" in earliest.what
    assert diff.counts == {"tokens": 1} and not diff.same


def test_a_completion_that_is_longer(tmp_path):
    diff = compared(tmp_path, changes={(1, "p0", 0): {"token_ids": [1, 2, 4, 7]}})
    assert diff.earliest.token == 3 and "id (ended) | 7" in diff.earliest.what


def test_a_changed_reward_is_found_at_its_step(tmp_path):
    diff = compared(tmp_path, changes={(3, "p0", 1): {"reward": 0.5}})
    assert (diff.earliest.part, diff.earliest.step) == ("rewards", 3)
    assert "reward: 1.0 | 0.5 (by 0.5, 0.5 of it)" in diff.earliest.what


def test_a_part_of_a_reward(tmp_path):
    diff = compared(tmp_path, changes={(3, "p0", 1): {"reward_parts": {"exact": 0.0}}})
    assert "reward_parts.exact: 1.0 | 0.0" in diff.earliest.what


def test_a_changed_key_is_named_with_both_values(tmp_path):
    diff = compared(tmp_path, config={"train": {"steps": 3, "learning_rate": 0.2}})
    assert [(d.part, d.what) for d in diff.named] == [("config", "train.learning_rate: 0.1 | 0.2")]
    assert not diff.same and not diff.first


def test_differences_are_named_in_the_order_of_a_step(tmp_path):
    later = {(3, "p0", 0): {"token_ids": [0]}}
    diff = compared(tmp_path, changes=later | {(2, "p0", 0): {"advantage": 7.0}}, metrics={2: {"actor/lr": 1.0}})
    assert (diff.earliest.part, diff.earliest.step) == ("advantages", 2)
    assert {part: difference.step for part, difference in diff.first.items()} == {
        "advantages": 2,
        "metrics": 2,
        "tokens": 3,
    }


def test_prompts_that_are_others(tmp_path):
    diff = compared(tmp_path, changes={(1, "p1", 1): {"prompt_id": "p9", "prompt": "7 + 7"}})
    assert diff.earliest.part == "prompts" and "p1: '1 + 1'" in diff.earliest.what


def test_a_metric_and_the_clock(tmp_path):
    diff = compared(tmp_path, metrics={1: {"timing_s/step": 1e6}, 2: {"critic/score/mean": 0.21}})
    assert (diff.earliest.part, diff.earliest.step) == ("metrics", 2)
    assert "critic/score/mean: 0.2 | 0.21" in diff.earliest.what


def test_numbers_within_a_tolerance_are_the_same(tmp_path):
    assert compared(tmp_path, tolerance=0.1, metrics={2: {"critic/score/mean": 0.21}}).same


def test_another_environment_alone_is_said_and_is_no_difference(tmp_path):
    diff = compared(tmp_path, environment={"packages": {"torch": "2.14"}})
    assert diff.same and diff.named[0].what == "packages.torch: 2.13 | 2.14"


def test_other_data_under_the_same_name(tmp_path):
    diff = compared(tmp_path, environment={"identity": {"data (data.train)": "d1", "model (model.path)": "m0"}})
    assert [d.what for d in diff.named if d.part == "data"] == ["data (data.train) has different content"]
    assert not diff.same


def test_a_step_more(tmp_path):
    diff = compared(tmp_path, steps=5, config={"train": {"steps": 3, "learning_rate": 0.1}})
    assert (diff.earliest.part, diff.earliest.step) == (
        "steps",
        4,
    ) and "B has step 4, A does not" in diff.earliest.what


def test_a_run_without_rollouts_is_compared_by_metrics(tmp_path):
    a, b = write_run(tmp_path / "a"), tmp_path / "b"
    b.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "env.json"):
        (b / name).write_text((a / name).read_text())
    diff = diff_runs(load_run(a), load_run(b))
    assert diff.same and "B has no rollouts" in diff.notes[0]
    assert "tokens: in no common step" in diff.lines() and "metrics: the same in 4 steps" in diff.lines()


def test_steps_whose_rollouts_only_one_has_are_not_called_the_same(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes={(3, "p0", 0): {"reward": 3.0}})
    (b / "rollouts" / "step_000002" / "train.jsonl").unlink()
    diff = diff_runs(load_run(a), load_run(b))
    assert (diff.earliest.part, diff.earliest.step) == ("prompts", 2)
    lines = diff.lines()
    assert lines[lines.index("prompts: first at step 2 (in 1 of 3 steps)") + 1] == (
        "  A has rollouts of train at step 2, B does not"
    )
    assert "tokens: the same in 2 steps" in lines and "rewards: first at step 3 (in 1 of 2 steps)" in lines


def test_metrics_of_a_step_that_only_one_has(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    lines = (b / "metrics.jsonl").read_text().splitlines(keepends=True)
    (a / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 2' not in line))
    diff = diff_runs(load_run(a), load_run(b))
    assert diff.earliest.what == "B has metrics at step 2, A does not" and not diff.same


@pytest.mark.parametrize(
    ("change", "part", "said"),
    [
        ({"ground_truth": "7"}, "prompts", "ground_truth of p1:\nA '1'\nB '7'"),
        ({"completion": "it is 9"}, "tokens", "the text of the same ids\nA 'it is 2'\nB 'it is 9'"),
    ],
)
def test_an_answer_and_a_text_of_the_same_ids(tmp_path, change, part, said):
    diff = compared(tmp_path, changes={(2, "p1", 0): change})
    assert (diff.earliest.part, diff.earliest.step) == (part, 2) and said in diff.earliest.what


def test_data_that_only_one_has_recorded(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", environment={"identity": {"data (data.train)": "d0"}})
    assert [d.what for d in diff_runs(load_run(a), load_run(b)).named] == ["model (model.path) is not recorded in B"]


@pytest.mark.parametrize(("given", "code"), [({}, 0), ({"changes": {(2, "p0", 0): {"reward": 3.0}}}, 1)])
def test_the_exit_code_says_whether_runs_differ(tmp_path, capsys, given, code):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", **given)
    assert main(["compare", "--diff", str(a), str(b)]) == code
    printed = capsys.readouterr().out
    assert ("the first difference: rewards at step 2" in printed) == bool(code)
    assert main(["compare", str(a), str(tmp_path / "none"), "--diff"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_compare_groups_seeds_and_shows_what_differs(tmp_path, capsys):
    for name, seed, rate in (("a", 0, 0.1), ("b", 1, 0.1), ("c", 0, 0.5)):
        settings = {"seed": seed, "train": {"steps": 3, "learning_rate": rate}}
        write_run(tmp_path / name, config=settings, metrics={3: {"critic/score/mean": 0.3 + seed}})
    picture = tmp_path / "out.png"
    assert main(["compare", *(str(tmp_path / name) for name in "abc"), "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["run", "state", "step", "accuracy"]
    [seeds] = [line for line in lines if line.startswith("2 seeds: learning_rate=0.1")]
    assert "0.3667 [0.2, 0.5333]" in seeds  # means of 0.1, 0.2, 0.3 and of 0.1, 0.2, 1.3
    assert [line.split() for line in lines if line.startswith("train.learning_rate")] == [
        ["train.learning_rate", "0.1", "0.1", "0.5"]
    ]
    assert not any(line.startswith("train.steps") for line in lines)
    assert picture.stat().st_size > 10_000


def test_compare_calls_no_runs_of_one_seed_several_seeds(tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_run(tmp_path / name, config={"seed": seed})
    assert main(["compare", *(str(tmp_path / name) for name in "ab")]) == 0
    assert "seeds" not in capsys.readouterr().out
    assert main(["compare", *(str(tmp_path / name) for name in "abc")]) == 0
    assert "2 seeds, 3 runs: a, ..." in capsys.readouterr().out


def test_rollouts_are_shown_and_filtered(tmp_path, capsys):
    odd = {(3, "p0", 0): {"completion": "red\x1b[31m"}, (3, "p1", 1): {"prompt_id": "p\x1b1"}}
    run = str(write_run(tmp_path / "a", changes=odd))
    assert main(["rollouts", run, "--min-reward", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "p\\u001b1" in lines[1] and "\x1b" not in lines[1]
    assert len(lines) == 2 and all(line.split()[0] == "3" and "r 1.0" in line for line in lines)
    assert main(["rollouts", run, "--prompt", "p0", "--step", "3"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "red\\u001b[31m" in printed and "ground truth: 0" in printed
    assert main(["rollouts", run, "--split", "eval"]) == 2
    assert main(["rollouts", run, "--steps", "x"]) == 2


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_rollouts_are_written(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    run, out = write_run(tmp_path / "a"), tmp_path / f"x.{suffix}"
    assert main(["rollouts", str(run), "--steps", "2-3", "--out", str(out)]) == 0
    if suffix == "parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(out).to_pylist()
        assert rows[0]["token_ids"] == [1, 2, 5] and rows[0]["reward"] == 0.0 and len(rows) == 8
        assert rows[1]["reward_parts"] == '{"exact": 1.0}'
    else:
        assert len(out.read_text().splitlines()) == 8 + (suffix == "csv")
    assert main(["rollouts", str(run), "--out", str(tmp_path / "x.txt")]) == 2
