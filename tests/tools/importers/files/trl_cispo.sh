#!/bin/bash
export NCCL_DEBUG=WARN
accelerate launch --num_processes 4 --config_file zero3.yaml trl/scripts/grpo.py \
    --model_name_or_path Qwen/Qwen3-1.7B \
    --dataset_name open-r1/Big-Math \
    --reward_funcs accuracy_reward \
    --loss_type cispo \
    --epsilon_high 5.0 \
    --scale_rewards batch \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --generation_batch_size 128 \
    --num_generations 8 \
    --max_completion_length 2048 \
    --learning_rate 3e-6 \
    --num_train_epochs 1 \
    --top_entropy_quantile 0.2 \
    --gradient_checkpointing \
    --bf16 true
