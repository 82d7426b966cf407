"""What a terminal shows of a run, and the picture of its curves."""

import io
import json
import sys
from dataclasses import asdict, replace

import pytest

from atomrl.cli.rollouts import format_full
from atomrl.common.terminal import printable_output
from atomrl.tracking.console import ProgressBar, by_turn, describe
from atomrl.tracking.reading import load_run
from atomrl.tracking.reading.lines import ReadError
from atomrl.tracking.reading.plots import draw_curves, panels
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import RunDirectory
from tests.pool.made import rich_episode
from tests.tracking.helpers import make_config, make_scored

METRICS = {
    "critic/score/mean": 0.25,
    "train/accuracy": 0.5,
    "response_length/mean": 93.14,
    "actor/entropy": 0.5,
    "perf/throughput": 5120.0,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_one_line_a_step():
    stream = io.StringIO()
    with ProgressBar(3, first_step=2, stream=stream) as progress:
        progress.update(2, METRICS)
        progress.note("saved")
        progress.update(3, {})
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith(
        "step 2/3  reward 0.250  accuracy 0.500  length 93.1  entropy 0.500  tok/s 5,120  ETA 0:"
    )
    assert lines[1] == "saved" and lines[2] == "step 3/3  ETA 0:00:00"


def test_on_a_terminal_a_live_bar():
    stream = Terminal()
    with ProgressBar(2, name="quickstart", stream=stream) as progress:
        progress.update(1, METRICS)
        progress.note("held-out [0.5]")
        progress.update(2, METRICS)
    text = stream.getvalue()
    assert "quickstart" in text and "2/2" in text and "0.250" in text and "held-out [0.5]" in text
    assert "step 1/2" not in text


def test_a_bar_is_drawn_where_foreign_text_is_made_printable(monkeypatch):
    """The bar's own control sequences reach the terminal; those of names, lines, prints and logs do not."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    with printable_output(), ProgressBar(2, name="a\x1b]0;t\x07", stream=sys.stderr) as progress:
        progress.update(1, METRICS)
        progress.note("held-out \x1b[2J")
        print("reward \u202e\x1b]0;t\x07")
        print("server \x1b[5A", file=sys.stderr)
    text = stream.getvalue()
    assert "\x1b[1A" in text and "\\u001b[1A" not in text, "rich moves the cursor up"
    assert not any(foreign in text for foreign in ("\x1b]0;", "\x1b[2J", "\u202e", "\x07", "\x1b[5A"))
    assert all(shown in text for shown in (r"\u001b[2J", r"\u202e\u001b]0;t\u0007", r"server \u001b[5A"))
    assert sys.stderr is stream and sys.stdout is stream


def test_a_name_with_markup_is_shown_as_it_is():
    stream = Terminal()
    with ProgressBar(2, name="a[/x]", stream=stream) as progress:
        progress.update(1, METRICS)
    assert "a[/x]" in stream.getvalue()


def test_completions_cannot_steer_the_terminal():
    stream = io.StringIO()
    row = {
        "prompt": "\x1b]0;title\x07 [/x] \u202e",
        "completion": "\x1b[2J\x9b3J\r 三加五",
        "reward": None,
        "advantage": 0.5,
    }
    ProgressBar(1, stream=stream).show_completions(1, [row])
    text = stream.getvalue()
    assert not set(text) & set("\x1b\x9b\x07\r\u202e")
    assert all(shown in text for shown in (r"\u001b]0;title\u0007 [/x]", r"\u001b[2J\u009b3J", "三加五"))


def test_pairs_show_their_margin():
    assert describe({"rewards/margins": 0.5, "rewards/accuracies": 1.0}) == ["margin 0.500", "pairs in order 1.000"]


def test_completions_are_shown_short_and_not_wider_than_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    config = make_config(tmp_path, tracking={"log_completions": 2})
    scored = make_scored()
    scored[0] = replace(scored[0], text="long [bold] " * 50 + "END")
    with Recorder(config, RunDirectory.create(config)) as recorder:
        for step in range(1, 5):
            recorder.log_rollouts(step, scored, {0: 0.7, 1: -0.7})
    text = capsys.readouterr().err
    assert [line.strip() for line in text.splitlines() if "completions of step" in line] == [
        f"completions of step {step}" for step in (1, 2, 4)
    ]
    assert max(map(len, text.splitlines())) <= 60 and "[bold]" in text and "END" not in text and "…" in text
    assert all(part in text for part in ("1+1=", "user: hi", "1", "0.7", "-"))


def test_completions_can_be_left_out(tmp_path, capsys):
    config = make_config(tmp_path, tracking={"log_completions": False})
    with Recorder(config, RunDirectory.create(config)) as recorder:
        recorder.log_rollouts(1, make_scored(), {})
    assert "completions of step" not in capsys.readouterr().err


def run_of(folder, *rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_run(folder)


def test_what_is_drawn(tmp_path):
    rows = [
        {"step": 0, "val-core/sums/acc/mean@4": 0.1},
        {"step": 1, "critic/score/mean": 0.2, "train/accuracy": 0.3, "reward/only/mean": 0.2, "actor/entropy": None},
        {"step": 2, "critic/score/mean": 0.4, "val-core/sums/acc/mean@4": 0.6},
    ]
    drawn = panels(run_of(tmp_path, *rows))
    assert drawn["Reward"] == {"train": [(1, 0.2), (2, 0.4)]}
    assert drawn["Accuracy"] == {"train": [(1, 0.3)], "held-out": [(0, 0.1), (2, 0.6)]}
    assert "Entropy (nats per token)" not in drawn


def test_data_sources_may_have_slashes(tmp_path):
    names = [f"val-core/openai/{name}/acc/mean@1" for name in ("gsm8k", "math")]
    parts = {"reward/verl_score/mean": 0.1, "reward/verl_score/acc/mean": 0.2}
    rows = [{"step": 1, "critic/score/mean": 0.2, names[0]: 0.1, names[1]: 0.6, **parts}]
    drawn = panels(run_of(tmp_path, *rows))
    assert drawn["Accuracy"] == {"train": [], "openai/gsm8k": [(1, 0.1)], "openai/math": [(1, 0.6)]}
    assert drawn["Reward"] == {"train": [(1, 0.2)], "verl_score": [(1, 0.1)], "verl_score/acc": [(1, 0.2)]}
    assert panels(run_of(tmp_path, {"step": 1, names[0]: 0.5}))["Accuracy"]["held-out"] == [(1, 0.5)]


@pytest.mark.parametrize(
    ("metrics", "titles"),
    [
        ({"train/loss": 1.0, "val/loss": 2.0, "actor/grad_norm": 1.0, "actor/lr": 0.1, "perf/throughput": 5.0},
         ["Loss (nats per token)", "Gradient norm", "Learning rate", "Tokens per second"]),
        ({"rewards/margins": 0.1, "rewards/accuracies": 0.6, "eval/preference_accuracy": 0.7, "actor/lr": 0.1,
          "actor/grad_norm": 1.0},
         ["Accuracy", "Margin of preferences", "Gradient norm", "Learning rate"]),
        ({"actor/lr": 0.1}, ["Learning rate"]),
    ],
)  # fmt: skip
def test_no_panel_is_empty(metrics, titles, tmp_path):
    assert list(panels(run_of(tmp_path, {"step": 1, **metrics}))) == titles
    assert draw_curves(tmp_path).is_file()


def test_the_picture_comes_from_the_metrics_alone(tmp_path):
    run = RunDirectory.create(make_config(tmp_path))
    for step in range(60):
        run.log(step, METRICS)
    out = draw_curves(run.path, tmp_path / "deep" / "picture.png")
    assert out.read_bytes().startswith(b"\x89PNG") and not (run.path / "curves.png").exists()


def test_no_metrics_and_no_matplotlib_are_named(tmp_path, monkeypatch):
    with pytest.raises(ReadError, match="no metrics"):
        draw_curves(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"atomrl\[plot\]"):
        draw_curves(tmp_path)


def test_an_episode_is_shown_turn_by_turn():
    """Who wrote what; what steers a terminal is spelled out in a reply as well."""
    episode = asdict(rich_episode())
    episode["turns"] = list(episode["turns"])
    episode["turns"][0] |= {"text": "who?", "reply": "\x1b[2Jé" + "z" * 500, "labels": ["search", "err\nor"]}
    row = {"prompt": "p", "completion": "who?", "reward": None, "advantage": None, "episode": episode}
    stream = io.StringIO()
    ProgressBar(1, stream=stream).show_completions(1, [row])
    text = stream.getvalue()
    assert r"\u001b[2J" in text and "\x1b" not in text and text.count("z") < 250 and "ended: failed" in text
    opening, said, answered, last, ended = by_turn(episode).plain.splitlines()
    assert (opening, said, last, ended) == ("> go", "who?", "", "ended: failed: crash: exit 3")
    assert answered.startswith(r"> search, err or (0.10 s, reward 0.5): \u001b[2Jézzz") and answered.endswith("z…")


def test_an_episode_in_full_is_not_shortened():
    episode = asdict(rich_episode())
    turn = episode["turns"][0] | {"text": "who?", "reply": "\n" + "z" * 500 + "\nend\x1b[2J\n"}
    episode |= {"turns": [turn | {"images": ["ab.png"]}] * 5, "opening_images": ["cd.png"]}  # as a record has them
    lines = by_turn(episode, whole=True).plain.splitlines()
    assert lines.count("who?") == 5 and sum(line.endswith("z" * 500) for line in lines) == 5
    assert lines[:3] == ["> go", "> picture: inputs/images/cd.png", "who?"]
    assert lines[3:5] == ["> search, error (0.10 s, reward 0.5): " + "z" * 500, r"> end\u001b[2J"]
    assert lines[5] == "> picture: inputs/images/ab.png"
    assert lines[-1] == "ended: failed: crash: exit 3"
    row = {"step": 1, "prompt": "p", "completion": "who?who?", "reward": None, "episode": episode}
    assert "\n".join(lines) in format_full(row) and "who?who?" not in format_full(row)
