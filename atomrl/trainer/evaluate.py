"""Evaluation: draw completions for held-out problems, score them, and say how sure the figures are."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from atomrl.batches import RowBatch
from atomrl.data.offline import TokenizedSamples
from atomrl.data.processor import DataProcessor
from atomrl.engines.requests import generate
from atomrl.objectives.advantage import given
from atomrl.protocols import RewardComputer, RolloutEngine
from atomrl.rewards.answers import normalise_text, parse_number
from atomrl.rewards.compute import first_values
from atomrl.rewards.format import extract_answer, has_strict_format, reasoning_text
from atomrl.rewards.table import says_right
from atomrl.tracking.run_directory import rollout_rows
from atomrl.types import Sample, SamplingParams, by_group

Row = Mapping[str, Any]
"""A completion as it is written, with what was made of it. `correct` is None where the first reward gave no value."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A mean over problems and its standard error (None for a single problem)."""

    mean: float
    standard_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The figures of one evaluation, over all problems (`overall`) and by data source.

    Each maps a name to a `Figure`: `accuracy`, `reward`, `pass@k`, `majority@N`, `format`, `truncated`, `unscored`,
    `completion_tokens`, `reasoning_tokens`, `reasoning_characters`. Completions on which the first reward gives no
    value are in no accuracy, pass@k or majority, as in `train/accuracy`; where that is all of them, or its values say
    no right or wrong (`rewards.table.says_right`), these are NaN.
    """

    prompts: int
    dropped_prompts: int
    """Over the length limit and left out: they are in no figure."""
    samples_per_prompt: int
    overall: Mapping[str, Figure]
    by_data_source: Mapping[str, Mapping[str, Figure]]
    rows: Sequence[Row]
    """One JSON-ready dict per completion."""

    def summary(self) -> dict[str, Any]:
        """All but the rows."""
        return {key: value for key, value in asdict(replace(self, rows=())).items() if key != "rows"}

    def metrics(self) -> dict[str, float]:
        """verl's names: `val-core/SOURCE/{reward,acc}/mean@N`, `acc/best@k`, `acc/maj@N`; the rest as `val-aux/...`.

        The source `all` is there when there are several.
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
            f"val-core/{of}/{names[key]}": found[key].mean
            for of, found in sources.items()
            for key in names
            if not math.isnan(found[key].mean)
        }
        lengths = {"completion_tokens": "response_length", "reasoning_tokens": "reasoning_length"}
        for name in ("format", "truncated", "unscored", *lengths):
            metrics[f"val-aux/{lengths.get(name, name)}/mean"] = self.overall[name].mean
        return metrics


def evaluate(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    processor: DataProcessor,
    rewards: RewardComputer,
    sampling: SamplingParams,
    response_prefix: str = "",
    graded: bool = False,
) -> EvalResult:
    """Draw `sampling.completions_per_prompt` completions of every sample and score them.

    Args:
        engine: batches as it likes; it gets all prompts in one call.
        samples: the problems; those that the processor drops for their length are counted.
        rewards: the first of its parts decides what is correct.
        response_prefix: text that every completion is made to start with. Its tokens follow the prompt, and it is put
            before the text that is scored: `<think></think><answer>` takes the reasoning away.
        graded: the first reward is known to say no right or wrong, whatever its values are here.

    Raises:
        ValueError: there is no problem left to evaluate.
    """
    if not samples:
        raise ValueError("there is no problem to evaluate")
    kept, _ = processor.filter_overlong(samples)
    prompts = processor.to_prompts([(f"eval:{sample.sample_id}", sample) for sample in kept])
    tokenizer = processor.tokenizer
    if response_prefix:
        forced = tuple(tokenizer.encode(response_prefix, add_special_tokens=False))
        prompts = [replace(prompt, token_ids=prompt.token_ids + forced) for prompt in prompts]
    drawn = generate(engine, prompts, sampling)
    scored = rewards([replace(item, text=response_prefix + item.text) for item in drawn])
    right = not graded and says_right(first_values(scored))
    groups = [
        [judged(row, tokenizer, right) for row in rollout_rows(0, group, {})] for group in by_group(scored).values()
    ]
    sources: dict[str, list[list[Row]]] = defaultdict(list)
    for group in groups:
        sources[group[0]["data_source"]].append(group)
    return EvalResult(
        prompts=len(groups),
        dropped_prompts=len(samples) - len(groups),
        samples_per_prompt=sampling.completions_per_prompt,
        overall=figures(groups),
        by_data_source={source: figures(group) for source, group in sources.items()},
        rows=[row for group in groups for row in group],
    )


