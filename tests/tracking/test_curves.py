"""Curves of several runs in one picture."""

import json

from atomrl.cli.main import main
from atomrl.tracking.reading.plots import compared
from atomrl.tracking.reading.run import Run


def test_several_runs_are_drawn_in_one_picture(tmp_path, monkeypatch):
    first, second = tmp_path / "a" / "x", tmp_path / "a" / "y"
    for run, reward in ((first, 0.25), (second, 0.5)):
        run.mkdir(parents=True)
        rows = [{"step": 1, "critic/score/mean": reward, "reward/p/mean": 1, "reward/q/mean": 2, "train/accuracy": 0.5}]
        rows += [{"step": 1, "val-core/all/acc/mean@4": reward}] if run is second else []
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compared([Run(first), Run(second)]) == {
        "Reward": {"x": [(1, 0.25)], "y": [(1, 0.5)]},
        "Accuracy": {"x": [(1, 0.5)], "y": [(1, 0.5)], "y, held-out": [(1, 0.5)]},
    }
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(first), str(second), "--plot", "curves.png"]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG") and not (first / "curves.png").exists()
    monkeypatch.chdir(tmp_path / "a")  # names that are alike are told apart by their paths
    (tmp_path / "b").mkdir()
    other = first.rename(tmp_path / "b" / "y")
    assert list(compared([Run(second), Run(other)])["Reward"]) == [str(second), str(other)]
