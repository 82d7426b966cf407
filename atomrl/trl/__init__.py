"""GRPO from Python: a trainer with TRL's interface, and five functions that make up the algorithm.

    from atomrl.trl import GRPOArgs, GRPOTrainer
    from atomrl.rewards import correctness_reward, digit_reward

    args = GRPOArgs()
    args.lr = 1e-6
    args.num_generations = 4
    trainer = GRPOTrainer(model="your-model-path", tokenizer="your-tokenizer-path",
                          reward_funcs=[correctness_reward, digit_reward], args=args)
    trainer.train()

Scripts of TRL run with `from trl import` changed to `from atomrl.trl import`: `GRPOTrainer`, `RLOOTrainer`,
`SFTTrainer`, `DPOTrainer`, `RewardTrainer` and their configs.

`docs/reference/python_api.md` has the arguments, the files of a run, and the whole algorithm written with the five
functions.
"""

from atomrl.trl.arguments import DPOConfig, GRPOArgs, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig
from atomrl.trl.functions import (
    compute_advantages,
    compute_kl_penalty,
    compute_policy_loss,
    generate_samples,
    get_action_log_probs,
)
from atomrl.trl.trainer import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer
