"""What the batch of the native engine knows of its rows: their prompts, and those that wait for another turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from atomrl.rollout.requests import RequestState
from atomrl.types import GenerationRequest

# The rows of `ContinuousBatch.state`; a column is a completion in the batch.
SLOT, GROUP, MEMBER, PROMPT_LENGTH, LENGTH, GIVEN, LIMIT, SEED, TOKEN, STOPPED = range(10)


@dataclass(eq=False)
class PromptGroup:
    """Requests with one prompt."""

    prompt: tuple[int, ...]
    held: int = 0
    """Requests that have not finished."""
    running: int = 0
    """Of them in the batch."""
    index: int | None = None
    """Where the cache has the prompt."""
    hidden: Tensor | None = None
    """[hidden] of the prompt's last token."""
    free_members: list[int] = field(default_factory=list)
    members: int = 0


@dataclass(frozen=True, eq=False)
class Parked:
    """A finished request whose keys and values stay in the cache, all but the last token's."""

    state: RequestState
    slot: int
    prompt: tuple[int, ...]
    """That its tokens follow."""

    def given(self, request: GenerationRequest) -> list[int] | None:
        """What a request that goes on with it adds to the prompt; None where its prompt is another one."""
        row = [*self.prompt, *self.state.token_ids]
        return list(request.prompt_token_ids[len(row) :]) if [*request.prompt_token_ids[: len(row)]] == row else None


class Parking:
    """The rows that are parked, by the id of their request, and those that are about to leave.

    Args:
        most: rows that are kept at once; then the one that has been parked for the longest has to go.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.parked: dict[str, Parked] = {}
        self.leaving: dict[int, Parked] = {}
        """The `id` of a waiting state -> the row that it goes on with."""

    @property
    def slots(self) -> list[int]:
        """Those that nobody else may have."""
        return [row.slot for row in (*self.parked.values(), *self.leaving.values())]

    @property
    def states(self) -> list[RequestState]:
        """Whose prompts are still needed."""
        return [row.state for row in (*self.parked.values(), *self.leaving.values())]

    def park(self, row: Parked) -> list[RequestState]:
        """Keep a row. Returns those that had to go."""
        self.parked[row.state.request.request_id] = row
        gone = list(self.parked)[: max(0, len(self.parked) + len(self.leaving) - self.most)]
        return self.forget(gone)

    def forget(self, names: Sequence[str]) -> list[RequestState]:
        """Give up rows; ids that are not there are passed over."""
        return [self.parked.pop(name).state for name in names if name in self.parked]

    def forget_all(self) -> list[RequestState]:
        """Give up all rows, also those that leave: the cache is not what it was."""
        self.leaving.clear()
        return self.forget(list(self.parked))

    def go_on(self, state: RequestState) -> bool:
        """Let a new request have the row that it continues, where that is here; its state then begins with what the
        row has and the tokens between its end and the request's."""
        parked = self.parked.get(state.request.continues or "")
        sampling = state.request.sampling
        if parked is None or sampling.logprobs_over == "kept" or sampling.min_completion_tokens:
            return False
        given = parked.given(state.request)
        if given is None:
            return False
        before = parked.state
        state.token_ids = [*before.token_ids, *given]
        state.logprobs = [*before.logprobs, *([0.0] * len(given))]
        state.given, state.group_id = len(state.token_ids), before.group_id
        self.leaving[id(state)] = parked
        del self.parked[before.request.request_id]
        return True
