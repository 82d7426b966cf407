"""Curriculum: orders, gates, a user's classes, and what is refused before a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from atomrl.common.errors import ConfigError
from atomrl.config import CurriculumConfig
from atomrl.data.curriculum import CurriculumState
from atomrl.data.curriculum_setup import build_curriculum, check_curriculum
from atomrl.data.files import DataError
from atomrl.types import Problem, Segment, Trajectory

LEVELS = [3, 1, 2, 1, 3.5, 2]
OWN = '''
from atomrl.data.curriculum import Gate, Sampler

class Backwards(Sampler):
    """From the last prompt to the first, `stride` at a time, then none."""

    def __init__(self, problems, stride=1):
        super().__init__(problems)
        self.index, self.stride = len(problems), stride

    def next(self):
        self.index -= self.stride
        return self.index if self.index >= 0 else None

    def state(self):
        return {"index": self.index}

    def load(self, state):
        self.index = state["index"]

class HardEnough(Gate):
    """Rejects groups with a mean reward above `most`, and skips their prompts."""

    def __init__(self, most):
        self.most, self.easy = most, []

    def admits(self, problem):
        return problem.problem_id not in self.easy

    def accepts(self, group):
        return sum(item.total_reward for item in group) / len(group) <= self.most

    def observe(self, group):
        if not self.accepts(group):
            self.easy.append(group[0].problem.problem_id)

    def state(self):
        return {"easy": self.easy}

    def load(self, state):
        self.easy = state["easy"]

    def metrics(self):
        return {"easy": len(self.easy)}
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a file of the user's, and returns how a config names one of its classes."""
    monkeypatch.chdir(tmp_path)

    def write(text=OWN, name="mine"):
        (tmp_path / f"{name}.py").write_text(text)
        return lambda part, **args: {"type": "custom", "function": f"./{name}.py:{part}", "args": args}

    return write


def problems(levels=LEVELS):
    return [
        Problem(problem_id=f"a.jsonl:{n}", prompt=f"p{n}", ground_truth=n, columns={"level": level})
        for n, level in enumerate(levels)
    ]


def curriculum(shuffle=False, group_filter=None, levels=LEVELS, **config):
    return build_curriculum(
        CurriculumConfig(**config), problems(levels), seed=0, shuffle=shuffle, group_filter=group_filter
    )


def group(draw, *rewards):
    written = Segment(origin="model", token_ids=(1,), logprobs=(0.0,))
    one = Trajectory(
        prompt_id=draw.prompt_id, index=0, problem=draw.problem, segments=(Segment(origin="prompt", token_ids=(1,)),
        written), text="", finish_reason="stop",
    )  # fmt: skip
    return [replace(one, index=index, reward=reward) for index, reward in enumerate(rewards)]


def names(draws):
    return [draw.problem.ground_truth for draw in draws]


def by_difficulty(**keys):
    return {"type": "difficulty", "field": "level", **keys}


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_goes_from_easy_to_hard(shuffle):
    drawn = curriculum(shuffle, sampler=by_difficulty()).take(12, 1)
    assert [draw.problem.columns["level"] for draw in drawn] == 2 * sorted(LEVELS)
    assert {*names(drawn[:6])} == {*names(drawn[6:])} == {*range(6)}
    assert not shuffle or names(drawn[:6]) != names(drawn[6:]), "equal ones are in another order in each epoch"
    rates = curriculum(shuffle, sampler=by_difficulty(easiest="max")).take(6, 1)
    assert [draw.problem.columns["level"] for draw in rates] == sorted(LEVELS, reverse=True)


@pytest.mark.parametrize("value", [None, "2", True, float("nan")])
def test_rows_without_a_difficulty_are_named(value):
    with pytest.raises(DataError, match=r"curriculum\.sampler\.field=level: 1 rows .*\n *a\.jsonl:1: .*'level'"):
        curriculum(sampler=by_difficulty(), levels=[1, value, 3])


