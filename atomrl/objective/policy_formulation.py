"""The equation of a policy objective, from the equations of its choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atomrl.objective.choice import Formula
from atomrl.objective.formulation import MAXIMISE, Formulation, Goal, product

if TYPE_CHECKING:
    from atomrl.objective.policy import PolicyObjective


def policy_formulation(objective: PolicyObjective) -> Formulation:
    """Goals and symbols."""
    used = objective.used_axes()
    weights = objective.loss_agg.equation()
    over, where = Formula("sum_{i,t} w_{i,t}", weights.latex), [Formula(weights.text, "")]
    factors, terms = [], []
    for choice in used["token_filter"]:
        found = choice.equation()
        if not getattr(choice, "adds", False):
            factors, where = [Formula("s_{i,t}", found.latex)], [*where, Formula(f"s_{{i,t}} = {found.text}", "")]
    if used["rollout_is"]:
        parts = [part.equation() for part in used["rollout_is"]]
        joined = " * ".join(f"({part.text})" for part in parts) if len(parts) > 1 else parts[0].text
        factors.insert(0, Formula("c_{i,t}", r" \cdot ".join(part.latex for part in parts)))
        where.append(Formula(f"c_{{i,t}} = {joined}", ""))
    terms += [product([*factors, choice.equation()]) for choice in used["clip"]]
    added = [choice.equation() for choice in used["token_filter"] if getattr(choice, "adds", False)]
    terms += [Formula(f"- {item.text}", f"- {item.latex}") for item in added]
    terms += [Formula("- beta KL_{i,t}", r"- \beta\, \mathrm{KL}_{i,t}")] if objective.kl.place == "loss" else []
    terms += [Formula("eta H_{i,t}", r"\eta\, \mathcal{H}_{i,t}") for _ in used["entropy"]]
    terms += [Formula("- alpha D_{i,t}", r"- \alpha\, D_{i,t}") for _ in used["distillation"]]
    goals = [Goal(MAXIMISE, over, tuple(terms))]
    for choice in used["value"]:
        critic = Formula("minimise", r"\min_\phi")
        goals.append(Goal(critic, over, (product([Formula("c_v", "c_v"), choice.equation()]),)))
    rho = used["ratio"] if any("rho" in term.text for term in terms) else ()
    for choice in (*used["entropy"], *used["distillation"], *rho, objective.advantage):
        where += [choice.equation(), *choice.where()]
    where += _reward_formulas(objective)
    for name in ("kl", "shaping", "clip", "group_filter", "value", "update"):
        for choice in used[name]:
            equation = () if name in ("shaping", "clip", "value") else (choice.equation(),)
            where += [*equation, *choice.where()]
    return Formulation(tuple(goals), tuple(where))


def _reward_formulas(objective: PolicyObjective) -> list[Formula]:
    penalised = objective.kl.place == "reward"
    if objective.advantage.by_token:
        penalty = Formula(" - beta KL_{i,t}", r" - \beta\, \mathrm{KL}_{i,t}") if penalised else Formula("", "")
        reward = Formula("r_{i,t} = r_i [t = last]", r"r_{i,t} = r_i\,\mathbb{1}[t = |o_i|]")
        return [Formula(reward.text + penalty.text, reward.latex + penalty.latex)]
    penalty = Formula("r_i <- r_i - beta sum_t KL_{i,t}", r"r_i \leftarrow r_i - \beta \sum_t \mathrm{KL}_{i,t}")
    return [penalty] if penalised else []
