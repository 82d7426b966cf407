"""Metrics of a step under verl's names, and the tokens that a step records.

`rollout_metrics` covers rewards, groups and lengths, with `episode_metrics` and `text_metrics`; `update_metrics` merges
those of the updates; `Stopwatch` times phases; `TokenRecord` collects per-token values.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from statistics import fmean
from typing import Any, get_args

import torch
from torch import Tensor

from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch, flat_fields, select_rows
from atomrl.common.hangs import phase as name_phase
from atomrl.common.metrics import Count, Max, Mean, Metrics, fetch, mean_max_min, merge, values
from atomrl.data.rows import by_group
from atomrl.models.memory import memory_metrics
from atomrl.rewards.answers import answers_equal, normalise_text, parse_number
from atomrl.rewards.compute import failure_counts
from atomrl.rewards.format import extract_answer, marked_answer
from atomrl.types import Ended, Trajectory

ANSWER = re.compile(r"</answer>|\\boxed\{[^{}]{0,200}+\}|####\s{0,9}+\S{1,99}+\s")
"""Matches the end of an answer. Bounded and possessive, so that a text of a million characters takes linear time."""


class Stopwatch:
    """Measure seconds by phase: `with watch("gen"): ...` adds to `timing_s/gen`.

    The phase is also reported to the watchdog, which names it if it hangs.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with name_phase(phase):
                yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return `timing_s/*`, throughput, and the memory of this process.

        Args:
            tokens: tokens of the step's prompts and responses.
        """
        total = time.perf_counter() - self.started
        phases = {f"timing_s/{phase}": seconds for phase, seconds in self.phases.items()}
        speed = {
            "timing_s/step": total,
            "perf/total_num_tokens": float(tokens),
            "perf/throughput": tokens / total,
        }
        return phases | speed | values(memory_metrics())


def rollout_metrics(
    trajectories: Sequence[Trajectory], batch: AdvantageBatch, stops: Collection[int] = (), says_right: bool = True
) -> dict[str, float]:
    """Compute metrics of rewards, groups and lengths of a step's rollouts, and of the advantages that are trained on.

    Args:
        trajectories: all of the step, including groups that the algorithm filtered out.
        batch: the rows that are trained on.
        stops: ids of the tokens that end a completion.
        says_right: the first reward grades answers as right or wrong (`Rewards.says_right`).
    """
    sampled = list(by_group(trajectories).values())
    groups = [
        rewards for group in sampled if (rewards := [t.total_reward for t in group if t.total_reward is not None])
    ]
    scores = [reward for group in groups for reward in group]
    metrics = mean_max_min("critic/score", scores) | _part_metrics(trajectories, says_right)
    if any(len(group) > 1 for group in groups):
        equal = [group[0] for group in groups if min(group) == max(group)]
        metrics["by_group/frac_mixed"] = 1 - len(equal) / len(groups)
        metrics["by_group/frac_all_good"] = sum(reward > 0 for reward in equal) / len(groups)
        metrics["by_group/frac_all_bad"] = sum(reward <= 0 for reward in equal) / len(groups)
        several = [group for group in sampled if len(group) > 1]
        metrics["by_group/frac_identical"] = sum(len({t.text for t in g}) == 1 for g in several) / len(several)
    total = max(1, len(trajectories))
    metrics |= failure_counts(trajectories) | length_correlation(trajectories) | episode_metrics(trajectories, batch)
    metrics |= text_metrics(trajectories)
    metrics["reward/missing"] = float(len(trajectories) - len(scores))
    metrics["reward/missing_ratio"] = 1 - len(scores) / total
    metrics |= mean_max_min("response_length", (item.response_tokens for item in trajectories))
    metrics["response_length/clip_ratio"] = sum(item.finish_reason == "length" for item in trajectories) / total
    metrics["response_length/ran_on_ratio"] = sum(runs_on(item, stops) for item in trajectories) / total
    metrics |= mean_max_min("prompt_length", (group[0].prompt_tokens for group in sampled))
    metrics["train/rows"] = float(batch.rows)
    metrics["train/cut_rows"] = 0.0 if batch.cut is None else float(batch.cut.sum())
    if batch.loss_mask.any():
        metrics |= mean_max_min("critic/advantages", batch.advantages[batch.loss_mask].tolist())
        metrics |= critic_metrics(batch)
    return metrics


def _part_metrics(trajectories: Sequence[Trajectory], says_right: bool) -> dict[str, float]:
    """Compute the mean of each part of the reward, and `train/accuracy`: the share of values of the first part that are
    1.0 or more, if these grade answers as right or wrong."""
    parts: dict[str, list[float]] = defaultdict(list)
    for item in trajectories:
        for name, value in item.reward_parts.items():
            parts[name] += [] if value is None else [value]
    metrics = {f"reward/{name}/mean": sum(numbers) / len(numbers) for name, numbers in parts.items() if numbers}
    if says_right and (first := next(iter(parts.values()), [])):
        metrics["train/accuracy"] = sum(value >= 1.0 for value in first) / len(first)
    return metrics


def critic_metrics(batch: AdvantageBatch) -> dict[str, float]:
    """Compute metrics of the critic's values and returns, and the explained variance; empty without a critic."""
    if batch.returns is None or batch.values is None:
        return {}
    predicted, returns = (item[batch.loss_mask].double() for item in (batch.values, batch.returns))
    metrics = mean_max_min("critic/values", predicted.tolist()) | mean_max_min("critic/returns", returns.tolist())
    variance = returns.var(correction=0).item()
    if variance > 1e-8:  # with equal returns, up to rounding, the variance is 0
        metrics["critic/vf_explained_var"] = 1 - (returns - predicted).var(correction=0).item() / variance
    return metrics


