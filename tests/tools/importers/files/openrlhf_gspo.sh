MODEL=${MODEL:-/models/qwen}
python -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path ${MODEL} \
   --reward.remote_url ./math.py \
   --actor.policy_loss_type gspo \
   --actor.eps_clip_low_high 3e-4 4e-4 \
   --algo.advantage.estimator dr_grpo \
   --algo.kl.init_coef 0 \
   --rollout.batch_size 64 \
   --rollout.n_samples_per_prompt 16 \
   --train.batch_size 512 \
   --train.dynamic_batch_enable \
   --train.max_tokens_per_gpu 16384 \
   --rollout.max_new_tokens 4096 \
   --data.max_len 6144 \
   --data.prompt_dataset ./train.parquet \
   --ds.lora.rank 64 \
   --ds.lora.alpha 128 \
   --eval.dataset ./test.parquet \
   --eval.steps 10
