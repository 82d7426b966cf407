"""Rewards: functions `f(prompts, completions, **columns) -> list[float | None]`.

The built-in reward functions are imported here. `compute.build_rewards` runs those of a config. `scorer`
finds a function by its name, `calling` calls it, and `workers` does so in a process if it may hang.
"""

from atomrl.rewards.format import strict_format
from atomrl.rewards.latex import boxed
from atomrl.rewards.penalties import length_penalty, missing_eos_penalty, repetition_penalty
from atomrl.rewards.programs import code
from atomrl.rewards.search_r1 import search_r1_em
from atomrl.rewards.tasks import countdown, reasoning_gym
from atomrl.rewards.tutorial_formats import digit_reward, hard_format_reward, mark_reward
from atomrl.rewards.verifiable import correctness_reward, exact_match, gsm8k, strict_math
