#!/bin/bash
accelerate launch --num_processes 8 --config_file zero2.yaml trl/scripts/dpo.py \
    --model_name_or_path meta-llama/Llama-3.1-8B \
    --dataset_name local/pairs \
    --loss_type ipo \
    --beta 0.05 \
    --max_length 4096 \
    --ld_alpha 0.5 \
    --max_steps 500 \
    --load_in_4bit --use_peft --lora_r 64 \
    --precompute_ref_log_probs
