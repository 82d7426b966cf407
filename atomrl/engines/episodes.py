"""`EpisodeEngine`: multi-turn rollout. Wraps an engine and an environment as one `RolloutEngine`.

`ReplyTokens` turns the environment's replies into the tokens between two turns of the model.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from atomrl.common.chat_template import (
    NO_TEMPLATE,
    end_of_turn,
    render,
    thought_opening,
    token_ids,
    tokenize_continuation,
)
from atomrl.common.files import write_bytes
from atomrl.common.hangs import progress
from atomrl.common.redaction import without_secrets
from atomrl.config import EnvironmentConfig
from atomrl.data.columns import PLACE
from atomrl.data.image_reader import ImageReader
from atomrl.data.images import reference
from atomrl.engines.sampling import seed_at
from atomrl.environments.pool import Answer, EnvironmentPool
from atomrl.environments.worker import EpisodeError
from atomrl.protocols import RolloutEngine, WeightHash, WeightUpdate
from atomrl.types import (
    Ended,
    Episode,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    Image,
    Reply,
    SamplingParams,
    Segment,
    Turn,
)

# --------------------------------------------------------------------------------------------------------------------
# Tokens of an environment's reply.

_USER, _MODEL, _REPLY = "atomrl-user-words", "atomrl-model-words", "atomrl-reply-words"
_THOUGHT = "atomrl-thoughts"
SPECIAL_NAMES = re.compile(r"(atomrl-(?:special|picture)-\d+-words)")
"""Matches what stands for special tokens of the tokenizer that an environment's reply spells, and for its pictures."""
_CALL_ID = "atomrl001"
"""Mistral's templates accept only nine letters and digits."""

Message = dict[str, Any]


