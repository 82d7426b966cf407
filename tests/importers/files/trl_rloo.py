from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import accuracy_reward

problems = load_dataset("trl-lib/DeepMath-103K", split="train")
args = RLOOConfig("out/rloo", per_device_train_batch_size=8, num_generations=4, beta=0.02, epsilon_high=0.28)
RLOOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=accuracy_reward, args=args, train_dataset=problems).train()
