"""The atoms that a choice says it is made of are those that its code names."""

import inspect
from types import CodeType, ModuleType
from typing import Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from atomrl.algorithms import objective_of
from atomrl.objectives.choice import Choice, Custom
from atomrl.objectives.explain import table

ELSEWHERE = {
    "running_mean",
    "reward_at_last_token",
    "kl_penalised_reward",
    "adaptive_coefficient",
    "row_mean",
    "row_sum",
    "row_max",
}
"""Called for a choice by the objective, by a function that several share, or out of a table."""
SHARED = {"per_token", "row_sum", "clipped_values", "masked_sum"}
"""Named in a method that several choices have, and not all come to it; the last is for a metric."""


KL_REJECTION = {"type": "kl_rejection", "level": "max"}


def kinds(of=Choice):
    for kind in of.__subclasses__():
        yield from kinds(kind)
        if kind.type and not issubclass(kind, Custom) and kind.__module__.startswith("atomrl."):
            yield kind


def variants(kind):
    """With each of its fields as it may be, one after another."""
    tried = [{}]
    for name, field in kind.model_fields.items():
        options = get_args(field.annotation) if get_origin(field.annotation) is Literal else (True, False, None, 0.5, 1)
        tried += [{name: option} for option in options]
    tried += [{"coefficient": 0.5, name: option} for name, option in (("apply_to", "reward"), ("target", 0.1))]
    for fields in tried:
        try:
            yield kind(**fields)
        except ValidationError:
            continue


def named(code: CodeType, scope: dict):
    values = [scope.get(name) for name in code.co_names]
    values += [vars(module).get(name) for module in values if isinstance(module, ModuleType) for name in code.co_names]
    values += [atom for const in code.co_consts if isinstance(const, CodeType) for atom in named(const, scope)]
    return values


def is_atom(item):
    return inspect.isfunction(item) and item.__module__.startswith("atomrl.atoms.")


def in_code(kind):
    """The atoms that the methods of a choice name, but `atoms` itself."""
    atoms = []
    for base in kind.__mro__:
        for name, member in vars(base).items():
            member = getattr(member, "__func__", getattr(member, "fget", member))
            if inspect.isfunction(member) and name != "atoms":
                atoms += [member] if is_atom(member) else named(member.__code__, member.__globals__)
    return {atom.__name__ for atom in atoms if is_atom(atom)}


@pytest.mark.parametrize("kind", sorted(set(kinds()), key=lambda kind: kind.__name__))
def test_a_choice_names_the_atoms_that_its_code_calls(kind):
    said = {atom.__name__ for choice in variants(kind) for atom in choice.atoms()}
    unused, unnamed = said - ELSEWHERE - in_code(kind), in_code(kind) - SHARED - said
    assert not unused, f"{kind.__name__}.atoms() names atoms that its code does not call; remove {sorted(unused)}"
    assert not unnamed, f"{kind.__name__} calls atoms that explain would not show; return {sorted(unnamed)} in atoms()"


def test_explain_names_what_the_objective_calls_for_a_choice():
    """Rewards at tokens, the KL that is taken off them, and a coefficient that adapts: of PPO as it was published."""
    ppo = table(objective_of({"name": "ppo", "kl": {"apply_to": "reward", "coefficient": 0.1, "target": 6.0}}))
    assert all(f" {name} " in ppo for name in ("reward_at_last_token", "kl_penalised_reward", "adaptive_coefficient"))
    assert "per_token" not in ppo and " row_max " in table(objective_of({"name": "grpo", "rollout_is": KL_REJECTION}))
