"""DAPO: decoupled clip and dynamic sampling.

    A_i = (r_i - mean_group r) / (std_group r + eps),   r with a soft penalty on the last tokens before the limit
    maximise  1/sum_j |o_j| sum_{i,t} min(rho_{i,t} A_i, clip(rho_{i,t}, 1 - 0.2, 1 + 0.28) A_i)
    over groups with 0 < |correct| < G

Differs from GRPO: a wider upper clip bound, so the probability of unlikely tokens can grow; groups whose rewards are
all equal are replaced by others until the batch is full; the loss is a mean over tokens; the soft penalty starts at the
last fifth of `rollout.max_completion_tokens` (`shaping.overlong_buffer_tokens`); no KL. Overlong filtering, which the
paper tries before the soft penalty, is `shaping: {mask_truncated: true, soft_overlong: false}`.

Paper: arXiv:2503.14476, equations 8 to 13.
"""

from atomrl.objectives import PolicyObjective, advantage, policy_loss

DAPO = PolicyObjective(
    name="dapo",
    clip=policy_loss.PPOClip(low=0.2, high=0.28),
    shaping=advantage.Shaping(soft_overlong=True),
    group_filter=advantage.MixedOutcomes(),
)
