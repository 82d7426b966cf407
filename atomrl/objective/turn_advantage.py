"""Advantages by turn: what a model wrote between two answers of an environment has credit of its own.

Rows of a single turn are rows of one turn here, on which all of these are group baselines.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from atomrl.atoms.advantages import group_mean_baseline, group_zscore, per_token
from atomrl.atoms.shaping import reward_at_last_token
from atomrl.atoms.turns import (
    at_last_turn,
    last_turn,
    per_turn_token,
    turn_numbers,
    turn_returns,
    turn_states,
    turn_totals,
)
from atomrl.objective.advantage_inputs import AdvantageChoice, AdvantageInputs
from atomrl.objective.choice import Atoms, Formula, Setting

Discount = Annotated[float, Field(ge=0, le=1)]


class TurnAdvantageChoice(AdvantageChoice):
    """What is compared within groups: of completions, or of turns."""

    divide_by_std: bool = True
    eps: NonNegativeFloat = 1e-6
    group_baseline = True

    def atoms(self) -> Atoms:
        return (*self.made_of, group_zscore if self.divide_by_std else group_mean_baseline)

    def relative(self, values: Tensor, ids: Tensor) -> Tensor:
        """`values` of any shape, NaN where there is none, each relative to those of the same id."""
        flat, names = values.flatten(), ids.flatten()
        found = group_zscore(flat, names, self.eps) if self.divide_by_std else group_mean_baseline(flat, names)
        return found.reshape(values.shape)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if self.divide_by_std:
            yield "biased: division by a group's deviation weighs groups that nearly always or never succeed more"

    def where(self) -> tuple[Formula, ...]:
        text, latex = "rel_g x = x - mean_g x", r"\operatorname{rel}_g x = x - \operatorname{mean}_g x"
        if self.divide_by_std:
            text = "rel_g x = (x - mean_g x) / (std_g x + eps)"
            latex = r"\operatorname{rel}_g x = \frac{x - \operatorname{mean}_g x}{\operatorname{std}_g x + \epsilon}"
        return (Formula(text, latex),)


class TurnGRPOAdvantage(TurnAdvantageChoice, type="turn_grpo"):
    r"""MT-GRPO: the reward of a turn relative to that of the group's turns of the same number, and what comes after.

    `r_{i,k}` is what the environment gave turn k (0 where it gave nothing), `r_i` the outcome, K the last turn.

        A_{i,k} = sum_{l=k}^K gamma^{l-k} rel_{group, l} r_{i,l} + gamma^{K-k} rel_group r_i

    Paper: arXiv:2505.11821, whose rollouts all have the same number of turns, the last of which earns the outcome
    alone. Here a turn is compared with those of the group's completions that got as far.

    LaTeX: \hat A_{i,k} = \sum_{l=k}^{K_i} \gamma^{l-k} \operatorname{rel}_{g(i), l} r_{i,l} + \gamma^{K_i-k}
        \operatorname{rel}_{g(i)} r_i
    """

    gamma: Discount = 1.0
    made_of = (turn_totals, turn_numbers, at_last_turn, turn_returns, per_turn_token)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        turn_ids = inputs.turns
        rewards = turn_totals(inputs.beside_outcome, turn_ids)
        earned = self.relative(rewards, turn_numbers(inputs.group_ids, rewards))
        outcome = at_last_turn(self.relative(inputs.rewards, inputs.group_ids), rewards)
        return per_turn_token(turn_returns(earned + outcome, self.gamma), turn_ids)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if self.divide_by_std:
            what = "a small one (a cost of each search) weighs as much as the outcome"
            yield f"unstable: rewards of turns are divided by the deviation of turns of their number, so {what}"


class GiGPOAdvantage(TurnAdvantageChoice, type="gigpo"):
    r"""GiGPO: the whole episode relative to its group, and each turn relative to those that began in the same state.

    A state is what the environment showed last, and before that the prompt; turns of one completion that begin in the
    same state are compared too. `R_i` is all that the episode earned, `G_{i,k}` what it earned from turn k on.

        A_{i,k} = rel_group R_i + omega rel_{group, state} G_{i,k},   G_{i,k} = sum_{l >= k} gamma^{l-k} r_{i,l}

    Paper: arXiv:2505.10978, equations 3 to 8; F_norm is the deviation, or 1 with `divide_by_std: false`.

    LaTeX: \hat A_{i,k} = \operatorname{rel}_{g(i)} R_i + \omega \operatorname{rel}_{g(i), s(i,k)} G_{i,k}, \quad
        G_{i,k} = \sum_{l \ge k} \gamma^{l-k} r_{i,l}
    """

    gamma: Discount = 0.95
    omega: NonNegativeFloat = 1.0
    made_of = (reward_at_last_token, turn_totals, turn_returns, turn_states, per_turn_token)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        turn_ids = inputs.turns
        returns = turn_returns(turn_totals(inputs.by_token, turn_ids), self.gamma)
        by_state = self.relative(returns, turn_states(inputs.states, turn_ids))
        episode = self.relative(inputs.totals, inputs.group_ids)
        return per_turn_token(episode[:, None] + self.omega * by_state, turn_ids)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if self.omega == 0:
            yield "no effect: with omega=0 gigpo is grpo, whatever the states are"


class LastTurnAdvantage(TurnAdvantageChoice, type="last_turn"):
    r"""Credit of the last turn alone: the others are not trained on.

        A_{i,t} = rel_group R_i [t in the last turn]

    LaTeX: \hat A_{i,t} = \operatorname{rel}_{g(i)} R_i\,\mathbb{1}[k(t) = K_i]
    """

    made_of = (last_turn, per_token)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return per_token(self.relative(inputs.totals, inputs.group_ids), last_turn(inputs.turns))

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        yield "biased: turns before the last learn nothing, so calls of tools stay as they are, or drift with the rest"


TurnAdvantage = TurnGRPOAdvantage | GiGPOAdvantage | LastTurnAdvantage
