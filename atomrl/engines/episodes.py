"""`EpisodeEngine`: an engine and an environment, which write in turns, as one engine."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from atomrl.common.chat_template import NO_TEMPLATE, end_of_turn, following, render, thought_opening, token_ids
from atomrl.common.processes import progress
from atomrl.config import EnvironmentConfig
from atomrl.engines.sampling import seed_at
from atomrl.environments.pool import Answer, EnvironmentPool
from atomrl.protocols import RolloutEngine, WeightHash, WeightUpdate
from atomrl.types import (
    Ended,
    Episode,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    Reply,
    SamplingParams,
    Segment,
    Turn,
)

# --------------------------------------------------------------------------------------------------------------------
# An environment's reply as tokens: what follows a turn of the model in its row.

_USER, _MODEL, _REPLY = "atomrl-user-words", "atomrl-model-words", "atomrl-reply-words"
_THOUGHT = "atomrl-thoughts"
_FORGED = re.compile(r"(atomrl-special-\d+-words)")
_CALL_ID = "atomrl001"
"""Nine letters and digits: Mistral's templates take no other."""

Message = dict[str, Any]


class ReplyTokens:
    """Tokenizes replies, each alone: tokens that were sampled are never encoded again, so a row only grows.

    A raw reply is its text. Messages are what the chat template writes between the end of the assistant's words and its
    next ones, found by rendering a short conversation of dummies that ends with them: trimmed, quoted and wrapped as it
    does. The end-of-turn token is left out where the model wrote it itself, and nothing else is: not the line break
    that follows it. The text of a special token in what is said is text, so that no document or tool can end a turn;
    added tokens that are not special stay tokens.

    Args:
        tokenizer: of the model.
        tools: JSON schemas that the prompt was rendered with; what templates write may depend on them.
        kwargs: further variables of the template, likewise (`data.chat_template_kwargs`).
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer, self.tools, self.kwargs = tokenizer, [dict(tool) for tool in tools], dict(kwargs or {})
        self._openings: dict[str, list[Message]] = {}
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = sorted(special, key=len, reverse=True)
        self._added = special | {token.content for token in added}

    def encode(self, replies: Reply | Sequence[Reply], last_token: int | None, most: int) -> list[int]:
        """The tokens of what an environment answers at once.

        Args:
            replies: one, or several messages of the same role.
            last_token: of the model's turn before it; None: there is none, and a message is the end of the prompt's
                last one (`environment.opening`).
            most: tokens of the replies' own text. Where there are more, each gets an equal part, and what is beyond is
                cut; what the template writes around it is not.

        Raises:
            ValueError: the chat template has no place for such messages.
        """
        replies = [replies] if isinstance(replies, Reply) else list(replies)
        role, names = replies[0].role, {f"atomrl-special-{n}-words": token for n, token in enumerate(self._special)}
        texts = self._cut([reply.text for reply in replies], most) if role else [reply.text for reply in replies]
        for name, token in names.items():
            texts = [text.replace(token, name) for text in texts]
        before = "" if last_token is None else str(self.tokenizer.convert_ids_to_tokens(last_token))
        if not role:
            before, after = "", "".join(texts)
        else:
            after = self._opening(role, texts) if last_token is None else self._after_model(role, texts)
        if before in self._added and after.lstrip().startswith(before):
            after = after.lstrip().removeprefix(before)  # the model ended its turn itself
        else:
            before = ""
        first, *others = _FORGED.split(after)
        ids = following(self.tokenizer, first, before)
        for part in others:
            ids += self._spelled(names[part]) if part in names else following(self.tokenizer, part)
        return ids if role else ids[:most]

    def check(self, role: str, opening: bool = False) -> list[str]:
        """Whether the chat template has a place for an environment's messages.

        Args:
            role: `tool` or `user`.
            opening: whether the environment begins.

        Returns:
            What is worth a warning: where the template, given the whole conversation, would write its earlier turns
            otherwise than they are in the row.

        Raises:
            ValueError: it has none.
        """
        if opening:
            self._opening("user", [_REPLY])
        messages = self._conversation(role)
        thinking = [dict(message) for message in messages]
        thinking[-1]["content"] = f"<think>\n{_THOUGHT}\n</think>\n\n{_MODEL}"
        reply = self._messages(role, [_REPLY])
        kept = [self._rendered([*thinking, *more], bool(more)) for more in ([], reply)]
        prompt, whole = self._rendered(messages[:-1], True), self._rendered([*messages, *reply], True)
        start = whole.partition(_MODEL)[0]
        if not start.startswith(prompt) and not prompt.startswith(start):  # either may have thoughts, or a call's begin
            return [
                f"the chat template writes what came before otherwise where a message of {role!r} follows; rows keep "
                "it as the model saw it"
            ]
        if _THOUGHT in kept[0] and _THOUGHT not in kept[1]:
            return [f"the chat template drops thoughts before a message of {role!r}; rows keep all that was sampled"]
        return []

    # ---- Text ----

    def _opening(self, role: str, texts: Sequence[str]) -> str:
        """What follows the words of the prompt's last message where the environment goes on with it."""
        if role != "user":
            raise ValueError(f"a reply with the role {role!r} before the model's first turn: it is 'user'")
        if not self.tokenizer.chat_template:
            raise ValueError(f"opening: {NO_TEMPLATE}, or remove it, so that what is said first is text")
        *before, user = self._conversation("user")[:-1]
        return self._rendered([*before, user | {"content": _USER + texts[0]}], True).partition(_USER)[2]

    def _after_model(self, role: str, texts: Sequence[str]) -> str:
        """What follows the model's words: the end of its turn, the messages, and what begins its next turn."""
        conversation = self._conversation(role)
        text = self._rendered([*conversation, *self._messages(role, texts)], True).partition(_MODEL)[2]
        if "tool_calls" in conversation[-1]:  # the words are an argument of a call, whose end is the model's too
            end = self._end(text)
            text = end + text.partition(end)[2]
        return text

    def _end(self, text: str) -> str:
        """The token that ends the model's turn, in a text behind its words: the one that ends an answer, or the
        tokenizer's, else the first special."""
        ends = self.tokenizer.convert_ids_to_tokens(end_of_turn(self.tokenizer, self.kwargs)), self.tokenizer.eos_token
        if end := next((end for end in ends if end and end in text), None):
            return str(end)
        return min((token for token in self._special if token in text), key=text.index, default="")

    def _conversation(self, role: str) -> list[Message]:
        """Dummies up to the assistant's words that a message of the role may follow: the first that the template takes.

        Raises:
            ValueError: it takes none.
        """
        if role not in self._openings:
            if not self.tokenizer.chat_template:
                raise ValueError(f"a reply with the role {role!r}: {NO_TEMPLATE}, or reply with ''")
            system, user = {"role": "system", "content": "atomrl-system-words"}, {"role": "user", "content": _USER}
            plain: Message = {"role": "assistant", "content": _MODEL}
            arguments = {"name": "atomrl", "arguments": {"words": _MODEL}}
            call = {"id": _CALL_ID, "type": "function", "function": arguments}
            calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            ways: list[list[Message]] = [[user, plain], [system, user, plain]]
            ways += [[user, calling], [system, user, calling]] if role == "tool" else []
            problems = []
            for way in ways:
                if (problem := self._problem(way, role)) is None:
                    self._openings[role] = way
                    break
                problems.append(problem)
            else:
                raise ValueError(f"a reply with the role {role!r}: the chat template {problems[0]}")  # the plainest way
        return self._openings[role]

    def _problem(self, way: list[Message], role: str) -> str | None:
        """Why messages of a role cannot follow this conversation."""
        texts = [f"{_REPLY}-1", f"{_REPLY}-2"] if role == "tool" else [_REPLY]
        try:
            prompt = self._rendered(way[:-1], True)
            whole = self._rendered([*way, *self._messages(role, texts)], True)
        except Exception as error:  # templates are programs and raise what they like
            return f"refuses it behind the assistant's words: {error}"
        start, _, after = whole.partition(_MODEL)
        kept = start.count(_USER) == 1 and start.partition(_USER)[0] == prompt.partition(_USER)[0]
        if whole.count(_MODEL) != 1 or not kept:
            return "does not keep what came before it"
        if after.count(_REPLY) != len(texts):
            return "leaves it out"
        if "tool_calls" in way[-1] and not self._end(after):
            return "writes no end-of-sequence token behind a call"
        return None

    def _messages(self, role: str, texts: Sequence[str]) -> list[Message]:
        if role == "user":
            return [{"role": role, "content": text} for text in texts]
        return [{"role": role, "name": "atomrl", "tool_call_id": _CALL_ID, "content": text} for text in texts]

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        options: dict[str, Any] = {"tools": self.tools, "kwargs": self.kwargs}
        return render(self.tokenizer, messages, add_generation_prompt=add_generation_prompt, **options)

    # ---- Tokens ----

    def _cut(self, texts: Sequence[str], most: int) -> list[str]:
        found = [token_ids(self.tokenizer, text, split=True) for text in texts]
        if sum(map(len, found)) <= most:
            return list(texts)
        part, cut = max(1, most // len(texts)), []
        for text, ids in zip(texts, found, strict=True):
            short = str(self.tokenizer.decode(ids[:part], clean_up_tokenization_spaces=False))
            cut.append(text if len(ids) <= part else short.rstrip("\ufffd"))  # the first half of a character
        return cut

    def _spelled(self, text: str) -> list[int]:
        """The text of a special token, without it."""
        ids = following(self.tokenizer, text, split=True)
        if set(self.tokenizer.convert_ids_to_tokens(ids)) & set(self._special):  # sentencepiece has it as a piece too
            ids = [token for character in text for token in following(self.tokenizer, character, split=True)]
        return ids


POLL_S = 0.01
"""How long the engine goes on before answers of the environment are looked for."""
WAIT_S = 0.5
FINISH: dict[Ended, FinishReason] = {
    "environment": "environment", "turns": "length", "length": "length", "abort": "abort", "failed": "abort",
}  # fmt: skip


@dataclass(eq=False)
class _Play:
    """An episode under way."""

    request: GenerationRequest
    key: int
    """Of the environment's side."""
    tokens: list[int] = field(default_factory=list)
    """What the model sees: prompt, and what came after it, but for turns that were dropped."""
    drawn: int = 0
    """Tokens after the prompt, with those that were dropped."""
    sees_from: int = 0
    """The first turn that was not."""
    segments: list[Segment] = field(default_factory=list)
    text: str = ""
    """Of all turns, with the thoughts that the chat template opens behind replies."""
    turns: list[Turn] = field(default_factory=list)
    opening_tokens: int = 0
    opening: str = ""
    drawing: str | None = None
    """The id of the request for the turn that the engine is drawing."""
    last: str | None = None
    """The id of that for the turn before, whose cache the engine may have kept."""
    ended: Ended = "environment"
    cut: bool = False
    """The model's last turn ended at a limit."""

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.request.sampling.max_completion_tokens - len(self.tokens) + len(self.request.prompt_token_ids)

    def add(self, tokens: Sequence[int]) -> None:
        """The next tokens of the row."""
        self.tokens += tokens
        self.drawn += len(tokens)

    def drop_oldest(self, wanted: int) -> bool:
        """Drop turns, the oldest first, until this many tokens may still come; the last one stays. Whether any was."""
        before, begin = self.sees_from, len(self.request.prompt_token_ids) + self.opening_tokens
        while self.left < wanted and self.sees_from < len(self.turns) - 1:
            turn = self.turns[self.sees_from]
            del self.tokens[begin : begin + turn.model_tokens + turn.reply_tokens]
            self.sees_from += 1
        return self.sees_from > before


class EpisodeEngine(RolloutEngine):
    """A `RolloutEngine` whose completions are episodes: what the model writes and what the environment answers.

    Each turn is a request of its own to the engine, whose prompt is the row so far: sampled tokens and those of the
    replies, exactly as they are. Turns of different episodes have nothing to do with each other, so no episode waits
    for another, and the engine draws others' turns while an environment is at work. A turn draws with the random
    numbers of its place in the row, so that how long an environment takes cannot change a token.

    An episode ends when the environment ends it, at `max_turns` or `max_completion_tokens` (the environment is then
    asked for the outcome), or when the environment fails. With `when_full: drop_oldest` the model goes on where
    `max_completion_tokens` has no room for a reply and a turn: it then sees the prompt and the latest turns alone.

    Args:
        engine: draws the turns.
        tokenizer: of the model.
        settings: the section `environment`.
        tools: JSON schemas that prompts were rendered with.
        kwargs: variables of the chat template that they were rendered with.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        settings: EnvironmentConfig,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.pool, self.replies = EnvironmentPool(settings), ReplyTokens(tokenizer, tools, kwargs)
        self.seeded, self.exact, self.returns_candidates = engine.seeded, engine.exact, engine.returns_candidates
        self._plays: dict[str, _Play] = {}
        self._by_key: dict[int, _Play] = {}
        self._by_turn: dict[str, _Play] = {}
        self._paused = self._asleep = False

    @property
    def version(self) -> int:  # type: ignore[override]
        """Of the engine's weights."""
        return self.engine.version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin an episode for each request.

        Raises:
            ValueError: a request has no sample, or its id is in use; or as the engine. None is then begun.
        """
        names = set(self._plays)
        for request in requests:
            if request.sample is None:
                raise ValueError(f"request {request.request_id!r} has no sample for the environment")
            if request.request_id in names:
                raise ValueError(f"request {request.request_id!r} is there already")
            if not request.prompt_token_ids:
                raise ValueError(f"request {request.request_id!r}: the prompt has no tokens")
            names.add(request.request_id)
        try:
            for request in requests:
                assert request.sample is not None
                play = _Play(request, self.pool.start(request.sample, request.seed), list(request.prompt_token_ids))
                self._plays[request.request_id] = self._by_key[play.key] = play
        except BaseException:
            self.abort([request.request_id for request in requests])
            raise

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        """Go on until at least one episode has ended, but no longer than `wait_s` seconds and what cannot be
        interrupted; those that have. Empty also where there is none, or it is paused or asleep.

        Raises:
            ValueError: the model's logits are not finite.
            EpisodeError: the environment cannot be used.
        """
        end, finished = time.monotonic() + wait_s, list[GenerationOutput]()
        while self._plays and not (self._paused or self._asleep or finished):
            waits = 0.0 if self._by_turn else min(WAIT_S, max(0.0, end - time.monotonic()))
            finished += self._take_answers(self.pool.answers(waits))
            if self._by_turn and not finished:
                limit = min(wait_s, POLL_S) if self.pool.waiting else end - time.monotonic()
                self._take_turns(self.engine.poll(max(0.0, limit)))
            if time.monotonic() >= end:
                break
        return finished

    def _take_answers(self, answers: Iterable[tuple[int, Answer]]) -> list[GenerationOutput]:
        """Begin the next turns, all at once, since a call may have to wait for an engine; the episodes that ended."""
        taken = [(play := self._by_key[key], self._take_answer(play, answer)) for key, answer in answers]
        turns = [(play, self._next_turn(play)) for play, then in taken if then == "turn"]
        if turns:
            self.engine.submit([request for _, request in turns])
        for play, request in turns:
            play.drawing = request.request_id
            self._by_turn[request.request_id] = play
        for play, then in taken:
            if isinstance(then, Answer) and then.anew:
                self._begin_anew(play)
        return [self._finished(play, then) for play, then in taken if isinstance(then, Answer) and not then.anew]

    def _begin_anew(self, play: _Play) -> None:
        """Play an episode from its prompt on, as if it had not been."""
        request = play.request
        assert request.sample is not None
        del self._by_key[play.key]
        self._forget_cache(play)
        again = _Play(request, self.pool.start(request.sample, request.seed), list(request.prompt_token_ids))
        self._plays[request.request_id] = self._by_key[again.key] = again

    def _take_turns(self, outputs: Iterable[GenerationOutput]) -> None:
        """Hand what the model wrote to the environment."""
        for output in outputs:
            progress()
            play = self._by_turn.pop(output.request_id)
            self._add_turn(play, output)
            text = self._text_of(play, output)
            play.last = output.request_id
            self.pool.say(play.key, text)

    def _add_turn(self, play: _Play, output: GenerationOutput) -> None:
        play.drawing, play.cut = None, output.finish_reason == "length"
        written = [token for segment in output.segments for token in segment.token_ids]
        play.add(written)
        play.segments += output.segments
        play.text += output.text
        play.turns.append(Turn(model_tokens=len(written), text=output.text, sees_from=play.sees_from))

    def _text_of(self, play: _Play, output: GenerationOutput) -> str:
        """What an environment reads: up to the end of the first stop string, though characters that the last token has
        beyond it stay in the row."""
        ends = [at + len(stop) for stop in self._stops(play.request.sampling) if (at := output.text.find(stop)) >= 0]
        return output.text[: min(ends, default=len(output.text))]

    def _stops(self, sampling: SamplingParams) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*sampling.stop, *self.settings.stop]))

    def _take_answer(self, play: _Play, answer: Answer) -> Answer | Literal["turn"] | None:
        """What follows: the model's next turn, the end with this answer, or nothing before another answer."""
        if play.turns:
            turn, labels = play.turns[-1], tuple(reply.label for reply in answer.replies)
            rewards = [reply.reward for reply in answer.replies if reply.reward is not None]
            play.turns[-1] = replace(
                turn,
                seconds=turn.seconds + answer.seconds,
                reward=sum(rewards) if rewards else turn.reward,
                labels=labels or turn.labels,
            )
        if answer.ended:
            return answer
        replies = answer.replies if play.turns else self._opening(answer.replies)
        try:
            why = self._add_replies(play, replies) if replies else None
        except ValueError as error:  # the chat template has no place for them
            self.pool.end(play.key)
            return Answer(ended=True, failure="invalid", message=str(error))
        if why:
            play.ended = why
            self.pool.cut(play.key)
            return None
        return "turn"

    def _opening(self, replies: Sequence[Reply]) -> Sequence[Reply]:
        """What the environment begins with: text behind the prompt, or the end of the prompt's last message."""
        if self.settings.opening:
            return [replace(reply, role="user") for reply in replies or [Reply(text="")]]
        if replies and replies[0].role:
            raise ValueError(
                f"environment: it begins with a reply of the role {replies[0].role!r}, but the prompt has been closed; "
                "environment.opening=true leaves it open"
            )
        return replies

    def _add_replies(self, play: _Play, replies: Sequence[Reply]) -> Ended | None:
        """The replies' tokens in the row, or why they have no room there.

        Raises:
            ValueError: the chat template has no place for them. Nothing has then changed.
        """
        if len(play.turns) >= self.settings.max_turns:
            return "turns"
        last = play.tokens[-1] if play.turns else None
        ids = self.replies.encode(replies, last, self.settings.max_reply_tokens)
        if self.settings.when_full == "drop_oldest":
            self._make_room(play, len(ids))
        if len(ids) >= play.left:
            return "length"
        if ids:
            play.add(ids)
            play.segments.append(Segment(origin="environment", token_ids=tuple(ids)))
        cut = len(ids) >= self.settings.max_reply_tokens
        said = str(self.tokenizer.decode(ids)) if cut else "\n".join(reply.text for reply in replies)
        if play.turns:
            play.turns[-1] = replace(play.turns[-1], reply_tokens=len(ids), reply=said)
            play.text += thought_opening(str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
        else:
            play.opening_tokens, play.opening = len(ids), said
        return None

    def _make_room(self, play: _Play, reply_tokens: int) -> None:
        """Where a reply and a turn have no room, drop turns until half of all that there may be is free behind the
        reply: not only as much as is needed, since what is seen after the prompt is then computed anew."""
        half = play.request.sampling.max_completion_tokens // 2
        if play.left < reply_tokens + (self.settings.max_turn_tokens or 1) and play.drop_oldest(reply_tokens + half):
            self._forget_cache(play)

    def _next_turn(self, play: _Play) -> GenerationRequest:
        """The request for it."""
        request, turn = play.request, len(play.turns)
        sampling = replace(
            request.sampling,
            stop=self._stops(request.sampling),
            max_completion_tokens=min(play.left, self.settings.max_turn_tokens or play.left),
            min_completion_tokens=0,
        )
        name = f"{request.request_id}#{turn}"
        first = play.drawn == 0
        return replace(
            request,
            request_id=name,
            group_id=request.group_id if first else name,
            prompt_token_ids=tuple(play.tokens),
            sampling=sampling,
            sample=None,
            seed=seed_at(request.seed, play.drawn),
            keep_cache=turn + 1 < self.settings.max_turns,
            continues=play.last,
        )

    def _finished(self, play: _Play, answer: Answer) -> GenerationOutput:
        if answer.failure is not None:
            play.ended = "failed"
        elif play.cut and not play.left:
            play.ended = "length"  # whatever the environment made of the words that there are
        del self._plays[play.request.request_id], self._by_key[play.key]
        self._forget_cache(play)
        return self._output(play, answer)

    def _forget_cache(self, play: _Play) -> None:
        if play.last is not None:
            self.engine.abort([play.last])
            play.last = None

    def _output(self, play: _Play, answer: Answer) -> GenerationOutput:
        return GenerationOutput(
            request_id=play.request.request_id,
            segments=tuple(play.segments),
            text=play.text,
            finish_reason=FINISH[play.ended],
            episode=Episode(
                turns=tuple(play.turns),
                ended=play.ended,
                opening_tokens=play.opening_tokens,
                opening=play.opening,
                outcome=answer.outcome,
                failure=answer.failure,
                message=answer.message,
            ),
        )

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Give up episodes (None: all), and return what they have so far; ids that it does not hold are passed over."""
        names = list(self._plays) if request_ids is None else [name for name in request_ids if name in self._plays]
        plays = [self._plays.pop(name) for name in dict.fromkeys(names)]
        turns = {play.drawing: play for play in plays if play.drawing is not None}
        for output in self.engine.abort(turns) if turns else ():
            del self._by_turn[output.request_id]
            self._add_turn(turns[output.request_id], output)
        for play in plays:
            del self._by_key[play.key]
            self.pool.end(play.key)
            self._forget_cache(play)
            play.ended = "abort"
        return [self._output(play, Answer(ended=True)) for play in plays]

    def pause(self) -> None:
        """Draw no token until `resume`; episodes stay."""
        self._paused = True
        self.engine.pause()

    def resume(self) -> None:
        """Go on; an episode under way continues with the weights there are now."""
        self._paused = False
        self.engine.resume()

    def sleep(self) -> None:
        """Free what can be made again while others need the memory.

        Raises:
            RuntimeError: there are episodes.
        """
        if self._plays:
            raise RuntimeError(f"the engine holds {len(self._plays)} episodes; let them end or abort them first")
        self.engine.sleep()
        self._asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        self.engine.wake()
        self._asleep = False

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As the engine's."""
        return self.engine.weight_shapes()

    def update_weights(self, update: WeightUpdate) -> None:
        """As the engine's; turns that begin later, and those under way, go on with the new weights."""
        self.engine.update_weights(update)

    def weight_hashes(self) -> list[WeightHash]:
        """As the engine's."""
        return self.engine.weight_hashes()

    def close(self) -> None:
        """End the environment's workers, and free what the engine holds."""
        self.pool.close()
        self.engine.close()