def runs_on(trajectory: Trajectory, stops: Collection[int]) -> bool:
    """Return whether a completion was cut at the length limit although it had already ended.

    It has an inner stop token, or eight or more characters after the end of its first answer (`answer_end`).
    """
    segments = trajectory.segments
    if trajectory.finish_reason != "length" or any(segment.origin == "environment" for segment in segments):
        return False
    tokens = [token for segment in segments if segment.origin == "model" for token in segment.token_ids]
    if any(token in stops for token in tokens[:-1]):
        return True
    end = answer_end(trajectory.text)
    return end is not None and len(trajectory.text) - end >= 8


def answer_end(text: str) -> int | None:
    """Return the offset of the end of the first answer: `</answer>`, `\\boxed{}` or `#### 18`; None if there is none.

    Example:
        >>> answer_end("so #### 18 and on"), answer_end("####" * 1000)
        (11, None)
    """
    match = ANSWER.search(text)
    return match.end() if match else None


def length_correlation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the correlation of reward and length within groups.

    `reward/length_correlation_equally_correct` is the same among completions of a group that the first part of the
    reward grades alike; it is 0 for a reward that does not depend on length. Metrics are left out if rewards or lengths
    do not vary.

    A reward may count tokens or characters: the metric is the correlation with the larger absolute value.
    """
    groups: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    equally_correct: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    for item in trajectories:
        part = next(iter(item.reward_parts.values()), None)
        if item.total_reward is not None and part is not None:
            numbers = float(item.response_tokens), float(len(item.text)), item.total_reward
            groups[item.prompt_id].append(numbers)
            equally_correct[item.prompt_id, part >= 1.0].append(numbers)
    metrics = {}
    for name, members in (("", groups), ("_equally_correct", equally_correct)):
        by_unit = ([[(n[unit], n[2]) for n in group] for group in members.values()] for unit in (0, 1))
        if correlations := [value for pairs in by_unit if (value := correlation_within(pairs)) is not None]:
            metrics[f"reward/length_correlation{name}"] = max(correlations, key=abs)
    return metrics


def correlation_within(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Compute the correlation of x and y after subtracting the mean of each group; None if x or y does not vary.

    Example:
        >>> correlation_within([[(1.0, 0.0), (2.0, 1.0)], [(7.0, 5.0), (9.0, 7.0)]])
        1.0
    """
    pairs = [torch.tensor(group, dtype=torch.float64) for group in groups]
    centred = torch.cat([torch.zeros(0, 2, dtype=torch.float64), *(pair - pair.mean(0) for pair in pairs)])
    (xx, xy), (_, yy) = (centred.T @ centred).tolist()
    return xy / (xx * yy) ** 0.5 if xx * yy > 1e-12 else None


