"""The advantages of a recorded step, computed again by the algorithm itself: in the process that knows configs.

No equation is written here: what a page spells out is what the algorithm makes of the recorded rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from atomrl.config import RunConfig
from atomrl.config.explained import objective_in
from atomrl.data.rows import to_rows, with_advantages
from atomrl.loop.sync import mean_advantages
from atomrl.objective import PolicyObjective
from atomrl.objective.advantage import NoAdvantage
from atomrl.types import Sample, Segment, Trajectory

CLOSE = 1e-3
"""Recorded numbers that differ by less, by their share or by that of the largest, are those that were computed."""
NOTHING = 1e-6
"""Below which an advantage is none."""


def advantages(config: RunConfig, rows: Sequence[Mapping[str, Any]], group: Sequence[int]) -> dict[str, Any]:
    """What the algorithm makes of the rewards of a step.

    Args:
        config: of the run.
        rows: as they are recorded, all that the step trained on.
        group: places in `rows` that a page spells out.

    Returns:
        `equation`; `computed`, the advantage of each of the group; `baseline` and `scale`, where there are such that
        A = (r - baseline) / scale for all of them; or `why` it cannot be told.
    """
    objective = objective_in(config)
    if not isinstance(objective, PolicyObjective) or isinstance(objective.advantage, NoAdvantage):
        return {"why": "this algorithm makes no advantages of rewards"}
    made = objective.advantage
    equation = "\n".join(line.text for line in (*objective.shaping.where(), made.equation(), *made.where()))
    if why := unknown(objective, rows):
        return {"equation": equation, "why": why}
    plain = objective.model_copy(update={"rollout_is": (), "token_filter": None})  # which change no advantage
    drawn = [trajectory_of(row, config) for row in rows]
    try:
        found = mean_advantages(with_advantages(plain, to_rows(drawn, config.train.max_row_tokens)))
    except ValueError as error:
        return {"equation": equation, "why": str(error)}
    computed = [found.get(place) for place in group]
    recorded = [rows[place]["advantage"] for place in group]
    pairs = list(zip(computed, recorded, strict=True))
    close = max(NOTHING, CLOSE * max(abs(row["advantage"] or 0.0) for row in rows))
    if any((one is None) != (other is None) for one, other in pairs) or not all(
        math.isclose(one, other, rel_tol=CLOSE, abs_tol=close) for one, other in pairs if one is not None
    ):
        return {"equation": equation, "why": "computed again they are others than those that were recorded"}
    rewards = [rows[place]["reward"] for place in group]
    return {"equation": equation, "computed": computed} | line_through(rewards, computed)


def unknown(objective: PolicyObjective, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the advantages cannot be computed from what is recorded of completions, if they cannot."""
    needed = set(objective.advantage.required())
    if objective.kl.applied_to == "reward":
        needed |= {"old_logprobs", "ref_logprobs"}
    if needed:
        return f"they are made of numbers of every token, which are not all recorded: {', '.join(sorted(needed))}"
    if objective.extra_rollouts and not any("baseline_reward" in row for row in rows):
        return "the rewards of the greedy completions were not recorded"
    turns = [turn for row in rows for turn in (row.get("episode") or {}).get("turns") or ()]
    if any(turn.get("reward") is not None for turn in turns):
        return "rewards of an episode's turns have a part in them"
    return None


def trajectory_of(row: Mapping[str, Any], config: RunConfig) -> Trajectory:
    """A completion as it is recorded: with the prompt's number of tokens, but not the tokens."""
    functions, parts = config.reward.functions, row["reward_parts"]
    weights = [item.weight for item in functions] if len(functions) == len(parts) else [1.0] * len(parts)
    written = Segment(origin="model", token_ids=tuple(row["token_ids"]), policy_version=0)
    return Trajectory(
        prompt_id=row["prompt_id"],
        index=row["completion_index"],
        sample=Sample(sample_id=row["prompt_id"], prompt="", ground_truth=None),
        segments=(Segment(origin="prompt", token_ids=(0,) * row["prompt_tokens"]), written),
        text="",
        finish_reason=row["finish_reason"],
        reward=row["reward"],
        reward_parts=parts,
        part_weights=dict(zip(parts, weights, strict=True)),
        baseline_reward=row.get("baseline_reward"),
    )


def line_through(rewards: Sequence[float | None], computed: Sequence[float | None]) -> dict[str, float]:
    """`baseline` and `scale` of advantages that are (r - baseline) / scale; nothing where they are of no such form.

    Example:
        >>> line_through([1.0, 0.0, 0.5], [2.0, -2.0, 0.0])
        {'baseline': 0.5, 'scale': 0.25}
        >>> line_through([1.0, 0.0, 0.5], [0.5, 0.0, 0.0])
        {}
    """
    points = [(r, a) for r, a in zip(rewards, computed, strict=True) if r is not None and a is not None]
    (low, under), (high, over) = min(points, default=(0.0, 0.0)), max(points, default=(0.0, 0.0))
    if over - under < NOTHING or high == low:
        return {}
    scale = (high - low) / (over - under)
    baseline = low - scale * under
    close = CLOSE * max(abs(a) for _, a in points)
    if not all(math.isclose(a, (r - baseline) / scale, rel_tol=CLOSE, abs_tol=close) for r, a in points):
        return {}
    return {"baseline": baseline, "scale": scale}
