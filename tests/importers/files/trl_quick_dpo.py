from datasets import load_dataset
from trl import DPOTrainer

pairs = load_dataset("trl-lib/ultrafeedback_binarized", split="train")
pairs = pairs.select(range(2000))
DPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", train_dataset=pairs).train()