def update_metrics(results: Sequence[Metrics]) -> dict[str, float]:
    """Merge the metrics of a step's updates: the mean, the maximum of a `Max`, and the sum of a `Count`.

    Means of weight 0 (an update without tokens) are left out.

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
        for result in fetch(results)
    )
    return values(merged) | {"training/updates": float(len(results))}


def why_no_update(rows: Iterable[Mapping[str, Any]]) -> str:
    """Count the reasons for which the steps of a run without an update made none.

    Args:
        rows: the run's `metrics.jsonl`.

    Example:
        >>> why_no_update([{"training/updates": 2.0, "actor/empty_updates": 2.0}, {"training/updates": 0.0}])
        '2 updates had a gradient of 0, 1 step had no rows to train on'
    """
    rows = list(rows)
    reasons = {
        "update{} had a gradient of 0": sum(row.get("actor/empty_updates") or 0 for row in rows),
        "update{} had a non-finite gradient": sum(row.get("actor/skipped_updates") or 0 for row in rows),
        "step{} had no rows to train on": sum(not row.get("training/updates") for row in rows),
    }
    return ", ".join(f"{count:.0f} {text.format('s' * (count != 1))}" for text, count in reasons.items() if count)


# --------------------------------------------------------------------------------------------------------------------
# Metrics of episodes: the environment's replies, their time, and how episodes ended.


def episode_metrics(trajectories: Sequence[Trajectory], batch: RowBatch) -> dict[str, float]:
    """Compute `environment/...` of a step's episodes; empty if there are none.

    `train/reply_tokens` counts tokens of the environment in the loss mask. It must be 0.

    Args:
        trajectories: all of the step, including those that are not trained on.
        batch: the rows that are trained on.

    Example:
        >>> from atomrl.data.rows import to_rows
        >>> from atomrl.types import Episode, Problem, Segment, Trajectory, Turn
        >>> turns = (Turn(model_tokens=2, reply_tokens=1, labels=("search",)), Turn(model_tokens=1))
        >>> parts = [("prompt", (1,)), ("model", (2, 3)), ("environment", (4,)), ("model", (5,))]
        >>> item = Trajectory(
        ...     prompt_id="0:a", index=0, problem=Problem(problem_id="a", prompt="Who?", ground_truth="me"), text="",
        ...     segments=tuple(Segment(origin=origin, token_ids=ids) for origin, ids in parts),
        ...     finish_reason="stop", reward=1.0, episode=Episode(turns=turns, ended="stop"),
        ... )
        >>> metrics = episode_metrics([item], to_rows([item]))
        >>> [metrics[f"environment/{name}"] for name in ("turns/mean", "replies/search", "token_share")]
        [2.0, 1.0, 0.25]
    """
    episodes = [(item, item.episode) for item in trajectories if item.episode is not None]
    if not episodes:
        return {}
    count = len(episodes)
    turns = [turn for _, episode in episodes for turn in episode.turns]
    metrics = mean_max_min("environment/turns", (len(episode.turns) for _, episode in episodes))
    labels = [label for turn in turns for label in turn.labels]
    metrics["environment/replies"] = len(labels) / count
    for label, number in sorted(Counter(filter(None, labels)).items()):
        metrics[f"environment/replies/{label}"] = number / count
    seconds = [turn.seconds for turn in turns] or [0.0]
    metrics["perf/environment_seconds/mean"] = sum(seconds) / len(seconds)
    metrics["perf/environment_seconds/max"] = max(seconds)
    metrics["environment/turn_rewards"] = sum(turn.reward or 0.0 for turn in turns) / count
    dropped = (episode.turns[-1].sees_from for _, episode in episodes if episode.turns)
    metrics["environment/dropped_turns"] = sum(dropped) / count
    tokens = sum(item.response_tokens for item, _ in episodes)
    replies = sum(len(part.token_ids) for item, _ in episodes for part in item.segments if part.origin == "environment")
    metrics["environment/token_share"] = replies / max(1, tokens)
    ends = Counter(episode.ended for _, episode in episodes)
    metrics |= {f"environment/ended/{kind}": ends[kind] / count for kind in get_args(Ended)}
    if batch.rollout.turn_ids is not None:
        metrics["train/reply_tokens"] = float((batch.loss_mask & (batch.rollout.turn_ids < 0)).sum())
    return metrics


# --------------------------------------------------------------------------------------------------------------------
# Metrics of completions as texts, from which `atomrl doctor` detects reward hacking: repetition, one text for all
# prompts, a copied prompt, a list of answers, no answer, a word that decides the reward, rewards of wrong answers.
#
# They are computed from texts and rewards alone, for any reward function. A property that the ground truth itself has
# (in a task of copying or listing) does not count. Episodes are left out.

WINDOW, LEAST, SHARE, MAX_CHARACTERS = 8, 32, 0.35, 2000
"""A text of LEAST or more characters is repetitive if at most SHARE of its windows of WINDOW characters are distinct.
Only the last MAX_CHARACTERS of a text are read."""
COPIED = 0.7
"""A text of LEAST or more characters is an echo if this share of its windows is in the prompt. A solution that begins
by repeating the question has less."""
SEVERAL = 3
"""Minimum number of different answers that is hedging; two may be a correction."""
MIXED, VARIED, GRADED = 4, 0.1, 4
"""Minimum samples of a metric. The correlation of a word and the reward needs MIXED groups in which both vary, and a
word that at least VARIED of their completions have and at least VARIED lack. Rewards of right and wrong answers need
GRADED completions of each."""


def repeats(text: str) -> bool:
    """Return whether a text mostly repeats one piece.

    Example:
        >>> repeats("Max. " * 8), repeats("7-3=4+9=13, and 13 times 7 is 91, so the last digit is 1.")
        (True, False)
    """
    windows = _windows(text)
    return len(windows) > LEAST - WINDOW and len(set(windows)) <= SHARE * len(windows)


def echoes(text: str, prompt: str) -> bool:
    """Return whether a text is mostly copied from its prompt.

    Example:
        >>> asked = "Natalia sold clips to 48 of her friends in April. How many clips did she sell?"
        >>> echoes(asked[:50], asked), echoes("She sold clips to 48 friends, so that is 48.", asked)
        (True, False)
    """
    windows = _windows(text)
    copied = sum(map(_prompt_windows(prompt).__contains__, windows))
    return len(windows) > LEAST - WINDOW and copied >= COPIED * len(windows)


def hedges(text: str, truth: str, known: frozenset[str] = frozenset()) -> bool:
    """Return whether a text answers with a list of different answers, one of which is right.

    Answers are numbers and the ground truths of other prompts. The list is the content of all `<answer>` and
    `\\boxed{}` of a text; if there are none, its last line.

    Args:
        truth: the ground truth. If it is a list itself, no text hedges.
        known: normalised ground truths of other prompts.

    Example:
        >>> hedges("<answer>1, 2, 3 or 4</answer>", "3"), hedges("3 + 1 = 4", "4"), hedges("so 1, 2, 3", "1, 2, 3")
        (True, False, False)
        >>> hedges("maybe yes or no or maybe", "no", frozenset({"yes", "no", "maybe"}))
        True
    """
    text = text[-MAX_CHARACTERS:]
    # The content has no <answer> in it, so that many unclosed ones take linear time.
    mark_recorded = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>|\\boxed\{([^{}]*)\}", text, re.DOTALL)
    lines = text.rpartition("</think>")[2].strip().splitlines() or [""]
    items = _items(" ".join(map("".join, mark_recorded)) if mark_recorded else lines[-1])
    wanted = _items(truth)
    if len(wanted) != 1 or wanted[0] not in items:
        return False
    answers = [item for item in items if item in known or item == wanted[0] or re.fullmatch(r"-?\d[\d.,/]*", item)]
    return len(set(answers)) >= SEVERAL and len(answers) >= 0.8 * len(items)


def is_empty(text: str) -> bool:
    """Return whether a text has no answer: it is white space, or its marked answer is empty.

    Example:
        >>> is_empty(" "), is_empty("<think>hm</think><answer></answer>"), is_empty("4")
        (True, True, False)
    """
    return not text.strip() or marked_answer(text) == ""


def is_right(text: str, truth: Any) -> bool | None:
    """Return whether a text has the right answer, regardless of its reward; None if the truth cannot be compared.

    The extracted answer is compared as a whole and by its last number; a truth in words may be among other words. This
    is lenient on purpose: a reward function or a judge should accept few answers that are wrong here.

    Example:
        >>> is_right("<answer>18 dollars</answer>", "18"), is_right("Yes, it is.", "yes"), is_right("18", None)
        (True, True, None)
    """
    answer = extract_answer(text)
    candidates = [answer, *re.findall(r"-?\d+(?:[.,/]\d+)*", answer)[-1:]]
    try:
        return any(
            answers_equal(one, accepted) or (parse_number(str(accepted)) is None and _has_words(answer, str(accepted)))
            for accepted in (truth if isinstance(truth, list | tuple) else [truth])
            for one in candidates
        )
    except (TypeError, ValueError):
        return None


def _has_words(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(normalise_text(words))}(?!\w)", normalise_text(text)) is not None


def text_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute shares of completions with properties of reward hacking, and their mean rewards (`NAME_reward`).

    Returns:
        `text/repetition`, `text/echo`, `text/hedge` and `text/empty`.
        `text/same`: share of the most common text, if several prompts have it and it is right for less than half.
        `text/right`, `text/right_reward`, `text/wrong_reward`: share of right answers, and mean rewards, if answers can
        be compared with the ground truth.
        `text/best_wrong`: share of wrong answers among the completions with the highest reward.
        `text/word_correlation`, `text/word_share`: of the word that correlates most with the reward
        (`word_correlations`).
    """
    single = [item for item in trajectories if item.episode is None]
    if not single:
        return {}
    truths = {group: _text(items[0].problem.ground_truth) for group, items in by_group(single).items()}
    known = frozenset(normalise_text(truth) for truth in set(truths.values()) if 0 < len(truth) <= 100)
    prompts = {group: _prompt(items[0]) for group, items in by_group(single).items()}

    def properties(text: str, group: str) -> set[str]:
        holds = {
            "repetition": repeats(text),
            "echo": echoes(text, prompts[group]),
            "hedge": hedges(text, truths[group], known),
            "empty": is_empty(text),
        }
        return {name for name, value in holds.items() if value}

    # A property that the ground truth has too is part of the task.
    expected = {group: properties(truth, group) if truth else set() for group, truth in truths.items()}
    unexpected = [properties(item.text, item.prompt_id) - expected[item.prompt_id] for item in single]
    metrics: dict[str, float] = {}
    for name in ("repetition", "echo", "hedge", "empty"):
        having = [item for item, names in zip(single, unexpected, strict=True) if name in names]
        metrics |= _share(f"text/{name}", having, len(single))
    right = {id(item): is_right(item.turn, item.problem.ground_truth) for item in single}
    if len(truths) > 1:
        text, _ = Counter(item.text for item in single).most_common(1)[0]
        same = [item for item in single if item.text == text]
        often_right = sum(bool(right[id(item)]) for item in same) >= 0.5 * len(same)
        metrics |= _share("text/same", same if len(by_group(same)) > 1 and not often_right else [], len(single))
    if correlations := word_correlations(single):
        metrics["text/word_correlation"], metrics["text/word_share"] = max(correlations.values())
    return metrics | _right_and_wrong(single, right)


