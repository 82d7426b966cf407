"""Several rewards on one batch, in this process: alignment, names, weights, None, failures, routing, styles."""

from __future__ import annotations

import random
import sys
from dataclasses import fields
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomrl.config import RewardConfig, RewardItem
from atomrl.rewards import compute
from atomrl.rewards.errors import RewardError
from atomrl.rewards.table import REWARDS, find_reward
from atomrl.stages import RewardBatch, RolloutBatch, Sample
from tests.rewards.batches import rollouts

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
        (item.prompt_id.removeprefix("0:"), item.completion_index): f"{item.kind}: {item.message}"
        for item in result.reward_failures
        if item.reward == name
    }


def length(prompts, completions, scale=1.0, **columns):
    return [scale * len(completion) for completion in completions]


def identity(prompts, completions, ground_truth, data_source, tag, **columns):
    """A number that only the right prompt, completion and columns together give."""
    rows = zip(prompts, completions, ground_truth, data_source, tag, strict=True)
    return [
        float(c) if (p, c.split(".")[0], s, t) == (f"p{g}", g, f"d{g}", f"t{g}") else -1.0 for p, c, g, s, t in rows
    ]


@settings(max_examples=500, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_permutations_never_misalign_a_reward(sizes, seed):
    rng = random.Random(seed)
    order = rng.sample(range(len(sizes)), len(sizes))
    samples = {
        f"{n}": Sample(
            sample_id=f"{n}", prompt=f"p{n}", ground_truth=f"{n}", data_source=f"d{n}", columns={"tag": f"t{n}"}
        )
        for n in order
    }
    groups = {f"{n}": [f"{n}.{k}" for k in rng.sample(range(sizes[n]), sizes[n])] for n in order}
    batch = rollouts(groups, **samples)
    result = build(HERE + "identity", HERE + "length")(batch)
    expected = tuple(tuple(float(text) for text in texts) for texts in groups.values())
    assert result.reward_parts["identity"] == expected
    assert result.reward_parts["length"] == tuple((3.0,) * len(texts) for texts in groups.values())
    assert result.rewards == tuple(tuple(value + 3.0 for value in group) for group in expected)
    assert (result.samples, result.completions, result.policy_version) == (batch.samples, batch.completions, 3)


def sometimes(prompts, completions, **columns):
    return [None if completion == "-" else 1.0 for completion in completions]


def test_weights_names_and_none():
    functions = (
        RewardItem(function=HERE + "length", weight=0.5),
        RewardItem(function=HERE + "length", weight=2, args={"scale": 10}),
        RewardItem(function=HERE + "sometimes", weight=0),
    )
    result = build(*functions)(rollouts({"a": ["x", "-"], "b": ["xy"]}))
    assert result.reward_parts == {
        "length": ((1.0, 1.0), (2.0,)),
        "length_2": ((10.0, 10.0), (20.0,)),
        "sometimes": ((1.0, None), (1.0,)),
    }
    assert result.rewards == ((20.5, 20.5), (41.0,))
    alone = build(HERE + "sometimes")(rollouts({"a": ["x", "-"]}))
    assert alone.rewards == ((1.0, None),)
    assert build(HERE + "sometimes")(rollouts({"a": []})).rewards == ((),)


def see(prompts, completions, ground_truth, data_source, level, **columns):
    SEEN.append({"prompts": prompts, "level": level, "truth": ground_truth, "source": data_source, **columns})
    prompts.clear()
    columns["extra"][0] = "spoiled"
    return [0.0] * len(completions)


SEEN: list[dict] = []


def test_columns_are_aligned_lists_and_each_function_has_its_own():
    messages = ({"role": "user", "content": "hi"},)
    samples = {
        "a": Sample(
            sample_id="a", prompt=messages, ground_truth=7, data_source="x", columns={"level": 1, "extra": [1]}
        ),
        "b": Sample(sample_id="b", prompt="text", ground_truth="8", columns={"level": 2}),
    }
    SEEN.clear()
    build(HERE + "see", HERE + "see")(rollouts({"a": ["1", "2"], "b": ["3"]}, **samples))
    assert [seen["level"] for seen in SEEN] == [[1, 1, 2]] * 2
    assert [seen["truth"] for seen in SEEN] == [[7, 7, "8"]] * 2
    assert [seen["source"] for seen in SEEN] == [["x", "x", "default"]] * 2
    assert [seen["extra"] for seen in SEEN] == [["spoiled", [1], None]] * 2
    seen_prompts = []

    def keep(prompts, completions, **columns):
        seen_prompts.extend(prompts)
        return [0.0] * len(prompts)

    sys.modules[__name__].keep = keep
    build(HERE + "keep")(rollouts({"a": ["1", "2"], "b": ["3"]}, **samples))
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
    assert result.rewards == ((1.0, 1.0), (1.0, None, 1.0))
    (failure,) = failures(result, "odd").items()
    assert failure[0] == ("b", 1) and failure[1].startswith("invalid: it returned ")
    assert compute.failure_counts(result) == {
        "reward/odd/timeouts": 0, "reward/odd/errors": 0, "reward/odd/crashes": 0, "reward/odd/invalid": 1
    }  # fmt: skip


@pytest.mark.parametrize("value", [2, True, 2.5, numpy.float32(2.5), numpy.int64(2), Fraction(1, 2), torch.tensor(2.5)])
def test_values_that_are_numbers(value, monkeypatch):
    monkeypatch.setitem(REWARDS, "fine", returns(value))
    rewards = build("fine")(rollouts(BATCH)).rewards
    assert rewards == ((1.0, 1.0), (1.0, float(value), 1.0)) and all(type(v) is float for g in rewards for v in g)


def test_arrays_are_taken_as_lists(monkeypatch):
    for make in (numpy.array, torch.tensor):
        monkeypatch.setitem(
            REWARDS, "array", lambda prompts, completions, make=make, **_: make([0.5] * len(completions))
        )
        assert build("array")(rollouts(BATCH)).rewards == ((0.5, 0.5), (0.5, 0.5, 0.5))


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
    with pytest.raises(RewardError, match=f"reward 'odd' failed on every completion so far, .*invalid: it {message}"):
        build("odd")(batch)
    scored = build("odd", patience=None)(batch)
    assert scored.rewards == ((None,) * 5,) * 2 and len(scored.reward_failures) == 10


def raises(prompts, completions, **columns):
    return [1 / (completion != "bad") for completion in completions]


def exits(prompts, completions, **columns):
    if "bad" in completions:
        sys.exit("no")
    return [1.0] * len(completions)


def needs_level(prompts, completions, level, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize(("function", "error"), [("raises", "ZeroDivisionError"), ("exits", "SystemExit")])
def test_an_exception_costs_its_own_completion_only(function, error, caplog):
    result = build(HERE + function)(rollouts(BATCH))
    assert result.rewards == ((1.0, 1.0), (1.0, None, 1.0))
    (message,) = failures(result, function).values()
    assert message.startswith(f"error: {error}: ") and "test_compute.py:" in message
    assert f"reward '{function}' has no value for sample 'b', completion 1: 'bad': error: {error}" in caplog.text


def test_a_mistake_stops_at_the_first_batch():
    with pytest.raises(
        RewardError, match=r"needs_level.*'level'.*\(columns: ground_truth, data_source, completion_tok"
    ):
        build(HERE + "needs_level")(rollouts({"a": list("0123"), "b": list("4567")}))


def test_three_batches_without_a_value_stop_a_reward_that_worked():
    rewards = build(HERE + "raises")
    rewards(rollouts(BATCH))
    for _ in range(2):
        assert rewards(rollouts({"a": ["bad", "bad"]})).rewards == ((None, None),)
    rewards(rollouts(BATCH))
    for _ in range(2):
        rewards(rollouts({"a": ["bad"]}))
    with pytest.raises(RewardError, match="failed on every completion of 3 batches in a row"):
        rewards(rollouts({"a": ["bad"]}))


def always_none(prompts, completions, **columns):
    return [None] * len(completions)


def test_none_is_no_failure_and_a_failed_part_leaves_no_partial_reward():
    result = build(HERE + "always_none")(rollouts(BATCH))
    assert result.rewards == ((None, None), (None, None, None)) and result.reward_failures == ()
    result = build(HERE + "raises", HERE + "length", HERE + "always_none")(rollouts(BATCH))
    assert result.rewards == ((2.0, 2.0), (2.0, None, 2.0))  # not the length alone, which would pass for a low reward
    assert result.reward_parts["length"][1][1] == 3.0
    logged = build(RewardItem(function=HERE + "raises", weight=0), HERE + "length")(rollouts(BATCH))
    assert logged.rewards == ((1.0, 1.0), (1.0, 3.0, 1.0)) and len(logged.reward_failures) == 1


def no_columns(prompts, completions):
    return []


async def waits(prompts, completions, **columns):
    return []


NOT_A_FUNCTION = 3


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"function": "strict_maths"}, "unknown reward 'strict_maths'; did you mean 'strict_math'"),
        ({"function": "zzz"}, "built in are .*strict_math"),
        ({"function": "no_such_module.f"}, "module 'no_such_module' cannot be imported"),
        ({"function": HERE + "absent"}, "has no function 'absent'"),
        ({"function": HERE + "NOT_A_FUNCTION"}, "has no function"),
        ({"function": HERE + "no_columns"}, r"must take \*\*columns"),
        ({"function": HERE + "waits"}, "is async"),
        ({"function": HERE + "length", "args": {"scales": 2}}, "has no argument 'scales'"),
        ({"function": "strict_math", "weight": float("nan")}, "weight must be a finite number"),
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
    samples = {"a": Sample(sample_id="a", prompt="p", ground_truth="xy", columns={"extra_info": {"index": 7}})}
    rewards = build(HERE + "verl_score", HERE + "sometimes", args={})
    result = rewards(rollouts({"a": ["xy", "plain"], "b": ["bad", "-"]}, **samples))
    assert result.reward_parts == {
        "verl_score": ((2.0, 1.0), (None, 1.0)),
        "sometimes": ((1.0, 1.0), (1.0, None)),
        "verl_score/acc": ((1.0, None), (None, 0.0)),
        "verl_score/seen": ((7.0, None), (None, -1.0)),
    }
    assert result.rewards == ((3.0, 2.0), (None, 1.0))
    assert failures(result, "verl_score") == {("b", 0): failures(result, "verl_score")["b", 0]}
    assert set(compute.failure_counts(result)) == {
        f"reward/{name}/{kind}" for name in ("verl_score", "sometimes") for kind in compute.COUNTERS.values()
    }
    assert build(HERE + "verl_score", args={"scale": 3})(rollouts({"a": ["plain"]})).rewards == ((3.0,),)
    with pytest.raises(RewardError, match="has no argument 'scales'"):
        build(HERE + "verl_score", args={"scales": 3})


