"""Trajectories made of texts. Nothing here is slow to import."""

from atomrl.types import FinishReason, Problem, Segment, Trajectory


def trajectory(problem: Problem, text: str, index: int = 0, finish_reason: FinishReason = "stop") -> Trajectory:
    """A completion of one token."""
    return Trajectory(
        prompt_id=f"0:{problem.problem_id}",
        index=index,
        problem=problem,
        segments=(
            Segment(origin="prompt", token_ids=(1,)),
            Segment(origin="model", token_ids=(1,), policy_version=3),
        ),
        text=text,
        finish_reason=finish_reason,
    )


def rollouts(groups: dict[str, list[str]], **problems: Problem) -> list[Trajectory]:
    """Trajectories of {sample id: texts}."""
    made = {
        name: problems.get(name) or Problem(problem_id=name, prompt=f"p-{name}", ground_truth=name) for name in groups
    }
    return [trajectory(made[name], text, index) for name, texts in groups.items() for index, text in enumerate(texts)]


def values(trajectories: list[Trajectory], part: str | None = None) -> tuple[tuple[float | None, ...], ...]:
    """The rewards of each group that has a completion, or one part of them."""
    groups: dict[str, list[float | None]] = {}
    for item in trajectories:
        groups.setdefault(item.prompt_id, []).append(item.reward if part is None else item.reward_parts.get(part))
    return tuple(map(tuple, groups.values()))


def failures(trajectories: list[Trajectory]) -> list[tuple[str, str]]:
    """Kind and message of each reward that gave no usable value."""
    return [(failure.kind, failure.message) for item in trajectories for failure in item.reward_failures]
