"""`atomrl reward NAME RUN`: recorded completions under other rewards."""

import json

import pytest

from atomrl.cli.main import main
from atomrl.tools.rankings import degenerate_completions, disagreements, rankings
from tests.tools.ui.made import make_run

RUN = "the folder of the run"


@pytest.fixture
def run(tmp_path):
    """Groups of four, of which the first completion, and of the second prompt the first two, earned 1."""
    return make_run(tmp_path / "one", steps=2)


ROWS = [{"step": 1, "prompt_id": p} for p in "aaab"] + [{"step": 2, "prompt_id": "a"}] * 2


def test_rankings_are_of_groups():
    table = rankings(ROWS, [1, 0, 0, 1, 1, 1], [0, 1, None, 0, 1, 0])
    # the pair of the first group is turned; that of the last group was equal; a group of one has no pair
    assert (table.groups, table.pairs, table.turned, table.parted, table.joined) == (2, 2, 1, 1, 0)
    assert (table.gained, table.lost, table.other_best) == (1, 0, 1)
    assert rankings(ROWS, [1, 0, 0, 1, 1, 0], [1] * 6).lost == 2


def test_the_greatest_disagreement_is_first():
    assert disagreements(ROWS, [1, 0, 0, 1, 1, 1], [1, 0, 0, 1, 1, 1]) == []
    assert disagreements(ROWS, [1, 0, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1])[:2] in ([0, 1], [1, 0])
    assert disagreements(ROWS, [None] * 6, [1.0] * 6) == []


def test_hacks_solve_nothing():
    rows = [{"prompt": p, "completion": c, "ground_truth": g, "reward": 1.0} for p, c, g in ("axA", "byB", "ayB")]
    counts = degenerate_completions(rows)
    assert [row["completion"] for row in counts["the prompt repeated"]] == ["a", "b"]
    assert {row["completion"] for row in counts["the most common completion"]} == {"y"}
    assert {row["completion"] for row in counts["nothing"]} == {""}


def test_reward_scores_recorded_completions(run, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def longest(prompts, completions, **columns):\n    return [len(c) / 100 for c in completions]\n"
        "def last(prompts, completions, **columns):\n    return [float(c.endswith('3')) for c in completions]\n"
    )
    out = tmp_path / "scored.jsonl"
    rewards = f"{tmp_path}/mine.py:last,{tmp_path}/mine.py:longest"
    assert main(["reward", rewards, str(run), "--out", str(out), "--show", "1", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "16 completions" in said and "steps 1 to 2" in said
    # of each group the last completion earns, which earned nothing before: 4 groups, another one is best
    assert "groups: 4; 0 gain a signal, 0 lose it, 4 have another best completion" in said
    lines = {line.strip().rpartition("  ")[0].partition("  ")[0]: line for line in said.splitlines()}
    assert "!" in lines["padded to three times its length"] and "!" not in lines["nothing"]
    first = json.loads(out.read_text().splitlines()[3])
    assert [value for name, value in first.items() if name.startswith("lab/")] == [1.0, 0.07]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("columns['level']", "level"),
        ("[1.0]", "1"),
        ("[None for c in completions]", "None"),
        ("[1.0 if '3' in c else float('nan') for c in completions]", None),
    ],
)
def test_a_reward_without_a_value_is_said(run, tmp_path, capsys, body, said):
    (tmp_path / "mine.py").write_text(f"def needs(prompts, completions, **columns):\n    return {body}\n")
    code = main(["reward", f"{tmp_path}/mine.py:needs", str(run), "--workers", "1"])
    captured = capsys.readouterr()
    if said is None:
        assert code == 0 and "no value for 12 of 16 completions; the first: " in captured.out
    else:
        assert code == 2 and "no value for any of 16 completions: " in captured.err and said in captured.err
        assert captured.out == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["rollouts", RUN, "--step", "9"], "no rollouts of train of step 9; it has steps 1 to 2"),
        (["rollouts", RUN, "--steps", "7-9", "--out", "a.jsonl"], "of steps 7 to 9; it has steps 1 to 2"),
        (["rollouts", RUN, "--steps", "2-1"], "of steps 2 to 1"),
        (["rollouts", RUN, "--prompt", "nobody"], "--prompt nobody: no prompt of the run"),
        (["rollouts", RUN, "--limit", "0"], "--limit 0"),
        (["reward", "exact_match", RUN, "--steps", "7-9"], "of steps 7 to 9"),
        (["reward", "exact_match", RUN, "--limit", "0"], "--limit 0"),
    ],
)
def test_what_is_not_there_is_said(options, said, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(run) if word == RUN else word for word in options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "a.jsonl").exists()


def test_nothing_found_is_said(run, capsys):
    assert main(["rollouts", str(run), "--text", "nowhere at all"]) == 0
    assert "no completion matches" in capsys.readouterr().out


def test_no_rollouts_are_named(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("run_name: x\n")
    assert main(["reward", "exact_match", str(tmp_path)]) == 2
    assert "has no rollouts of train" in capsys.readouterr().err
