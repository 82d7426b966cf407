"""docs/guides/custom_functions.md: its tables are what functions get, and its example is the file."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from atomrl.config import load_config
from atomrl.objectives.advantage import AdvantageInputs, AdvantagesAndReturns
from atomrl.objectives.policy_loss import PolicyInputs
from atomrl.objectives.token_weights import FilterInputs, RolloutInputs
from atomrl.rewards.calling import columns_of
from atomrl.trainer.own_functions.trial import check_own_functions
from atomrl.types import Problem, Segment, Trajectory

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "custom_functions.md").read_text(encoding="utf-8")
AXES = {
    "an advantage": ("advantage", AdvantageInputs),
    "a loss": ("clip", PolicyInputs),
    "a correction": ("rollout_is", RolloutInputs),
    "a token filter": ("token_filter", FilterInputs),
}
CHANGE = "change the table in docs/guides/custom_functions.md"
NEVER = {"baseline_rewards"}
"""Only built-in advantages have it."""
got = {}


def table(section: str) -> list[list[str]]:
    text = PAGE.partition(f"## What {section} gets\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `.*$", text, re.MULTILINE)]


def advantage(inputs):
    got["advantage"] = inputs
    return AdvantagesAndReturns(inputs.values, inputs.values) if inputs.values is not None else inputs.rewards


def clip(inputs):
    got["clip"] = inputs
    return -inputs.log_ratio * inputs.advantages


def rollout_is(inputs):
    got["rollout_is"] = inputs
    return inputs.log_ratio.exp()


def token_filter(inputs):
    got["token_filter"] = inputs
    return inputs.mask


@pytest.mark.parametrize("section", AXES)
def test_a_table_has_the_fields_that_a_function_gets_with_their_shapes_and_dtypes(section):
    axis, kind = AXES[section]
    rows = table(section)
    fields = [name.strip("`") for name, *_ in rows]
    assert fields == list(inspect.signature(kind).parameters), f"{CHANGE}: the fields of {kind.__name__}, in its order"
    reads = [name for name, row in zip(fields, rows, strict=True) if f"reads: [{name}]" in row[-1]]
    own = {"type": "custom", "function": f"{__name__}:{axis}", "reads": reads}
    tree = {
        "run_name": "a",
        "model": {"path": "m"},
        "data": {"train": "t.jsonl"},
        "teacher": {"path": "t"},
        "environment": {"function": "tests.environments.games:guess"},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 3, "max_completion_tokens": 9},
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1, "apply_to": "reward"}, axis: own},
    }
    config = load_config(tree)
    check_own_functions(config.algorithm.resolved(max_completion_tokens=9), config)
    inputs = got[axis]
    width = inputs.mask.shape[1]
    for name, shape, dtype, _ in rows:
        value = getattr(inputs, name.strip("`"))
        if name.strip("`") in NEVER:
            assert value is None
        elif isinstance(value, torch.Tensor):
            assert str(list(value.shape)) == shape.replace("B", "6").replace("T", str(width)).replace("K", "2"), name
            assert str(value.dtype) == f"torch.{dtype}", name
        else:
            assert type(value).__name__ in dtype, name


def test_the_table_of_a_reward_has_what_rewards_get():
    problem = Problem(problem_id="", prompt="", ground_truth=None)
    prompt = Segment(origin="prompt", token_ids=(1,))
    drawn = Trajectory(prompt_id="", index=0, problem=problem, segments=(prompt,), text="", finish_reason="stop")
    names = [name.strip("`") for name, *_ in table("a reward")]
    assert sorted(names) == sorted(["prompts", "completions", *columns_of([drawn])]), CHANGE


def test_inputs_outside_reads_need_no_declaration():
    """Inputs without `reads:` in the tables need no declaration, and `reads` accepts no others."""
    for section, (axis, _) in AXES.items():
        asked = [name.strip("`") for name, *_, meaning in table(section) if f"reads: [{name.strip('`')}]" in meaning]
        own = {"type": "custom", "function": f"{__name__}:{axis}"}
        config = load_config(
            {
                "run_name": "a",
                "model": {"path": "m"},
                "data": {"train": "t.jsonl"},
                "algorithm": {"name": "grpo", axis: own},
            }
        )
        check_own_functions(config.algorithm.resolved(max_completion_tokens=9), config)
        assert [name for name in asked if getattr(got[axis], name) is not None] == []


def test_the_example_is_the_file():
    shown = PAGE.partition("```python\n")[2].partition("```")[0]
    assert (ROOT / "examples" / "own_functions" / "mine.py").read_text(encoding="utf-8").endswith(shown), (
        f"{CHANGE}: the example of the page is the end of examples/own_functions/mine.py"
    )
