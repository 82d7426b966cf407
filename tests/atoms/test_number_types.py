"""Rewards of whole numbers and of True and False count as floats; what is no tensor is refused by name."""

import inspect

import pytest
import torch

from atomrl.atoms import advantages, returns, shaping

REWARDS, IDS = [1, 0, 0, 1, 1, 1], torch.tensor([0, 0, 0, 0, 1, 1])
MASK = torch.tensor([[True, True, False]] * 6)


def with_ids(atom):
    return lambda rewards: atom(rewards, IDS)


def required(atom):
    return {name for name, item in inspect.signature(atom).parameters.items() if item.default is item.empty}


TAKE_REWARDS = [
    atom
    for module in (advantages, returns, shaping)
    for name, atom in vars(module).items()
    if inspect.isfunction(atom)
    and not name.startswith("_")
    and atom.__module__ == module.__name__
    and "rewards" in inspect.signature(atom).parameters
]

ATOMS = {atom.__name__: with_ids(atom) for atom in TAKE_REWARDS if required(atom) == {"rewards", "group_ids"}}
# Those that take more, or other groups to show something.
ATOMS |= {
    "best_minus_second": lambda r: advantages.best_minus_second(r, torch.tensor([0, 0, 1, 1, 2, 2])),
    "best_of_k": lambda r: advantages.best_of_k(r, IDS, 2),
    "length_weighted_baseline": lambda r: advantages.length_weighted_baseline(r, torch.arange(1, 7), IDS),
    "clipped_reward": lambda r: shaping.clipped_reward(r, 0.0, 0.5),
    "reward_at_last_token": lambda r: shaping.reward_at_last_token(r, MASK),
    "discounted_returns": lambda r: returns.discounted_returns(r[:, None].expand(6, 3), MASK, 0.5),
    "gae": lambda r: returns.gae(r[:, None].expand(6, 3), torch.full((6, 3), 0.25), MASK)["advantages"],
    "turn_returns": lambda r: returns.turn_returns(returns.turn_totals(r[:, None].expand(6, 3), MASK.long() - 1), 0.5),
    "kl_penalised_reward": lambda r: shaping.kl_penalised_reward(r[:, None].expand(6, 3), torch.ones(6, 3), 0.5),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", ATOMS)
def test_whole_numbers_and_bools_are_floats(name, dtype):
    ours, wanted = ATOMS[name](torch.tensor(REWARDS, dtype=dtype)), ATOMS[name](torch.tensor(REWARDS).float())
    assert ours.dtype == wanted.dtype and wanted.any()
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("bad", [[1.0, 0.0], (1,), 1.0, None, torch.tensor([1j, 0j])], ids=str)
@pytest.mark.parametrize("atom", TAKE_REWARDS, ids=lambda atom: atom.__name__)
def test_other_types_are_refused_by_name(atom, bad):
    """Below the type checker that the tests put around atoms, which users do not have."""
    plain, ids = inspect.unwrap(atom), torch.tensor([0, 0])
    given = {"rewards": bad, "group_ids": ids, "lengths": ids, "advantages": torch.ones(2), "k": 2}
    given |= {"mask": torch.ones(2, 2, dtype=torch.bool), "values": torch.ones(2, 2), "low": 0.0, "high": 1.0}
    arguments = {name: value for name, value in given.items() if name in inspect.signature(atom).parameters}
    with pytest.raises(TypeError, match="numbers or bools"):
        plain(**arguments)


def test_group_ids_are_checked_too():
    with pytest.raises(TypeError, match="group_ids"):
        inspect.unwrap(advantages.group_mean)(torch.ones(2), [0, 0])


def test_every_atom_of_rewards_is_tried():
    missing = {atom.__name__ for atom in TAKE_REWARDS} - ATOMS.keys()
    assert not missing, f"they take more than rewards and group ids: say in ATOMS how to call them: {missing}"
    assert len(TAKE_REWARDS) >= 15
