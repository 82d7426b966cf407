"""GRPO as tutorials have it: a model in a variable, rows made into messages, several rewards, vLLM."""

import os
import re
from functools import partial

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

NAME = "Qwen/Qwen2.5-1.5B-Instruct"
RUN = "math"
SYSTEM = """Think first, between <think> and </think>.
Then answer between <answer> and </answer>."""
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def read_answer(text):
    match = ANSWER.search(text)
    return match.group(1).strip() if match else ""


def problems(split="train") -> Dataset:
    rows = load_dataset("openai/gsm8k", "main")[split]
    rows = rows.map(
        lambda row: {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}],
            "reference": row["answer"],
        }
    )
    return rows


def correct(prompts, completions, reference, **kwargs) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [2.0 if read_answer(text) in truth else 0.0 for text, truth in zip(texts, reference, strict=True)]


class Tags:
    def __init__(self, worth):
        self.worth = worth

    def __call__(self, completions, **kwargs):
        return [self.worth * ("<think>" in one[0]["content"]) for one in completions]


def scaled(completions, factor, **kwargs):
    return [factor * len(one[0]["content"]) for one in completions]


args = GRPOConfig(
    output_dir=os.path.join("outputs", f"{RUN}-grpo"),
    learning_rate=5e-6,
    optim="adamw_8bit",
    weight_decay=0.1,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    log_completions=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_prompt_length=256,
    max_completion_length=200,
    num_train_epochs=1,
    save_steps=100,
    max_grad_norm=0.1,
    report_to="none",
    use_vllm=True,
    vllm_gpu_memory_utilization=0.5,
)
model = AutoModelForCausalLM.from_pretrained(
    NAME, torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2", device_map=None
)
tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.eos_token
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[correct, Tags(0.5), partial(scaled, factor=0.001)],
    args=args,
    train_dataset=problems(),
    peft_config=LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
