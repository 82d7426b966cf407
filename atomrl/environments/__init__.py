"""Environments: what answers the model, turn by turn, in worker processes that can be killed.

An environment is a generator function: it yields what it says, is sent what the model wrote, and returns its outcome.

Example:
    >>> from atomrl.environments import Reply
    >>> def guess(problem, *, most=5):
    ...     text = yield None
    ...     for _ in range(most):
    ...         number = int(text.strip())
    ...         if number == problem.ground_truth:
    ...             return 1.0
    ...         text = yield Reply(text=" too small" if number < problem.ground_truth else " too large")
    ...     return 0.0
"""

from atomrl.types import Reply as Reply
