"""The policy loss: ratio, clip, trust region and loss aggregation.

    sum_{i,t} w_{i,t} clip(rho_{i,t}, A_{i,t})

- `ratio` is what rho is: per token or per completion.
- `clip` bounds the update.
- `loss_agg` sets what the loss is averaged over: the weights w.

To add a clip: write a class here with its equation, and add it to the union `Clip`. A function of your own needs
neither: `clip: {type: custom, function: "my_module:my_clip"}`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from atomrl.atoms import Formula, natural_gradient, policy_losses
from atomrl.atoms.advantages import per_token
from atomrl.atoms.kl import distribution_kl
from atomrl.atoms.masks import row_mean
from atomrl.atoms.policy_losses import sequence_log_ratio, sequence_token_log_ratio, token_log_ratio
from atomrl.batches import TrainingBatch
from atomrl.common.metrics import Count, Mean, Metrics, merge
from atomrl.objectives.choice import Choice, Custom, Setting, default, not_none
from atomrl.protocols import Algorithm, Forward, Output, RowUnit, UpdateOutput

# --------------------------------------------------------------------------------------------------------------------
# Importance ratio to the old policy, per token or per completion: log-probs [B, T] -> log-ratio [B, T].


class RatioChoice(Choice):
    """Base class of ratios: log-probs, those of the old policy, and mask, [B, T] each -> log-ratio [B, T]."""

    @property
    def by_completion(self) -> bool:
        return self.type != "token"


class TokenRatio(RatioChoice, type="token"):
    """Ratio of each token."""

    text = "rho_{i,t} = pi(a_t) / pi_old(a_t)"
    latex = r"\rho_{i,t} = \frac{\pi_\theta(a_{i,t})}{\pi_{\mathrm{old}}(a_{i,t})}"
    clamp: NonNegativeFloat | None = None
    atom = staticmethod(token_log_ratio)


class SequenceRatio(RatioChoice, type="sequence"):
    """Ratio of the completion, the same for all its tokens, which share its gradient: GSPO."""

    text = "rho_{i,t} = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)"
    latex = r"\rho_{i,t} = \Big(\frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}\Big)^{1/|o_i|}"
    length_normalised: bool = True
    clamp: NonNegativeFloat | None = None
    made_of = (sequence_log_ratio, per_token)

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        return per_token(sequence_log_ratio(logprobs, old_logprobs, mask, **self.settings), mask)

    def equation(self) -> Formula:
        if self.length_normalised:
            return super().equation()
        return Formula(
            "rho_{i,t} = pi(o_i) / pi_old(o_i)",
            r"\rho_{i,t} = \frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}",
        )


class SequenceTokenRatio(RatioChoice, type="sequence_token"):
    """Ratio of the completion in value, with the gradient of each token's own log-prob: GSPO-token."""

    text = "rho_{i,t} = sg[(pi(o_i) / pi_old(o_i))^(1 / |o_i|)] pi(a_t) / sg[pi(a_t)]"
    latex = (
        r"\rho_{i,t} = \operatorname{sg}\Big[\Big(\frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}\Big)^{1/|o_i|}\Big] "
        r"\frac{\pi_\theta(a_{i,t})}{\operatorname{sg}[\pi_\theta(a_{i,t})]}"
    )
    ceiling: NonNegativeFloat | None = None
    atom = staticmethod(sequence_token_log_ratio)


Ratio = TokenRatio | SequenceRatio | SequenceTokenRatio


# --------------------------------------------------------------------------------------------------------------------
# Loss aggregation: mask [B, T] and group ids [B] of an update -> loss weights [B, T].


class LossAggChoice(Choice):
    """Base class of aggregations: one atom of the mask."""

    row_unit: ClassVar[RowUnit] = "row"
    """Rows that a split into updates or micro-batches keeps together."""

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        return self.atom(mask, **self.settings)


def one_loss_per_row(setting: Setting) -> bool:
    """Return True if all tokens of a completion have the same loss."""
    return bool(setting.axes["ratio"].type == "sequence" or setting.axes["clip"].type == "gmpo")


