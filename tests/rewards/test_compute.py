"""Several rewards on one batch, in this process: alignment, names, weights, None, failures, routing, styles."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from dataclasses import replace
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomrl.common.functions import search_in
from atomrl.config import RewardConfig, RewardItem
from atomrl.data.rows import by_group
from atomrl.rewards import compute
from atomrl.rewards.errors import RewardError, require
from atomrl.rewards.table import POOLED, REWARDS, Pooled, find_reward, importable_name, truth_problem
from atomrl.types import Problem
from tests.rewards.batches import rollouts, values

HERE = "tests.rewards.test_compute."


def build(*functions, patience=compute.PATIENCE, **keys):
    """Functions of this module run in this process: workers have a test module of their own."""
    items = [item if isinstance(item, RewardItem) else RewardItem(function=item, **keys) for item in functions]
    names = [item.function for item in items if item.function.startswith(HERE)]
    here = vars(sys.modules[__name__])
    local = {name: here[name.removeprefix(HERE)] for name in names if callable(here.get(name.removeprefix(HERE)))}
    return compute.build_rewards(RewardConfig(functions=items), local, patience)


def failures(result, name):
    """{(sample id, completion): 'kind: message'} of one part."""
    return {
        (trajectory.problem.problem_id, trajectory.index): f"{item.kind}: {item.message}"
        for trajectory in result
        for item in trajectory.reward_failures
        if item.reward == name
    }


def parts(result):
    """{name of a part: its values}"""
    return {name: values(result, name) for name in result[0].reward_parts}


def length(prompts, completions, scale=1.0, **columns):
    return [scale * len(completion) for completion in completions]


def identity(prompts, completions, ground_truth, data_source, tag, **columns):
    """A number that only the right prompt, completion and columns together give."""
    rows = zip(prompts, completions, ground_truth, data_source, tag, strict=True)
    return [
        float(c) if (p, c.split(".")[0], s, t) == (f"p{g}", g, f"d{g}", f"t{g}") else -1.0 for p, c, g, s, t in rows
    ]


@settings(max_examples=500)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_permutations_never_misalign_a_reward(sizes, seed):
    rng = random.Random(seed)
    order = rng.sample(range(len(sizes)), len(sizes))
    problems = {
        f"{n}": Problem(
            problem_id=f"{n}", prompt=f"p{n}", ground_truth=f"{n}", data_source=f"d{n}", columns={"tag": f"t{n}"}
        )
        for n in order
    }
    groups = {f"{n}": [f"{n}.{k}" for k in rng.sample(range(sizes[n]), sizes[n])] for n in order}
    batch = rollouts(groups, **problems)
    result = build(HERE + "identity", HERE + "length")(batch)
    expected = tuple(tuple(float(text) for text in texts) for texts in groups.values())
    expected = tuple(group for group in expected if group)
    assert values(result, "identity") == expected
    assert values(result, "length") == tuple((3.0,) * len(group) for group in expected)
    assert values(result) == tuple(tuple(value + 3.0 for value in group) for group in expected)
    assert [(item.trajectory_id, item.segments) for item in result] == [(i.trajectory_id, i.segments) for i in batch]


def sometimes(prompts, completions, **columns):
    return [None if completion == "-" else 1.0 for completion in completions]


def test_weights_names_and_none():
    functions = (
        RewardItem(function=HERE + "length", weight=0.5),
        RewardItem(function=HERE + "length", weight=2, args={"scale": 10}),
        RewardItem(function=HERE + "sometimes", weight=0),
    )
    result = build(*functions)(rollouts({"a": ["x", "-"], "b": ["xy"]}))
    assert parts(result) == {
        "length": ((1.0, 1.0), (2.0,)),
        "length_2": ((10.0, 10.0), (20.0,)),
        "sometimes": ((1.0, None), (1.0,)),
    }
    assert values(result) == ((20.5, 20.5), (41.0,))
    alone = build(HERE + "sometimes")(rollouts({"a": ["x", "-"]}))
    assert values(alone) == ((1.0, None),)
    assert build(HERE + "sometimes")([]) == []


def see(prompts, completions, ground_truth, data_source, level, **columns):
    SEEN.append({"prompts": prompts, "level": level, "truth": ground_truth, "source": data_source, **columns})
    prompts.clear()
    columns["extra"][0] = "spoiled"
    return [0.0] * len(completions)


SEEN: list[dict] = []


def test_columns_are_aligned_lists_and_each_function_has_its_own():
    messages = ({"role": "user", "content": "hi"},)
    problems = {
        "a": Problem(
            problem_id="a", prompt=messages, ground_truth=7, data_source="x", columns={"level": 1, "extra": [1]}
        ),
        "b": Problem(problem_id="b", prompt="text", ground_truth="8", columns={"level": 2}),
    }
    SEEN.clear()
    build(HERE + "see", HERE + "see")(rollouts({"a": ["1", "2"], "b": ["3"]}, **problems))
    assert [seen["level"] for seen in SEEN] == [[1, 1, 2]] * 2
    assert [seen["truth"] for seen in SEEN] == [[7, 7, "8"]] * 2
    assert [seen["source"] for seen in SEEN] == [["x", "x", "default"]] * 2
    assert [seen["extra"] for seen in SEEN] == [["spoiled", [1], None]] * 2
    seen_prompts = []

    def keep(prompts, completions, **columns):
        seen_prompts.extend(prompts)
        return [0.0] * len(prompts)

    sys.modules[__name__].keep = keep
    build(HERE + "keep")(rollouts({"a": ["1", "2"], "b": ["3"]}, **problems))
    assert seen_prompts == [[{"role": "user", "content": "hi"}]] * 2 + ["text"]


BATCH = {"a": ["0", "1"], "b": ["2", "bad", "4"]}


def returns(value):
    """A reward that gives `value` for the completion "bad"."""

    def reward(prompts, completions, **columns):
        return [value if completion == "bad" else 1.0 for completion in completions]

    return reward


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), "1.0", [1.0], {}, 1j, 10**400, object(), numpy.float32("nan"),
              torch.tensor([1.0, 2.0])],
)  # fmt: skip
def test_values_that_are_no_finite_number_are_no_value(value, monkeypatch):
    monkeypatch.setitem(REWARDS, "odd", returns(value))
    result = build("odd")(rollouts(BATCH))
    assert values(result) == ((1.0, 1.0), (1.0, None, 1.0))
    (failure,) = failures(result, "odd").items()
    assert failure[0] == ("b", 1) and failure[1].startswith("invalid: it returned ")
    assert compute.failure_counts(result) == {
        "reward/odd/timeouts": 0, "reward/odd/errors": 0, "reward/odd/crashes": 0, "reward/odd/invalid": 1
    }  # fmt: skip


@pytest.mark.parametrize("value", [2, True, 2.5, numpy.float32(2.5), numpy.int64(2), Fraction(1, 2), torch.tensor(2.5)])
def test_values_that_are_numbers(value, monkeypatch):
    monkeypatch.setitem(REWARDS, "fine", returns(value))
    rewards = values(build("fine")(rollouts(BATCH)))
    assert rewards == ((1.0, 1.0), (1.0, float(value), 1.0)) and all(type(v) is float for g in rewards for v in g)


def test_arrays_are_taken_as_lists(monkeypatch):
    for make in (numpy.array, torch.tensor):
        monkeypatch.setitem(
            REWARDS, "array", lambda prompts, completions, make=make, **_: make([0.5] * len(completions))
        )
        assert values(build("array")(rollouts(BATCH))) == ((0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0] * 9, "returned 9 values for 10 completions"),
        ([1.0] * 11, "returned 11 values for 10 completions"),
        ([], "returned 0 values"),
        (1.0, "must return a list of numbers, not float"),
        (None, "must return a list of numbers, not NoneType"),
        ("1111111111", "must return a list of numbers, not str"),
        ({"a": 1}, "must return a list of numbers, not dict"),
        ({1.0}, "must return a list of numbers, not set"),
        (numpy.float64(1), "must return a list of numbers, not float"),
    ],
)
def test_results_that_are_no_list_of_the_right_length(result, message, monkeypatch):
    monkeypatch.setitem(REWARDS, "odd", lambda prompts, completions, **columns: result)
    batch = rollouts({"a": list("01234"), "b": list("56789")})
    with pytest.raises(RewardError, match=f"'odd'.*every completion.*{message}"):
        build("odd")(batch)
    scored = build("odd", patience=None)(batch)
    assert values(scored) == ((None,) * 5,) * 2 and len(failures(scored, "odd")) == 10


def raises(prompts, completions, **columns):
    return [1 / (completion != "bad") for completion in completions]


def exits(prompts, completions, **columns):
    if "bad" in completions:
        raise SystemExit("no")  # sys.exit is wandb's own once a test has used wandb
    return [1.0] * len(completions)


def needs_level(prompts, completions, level, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize(("function", "error"), [("raises", "ZeroDivisionError"), ("exits", "SystemExit")])
def test_an_exception_costs_its_own_completion_only(function, error, caplog):
    result = build(HERE + function)(rollouts(BATCH))
    assert values(result) == ((1.0, 1.0), (1.0, None, 1.0))
    (message,) = failures(result, function).values()
    assert message.startswith(f"error: {error}: ") and "test_compute.py:" in message
    assert f"reward '{function}' has no value for problem 'b', completion 1: 'bad': error: {error}" in caplog.text


def fails_for_several(prompts, completions, **columns):
    if len(completions) > 1:
        raise RuntimeError("too many")
    return [1.0]


def test_a_failure_of_a_call_that_calls_of_one_do_not_repeat_is_said(caplog):
    result = build(HERE + "fails_for_several")(rollouts(BATCH))
    assert values(result) == ((1.0, 1.0), (1.0, 1.0, 1.0)) and not failures(result, "fails_for_several")
    said = "reward 'fails_for_several' failed for 5 completions together, and is called again for each of them: error"
    assert caplog.text.count(said) == 1 and "too many" in caplog.text


def test_a_mistake_stops_at_the_first_batch():
    with pytest.raises(RewardError, match=r"needs_level.*columns"):
        build(HERE + "needs_level")(rollouts({"a": list("0123"), "b": list("4567")}))


def test_three_batches_without_a_value_stop_a_reward_that_worked():
    rewards = build(HERE + "raises")
    rewards(rollouts(BATCH))
    for _ in range(2):
        assert values(rewards(rollouts({"a": ["bad", "bad"]}))) == ((None, None),)
    rewards(rollouts(BATCH))
    for _ in range(2):
        rewards(rollouts({"a": ["bad"]}))
    with pytest.raises(RewardError, match="3 batches"):
        rewards(rollouts({"a": ["bad"]}))


def always_none(prompts, completions, **columns):
    return [None] * len(completions)


def test_none_is_no_failure_and_a_failed_part_leaves_no_partial_reward():
    result = build(HERE + "always_none")(rollouts(BATCH))
    assert values(result) == ((None, None), (None, None, None)) and failures(result, "always_none") == {}
    result = build(HERE + "raises", HERE + "length", HERE + "always_none")(rollouts(BATCH))
    assert values(result) == ((2.0, 2.0), (2.0, None, 2.0))  # not the length alone, which would pass for a low reward
    assert values(result, "length")[1][1] == 3.0
    logged = build(RewardItem(function=HERE + "raises", weight=0), HERE + "length")(rollouts(BATCH))
    assert values(logged) == ((1.0, 1.0), (1.0, 3.0, 1.0)) and len(failures(logged, "raises")) == 1


def no_columns(prompts, completions):
    return []


NOT_A_FUNCTION = 3


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"function": "strict_maths"}, "unknown reward 'strict_maths'; did you mean 'strict_math'"),
        ({"function": "zzz"}, "built in: .*strict_math"),
        ({"function": "no_such_module.f"}, "module 'no_such_module' cannot be imported"),
        ({"function": HERE + "absent"}, "has no function 'absent'"),
        ({"function": HERE + "NOT_A_FUNCTION"}, "has no function"),
        ({"function": HERE + "no_columns"}, r"must take \*\*columns"),
        ({"function": HERE + "length", "args": {"scales": 2}}, "has no argument 'scales'"),
    ],
)
def test_rewards_that_cannot_be_built(item, message):
    with pytest.raises(RewardError, match=message):
        build(RewardItem(**item))


def verl_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    if solution_str == "bad":
        raise ValueError("bad")
    if solution_str == "plain":
        return scale
    return {"score": scale * len(solution_str), "acc": solution_str == ground_truth, "pred": solution_str,
            "seen": (extra_info or {}).get("index", -1), "nan": float("nan")}  # fmt: skip


def test_verls_compute_score_is_taken_as_it_is():
    problems = {"a": Problem(problem_id="a", prompt="p", ground_truth="xy", columns={"extra_info": {"index": 7}})}
    rewards = build(HERE + "verl_score", HERE + "sometimes", args={})
    result = rewards(rollouts({"a": ["xy", "plain"], "b": ["bad", "-"]}, **problems))
    assert parts(result) == {
        "verl_score": ((2.0, 1.0), (None, 1.0)),
        "sometimes": ((1.0, 1.0), (1.0, None)),
        "verl_score/acc": ((1.0, None), (None, 0.0)),
        "verl_score/seen": ((7.0, None), (None, -1.0)),
    }
    assert values(result) == ((3.0, 2.0), (None, 1.0))
    assert failures(result, "verl_score") == {("b", 0): failures(result, "verl_score")["b", 0]}
    assert set(compute.failure_counts(result)) == {
        f"reward/{name}/{kind}" for name in ("verl_score", "sometimes") for kind in compute.COUNTERS.values()
    }
    assert values(build(HERE + "verl_score", args={"scale": 3})(rollouts({"a": ["plain"]}))) == ((3.0,),)
    with pytest.raises(RewardError, match="'scales'"):
        build(HERE + "verl_score", args={"scales": 3})


class Shortest:
    """Pays the shortest completion of a prompt."""

    def __init__(self, pay=1.0):
        self.pay = pay

    def __call__(self, trajectories):
        shortest = {key: min(len(item.text) for item in group) for key, group in by_group(trajectories).items()}
        return [
            replace(
                item,
                reward=self.pay * (len(item.text) == shortest[item.prompt_id]),
                reward_parts={"length": float(len(item.text))},
            )
            for item in trajectories
        ]


class Misshapen:
    def __call__(self, trajectories):
        return [1.0]


class NotAReward:
    pass


def test_a_class_scores_trajectories_together():
    result = build(HERE + "Shortest", args={"pay": 2.0})(rollouts({"a": ["x", "yy"], "c": ["zzz"]}))
    assert values(result) == ((2.0, 0.0), (2.0,))
    assert values(result, "Shortest/length") == ((1.0, 2.0), (3.0,))
    batch = rollouts({"a": list("0123"), "b": list("4567")})
    with pytest.raises(RewardError, match="returned 1 values"):
        build(HERE + "Misshapen")(batch)
    with pytest.raises(RewardError, match="class without __call__"):
        build(HERE + "NotAReward")


async def slow_length(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [float(len(completion)) for completion in completions]


async def slow_score(data_source, solution_str, ground_truth, extra_info=None):
    START.append(solution_str)
    while len(START) < 3:  # ends only where all are under way together
        await asyncio.sleep(0)
    if solution_str == "bad":
        raise ValueError("bad")
    return {"score": 1.0, "length": len(solution_str)}


START: list[str] = []


def verl_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [
        {"score": float(len(text)), "right": text == truth}
        for text, truth in zip(solution_strs, ground_truths, strict=True)
    ]


def test_asynchronous_rewards_and_verls_of_a_batch():
    assert values(build(HERE + "slow_length")(rollouts({"a": ["x", "yy"]}))) == ((1.0, 2.0),)
    START.clear()
    result = build(HERE + "slow_score")(rollouts({"a": ["x", "bad", "zz"]}))
    assert values(result) == ((1.0, None, 1.0),) and values(result, "slow_score/length") == ((1.0, None, 2.0),)
    assert re.match(r"error: ValueError: bad \(.*test_compute\.py:\d+\)", failures(result, "slow_score")["a", 1])
    result = build(HERE + "verl_scores")(rollouts({"a": ["a", "yy"]}))
    assert values(result) == ((1.0, 2.0),) and values(result, "verl_scores/right") == ((1.0, 0.0),)


def test_rewards_that_give_no_value_to_anything_end_a_run():
    rewards = build(HERE + "always_none", patience=3)
    for _ in range(2):
        rewards(rollouts(BATCH))
    with pytest.raises(RewardError, match="reward: 'always_none'"):
        rewards(rollouts(BATCH))


def test_the_table_of_data_sources():
    config = RewardConfig.model_validate(
        {
            "by_data_source": {"gsm": "gsm8k", "short": {"function": HERE + "length", "args": {"scale": 2.0}}},
            "functions": [{"function": HERE + "sometimes", "weight": 0.5}],
        }
    )
    here = {HERE + "length": length, HERE + "sometimes": sometimes}
    rewards = compute.build_rewards(config, here)
    problems = {
        "a": Problem(problem_id="a", prompt="p", ground_truth="1", data_source="gsm"),
        "b": Problem(problem_id="b", prompt="p", ground_truth="", data_source="short"),
        "c": Problem(problem_id="c", prompt="p", ground_truth="5", data_source="gsm"),
    }
    result = rewards(rollouts({"a": ["1", "2"], "b": ["xyz", "-"], "c": ["5"]}, **problems))
    assert parts(result) == {
        "by_data_source": ((1.0, 0.0), (6.0, 2.0), (1.0,)),
        "sometimes": ((1.0, 1.0), (1.0, None), (1.0,)),
    }
    assert values(result) == ((1.5, 0.5), (6.5, 2.0), (1.5,))
    rewards.check_sources(problems.values())
    odd = Problem(problem_id="odd", prompt="p", ground_truth="", data_source="gms")
    for ask in (
        lambda: rewards.check_sources([*problems.values(), odd]),
        lambda: rewards(rollouts({"o": ["1"]}, o=odd)),
    ):
        with pytest.raises(RewardError, match=r"data_source 'gms'.*'gsm', 'short'"):
            ask()
    only_table = RewardConfig.model_validate({"by_data_source": {"gsm": "gsm8k"}})
    assert only_table.functions == [] and RewardConfig().functions[0].function == "strict_math"
    with pytest.raises(ValueError, match=r"reward\.functions is empty"):
        RewardConfig(functions=[])


def test_functions_that_only_this_process_has_are_named():
    names, local = compute.name_functions([REWARDS["gsm8k"], length, lambda **columns: [], Shortest(), "boxed"])
    assert names == ["gsm8k", length.__module__ + ".length", "reward", "Shortest", "boxed"]
    assert list(local) == ["reward", "Shortest"]


def test_an_argument_may_not_have_the_name_of_a_column():
    problem = Problem(problem_id="a", prompt="p", ground_truth="1", columns={"scale": 2})
    with pytest.raises(RewardError, match="argument 'scale'"):
        build(HERE + "length", args={"scale": 2})(rollouts({"a": ["x"]}, a=problem))


HALF = "def half(prompts, completions, **columns):\n    return [0.5] * len(prompts)\n"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my_own_rewards.py", "my_own_rewards.half"),
        ("my_own_rewards.py", "my_own_rewards:half"),
        ("test.py", "test.half"),  # Python has a module of this name
        ("my_own.py", "./my_own.py:half"),
        ("deep/my_own.py", "deep/my_own.py:half"),
    ],
)
def test_a_users_own_file_is_found(tmp_path, monkeypatch, file, name):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(HALF)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    function = find_reward(name)
    assert function([1], ["x"]) == [0.5]
    assert find_reward(importable_name(function)) is function
    sys.modules.pop(function.__module__)
    result = compute.build_rewards(RewardConfig(functions=[{"function": name}]))
    scored = result(rollouts({"a": ["x"]}))  # in a worker
    result.close()
    assert values(scored, "half") == ((0.5,),)


def test_a_file_in_the_folder_of_the_config_is_found(tmp_path, monkeypatch):
    (tmp_path / "beside_config.py").write_text(HALF)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RewardError, match=r"beside_config\.py"):
        find_reward("beside_config.py:half")
    search_in(tmp_path)
    assert find_reward("beside_config.py:half")([1], ["x"]) == [0.5]


def test_a_file_without_a_function_is_distinguished_from_a_module():
    with pytest.raises(RewardError, match=r"\./mine\.py:my_function"):
        find_reward("./mine.py")


def test_a_name_alone_is_a_reward():
    config = RewardConfig.model_validate({"functions": ["gsm8k", {"function": "boxed", "weight": 0.5}]})
    assert [(item.function, item.weight) for item in config.functions] == [("gsm8k", 1.0), ("boxed", 0.5)]


def test_a_missing_package_is_named_before_the_run(monkeypatch):
    monkeypatch.setitem(POOLED, "boxed", Pooled(lambda args: require("boxed", "no_such_package", "math")))
    with pytest.raises(RewardError, match=r"pip install 'atomrl\[math\]'"):
        build("boxed")


@pytest.mark.parametrize(
    ("reward", "truth"),
    [("gsm8k", "many"), ("boxed", r"\frac{1"), ("boxed", "$$"), ("strict_math", r"\boxed{}"), ("exact_match", " "),
     ("search_r1_em", [""]), ("search_r1_em", None), ("countdown", "many"), ("code", "no tests"),
     ("correctness_reward", "#### ")],
)  # fmt: skip
def test_a_truth_that_cannot_be_read_is_named_before_a_run(reward, truth):
    row = {"ground_truth": truth, "numbers": [1, 2]}
    assert reward in REWARDS and "cannot read it" in truth_problem(reward, row)
    rewards = compute.build_rewards(RewardConfig(functions=["exact_match", "gsm8k"]))
    good = Problem(problem_id="a.jsonl:1", prompt="p", ground_truth="18")
    rewards.check_sources([good])
    with pytest.raises(RewardError, match=r"(?s)a\.jsonl:2.*'gsm8k'"):
        rewards.check_sources([good, Problem(problem_id="a.jsonl:2", prompt="p", ground_truth="many")])


def wants_solution(completions, solution, **kwargs):
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


def reads_solution(completions, **kwargs):
    return [float(text == right) for text, right in zip(completions, kwargs["solution"], strict=True)]


def may_read_solution(completions, solution=None, **kwargs):
    if "other" in kwargs:
        return [float(text == kwargs["other"][0]) for text in completions]
    try:
        return [float(text == kwargs["third"][0]) for text in completions]
    except KeyError:
        return [0.0 if solution is None else 1.0 for _ in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info, difficulty):
    return 0.0


def lengths_in_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize(("function", "words"), [
    ("wants_solution", r"wants_solution.*a\.jsonl:1.*'solution'.*no default.*'solutions', 'level'.*did you mean"),
    ("reads_solution", r"reads_solution.*kwargs\['solution'\].*'solutions', 'level'.*did you mean 'solutions'"),
    ("compute_score", r"compute_score.*'difficulty' has no default.*value in args"),
])  # fmt: skip
def test_a_column_that_the_data_lack_is_named_before_a_run(function, words):
    rewards = build(HERE + function)
    problem = Problem(problem_id="a.jsonl:1", prompt="p", ground_truth="1", columns={"solutions": "1", "level": 2})
    with pytest.raises(RewardError, match=words):
        rewards.check_sources([problem])
    if function != "compute_score":
        rewards.check_sources([replace(problem, columns={"solution": "1"})])
    build(RewardItem(function=HERE + function, args={"solution": ["1"]} if function == "wants_solution" else {}))


def test_columns_that_a_reward_can_do_without_are_not_asked_for():
    problem = Problem(problem_id="a.jsonl:1", prompt="p", ground_truth="1")
    build(*(HERE + name for name in ("may_read_solution", "length", "lengths_in_tokens"))).check_sources([problem])


def test_tokens_of_completions_as_trl_gives_them():
    batch = rollouts({"a": ["one", "two"]})
    scored = build(HERE + "lengths_in_tokens")(batch)
    assert [item.reward for item in scored] == [float(item.response_tokens) for item in batch]


def undefined(completions, **kwargs):
    return [absent_name(text) for text in completions]


def nan_of_odd_texts(completions, **kwargs):
    return [float("nan") for _ in completions]


def raises_of_odd_texts(completions, **kwargs):
    return [float(text) for text in completions]


@pytest.mark.parametrize(("function", "words"), [
    (lambda completions, **kwargs: [0.0], "returned 1 values for 2 completions"),
    (lambda completions, **kwargs: None, "must return a list of numbers, not NoneType"),
    (lambda completions, **kwargs: 1.0, "must return a list of numbers, not float"),
    (lambda completions, **kwargs: ["1"] * len(completions), "it returned '1'; return a finite number"),
    (lambda completions, **kwargs: torch.zeros(len(completions), 2), r"it returned \[0.0, 0.0\]"),
    (undefined, "NameError: .*absent_name"),
])  # fmt: skip
def test_reward_functions_are_tried_before_a_run(function, words):
    rewards = compute.build_rewards(RewardConfig(functions=["mine"]), {"mine": function})
    with pytest.raises(RewardError, match=rf"(?s)'mine'.*a\.jsonl:1: .*{words}"):
        rewards.try_functions(Problem(problem_id="a.jsonl:1", prompt="p", ground_truth="many"))


def test_failures_on_made_up_completions_alone_are_tolerated():
    local = {
        "tensor": lambda completions, **kwargs: torch.ones(len(completions)),
        "nones": lambda completions, **kwargs: [None for _ in completions],
        "nan": nan_of_odd_texts, "raises": raises_of_odd_texts,
    }  # fmt: skip
    rewards = compute.build_rewards(RewardConfig(functions=[*local, "exact_match"]), local)
    rewards.try_functions(Problem(problem_id="a.jsonl:1", prompt="p", ground_truth="many"))


def has_truth(completions, **columns):
    return [float(text == truth) for text, truth in zip(completions, columns["ground_truth"], strict=True)]


def has_solution(completions, solution, **columns):
    return [max(float(text == each) for each in solution) for text in completions]


def contains_truth(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)


def of_length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100


class Graded:
    def __call__(self, trajectories):
        return [float(item.text == item.problem.ground_truth) for item in trajectories]


@pytest.mark.parametrize(
    ("reward", "says_right"),
    [
        ({"functions": ["gsm8k", "length"]}, True),
        ({"functions": ["atomrl.rewards.verifiable.exact_match"]}, True),
        ({"functions": ["environment"]}, True),
        ({"functions": ["has_truth"]}, True),
        ({"functions": ["has_solution"]}, True),
        ({"functions": ["contains_truth"]}, True),
        ({"functions": [f"{__name__}.Graded"]}, True),
        ({"functions": ["of_length"]}, False),
        ({"functions": ["strict_format", "gsm8k"]}, False),
        ({"functions": ["lambda"]}, False),
        ({"by_data_source": {"a": "gsm8k", "b": "has_truth"}}, True),
        ({"by_data_source": {"a": "gsm8k", "b": "of_length"}}, False),
    ],
)
def test_what_grades_answers_is_decided_before_any_value_is_seen(reward, says_right):
    own = {
        "has_truth": has_truth, "has_solution": has_solution, "contains_truth": contains_truth,
        "of_length": of_length, "length": of_length, "lambda": lambda completions, **columns: [1.0] * len(completions),
    }  # fmt: skip
    assert compute.build_rewards(RewardConfig(**reward), own).says_right is says_right