def test_prompts_that_are_always_solved_are_dropped_for_good():
    made = curriculum(gates=["solved"])
    for _ in range(4):
        for draw in made.take(6, 1):
            odd = draw.problem.ground_truth % 2
            made.observe(group(draw, 1.0, 1.0) if odd else group(draw, 1.0, 0.0))
    assert made.metrics() == {"curriculum/solved": 3} and names(made.take(4, 1)) == [0, 2, 4, 0]


def test_a_prompt_is_solved_if_all_its_completions_are_several_times_in_a_row():
    made = curriculum(gates=[{"type": "solved", "groups": 2, "reward": 0.5}], levels=[1])
    for rewards, solved in (([1, 0.5], 0), ([0.4, 1], 0), ([1, 1], 0), ([None], 0), ([0.5], 1)):
        (draw,) = made.take(1, 1)
        made.observe(group(draw, *rewards))
        assert made.metrics() == {"curriculum/solved": solved}
    assert made.next(1) is None and made.is_empty, "no prompt is left"


def test_a_groups_filter_and_gates_all_have_to_accept(own):
    gate = own()("HardEnough", most=0.6)
    made = curriculum(gates=[gate], group_filter=lambda rewards: len(rewards) > 2)
    draws = made.take(4, 1)
    groups = [group(draw, *rewards) for draw, rewards in zip(draws, ([1, 0], [1, 0, 0], [1, 1, 1], [1]), strict=True)]
    assert made.rejects and [made.accepts(each) for each in groups] == [False, True, False, False]
    for each in groups:
        made.observe(each)
    assert made.metrics() == {"curriculum/easy": 2} and names(made.take(4, 1)) == [4, 5, 0, 1]


@pytest.mark.parametrize("kind", ["epochs", "difficulty", "solved", "custom"])
def test_a_state_as_json_continues_at_any_place(own, kind):
    """Also with draws that are pending, some of them to be sampled again."""
    part = own()
    config = {
        "epochs": {}, "difficulty": {"sampler": by_difficulty()},
        "solved": {"gates": [{"type": "solved", "groups": 1}]},
        "custom": {"sampler": part("Backwards"), "gates": [part("HardEnough", most=0.5)]},
    }[kind]  # fmt: skip
    whole = curriculum(True, **config)
    first, second, third = whole.take(3, 1)
    whole.observe(group(second, 1.0, 1.0))
    whole.again(first)
    state = CurriculumState(*json.loads(json.dumps(whole.state())))
    assert [tuple(pending) for pending in state.pending] == [(0, 0), (2, 1)]
    resumed = curriculum(True, **config)
    resumed.load(state)
    again = resumed.take(2, 9)
    assert [(draw.prompt_id, draw.step) for draw in again] == [(first.prompt_id, 9), (third.prompt_id, 1)]
    whole.take(1, 9)  # the one that is sampled again
    assert resumed.take(8, 9) == whole.take(8, 9) and resumed.state() == whole.state()


def test_a_state_stays_as_it_was_while_parts_go_on_learning(own):
    gate = own()("HardEnough", most=0.5)
    made, resumed = curriculum(gates=[gate]), curriculum(gates=[gate])
    first, second = made.take(2, 1)
    made.observe(group(first, 1.0))
    state = made.state()
    resumed.load(state)
    for each in (made, resumed):
        each.observe(group(second, 1.0))
        assert [*state.parts.values()] == [{"easy": ["a.jsonl:0"]}]


def test_a_users_sampler_chooses_each_prompt_and_may_have_none(own):
    made = curriculum(sampler=own()("Backwards", stride=2))
    assert [(draw.prompt_id, draw.step) for draw in made.take(9, 3)] == [
        ("0:a.jsonl:4", 3), ("1:a.jsonl:2", 3), ("2:a.jsonl:0", 3),
    ]  # fmt: skip
    assert made.is_empty