def judged(row: Row, tokenizer: PreTrainedTokenizerBase, says_right: bool = True) -> Row:
    """A rollout row and what was made of it: correct where the first reward function gave at least 1.0, None where it
    gave no value, or `says_right` is False."""
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
    """All figures over some problems, each the rows of its completions. The problem is the unit of the standard
    errors, not the completion."""

    def mean(name: str) -> Figure:
        return mean_figure([fmean(row[name] for row in group) for group in groups])

    count = len(groups[0])
    rewards = [[row["reward"] for row in group if row["reward"] is not None] for group in groups]
    judged_rows = [[row for row in group if row["correct"] is not None] for group in groups]
    correct = [(len(rows), sum(row["correct"] for row in rows)) for rows in judged_rows if rows]
    return {
        "accuracy": mean_figure([right / rows for rows, right in correct]),
        "reward": mean_figure([fmean(given) for given in rewards if given]),
        **{
            f"pass@{k}": mean_figure([pass_at_k(rows, right, k) for rows, right in correct if rows >= k])
            for k in pass_sizes(count)
        },
        f"majority@{count}": mean_figure([float(majority_correct(rows)) for rows in judged_rows if rows]),
        "format": mean("formatted"),
        "truncated": mean("truncated"),
        "unscored": mean_figure([(count - len(given)) / count for given in rewards]),
        **{name: mean(name) for name in ("completion_tokens", "reasoning_tokens", "reasoning_characters")},
    }


def mean_figure(values: Sequence[float]) -> Figure:
    """Mean and standard error of the mean; NaN for no values.

    Example:
        >>> mean_figure([0.0, 2.0])
        Figure(mean=1.0, standard_error=1.0)
    """
    if not values:
        return Figure(mean=math.nan)
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Figure(mean=fmean(values), standard_error=error)


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


def majority_correct(group: Sequence[Row]) -> bool:
    """Whether the answer that most completions give is correct: one of those that give it was scored so.

    Answers are compared as rewards compare them: 18.0 votes for 18. Completions without an answer have no vote; of
    answers that are equally frequent the first given counts.
    """
    answers = [normalise_text(row["answer"]) for row in group]
    ballots = [answer if (number := parse_number(answer)) is None else number for answer in answers]
    votes = Counter(ballot for ballot in ballots if ballot != "")
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(row["correct"] for ballot, row in zip(ballots, group, strict=True) if ballot == winner)


# --------------------------------------------------------------------------------------------------------------------
# How often a model agrees with the preferences that are held out.

EVAL_PAIRS = 256
"""Held-out prompts in a forward pass of their own."""


def evaluate_preferences(
    held_out: TokenizedSamples, scores: Callable[[RowBatch], dict[str, Tensor]]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """How often, and by how much, scores agree with preferences.

    Args:
        held_out: the same rows at every step.
        scores: rows -> scores by their name, each [B]; `reward` is the one that is trained.

    Returns:
        `eval/preference_accuracy` and `eval/preference_margin` of the reward, `eval/NAME_accuracy` of others, and
        `eval/preferences`, their number; and a line for each sample.
    """
    found: dict[str, list[Tensor]] = {}
    labels: list[Tensor] = []
    groups: list[Tensor] = []
    samples = held_out.samples
    for start, rows in enumerate(held_out.batches(EVAL_PAIRS)):
        for name, each in scores(rows).items():
            found.setdefault(name, []).append(each.double())
        labels.append(given(rows.labels))
        groups.append(rows.group_ids + start * EVAL_PAIRS)
    group_ids = torch.cat(groups)
    better, worse = compared(torch.cat(labels), group_ids)
    metrics = {"eval/preferences": float(len(better))}
    lines: list[dict[str, Any]] = [{"sample_id": sample.sample_id, "rewards": []} for sample in samples]
    for name, parts in found.items():
        values = torch.cat(parts)
        margin = values[better] - values[worse]
        agreed = (margin > 0).double() + (margin == 0).double() / 2
        short = "preference" if name == "reward" else name
        metrics[f"eval/{short}_accuracy"] = agreed.mean().item()
        metrics[f"eval/{short}_margin"] = margin.mean().item()
        if name == "reward":
            for group, value in zip(group_ids.tolist(), values.tolist(), strict=True):
                lines[group]["rewards"].append(value)
    return metrics, lines


def compared(labels: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [N] of the better and of the worse rows that a preference sets against each other: all pairs within a
    group that differ; where no group has two rows, all pairs of a good and a bad one.

    Example:
        >>> compared(torch.tensor([1, -1, 1, -1]), torch.tensor([0, 0, 1, 1]))
        (tensor([0, 2]), tensor([1, 3]))
    """
    differs = labels[:, None] > labels[None]
    within = differs & (group_ids[:, None] == group_ids[None])
    better, worse = (within if within.any() else differs).nonzero(as_tuple=True)
    return better, worse
