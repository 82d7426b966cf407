"""A row that `train.max_row_tokens` cuts keeps the length it was sampled with."""

import pytest

from atomrl.algorithms import objective_of
from atomrl.data.rows import to_rows
from atomrl.types import Problem, Segment, Trajectory


def trajectory(index, tokens, reward):
    model = Segment(origin="model", token_ids=(7,) * tokens, logprobs=(-1.0,) * tokens, policy_version=0)
    return Trajectory(
        prompt_id="a",
        index=index,
        problem=Problem(problem_id="a", prompt="p", ground_truth=""),
        segments=(Segment(origin="prompt", token_ids=(5, 6)), model),
        text="",
        finish_reason="stop",
        reward=reward,
    )


@pytest.mark.parametrize("max_row_tokens", [None, 8])
def test_the_overlong_penalty_is_of_the_length_as_sampled(max_row_tokens):
    algorithm = objective_of(
        {"name": "dapo", "advantage": "raw", "shaping": {"max_completion_tokens": 20, "overlong_buffer_tokens": 4}}
    )
    rows = to_rows([trajectory(0, 18, 1.0), trajectory(1, 3, 1.0)], max_row_tokens)
    batch = algorithm.resolved(max_completion_tokens=20).advantages(rows)
    assert batch.advantages[:, 2].tolist() == [0.5, 1.0], "(16 - 18) / 4 off the first"
    assert rows.truncated.tolist() == [max_row_tokens is not None, False]
