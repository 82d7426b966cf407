"""GKD: distillation from a teacher on the student's own samples, per token over the whole vocabulary.

    minimise  1/sum_j |o_j| sum_{i,t} D_{i,t}
    D_{i,t} = beta KL(p, m) + (1 - beta) KL(pi, m),   m = beta p + (1 - beta) pi,   p of the teacher

Differs from GRPO: no reward and no advantage. Each token is compared with the teacher's whole distribution, which is a
dense signal, and the gradient is that of the policy's distribution instead of the sampled token. Differs from
distillation on a fixed corpus: the student is trained on its own mistakes. Rewards in the config are logged and
evaluated, but not trained on; `advantage: grpo` and a `clip` add them to the objective, as in the paper's RL section.
beta is `distillation: {beta: 0.5}`; 0 is the forward KL and 1 the reverse KL. All data are the student's own samples
(the paper's lambda = 1), at the sampling temperature. Needs `teacher.path`, a model with the same vocabulary.

Distributions are computed per chunk of tokens, and again in the backward pass. If that is too slow, use
`on_policy_distillation`, which needs only the log-probs of the sampled tokens.

Paper: arXiv:2306.13649.
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary, policy_loss

GKD = PolicyObjective(
    name="gkd",
    advantage=advantage.NoAdvantage(),
    clip=policy_loss.ReinforceClip(),
    distillation=auxiliary.Distillation(coefficient=1.0, beta=0.5),
)
