"""On-policy distillation: the reverse KL to a teacher, estimated on the sampled tokens, as the advantage of each.

    A_{i,t} = - (log pi_old(a_t) - log p_teacher(a_t))
    maximise  1/sum_j |o_j| sum_{i,t} rho_{i,t} A_{i,t}

Differs from GRPO: credit is per token and comes from a teacher, not from a reward, which is logged and evaluated and
trains nothing. Differs from GKD: only the sampled token is looked at, so log-probs of a teacher are enough and no
distribution is held; the gradient has a higher variance for it. A token is credited with its own log-ratio alone, and
not with what it leads to. On a step with several updates take `clip: ppo`. Needs `teacher.path`, a model of the same
vocabulary.

Paper: none of its own; Lu et al., "On-policy distillation" (Thinking Machines, 2025), and MiniLLM, arXiv:2306.08543.
"""

from atomrl.objectives import PolicyObjective, advantage, clip

ON_POLICY_DISTILLATION = PolicyObjective(
    name="on_policy_distillation", advantage=advantage.ReverseKLAdvantage(), clip=clip.NoClip()
)
