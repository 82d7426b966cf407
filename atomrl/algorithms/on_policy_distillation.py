"""On-policy distillation: minus the reverse KL to a teacher on each sampled token as its advantage.

    A_{i,t} = - (log pi_old(a_t) - log p_teacher(a_t))
    maximise  1/sum_j |o_j| sum_{i,t} rho_{i,t} A_{i,t}

Differs from GRPO: advantages are per token and come from a teacher; rewards are logged and evaluated, but not trained
on. Differs from GKD: it uses only the sampled token, so the teacher's log-probs suffice and no distribution is
computed; in return, the gradient has a higher variance. The advantage of a token is its own log-ratio, without those of
later tokens. With several updates per step use `clip: ppo`. Needs `teacher.path`, a model with the same vocabulary.

Paper: none of its own; Lu et al., "On-policy distillation" (Thinking Machines, 2025), and MiniLLM, arXiv:2306.08543.
"""

from atomrl.objectives import PolicyObjective, advantage, policy_loss

ON_POLICY_DISTILLATION = PolicyObjective(
    name="on_policy_distillation", advantage=advantage.ReverseKLAdvantage(), clip=policy_loss.NoClip()
)
