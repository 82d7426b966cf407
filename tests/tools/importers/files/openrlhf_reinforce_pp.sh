# Flags before they had dots, and a command in a here-document.
read -r -d '' training_commands <<EOF
openrlhf.cli.train_ppo_ray \
   --pretrain /models/llama \
   --remote_rm_url http://10.0.0.2:5000/get_reward \
   --advantage_estimator reinforce \
   --micro_train_batch_size 4 \
   --train_batch_size 256 \
   --rollout_batch_size 256 \
   --n_samples_per_prompt 4 \
   --max_epochs 1 \
   --num_episodes 2 \
   --prompt_max_len 1024 \
   --generate_max_len 1024 \
   --actor_learning_rate 5e-7 \
   --init_kl_coef 1e-4 \
   --gamma 0.99 \
   --prompt_data ./prompts.jsonl \
   --input_key question \
   --zero_stage 3 \
   --use_wandb SECRET-TOKEN \
   --wandb_project rpp
EOF
deepspeed --module $training_commands
