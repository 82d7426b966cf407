"""GSPO: ratio and clip per completion.

    s_i = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)
    maximise  1/N sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i),   A of GRPO

Differs from GRPO: all tokens of a completion share its ratio and are clipped together. The bounds are narrow because
a geometric mean changes little.

GSPO-token has the same value but a gradient per token, so advantages may differ between tokens; with one advantage per
completion it is GSPO.

Paper: arXiv:2507.18071, equations 5 to 7 and 13, 14.
"""

from atomrl.objectives import PolicyObjective, policy_loss

GSPO = PolicyObjective(
    name="gspo",
    ratio=policy_loss.SequenceRatio(),
    clip=policy_loss.PPOClip(low=3e-4, high=4e-4),
    loss_agg=policy_loss.SequenceMean(),
)

GSPO_TOKEN = PolicyObjective(
    name="gspo_token",
    ratio=policy_loss.SequenceTokenRatio(),
    clip=policy_loss.PPOClip(low=3e-4, high=4e-4),
    loss_agg=policy_loss.SequenceMean(),
)
