"""Metrics of a step under verl's names, so that existing dashboards carry over."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from hashlib import blake2b
from statistics import fmean
from typing import Any, get_args

import torch
from torch import Tensor

from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch, select_rows
from atomrl.common.metrics import Count, Max, Mean, Metrics, fetched, merge, spread, values
from atomrl.common.processes import phase as under_way
from atomrl.models.memory import memory_metrics
from atomrl.rewards.answers import answers_equal, normalise_text, parse_number
from atomrl.rewards.compute import failure_counts, first_values
from atomrl.rewards.format import extract_answer, marked_answer
from atomrl.rewards.table import says_right
from atomrl.types import Ended, Trajectory, by_group

ANSWER = re.compile(r"</answer>|\\boxed\{[^{}]{0,200}+\}|####\s{0,9}+\S{1,99}+\s")
"""A closed answer. Bounded and possessive, so that a text of a million characters takes linear time."""


class Stopwatch:
    """Seconds by phase: `with watch("gen"): ...` adds to `timing_s/gen`. A phase that hangs is named by it."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with under_way(phase):
                yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, tokens: int) -> dict[str, float]:
        """`timing_s/*`, the step's tokens (prompts and responses) per second of the whole step, and this process's
        memory."""
        total = time.perf_counter() - self.started
        phases = {f"timing_s/{phase}": seconds for phase, seconds in self.phases.items()}
        speed = {
            "timing_s/step": total,
            "perf/total_num_tokens": float(tokens),
            "perf/throughput": tokens / total,
        }
        return phases | speed | values(memory_metrics())


def rollout_metrics(
    trajectories: Sequence[Trajectory], batch: AdvantageBatch, stops: Collection[int] = ()
) -> dict[str, float]:
    """Rewards, groups and lengths of all that a step drew, and the advantages of what it trains on.

    Args:
        trajectories: also those of groups that the algorithm refused.
        batch: the rows that were made of them.
        stops: the tokens that end a completion.
    """
    drawn = list(by_group(trajectories).values())
    groups = [given for group in drawn if (given := [t.earned for t in group if t.earned is not None])]
    scores = [reward for group in groups for reward in group]
    metrics = spread("critic/score", scores) | _part_metrics(trajectories)
    if any(len(group) > 1 for group in groups):
        equal = [group[0] for group in groups if min(group) == max(group)]
        metrics["by_group/frac_mixed"] = 1 - len(equal) / len(groups)
        metrics["by_group/frac_all_good"] = sum(reward > 0 for reward in equal) / len(groups)
        metrics["by_group/frac_all_bad"] = sum(reward <= 0 for reward in equal) / len(groups)
        several = [group for group in drawn if len(group) > 1]
        metrics["by_group/frac_identical"] = sum(len({t.text for t in g}) == 1 for g in several) / len(several)
    total = max(1, len(trajectories))
    metrics |= failure_counts(trajectories) | length_correlation(trajectories) | episode_metrics(trajectories, batch)
    metrics |= text_metrics(trajectories)
    metrics["reward/missing"] = float(len(trajectories) - len(scores))
    metrics["reward/missing_ratio"] = 1 - len(scores) / total
    metrics |= spread("response_length", (item.response_tokens for item in trajectories))
    metrics["response_length/clip_ratio"] = sum(item.finish_reason == "length" for item in trajectories) / total
    metrics["response_length/ran_on_ratio"] = sum(runs_on(item, stops) for item in trajectories) / total
    metrics |= spread("prompt_length", (group[0].prompt_tokens for group in drawn))
    metrics["train/rows"] = float(batch.rows)
    metrics["train/cut_rows"] = 0.0 if batch.cut is None else float(batch.cut.sum())
    if batch.loss_mask.any():
        metrics |= spread("critic/advantages", batch.advantages[batch.loss_mask].tolist())
        metrics |= critic_metrics(batch)
    return metrics


