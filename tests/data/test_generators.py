"""Generators: seeded, distinct, splits disjoint by construction, answers right."""

from __future__ import annotations

import importlib.util
import re
from fractions import Fraction
from pathlib import Path

import pytest

from atomrl.data.files import DataError
from atomrl.data.tasks import (
    GENERATORS,
    content_split,
    find_generator,
    generate,
    normalise_content,
    row_content,
    row_split,
)
from atomrl.data.tasks.stack_machine import run_operation
from atomrl.rewards.expressions import evaluate_arithmetic

TASKS = sorted(GENERATORS)


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_seeded_distinct_and_complete(task):
    rows = generate(task, 200, seed=1)
    assert rows == generate(task, 200, seed=1) and rows[:50] == generate(task, 50, seed=1)
    assert rows != generate(task, 200, seed=2)
    assert len({row_content(row) for row in rows}) == 200
    assert all(row["ground_truth"] and row["data_source"] for row in rows)


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_whatever_the_seed(task):
    train = [row for seed in range(3) for row in generate(task, 300, seed=seed)]
    held_out = [row for seed in range(3) for row in generate(task, 50, seed, "eval")]
    contents, others = ({row_content(row) for row in rows} for rows in (train, held_out))
    assert not contents & others
    assert {row_split(task, row) for row in train} == {"train"} and {row_split(task, row) for row in held_out} == {
        "eval"
    }
    if GENERATORS[task].split_by is None:
        assert {content_split(content) for content in contents} == {"train"}


def test_normalised_content_ignores_what_is_no_difference():
    assert normalise_content(" What is  2+2? ") == normalise_content("WHAT is\t2+2?\n")
    assert normalise_content("café") == normalise_content("cafe\u0301")
    assert normalise_content("2+2") != normalise_content("2+3")
    assert normalise_content(({"role": "user", "content": "A"},)) == "user: a"


def test_a_small_space_is_an_error_with_what_it_holds():
    with pytest.raises(DataError, match=r"\d+ distinct problems") as caught:
        generate("arithmetic", 1000, steps=1, max_number=5, max_value=9)
    size = int(re.search(r"only (\d+)", str(caught.value))[1])
    assert len(generate("arithmetic", size, steps=1, max_number=5, max_value=9)) == size


def test_wrong_names_sizes_and_arguments_are_named():
    for arguments, message in [
        (("countdwn", 1), "did you mean 'countdown'"),
        (("countdown", 0), "size must be at least 1"),
        (("countdown", 1, 0, "test"), "split must be"),
    ]:
        with pytest.raises(DataError, match=message):
            generate(*arguments)
    with pytest.raises(DataError, match=r"'step'.*'steps'"):
        generate("arithmetic", 1, step=3)
    with pytest.raises(DataError, match="'steps': 0"):
        generate("arithmetic", 1, steps=0)
    with pytest.raises(DataError, match="'steps': 'x'"):
        generate("arithmetic", 1, steps="x")
    with pytest.raises(DataError, match="found no problem"):
        generate("countdown", 1, max_number=2, max_numbers=3, min_target=90, max_target=95)


def test_answers_of_arithmetic_are_those_of_its_steps():
    for row in generate("arithmetic", 300, steps=5, max_number=30, max_value=500):
        value = None
        for verb, text in re.findall(r"(Start with|Add|Subtract|Multiply by) (\d+)", row["prompt"]):
            number = int(text)
            value = {
                "Start with": lambda _, n: n,
                "Add": lambda v, n: v + n,
                "Subtract": lambda v, n: v - n,
                "Multiply by": lambda v, n: v * n,
            }[verb](value, number)
            assert 0 <= value <= 500
        assert row["ground_truth"] == str(value)


def test_solutions_of_countdown_reach_the_target():
    for row in generate("countdown", 300):
        value, used = evaluate_arithmetic(row["solution"])
        assert value == Fraction(row["ground_truth"]) and 10 <= value <= 99
        assert sorted(used) == row["numbers"] and len(used) in (3, 4)
        assert ", ".join(map(str, row["numbers"])) in row["prompt"]


def test_stack_machine_answers():
    for row in generate("stack_machine", 300):
        stack: list[int] = []
        program = re.search(r"Its program: ([^.]*)\.", row["prompt"])[1].split("; ")
        for operation in program:
            run_operation(stack, operation, 100)
        assert row["ground_truth"] == str(stack[-1]) and len(program) == row["operations"]
    stack = [2, 3]
    for operation, expected in [("swap", [3, 2]), ("dup", [3, 2, 2]), ("mul", [3, 4]), ("add", [7]), ("push 9", [7, 9]),
                                ("sub", [98]), ("push 5", [98, 5]), ("drop", [98])]:  # fmt: skip
        run_operation(stack, operation, 100)
        assert stack == expected


@pytest.mark.parametrize("task", TASKS)
def test_the_space_is_large(task):
    """By the birthday problem: fewer than 30 collisions among 2,000 draws mean some 10**5 problems or more. Of places
    there are no more."""
    import random

    make, rng = find_generator(task).make, random.Random(0)
    most = 80 if task == "places" else 30
    assert 2000 - len({row_content(make(rng)) for _ in range(2000)}) < most


needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the tasks extra"
)


@needs_reasoning_gym
def test_reasoning_gym_tasks(tmp_path):
    from atomrl.common.files import write_jsonl
    from atomrl.config import DataConfig
    from atomrl.data.problems import load_problems
    from atomrl.rewards.tasks import reasoning_gym

    for name, args in [("spell_backward", {}), ("countdown", {"max_numbers": 4}), ("propositional_logic", {})]:
        rows = generate(f"reasoning_gym:{name}", 5, seed=1, **args)
        path = tmp_path / f"{name}.jsonl"
        write_jsonl(rows, path)
        samples = load_problems(DataConfig(train=str(path))).problems
        assert [sample.columns["reasoning_gym"] for sample in samples] == [row["reasoning_gym"] for row in rows]
        assert {sample.data_source for sample in samples} == {f"reasoning_gym:{name}"}
        if name == "propositional_logic":  # has no one right answer
            continue
        columns = [problem.columns["reasoning_gym"] for problem in samples]
        texts = [f"<think>so</think><answer>{problem.ground_truth}</answer>" for problem in samples]
        assert reasoning_gym([""] * 5, texts, reasoning_gym=columns) == [1.0] * 5
        assert max(reasoning_gym([""] * 5, ["<answer>zzz</answer>", "", "zzz", "</answer>", "<answer>"],
                                 reasoning_gym=columns)) < 0.1  # fmt: skip


@needs_reasoning_gym
def test_reasoning_gym_errors():
    with pytest.raises(DataError, match=r"'spell_backwards'.*'spell_backward'"):
        generate("reasoning_gym:spell_backwards", 1)
    with pytest.raises(DataError, match=r"spell_backward.*'nope'"):
        generate("reasoning_gym:spell_backward", 1, nope=1)


@pytest.mark.parametrize("task", GENERATORS)
def test_each_has_its_row_in_the_page_of_data(task):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| `{task}` \|.*$", page, re.MULTILINE)
    assert len(rows) == 1, f"docs/guides/data.md needs one row `{task}` in its table of tasks"
    said, has = "demonstrations" in rows[0], bool(GENERATORS[task].demonstrate)
    assert said == has, f"the row of `{task}` in docs/guides/data.md says {'' if said else 'no '}demonstrations"
