"""Rollout pool: groups in a file that producers write and trainers claim, and the weights published for producers.

The trainer's end is `trainer.pool_source.PoolSource`.
"""
