"""Objectives: one typed choice on each axis, which together are the algorithm that loop and back ends know.

A choice (`choice.py`) is a frozen record whose fields are the config's keys and whose call is its equation, made of
atoms. `PolicyObjective` (`policy.py`) has an axis for each of `advantage`, `ratio`, `clip`, `kl`, `loss_agg`,
`rollout_is`, `token_filter`, `shaping`, `group_filter`, the auxiliary losses and `update`, each in the module of that
name; `PreferenceObjective` has those of preferences. `explain.py` reads any of them back as an equation.
"""

from atomrl.objectives.advantage import AdvantageInputs, AdvantagesAndReturns
from atomrl.objectives.choice import Setting
from atomrl.objectives.clip import PolicyInputs
from atomrl.objectives.policy import PolicyObjective
from atomrl.objectives.preference import PreferenceObjective