class TokenMean(LossAggChoice, type="token_mean"):
    """Mean over all tokens of the optimizer step."""

    atom = staticmethod(policy_losses.token_mean)

    def warnings(self, setting: Setting) -> Iterator[str]:
        if one_loss_per_row(setting):
            yield "biased: the ratio of a completion counts once per token, so long completions have more weight"


class SequenceMean(LossAggChoice, type="sequence_mean"):
    """Mean over completions of their means over tokens."""

    atom = staticmethod(policy_losses.sequence_mean)

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not one_loss_per_row(setting):
            yield "biased: a sequence mean weighs tokens of long completions less, so long wrong answers cost less"


class ConstantLength(LossAggChoice, type="constant_length"):
    """Mean over completions of their sums over tokens divided by a constant: Dr. GRPO."""

    length: PositiveInt | None = None
    """Constant in tokens; by default `rollout.max_completion_tokens`."""
    atom = staticmethod(policy_losses.constant_length)


class PromptMean(LossAggChoice, type="prompt_mean"):
    """Mean over prompts of the means over all tokens of their completions; a prompt's rows stay in one update."""

    row_unit = "group"
    atom = staticmethod(policy_losses.group_token_mean)

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        return self.atom(mask, group_ids)


LossAgg = TokenMean | SequenceMean | ConstantLength | PromptMean


# --------------------------------------------------------------------------------------------------------------------
# Clip: `PolicyInputs` -> loss per token [B, T], or `Clipped`.


class PolicyInputs(NamedTuple):
    """Inputs of a per-token policy loss: rows of a micro-batch, [B, T] each, on the device of the policy.

    Numbers are float32, and 0 off the mask. Log-probs are in nats, indexed by the token itself. Only `logprobs` and
    `log_ratio` have a gradient. Optional fields are None unless `reads` of a custom clip names them;
    `rollout_logprobs` is present unless the engine returns none.
    """

    log_ratio: Tensor
    """log pi - log pi_old of the axis `ratio`: of each token, or of its completion. With gradient."""
    advantages: Tensor
    """Advantage of each token."""
    logprobs: Tensor
    """log pi: of the current policy. With gradient."""
    old_logprobs: Tensor
    """log pi_old: of the policy at the start of the step; with `old_policy: rollout` log mu."""
    mask: Tensor
    """Bool: trained tokens, all written by the model."""
    rollout_logprobs: Tensor | None = None
    """log mu: of the engine, when it sampled the tokens."""
    ref_logprobs: Tensor | None = None
    """Log-probs of the frozen reference."""
    teacher_logprobs: Tensor | None = None
    """Log-probs of the teacher."""
    old_entropy: Tensor | None = None
    """Entropy in nats of the distribution that the token was sampled from, at the start of the step."""


Clipped = tuple[Tensor, Tensor]
"""Loss per token and mask of clipped tokens, [B, T] each."""


class TrustRegionClip(Choice):
    """Base class of clips that have no effect while the ratio is 1."""

    def warnings(self, setting: Setting) -> Iterator[str]:
        if setting.updates_per_step == 1 and not setting.axes["old_policy"]:
            yield f"no effect: with one update in a step the ratio is 1, and {self.type} is plain REINFORCE"


