from datasets import load_dataset
from mine import layout_reward
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

MAX = 1024
LEARNING_RATE = 2e-5


def main():
    dataset = load_dataset("openr1/Math-220k", split="train")
    args = GRPOConfig(
        "out/lora",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_generations=8,
        steps_per_generation=8,
        num_iterations=2,
        max_completion_length=MAX,
        beta=0.04,
        loss_type="grpo",
        epsilon=0.1,
        epsilon_high=0.3,
        delta=4.0,
        scale_rewards=False,
        reward_weights=[1.0, 0.5],
        max_steps=1000,
        save_steps=100,
        mask_truncated_completions=True,
        logging_steps=1,
        report_to=["wandb"],
    )
    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-1.5B",
        reward_funcs=[accuracy_reward, layout_reward],
        args=args,
        train_dataset=dataset,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
