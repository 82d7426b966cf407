"""Advantage estimators: from the rewards of a whole step to the advantage of each completion, or of each token.

To add one: a class here (or in a file of its own) with its equation, and its name in the union `Advantage` at the end.
One's own function needs neither: `advantage: {type: custom, function: "my_module:my_advantage"}`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from atomrl.atoms import advantages, baselines
from atomrl.atoms.advantages import group_zscore, per_token
from atomrl.atoms.gae import discounted_returns, gae, length_adaptive_lambda
from atomrl.atoms.groups import group_std
from atomrl.atoms.kl import k1_kl
from atomrl.atoms.shaping import reward_at_last_token, weighted_reward
from atomrl.atoms.whiten import masked_whiten
from atomrl.objective.advantage_inputs import AdvantageChoice, AdvantageInputs, AdvantagesAndReturns, given
from atomrl.objective.choice import Atoms, Custom, Formula, Setting
from atomrl.objective.turn_advantage import TurnAdvantage

Discount = Annotated[float, Field(ge=0, le=1)]


class GroupAdvantage(AdvantageChoice):
    """What is one atom of rewards and group ids."""

    group_baseline = True

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return self.atom(inputs.totals, inputs.group_ids, **self.settings)


class RawAdvantage(GroupAdvantage, type="raw"):
    r"""REINFORCE: the reward itself.

        A_i = r_i

    LaTeX: \hat A_i = r_i
    """

    atom = staticmethod(advantages.raw_reward)
    group_baseline = False


class GRPOAdvantage(GroupAdvantage, type="grpo"):
    r"""GRPO: the reward standardised within the group.

        A_i = (r_i - mean_group r) / (std_group r + eps)

    LaTeX: \hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{std}_{g(i)} r + \epsilon}
    """

    eps: NonNegativeFloat = 1e-6
    atom = staticmethod(group_zscore)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        yield "biased: division by the group's deviation weighs prompts that are nearly always or never solved more"


class GRPONoStdAdvantage(GroupAdvantage, type="grpo_no_std"):
    r"""Dr. GRPO: the reward minus the group's mean.

        A_i = r_i - mean_group r

    LaTeX: \hat A_i = r_i - \operatorname{mean}_{g(i)} r
    """

    atom = staticmethod(advantages.group_mean_baseline)


class GRPOBatchStdAdvantage(AdvantageChoice, type="grpo_batch_std"):
    r"""GRPO by the batch's scale: the reward minus the group's mean, over the deviation of all rewards of the step.

    Lite PPO, arXiv:2508.08221; TRL's `scale_rewards="batch"`.

        A_i = (r_i - mean_group r) / (std_batch r + eps)

    LaTeX: \hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{std}_B r + \epsilon}
    """

    eps: NonNegativeFloat = 1e-4
    group_baseline = True
    made_of = (advantages.group_mean_baseline, group_std, advantages.standardised)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards = inputs.totals.double()
        centred = advantages.group_mean_baseline(rewards, inputs.group_ids)
        scaled = advantages.standardised(centred, group_std(rewards, torch.zeros_like(inputs.group_ids)), self.eps)
        return scaled.to(inputs.totals.dtype)


class RLOOAdvantage(GroupAdvantage, type="rloo"):
    r"""RLOO: the reward minus the mean of the other completions of the group.

        A_i = r_i - mean_{j in group, j != i} r_j

    LaTeX: \hat A_i = r_i - \operatorname{mean}_{j \in g(i), j \neq i} r_j
    """

    atom = staticmethod(advantages.leave_one_out_baseline)


class OPOAdvantage(AdvantageChoice, type="opo"):
    r"""OPO: the reward minus the group's mean weighted by length.

        A_i = r_i - sum_j l_j r_j / sum_j l_j,   j in the group

    LaTeX: \hat A_i = r_i - \frac{\sum_{j \in g(i)} l_j r_j}{\sum_{j \in g(i)} l_j}
    """

    group_baseline = True
    made_of = (baselines.length_weighted_baseline,)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return baselines.length_weighted_baseline(inputs.totals, given(inputs.mask).sum(1), inputs.group_ids)


class GPGAdvantage(AdvantageChoice, type="gpg"):
    r"""GPG: the reward minus the group's mean, rescaled by alpha for groups without a signal.

    `alpha: paper` counts the completions of groups whose rewards are not all equal; `verl` those with a reward.

        A_i = alpha (r_i - mean_group r) / F

    LaTeX: \hat A_i = \frac{\alpha}{F} (r_i - \operatorname{mean}_{g(i)} r)
    """

    alpha: Literal["paper", "verl"] = "paper"
    normaliser: Annotated[float, Field(gt=0)] = 1.0
    group_baseline = True
    made_of = (advantages.group_mean_baseline, group_std, baselines.rescaled_by_share)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards, group_ids = inputs.totals, inputs.group_ids
        centred = advantages.group_mean_baseline(rewards, group_ids)
        counted = group_std(rewards.double(), group_ids) > 0 if self.alpha == "paper" else rewards != 0
        return baselines.rescaled_by_share(centred, counted, self.normaliser)

    def where(self) -> tuple[Formula, ...]:
        counted, latex = "B / |{j : r_j != 0}|", r"\frac{B}{|\{j : r_j \neq 0\}|}"
        if self.alpha == "paper":
            counted = "B / (B - |{j : all rewards of j's group equal}|)"
            latex = r"\frac{B}{B - |\{j : \operatorname{std}_{g(j)} r = 0\}|}"
        return (Formula(f"alpha = {counted}", rf"\alpha = {latex}"),)


class PassAtKAdvantage(AdvantageChoice, type="pass_at_k"):
    r"""Pass@k: the group's best completion alone, by how much it beats the second best.

        A_i = r_i - max_{j != i} r_j   for the group's single best,   0 elsewhere

    LaTeX: \hat A_i = [r_i = \max_{g(i)} r]\,(r_i - \max_{j \in g(i), j \neq i} r_j)
    """

    divide_by_std: bool = False
    eps: NonNegativeFloat = 1e-6
    group_baseline = True

    def atoms(self) -> Atoms:
        scaled = (group_std, advantages.standardised) if self.divide_by_std else ()
        return baselines.best_minus_second, *scaled

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        best = baselines.best_minus_second(inputs.totals, inputs.group_ids)
        std = group_std(inputs.totals, inputs.group_ids)
        return advantages.standardised(best, std, self.eps) if self.divide_by_std else best


class PassAtKAnalyticAdvantage(GroupAdvantage, type="pass_at_k_analytic"):
    r"""Pass@k training: the marginal contribution of a completion to the expected best of k, over all k-subsets S.

        A_i = (mean_{S with i} R(S) - mean_S R(S)) / std_S R(S),   R(S) = max_{j in S} r_j

    LaTeX: \hat A_i = \frac{\operatorname{mean}_{S \ni i} R(S) - \operatorname{mean}_S R(S)}{\operatorname{std}_S R(S)},
        \quad R(S) = \max_{j \in S} r_j, \quad S \subseteq g(i), |S| = k
    """

    k: PositiveInt = 4
    atom = staticmethod(baselines.best_of_k)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        n = setting.completions_per_prompt
        if 1 < n <= self.k:
            yield f"no effect: with k={self.k} of {n} completions per prompt every subset has the same best"


class MaxRLAdvantage(GroupAdvantage, type="maxrl"):
    r"""MaxRL: deviation from the group's mean in units of that mean.

        A_i = (r_i - mean_group r) / (mean_group r + eps)

    LaTeX: \hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{mean}_{g(i)} r + \epsilon}
    """

    eps: NonNegativeFloat = 0.0
    atom = staticmethod(advantages.maxrl_advantage)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        shaping = setting.axes["shaping"]
        if shaping.soft_overlong or shaping.repetition_ngram_tokens:
            yield "biased: maxrl divides by the mean reward, which penalties may bring to 0 or below (then left out)"


class GDPOAdvantage(AdvantageChoice, type="gdpo"):
    r"""GDPO: each part of the reward standardised within the group, then their weighted sum within the batch.

        A_i = zscore_batch( sum_k w_k zscore_group(r_k)_i )

    LaTeX: \hat A_i = \operatorname{zscore}_{B}\Big(\sum_k w_k \operatorname{zscore}_{g(i)} r_k\Big)
    """

    eps: NonNegativeFloat = 1e-4
    group_baseline = True
    made_of = (group_zscore, weighted_reward)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        if inputs.parts is None:
            raise ValueError("algorithm.advantage: gdpo needs the parts of the reward, which these rows lack")
        parts, weights = inputs.parts.unbind(-1)
        columns = [group_zscore(part, inputs.group_ids, self.eps, missing="nan") for part in parts.to(inputs.rewards).T]
        total = weighted_reward(torch.stack(columns, 1), weights[0]) if len(parts) else inputs.rewards
        return group_zscore(total, torch.zeros_like(inputs.group_ids), self.eps)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if setting.reward_parts == 1:
            yield "no effect: gdpo with one reward is grpo, standardised over the batch once more"


class ReMaxAdvantage(AdvantageChoice, type="remax"):
    r"""ReMax: the reward minus that of the prompt's greedy completion.

        A_i = r_i - r(greedy completion of the same prompt)

    LaTeX: \hat A_i = r_i - r(x_i, \arg\max \pi_\theta)
    """

    extra_rollouts: ClassVar[Mapping[str, Any]] = {"temperature": 0.0, "completions_per_prompt": 1}
    made_of = (per_token, baselines.return_minus_baseline)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        mask, totals = given(inputs.mask), inputs.totals
        if inputs.baseline_rewards is None:
            raise ValueError("algorithm.advantage: remax needs the rewards of greedy completions, which the loop draws")
        baseline = torch.where(inputs.baseline_rewards.isnan(), totals, inputs.baseline_rewards)
        return baselines.return_minus_baseline(per_token(totals, mask), per_token(baseline, mask), mask)


class ReinforcePPAdvantage(AdvantageChoice, type="reinforce_pp"):
    r"""REINFORCE++: the return of each token, whitened over all tokens of the batch.

        A_{i,t} = whiten_batch( sum_{s >= t} gamma^{s-t} r_{i,s} )

    LaTeX: \hat A_{i,t} = \operatorname{whiten}_B\Big(\sum_{s \ge t} \gamma^{s-t} r_{i,s}\Big)
    """

    gamma: Discount = 1.0
    eps: NonNegativeFloat = 1e-8
    by_token = True
    made_of = (reward_at_last_token, discounted_returns, masked_whiten)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        mask = given(inputs.mask)
        return masked_whiten(discounted_returns(inputs.by_token, mask, self.gamma), mask, eps=self.eps)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from self.discounted_away(self.gamma, setting)


class ReinforcePPBaselineAdvantage(AdvantageChoice, type="reinforce_pp_baseline"):
    r"""REINFORCE++-baseline: the reward minus the group's mean, whitened over all tokens of the batch.

        A_{i,t} = whiten_batch( r_i - mean_group r )

    LaTeX: \hat A_{i,t} = \operatorname{whiten}_B(r_i - \operatorname{mean}_{g(i)} r)
    """

    eps: NonNegativeFloat = 1e-8
    group_baseline = True
    made_of = (advantages.group_mean_baseline, per_token, masked_whiten)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        mask = given(inputs.mask)
        centred = advantages.group_mean_baseline(inputs.totals, inputs.group_ids)
        return masked_whiten(per_token(centred, mask), mask, eps=self.eps)


class GAEAdvantage(AdvantageChoice, type="gae"):
    r"""Generalised advantage estimation, with a critic; tokens that the model did not write are left out.

    With `length_alpha` lambda grows with a completion's length, 1 - 1 / (length_alpha |o_i|), in the place of `lam`.

        A_{i,t} = sum_{l >= 0} (gamma lam)^l delta_{i,t+l},   delta_{i,t} = r_{i,t} + gamma V_{i,t+1} - V_{i,t}

    LaTeX: \hat A_{i,t} = \sum_{l \ge 0} (\gamma \lambda)^l \delta_{i,t+l}, \quad \delta_{i,t} = r_{i,t} + \gamma
        V_{i,t+1} - V_{i,t}
    """

    gamma: Discount = 1.0
    lam: Discount = 0.95
    whiten: bool = True
    length_alpha: PositiveFloat | None = None
    needs = frozenset({"values"})
    by_token = True

    def atoms(self) -> Atoms:
        adaptive = (length_adaptive_lambda,) if self.length_alpha else ()
        return reward_at_last_token, *adaptive, gae, *((masked_whiten,) if self.whiten else ())

    def __call__(self, inputs: AdvantageInputs) -> AdvantagesAndReturns:
        mask, alpha = given(inputs.mask), self.length_alpha
        lam = self.lam if alpha is None else length_adaptive_lambda(mask, alpha).to(inputs.rewards)
        found = gae(inputs.by_token, given(inputs.values), mask, self.gamma, lam)
        own = found["advantages"]
        return AdvantagesAndReturns(masked_whiten(own, mask) if self.whiten else own, found["returns"])

    def where(self) -> tuple[Formula, ...]:
        whitened = Formula("A <- whiten_batch(A)", r"\hat A \leftarrow \operatorname{whiten}_B(\hat A)")
        return (whitened,) if self.whiten else ()

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from self.discounted_away(self.gamma, setting)
        tokens = setting.max_completion_tokens
        weight = self.lam**tokens
        if self.length_alpha is None and weight < 0.01:
            what = f"at the first of {tokens} tokens the reward itself weighs {weight:.1g}"
            yield f"biased: with lam={self.lam} {what}, the rest is the critic's word (length_alpha mends it)"


class ReverseKLAdvantage(AdvantageChoice, type="reverse_kl"):
    r"""Reverse KL to the teacher on the sampled token, as its advantage; rewards have no part in it.

        A_{i,t} = - (log pi_old(a_t) - log p_teacher(a_t))

    LaTeX: \hat A_{i,t} = -\big(\log \pi_{\mathrm{old}}(a_{i,t}) - \log p_{\mathrm{teacher}}(a_{i,t})\big)
    """

    needs = frozenset({"old_logprobs", "teacher_logprobs"})
    made_of = (k1_kl,)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return -k1_kl(given(inputs.old_logprobs), given(inputs.teacher_logprobs), given(inputs.mask))


class NoAdvantage(AdvantageChoice, type="none"):
    """None: nothing is learned from rewards."""

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return torch.zeros_like(inputs.rewards)

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not setting.axes["distillation"].coefficient:
            yield "no effect: advantage none learns nothing from rewards, and there is no distillation beside it"


class CustomAdvantage(Custom, AdvantageChoice, type="custom"):
    """Your own function: `AdvantageInputs` -> [B] or [B, T], or `AdvantagesAndReturns` where it reads `values`."""

    text = "A = "
    latex = r"\hat A = "
    inputs = AdvantageInputs

    def check(self, found: Any, inputs: AdvantageInputs) -> None:
        mask, with_returns = given(inputs.mask), isinstance(found, AdvantagesAndReturns)
        if with_returns != ("values" in self.reads) or (isinstance(found, tuple) and not with_returns):
            wanted = (
                "AdvantagesAndReturns(advantages, returns), as it reads values"
                if "values" in self.reads
                else "advantages alone, as it reads no values (reads: [values])"
            )
            raise ValueError(f"{self.shown} must return {wanted}, but returned {type(found).__name__}")
        advantages, returns = found if with_returns else (found, None)
        self.check_tensor(advantages, (inputs.rewards, mask), "number", "advantages" if with_returns else "")
        if returns is not None:
            self.check_tensor(returns, (mask,), "float", "returns")
        for name, tensor in (("advantages", advantages), ("returns", returns)):
            if tensor is not None and not tensor[mask.any(1) if tensor.dim() == 1 else mask].isfinite().all():
                raise ValueError(f"{self.shown} returned {name} that are not finite")


Plain = RawAdvantage | NoAdvantage
Centred = GRPONoStdAdvantage | RLOOAdvantage | OPOAdvantage | GPGAdvantage | ReMaxAdvantage
Scaled = GRPOAdvantage | GRPOBatchStdAdvantage | MaxRLAdvantage | GDPOAdvantage
PassAtK = PassAtKAdvantage | PassAtKAnalyticAdvantage
ByToken = ReinforcePPAdvantage | ReinforcePPBaselineAdvantage | GAEAdvantage | ReverseKLAdvantage
Advantage = Plain | Centred | Scaled | PassAtK | ByToken | TurnAdvantage | CustomAdvantage
