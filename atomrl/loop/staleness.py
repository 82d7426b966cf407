"""How old the tokens are that a step trains on."""

from collections import Counter

from atomrl.loop.groups import Groups


def staleness(groups: Groups, version: int) -> dict[str, float]:
    """How many versions of the weights the tokens that are trained on are behind.

    Args:
        groups: of a step.
        version: of the weights that the step starts from.

    Returns:
        Mean and maximum over the tokens that the model wrote; nothing where there is none.
    """
    behind: Counter[int] = Counter()
    for part in (part for group in groups for item in group for part in item.segments):
        if part.policy_version is not None:
            behind[version - part.policy_version] += len(part.token_ids)
    tokens = behind.total()
    if not tokens:
        return {}
    mean = sum(versions * count for versions, count in behind.items()) / tokens
    return {"async/staleness_mean": mean, "async/staleness_max": float(max(behind))}