BAD = {
    "a name that is not there": ("class Other(Gate): pass", r"gates\.0\.function: .*has no function 'Mine'"),
    "no subclass": ("class Mine: pass", r"gates\.0\.function=\./bad\.py:Mine: must be a subclass of .*\.Gate"),
    "a function": ("def Mine(group): return True", r"gates\.0\.function=\./bad\.py:Mine: must be a subclass of"),
    "arguments": ("class Mine(Gate):\n  def __init__(self, a): pass", r"gates\.0 .*: TypeError: .*'a'"),
    "no state": ("class Mine(Gate):\n  def observe(self, group): self.n = 1", r"gates\.0\..*needs state and load too"),
    "not a bool": ("class Mine(Gate):\n  def accepts(self, group): return 0.5", r"gates\.0 .*accepts must return True"),
    "an error": ("class Mine(Gate):\n  def admits(self, one): return one.x", r"gates\.0 .*'x'.*bad\.py, line 3"),
    "metrics": ("class Mine(Gate):\n  def metrics(self): return {'a': 'b'}", r"gates\.0 .*numbers.* but a is 'b'"),
    "no JSON": (
        "class Mine(Gate):\n  def state(self): return {'a': {1: 2}}\n  def load(self, state): pass",
        r"gates\.0 .*strings as keys",
    ),
    "lost state": (
        "class Mine(Gate):\n  n = 0\n  def observe(self, group): self.n += 1\n  def state(self): return {'n': self.n}\n"
        "  def load(self, state): pass",
        r"gates\.0 .*after load\(\{'n': 1\}\), state\(\) returned \{'n': 0\}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_wrong_gate_is_refused_with_its_place(own, kind, request):
    text, expected = BAD[kind]
    name = f"bad_{list(BAD).index(kind)}"
    part = own(f"from atomrl.data.curriculum import Gate\n{text}\n", name)
    with pytest.raises(ConfigError, match=r"curriculum\." + expected.replace("bad", name)):
        check_curriculum(CurriculumConfig(gates=[part("Mine")]), problems())


SAMPLER = """
from atomrl.data.curriculum import Sampler
import random
class Mine(Sampler):
    drawn = 0
    def next(self): {next}
    def state(self): return {{"drawn": self.drawn}}
    def load(self, state): self.drawn = state["drawn"]
"""
BAD_SAMPLERS = {
    "return 6": r"next\(\) returned 6, not an index of 6 problems",
    "return 'a'": r"next\(\) returned 'a', not an index",
    "return None": r"next\(\) returned None at the start",
    "return random.randrange(6)": r"after load\(state\) next\(\) returns other prompts",
    "return self.missing": r"AttributeError: .*'missing' \(sampler_4\.py, line 6\)",
}


@pytest.mark.parametrize("line", BAD_SAMPLERS)
def test_a_wrong_sampler_is_refused_with_its_place(own, line):
    name = f"sampler_{list(BAD_SAMPLERS).index(line)}"
    part = own(SAMPLER.format(next=line), name)
    with pytest.raises(ConfigError, match=rf"curriculum\.sampler \(\./{name}\.py:Mine\): .*{BAD_SAMPLERS[line]}"):
        check_curriculum(CurriculumConfig(sampler=part("Mine")), problems())
    abstract = own("from atomrl.data.curriculum import Sampler\nclass Mine(Sampler): pass\n", f"{name}_abstract")
    with pytest.raises(ConfigError, match=r"curriculum\.sampler .*abstract methods"):
        curriculum(sampler=abstract("Mine"))


def test_two_parts_with_one_metric_are_refused(own):
    text = "from atomrl.data.curriculum import Gate\nclass Mine(Gate):\n    def metrics(self): return {'solved': 1.0}\n"
    gate = own(text, "metric_twice")("Mine")
    with pytest.raises(ConfigError, match="several parts have a metric 'solved'"):
        check_curriculum(CurriculumConfig(gates=["solved", gate]), problems())
