"""Evaluation: draw completions for held-out problems, score them, and say how sure the figures are."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from atomrl.data.processor import DataProcessor
from atomrl.protocols import RewardComputer, RolloutEngine
from atomrl.rewards.answers import normalise_text, parse_number
from atomrl.rewards.format import extract_answer, has_strict_format, reasoning_text
from atomrl.stages import RewardBatch, RolloutBatch, Sample, SamplingParams
from atomrl.tracking.run_directory import rollout_rows


@dataclass(frozen=True, kw_only=True)
class Group:
    """The N completions of one problem, scored."""

    data_source: str
    rewards: tuple[float | None, ...]
    correct: tuple[bool, ...]
    """The first reward function gave at least 1.0 (no value counts as not correct)."""
    answers: tuple[str, ...]
    """Empty where the completion gives none."""
    formatted: tuple[bool, ...]
    truncated: tuple[bool, ...]
    completion_tokens: tuple[int, ...]
    reasoning_tokens: tuple[int, ...]
    reasoning_characters: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A mean over problems and its standard error (None for a single problem)."""

    mean: float
    standard_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The figures of one evaluation, over all problems (`overall`) and by data source.

    Each maps a name to a `Figure`: `accuracy`, `reward`, `pass@k`, `majority@N`, `format`, `truncated`, `unscored`,
    `completion_tokens`, `reasoning_tokens`, `reasoning_characters`.
    """

    prompts: int
    dropped_prompts: int
    """Over the length limit and left out: they are in no figure."""
    samples_per_prompt: int
    overall: Mapping[str, Figure]
    by_data_source: Mapping[str, Mapping[str, Figure]]
    rows: Sequence[Mapping[str, Any]]
    """One JSON-ready dict per completion."""

    @property
    def accuracy(self) -> float:
        """Mean over problems of the share of correct completions."""
        return self.overall["accuracy"].mean

    def summary(self) -> dict[str, Any]:
        """All but the rows."""
        return {key: value for key, value in asdict(replace(self, rows=())).items() if key != "rows"}

    def metrics(self) -> dict[str, float]:
        """verl's names: `val-core/SOURCE/{reward,acc}/mean@N`, `acc/best@k`, `acc/maj@N`; the rest as `val-aux/...`.

        The source `all` is there when there are several.
        """
        count = self.samples_per_prompt
        names = {
            "accuracy": f"acc/mean@{count}",
            "reward": f"reward/mean@{count}",
            f"majority@{count}": f"acc/maj@{count}",
        }
        sources = dict(self.by_data_source)
        if len(sources) > 1:
            sources["all"] = self.overall
        metrics: dict[str, float] = {}
        for source, figures in sources.items():
            for name, figure in figures.items():
                known = names.get(name) or (f"acc/best@{name[5:]}" if name.startswith("pass@") else None)
                if known:
                    metrics[f"val-core/{source}/{known}"] = figure.mean
        lengths = {"completion_tokens": "response_length", "reasoning_tokens": "reasoning_length"}
        for name in ("format", "truncated", "unscored", "completion_tokens", "reasoning_tokens"):
            metrics[f"val-aux/{lengths.get(name, name)}/mean"] = self.overall[name].mean
        return metrics


def evaluate(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    processor: DataProcessor,
    rewards: RewardComputer,
    sampling: SamplingParams,
    response_prefix: str = "",
) -> EvalResult:
    """Draw `sampling.completions_per_prompt` completions of every sample and score them.

    Args:
        engine: batches as it likes; it gets all prompts in one call.
        samples: the problems; those that the processor drops for their length are counted.
        rewards: the first of its parts decides what is correct.
        response_prefix: text that every completion is made to start with. Its tokens follow the prompt, and it is put
            before the text that is scored: `<think></think><answer>` takes the reasoning away.

    Raises:
        ValueError: there is no problem left to evaluate.
    """
    if not samples:
        raise ValueError("there is no problem to evaluate")
    kept, _ = processor.filter_overlong(samples)
    prompts = processor.to_prompt_batch([(f"eval:{sample.sample_id}", sample) for sample in kept])
    tokenizer = processor.tokenizer
    if response_prefix:
        forced = tuple(tokenizer.encode(response_prefix, add_special_tokens=False))
        prompts = replace(prompts, prompt_token_ids=tuple(ids + forced for ids in prompts.prompt_token_ids))
    rollouts = with_prefix(engine.generate(prompts, sampling), response_prefix)
    rewarded = rewards(rollouts)
    groups = score_groups(rewarded, tokenizer)
    sources = dict.fromkeys(group.data_source for group in groups)
    return EvalResult(
        prompts=len(groups),
        dropped_prompts=len(samples) - len(groups),
        samples_per_prompt=sampling.completions_per_prompt,
        overall=figures(groups),
        by_data_source={source: figures([g for g in groups if g.data_source == source]) for source in sources},
        rows=result_rows(rewarded, groups),
    )


def with_prefix(rollouts: RolloutBatch, prefix: str) -> RolloutBatch:
    """The same completions with `prefix` before their text; their tokens stay what was sampled."""
    if not prefix:
        return rollouts
    texts = tuple(tuple(replace(item, text=prefix + item.text) for item in group) for group in rollouts.completions)
    return replace(rollouts, completions=texts)


def score_groups(rewarded: RewardBatch, tokenizer: Any) -> list[Group]:
    """What the figures are made of, one problem each."""
    first = next(iter(rewarded.reward_parts.values()))
    groups = []
    for p, sample in enumerate(rewarded.samples):
        completions = rewarded.completions[p]
        texts = [completion.text for completion in completions]
        reasoning = [reasoning_text(text) for text in texts]
        groups.append(
            Group(
                data_source=sample.data_source,
                rewards=rewarded.rewards[p],
                correct=tuple(value is not None and value >= 1.0 for value in first[p]),
                answers=tuple(extract_answer(text) for text in texts),
                formatted=tuple(has_strict_format(text) for text in texts),
                truncated=tuple(completion.finish_reason == "length" for completion in completions),
                completion_tokens=tuple(len(completion.token_ids) for completion in completions),
                reasoning_tokens=tuple(len(tokenizer.encode(text, add_special_tokens=False)) for text in reasoning),
                reasoning_characters=tuple(len(text) for text in reasoning),
            )
        )
    return groups


def figures(groups: Sequence[Group]) -> dict[str, Figure]:
    """All figures over some problems. The problem is the unit of the standard errors, not the completion."""
    count = len(groups[0].correct)
    found = {"accuracy": mean_figure([_share(group.correct) for group in groups])}
    given = [[reward for reward in group.rewards if reward is not None] for group in groups]
    found["reward"] = mean_figure([sum(rewards) / len(rewards) for rewards in given if rewards])
    for k in pass_sizes(count):
        found[f"pass@{k}"] = mean_figure([pass_at_k(count, sum(group.correct), k) for group in groups])
    found[f"majority@{count}"] = mean_figure([float(majority_correct(group)) for group in groups])
    found["format"] = mean_figure([_share(group.formatted) for group in groups])
    found["truncated"] = mean_figure([_share(group.truncated) for group in groups])
    found["unscored"] = mean_figure([_share([reward is None for reward in group.rewards]) for group in groups])
    for name in ("completion_tokens", "reasoning_tokens", "reasoning_characters"):
        found[name] = mean_figure([_share(getattr(group, name)) for group in groups])
    return found


def mean_figure(values: Sequence[float]) -> Figure:
    """Mean and standard error of the mean; NaN for no values.

    Example:
        >>> mean_figure([0.0, 2.0])
        Figure(mean=1.0, standard_error=1.0)
    """
    if not values:
        return Figure(mean=math.nan)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Figure(mean=sum(values) / len(values), standard_error=error)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k completions drawn without replacement from `samples` is correct.

        1 - C(n - c, k) / C(n, k)

    Paper: Codex, arXiv:2107.03374, equation 1 (unbiased).

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@k needs 1 <= k <= samples and 0 <= correct <= samples; {k=}, {samples=}, {correct=}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_sizes(samples: int) -> list[int]:
    """The k of pass@k: powers of two, and the number of samples.

    Example:
        >>> pass_sizes(6)
        [1, 2, 4, 6]
    """
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def majority_correct(group: Group) -> bool:
    """Whether the answer that most completions give is correct: one of those that give it was scored so.

    Answers are compared as rewards compare them: 18.0 votes for 18. Completions without an answer have no vote; of
    answers that are equally frequent the first given counts.
    """
    answers = [normalise_text(answer) for answer in group.answers]
    ballots = [answer if (number := parse_number(answer)) is None else number for answer in answers]
    votes = Counter(ballot for ballot in ballots if ballot != "")
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(right for ballot, right in zip(ballots, group.correct, strict=True) if ballot == winner)


def result_rows(rewarded: RewardBatch, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One JSON-ready dict per completion: a rollout row and what was made of it."""
    judged = [
        {"answer": answer, "correct": correct, "formatted": formatted, "reasoning_tokens": tokens}
        for group in groups
        for answer, correct, formatted, tokens in zip(
            group.answers, group.correct, group.formatted, group.reasoning_tokens, strict=True
        )
    ]
    rows = rollout_rows(0, rewarded, {})
    left_out = {"step", "advantage"}
    return [
        {key: value for key, value in row.items() if key not in left_out} | more
        for row, more in zip(rows, judged, strict=True)
    ]


def _share(values: Sequence[float]) -> float:
    return sum(values) / len(values)