class PPOClip(TrustRegionClip, type="ppo"):
    """PPO's clip: no gradient beyond the bound on the advantage's side."""

    text = "min(rho A, clip(rho, 1 - low, 1 + high) A)"
    latex = (
        r"\min\big(\rho_{i,t} \hat A_{i,t}, \operatorname{clip}(\rho_{i,t}, 1 - \epsilon_l, 1 + \epsilon_h) \hat "
        r"A_{i,t}\big)"
    )
    low: NonNegativeFloat = default(policy_losses.clipped_policy_loss, "clip_low")
    high: NonNegativeFloat = default(policy_losses.clipped_policy_loss, "clip_high")
    dual: NonNegativeFloat | None = None
    made_of = (policy_losses.clipped_policy_loss, policy_losses.clipped_tokens)

    def __call__(self, inputs: PolicyInputs) -> Clipped:
        ratio, advantages = inputs.log_ratio.exp(), inputs.advantages
        loss = policy_losses.clipped_policy_loss(ratio, advantages, self.low, self.high, self.dual)
        return loss, policy_losses.clipped_tokens(ratio.detach(), advantages, self.low, self.high)

    def where(self) -> tuple[Formula, ...]:
        bound = r"\text{at least } c \hat A_{i,t} \text{ where } \hat A_{i,t} < 0"
        return () if self.dual is None else (Formula("the minimum is at least dual A where A < 0", bound),)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if self.dual is not None and self.dual <= 1:
            yield "no effect: a dual clip of at most 1 removes the gradient of negative advantages; 3 is typical"
        ratio, by_token = setting.axes["ratio"], setting.axes["ratio"].type == "token"
        if setting.updates_per_step == 1:
            return
        if not by_token and getattr(ratio, "length_normalised", True) and self.low >= 0.05:
            yield "no effect: a completion's mean ratio changes by about 1e-4, far below this clip range (GSPO: 3e-4)"
        if by_token and self.high < 0.01:
            yield "unstable: token ratios change by more than this, so most tokens are clipped after the first update"


class CISPOClip(Choice, type="cispo"):
    """CISPO: the clipped ratio is a detached weight, so clipped tokens keep their gradient."""

    text = "sg[clip(rho, 1 - low, 1 + high)] A log pi(a_t)"
    latex = (
        r"\operatorname{sg}[\operatorname{clip}(\rho_{i,t}, 1 - \epsilon_l, 1 + \epsilon_h)] \hat A_{i,t} \log "
        r"\pi_\theta(a_{i,t})"
    )
    low: NonNegativeFloat = default(policy_losses.cispo_loss, "clip_low")
    high: NonNegativeFloat = default(policy_losses.cispo_loss, "clip_high")
    made_of = (policy_losses.cispo_loss, policy_losses.out_of_bounds)

    def __call__(self, inputs: PolicyInputs) -> Clipped:
        ratio = inputs.log_ratio.detach().exp()
        loss = policy_losses.cispo_loss(inputs.logprobs, ratio, inputs.advantages, inputs.mask, self.low, self.high)
        return loss, policy_losses.out_of_bounds(ratio, 1 - self.low, 1 + self.high)


class SAPOClip(TrustRegionClip, type="sapo"):
    """SAPO: a sigmoid instead of a clip, with a temperature for each sign of the advantage."""

    text = "(4 / tau) sigmoid(tau (rho - 1)) A,   tau by the sign of A"
    latex = r"\frac{4}{\tau} \sigma(\tau (\rho_{i,t} - 1)) \hat A_{i,t}"
    tau_positive: PositiveFloat = default(policy_losses.sapo_loss, "tau_positive")
    tau_negative: PositiveFloat = default(policy_losses.sapo_loss, "tau_negative")
    made_of = (policy_losses.sapo_loss,)

    def __call__(self, inputs: PolicyInputs) -> Tensor:
        return policy_losses.sapo_loss(inputs.log_ratio.exp(), inputs.advantages, **self.settings)


class GMPOClip(TrustRegionClip, type="gmpo"):
    """GMPO: geometric mean of a completion's ratios, each clipped in log space on the advantage's side."""

    text = "A_i exp(mean_t clip_A(log rho_t, -low, high))"
    latex = (
        r"\hat A_i \exp\Big(\frac{1}{|o_i|} \sum_t \operatorname{clip}_{\hat A}(\log \rho_{i,t}, -\epsilon_l, "
        r"\epsilon_h)\Big)"
    )
    low: NonNegativeFloat = default(policy_losses.sequence_clipped_log_ratio, "clip_low")
    high: NonNegativeFloat = default(policy_losses.sequence_clipped_log_ratio, "clip_high")
    made_of = (policy_losses.sequence_clipped_log_ratio, row_mean, policy_losses.geometric_mean_loss, per_token)

    @property
    def by_completion(self) -> bool:
        return True

    def __call__(self, inputs: PolicyInputs) -> Clipped:
        log_ratio, advantages, mask = inputs.log_ratio, inputs.advantages, inputs.mask
        clipped = policy_losses.sequence_clipped_log_ratio(log_ratio, advantages, self.low, self.high)
        loss = policy_losses.geometric_mean_loss(clipped, row_mean(advantages, mask), mask)
        return per_token(loss, mask), clipped.detach() != log_ratio.detach() * (advantages != 0)


