from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

train = load_dataset("HuggingFaceH4/Multilingual-Thinking", split="train")
config = SFTConfig(
    output_dir="out/sft-lora",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    max_length=2048,
    num_train_epochs=1,
    lr_scheduler_type="cosine",
    warmup_steps=0.03,
    learning_rate=2e-4,
    assistant_only_loss=True,
    report_to="trackio",
    push_to_hub=True,
)
trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=config,
    train_dataset=train,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
