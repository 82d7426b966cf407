from datasets import load_dataset
from trl import GRPOTrainer


def brevity(completions, **kwargs):
    return [-abs(LONGEST - len(completion)) / LONGEST for completion in completions]


LONGEST = 20
rows = load_dataset("trl-lib/tldr", split="train")
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=brevity, train_dataset=rows)
trainer.train()
