"""Figures worked out by hand, from scripted completions."""

import itertools
import json
import math

import pytest

from atomrl.config import DataConfig, RewardConfig
from atomrl.data.processor import DataProcessor
from atomrl.engines.fake import FakeEngine
from atomrl.rewards.compute import build_rewards
from atomrl.trainer.evaluate import evaluate, majority_correct, mean_figure, pass_at_k, pass_sizes
from atomrl.types import Problem, SamplingParams
from tests.tiny import make_tiny_tokenizer

PROBLEMS = [
    Problem(problem_id="f:1", prompt="1+1=", ground_truth="2", data_source="sums"),
    Problem(problem_id="f:2", prompt="2*3=", ground_truth="6", data_source="products"),
]
RIGHT = "<think>abc</think><answer>{}</answer>"
SCRIPT = {
    "1+1=": [RIGHT.format(2), RIGHT.format(2), RIGHT.format(3), "no form"],
    "2*3=": [RIGHT.format(5), RIGHT.format(5), RIGHT.format(6), "x" * 200],
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def run(tokenizer, script=SCRIPT, problems=PROBLEMS, count=4, rewards=None, response_prefix="", **data):
    seen = []

    def complete(prompt, index):
        seen.append(tokenizer.decode(prompt))
        text = next(text for start, text in script.items() if start in seen[-1])[index]
        return tokenizer.encode(text, add_special_tokens=False)

    result = evaluate(
        FakeEngine(complete, tokenizer),
        problems,
        DataProcessor(tokenizer, DataConfig(train="-", **data)),
        build_rewards(RewardConfig.model_validate(rewards or {})),
        SamplingParams(completions_per_prompt=count, max_completion_tokens=100),
        response_prefix,
    )
    return result, seen


def test_figures_are_those_worked_out_by_hand(tokenizer):
    result, _ = run(tokenizer)
    assert (result.prompts, result.dropped_prompts, result.samples_per_prompt) == (2, 0, 4)
    figures = {name: figure.mean for name, figure in result.overall.items()}
    assert figures == pytest.approx(
        {
            "accuracy": (2 / 4 + 1 / 4) / 2,
            "reward": 3 / 8,
            "pass@1": 3 / 8,
            "pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,
            "pass@4": 1.0,
            "majority@4": 0.5,  # 2 is right; 5 is not
            "format": 6 / 8,
            "truncated": 1 / 8,
            "unscored": 0.0,
            "completion_tokens": (6 * len(RIGHT.format(1)) + len("no form") + 100) / 8,  # a token a character
            "reasoning_tokens": 6 * 3 / 8,
            "reasoning_characters": 6 * 3 / 8,
        }
    )
    # The problem is the unit: the standard deviation of 0.5 and 0.25, over the root of two.
    assert result.overall["accuracy"].standard_error == pytest.approx(0.125)
    assert result.by_data_source["sums"]["accuracy"].mean == 0.5
    assert result.by_data_source["products"]["accuracy"].mean == 0.25
    assert result.by_data_source["sums"]["accuracy"].standard_error is None
    assert result.overall["accuracy"].mean == 0.375


def test_metrics_have_verls_names(tokenizer):
    metrics = run(tokenizer)[0].metrics()
    assert metrics["val-core/sums/reward/mean@4"] == 0.5
    assert metrics["val-core/products/acc/mean@4"] == 0.25
    assert metrics["val-core/all/acc/mean@4"] == 0.375
    assert metrics["val-core/sums/acc/maj@4"] == 1.0
    assert metrics["val-core/sums/acc/best@2"] == pytest.approx(5 / 6)
    assert metrics["val-aux/format/mean"] == 0.75
    assert metrics["val-aux/response_length/mean"] > 0
    single = run(tokenizer, problems=PROBLEMS[:1])[0].metrics()
    assert "val-core/sums/acc/mean@4" in single and not any("/all/" in name for name in single)


def test_rows_are_json_and_say_what_was_made_of_each_completion(tokenizer):
    result, _ = run(tokenizer)
    rows = json.loads(json.dumps(result.rows))
    assert [row["correct"] for row in rows] == [True, True, False, False, False, False, True, False]
    assert (
        rows[0]["prompt_id"] == "eval:f:1"
        and rows[0]["answer"] == "2"
        and rows[0]["reward_parts"] == {"strict_math": 1}
    )
    assert rows[7]["finish_reason"] == "length" and rows[7]["completion_tokens"] == 100
    assert "rows" not in result.summary()


def test_the_first_reward_decides_what_is_correct(tokenizer):
    rewards = {"functions": [{"function": "strict_format"}, {"function": "strict_math", "weight": 2.0}]}
    result, _ = run(tokenizer, rewards=rewards)
    assert result.overall["accuracy"].mean == 6 / 8
    assert result.overall["reward"].mean == pytest.approx((6 + 2 * 3) / 8)


def test_completions_without_a_value_count_in_no_accuracy_and_no_mean_reward(tokenizer):
    first = {"function": "tests.light_rewards.nothing_for_products"}
    result, _ = run(tokenizer, rewards={"functions": [first]})
    assert result.overall["unscored"].mean == 0.5
    products = result.by_data_source["products"]
    for name in ("accuracy", "reward", "pass@1", "pass@4", "majority@4"):
        assert result.overall[name].mean == 1.0 and math.isnan(products[name].mean)
    result, _ = run(tokenizer, rewards={"functions": [first, {"function": "strict_format"}]})
    assert result.overall["accuracy"].mean == 1.0 and result.overall["unscored"].mean == 0.0
    metrics = result.metrics()
    assert metrics["val-core/sums/acc/mean@4"] == 1.0 and metrics["val-core/products/reward/mean@4"] > 0
    assert not [name for name in metrics if name.startswith("val-core/products/acc")]


def test_pass_at_k_is_of_the_problems_with_k_completions_that_have_a_value(tokenizer):
    first = {"function": "tests.light_rewards.nothing_for_wrong_answers"}
    result, _ = run(tokenizer, rewards={"functions": [first, {"function": "strict_format"}]})
    values = sorted(sum(row["correct"] is not None for row in rows) for rows in grouped(result.rows))
    assert 0 < values[0] < values[1] < 4
    assert result.overall["pass@1"].mean == result.overall["accuracy"].mean == 1.0
    assert result.overall["pass@2"].mean == 1.0 and math.isnan(result.overall["pass@4"].mean)


def grouped(rows):
    return [list(group) for _, group in itertools.groupby(rows, lambda row: row["prompt_id"])]


def test_response_prefix_is_given_to_the_model_and_to_the_rewards(tokenizer):
    script = {"1+1=": ["2</answer>"] * 2}
    prefix = "<think>.</think><answer>"
    result, seen = run(tokenizer, script, PROBLEMS[:1], count=2, response_prefix=prefix)
    assert all(text.endswith(prefix) for text in seen)
    assert result.overall["accuracy"].mean == 1.0
    assert result.rows[0]["completion"] == prefix + "2</answer>"
    assert result.rows[0]["completion_tokens"] == len("2</answer>")
    assert run(tokenizer, script, PROBLEMS[:1], count=2)[0].overall["accuracy"].mean == 0.0


def test_prompts_over_the_limit_are_counted(tokenizer):
    long = Problem(problem_id="f:3", prompt="9" * 300, ground_truth="1")
    result, _ = run(tokenizer, problems=[*PROBLEMS, long], max_prompt_tokens=50)
    assert (result.prompts, result.dropped_prompts) == (2, 1)
    with pytest.raises(ValueError, match="no problem"):
        run(tokenizer, problems=[])


@pytest.mark.parametrize("samples, correct", [(4, 0), (4, 1), (5, 2), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(samples, correct):
    flags = [True] * correct + [False] * (samples - correct)
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(flags, k))
        assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("bad", [(4, 5, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_nonsense(bad):
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(*bad)


def test_pass_sizes_end_with_all_samples():
    assert [pass_sizes(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def group(answers, correct):
    return [{"answer": answer, "correct": right} for answer, right in zip(answers, correct, strict=True)]


def test_the_majority_decides_by_value_and_then_by_order():
    assert majority_correct(group(("a", "b", "b"), (False, True, False)))
    assert not majority_correct(group(("a", "a", "b"), (False, False, True)))
    assert majority_correct(group(("", "", "b"), (False, False, True))), "no answer has no vote"
    assert not majority_correct(group(("", ""), (False, False)))
    assert majority_correct(group(("b", "a"), (True, False))), "a tie goes to the first given"
    assert majority_correct(group(("7", "7", "1,000", "1000.0", "$1000"), (False, False, True, True, True)))


def test_standard_error_is_of_the_mean():
    assert mean_figure([1.0]).standard_error is None
    assert mean_figure([0.0, 1.0] * 50).standard_error == pytest.approx(0.0502, abs=1e-4)


def test_a_tag_opened_by_the_prompt_counts(tokenizer):
    problems = [Problem(problem_id="f:1", prompt="1+1=<think>", ground_truth="2")]
    script = {"1+1=": ["abc</think><answer>2</answer>"]}
    result, _ = run(tokenizer, script, problems, count=1, chat_template="none")
    (row,) = result.rows
    assert (row["completion"], row["opening"]) == (script["1+1="][0], "<think>")
    assert (row["correct"], row["formatted"], row["reasoning_tokens"]) == (True, True, 3)
