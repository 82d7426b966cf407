"""Objectives: one typed choice on each axis, which together implement `protocols.Algorithm`.

A choice (`choice.py`) is a frozen record: its fields are the config's keys, its call computes its equation with atoms.

| file | axes |
|---|---|
| `policy.py` | `PolicyObjective`: all axes of a policy-gradient objective, and its loss |
| `advantage.py` | `shaping` of rewards, `group_filter` (dynamic sampling), `advantage` |
| `policy_loss.py` | `ratio`, `clip`, `loss_agg`, `update` (trust region) |
| `token_weights.py` | `rollout_is`, `token_filter` |
| `auxiliary.py` | `kl`, `value`, `entropy`, `distillation` |
| `preference.py` | `PreferenceObjective`: all axes of a preference objective, and its loss |
| `preference_loss.py` | `score`, `loss`, `nll` of preferences |
| `choice.py` | base classes of choices |
| `overrides.py` | a config's changes of an objective's choices |
| `objective.py` | `Objective`, the base class |
| `explain.py` | its equation as text or LaTeX, and the report of `atomrl explain` |
"""

from atomrl.objectives.advantage import AdvantageInputs, AdvantagesAndReturns
from atomrl.objectives.choice import Setting
from atomrl.objectives.policy import PolicyObjective
from atomrl.objectives.policy_loss import PolicyInputs
from atomrl.objectives.preference import PreferenceObjective