def word_correlations(trajectories: Sequence[Trajectory]) -> dict[str, tuple[float, float]]:
    """Compute the correlation of the reward with the presence of each word, within groups.

    Words of a group's ground truth do not count in it: they should be rewarded.

    Returns:
        Word -> (correlation, share of completions with the word), for words that enough completions have and lack
        (`MIXED`, `VARIED`).

    Example:
        >>> word_correlations([])
        {}
    """
    scored = [item for item in trajectories if item.total_reward is not None]
    groups = [items for items in by_group(scored).values() if len({item.total_reward for item in items}) > 1]
    products, counts, spreads = defaultdict[str, float](float), Counter[str](), defaultdict[str, float](float)
    varied, total, square = Counter[str](), 0, 0.0
    # Sums for the Pearson correlation of reward and presence (0 or 1), each centred by its group's mean.
    for items in groups:
        mean = fmean(item.total_reward or 0.0 for item in items)
        truth_words = set(_word_list(_text(items[0].problem.ground_truth)))
        having, sums = Counter[str](), defaultdict[str, float](float)
        for item in items:
            centred = (item.total_reward or 0.0) - mean
            square += centred**2
            for word in set(_word_list(item.text[-MAX_CHARACTERS:])) - truth_words:
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


def _right_and_wrong(trajectories: Sequence[Trajectory], right: Mapping[int, bool | None]) -> dict[str, float]:
    """Compute `text/right`, `text/right_reward`, `text/wrong_reward` and `text/best_wrong`.

    Empty if an answer cannot be compared with the ground truth, or if none is right.

    Args:
        right: id of a trajectory -> result of `is_right`.
    """
    graded = [(item.total_reward, right[id(item)]) for item in trajectories if item.total_reward is not None]
    if not graded or any(correct is None for _, correct in graded) or not any(correct for _, correct in graded):
        return {}
    best = max(reward for reward, _ in graded)
    metrics = {
        "text/right": fmean(bool(correct) for _, correct in graded),
        "text/best_wrong": fmean(not correct for reward, correct in graded if reward >= best - 1e-9),
    }
    rewards = {
        "right": [reward for reward, correct in graded if correct],
        "wrong": [reward for reward, correct in graded if not correct],
    }
    if min(map(len, rewards.values())) >= GRADED:
        metrics |= {f"text/{name}_reward": fmean(values) for name, values in rewards.items()}
    return metrics