class DPPOClip(TrustRegionClip):
    """Base class of DPPO's clips: a mask by a divergence of the sampled token's probabilities."""

    cap: NonNegativeFloat = 20.0
    low: NonNegativeFloat = default(policy_losses.trust_region_tokens, "low")
    high: NonNegativeFloat = default(policy_losses.trust_region_tokens, "high")

    def __call__(self, inputs: PolicyInputs) -> Clipped:
        policies = (inputs.logprobs, inputs.old_logprobs, inputs.mask)
        # The change has a sign, a divergence has none.
        change, divergence = policy_losses.probability_change(*policies), self.atom(*policies).abs()
        keep = policy_losses.trust_region_tokens(change, divergence, inputs.advantages, self.low, self.high)
        weights = inputs.log_ratio.detach().exp().clamp(max=self.cap) * keep
        return policy_losses.reinforce_loss(inputs.logprobs, inputs.advantages, inputs.mask, weights), ~keep


class DPPOTVClip(DPPOClip, type="dppo_tv"):
    """DPPO by total variation: no gradient where the probability has changed too much on the advantage's side."""

    text = "sg[min(rho, cap)] [|pi - pi_old| within bounds] A log pi(a_t)"
    latex = (
        r"\operatorname{sg}[\min(\rho_{i,t}, c)]\,[\,|\pi_\theta - \pi_{\mathrm{old}}| \le \delta\,]\,\hat A_{i,t} "
        r"\log \pi_\theta(a_{i,t})"
    )
    atom = staticmethod(policy_losses.probability_change)
    made_of = (policy_losses.probability_change, policy_losses.trust_region_tokens, policy_losses.reinforce_loss)


class DPPOKLClip(DPPOClip, type="dppo_kl"):
    """DPPO by binary KL: no gradient where the KL of "this token or another" is too large on the advantage's side."""

    text = "sg[min(rho, cap)] [KL_binary(pi_old, pi) within bounds] A log pi(a_t)"
    latex = (
        r"\operatorname{sg}[\min(\rho_{i,t}, c)]\,[\,\mathrm{KL}_{\mathrm{bin}}(\pi_{\mathrm{old}}, \pi_\theta) \le "
        r"\delta\,]\,\hat A_{i,t} \log \pi_\theta(a_{i,t})"
    )
    low: NonNegativeFloat = 0.05
    high: NonNegativeFloat = 0.05
    atom = staticmethod(policy_losses.binary_kl)
    made_of = (policy_losses.binary_kl, *DPPOTVClip.made_of)


class NoClip(Choice, type="none"):
    """No clip: the ratio as it is."""

    text = "rho A"
    latex = r"\rho_{i,t} \hat A_{i,t}"
    made_of = (policy_losses.clipped_policy_loss,)

    def __call__(self, inputs: PolicyInputs) -> Tensor:
        return policy_losses.clipped_policy_loss(inputs.log_ratio.exp(), inputs.advantages, math.inf, math.inf)

    def warnings(self, setting: Setting) -> Iterator[str]:
        bounded = getattr(setting.axes["token_filter"], "type", "") == "kl_cov" or setting.axes["update"] is not None
        if setting.updates_per_step > 1 and not bounded:
            yield "unstable: nothing bounds the ratio over several updates"


class ReinforceClip(Choice, type="reinforce"):
    """REINFORCE: the log-prob instead of a ratio."""

    text = "A log pi(a_t)"
    latex = r"\hat A_{i,t} \log \pi_\theta(a_{i,t})"
    made_of = (policy_losses.reinforce_loss,)

    def __call__(self, inputs: PolicyInputs) -> Tensor:
        return policy_losses.reinforce_loss(inputs.logprobs, inputs.advantages, inputs.mask)

    def warnings(self, setting: Setting) -> Iterator[str]:
        updates = setting.updates_per_step
        if updates > 1 and setting.axes["advantage"].type != "none":
            yield f"biased: {updates} updates in a step without a ratio; all but the first are off-policy"


