"""The task `calculation`: right answers, and demonstrations that run programs as often whatever the question."""

import random
import re

import pytest

from atomrl.data.tasks import generate
from atomrl.data.tasks.calculation import demonstrate_calculation
from atomrl.environments.builtin import python
from atomrl.types import Problem
from configs.right_at_a_cost import right_at_a_cost


def test_answers_are_those_of_the_questions():
    rows = generate("calculation", 400)
    for row in rows:
        verb, first, second = re.fullmatch(r"(Add|Multiply) (\d+) (?:to|by) (\d+)\.", row["prompt"]).groups()
        value = int(first) * int(second) if verb == "Multiply" else int(first) + int(second)
        assert row["ground_truth"] == str(value)
        assert row["data_source"] == ("calculation-product" if verb == "Multiply" else "calculation-sum")
    assert 150 < sum(row["data_source"] == "calculation-sum" for row in rows) < 250
    assert {row["data_source"] for row in generate("calculation", 50, products=1.0)} == {"calculation-product"}
    with pytest.raises(ValueError, match="between 0 and 1"):
        generate("calculation", 1, products=1.5)


@pytest.mark.parametrize("products", [0.0, 1.0])
def test_programs_in_demonstrations_do_not_depend_on_the_question(products):
    (row,) = generate("calculation", 1, products=products)
    shown = [demonstrate_calculation(random.Random(seed), row) for seed in range(1000)]
    assert sum(len(messages) == 3 for messages in shown) == pytest.approx(500, abs=50)
    assert {messages[-1]["content"] for messages in shown} == {f"<answer>{row['ground_truth']}</answer>"}


def test_a_demonstration_has_what_the_environment_answers():
    (row,) = generate("calculation", 1, products=1.0)
    program, output, answer = max((demonstrate_calculation(random.Random(seed), row) for seed in range(9)), key=len)
    episode = python(Problem(problem_id="1", prompt=row["prompt"], ground_truth=row["ground_truth"]), sandbox="none")
    next(episode)
    assert episode.send(program["content"]).text == output["content"]
    with pytest.raises(StopIteration):
        episode.send(answer["content"])


def test_a_program_costs_a_share_of_a_right_answer():
    program = "<python>print(3*4)</python>\n<output>\n12\n</output>\n"
    texts = ["<answer>12</answer>", f"{program}<answer>12</answer>", f"{program}<answer>11</answer>"]
    assert right_at_a_cost([""] * 3, texts, ["12"] * 3) == [1.0, 0.9, 0.0]
