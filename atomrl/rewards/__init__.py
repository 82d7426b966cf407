"""Rewards: functions `f(prompts, completions, **columns) -> list[float | None]`, and what runs them safely."""

from atomrl.rewards.boxes import boxed
from atomrl.rewards.math import exact_match, gsm8k, strict_format, strict_math
from atomrl.rewards.penalties import length_penalty, repetition_penalty
from atomrl.rewards.programs import code
from atomrl.rewards.search import search_r1_em
from atomrl.rewards.tasks import countdown, reasoning_gym
from atomrl.rewards.tutorial import correctness_reward, digit_reward, hard_format_reward, mark_reward
