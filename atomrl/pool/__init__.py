"""The rollout pool: groups of trajectories that some processes draw and others train on (docs/rollout_pool.md)."""
