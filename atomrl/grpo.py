"""GRPO from Python: a trainer with TRL's interface, and five functions that make up the algorithm.

    from atomrl.grpo import GRPOArgs, GRPOTrainer
    from atomrl.rewards import correctness_reward, digit_reward

    args = GRPOArgs()
    args.lr = 1e-6
    args.num_generations = 4
    trainer = GRPOTrainer(model="your-model-path", tokenizer="your-tokenizer-path",
                          reward_funcs=[correctness_reward, digit_reward], args=args)
    trainer.train()

The names are those of `atomrl.trl`, which has TRL's other trainers, too. `docs/reference/python_api.md` has the
arguments, the files of a run, and the whole algorithm written with the five functions.
"""

from atomrl.trl import (
    CPOConfig,
    CPOTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOArgs,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
    compute_advantages,
    compute_kl_penalty,
    compute_policy_loss,
    generate_samples,
    get_action_log_probs,
)

__all__ = [
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "GRPOArgs",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "compute_advantages",
    "compute_kl_penalty",
    "compute_policy_loss",
    "generate_samples",
    "get_action_log_probs",
]