class ReplyTokens:
    """Tokenizer for replies. Sampled tokens are never encoded again, so a row only grows.

    A raw reply is its text. A message is rendered by the chat template: a short conversation with placeholders is
    rendered with the reply at its end, and everything after the assistant's placeholder is the reply's text. The
    end-of-turn token is left out if the model wrote it itself, but not the line break after it. Text of special tokens
    within a reply is encoded as text, so no document or tool can end a turn, unless the reply has `special_tokens`;
    added tokens that are not special stay tokens.

    Each `<image>` in a reply with pictures becomes the tokens of one, as in a prompt.

    Args:
        tokenizer: of the model.
        tools: JSON schemas that prompts were rendered with; templates may depend on them.
        kwargs: variables of the template that prompts were rendered with (`data.chat_template_kwargs`).
        images: knows the tokens of pictures; None: replies have none.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.tokenizer, self.tools, self.kwargs = tokenizer, [dict(tool) for tool in tools], dict(kwargs or {})
        self.images = images
        self._openings: dict[str, list[Message]] = {}
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = sorted(special, key=len, reverse=True)
        self._added = special | {token.content for token in added}

    def encode(
        self, replies: Reply | Sequence[Reply], last_token: int | None, most: int, images: Sequence[Image] = ()
    ) -> list[int]:
        """Return the tokens of an environment's replies.

        Args:
            replies: one reply, or several messages of the same role.
            last_token: of the model's turn before. None: there is none, and the reply continues the prompt's last
                message (`environment.opening`).
            most: limit for the tokens of the replies' text. If exceeded, each reply is truncated to an equal share;
                what the template writes around it is not.
            images: pictures of the replies, one for each `<image>` of those that have any.

        Raises:
            ValueError: the chat template does not support such messages, or replies with pictures are over the limit.
        """
        replies = [replies] if isinstance(replies, Reply) else list(replies)
        role, names = replies[0].role, {f"atomrl-special-{n}-words": token for n, token in enumerate(self._special)}
        texts, pictures = [reply.text for reply in replies], self._pictures(images)
        if pictures:
            self._check_room(texts, pictures, most)
            rest = iter(pictures)
            texts = [
                re.sub(PLACE, lambda _: next(rest), text) if reply.images else text
                for reply, text in zip(replies, texts, strict=True)
            ]
        elif role:
            texts = self._cut(texts, most)
        for name, token in names.items():
            texts = [
                text if reply.special_tokens else text.replace(token, name)
                for reply, text in zip(replies, texts, strict=True)
            ]
        before = "" if last_token is None else str(self.tokenizer.convert_ids_to_tokens(last_token))
        if not role:
            before, after = "", "".join(texts)
        else:
            after = self._opening(role, texts) if last_token is None else self._after_model(role, texts)
        if before in self._added and after.lstrip().startswith(before):
            after = after.lstrip().removeprefix(before)  # the model wrote its end-of-turn token
        else:
            before = ""
        first, *others = SPECIAL_NAMES.split(after)
        ids = tokenize_continuation(self.tokenizer, first, before)
        for part in others:
            if part in pictures:
                ids += pictures[part]
            else:
                ids += self._spelled(names[part]) if part in names else tokenize_continuation(self.tokenizer, part)
        return ids if role or pictures else ids[:most]

    def check(self, role: str, opening: bool = False) -> list[str]:
        """Check that the chat template supports an environment's messages.

        Args:
            role: `tool` or `user`.
            opening: True if the environment speaks first.

        Returns:
            Warnings, if the template would render earlier turns of the whole conversation differently from the row.

        Raises:
            ValueError: it does not support them.
        """
        if opening:
            self._opening("user", [_REPLY])
        messages = self._conversation(role)
        thinking = [dict(message) for message in messages]
        thinking[-1]["content"] = f"<think>\n{_THOUGHT}\n</think>\n\n{_MODEL}"
        reply = self._messages(role, [_REPLY])
        before, after = (self._rendered([*thinking, *more], bool(more)) for more in ([], reply))
        prompt, conversation = self._rendered(messages[:-1], True), self._rendered([*messages, *reply], True)
        start = conversation.partition(_MODEL)[0]
        # One may continue with thoughts or a tool call.
        if not start.startswith(prompt) and not prompt.startswith(start):
            return [
                f"the chat template renders earlier messages differently when a message of role {role!r} follows; rows "
                "keep them as the model saw them"
            ]
        if _THOUGHT in before and _THOUGHT not in after:
            return [f"the chat template drops thoughts before a message of role {role!r}; rows keep all sampled tokens"]
        return []

    # ---- Text ----

    def _opening(self, role: str, texts: Sequence[str]) -> str:
        """Render replies as the continuation of the prompt's last message."""
        if role != "user":
            raise ValueError(f"a reply with the role {role!r} before the model's first turn: it must be 'user'")
        if not self.tokenizer.chat_template:
            raise ValueError(f"opening: {NO_TEMPLATE}, or remove it, so that the environment opens with plain text")
        *before, user = self._conversation("user")[:-1]
        return self._rendered([*before, user | {"content": _USER + texts[0]}], True).partition(_USER)[2]

    def _after_model(self, role: str, texts: Sequence[str]) -> str:
        """Render replies after a turn of the model: end of turn, the messages, and the header of the next turn."""
        conversation = self._conversation(role)
        text = self._rendered([*conversation, *self._messages(role, texts)], True).partition(_MODEL)[2]
        if "tool_calls" in conversation[-1]:  # the placeholder is in a call, whose end the model writes too
            end = self._end(text)
            text = end + text.partition(end)[2]
        return text

    def _end(self, text: str) -> str:
        """Return the token that ends the model's turn in a text after its words.

        This is the end-of-turn token of an answer, else the tokenizer's end of sequence, else the first special token.
        """
        ends = self.tokenizer.convert_ids_to_tokens(end_of_turn(self.tokenizer, self.kwargs)), self.tokenizer.eos_token
        if end := next((end for end in ends if end and end in text), None):
            return str(end)
        return min((token for token in self._special if token in text), key=text.index, default="")

    def _conversation(self, role: str) -> list[Message]:
        """Return a conversation of placeholders that a message of the role may follow: the first the template accepts.

        Raises:
            ValueError: it accepts none.
        """
        if role not in self._openings:
            if not self.tokenizer.chat_template:
                raise ValueError(f"a reply with the role {role!r}: {NO_TEMPLATE}, or reply with ''")
            system, user = {"role": "system", "content": "atomrl-system-words"}, {"role": "user", "content": _USER}
            plain: Message = {"role": "assistant", "content": _MODEL}
            arguments = {"name": "atomrl", "arguments": {"words": _MODEL}}
            call = {"id": _CALL_ID, "type": "function", "function": arguments}
            calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            candidates: list[list[Message]] = [[user, plain], [system, user, plain]]
            candidates += [[user, calling], [system, user, calling]] if role == "tool" else []
            problems = []
            for conversation in candidates:
                if (problem := self._problem(conversation, role)) is None:
                    self._openings[role] = conversation
                    break
                problems.append(problem)
            else:
                raise ValueError(f"a reply with the role {role!r}: the chat template {problems[0]}")
        return self._openings[role]

    def _problem(self, conversation: list[Message], role: str) -> str | None:
        """Return why messages of a role cannot follow this conversation; None if they can."""
        texts = [f"{_REPLY}-1", f"{_REPLY}-2"] if role == "tool" else [_REPLY]
        try:
            prompt = self._rendered(conversation[:-1], True)
            text = self._rendered([*conversation, *self._messages(role, texts)], True)
        except Exception as error:  # templates are programs and may raise anything
            return f"rejects it after an assistant message: {error}"
        start, _, after = text.partition(_MODEL)
        same_prompt = start.count(_USER) == 1 and start.partition(_USER)[0] == prompt.partition(_USER)[0]
        if text.count(_MODEL) != 1 or not same_prompt:
            return "changes the messages before it"
        if after.count(_REPLY) != len(texts):
            return "leaves it out"
        if "tool_calls" in conversation[-1] and not self._end(after):
            return "writes no end-of-sequence token after a call"
        return None

    def _messages(self, role: str, texts: Sequence[str]) -> list[Message]:
        if role == "user":
            return [{"role": role, "content": text} for text in texts]
        return [{"role": role, "name": "atomrl", "tool_call_id": _CALL_ID, "content": text} for text in texts]

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        options: dict[str, Any] = {"tools": self.tools, "kwargs": self.kwargs}
        return render(self.tokenizer, messages, add_generation_prompt=add_generation_prompt, **options)

    # ---- Tokens ----

    def _pictures(self, images: Sequence[Image]) -> dict[str, list[int]]:
        """Return what stands for each picture in a text, and its tokens."""
        if not images:
            return {}
        assert self.images is not None, "the engine of such an environment is created with `images`"
        one = self.tokenizer.encode(self.images.place(self.tokenizer), add_special_tokens=False)
        return {f"atomrl-picture-{n}-words": self.images.expanded(one, [image]) for n, image in enumerate(images)}

    def _check_room(self, texts: Sequence[str], pictures: Mapping[str, Sequence[int]], most: int) -> None:
        """Check that replies with pictures are within a limit, as they cannot be truncated."""
        words = sum(len(token_ids(self.tokenizer, text.replace(PLACE, ""), split=True)) for text in texts)
        if (size := words + sum(map(len, pictures.values()))) > most:
            raise ValueError(
                f"a reply with pictures of {size} tokens, more than environment.max_reply_tokens={most}, which is not "
                "truncated: raise the limit, or lower data.max_pixels"
            )

    def _cut(self, texts: Sequence[str], most: int) -> list[str]:
        """Truncate texts to `most` tokens in all."""
        rows = [token_ids(self.tokenizer, text, split=True) for text in texts]
        if sum(map(len, rows)) <= most:
            return list(texts)
        part, cut = max(1, most // len(texts)), []
        for text, ids in zip(texts, rows, strict=True):
            short = str(self.tokenizer.decode(ids[:part], clean_up_tokenization_spaces=False))
            cut.append(text if len(ids) <= part else short.rstrip("\ufffd"))  # part of a character
        return cut

    def _spelled(self, text: str) -> list[int]:
        """Encode the text of a special token without using that token."""
        ids = tokenize_continuation(self.tokenizer, text, split=True)
        if set(self.tokenizer.convert_ids_to_tokens(ids)) & set(self._special):  # sentencepiece also has it as a piece
            ids = [
                token for character in text for token in tokenize_continuation(self.tokenizer, character, split=True)
            ]
        return ids


POLL_S = 0.01
"""Seconds that the engine computes between two checks for replies of the environment."""
WAIT_S = 0.5
"""Seconds to wait at once for replies if the engine has no turns."""
FINISH: dict[Ended, FinishReason] = {
    "environment": "environment", "turns": "length", "length": "length", "abort": "abort", "failed": "abort",
}  # fmt: skip


@dataclass(eq=False)
class _RunningEpisode:
    """A running episode."""

    request: GenerationRequest
    key: int
    """Its key in the `EnvironmentPool`."""
    tokens: list[int] = field(default_factory=list)
    """Context of the model: the prompt and all tokens after it, without dropped turns."""
    drawn: int = 0
    """Tokens after the prompt, including dropped turns; the position of the next draw."""
    sees_from: int = 0
    """First turn that was not dropped."""
    segments: list[Segment] = field(default_factory=list)
    text: str = ""
    """Text of all turns, with the thinking tags that the chat template opens after replies."""
    turns: list[Turn] = field(default_factory=list)
    opening_tokens: int = 0
    opening: str = ""
    opening_images: tuple[Image, ...] = ()
    drawing: str | None = None
    """Request id of the turn in the engine."""
    last: str | None = None
    """Request id of the turn before, whose KV cache the engine may still have."""
    ended: Ended = "environment"
    cut: bool = False
    """True if the model's last turn was truncated."""

    @property
    def left(self) -> int:
        """Tokens left until `max_completion_tokens`."""
        return self.request.sampling.max_completion_tokens - len(self.tokens) + len(self.request.prompt_token_ids)

    @property
    def images(self) -> tuple[Image, ...]:
        """Pictures in the context of the model."""
        seen = (image for turn in self.turns[self.sees_from :] for image in turn.images)
        return (*self.request.images, *self.opening_images, *seen)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the row."""
        self.tokens += tokens
        self.drawn += len(tokens)

    def drop_oldest(self, wanted: int) -> bool:
        """Drop the oldest turns, but not the last, until `wanted` tokens are left. Returns whether any was dropped."""
        before, begin = self.sees_from, len(self.request.prompt_token_ids) + self.opening_tokens
        while self.left < wanted and self.sees_from < len(self.turns) - 1:
            turn = self.turns[self.sees_from]
            del self.tokens[begin : begin + turn.model_tokens + turn.reply_tokens]
            self.sees_from += 1
        return self.sees_from > before


class EpisodeEngine(RolloutEngine):
    """A `RolloutEngine` whose completions are episodes: turns of the model and replies of the environment.

    Each turn is a request of its own, whose prompt is the row so far, token by token as sampled. Episodes are
    independent: none waits for another, and the engine samples other turns while an environment works. A turn uses the
    random numbers of its position in the row, so the speed of an environment does not change a token.

    An episode ends when the environment ends it, at `max_turns` or `max_completion_tokens` (the environment is then
    asked for the outcome), or when the environment fails. With `when_full: drop_oldest` it continues beyond
    `max_completion_tokens`: the model then sees the prompt and the latest turns alone.

    Args:
        engine: samples the turns.
        tokenizer: of the model.
        settings: the section `environment`.
        tools: JSON schemas that prompts were rendered with.
        kwargs: variables of the chat template that prompts were rendered with.
        images: reads the pictures of replies, which are written to its folder; None: replies have none.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        settings: EnvironmentConfig,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.settings, self.images = engine, tokenizer, settings, images
        self.pool, self.replies = EnvironmentPool(settings), ReplyTokens(tokenizer, tools, kwargs, images)
        self.seeded, self.exact, self.returns_candidates = engine.seeded, engine.exact, engine.returns_candidates
        self.held: dict[str, _RunningEpisode] = {}
        """Episodes that have not finished, by request id."""
        self.by_key: dict[int, _RunningEpisode] = {}
        """The same, by their key in `pool`."""
        self.by_turn: dict[str, _RunningEpisode] = {}
        """Episodes whose turn the engine samples, by the turn's request id."""
        self._paused = self._asleep = False

    @property
    def version(self) -> int:  # type: ignore[override]
        """Version of the engine's weights."""
        return self.engine.version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start an episode for each request.

        Raises:
            ValueError: a request has no problem, or its id is in use. No episode is then started.
        """
        names = set(self.held)
        for request in requests:
            if request.problem is None:
                raise ValueError(f"request {request.request_id!r} has no problem for the environment")
            if request.request_id in names:
                raise ValueError(f"request {request.request_id!r} already exists")
            if not request.prompt_token_ids:
                raise ValueError(f"request {request.request_id!r}: the prompt has no tokens")
            names.add(request.request_id)
        try:
            for request in requests:
                episode = _RunningEpisode(request, self._start(request), list(request.prompt_token_ids))
                self.held[request.request_id] = self.by_key[episode.key] = episode
        except BaseException:
            self.abort([request.request_id for request in requests])
            raise

    def poll(self, wait_s: float = math.inf) -> list[GenerationOutput]:
        """Continue until at least one episode has ended, or for `wait_s` seconds; return the finished episodes.

        A step that has begun is completed. Empty if there are no episodes or the engine is paused or asleep.

        Raises:
            ValueError: the model's logits are not finite.
            EpisodeError: the environment cannot be used.
        """
        # Replies are taken first, so that their turns share the engine's batch. If an environment is working, the
        # engine runs for short times only; with no turn in the engine, wait for replies instead.
        end, finished = time.monotonic() + wait_s, list[GenerationOutput]()
        while self.held and not (self._paused or self._asleep or finished):
            waits = 0.0 if self.by_turn else min(WAIT_S, max(0.0, end - time.monotonic()))
            finished += self.take_answers(self.pool.answers(waits))
            if self.by_turn and not finished:
                limit = min(wait_s, POLL_S) if self.pool.waiting else end - time.monotonic()
                self.take_turns(self.engine.poll(max(0.0, limit)))
            if time.monotonic() >= end:
                break
        return finished

    def take_answers(self, answers: Iterable[tuple[int, Answer]]) -> list[GenerationOutput]:
        """Submit the next turns in one call (it may wait for a remote engine); return the episodes that ended."""
        results = [(episode := self.by_key[key], self._take_answer(episode, answer)) for key, answer in answers]
        turns = [(episode, self._next_turn(episode)) for episode, result in results if result == "turn"]
        if turns:
            self.engine.submit([request for _, request in turns])
        for episode, request in turns:
            episode.drawing = request.request_id
            self.by_turn[request.request_id] = episode
        last_answers = [(episode, result) for episode, result in results if isinstance(result, Answer)]
        for episode, answer in last_answers:
            if answer.anew:
                self._restart(episode)
        return [self._finished(episode, answer) for episode, answer in last_answers if not answer.anew]

    def _restart(self, episode: _RunningEpisode) -> None:
        """Restart an episode from its prompt."""
        request = episode.request
        del self.by_key[episode.key]
        self._forget_cache(episode)
        key = self._start(request)
        restarted = _RunningEpisode(request, key, list(request.prompt_token_ids))
        self.held[request.request_id] = self.by_key[key] = restarted

    def _start(self, request: GenerationRequest) -> int:
        """Start the environment of an episode, and return its key."""
        assert request.problem is not None
        rendered = str(self.tokenizer.decode(list(request.prompt_token_ids), clean_up_tokenization_spaces=False))
        return self.pool.start(request.problem, request.seed, rendered)

    def take_turns(self, outputs: Iterable[GenerationOutput]) -> None:
        """Pass finished turns of the model to the environment."""
        for output in outputs:
            progress()
            episode = self.by_turn.pop(output.request_id)
            self._add_turn(episode, output)
            text = self._text_of(episode, output)
            episode.last = output.request_id
            self.pool.say(episode.key, text)

    def _add_turn(self, episode: _RunningEpisode, output: GenerationOutput) -> None:
        episode.drawing, episode.cut = None, output.finish_reason == "length"
        written = [token for segment in output.segments for token in segment.token_ids]
        episode.add(written)
        episode.segments += output.segments
        episode.text += output.text
        episode.turns.append(Turn(model_tokens=len(written), text=output.text, sees_from=episode.sees_from))

    def _text_of(self, episode: _RunningEpisode, output: GenerationOutput) -> str:
        """Return the text for the environment, up to the end of the first stop string.

        Characters of the last token beyond it stay in the row.
        """
        ends = [at + len(stop) for stop in self._stops(episode.request.sampling) if (at := output.text.find(stop)) >= 0]
        return output.text[: min(ends, default=len(output.text))]

    def _stops(self, sampling: SamplingParams) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*sampling.stop, *self.settings.stop]))

    def _take_answer(self, episode: _RunningEpisode, answer: Answer) -> Answer | Literal["turn"] | None:
        """Process an answer. Returns "turn", or the answer if the episode ends, or None to wait for another answer."""
        if episode.turns:
            turn, labels = episode.turns[-1], tuple(reply.label for reply in answer.replies)
            rewards = [reply.reward for reply in answer.replies if reply.reward is not None]
            episode.turns[-1] = replace(
                turn,
                seconds=turn.seconds + answer.seconds,
                reward=sum(rewards) if rewards else turn.reward,
                labels=labels or turn.labels,
            )
        if answer.ended:
            return answer
        if self.images is None and any(reply.images for reply in answer.replies):
            raise EpisodeError(
                f"environment.function: {self.settings.function!r} replied with a picture: set environment.images=true"
            )
        replies = answer.replies if episode.turns else self._opening(answer.replies)
        try:
            why = self._add_replies(episode, replies) if replies else None
        except ValueError as error:  # the chat template does not support them
            self.pool.end(episode.key)
            return Answer(ended=True, failure="invalid", message=str(error))
        if why:
            episode.ended = why
            self.pool.cut(episode.key)
            return None
        return "turn"

    def _opening(self, replies: Sequence[Reply]) -> Sequence[Reply]:
        """Return the environment's first replies, as raw text or as the end of the prompt's last message."""
        if self.settings.opening:
            return [replace(reply, role="user") for reply in replies or [Reply(text="")]]
        if replies and replies[0].role:
            raise ValueError(
                f"environment: it begins with a reply of the role {replies[0].role!r}, but the prompt is already "
                "closed; set environment.opening=true"
            )
        return replies

    def _add_replies(self, episode: _RunningEpisode, replies: Sequence[Reply]) -> Ended | None:
        """Append the replies' tokens to the row; returns why the episode ends if there is no room.

        Raises:
            ValueError: the chat template does not support them, or a picture cannot be read. Nothing has then changed.
        """
        if len(episode.turns) >= self.settings.max_turns:
            return "turns"
        last = episode.tokens[-1] if episode.turns else None
        read = self._read(replies)
        images = tuple(image for image, _ in read)
        ids = self.replies.encode(replies, last, self.settings.max_reply_tokens, images)
        if self.settings.when_full == "drop_oldest":
            self._make_room(episode, len(ids))
        if len(ids) >= episode.left:
            return "length"
        for image, content in read:
            if not Path(image.path).is_file():
                write_bytes(Path(image.path), content)
        if ids:
            episode.add(ids)
            episode.segments.append(Segment(origin="environment", token_ids=tuple(ids)))
        cut = len(ids) >= self.settings.max_reply_tokens and not images
        text = str(self.tokenizer.decode(ids)) if cut else "\n".join(reply.text for reply in replies)
        if episode.turns:
            episode.turns[-1] = replace(episode.turns[-1], reply_tokens=len(ids), reply=text, images=images)
            episode.text += thought_opening(str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
        else:
            episode.opening_tokens, episode.opening, episode.opening_images = len(ids), text, images
        return None

    def _read(self, replies: Sequence[Reply]) -> list[tuple[Image, bytes]]:
        """Return the references of the pictures of replies, and their bytes.

        Raises:
            DataError: one cannot be read.
        """
        if self.images is None:
            return []
        source = f"environment {self.settings.function}"
        contents = [content for reply in replies for content in reply.images]
        return [(reference(content, source, self.images.folder, self.images), content) for content in contents]

    def _make_room(self, episode: _RunningEpisode, reply_tokens: int) -> None:
        """Drop old turns if a reply and a turn do not fit.

        Drops until half of `max_completion_tokens` is free behind the reply, not only what is needed, since all that
        follows the prompt must then be prefilled again.
        """
        half = episode.request.sampling.max_completion_tokens // 2
        if episode.left < reply_tokens + (self.settings.max_turn_tokens or 1) and episode.drop_oldest(
            reply_tokens + half
        ):
            self._forget_cache(episode)

    def _next_turn(self, episode: _RunningEpisode) -> GenerationRequest:
        """Return the request for the next turn."""
        request, turn = episode.request, len(episode.turns)
        sampling = replace(
            request.sampling,
            stop=self._stops(request.sampling),
            max_completion_tokens=min(episode.left, self.settings.max_turn_tokens or episode.left),
            min_completion_tokens=0,
        )
        name = f"{request.request_id}#{turn}"
        first = episode.drawn == 0
        return replace(
            request,
            request_id=name,
            group_id=request.group_id if first else name,
            prompt_token_ids=tuple(episode.tokens),
            images=episode.images,
            sampling=sampling,
            problem=None,
            seed=seed_at(request.seed, episode.drawn),
            keep_cache=turn + 1 < self.settings.max_turns,
            continues=episode.last,
        )

    def _finished(self, episode: _RunningEpisode, answer: Answer) -> GenerationOutput:
        if answer.failure is not None:
            episode.ended = "failed"
        elif episode.cut and not episode.left:
            episode.ended = "length"  # even if the environment ended it
        del self.held[episode.request.request_id], self.by_key[episode.key]
        self._forget_cache(episode)
        return self._output(episode, answer)

    def _forget_cache(self, episode: _RunningEpisode) -> None:
        if episode.last is not None:
            self.engine.abort([episode.last])
            episode.last = None

    def _output(self, episode: _RunningEpisode, answer: Answer) -> GenerationOutput:
        return GenerationOutput(
            request_id=episode.request.request_id,
            segments=tuple(episode.segments),
            text=episode.text,
            finish_reason=FINISH[episode.ended],
            episode=Episode(
                turns=tuple(episode.turns),
                ended=episode.ended,
                opening_tokens=episode.opening_tokens,
                opening=episode.opening,
                opening_images=episode.opening_images,
                outcome=answer.outcome,
                failure=answer.failure,
                message=without_secrets(answer.message),
            ),
        )

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Abort episodes (None: all) and return their partial outputs; unknown ids are ignored."""
        names = list(self.held) if request_ids is None else [name for name in request_ids if name in self.held]
        episodes = [self.held.pop(name) for name in dict.fromkeys(names)]
        turns = {episode.drawing: episode for episode in episodes if episode.drawing is not None}
        for output in self.engine.abort(turns) if turns else ():
            del self.by_turn[output.request_id]
            self._add_turn(turns[output.request_id], output)
        for episode in episodes:
            del self.by_key[episode.key]
            self.pool.end(episode.key)
            self._forget_cache(episode)
            episode.ended = "abort"
        return [self._output(episode, Answer(ended=True)) for episode in episodes]

    def pause(self) -> None:
        """Stop sampling until `resume`; episodes stay."""
        self._paused = True
        self.engine.pause()

    def resume(self) -> None:
        """Continue; running episodes continue with the current weights."""
        self._paused = False
        self.engine.resume()

    def sleep(self) -> None:
        """Free the KV cache while others need the memory.

        Raises:
            RuntimeError: episodes are running.
        """
        if self.held:
            raise RuntimeError(f"the engine has {len(self.held)} unfinished episodes; let them end or abort them first")
        self.engine.sleep()
        self._asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        self.engine.wake()
        self._asleep = False

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the engine's weights."""
        return self.engine.weight_shapes()

    def update_weights(self, update: WeightUpdate) -> None:
        """Update the engine's weights; running and later turns use them."""
        self.engine.update_weights(update)

    def weight_hashes(self) -> list[WeightHash]:
        """Hashes of the engine's weights."""
        return self.engine.weight_hashes()

    def close(self) -> None:
        """End the environment's workers and close the engine."""
        self.pool.close()
        self.engine.close()