def _part_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of every part of the reward; accuracy is the share of the first that is at least 1, where that says
    what is right (`rewards.table.says_right`)."""
    parts: dict[str, list[float]] = defaultdict(list)
    for item in trajectories:
        for name, value in item.reward_parts.items():
            parts[name] += [] if value is None else [value]
    metrics = {f"reward/{name}/mean": sum(given) / len(given) for name, given in parts.items() if given}
    first = first_values(trajectories)
    values = [value for given in first.values() for value in given]
    if not values or not says_right(first):
        return metrics
    return metrics | {"train/accuracy": sum(value >= 1.0 for value in values) / len(values)}


def critic_metrics(batch: AdvantageBatch) -> dict[str, float]:
    """What a critic expected at the start of the step, what came, and how much of its variance was expected."""
    if batch.returns is None or batch.values is None:
        return {}
    expected, came = (item[batch.loss_mask].double() for item in (batch.values, batch.returns))
    metrics = spread("critic/values", expected.tolist()) | spread("critic/returns", came.tolist())
    variance = came.var(correction=0).item()
    if variance > 1e-8:  # returns that are all the same, but for rounding, leave nothing to explain
        metrics["critic/vf_explained_var"] = 1 - (came - expected).var(correction=0).item() / variance
    return metrics


def runs_on(trajectory: Trajectory, stops: Collection[int]) -> bool:
    """Whether a completion was cut at the limit although it had come to an end before: one of the tokens that end
    completions inside it, or an answer that is closed with eight characters or more behind it."""
    segments = trajectory.segments
    if trajectory.finish_reason != "length" or any(segment.origin == "environment" for segment in segments):
        return False
    tokens = [token for segment in segments if segment.origin == "model" for token in segment.token_ids]
    if any(token in stops for token in tokens[:-1]):
        return True
    end = answer_end(trajectory.text)
    return end is not None and len(trajectory.text) - end >= 8


def answer_end(text: str) -> int | None:
    """Where the first answer is closed: `</answer>`, `\\boxed{}` or `#### 18`.

    Example:
        >>> answer_end("so #### 18 and on"), answer_end("####" * 1000)
        (11, None)
    """
    match = ANSWER.search(text)
    return match.end() if match else None


def length_correlation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Correlation of reward and length within groups, and the same among completions of a group that are equally
    correct (the first part judges), where a reward that is fair to length has none. Nothing where all earn the same.

    Rewards may count tokens or characters: of the two correlations the one further from 0 counts.
    """
    groups: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    alike: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    for item in trajectories:
        part = next(iter(item.reward_parts.values()), None)
        if item.earned is not None and part is not None:
            numbers = float(item.response_tokens), float(len(item.text)), item.earned
            groups[item.prompt_id].append(numbers)
            alike[item.prompt_id, part >= 1.0].append(numbers)
    found = {}
    for name, chosen in (("", groups), ("_equally_correct", alike)):
        measured = ([[(n[at], n[2]) for n in group] for group in chosen.values()] for at in (0, 1))
        if known := [value for pairs in measured if (value := correlation_within(pairs)) is not None]:
            found[f"reward/length_correlation{name}"] = max(known, key=abs)
    return found


