"""GKD: distillation from a teacher on what the student writes itself, token by token over the whole vocabulary.

    minimise  1/sum_j |o_j| sum_{i,t} D_{i,t}
    D_{i,t} = beta KL(p, m) + (1 - beta) KL(pi, m),   m = beta p + (1 - beta) pi,   p of the teacher

Differs from GRPO: no reward and no advantage; each token is told the teacher's whole distribution, so a step is worth
many of a sparse reward, and the gradient goes through the policy's distribution, not through what was drawn. Differs
from distillation on a fixed corpus: the student is corrected where it goes wrong, in its own words. Rewards in the
config are logged and evaluated, and train nothing; `advantage: grpo` and a `clip` add them to the objective, as the
paper's section on RL does. beta is `distillation: {beta: 0.5}`; 0 is the forward KL and 1 the reverse. All of it is on
the student's own samples (the paper's lambda = 1), at the sampling temperature. Needs `teacher.path`, a model of the
same vocabulary.

Distributions over the vocabulary exist a chunk of tokens at a time, and once more in the backward pass; where that
takes too long, `on_policy_distillation` needs none but the drawn tokens' log-probs.

Paper: arXiv:2306.13649.
"""

from atomrl.objectives import PolicyObjective, advantage, auxiliary, clip

GKD = PolicyObjective(
    name="gkd",
    advantage=advantage.NoAdvantage(),
    clip=clip.ReinforceClip(),
    distillation=auxiliary.Distillation(coefficient=1.0, beta=0.5),
)