def _share(name: str, chosen: Sequence[Trajectory], total: int) -> dict[str, float]:
    """Return the share of completions as `name`, and their mean reward as `name_reward`."""
    rewards = [item.total_reward for item in chosen if item.total_reward is not None]
    return {name: len(chosen) / total} | ({f"{name}_reward": fmean(rewards)} if rewards else {})


@lru_cache(maxsize=2)  # repeats and echoes read the same text
def _windows(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", text[-MAX_CHARACTERS:]).strip()
    return [text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1)]


@lru_cache(maxsize=8)  # shared by the completions of a group
def _prompt_windows(prompt: str) -> frozenset[str]:
    prompt = re.sub(r"\s+", " ", prompt)
    return frozenset(prompt[at : at + WINDOW] for at in range(len(prompt) - WINDOW + 1))


def _items(text: str) -> list[str]:
    """Split a list into its normalised items, without "or" and "and"."""
    parts = re.split(r"[\s,;/|]+", re.sub(r"\b(?:or|and)\b", " ", text, flags=re.IGNORECASE))
    return [item for part in parts if (item := normalise_text(part).strip(".:()[]"))]


def _word_list(text: str) -> list[str]:
    """Split a text into words in lower case; Chinese and Japanese into characters."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text.lower())


def _text(truth: Any) -> str:
    """Return a ground truth as text; "" if it is neither text nor a number."""
    return truth if isinstance(truth, str) else str(truth) if isinstance(truth, int | float) else ""


def _prompt(item: Trajectory) -> str:
    prompt = item.problem.prompt
    return prompt if isinstance(prompt, str) else "\n".join(str(turn["content"]) for turn in prompt)


# --------------------------------------------------------------------------------------------------------------------
# Token records: which groups of a step are recorded, and their values per token.

NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}
"""dtype -> dtype in a record, which is wide enough for token ids and for all values of a step."""
LEFT_OUT = {"tokens", "recorded", "candidates", "state"}
"""Fields of a batch that are not recorded as they are."""


def mark_recorded(rows: RowBatch, wanted: float) -> RowBatch:
    """Select the groups whose tokens are recorded: set `recorded` to the number of the record's row, else -1.

    Prompts are chosen by a hash of their tokens, so the same prompts are recorded in every step.

    Args:
        wanted: below 1 the share of prompts; otherwise the number of groups, first those whose rewards differ, because
            only their tokens have advantages.

    Example:
        >>> groups = torch.tensor([0, 0, 1, 1])
        >>> rows = RowBatch(
        ...     tokens=torch.tensor([[5, 8], [5, 9], [6, 8], [6, 9]]), loss_mask=torch.tensor([[False, True]] * 4),
        ...     lengths=torch.full((4,), 2), prompt_lengths=torch.ones(4, dtype=torch.long), group_ids=groups,
        ...     rewards=torch.tensor([0.0, 0.0, 0.0, 1.0]), truncated=torch.zeros(4, dtype=torch.bool),
        ... )
        >>> mark_recorded(rows, 1).recorded
        tensor([-1, -1,  0,  1])
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
    selected = torch.isin(rows.group_ids, torch.tensor(chosen, dtype=torch.long))
    return replace(rows, recorded=(selected.cumsum(0) - 1).masked_fill(~selected, -1)) if chosen else rows


