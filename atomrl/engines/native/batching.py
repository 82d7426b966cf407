"""Continuous batching for `NativeEngine`: `ContinuousBatch` schedules completions and holds the tokens sampled so far.

One `advance` is the whole loop: admit waiting requests (`admit`: prefill, first token), decode one token for every row
(`decode_step`), and every `check_every` steps remove the rows that have finished (`_collect`).

Per-row integers are one tensor on the device, `state` [10, rows]; sampled tokens are another, `tokens` [slots, T]. The
host copies them back only at a check, so that a GPU never waits for it between two tokens.
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
from atomrl.engines.native.cache import DecodeBatch
from atomrl.engines.native.paged_cache import PagedKVCache
from atomrl.engines.native.slot_cache import KVCache
from atomrl.engines.requests import DIVERGED, RequestState
from atomrl.engines.sampling import sample, sample_candidates, seed_at
from atomrl.models.process_memory import is_out_of_memory
from atomrl.types import FinishReason, GenerationRequest

log = logging.getLogger(__name__)
T = TypeVar("T")
_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward pass."""
_GROWTH = 1.5
"""Factor by which the token buffers grow."""

SLOT, GROUP, MEMBER, PROMPT_LENGTH, LENGTH, PREFIX, LIMIT, SEED, TOKEN, STOPPED = range(10)
"""Rows of `ContinuousBatch.state`: cache slot; index of the prompt in the cache; index within the group; tokens of the
prompt; tokens of the completion; how many of these were not sampled (`RequestState.prefix_length`); the most there may
be; seed; the newest token; 1 after a stop token."""


@dataclass(eq=False)
class PromptGroup:
    """Requests that share a prompt."""

    prompt: tuple[int, ...]
    unfinished: int = 0
    """Requests that have not finished."""
    running: int = 0
    """Requests in the batch."""
    index: int | None = None
    """Index of the prompt in the cache; None: not prefilled."""
    hidden: Tensor | None = None
    """[hidden] final hidden state of the prompt's last token."""
    free_members: list[int] = field(default_factory=list)
    """Member indices that no running request has."""
    members: int = 0


@dataclass(frozen=True, eq=False)
class RetainedRow:
    """A finished turn whose keys and values stay in the cache, for all tokens but the last."""

    state: RequestState
    slot: int
    prompt: tuple[int, ...]

    def new_tokens(self, request: GenerationRequest) -> list[int] | None:
        """Tokens of the request's prompt that follow this row; None if the prompt does not begin with the row."""
        row = [*self.prompt, *self.state.token_ids]
        return list(request.prompt_token_ids[len(row) :]) if [*request.prompt_token_ids[: len(row)]] == row else None