class Shortest:
    """Pays the shortest completion of a prompt."""

    def __init__(self, pay=1.0):
        self.pay = pay

    def __call__(self, rollout_batch):
        lengths = [[len(completion.text) for completion in group] for group in rollout_batch.completions]
        rewards = tuple(tuple(self.pay * (n == min(group)) for n in group) for group in lengths)
        plain = {item.name: getattr(rollout_batch, item.name) for item in fields(RolloutBatch)}
        parts = {"length": tuple(tuple(float(n) for n in group) for group in lengths)}
        return RewardBatch(**plain, rewards=rewards, reward_parts=parts)


class Misshapen:
    def __call__(self, rollout_batch):
        plain = {item.name: getattr(rollout_batch, item.name) for item in fields(RolloutBatch)}
        return RewardBatch(**plain, rewards=((1.0,),) * len(rollout_batch.samples), reward_parts={})


class NotAReward:
    pass


def test_a_class_scores_whole_batches():
    result = build(HERE + "Shortest", args={"pay": 2.0})(rollouts({"a": ["x", "yy"], "b": [], "c": ["zzz"]}))
    assert result.rewards == ((2.0, 0.0), (), (2.0,))
    assert result.reward_parts["Shortest/length"] == ((1.0, 2.0), (), (3.0,))
    batch = rollouts({"a": list("0123"), "b": list("4567")})
    with pytest.raises(RewardError, match=r"invalid: its rewards have the shape \[1, 1\], the completions \[4, 4\]"):
        build(HERE + "Misshapen")(batch)
    with pytest.raises(RewardError, match="class without __call__"):
        build(HERE + "NotAReward")


def test_the_table_of_data_sources():
    config = RewardConfig.model_validate(
        {
            "by_data_source": {"gsm": "gsm8k", "short": {"function": HERE + "length", "args": {"scale": 2.0}}},
            "functions": [{"function": HERE + "sometimes", "weight": 0.5}],
        }
    )
    here = {HERE + "length": length, HERE + "sometimes": sometimes}
    rewards = compute.build_rewards(config, here)
    samples = {
        "a": Sample(sample_id="a", prompt="p", ground_truth="1", data_source="gsm"),
        "b": Sample(sample_id="b", prompt="p", ground_truth="", data_source="short"),
        "c": Sample(sample_id="c", prompt="p", ground_truth="5", data_source="gsm"),
    }
    result = rewards(rollouts({"a": ["1", "2"], "b": ["xyz", "-"], "c": ["5"]}, **samples))
    assert result.reward_parts == {
        "by_data_source": ((1.0, 0.0), (6.0, 2.0), (1.0,)),
        "sometimes": ((1.0, 1.0), (1.0, None), (1.0,)),
    }
    assert result.rewards == ((1.5, 0.5), (6.5, 2.0), (1.5,))
    rewards.check_sources(samples.values())
    odd = Sample(sample_id="odd", prompt="p", ground_truth="", data_source="gms")
    for ask in (
        lambda: rewards.check_sources([*samples.values(), odd]),
        lambda: rewards(rollouts({"o": ["1"]}, o=odd)),
    ):
        with pytest.raises(RewardError, match=r"sample 'odd': its data_source 'gms' has no reward in .*'gsm', 'short'"):
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
    sample = Sample(sample_id="a", prompt="p", ground_truth="1", columns={"scale": 2})
    with pytest.raises(RewardError, match="argument 'scale' has the name of a column"):
        build(HERE + "length", args={"scale": 2})(rollouts({"a": ["x"]}, a=sample))


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_own_rewards.py").write_text(
        "def half(prompts, completions, **columns):\n    return [0.5] * len(prompts)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert find_reward("my_own_rewards.half")([1], ["x"]) == [0.5]
    sys.modules.pop("my_own_rewards")
