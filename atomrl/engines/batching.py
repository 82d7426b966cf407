"""Continuous batching: which completions the decoder computes, and what has been drawn for them.

The device holds a column of numbers for each completion in the batch and a row of drawn tokens; the host knows the
rest, and looks at the device's numbers only where completions may have ended.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.common.threads import unit
from atomrl.config import ConfigError
from atomrl.engines.cache import DecodeBatch, KVCache, PagedKVCache
from atomrl.engines.requests import DIVERGED, RequestState
from atomrl.engines.sampling import sample, sample_candidates, seed_at
from atomrl.models.memory import is_out_of_memory
from atomrl.types import FinishReason, GenerationRequest

# --------------------------------------------------------------------------------------------------------------------
# What the batch of the native engine knows of its rows: their prompts, and those that wait for another turn.

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


log = logging.getLogger(__name__)
_PREFILL_TOKENS = 8192
_GROWTH = 1.5
T = TypeVar("T")


class ContinuousBatch:
    """The completions under way, their prompts and their cache.

    Args:
        cache: of keys and values.
        max_rows: completions computed at once.
        waiting: requests that are not in the batch; it takes them from the left.
        check_every: steps between two looks at what has ended. Completions that end in between stay as they are.
    """

    def __init__(
        self, cache: KVCache | PagedKVCache, max_rows: int, waiting: deque[RequestState], check_every: int
    ) -> None:
        self.cache, self.model, self.device = cache, cache.model, cache.device
        self.max_rows, self.waiting, self.check_every = max_rows, waiting, check_every
        self.groups: dict[str, PromptGroup] = {}
        self.parking = Parking(max_rows)
        self.rows: list[RequestState] = []
        self.ended: list[tuple[RequestState, FinishReason]] = []
        """Rows that have left, and that `advance` has not returned yet."""
        self.unseen = 0
        """Tokens that each row may have drawn since the last look at what has ended."""
        self.most_held = 0
        """The most rows that the cache was to have since it was last freed."""
        self.feeding = False
        self.state = torch.zeros(10, 0, dtype=torch.int64, device=self.device)
        self.tokens = torch.zeros(0, 0, dtype=torch.int32, device=self.device)  # [slots, tokens]
        self.logprobs = torch.zeros(0, 0, device=self.device)

    def add(self, state: RequestState) -> None:
        """A request has come to wait. One that goes on with a row that is parked takes its place in the cache."""
        if not self.parking.go_on(state):
            self.forget([state.request.continues or ""])
            group = self.groups.setdefault(state.group_id, PromptGroup(state.request.prompt_token_ids))
            group.held += 1

    def remove(self, states: Sequence[RequestState]) -> None:
        """Requests have been given up; what was drawn for them is in their state."""
        gone, over = {id(state) for state in states}, {id(state) for state, _ in self.ended}
        for key in gone & self.parking.leaving.keys():
            del self.parking.leaving[key]
        self.ended = [each for each in self.ended if id(each[0]) not in gone]
        self._take_out([place for place, row in enumerate(self.rows) if id(row) in gone])
        self._rows_changed()
        self._leave_groups([state for state in states if id(state) not in over])
        self._clean(states)

    def forget(self, names: Sequence[str]) -> None:
        """No request will go on with these."""
        self._leave_groups(self.parking.forget(names))

    def _clean(self, states: Sequence[RequestState]) -> bool:
        """Forget the cache where rows that have left it had NaN: what is beyond a row's end counts 0 times, and 0 times
        NaN is NaN. Whether it was so."""
        diverged = any(state.diverged() for state in states)
        if diverged:
            self._preempt()
        return diverged

    def free(self) -> None:
        """Give back the cache's memory; no row may need it."""
        self.cache.free()
        self.most_held = 0

    def take_back(self) -> None:
        """Let all rows wait again, with what they have, and forget what the cache holds.

        Tokens that have not been looked at yet are drawn again, and are the same: one of them may be an end.
        """
        rows = self._take_out(range(len(self.rows)))
        for row in rows:
            row.cut(max(len(row.token_ids) - self.unseen, row.given, row.versions[-1][0]))
        self.unseen = 0
        self.waiting.extendleft(reversed(rows))
        self._rows_changed()
        self._leave_groups(self.parking.forget_all())
        for group in self.groups.values():
            group.index = group.hidden = None

    def _preempt(self) -> None:
        """Preempt all rows, in vLLM's words: free the cache, which they compute again when they enter."""
        self.free()
        self.take_back()

    def advance(self, version: int, end: float) -> list[tuple[RequestState, FinishReason]]:
        """Go on until at least one completion has ended, or to a time; `version` is of the weights.

        Where memory runs out, all rows are preempted, and at most half as many are computed at once from then on. Their
        tokens are the same, since a draw depends on seed and position alone.

        Raises:
            ValueError: the model's logits are not finite.
            ConfigError: one row alone does not fit into memory.
        """
        while True:
            reason = ""
            try:
                if not self.ended:
                    self._advance(version)
            except BaseException as error:
                if not is_out_of_memory(error):
                    self._preempt()  # nothing is lost, so that it can go on
                    raise
                reason = str(error).partition("\n")[0] or type(error).__name__
            # The error is gone here, and with it the tensors that its traceback held.
            if reason:
                self._halve(reason)
            if self.ended or time.monotonic() >= end:
                ended, self.ended = self.ended, []
                return ended

    def _advance(self, version: int) -> None:
        """Let rows enter, and where none has ended by that, draw tokens until the next look at what has ended."""
        self._go_on(version)
        self.unseen = 1
        if self._admit(version):
            self._collect(1)
        if not self.ended:
            with unit("drawing", len(self.rows)):
                for step in range(1, self.check_every + 1):
                    self.unseen = step
                    self._decode()
            self._collect(self.check_every)
        self.unseen = 0

    def _halve(self, reason: str) -> None:
        """Preempt all rows, and compute at most half as many at once from here on.

        Raises:
            ConfigError: it was one.
        """
        held = self.most_held
        self.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.take_back()
        if held <= 1:
            raise ConfigError(
                f"out of memory: decoding a single completion does not fit ({reason}). Lower "
                "rollout.max_completion_tokens, data.max_prompt_tokens or train.tokens_per_micro_batch; or take a "
                "smaller model"
            )
        self.max_rows = self.parking.most = min(self.max_rows, held // 2)
        log.warning(
            "out of memory with %d completions decoded at once (%s): from here on at most %d; "
            "rollout.max_concurrent_completions=%d sets it from the start",
            held, reason, self.max_rows, self.max_rows,
        )  # fmt: skip

    # ---- Entering ----

    def _go_on(self, version: int) -> None:
        """Let rows that were parked into the batch: what they have is cached, and what was added to it since is fed to
        them token by token, in the steps that draw others' tokens."""
        if not self.parking.leaving:
            return
        rows = [row for row in self.waiting if id(row) in self.parking.leaving][: self.max_rows - len(self.rows)]
        if not rows:
            return
        self._hold(len(self.rows) + len(rows))
        self._reserve(rows, 0)
        kept = [self.parking.leaving[id(row)] for row in rows]
        columns: list[list[int]] = []
        with self._entering(rows, columns):
            for row, each in zip(rows, kept, strict=True):
                slot, length = each.slot, len(each.state.token_ids)
                row.set_version(version)
                columns.append(self._column(row, slot))
                columns[-1][LENGTH], columns[-1][TOKEN] = length, row.token_ids[length - 1]
                self.tokens[slot, : row.given] = torch.tensor(row.token_ids, dtype=torch.int32)
                self.logprobs[slot, length : row.given] = 0.0
            state = torch.cat((self.state, torch.tensor(columns).T.contiguous().to(self.device)), dim=1)
        going = {id(row) for row in rows}
        staying = [row for row in self.waiting if id(row) not in going]
        self.waiting.clear()
        self.waiting.extend(staying)
        for key in going:
            del self.parking.leaving[key]
        self.rows, self.state = [*self.rows, *rows], state
        self._rows_changed()

    def _admit(self, version: int) -> bool:
        """Let waiting completions into free slots: run their prompts, draw their next tokens. Whether any entered."""
        slots = min(self.max_rows, len(self.waiting) + len(self.rows))
        free = slots - len(self.rows)
        # Prompts are run some at a time: one alone costs nearly as much as eight.
        if free <= 0 or free < min(len(self.waiting), max(1, slots // 8)):
            return False
        self._hold(slots)
        rows = [self.waiting.popleft() for _ in range(free)]
        columns: list[list[int]] = []
        try:
            with self._entering(rows, columns):
                self._enter(rows, columns, version)
        except BaseException:
            self.waiting.extendleft(reversed(rows))
            raise
        self._rows_changed()
        return True

    def _hold(self, rows: int) -> None:
        """The cache is to have so many rows, and those that are parked."""
        self.most_held = max(self.most_held, rows + len(self.parking.slots))

    @contextmanager
    def _entering(self, rows: Sequence[RequestState], columns: Sequence[Sequence[int]]) -> Iterator[None]:
        """Undo `_column` where rows cannot enter."""
        try:
            yield
        except BaseException:
            for row, column in zip(rows, columns, strict=False):
                self._give_back(row, column[MEMBER])
            raise

    def _enter(self, rows: Sequence[RequestState], columns: list[list[int]], version: int) -> None:
        """Put rows into the batch, and their numbers of `state` into `columns`."""
        self._prefill([self._group(row) for row in rows])
        used = {*self.state[SLOT].tolist(), *self.parking.slots}
        free_slots = (slot for slot in count() if slot not in used)
        for row in rows:
            row.set_version(version)
            columns.append(self._column(row, next(free_slots)))
        entering = torch.tensor(columns).T.contiguous().to(self.device)
        self._reserve(rows, max(column[SLOT] for column in columns) + 1)
        self._draw(entering, rows, _by_rule(rows, self.device), self._first_logits(rows, entering[SLOT]))
        self.rows, self.state = [*self.rows, *rows], torch.cat((self.state, entering), dim=1)

    def _give_back(self, row: RequestState, member: int) -> None:
        """The row is no longer a running one of its group; candidates beyond its tokens were drawn in vain."""
        group = self._group(row)
        group.running -= 1
        group.free_members.append(member)
        row.cut(len(row.token_ids))

    def _group(self, row: RequestState) -> PromptGroup:
        return self.groups[row.group_id]

    def _size(self, row: RequestState) -> int:
        return len(self._group(row).prompt) + len(row.token_ids)

    def _column(self, row: RequestState, slot: int) -> list[int]:
        """The row's numbers of `state`; it is then one of its group's running ones."""
        group, request, drawn = self._group(row), row.request, row.token_ids
        group.running += 1
        if not group.free_members:
            group.free_members.append(group.members)
            group.members += 1
        place = [slot, group.index or 0, group.free_members.pop(), len(group.prompt), len(drawn), row.given]
        return [*place, row.limit, seed_at(request.seed, -row.given), drawn[-1] if drawn else 0, 0]

    def _prefill(self, groups: Sequence[PromptGroup]) -> None:
        """Run the prompts that the cache does not have."""
        new = list({id(group): group for group in groups if group.index is None}.values())
        if not new:
            return
        entering = {id(group) for group in groups}
        kept = [group for group in self.groups.values() if group.index is not None]
        if len(kept) + len(new) > self.max_rows:  # those that only wait are run again when they enter
            needed = {id(self._group(row)) for row in self.parking.states} | entering
            for group in kept:
                if not group.running and id(group) not in needed:
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

    def _reserve(self, entering: Sequence[RequestState], slots: int) -> None:
        """Room for these rows in the cache and for their tokens."""
        if 0 < self.cache.slots < slots:
            slots = max(slots, min(self.max_rows, 2 * self.cache.slots))
        limit = max(row.limit for row in entering)
        self.cache.reserve(slots, max(len(row.token_ids) for row in entering) + 1, limit)
        # One token more than the limit, for what is drawn beyond the end. Turns of an episode raise the limit, and a
        # buffer that is replaced has graphs captured anew, so it grows by more than was asked for.
        width = self.tokens.shape[1]
        if limit + 1 > width:
            width = max(limit + 1, int(_GROWTH * width))
        shape = (max(len(self.tokens), self.cache.slots), width)
        if shape != self.tokens.shape:
            more = (0, shape[1] - self.tokens.shape[1], 0, shape[0] - len(self.tokens))
            self.tokens, self.logprobs = (F.pad(buffer, more) for buffer in (self.tokens, self.logprobs))

    def _first_logits(self, rows: Sequence[RequestState], slots: Tensor) -> Tensor:
        """[N, V] for the next token of entering rows, after their prompt or after all they have, which is cached."""
        groups = {id(self._group(row)): self._group(row) for row in rows if not row.token_ids}
        found = [torch.stack([group.hidden for group in groups.values() if group.hidden is not None])] if groups else []
        source = {key: place for place, key in enumerate(groups)}
        begun = sorted((place for place, row in enumerate(rows) if row.token_ids), key=lambda at: self._size(rows[at]))
        for part in _parts(begun, lambda at: self._size(rows[at])):
            at = slots[list(part)]
            for place, slot in zip(part, at, strict=True):
                row, source[id(rows[place])] = rows[place], len(source)
                self.tokens[slot, : len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.int32)
                self.logprobs[slot, : len(row.token_ids)] = torch.tensor(row.logprobs)
            prompts = [self._group(rows[place]).prompt for place in part]
            whole = [(*prompt, *rows[place].token_ids) for prompt, place in zip(prompts, part, strict=True)]
            found.append(self.cache.restore(whole, [len(prompt) for prompt in prompts], at))
        order = [source[id(row if row.token_ids else self._group(row))] for row in rows]
        return self.model.logits(torch.cat(found))[order]

    # ---- A step ----

    def _decode(self) -> None:
        """One more token for every row."""
        assert isinstance(self.cache, KVCache)
        state = self.state
        self.batch.longest = min(self.limit, self.longest)
        self.longest += 1
        self.batch.lengths = state[LENGTH] - 1
        self.cache.reserve(0, self.batch.longest, self.limit)
        logits = self.model.logits(self.cache.decode(state[TOKEN], self.batch))
        self._draw(state, self.rows, self.by_rule, logits)

    def _draw(
        self, state: Tensor, rows: Sequence[RequestState], by_rule: Sequence[tuple[list[int], Tensor]], logits: Tensor
    ) -> None:
        """Draw the next token of each row from `logits` [N, V]; rows that have ended stay as they are."""
        slots, lengths = state[SLOT], state[LENGTH]
        if len(by_rule) == 1:
            tokens, logprobs, stopped = self._draw_alike(rows, logits, state[SEED], lengths)
        else:
            tokens, logprobs = torch.empty_like(lengths), logits.new_empty(len(rows))
            stopped = torch.empty_like(tokens, dtype=torch.bool)
            for places, at in by_rule:
                alike = [rows[place] for place in places]
                found = self._draw_alike(alike, logits[at], state[SEED][at], lengths[at])
                tokens[at], logprobs[at], stopped[at] = found
        if self.feeding:
            given = lengths < state[GIVEN]
            tokens, logprobs = torch.where(given, self.tokens[slots, lengths], tokens), logprobs.masked_fill(given, 0.0)
            stopped = stopped & ~given
        going = (state[STOPPED] == 0) & (lengths < state[LIMIT])
        self.tokens[slots, lengths] = tokens.int()
        self.logprobs[slots, lengths] = logprobs
        state[TOKEN] = torch.where(going, tokens, state[TOKEN])
        state[STOPPED] |= stopped & going
        lengths += going

    def _draw_alike(
        self, rows: Sequence[RequestState], logits: Tensor, seeds: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, log-probs, and whether the token is a stop token, of rows with the same sampling."""
        rule = rows[0].rule
        banned = rule.banned(lengths)
        if rule.sampling.logprobs_over != "kept":
            tokens, logprobs = sample(logits, rule.sampling, seeds, lengths, banned, self.model.kernels)
        else:  # how many there are is only known when they are, so a GPU is waited for
            tokens, logprobs, candidates = sample_candidates(logits, rule.sampling, seeds, lengths, banned)
            ids, start = candidates.ids.cpu().numpy(), 0
            for row, number in zip(rows, candidates.counts.tolist(), strict=True):
                row.candidate_counts.append(number)
                row.candidate_ids.frombytes(ids[start : start + number].tobytes())
                start += number
        return tokens, logprobs, rule.token_ends(tokens, lengths + 1)

    # ---- Leaving ----

    def _collect(self, window: int) -> None:
        """Move the rows that have ended with one of their last `window` tokens to `ended`."""
        state = self.state
        for places, at in self.by_rule:
            rule = self.rows[places[0]].rule
            if rule.completes is not None:
                ends = rule.string_ends(self.tokens, state[SLOT][at], state[LENGTH][at], window, state[GIVEN][at])
                for place, length in ends.items():
                    state[LENGTH, places[place]], state[STOPPED, places[place]] = length, 1
        ended = ((state[STOPPED] > 0) | (state[LENGTH] >= state[LIMIT])).nonzero()[:, 0].tolist()
        if not ended:
            return
        stopped = state[STOPPED, ended].tolist()
        slots = state[SLOT, ended].tolist()
        states = self._take_out(ended)
        if self._clean(states):
            self.waiting.extendleft(states)
            raise ValueError(DIVERGED)
        self._leave_groups([found for found in states if not found.request.keep_cache])
        for found, slot in zip(states, slots, strict=True):
            if found.request.keep_cache:
                self._leave_groups(self.parking.park(Parked(found, slot, self._group(found).prompt)))
        self.ended += [(found, "stop" if stop else "length") for found, stop in zip(states, stopped, strict=True)]
        self._rows_changed()  # not before: it may move rows to slots that nobody has

    def _take_out(self, places: Sequence[int]) -> list[RequestState]:
        """End rows of the batch, with what was drawn for them in their state; `_rows_changed` is then to be called."""
        if not places:
            return []
        ended, rows = self.state[:, places], [self.rows[place] for place in places]
        members, lengths = ended[MEMBER].tolist(), ended[LENGTH].maximum(ended[GIVEN]).tolist()
        tokens, logprobs = (buffer[ended[SLOT], : max(lengths)].tolist() for buffer in (self.tokens, self.logprobs))
        gone = set(places)
        staying = [place for place in range(len(self.rows)) if place not in gone]
        state = self.state[:, staying]
        for index, (row, member, length) in enumerate(zip(rows, members, lengths, strict=True)):
            row.token_ids, row.logprobs = tokens[index][:length], logprobs[index][:length]
            self._give_back(row, member)
        self.rows, self.state = [self.rows[place] for place in staying], state
        return rows

    def _leave_groups(self, states: Sequence[RequestState]) -> None:
        for state in states:
            group = self._group(state)
            group.held -= 1
            if not group.held:
                del self.groups[state.group_id]

    def _rows_changed(self) -> None:
        """What the host knows of the batch."""
        self.by_rule = _by_rule(self.rows, self.device)
        if not self.rows:
            return
        most = self.state.amax(dim=1).tolist()
        few = len(self.rows) <= 0.85 * (most[SLOT] + 1) and not self.parking.slots
        if few and self.cache.compact(self.state[SLOT]):
            most[SLOT] = len(self.rows) - 1
            for buffer in (self.tokens, self.logprobs):
                buffer[: len(self.rows)] = buffer[self.state[SLOT]]
            self.state[SLOT] = torch.arange(len(self.rows), device=self.device)
        self.longest, self.limit = most[LENGTH], most[LIMIT]
        self.feeding = bool((self.state[LENGTH] < self.state[GIVEN]).any())
        self.batch = DecodeBatch(
            slots=self.state[SLOT],
            groups=self.state[GROUP],
            members=self.state[MEMBER],
            prompt_lengths=self.state[PROMPT_LENGTH],
            lengths=self.state[LENGTH],
            longest=0,
            longest_prompt=most[PROMPT_LENGTH],
            slot_count=most[SLOT] + 1,
            group_count=most[GROUP] + 1,
            member_count=most[MEMBER] + 1,
        )


def _by_rule(rows: Sequence[RequestState], device: torch.device | str) -> list[tuple[list[int], Tensor]]:
    """Places of the rows with each sampling, on the host and as an index."""
    found: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        found.setdefault(id(row.rule), []).append(place)
    return [(places, torch.tensor(places, device=device)) for places in found.values()]


def _parts(items: Sequence[T], tokens: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Items, the shortest first, a bounded number of padded tokens at a time."""
    while items:
        size = 1
        while size < len(items) and (size + 1) * tokens(items[size]) <= _PREFILL_TOKENS:
            size += 1
        yield items[:size]
        items = items[size:]
