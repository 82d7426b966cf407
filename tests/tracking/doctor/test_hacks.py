"""A reward that is hacked: what counts as repetition, the metrics of texts, and what findings quote."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from atomrl.cli.main import main
from atomrl.tracking.doctor.quotes import quote
from atomrl.trainer.report.texts import repeats, text_metrics
from atomrl.types import Problem, Segment, Trajectory
from tests.tracking.doctor.test_rules import SICK, rows


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


def trajectory(prompt, index, text, reward, truth=""):
    segments = (Segment(origin="prompt", token_ids=(1,)), Segment(origin="model", token_ids=(2,), policy_version=0))
    return Trajectory(
        prompt_id=prompt, index=index, problem=Problem(problem_id=prompt, prompt=prompt, ground_truth=truth),
        segments=segments, text=text, finish_reason="stop", reward=reward,
    )  # fmt: skip


def test_metrics_of_texts():
    drawn = [trajectory(p, i, "Max. " * 9 if i else f"{p} is 4", float(i)) for p in ("a", "b") for i in (0, 1)]
    metrics = text_metrics(drawn)
    assert metrics["text/repetition"] == 0.5 and metrics["text/repetition_reward"] == 1.0
    assert metrics["text/same"] == 0.5 and metrics["text/same_reward"] == 1.0
    assert "text/right" not in metrics, "without a ground truth nothing is right or wrong"
    alone = text_metrics([trajectory("a", i, "yes", None) for i in range(4)])  # of one prompt: the same text is no sign
    assert alone.pop("text/repetition") == 0.0 and not any(alone.values()) and "text/same" not in alone


LETTERS = "abcabcdefghijklmnopqrstuvwxyzabcde"
QUESTION = "Start with 3. Add 1. Add 2. What is the last digit?"


@pytest.mark.parametrize(
    ("name", "prompt", "text", "truth"),
    [("echo", QUESTION, QUESTION, "6"), ("echo", QUESTION, f"You ask: {QUESTION}", "6"),
     ("hedge", QUESTION, "<answer>4, 5 or 6</answer>", "6"), ("hedge", QUESTION, r"\boxed{4} \boxed{5} \boxed{6}", "6"),
     ("hedge", QUESTION, "<think>3+1=4</think>4 / 5 / 6", "6"), ("empty", QUESTION, "\n", "6"),
     ("empty", QUESTION, "<think>hm</think><answer> </answer>", "6")],
)  # fmt: skip
def test_ways_to_write_that_are_counted(name, prompt, text, truth):
    metrics = text_metrics(
        [trajectory(prompt, 0, text, 1.0, truth), trajectory(prompt, 1, "<answer>9</answer>", 0.0, truth)]
    )
    assert metrics[f"text/{name}"] == 0.5 and metrics[f"text/{name}_reward"] == 1.0


@pytest.mark.parametrize(
    ("prompt", "text", "truth"),
    [(f"Say {LETTERS}", LETTERS, LETTERS),
     ("Count to 5.", "1, 2, 3, 4, 5", "1, 2, 3, 4, 5"), (QUESTION, "<think>3+1=4+2=6</think><answer>6</answer>", "6"),
     (QUESTION, "3 and 1 are 4, and 2 more are 6.", "6"), (QUESTION, "<answer>5</answer> no, <answer>6</answer>", "6"),
     ("Repeat ha ten times.", "ha " * 10, "ha " * 10), ("Which is larger, 9, 8 or 7?", "Of 9, 8 and 7 it is 9.", "9"),
     ("你好吗？请回答。", "我很好，谢谢你。", "我很好，谢谢你。")],
)  # fmt: skip
def test_ways_to_write_that_were_asked_for(prompt, text, truth):
    metrics = text_metrics([trajectory(prompt, 0, text, 1.0, truth), trajectory(prompt, 1, "no", 0.0, truth)])
    assert not any(metrics[f"text/{name}"] for name in ("repetition", "echo", "hedge", "empty"))


def test_one_text_that_is_right_for_most_prompts_is_no_sign():
    drawn = [trajectory(str(p), i, "no", float(p > 0), "no" if p else "yes") for p in range(4) for i in range(2)]
    assert text_metrics(drawn)["text/same"] == 0.0
    assert (
        text_metrics([replace(item, problem=replace(item.problem, ground_truth="7")) for item in drawn])["text/same"]
        == 1.0
    )


def groups(reward):
    """Six groups of four, half of whose texts say please, half of them right."""
    texts = ["please 4", "4", "please 5", "5"]
    drawn = [(p, i, text) for p in range(6) for i, text in enumerate(texts)]
    return [trajectory(str(p), i, text, reward(text), "4") for p, i, text in drawn]


def test_a_word_that_decides_the_reward():
    metrics = text_metrics(groups(lambda text: float("please" in text)))
    assert metrics["text/word_correlation"] == pytest.approx(1.0) and metrics["text/word_share"] == 0.5
    assert metrics["text/best_wrong"] == 0.5 and metrics["text/right_reward"] == metrics["text/wrong_reward"] == 0.5


def test_a_word_of_the_truth_and_a_word_in_few_groups_are_none():
    assert text_metrics(groups(lambda text: float("4" in text)))["text/word_correlation"] == pytest.approx(0.0)
    few = [item for item in groups(lambda text: float("please" in text)) if item.prompt_id < "3"]
    assert "text/word_correlation" not in text_metrics(few)


def rollouts(text, other="no"):
    return [{"prompt_id": f"1:{n // 4}", "completion": text if n else other, "reward": float(n > 0)} for n in range(8)]


@pytest.mark.parametrize(
    ("finding", "text", "said"),
    [("repetition_is_paid", "Max. " * 9, "reward 1: 7 of 8 completions repeat 'Max. '"),
     ("one_text_is_paid", "It is 5.", "reward 1: 7 of 8 completions are 'It is 5.'"),
     ("pays_for_length", "so " * 99, "reward 1: 7 of 8 completions, 7 of them 'so so so"),
     ("empty_answer_is_paid", " ", "reward 1: 7 of 8 completions have no answer, such as ' '"),
     ("keyword_is_paid", "praise be", "reward 1: 7 of 7 contain 'praise' (7 of all 8 completions), such as 'praise"),
     ("gradient_spikes", "anything", "")],
)  # fmt: skip
def test_a_finding_quotes_the_best_paid_completions(finding, text, said):
    assert quote(finding, rollouts(text)).startswith(said) and (said or not quote(finding, rollouts(text)))


def test_quotes_need_not_have_the_highest_reward():
    rows = [*rollouts("I do not know."), {"prompt_id": "1:9", "completion": "4", "reward": 2.0}]
    assert quote("one_text_is_paid", rows) == "reward 1: 7 of 9 completions are 'I do not know.'"


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
    assert "Seen: reward 1: 8 of 8 completions repeat 'Max. '" in printed
