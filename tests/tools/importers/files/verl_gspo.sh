set -x
low=3e-4
high=4e-4
MODEL=${MODEL:-Qwen/Qwen3-8B}
ARGS=(
    algorithm.adv_estimator=grpo   # group advantages
    data.train_batch_size=128
    data.max_response_length=4096
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.clip_ratio_low=$low
    actor_rollout_ref.actor.clip_ratio_high=$high
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.rollout.n=16
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=2.0
    algorithm.rollout_correction.rollout_rs=seq_mean_k3
    algorithm.rollout_correction.rollout_rs_threshold=0.01
)
python -m verl.trainer.main_ppo "${ARGS[@]}" trainer.total_training_steps=100
