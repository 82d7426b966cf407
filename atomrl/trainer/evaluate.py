"""Evaluation on held-out problems, with standard errors."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from transformers import PreTrainedTokenizerBase

from atomrl.data.processor import DataProcessor
from atomrl.data.rows import by_group
from atomrl.engines.generation import generate
from atomrl.protocols import RewardComputer, RolloutEngine
from atomrl.rewards.answers import normalise_text, parse_number
from atomrl.rewards.extraction import extract_answer
from atomrl.rewards.format import has_strict_format, reasoning_text
from atomrl.tracking.run_directory import rollout_rows
from atomrl.types import Problem, SamplingParams

Row = Mapping[str, Any]
"""A completion as it is written to a file, with its grades. `correct` is None if the first reward has no value."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Mean over problems and its standard error (None for a single problem)."""

    mean: float
    standard_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Results of an evaluation, over all problems (`overall`) and by data source.

    Each maps a name to a `Figure`: `accuracy`, `reward`, `pass@k`, `majority@N`, `format`, `truncated`, `unscored`,
    `completion_tokens`, `reasoning_tokens`, `reasoning_characters`.

    The first reward decides what is correct. Completions for which it has no value do not count in accuracy, pass@k and
    majority, as in `train/accuracy`. These are NaN if there are no others, or if its values do not grade answers as
    right or wrong (`Rewards.says_right`).
    """

    prompts: int
    dropped_prompts: int
    """Number of prompts over the length limit; they are not evaluated."""
    samples_per_prompt: int
    overall: Mapping[str, Figure]
    by_data_source: Mapping[str, Mapping[str, Figure]]
    rows: Sequence[Row]
    """One JSON-ready dict per completion."""

    def summary(self) -> dict[str, Any]:
        """Return all fields except `rows`."""
        return {key: value for key, value in asdict(replace(self, rows=())).items() if key != "rows"}

    def metrics(self) -> dict[str, float]:
        """Return the means under verl's names: `val-core/SOURCE/{reward,acc}/mean@N`, `acc/best@k`, `acc/maj@N`.

        Other metrics are `val-aux/...`. If there are several sources, `all` is the mean over all problems.
        """
        count, several = self.samples_per_prompt, len(self.by_data_source) > 1
        names = {
            "accuracy": f"acc/mean@{count}",
            "reward": f"reward/mean@{count}",
            f"majority@{count}": f"acc/maj@{count}",
        }
        names |= {f"pass@{k}": f"acc/best@{k}" for k in pass_sizes(count)}
        sources = dict(self.by_data_source) | ({"all": self.overall} if several else {})
        metrics = {
            f"val-core/{source}/{names[key]}": by_name[key].mean
            for source, by_name in sources.items()
            for key in names
            if not math.isnan(by_name[key].mean)
        }
        lengths = {"completion_tokens": "response_length", "reasoning_tokens": "reasoning_length"}
        for name in ("format", "truncated", "unscored", *lengths):
            metrics[f"val-aux/{lengths.get(name, name)}/mean"] = self.overall[name].mean
        return metrics


def evaluate(
    engine: RolloutEngine,
    problems: Sequence[Problem],
    processor: DataProcessor,
    rewards: RewardComputer,
    sampling: SamplingParams,
    response_prefix: str = "",
    says_right: bool = True,
) -> EvalResult:
    """Sample `sampling.completions_per_prompt` completions per problem and score them.

    Args:
        engine: gets all prompts in one call.
        problems: those over the processor's length limit are dropped and counted.
        rewards: the first part decides what is correct.
        response_prefix: text that every completion starts with. Its tokens are appended to the prompt, and its text is
            prepended to the scored text. For example, `<think></think><answer>` skips the reasoning.
        says_right: the first reward grades answers as right or wrong (`Rewards.says_right`).

    Raises:
        ValueError: no problems are given.
    """
    if not problems:
        raise ValueError("no problems to evaluate")
    prompts = processor.to_prompts([(f"eval:{problem.problem_id}", problem) for problem in problems], drop=True)
    tokenizer = processor.tokenizer
    if response_prefix:
        forced = tuple(tokenizer.encode(response_prefix, add_special_tokens=False))
        prompts = [replace(prompt, token_ids=prompt.token_ids + forced) for prompt in prompts]
    # Sample and score; with a prefix, the completion that is scored includes it.
    completions = generate(engine, prompts, sampling)
    scored = rewards([replace(item, text=response_prefix + item.text) for item in completions])
    # Grade each completion, and compute the figures over all problems and per data source.
    groups = [
        [judged(row, tokenizer, says_right) for row in rollout_rows(0, group, {})]
        for group in by_group(scored).values()
    ]
    sources: dict[str, list[list[Row]]] = defaultdict(list)
    for group in groups:
        sources[group[0]["data_source"]].append(group)
    return EvalResult(
        prompts=len(groups),
        dropped_prompts=len(problems) - len(groups),
        samples_per_prompt=sampling.completions_per_prompt,
        overall=figures(groups),
        by_data_source={source: figures(group) for source, group in sources.items()},
        rows=[row for group in groups for row in group],
    )


def judged(row: Row, tokenizer: PreTrainedTokenizerBase, says_right: bool = True) -> Row:
    """Grade a rollout row: add the extracted answer, `correct`, format, truncation and length of the reasoning.

    Args:
        says_right: whether the first reward grades answers as right or wrong. If so, `correct` is True for a value of
            1.0 or more, and None without a value; if not, it is None.
    """
    text, first = row.get("opening", "") + row["completion"], next(iter(row["reward_parts"].values()), None)
    reasoning = reasoning_text(text)
    return {key: value for key, value in row.items() if key not in ("step", "advantage")} | {
        "answer": extract_answer(text),
        "correct": first >= 1.0 if says_right and first is not None else None,
        "formatted": has_strict_format(text),
        "truncated": row["finish_reason"] == "length",
        "reasoning_tokens": len(tokenizer.encode(reasoning, add_special_tokens=False)),
        "reasoning_characters": len(reasoning),
    }


def figures(groups: Sequence[Sequence[Row]]) -> dict[str, Figure]:
    """Compute all figures over some problems, each given as the rows of its completions.

    Figures are means over problems of means over completions, so standard errors are over problems.
    """

    def mean(name: str) -> Figure:
        return mean_figure([fmean(row[name] for row in group) for group in groups])

    count = len(groups[0])
    rewards = [[row["reward"] for row in group if row["reward"] is not None] for group in groups]
    judged_rows = [[row for row in group if row["correct"] is not None] for group in groups]
    correct = [(len(rows), sum(row["correct"] for row in rows)) for rows in judged_rows if rows]
    return {
        "accuracy": mean_figure([right / rows for rows, right in correct]),
        "reward": mean_figure([fmean(scores) for scores in rewards if scores]),
        **{
            f"pass@{k}": mean_figure([pass_at_k(rows, right, k) for rows, right in correct if rows >= k])
            for k in pass_sizes(count)
        },
        f"majority@{count}": mean_figure([float(majority_correct(rows)) for rows in judged_rows if rows]),
        "format": mean("formatted"),
        "truncated": mean("truncated"),
        "unscored": mean_figure([(count - len(scores)) / count for scores in rewards]),
        **{name: mean(name) for name in ("completion_tokens", "reasoning_tokens", "reasoning_characters")},
    }


def mean_figure(values: Sequence[float]) -> Figure:
    """Compute the mean and its standard error; NaN for no values.

    Example:
        >>> mean_figure([0.0, 2.0])
        Figure(mean=1.0, standard_error=1.0)
    """
    if not values:
        return Figure(mean=math.nan)
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Figure(mean=fmean(values), standard_error=error)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate pass@k: the probability that at least one of k completions is correct.

        1 - C(n - c, k) / C(n, k)

    This is the probability for k completions drawn without replacement from n `samples`, c of them `correct`.

    Paper: Codex, arXiv:2107.03374, equation 1 (unbiased).

    Raises:
        ValueError: k or `correct` is out of range.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@k needs 1 <= k <= samples and 0 <= correct <= samples; {k=}, {samples=}, {correct=}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_sizes(samples: int) -> list[int]:
    """Return the k of pass@k: powers of two, and the number of samples.

    Example:
        >>> pass_sizes(6)
        [1, 2, 4, 6]
    """
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def majority_correct(group: Sequence[Row]) -> bool:
    """Return whether the majority vote is correct: any completion with the most frequent answer was graded correct.

    Answers are compared as by the rewards, so 18.0 is a vote for 18. Completions without an answer do not vote. Ties go
    to the answer that comes first.
    """
    answers = [normalise_text(row["answer"]) for row in group]
    ballots = [answer if (number := parse_number(answer)) is None else number for answer in answers]
    votes = Counter(ballot for ballot in ballots if ballot != "")
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(row["correct"] for ballot, row in zip(ballots, group, strict=True) if ballot == winner)