class CustomClip(Custom, type="custom"):
    """A user's function: `PolicyInputs` -> loss per token [B, T], or loss and mask of clipped tokens."""

    inputs = PolicyInputs

    def check(self, result: Any, inputs: PolicyInputs) -> None:
        pair = isinstance(result, tuple)
        if pair and len(result) != 2:
            raise ValueError(
                f"{self.function} must return the loss, or (loss, clipped), but returned {len(result)} values"
            )
        loss, clipped = result if pair else (result, None)
        self.check_tensor(loss, (inputs.mask,), "float", "the loss per token" if pair else "")
        if clipped is not None:
            self.check_tensor(clipped, (inputs.mask,), "bool", "the clipped tokens")
        # A loss of 0 everywhere may be a constant. Values are read only without a gradient, to avoid a GPU sync.
        needs_gradient = inputs.logprobs.requires_grad and torch.is_grad_enabled()
        if needs_gradient and not loss.requires_grad and loss[inputs.mask].any():
            raise ValueError(
                f"{self.shown} returned a loss without a gradient: compute it from "
                "log_ratio or logprobs, without detach() or torch.no_grad()"
            )


Clip = PPOClip | CISPOClip | SAPOClip | GMPOClip | DPPOTVClip | DPPOKLClip | NoClip | ReinforceClip | CustomClip


# --------------------------------------------------------------------------------------------------------------------
# Trust region: an update that replaces the optimizer's step of the policy.

DISTRIBUTIONS: frozenset[Output] = frozenset({"distributions"})


class TrustRegion(Choice, type="trust_region"):
    """TRPO: a natural-gradient step, the longest whose measured KL from the policy before it is within the bound.

    `kl_bound` is in nats per token, over the whole vocabulary, weighted by the loss weights; `damping` is added to the
    diagonal of the Fisher matrix. It has no learning rate, and no state between steps.
    """

    text = (
        "theta <- theta + ratio^j sqrt(2 kl_bound / x^T F x) x, (F + damping I) x = grad L,   KL(pi_before || pi) <= "
        "kl_bound"
    )
    latex = (
        r"\theta \leftarrow \theta + \alpha^j \sqrt{\tfrac{2 \delta}{x^\top F x}}\, x, \quad (F + \lambda I)\, x = "
        r"\nabla_\theta L, \quad \mathrm{KL}(\pi_{\mathrm{before}} \Vert \pi_\theta) \le \delta"
    )
    kl_bound: PositiveFloat = 0.01
    cg_iterations: PositiveInt = default(natural_gradient.conjugate_gradient, "iterations")
    damping: NonNegativeFloat = 0.1
    backtracks: NonNegativeInt = default(natural_gradient.line_search, "backtracks")
    backtrack_ratio: Annotated[float, Field(gt=0, lt=1)] = default(natural_gradient.line_search, "ratio")
    made_of = (
        natural_gradient.flat,
        distribution_kl,
        natural_gradient.fisher_vector_product,
        natural_gradient.conjugate_gradient,
        natural_gradient.natural_step,
        natural_gradient.line_search,
    )

    def __call__(
        self,
        algorithm: Algorithm,
        parameters: Sequence[Tensor],
        micro_batches: Sequence[TrainingBatch],
        outputs: Forward,
    ) -> UpdateOutput:
        """Update the parameters in place (`protocols.Update`). If no step is accepted, they do not change by a bit."""
        names = algorithm.outputs - {"values"}
        loss, gradient, metrics, micros = _surrogate_gradient(algorithm, parameters, micro_batches, outputs, names)
        norm = float(gradient.norm())
        metrics |= {"actor/kl_bound": Mean(self.kl_bound)} | _step_metrics(0.0, 0.0, False, 0.0)  # if it returns early
        if not norm < float("inf"):
            return UpdateOutput(metrics | {"actor/skipped_updates": Count()}, finite=False)
        metrics["actor/grad_norm"] = Mean(norm)
        if norm == 0:
            return UpdateOutput(metrics | {"actor/empty_updates": Count()})
        # Weights of tokens in the mean KL: the loss weights, normalised to a sum of 1 over the step.
        weights = [micro.loss_weights[micro.loss_mask] for micro in micros]
        total = sum(float(part.sum(dtype=torch.float64)) for part in weights)
        start, states = natural_gradient.flat(parameters), [part / total for part in weights]

        def fisher(vector: Tensor) -> Tensor:
            total = torch.zeros_like(vector)
            for micro, weights in zip(micros, states, strict=True):

                def distributions(forward: bool, micro: TrainingBatch = micro) -> Tensor:
                    return not_none(outputs(micro, DISTRIBUTIONS, plain=forward).distributions).logprobs()

                total += natural_gradient.fisher_vector_product(distributions, weights, parameters, vector)
            return total

        def damped(vector: Tensor) -> Tensor:
            return fisher(vector).add_(vector, alpha=self.damping)

        solution, residual = natural_gradient.conjugate_gradient(damped, -gradient, self.cg_iterations)
        metrics["actor/cg_residual"] = Mean(residual)
        longest = natural_gradient.natural_step(solution, fisher, self.kl_bound)
        if longest is None:
            return UpdateOutput(metrics)

        @torch.no_grad()
        def measure(scale: float) -> tuple[float, float]:
            kl, gain = 0.0, loss
            for micro, weights in zip(micros, states, strict=True):
                # Both distributions are recomputed for each micro-batch: those of the whole step do not fit in memory.
                assign(parameters, start)
                before = not_none(outputs(micro, DISTRIBUTIONS).distributions).logprobs()
                assign(parameters, start + scale * longest)
                after = outputs(micro, names | DISTRIBUTIONS)
                kls = distribution_kl(before, not_none(after.distributions).logprobs())
                kl += float((weights * kls).sum(dtype=torch.float64))
                gain -= float(algorithm.loss(after, micro).loss)
            return kl, gain

        scale = 0.0
        try:
            result = natural_gradient.line_search(measure, self.kl_bound, self.backtracks, self.backtrack_ratio)
            scale = result["scale"]
        finally:  # also after an out-of-memory error: restore the weights
            assign(parameters, start + scale * longest if scale else start)
        return UpdateOutput(metrics | _step_metrics(result["kl"], result["gain"], scale > 0, result["backtracks"]))


@torch.no_grad()
def assign(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Write a flat vector into the parameters, in place. `assign(p, flat(p))` does not change a bit."""
    for parameter, part in zip(parameters, natural_gradient.parts(parameters, vector), strict=True):
        parameter.copy_(part)


def _step_metrics(kl: float, gain: float, accepted: bool, backtracks: float) -> Metrics:
    return {
        "actor/kl": Mean(kl),
        "actor/surrogate_gain": Mean(gain),
        "actor/accepted": Mean(float(accepted)),
        "actor/backtracks": Mean(float(backtracks)),
    }


def _surrogate_gradient(
    algorithm: Algorithm,
    parameters: Sequence[Tensor],
    micro_batches: Sequence[TrainingBatch],
    outputs: Forward,
    names: frozenset[Output],
) -> tuple[float, Tensor, Metrics, list[TrainingBatch]]:
    """Return value and gradient of the surrogate, metrics, and the micro-batches with `old_logprobs` filled in."""
    total, loss, metrics, micros = torch.zeros_like(natural_gradient.flat(parameters)), 0.0, [], []
    for micro in micro_batches:
        predictions = outputs(micro, names)
        if micro.old_logprobs is None:
            micro = replace(micro, old_logprobs=not_none(predictions.logprobs).detach())
        result = algorithm.loss(predictions, micro)
        total += natural_gradient.flat_gradient(result.loss, parameters)
        loss += result.loss.item()
        metrics.append(result.metrics)
        micros.append(micro)
    return loss, total, merge(metrics), micros