class TokenRecord:
    """Per-token values of the recorded rows of a step, from the last update in which each row took part.

    Attributes:
        state: state of the algorithm in that update (such as an adaptive KL coefficient).
    """

    def __init__(self) -> None:
        self.state: dict[str, float] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._tokens: dict[str, list[Tensor]] = {}
        self._prompts: dict[tuple[int, ...], int] = {}
        self._seen: set[int] = set()
        self._updates = 0

    def add(self, part: TrainingBatch, numbers: Mapping[str, Tensor]) -> None:
        """Add the values of an update.

        Args:
            part: the rows of the update.
            numbers: values from the back end (`protocols.TrainingBackend.token_numbers`).
        """
        update, self._updates = self._updates, self._updates + 1
        if part.recorded is None or not bool((part.recorded >= 0).any()):
            return
        batch = select_rows(part, (part.recorded >= 0).nonzero()[:, 0])
        assert batch.recorded is not None
        if self._seen & set(batch.recorded.tolist()):  # the next epoch over the rows replaces the last one
            self._rows, self._tokens, self._seen = {}, {}, set()
        self._seen |= set(batch.recorded.tolist())
        self.state = dict(batch.state)
        columns = torch.arange(batch.tokens.shape[1])
        inside = (columns >= batch.prompt_lengths[:, None]) & (columns < batch.lengths[:, None])
        values = {name: value for name, value in flat_fields(batch).items() if name not in LEFT_OUT}
        values |= {name: column[batch.recorded, : len(columns)] for name, column in numbers.items()}
        # With a single update per step there are no old log-probs: the policy's own equal them.
        trainer = values.get("logprobs") if values["old_logprobs"] is None else values["old_logprobs"]
        if batch.rollout.logprobs is not None and trainer is not None:
            values["gap"] = (trainer - batch.rollout.logprobs) * batch.loss_mask
        if "clipped" in values:
            values["clipped"] = values["clipped"] > 0
        values |= {"tokens": batch.tokens, "update": torch.full((batch.rows,), update)}
        values["prompt"] = torch.tensor([self._prompt(batch, row) for row in range(batch.rows)])
        for name, column in values.items():
            if isinstance(column, Tensor):
                by_token = column.shape == inside.shape
                column = column[inside] if by_token else column
                table = self._tokens if by_token else self._rows
                table.setdefault(name, []).append(column.to(NARROW.get(column.dtype, column.dtype)))

    def _prompt(self, batch: TrainingBatch, row: int) -> int:
        """Return the number of a row's prompt; each prompt is stored once."""
        prompt = tuple(batch.tokens[row, : int(batch.prompt_lengths[row])].tolist())
        return self._prompts.setdefault(prompt, len(self._prompts))

    def tensors(self) -> dict[str, Tensor]:
        """Return the record as tensors for a file; empty if nothing is recorded.

        `row/NAME` is [R, ...]. `token/NAME` is [N]: the tokens after the prompt, row by row. `prompt_tokens` has the
        tokens of all prompts, `prompt_sizes` their lengths.
        """
        if not self._rows:
            return {}
        tensors = {f"row/{name}": torch.cat(parts) for name, parts in self._rows.items()}
        tensors |= {f"token/{name}": torch.cat(parts) for name, parts in self._tokens.items()}
        tensors["prompt_tokens"] = torch.tensor([t for prompt in self._prompts for t in prompt], dtype=torch.int32)
        tensors["prompt_sizes"] = torch.tensor([len(prompt) for prompt in self._prompts], dtype=torch.int32)
        return tensors