class RetainedRows:
    """KV-cache rows kept between the turns of an episode (`GenerationRequest.keep_cache`, `continues`).

    Args:
        limit: maximum number of rows. Evicts the oldest first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: dict[str, RetainedRow] = {}
        """Retained rows by the id of the finished request."""
        self.claimed: dict[int, RetainedRow] = {}
        """Rows of requests that wait to continue them, by `id(state)`."""

    @property
    def slots(self) -> list[int]:
        """Cache slots that are in use by retained rows."""
        return [row.slot for row in (*self.rows.values(), *self.claimed.values())]

    @property
    def states(self) -> list[RequestState]:
        """States of the finished requests."""
        return [row.state for row in (*self.rows.values(), *self.claimed.values())]

    def add(self, row: RetainedRow) -> list[RequestState]:
        """Retain a row. Returns the states of evicted rows."""
        self.rows[row.state.request.request_id] = row
        evicted = list(self.rows)[: max(0, len(self.rows) + len(self.claimed) - self.limit)]
        return self.drop(evicted)

    def drop(self, request_ids: Sequence[str]) -> list[RequestState]:
        """Drop rows and return their states; ids without a row are ignored."""
        return [self.rows.pop(name).state for name in request_ids if name in self.rows]

    def clear(self) -> list[RequestState]:
        """Drop all rows, also claimed ones, after the cache was freed. Returns the states of the unclaimed."""
        self.claimed.clear()
        return self.drop(list(self.rows))

    def claim(self, state: RequestState) -> bool:
        """Give a new request the row that it continues. False if there is no such row.

        The state then starts with the tokens of the row and those that its prompt adds (`prefix_length` in all).
        """
        retained = self.rows.get(state.request.continues or "")
        sampling = state.request.sampling
        if retained is None or sampling.logprobs_over == "kept" or sampling.min_completion_tokens:
            return False
        added = retained.new_tokens(state.request)
        if added is None:
            return False
        previous = retained.state
        state.token_ids = [*previous.token_ids, *added]
        state.logprobs = [*previous.logprobs, *([0.0] * len(added))]
        state.prefix_length, state.group_id = len(state.token_ids), previous.group_id
        self.claimed[id(state)] = retained
        del self.rows[previous.request.request_id]
        return True


class ContinuousBatch:
    """The running completions, their prompts and their KV cache.

    Args:
        cache: keys and values.
        max_rows: maximum number of completions decoded at once.
        waiting: queue of requests that are not in the batch; taken from the left.
        check_every: decode steps between two checks for finished rows. A row that finishes in between stays as it is.
    """

    def __init__(
        self, cache: KVCache | PagedKVCache, max_rows: int, waiting: deque[RequestState], check_every: int
    ) -> None:
        self.cache, self.model, self.device = cache, cache.model, cache.device
        self.max_rows, self.waiting, self.check_every = max_rows, waiting, check_every
        self.groups: dict[str, PromptGroup] = {}
        self.retained = RetainedRows(max_rows)
        self.rows: list[RequestState] = []
        self.finished: list[tuple[RequestState, FinishReason]] = []
        """Finished rows that `advance` has not returned yet."""
        self.unchecked = 0
        """Tokens per row sampled since the last check."""
        self.peak_rows = 0
        """Most rows that the cache was asked to hold since it was last freed."""
        self.in_prefix = False
        """True while a row still reads prefix tokens instead of sampling."""
        self.state = torch.zeros(10, 0, dtype=torch.int64, device=self.device)
        self.tokens = torch.zeros(0, 0, dtype=torch.int32, device=self.device)  # [slots, tokens]
        self.logprobs = torch.zeros(0, 0, device=self.device)

    # ---- Requests ----

    def add(self, state: RequestState) -> None:
        """Register a request that was added to `waiting`. If it continues a retained row it takes over its slot."""
        if not self.retained.claim(state):
            self.drop_retained([state.request.continues or ""])
            group = self.groups.setdefault(state.group_id, PromptGroup(state.request.prompt_token_ids))
            group.unfinished += 1

    def remove(self, states: Sequence[RequestState]) -> None:
        """Remove aborted requests; their states get the tokens sampled so far."""
        removed, done = {id(state) for state in states}, {id(state) for state, _ in self.finished}
        for key in removed & self.retained.claimed.keys():
            del self.retained.claimed[key]
        self.finished = [each for each in self.finished if id(each[0]) not in removed]
        self._remove_rows([index for index, row in enumerate(self.rows) if id(row) in removed])
        self._rows_changed()
        self._release_groups([state for state in states if id(state) not in done])
        self._reset_if_diverged(states)

    def drop_retained(self, request_ids: Sequence[str]) -> None:
        """Drop rows retained for finished requests."""
        self._release_groups(self.retained.drop(request_ids))

    def free(self) -> None:
        """Free the cache's memory; no row may be running."""
        self.cache.free()
        self.peak_rows = 0

    def sleep(self) -> None:
        """Free the cache's memory until rows are admitted again; no row may be running."""
        self.free()

    def requeue(self) -> None:
        """Move all rows back to `waiting` with the tokens they have, and invalidate the cache.

        Tokens that were not checked yet are dropped and sampled again. They come out the same: a draw depends on seed
        and position alone.
        """
        rows = self._remove_rows(range(len(self.rows)))
        for row in rows:
            row.cut(max(len(row.token_ids) - self.unchecked, row.prefix_length, row.versions[-1][0]))
        self.unchecked = 0
        self.waiting.extendleft(reversed(rows))
        self._rows_changed()
        self._release_groups(self.retained.clear())
        for group in self.groups.values():
            group.index = group.hidden = None

    # ---- The loop ----

    def advance(self, version: int, end: float) -> list[tuple[RequestState, FinishReason]]:
        """Decode until at least one completion has finished or `time.monotonic()` passes `end`; return the finished.

        If memory runs out, all rows are preempted and from then on at most half as many are decoded at once. Their
        tokens do not change, since a draw depends on seed and position alone.

        Args:
            version: of the weights.

        Raises:
            ValueError: the model's logits are not finite.
            ConfigError: a single row does not fit into memory.
        """
        while True:
            reason = ""
            try:
                if not self.finished:
                    self._advance(version)
            except BaseException as error:
                if not is_out_of_memory(error):
                    self._preempt()  # no request is lost, so the caller may continue
                    raise
                reason = str(error).partition("\n")[0] or type(error).__name__
            # Outside of the except block: there the traceback would keep the tensors of the failed step alive.
            if reason:
                self._halve(reason)
            if self.finished or time.monotonic() >= end:
                finished, self.finished = self.finished, []
                return finished

    def _advance(self, version: int) -> None:
        """Admit rows; unless one of them finishes with its first token, decode until the next check."""
        self._resume_turns(version)
        self.unchecked = 1
        if self.admit(version):
            self._collect(1)
        if not self.finished:
            with unit("drawing", len(self.rows)):
                for step in range(1, self.check_every + 1):
                    self.unchecked = step
                    self.decode_step()
            self._collect(self.check_every)
        self.unchecked = 0

    # ---- Preemption ----

    def _preempt(self) -> None:
        """Free the cache and requeue all rows; they are prefilled again when they are admitted."""
        self.free()
        self.requeue()

    def _halve(self, reason: str) -> None:
        """Preempt all rows after an out-of-memory error, and from now on decode at most half as many at once.

        Raises:
            ConfigError: there was only one.
        """
        rows = self.peak_rows
        self.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.requeue()
        if rows <= 1:
            raise ConfigError(
                f"out of memory: decoding a single completion does not fit ({reason}). Lower "
                "rollout.max_completion_tokens, data.max_prompt_tokens or train.tokens_per_micro_batch; or use a "
                "smaller model"
            )
        self.max_rows = self.retained.limit = min(self.max_rows, rows // 2)
        log.warning(
            "out of memory with %d completions decoded at once (%s): decoding at most %d from now on; set "
            "rollout.max_concurrent_completions=%d to start with that",
            rows, reason, self.max_rows, self.max_rows,
        )  # fmt: skip

    def _reset_if_diverged(self, states: Sequence[RequestState]) -> bool:
        """Free the cache if a removed row contains NaN. Returns whether one did.

        Attention multiplies what lies beyond a row's end by 0, and 0 times NaN is NaN: the next row in that slot would
        be NaN too.
        """
        diverged = any(state.diverged() for state in states)
        if diverged:
            self._preempt()
        return diverged

    # ---- Admission ----

    def _resume_turns(self, version: int) -> None:
        """Admit requests that continue a retained row, up to `max_rows`.

        Nothing is prefilled: the row's keys and values are in its slot, all but those of its last token. That token and
        the ones the prompt has added since (an environment's reply) are read one per decode step, in the same steps
        that sample the other rows' tokens; `_draw` overrides samples at positions below PREFIX.
        """
        if not self.retained.claimed:
            return
        rows = [row for row in self.waiting if id(row) in self.retained.claimed][: self.max_rows - len(self.rows)]
        if not rows:
            return
        self._record_peak(len(self.rows) + len(rows))
        self._reserve(rows, 0)
        sources = [self.retained.claimed[id(row)] for row in rows]
        columns: list[list[int]] = []
        with self._undo_on_error(rows, columns):
            for row, source in zip(rows, sources, strict=True):
                # The row starts where the previous turn ended: LENGTH tokens, of which the last is not in the cache.
                slot, length = source.slot, len(source.state.token_ids)
                row.set_version(version)
                columns.append(self._column(row, slot))
                columns[-1][LENGTH], columns[-1][TOKEN] = length, row.token_ids[length - 1]
                # The tokens it will read; they have no log-probs.
                self.tokens[slot, : row.prefix_length] = torch.tensor(row.token_ids, dtype=torch.int32)
                self.logprobs[slot, length : row.prefix_length] = 0.0
            state = torch.cat((self.state, torch.tensor(columns).T.contiguous().to(self.device)), dim=1)
        # Nothing below can fail: the rows leave the queue and the retained rows.
        admitted = {id(row) for row in rows}
        staying = [row for row in self.waiting if id(row) not in admitted]
        self.waiting.clear()
        self.waiting.extend(staying)
        for key in admitted:
            del self.retained.claimed[key]
        self.rows, self.state = [*self.rows, *rows], state
        self._rows_changed()

    def admit(self, version: int) -> bool:
        """Move waiting requests into free slots: prefill, and sample the next token. Returns whether any was admitted.

        Waits until an eighth of the slots is free, since prefilling one prompt costs nearly as much as eight.
        """
        slots = min(self.max_rows, len(self.waiting) + len(self.rows))
        free = slots - len(self.rows)
        if free <= 0 or free < min(len(self.waiting), max(1, slots // 8)):
            return False
        self._record_peak(slots)
        rows = [self.waiting.popleft() for _ in range(free)]
        columns: list[list[int]] = []
        try:
            with self._undo_on_error(rows, columns):
                self._enter(rows, columns, version)
        except BaseException:
            self.waiting.extendleft(reversed(rows))
            raise
        self._rows_changed()
        return True

    def _record_peak(self, rows: int) -> None:
        """Update `peak_rows` with this many running rows and the retained ones."""
        self.peak_rows = max(self.peak_rows, rows + len(self.retained.slots))

    @contextmanager
    def _undo_on_error(self, rows: Sequence[RequestState], columns: Sequence[Sequence[int]]) -> Iterator[None]:
        """Undo `_column` for rows that could not be admitted."""
        try:
            yield
        except BaseException:
            for row, column in zip(rows, columns, strict=False):
                self._release_member(row, column[MEMBER])
            raise

    def _enter(self, rows: Sequence[RequestState], columns: list[list[int]], version: int) -> None:
        """Prefill rows, sample their next tokens and append them to the batch; fills `columns` with their state."""
        self._prefill([self._group(row) for row in rows])
        used = {*self.state[SLOT].tolist(), *self.retained.slots}
        free_slots = (slot for slot in count() if slot not in used)
        for row in rows:
            row.set_version(version)
            columns.append(self._column(row, next(free_slots)))
        entering = torch.tensor(columns).T.contiguous().to(self.device)
        self._reserve(rows, max(column[SLOT] for column in columns) + 1)
        self._draw(entering, rows, _group_by_rule(rows, self.device), self._first_logits(rows, entering[SLOT]))
        self.rows, self.state = [*self.rows, *rows], torch.cat((self.state, entering), dim=1)

    def _column(self, row: RequestState, slot: int) -> list[int]:
        """The row's column of `state`. Counts it as running in its group and takes a member index."""
        group, request, drawn = self._group(row), row.request, row.token_ids
        group.running += 1
        if not group.free_members:
            group.free_members.append(group.members)
            group.members += 1
        index = [slot, group.index or 0, group.free_members.pop(), len(group.prompt), len(drawn), row.prefix_length]
        return [*index, row.limit, seed_at(request.seed, -row.prefix_length), drawn[-1] if drawn else 0, 0]

    def _release_member(self, row: RequestState, member: int) -> None:
        """Undo `_column`: the row no longer runs. Drops candidates without a token."""
        group = self._group(row)
        group.running -= 1
        group.free_members.append(member)
        row.cut(len(row.token_ids))

    def _group(self, row: RequestState) -> PromptGroup:
        return self.groups[row.group_id]

    def _size(self, row: RequestState) -> int:
        """Tokens of prompt and completion."""
        return len(self._group(row).prompt) + len(row.token_ids)

    def _prefill(self, groups: Sequence[PromptGroup]) -> None:
        """Prefill the prompts of these groups that are not in the cache."""
        new = list({id(group): group for group in groups if group.index is None}.values())
        if not new:
            return
        # If prompts would take more than `max_rows` places, evict those without a running or retained row: the requests
        # that wait for them prefill them again.
        entering = {id(group) for group in groups}
        cached = [group for group in self.groups.values() if group.index is not None]
        if len(cached) + len(new) > self.max_rows:
            needed = {id(self._group(row)) for row in self.retained.states} | entering
            for group in cached:
                if not group.running and id(group) not in needed:
                    group.index = group.hidden = None
        used = {group.index for group in cached}
        for group, index in zip(new, islice((at for at in count() if at not in used), len(new)), strict=True):
            group.index = index
        # Prompts of long completions stay while new ones arrive, so room for twice as many will soon be needed.
        room = max(group.index or 0 for group in new) + 1
        room = room if room <= self.cache.groups else max(room, min(self.max_rows, 2 * room))
        self.cache.reserve_prompts(room, max(len(group.prompt) for group in new))
        for part in _chunks(sorted(new, key=lambda group: len(group.prompt)), lambda group: len(group.prompt)):
            at = torch.tensor([group.index for group in part], device=self.device)
            for group, hidden in zip(part, self.cache.prefill([group.prompt for group in part], at), strict=True):
                group.hidden = hidden

    def _reserve(self, entering: Sequence[RequestState], slots: int) -> None:
        """Reserve cache and token buffers for entering rows; `slots` is the number of slots needed, 0: no more."""
        if 0 < self.cache.slots < slots:
            slots = max(slots, min(self.max_rows, 2 * self.cache.slots))
        limit = max(row.limit for row in entering)
        self.cache.reserve(slots, max(len(row.token_ids) for row in entering) + 1, limit)
        # One token more than the limit: rows that finished between two checks write there. Turns of an episode raise
        # the limit, and replacing a buffer captures the CUDA graphs again, so the width grows by at least half.
        width = self.tokens.shape[1]
        if limit + 1 > width:
            width = max(limit + 1, int(_GROWTH * width))
        shape = (max(len(self.tokens), self.cache.slots), width)
        if shape != self.tokens.shape:
            more = (0, shape[1] - self.tokens.shape[1], 0, shape[0] - len(self.tokens))
            self.tokens, self.logprobs = (F.pad(buffer, more) for buffer in (self.tokens, self.logprobs))

    def _first_logits(self, rows: Sequence[RequestState], slots: Tensor) -> Tensor:
        """Logits [N, V] for the next token of entering rows.

        A new row continues its prompt, whose last hidden state the group has. A preempted row has tokens: they are
        forwarded again behind the prompt, which puts their keys and values into its slot.
        """
        groups = {id(self._group(row)): self._group(row) for row in rows if not row.token_ids}
        prompts_last = [group.hidden for group in groups.values() if group.hidden is not None]
        hidden = [torch.stack(prompts_last)] if groups else []
        # Index into the concatenated hidden states: by id(group) for new rows, by id(row) for preempted ones.
        source = {key: index for index, key in enumerate(groups)}
        begun = sorted((index for index, row in enumerate(rows) if row.token_ids), key=lambda at: self._size(rows[at]))
        for part in _chunks(begun, lambda at: self._size(rows[at])):
            at = slots[list(part)]
            for index, slot in zip(part, at, strict=True):
                row, source[id(rows[index])] = rows[index], len(source)
                self.tokens[slot, : len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.int32)
                self.logprobs[slot, : len(row.token_ids)] = torch.tensor(row.logprobs)
            prompts = [self._group(rows[index]).prompt for index in part]
            sequences = [(*prompt, *rows[index].token_ids) for prompt, index in zip(prompts, part, strict=True)]
            hidden.append(self.cache.restore(sequences, [len(prompt) for prompt in prompts], at))
        order = [source[id(row if row.token_ids else self._group(row))] for row in rows]
        return self.model.logits(torch.cat(hidden))[order]

    # ---- A decode step ----

    def decode_step(self) -> None:
        """Decode one token for every row."""
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
        """Sample the next token of each row from `logits` [N, V] and update `state`; finished rows do not change."""
        slots, lengths = state[SLOT], state[LENGTH]
        if len(by_rule) == 1:
            tokens, logprobs, stopped = self._draw_alike(rows, logits, state[SEED], lengths)
        else:
            tokens, logprobs = torch.empty_like(lengths), logits.new_empty(len(rows))
            stopped = torch.empty_like(tokens, dtype=torch.bool)
            for indices, at in by_rule:
                alike = [rows[index] for index in indices]
                drawn = self._draw_alike(alike, logits[at], state[SEED][at], lengths[at])
                tokens[at], logprobs[at], stopped[at] = drawn
        if self.in_prefix:
            # Rows within their prefix take the token that is already there; it has no log-prob and cannot stop them.
            prefix = lengths < state[PREFIX]
            tokens = torch.where(prefix, self.tokens[slots, lengths], tokens)
            logprobs, stopped = logprobs.masked_fill(prefix, 0.0), stopped & ~prefix
        going = (state[STOPPED] == 0) & (lengths < state[LIMIT])
        self.tokens[slots, lengths] = tokens.int()
        self.logprobs[slots, lengths] = logprobs
        state[TOKEN] = torch.where(going, tokens, state[TOKEN])
        state[STOPPED] |= stopped & going
        lengths += going  # a view: this updates `state`

    def _draw_alike(
        self, rows: Sequence[RequestState], logits: Tensor, seeds: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample rows with the same sampling parameters: tokens [N], log-probs [N], and [N] True for stop tokens."""
        rule = rows[0].rule
        banned = rule.banned(lengths)
        if rule.sampling.logprobs_over != "kept":
            tokens, logprobs = sample(logits, rule.sampling, seeds, lengths, banned, self.model.kernels)
        else:  # the number of candidates is only known afterwards, so this waits for the GPU
            tokens, logprobs, candidates = sample_candidates(logits, rule.sampling, seeds, lengths, banned)
            ids, start = candidates.ids.cpu().numpy(), 0
            for row, number in zip(rows, candidates.counts.tolist(), strict=True):
                row.candidate_counts.append(number)
                row.candidate_ids.frombytes(ids[start : start + number].tobytes())
                start += number
        return tokens, logprobs, rule.token_ends(tokens, lengths + 1)

    # ---- Finished rows ----

    def _collect(self, window: int) -> None:
        """Move rows that finished with one of their last `window` tokens to `finished`."""
        state = self.state
        # Stop strings are only searched for here, so a row may have to be cut back to where one was completed.
        for indices, at in self.by_rule:
            rule = self.rows[indices[0]].rule
            if rule.completes is not None:
                ends = rule.string_ends(self.tokens, state[SLOT][at], state[LENGTH][at], window, state[PREFIX][at])
                for index, length in ends.items():
                    state[LENGTH, indices[index]], state[STOPPED, indices[index]] = length, 1
        ended = ((state[STOPPED] > 0) | (state[LENGTH] >= state[LIMIT])).nonzero()[:, 0].tolist()
        if not ended:
            return
        stopped = state[STOPPED, ended].tolist()
        slots = state[SLOT, ended].tolist()
        states = self._remove_rows(ended)
        if self._reset_if_diverged(states):
            self.waiting.extendleft(states)
            raise ValueError(DIVERGED)
        self._release_groups([row for row in states if not row.request.keep_cache])
        for row, slot in zip(states, slots, strict=True):
            if row.request.keep_cache:
                self._release_groups(self.retained.add(RetainedRow(row, slot, self._group(row).prompt)))
        self.finished += [(row, "stop" if stop else "length") for row, stop in zip(states, stopped, strict=True)]
        self._rows_changed()  # after retaining rows: it may move others into slots that are free

    def _remove_rows(self, indices: Sequence[int]) -> list[RequestState]:
        """Remove rows from the batch and copy their tokens to the host; the caller then calls `_rows_changed`."""
        if not indices:
            return []
        ended, rows = self.state[:, indices], [self.rows[index] for index in indices]
        members, lengths = ended[MEMBER].tolist(), ended[LENGTH].maximum(ended[PREFIX]).tolist()
        tokens, logprobs = (buffer[ended[SLOT], : max(lengths)].tolist() for buffer in (self.tokens, self.logprobs))
        removed = set(indices)
        staying = [index for index in range(len(self.rows)) if index not in removed]
        state = self.state[:, staying]
        for index, (row, member, length) in enumerate(zip(rows, members, lengths, strict=True)):
            row.token_ids, row.logprobs = tokens[index][:length], logprobs[index][:length]
            self._release_member(row, member)
        self.rows, self.state = [self.rows[index] for index in staying], state
        return rows

    def _release_groups(self, states: Sequence[RequestState]) -> None:
        """Count requests as finished in their groups; a group without requests is deleted."""
        for state in states:
            group = self._group(state)
            group.unfinished -= 1
            if not group.unfinished:
                del self.groups[state.group_id]

    def _rows_changed(self) -> None:
        """Recompute the host's view of the batch: rows by sampling rule, sizes, `DecodeBatch`."""
        self.by_rule = _group_by_rule(self.rows, self.device)
        if not self.rows:
            return
        most = self.state.amax(dim=1).tolist()
        # With many unused slots, move rows to the front (not with retained rows, which keep their slots).
        few = len(self.rows) <= 0.85 * (most[SLOT] + 1) and not self.retained.slots
        if few and self.cache.compact(self.state[SLOT]):
            most[SLOT] = len(self.rows) - 1
            for buffer in (self.tokens, self.logprobs):
                buffer[: len(self.rows)] = buffer[self.state[SLOT]]
            self.state[SLOT] = torch.arange(len(self.rows), device=self.device)
        self.longest, self.limit = most[LENGTH], most[LIMIT]
        self.in_prefix = bool((self.state[LENGTH] < self.state[PREFIX]).any())
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


def _group_by_rule(rows: Sequence[RequestState], device: torch.device | str) -> list[tuple[list[int], Tensor]]:
    """Indices of the rows with each stop rule (and so the same sampling), as a list and as a tensor."""
    indices: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(id(row.rule), []).append(index)
    return [(alike, torch.tensor(alike, device=device)) for alike in indices.values()]


def _chunks(items: Sequence[T], tokens: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Split items, sorted by length, into forward passes of at most `_PREFILL_TOKENS` padded tokens."""
    while items:
        size = 1
        while size < len(items) and (size + 1) * tokens(items[size]) <= _PREFILL_TOKENS:
            size += 1
        yield items[:size]
        items = items[size:]
