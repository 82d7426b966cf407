"""Continuous batching: which completions the decoder computes, and what has been drawn for them.

The device holds a column of numbers for each completion in the batch and a row of drawn tokens; the host knows the
rest, and looks at the device's numbers only where completions may have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TypeVar

import torch
from torch import Tensor

from atomrl.rollout.attention import DecodeBatch, KVCache
from atomrl.rollout.requests import RequestState
from atomrl.rollout.sampling import sample, sample_candidates
from atomrl.rollout.stopping import StopRule
from atomrl.types import FinishReason, GenerationRequest, SamplingParams

_PREFILL_TOKENS = 8192
T = TypeVar("T")
# The rows of `ContinuousBatch.state`; a column is a completion in the batch.
_SLOT, _GROUP, _MEMBER, _PROMPT_LENGTH, _LENGTH, _LIMIT, _SEED, _TOKEN, _STOPPED = range(9)


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


@dataclass(eq=False)
class BatchRow:
    """A completion in the batch, as the host knows it."""

    state: RequestState
    rule: StopRule
    group: PromptGroup
    slot: int
    member: int
    begin: int
    """The step at which it would have begun, had it been in the batch all the time."""


class ContinuousBatch:
    """The completions under way, their prompts and their cache.

    Args:
        cache: of keys and values.
        max_rows: completions computed at once.
        rule_of: when completions with a sampling end.
        waiting: requests that are not in the batch; it takes them from the left.
        check_every: steps between two looks at what has ended. Completions that end in between stay as they are.
    """

    def __init__(
        self,
        cache: KVCache,
        max_rows: int,
        rule_of: Callable[[SamplingParams], StopRule],
        waiting: deque[RequestState],
        check_every: int,
    ) -> None:
        self.cache, self.model, self.device = cache, cache.model, cache.device
        self.max_rows, self.rule_of, self.waiting, self.check_every = max_rows, rule_of, waiting, check_every
        self.groups: dict[str, PromptGroup] = {}
        self.rows: list[BatchRow] = []
        self.state = torch.zeros(9, 0, dtype=torch.int64, device=self.device)
        self.tokens = torch.zeros(0, 0, dtype=torch.int32, device=self.device)  # [slots, tokens]
        self.logprobs = torch.zeros(0, 0, device=self.device)
        self.step = 0

    def add(self, request: GenerationRequest) -> None:
        """A request has come to wait."""
        group = self.groups.setdefault(request.group_id, PromptGroup(request.prompt_token_ids))
        group.held += 1

    def remove(self, states: Sequence[RequestState]) -> None:
        """Requests have been given up; what was drawn for them is in their state."""
        gone = {id(state) for state in states}
        self._take_out([place for place, row in enumerate(self.rows) if id(row.state) in gone])
        self._leave_groups(states)

    def take_back(self) -> None:
        """Let all rows wait again, with what they have, and forget what the cache holds."""
        self.waiting.extendleft(reversed(self._take_out(range(len(self.rows)))))
        for group in self.groups.values():
            group.index = group.hidden = None

    def advance(self, version: int) -> list[tuple[RequestState, FinishReason]]:
        """Go on until at least one completion has ended; `version` is of the weights.

        Raises:
            ValueError: the model's logits are not finite.
        """
        while True:
            finished = self._collect(1) if self._admit(version) else []
            if not finished:
                for _ in range(self.check_every):
                    self._decode()
                finished = self._collect(self.check_every)
            if finished:
                return finished

    # ---- Entering ----

    def _admit(self, version: int) -> bool:
        """Let waiting completions into free slots: run their prompts, draw their next tokens. Whether any entered."""
        slots = min(self.max_rows, len(self.waiting) + len(self.rows))
        free = slots - len(self.rows)
        # Prompts are run some at a time: one alone costs nearly as much as eight.
        if not free or free < min(len(self.waiting), max(1, slots // 8)):
            return False
        states = [self.waiting.popleft() for _ in range(free)]
        groups = [self.groups[state.request.group_id] for state in states]
        self._prefill(groups)
        used = {row.slot for row in self.rows}
        free_slots = (slot for slot in count() if slot not in used)
        rows = []
        for state, group in zip(states, groups, strict=True):
            state.set_version(version)
            group.running += 1
            if not group.free_members:
                group.free_members.append(group.members)
                group.members += 1
            rule, begin = self.rule_of(state.request.sampling), self.step - len(state.token_ids)
            rows.append(BatchRow(state, rule, group, next(free_slots), group.free_members.pop(), begin))
        self._reserve(rows)
        entering = torch.tensor([_column(row) for row in rows]).T.contiguous().to(self.device)
        logits = self._first_logits(rows)
        self.rows += rows
        self._draw(entering, rows, logits)
        self.state = torch.cat((self.state, entering), dim=1)
        self._rows_changed()
        return True

    def _prefill(self, groups: Sequence[PromptGroup]) -> None:
        """Run the prompts that the cache does not have."""
        new = list({id(group): group for group in groups if group.index is None}.values())
        if not new:
            return
        entering = {id(group) for group in groups}
        kept = [group for group in self.groups.values() if group.index is not None]
        if len(kept) + len(new) > self.max_rows:  # those that only wait are run again when they enter
            for group in kept:
                if not group.running and id(group) not in entering:
                    group.index = group.hidden = None
        used = {group.index for group in kept}
        for group, index in zip(new, islice((at for at in count() if at not in used), len(new)), strict=True):
            group.index = index
        room = max(group.index or 0 for group in new) + 1
        # Long completions keep their prompts while others leave, so twice as many are soon needed.
        room = room if room <= self.cache.groups else max(room, min(self.max_rows, 2 * room))
        self.cache.reserve_prompts(room, max(len(group.prompt) for group in new))
        for part in _parts(sorted(new, key=lambda group: len(group.prompt)), lambda group: len(group.prompt)):
            at = torch.tensor([group.index for group in part], device=self.device)
            for group, hidden in zip(part, self.cache.prefill([group.prompt for group in part], at), strict=True):
                group.hidden = hidden

    def _reserve(self, entering: Sequence[BatchRow]) -> None:
        """Room for these rows in the cache and for their tokens."""
        slots = max(row.slot for row in entering) + 1
        if 0 < self.cache.slots < slots:
            slots = max(slots, min(self.max_rows, 2 * self.cache.slots))
        limit = max(row.state.request.sampling.max_completion_tokens for row in entering)
        self.cache.reserve(slots, max(len(row.state.token_ids) for row in entering) + 1, limit)
        old_slots, width = self.tokens.shape
        if old_slots < self.cache.slots or width < limit + 1:  # one more, for what is drawn beyond the end
            for name in ("tokens", "logprobs"):
                old = getattr(self, name)
                new = old.new_zeros(max(old_slots, self.cache.slots), max(width, limit + 1))
                new[:old_slots, :width] = old
                setattr(self, name, new)

    def _first_logits(self, rows: Sequence[BatchRow]) -> Tensor:
        """[N, V] for the next token of entering rows, after their prompt or after all they have, which is cached."""
        groups = list({id(row.group): row.group for row in rows if not row.state.token_ids}.values())
        found = [torch.stack([group.hidden for group in groups if group.hidden is not None])] if groups else []
        places = {id(group): place for place, group in enumerate(groups)}
        begun = sorted((row for row in rows if row.state.token_ids), key=_tokens_of)
        for part in _parts(begun, _tokens_of):
            drawn = [row.state.token_ids for row in part]
            for row, tokens in zip(part, drawn, strict=True):
                places[id(row)] = len(places)
                self.tokens[row.slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
                self.logprobs[row.slot, : len(tokens)] = torch.tensor(row.state.logprobs)
            whole = [(*row.group.prompt, *tokens) for row, tokens in zip(part, drawn, strict=True)]
            slots = torch.tensor([row.slot for row in part], device=self.device)
            found.append(self.cache.restore(whole, [len(row.group.prompt) for row in part], slots))
        order = [places[id(row if row.state.token_ids else row.group)] for row in rows]
        return self.model.logits(torch.cat(found))[order]

    # ---- A step ----

    def _decode(self) -> None:
        """One more token for every row."""
        state, self.step = self.state, self.step + 1
        self.batch.longest = min(self.limit, self.step - self.oldest)
        self.batch.lengths = state[_LENGTH] - 1
        self.cache.reserve(0, self.batch.longest, self.limit)
        self._draw(state, self.rows, self.model.logits(self.cache.decode(state[_TOKEN], self.batch)))

    def _draw(self, state: Tensor, rows: Sequence[BatchRow], logits: Tensor) -> None:
        """Draw the next token of each row from `logits` [N, V]; rows that have ended stay as they are."""
        slots, lengths = state[_SLOT], state[_LENGTH]
        by_rule = self.by_rule if rows is self.rows else _by_rule(rows)
        if len(by_rule) == 1:
            tokens, logprobs, stopped = self._draw_alike(rows, logits, state[_SEED], lengths)
        else:
            tokens, logprobs = torch.empty_like(lengths), logits.new_empty(len(rows))
            stopped = torch.empty_like(tokens, dtype=torch.bool)
            for places in by_rule:
                at = torch.tensor(places, device=self.device)
                alike = [rows[place] for place in places]
                found = self._draw_alike(alike, logits[at], state[_SEED][at], lengths[at])
                tokens[at], logprobs[at], stopped[at] = found
        going = (state[_STOPPED] == 0) & (lengths < state[_LIMIT])
        self.tokens[slots, lengths] = tokens.int()
        self.logprobs[slots, lengths] = logprobs
        state[_TOKEN] = torch.where(going, tokens, state[_TOKEN])
        state[_STOPPED] |= stopped & going
        lengths += going

    def _draw_alike(
        self, rows: Sequence[BatchRow], logits: Tensor, seeds: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, log-probs, and whether the token is a stop token, of rows with the same sampling."""
        rule = rows[0].rule
        banned = rule.banned(lengths)
        if rule.sampling.logprobs_over == "vocabulary":
            tokens, logprobs = sample(logits, rule.sampling, seeds, lengths, banned, self.model.kernels)
        else:  # how many there are is only known when they are, so a GPU is waited for
            tokens, logprobs, candidates = sample_candidates(logits, rule.sampling, seeds, lengths, banned)
            ids, start = candidates.ids.cpu().numpy(), 0
            for row, number in zip(rows, candidates.counts.tolist(), strict=True):
                row.state.candidate_counts.append(number)
                row.state.candidate_ids.frombytes(ids[start : start + number].tobytes())
                start += number
        return tokens, logprobs, rule.token_ends(tokens, lengths + 1)

    # ---- Leaving ----

    def _collect(self, window: int) -> list[tuple[RequestState, FinishReason]]:
        """Take out the rows that have ended with one of their last `window` tokens."""
        state = self.state
        for places in self.by_rule:
            rule = self.rows[places[0]].rule
            if rule.completes is not None:
                at = torch.tensor(places, device=self.device)
                ends = rule.string_ends(self.tokens, state[_SLOT][at], state[_LENGTH][at], window)
                for place, length in ends.items():
                    state[_LENGTH, places[place]], state[_STOPPED, places[place]] = length, 1
        ended = ((state[_STOPPED] > 0) | (state[_LENGTH] >= state[_LIMIT])).nonzero()[:, 0].tolist()
        if not ended:
            return []
        stopped = state[_STOPPED, ended].tolist()
        states = self._take_out(ended)
        if any(math.isnan(sum(found.logprobs)) for found in states):
            self.waiting.extendleft(states)
            self.take_back()
            self.cache.free()  # what it holds is NaN too
            raise ValueError(
                "the model's logits are NaN or infinite: its weights have diverged; go on from an earlier checkpoint "
                "with a lower train.learning_rate"
            )
        self._leave_groups(states)
        return [(found, "stop" if stop else "length") for found, stop in zip(states, stopped, strict=True)]

    def _take_out(self, places: Sequence[int]) -> list[RequestState]:
        """End rows of the batch, with what was drawn for them in their state."""
        if not places:
            return []
        slots, lengths = self.state[_SLOT][places], self.state[_LENGTH][places].tolist()
        tokens, logprobs = (buffer[slots, : max(lengths)].cpu() for buffer in (self.tokens, self.logprobs))
        for index, (place, length) in enumerate(zip(places, lengths, strict=True)):
            row, state = self.rows[place], self.rows[place].state
            row.group.running -= 1
            row.group.free_members.append(row.member)
            state.token_ids, state.logprobs = tokens[index, :length].tolist(), logprobs[index, :length].tolist()
            del state.candidate_ids[sum(state.candidate_counts[:length]) :], state.candidate_counts[length:]
        states = [self.rows[place].state for place in places]
        staying = sorted(set(range(len(self.rows))) - set(places))
        self.rows = [self.rows[place] for place in staying]
        self.state = self.state[:, staying]
        self._rows_changed()
        return states

    def _leave_groups(self, states: Sequence[RequestState]) -> None:
        for state in states:
            group = self.groups[state.request.group_id]
            group.held -= 1
            if not group.held:
                del self.groups[state.request.group_id]

    def _rows_changed(self) -> None:
        """What the host knows of the batch."""
        self.by_rule = _by_rule(self.rows)
        if not self.rows:
            return
        slots, slot_count = self.state[_SLOT], max(row.slot for row in self.rows) + 1
        if len(self.rows) <= 0.85 * slot_count and self.cache.compact(slots):
            slot_count = len(self.rows)
            for buffer in (self.tokens, self.logprobs):
                buffer[:slot_count] = buffer[slots]
            self.state[_SLOT] = torch.arange(slot_count, device=self.device)
            for slot, row in enumerate(self.rows):
                row.slot = slot
        self.oldest = min(row.begin for row in self.rows)
        self.limit = max(row.state.request.sampling.max_completion_tokens for row in self.rows)
        groups = [row.group for row in self.rows]
        self.batch = DecodeBatch(
            slots=self.state[_SLOT],
            groups=self.state[_GROUP],
            members=self.state[_MEMBER],
            prompt_lengths=self.state[_PROMPT_LENGTH],
            lengths=self.state[_LENGTH],
            longest=0,
            longest_prompt=max(len(group.prompt) for group in groups),
            slot_count=slot_count,
            group_count=max(group.index or 0 for group in groups) + 1,
            member_count=max(group.members for group in groups),
        )


def _column(row: BatchRow) -> list[int]:
    request, drawn = row.state.request, row.state.token_ids
    place = [row.slot, row.group.index or 0, row.member, len(row.group.prompt)]
    return [*place, len(drawn), request.sampling.max_completion_tokens, request.seed, drawn[-1] if drawn else 0, 0]


def _tokens_of(row: BatchRow) -> int:
    return len(row.group.prompt) + len(row.state.token_ids)


def _by_rule(rows: Sequence[BatchRow]) -> list[list[int]]:
    """Places of the rows with each sampling."""
    found: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        found.setdefault(id(row.rule), []).append(place)
    return list(found.values())


def _parts(items: Sequence[T], tokens: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Items, the shortest first, a bounded number of padded tokens at a time."""
    while items:
        size = 1
        while size < len(items) and (size + 1) * tokens(items[size]) <= _PREFILL_TOKENS:
            size += 1
        yield items[:size]
        items = items[size:]
