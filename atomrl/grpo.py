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
