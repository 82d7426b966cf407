"""The likelihood ratio to the old policy, by token or by completion: log-probs [B, T] -> log-ratio [B, T]."""

from pydantic import NonNegativeFloat
from torch import Tensor

from atomrl.atoms.advantages import per_token
from atomrl.atoms.ratios import sequence_log_ratio, sequence_token_log_ratio, token_log_ratio
from atomrl.objective.choice import Atoms, Choice, Formula


class RatioChoice(Choice):
    """One atom of log-probs, by token or by completion."""

    def atoms(self) -> Atoms:
        return (self.atom, per_token) if self.type == "sequence" else (self.atom,)

    @property
    def by_completion(self) -> bool:
        return self.type != "token"

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.atom(logprobs, old_logprobs, mask, **self.settings)
        return per_token(found, mask) if found.dim() == 1 else found


class TokenRatio(RatioChoice, type="token"):
    r"""The ratio of each token.

        rho_{i,t} = pi(a_t) / pi_old(a_t)

    LaTeX: \rho_{i,t} = \frac{\pi_\theta(a_{i,t})}{\pi_{\mathrm{old}}(a_{i,t})}
    """

    clamp: NonNegativeFloat | None = None
    atom = staticmethod(token_log_ratio)


class SequenceRatio(RatioChoice, type="sequence"):
    r"""The ratio of the whole completion, the same for all its tokens, which share the gradient: GSPO.

        rho_{i,t} = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)

    LaTeX: \rho_{i,t} = \Big(\frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}\Big)^{1/|o_i|}
    """

    length_normalised: bool = True
    clamp: NonNegativeFloat | None = None
    atom = staticmethod(sequence_log_ratio)

    def equation(self) -> Formula:
        if self.length_normalised:
            return super().equation()
        return Formula(
            "rho_{i,t} = pi(o_i) / pi_old(o_i)",
            r"\rho_{i,t} = \frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}",
        )


class SequenceTokenRatio(RatioChoice, type="sequence_token"):
    r"""The ratio of the whole completion in value, with the gradient of each token's own log-prob: GSPO-token.

        rho_{i,t} = sg[(pi(o_i) / pi_old(o_i))^(1 / |o_i|)] pi(a_t) / sg[pi(a_t)]

    LaTeX: \rho_{i,t} = \operatorname{sg}\Big[\Big(\frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}\Big)^{1/|o_i|}\Big]
        \frac{\pi_\theta(a_{i,t})}{\operatorname{sg}[\pi_\theta(a_{i,t})]}
    """

    ceiling: NonNegativeFloat | None = None
    atom = staticmethod(sequence_token_log_ratio)


Ratio = TokenRatio | SequenceRatio | SequenceTokenRatio
