"""A reward that is hacked: what counts as repetition, the metrics of texts, and what findings quote."""

from __future__ import annotations

import json

import pytest

from atomrl.cli.main import main
from atomrl.doctor.hacks import quote
from atomrl.loop.text_report import repeats, text_metrics
from atomrl.types import Sample, Segment, Trajectory
from tests.doctor.test_rules import SICK, rows


@pytest.mark.parametrize(
    "text",
    ["Max. " * 8, "ha" * 40, "The answer is 5. The answer is 5. The answer is 5. The answer is 5.", "好的" * 40,
     "<think>so " + "wait, " * 60, "0" * 64, "\n\n" .join(["I am sure."] * 9)],
)  # fmt: skip
def test_texts_that_are_repetition(text):
    assert repeats(text)


@pytest.mark.parametrize(
    "text",
    ["", "5", "ha ha ha", "<think>7-3=4+9=3*7=1+8=9+2=1</think><answer>1</answer>",
     "def f(a, b):\n    return a + b\n\n\ndef g(a, b):\n    return a - b\n",
     "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n", "先把两边都乘以三，再减去四，得到十二，所以答案是十二。",
     "Natalia sold 48/2 = 24 clips in May. Altogether she sold 48+24 = 72 clips in April and May. #### 72"],
)  # fmt: skip
def test_texts_that_are_none(text):
    assert not repeats(text)


def trajectory(prompt, index, text, reward):
    segments = (Segment(origin="prompt", token_ids=(1,)), Segment(origin="model", token_ids=(2,), policy_version=0))
    return Trajectory(
        prompt_id=prompt, index=index, sample=Sample(sample_id=prompt, prompt=prompt, ground_truth=""),
        segments=segments, text=text, finish_reason="stop", reward=reward,
    )  # fmt: skip


def test_metrics_of_texts():
    drawn = [trajectory(p, i, "Max. " * 9 if i else f"{p} is 4", float(i)) for p in ("a", "b") for i in (0, 1)]
    found = text_metrics(drawn)
    assert found["text/repetition"] == 0.5 and found["text/repetition_reward"] == 1.0
    assert found["text/same"] == 0.5 and found["text/same_reward"] == 1.0
    alone = text_metrics([trajectory("a", i, "yes", None) for i in range(4)])  # of one prompt: the same text is no sign
    assert alone == {"text/repetition": 0.0}


def rollouts(text, other="no"):
    return [{"prompt_id": f"1:{n // 4}", "completion": text if n else other, "reward": float(n > 0)} for n in range(8)]


@pytest.mark.parametrize(
    ("finding", "text", "said"),
    [("repetition_is_paid", "Max. " * 9, "reward 1: 7 of 8 completions are 'Max. ' repeated"),
     ("one_text_is_paid", "It is 5.", "reward 1: 7 of 8 completions are 'It is 5.'"),
     ("pays_for_length", "so " * 99, "reward 1: 7 of 8 completions, 7 of them 'so so so"),
     ("gradient_spikes", "anything", "")],
)  # fmt: skip
def test_a_finding_quotes_the_best_paid_completions(finding, text, said):
    assert quote(finding, rollouts(text)).startswith(said) and (said or not quote(finding, rollouts(text)))


def test_the_command_says_how_it_went_then_what_is_wrong_with_a_quote(tmp_path, capsys):
    run = tmp_path / "run"
    sick = rows(**SICK["repetition_is_paid"])
    evaluated = [{"step": step, "val-core/sums/acc/mean@1": value} for step, value in ((0, 0.25), (20, 0.125))]
    (run / "rollouts/step_000012").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [evaluated[0], *sick, evaluated[1]]))
    (run / "summary.json").write_text(json.dumps({"finished": True, "wall_s": 75.0}))
    for step in range(1, 21):
        folder = run / f"rollouts/step_{step:06d}"
        folder.mkdir(exist_ok=True)
        lines = [
            {"step": step, "prompt_id": "1:a", "prompt": "hi", "ground_truth": "4", "completion": "Max. " * 9,
             "prompt_tokens": 1, "completion_tokens": 9, "reward": 1.0, "advantage": 0.0, "finish_reason": "stop",
             "data_source": "x"}
        ] * 8  # fmt: skip
        (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["doctor", str(run)]) == 1
    printed = capsys.readouterr().out
    assert "finished, 20 of ? steps, 0:01:15" in printed
    assert "held-out accuracy of sums: 0.250 (step 0) -> 0.125 (step 20)" in printed
    assert "Seen: reward 1: 8 of 8 completions are 'Max. ' repeated" in printed