def correlation_within(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Of x and y, each from its group's mean; None where one of them does not vary.

    Example:
        >>> correlation_within([[(1.0, 0.0), (2.0, 1.0)], [(7.0, 5.0), (9.0, 7.0)]])
        1.0
    """
    pairs = [torch.tensor(group, dtype=torch.float64) for group in groups]
    centred = torch.cat([torch.zeros(0, 2, dtype=torch.float64), *(pair - pair.mean(0) for pair in pairs)])
    (xx, xy), (_, yy) = (centred.T @ centred).tolist()
    return xy / (xx * yy) ** 0.5 if xx * yy > 1e-12 else None


def update_metrics(results: Sequence[Metrics]) -> dict[str, float]:
    """The mean over the updates of a step; for a maximum, the maximum, and for a count, the sum. A mean of nothing (an
    update without a token) does not count.

    Example:
        >>> update_metrics([{"lr": Mean(0.1), "actor/skipped_updates": Count()}, {"lr": Mean(0.3)}])
        {'lr': 0.2, 'actor/skipped_updates': 1.0, 'training/updates': 2.0}
    """
    merged = merge(
        {
            name: metric if isinstance(metric, Max | Count) else Mean(metric.value)
            for name, metric in result.items()
            if not (isinstance(metric, Mean) and metric.weight == 0)
        }
        for result in fetched(results)
    )
    return values(merged) | {"training/updates": float(len(results))}


# --------------------------------------------------------------------------------------------------------------------
# Metrics of episodes: what an environment said, how long it took, and how episodes ended.


def episode_metrics(trajectories: Sequence[Trajectory], batch: RowBatch) -> dict[str, float]:
    """`environment/...` of all that a step drew, and `train/reply_tokens`, which must be 0; nothing where no trajectory
    is an episode.

    Args:
        trajectories: also those that are not trained on.
        batch: the rows that were made of them.

    Example:
        >>> from tests.pool.made import group, rich_episode
        >>> from dataclasses import replace
        >>> from atomrl.data.rows import to_rows
        >>> one, other = group(1)
        >>> found = episode_metrics([replace(one, episode=rich_episode()), other], to_rows([other]))
        >>> found["environment/turns/mean"], found["environment/replies/search"], found["environment/ended/failed"]
        (2.0, 1.0, 1.0)
    """
    episodes = [(item, item.episode) for item in trajectories if item.episode is not None]
    if not episodes:
        return {}
    count = len(episodes)
    turns = [turn for _, episode in episodes for turn in episode.turns]
    metrics = spread("environment/turns", (len(episode.turns) for _, episode in episodes))
    labels = [label for turn in turns for label in turn.labels]
    metrics["environment/replies"] = len(labels) / count
    for label, number in sorted(Counter(filter(None, labels)).items()):
        metrics[f"environment/replies/{label}"] = number / count
    seconds = [turn.seconds for turn in turns] or [0.0]
    metrics["environment/seconds/mean"] = sum(seconds) / len(seconds)
    metrics["environment/seconds/max"] = max(seconds)
    metrics["environment/turn_rewards"] = sum(turn.reward or 0.0 for turn in turns) / count
    dropped = (episode.turns[-1].sees_from for _, episode in episodes if episode.turns)
    metrics["environment/dropped_turns"] = sum(dropped) / count
    written = sum(item.response_tokens for item, _ in episodes)
    said = sum(len(part.token_ids) for item, _ in episodes for part in item.segments if part.origin == "environment")
    metrics["environment/token_share"] = said / max(1, written)
    ends = Counter(episode.ended for _, episode in episodes)
    metrics |= {f"environment/ended/{kind}": ends[kind] / count for kind in get_args(Ended)}
    if batch.turn_ids is not None:
        metrics["train/reply_tokens"] = float((batch.loss_mask & (batch.turn_ids < 0)).sum())
    return metrics


# --------------------------------------------------------------------------------------------------------------------
# Metrics of completions as texts, by which the doctor knows a hacked reward: repetition, one text for all prompts, a
# copied prompt, a list of answers, no answer; a word that decides the reward; and what right and wrong answers earn.
#
# All are computed from texts and rewards alone, whatever the reward function is. A property that the ground truth
# itself has (a task of copying, of listing) does not count. Episodes of several turns are left out.

WINDOW, LEAST, SHARE, LOOKED_AT = 8, 32, 0.35, 2000
"""A text of LEAST characters or more is repetition where at most SHARE of its windows of WINDOW characters differ. The
last LOOKED_AT characters count."""
COPIED = 0.7
"""A text of LEAST characters or more is an echo where so many of its windows stand in the prompt: more than what a
solution has that begins with the question."""
SEVERAL = 3
"""Different answers make a list that hedges: two may be a correction."""
MIXED, VARIED, JUDGED = 4, 0.1, 4
"""The correlation of a word and the reward needs MIXED groups in which both vary, so that chance makes none, and a word
that at least VARIED of their completions have, and lack. Rewards of right and wrong answers need JUDGED of each."""


def repeats(text: str) -> bool:
    """Whether a text is mostly one piece over and over.

    Example:
        >>> repeats("Max. " * 8), repeats("7-3=4+9=13, and 13 times 7 is 91, so the last digit is 1.")
        (True, False)
    """
    windows = _windows(text)
    return len(windows) > LEAST - WINDOW and len(set(windows)) <= SHARE * len(windows)


def echoes(text: str, prompt: str) -> bool:
    """Whether a text is mostly copied from its prompt.

    Example:
        >>> asked = "Natalia sold clips to 48 of her friends in April. How many clips did she sell?"
        >>> echoes(asked[:50], asked), echoes("She sold clips to 48 friends, so that is 48.", asked)
        (True, False)
    """
    windows = _windows(text)
    return len(windows) > LEAST - WINDOW and sum(map(_asked(prompt).__contains__, windows)) >= COPIED * len(windows)


def hedges(text: str, truth: str, known: frozenset[str] = frozenset()) -> bool:
    """Whether the answer of a text is a list of different answers with the truth among them.

    Answers are numbers, and what is the truth of other prompts. The list is what is marked as answer (all `<answer>`
    and `\\boxed{}` of a text), without a mark the last line.

    Args:
        truth: one answer; of a truth that is a list itself no text hedges.
        known: normalised truths of other prompts.

    Example:
        >>> hedges("<answer>1, 2, 3 or 4</answer>", "3"), hedges("3 + 1 = 4", "4"), hedges("so 1, 2, 3", "1, 2, 3")
        (True, False, False)
        >>> hedges("maybe yes or no or maybe", "no", frozenset({"yes", "no", "maybe"}))
        True
    """
    text = text[-LOOKED_AT:]
    # without an <answer> within, so that many that are never closed are read once each
    marked = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>|\\boxed\{([^{}]*)\}", text, re.DOTALL)
    lines = text.rpartition("</think>")[2].strip().splitlines() or [""]
    items = _items(" ".join(map("".join, marked)) if marked else lines[-1])
    wanted = _items(truth)
    if len(wanted) != 1 or wanted[0] not in items:
        return False
    answers = [item for item in items if item in known or item == wanted[0] or re.fullmatch(r"-?\d[\d.,/]*", item)]
    return len(set(answers)) >= SEVERAL and len(answers) >= 0.8 * len(items)


def is_empty(text: str) -> bool:
    """Whether a text has no answer: nothing but white space, or an answer that is marked and empty.

    Example:
        >>> is_empty(" "), is_empty("<think>hm</think><answer></answer>"), is_empty("4")
        (True, True, False)
    """
    return not text.strip() or marked_answer(text) == ""


def is_right(text: str, truth: Any) -> bool | None:
    """Whether a text answers with its ground truth, whatever the reward says; None where that cannot be read.

    Of what `extract_answer` finds all is compared, and its last number; words of the truth may stand among others. So a
    grader that is more lenient than this one, or a judge, finds few answers right that this calls wrong.

    Example:
        >>> is_right("<answer>18 dollars</answer>", "18"), is_right("Yes, it is.", "yes"), is_right("18", None)
        (True, True, None)
    """
    answer = extract_answer(text)
    tried = [answer, *re.findall(r"-?\d+(?:[.,/]\d+)*", answer)[-1:]]
    try:
        return any(
            answers_equal(one, wanted) or (parse_number(str(wanted)) is None and _has_words(answer, str(wanted)))
            for wanted in (truth if isinstance(truth, list | tuple) else [truth])
            for one in tried
        )
    except (TypeError, ValueError):
        return None


def _has_words(text: str, wanted: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(normalise_text(wanted))}(?!\w)", normalise_text(text)) is not None


def text_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of completions by what they are as texts, each with the mean reward of these (`NAME_reward`).

    Returns:
        `text/repetition`, `text/echo`, `text/hedge`, `text/empty`; `text/same` of the most common text where several
        prompts have it and it is right for less than half of them; `text/right` with `text/right_reward` and
        `text/wrong_reward` where answers can be compared with the ground truth; `text/word_correlation` and
        `text/word_share` of the word that the reward goes with most (`word_correlations`); `text/best_wrong`, the share
        of wrong answers among the best paid.
    """
    single = [item for item in trajectories if item.episode is None]
    if not single:
        return {}
    truths = {group: _text(items[0].sample.ground_truth) for group, items in by_group(single).items()}
    known = frozenset(normalise_text(truth) for truth in set(truths.values()) if 0 < len(truth) <= 100)
    prompts = {group: _prompt(items[0]) for group, items in by_group(single).items()}

    def kinds(text: str, group: str) -> set[str]:
        held = {
            "repetition": repeats(text),
            "echo": echoes(text, prompts[group]),
            "hedge": hedges(text, truths[group], known),
            "empty": is_empty(text),
        }
        return {name for name, holds in held.items() if holds}

    fair = {group: kinds(truth, group) if truth else set() for group, truth in truths.items()}
    held = [kinds(item.text, item.prompt_id) - fair[item.prompt_id] for item in single]
    found: dict[str, float] = {}
    for name in ("repetition", "echo", "hedge", "empty"):
        found |= _group(
            f"text/{name}", [item for item, names in zip(single, held, strict=True) if name in names], len(single)
        )
    right = {id(item): is_right(item.turn, item.sample.ground_truth) for item in single}
    if len(truths) > 1:
        text, _ = Counter(item.text for item in single).most_common(1)[0]
        same = [item for item in single if item.text == text]
        apt = sum(bool(right[id(item)]) for item in same) >= 0.5 * len(same)
        found |= _group("text/same", same if len(by_group(same)) > 1 and not apt else [], len(single))
    return found | _judged(single, right) | _words(single)


def word_correlations(trajectories: Sequence[Trajectory]) -> dict[str, tuple[float, float]]:
    """(Correlation within groups of the reward and of having a word, the share of completions that have it), by word;
    of words that are common, and lacking, often enough.

    A word of the group's ground truth does not count: that it is paid is as it should be.

    Example:
        >>> word_correlations([])
        {}
    """
    scored = [item for item in trajectories if item.earned is not None]
    groups = [items for items in by_group(scored).values() if len({item.earned for item in items}) > 1]
    products, counts, spreads = defaultdict[str, float](float), Counter[str](), defaultdict[str, float](float)
    varied, total, square = Counter[str](), 0, 0.0
    for items in groups:
        mean = fmean(item.earned or 0.0 for item in items)
        own = set(_word_list(_text(items[0].sample.ground_truth)))
        having, sums = Counter[str](), defaultdict[str, float](float)
        for item in items:
            centred = (item.earned or 0.0) - mean
            square += centred**2
            for word in set(_word_list(item.text[-LOOKED_AT:])) - own:
                having[word] += 1
                sums[word] += centred
        total += len(items)
        for word, count in having.items():
            counts[word] += count
            products[word] += sums[word]
            spreads[word] += count - count**2 / len(items)
            varied[word] += count < len(items)
    return {
        word: (products[word] / (square * spreads[word]) ** 0.5, count / total)
        for word, count in counts.items()
        if varied[word] >= MIXED and VARIED * total <= count <= (1 - VARIED) * total and square > 1e-12
    }


def _words(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    found = word_correlations(trajectories)
    if not found:
        return {}
    correlation, share = max(found.values())
    return {"text/word_correlation": correlation, "text/word_share": share}


def _judged(trajectories: Sequence[Trajectory], right: Mapping[int, bool | None]) -> dict[str, float]:
    """Mean rewards of right and of wrong answers, and the share of the best paid that are wrong."""
    judged = [(item.earned, right[id(item)]) for item in trajectories if item.earned is not None]
    if not judged or any(correct is None for _, correct in judged) or not any(correct for _, correct in judged):
        return {}
    best = max(earned for earned, _ in judged)
    top = [correct for earned, correct in judged if earned >= best - 1e-9]
    found = {"text/right": fmean(bool(correct) for _, correct in judged)}
    found["text/best_wrong"] = fmean(not correct for correct in top)
    given = {
        name: [earned for earned, ok in judged if ok is wanted] for name, wanted in (("right", True), ("wrong", False))
    }
    if min(map(len, given.values())) >= JUDGED:
        found |= {f"text/{name}_reward": fmean(values) for name, values in given.items()}
    return found


def _group(name: str, chosen: Sequence[Trajectory], total: int) -> dict[str, float]:
    earned = [item.earned for item in chosen if item.earned is not None]
    return {name: len(chosen) / total} | ({f"{name}_reward": fmean(earned)} if earned else {})


@lru_cache(maxsize=2)  # repetition and echo ask after the same text
def _windows(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", text[-LOOKED_AT:]).strip()
    return [text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1)]


@lru_cache(maxsize=8)  # completions of a group ask after the same prompt
def _asked(prompt: str) -> frozenset[str]:
    prompt = re.sub(r"\s+", " ", prompt)
    return frozenset(prompt[at : at + WINDOW] for at in range(len(prompt) - WINDOW + 1))


def _items(text: str) -> list[str]:
    """Split a list into its normalised items, without the words between them."""
    parts = re.split(r"[\s,;/|]+", re.sub(r"\b(?:or|and)\b", " ", text, flags=re.IGNORECASE))
    return [item for part in parts if (item := normalise_text(part).strip(".:()[]"))]


def _word_list(text: str) -> list[str]:
    """Words in lower case; of Chinese and Japanese each character."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text.lower())


def _text(truth: Any) -> str:
    return truth if isinstance(truth, str) else str(truth) if isinstance(truth, int | float) else ""


def _prompt(item: Trajectory) -> str:
    prompt = item.sample.prompt
    return prompt if isinstance(prompt, str) else "\n".join(str(turn["content"]) for turn in prompt)


# --------------------------------------------------------------------------------------------------------------------
# Which groups of a step have their tokens recorded, and what is recorded of them.

NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}
"""Of a record: no token id and no number of a step needs more."""
LEFT_OUT = {"tokens", "recorded", "candidates", "state"}
"""Fields of a batch that are not kept as they are."""


def marked(rows: RowBatch, wanted: float) -> RowBatch:
    """The rows, with those of whole groups marked as recorded: below 1 of a share of all prompts, which are the same
    ones in every step; from 1 on of so many groups, before others those whose rewards differ, as no token of another
    moves the weights by its reward. Prompts are chosen by a hash of their tokens.

    Example:
        >>> from tests.algorithms.batches import make_rows
        >>> marked(make_rows(groups=3), 1).recorded.tolist().count(-1)
        8
    """
    if not wanted or not rows.rows:
        return rows
    first: dict[int, float] = {}
    rewards: dict[int, set[float]] = {}
    for index, (group, reward) in enumerate(zip(rows.group_ids.tolist(), rows.rewards.tolist(), strict=True)):
        rewards.setdefault(group, set()).add(reward)
        if group not in first:
            prompt = rows.tokens[index, : int(rows.prompt_lengths[index])].tolist()
            digest = blake2b(repr(prompt).encode(), digest_size=8).digest()
            first[group] = int.from_bytes(digest) / 2**64
    lowest = sorted(first, key=lambda group: (len(rewards[group]) == 1, first[group]))
    chosen = [group for group in lowest if first[group] < wanted] if wanted < 1 else lowest[: int(wanted)]
    mine = torch.isin(rows.group_ids, torch.tensor(chosen, dtype=torch.long))
    return replace(rows, recorded=(mine.cumsum(0) - 1).masked_fill(~mine, -1)) if chosen else rows


class TokenRecord:
    """The tokens of the recorded rows of a step, each as the last update that it was in saw it.

    Attributes:
        state: of the algorithm in that update, by name (an adaptive KL coefficient).
    """

    def __init__(self) -> None:
        self.state: dict[str, float] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._tokens: dict[str, list[Tensor]] = {}
        self._prompts: dict[tuple[int, ...], int] = {}
        self._seen: set[int] = set()
        self._updates = 0

    def add(self, part: TrainingBatch, numbers: Mapping[str, Tensor]) -> None:
        """What there is of an update.

        Args:
            part: its rows.
            numbers: of the back end (`protocols.TrainingBackend.token_numbers`).
        """
        update, self._updates = self._updates, self._updates + 1
        if part.recorded is None or not bool((part.recorded >= 0).any()):
            return
        batch = select_rows(part, (part.recorded >= 0).nonzero()[:, 0])
        assert batch.recorded is not None
        if self._seen & set(batch.recorded.tolist()):  # the next pass over the rows
            self._rows, self._tokens, self._seen = {}, {}, set()
        self._seen |= set(batch.recorded.tolist())
        self.state = dict(batch.state)
        columns = torch.arange(batch.tokens.shape[1])
        inside = (columns >= batch.prompt_lengths[:, None]) & (columns < batch.lengths[:, None])
        found = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name not in LEFT_OUT}
        found |= {name: values[batch.recorded, : len(columns)] for name, values in numbers.items()}
        if batch.rollout_logprobs is not None and (old := found["old_logprobs"]) is not None:
            found["gap"] = (old - batch.rollout_logprobs) * batch.loss_mask
        elif batch.rollout_logprobs is not None and "logprobs" in found:
            found["gap"] = (found["logprobs"] - batch.rollout_logprobs) * batch.loss_mask
        if "clipped" in found:
            found["clipped"] = found["clipped"] > 0
        found |= {"tokens": batch.tokens, "update": torch.full((batch.rows,), update)}
        found["prompt"] = torch.tensor([self._prompt(batch, row) for row in range(batch.rows)])
        for name, column in found.items():
            if isinstance(column, Tensor):
                by_token = column.shape == inside.shape
                kept = column[inside] if by_token else column
                table = self._tokens if by_token else self._rows
                table.setdefault(name, []).append(kept.to(NARROW.get(kept.dtype, kept.dtype)))

    def _prompt(self, batch: TrainingBatch, row: int) -> int:
        """The number of a row's prompt, which is kept once."""
        prompt = tuple(batch.tokens[row, : int(batch.prompt_lengths[row])].tolist())
        return self._prompts.setdefault(prompt, len(self._prompts))

    def tensors(self) -> dict[str, Tensor]:
        """As a file has them: `row/NAME` [R, ...] and `token/NAME` [N], the tokens after the prompt row by row;
        `prompt_tokens` of all prompts, and how many are of each. Nothing where nothing is recorded."""
        if not self._rows:
            return {}
        found = {f"row/{name}": torch.cat(parts) for name, parts in self._rows.items()}
        found |= {f"token/{name}": torch.cat(parts) for name, parts in self._tokens.items()}
        found["prompt_tokens"] = torch.tensor([t for prompt in self._prompts for t in prompt], dtype=torch.int32)
        found["prompt_sizes"] = torch.tensor([len(prompt) for prompt in self._prompts], dtype=torch.int32)
        return found
