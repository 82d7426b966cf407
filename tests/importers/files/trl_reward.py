from trl import RewardConfig, RewardTrainer

args = RewardConfig(
    output_dir="Qwen2.5-0.5B-Reward",
    per_device_train_batch_size=16,
    num_train_epochs=2,
    center_rewards_coefficient=0.01,
    eval_strategy="epoch",
)
RewardTrainer("Qwen/Qwen2.5-0.5B", args=args, train_dataset=pairs).train()
