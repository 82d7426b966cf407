"""Several rewards on one batch: alignment, names, weights, None, and errors that name reward and sample."""

from __future__ import annotations

import random
import sys
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
from atomrl.stages import Completion, RolloutBatch, Sample

HERE = "tests.rewards.test_compute."


def rollouts(groups: dict[str, list[str]], **samples) -> RolloutBatch:
    """A batch of {sample id: texts}."""
    made = [samples.get(name) or Sample(sample_id=name, prompt=f"p-{name}", ground_truth=name) for name in groups]
    return RolloutBatch(
        samples=tuple(made),
        prompt_ids=tuple(f"0:{name}" for name in groups),
        prompt_token_ids=((1,),) * len(groups),
        completions=tuple(
            tuple(Completion(token_ids=(1,), text=text, logprobs=None, finish_reason="stop") for text in texts)
            for texts in groups.values()
        ),
        policy_version=3,
    )


def build(*functions, **keys):
    items = [item if isinstance(item, RewardItem) else RewardItem(function=item, **keys) for item in functions]
    return compute.build_rewards(RewardConfig(functions=items))


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
def test_values_that_are_no_finite_number(value, monkeypatch):
    monkeypatch.setitem(REWARDS, "odd", returns(value))
    with pytest.raises(RewardError, match=r"reward 'odd' returned .* for sample 'b', completion 1: 'bad'"):
        build("odd")(rollouts(BATCH))


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
        ([1.0] * 4, "returned 4 values for 5 completions"),
        ([1.0] * 6, "returned 6 values for 5 completions"),
        ([], "returned 0 values"),
        (1.0, "must return a list of numbers, not float"),
        (None, "must return a list of numbers, not NoneType"),
        ("11111", "must return a list of numbers, not str"),
        ({"a": 1}, "must return a list of numbers, not dict"),
        ({1.0}, "must return a list of numbers, not set"),
        (numpy.float64(1), "must return a list of numbers, not float"),
    ],
)
def test_results_that_are_no_list_of_the_right_length(result, message, monkeypatch):
    monkeypatch.setitem(REWARDS, "odd", lambda prompts, completions, **columns: result)
    with pytest.raises(RewardError, match=f"reward 'odd' {message}"):
        build("odd")(rollouts(BATCH))


def raises(prompts, completions, **columns):
    return [1 / (completion != "bad") for completion in completions]


def raises_on_many(prompts, completions, **columns):
    if len(completions) > 2:
        raise RuntimeError("too many")
    return [0.0] * len(completions)


def needs_level(prompts, completions, level, **columns):
    return [0.0] * len(completions)


def test_exceptions_name_reward_and_sample():
    with pytest.raises(RewardError, match=r"'raises' failed on sample 'b', completion 1: 'bad': ZeroDivisionError"):
        build(HERE + "raises")(rollouts(BATCH))
    with pytest.raises(RewardError, match=r"'raises_on_many' failed on the batch of \d completions from sample"):
        build(HERE + "raises_on_many")(rollouts(BATCH))
    with pytest.raises(RewardError, match=r"needs_level.*'level' \(columns: ground_truth, data_source\)"):
        build(HERE + "needs_level")(rollouts(BATCH))


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
