import trl
from datasets import load_dataset

data = load_dataset("trl-lib/ultrafeedback_binarized")
trainer = trl.RewardTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=data["train"])
trainer.train()
