"""The rollout pool: groups of trajectories that some processes draw and others train on.

How to use it: docs/guides/rollout_pool.md.
"""
