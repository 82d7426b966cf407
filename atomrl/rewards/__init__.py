"""Rewards: functions `f(prompts, completions, **columns) -> list[float | None]`.

The built-in reward functions are imported here. `compute.build_rewards` runs those of a config; `calling` calls
one of them, in a worker process if it may hang.
"""

from atomrl.rewards.answers import correctness_reward, strict_math
from atomrl.rewards.format import (
    digit_reward,
    hard_format_reward,
    length_penalty,
    mark_reward,
    missing_eos_penalty,
    repetition_penalty,
    strict_format,
)
from atomrl.rewards.latex import boxed
from atomrl.rewards.programs import code
from atomrl.rewards.verifiable import countdown, exact_match, gsm8k, reasoning_gym, search_r1_em
