"""A scripted engine, for tests of what comes after the rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from atomrl.rollout.stopping import Drawn, to_rollout_batch
from atomrl.stages import PromptBatch, RolloutBatch, SamplingParams


class FakeEngine:
    """Completions from a function of the prompt's tokens and the completion's index within its group.

    A completion longer than `max_completion_tokens` is cut and finishes with "length", any other with "stop"; its
    log-probs are all -1. `loaded` holds the names and the version of every load.

    Example:
        >>> from atomrl.stages import Sample
        >>> class Words:
        ...     def batch_decode(self, rows, **options): return [" ".join(map(str, row)) for row in rows]
        >>> engine = FakeEngine(lambda prompt, index: [*prompt, index], Words())
        >>> prompts = PromptBatch(samples=(Sample(sample_id="a", prompt="", ground_truth=""),), prompt_ids=("a",),
        ...     prompt_token_ids=((5, 6),))
        >>> [c.text for c in engine.generate(prompts, SamplingParams(completions_per_prompt=2)).completions[0]]
        ['5 6 0', '5 6 1']
    """

    seeded = True
    returns_kept = False

    def __init__(self, complete: Callable[[tuple[int, ...], int], Sequence[int]], tokenizer: Any):
        self.complete, self.tokenizer = complete, tokenizer
        self.version = 0
        self.loaded: list[tuple[list[str], int]] = []
        self.closed = False

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        """What the function says."""
        drawn = []
        for prompt in prompts.prompt_token_ids:
            for index in range(sampling.completions_per_prompt):
                tokens = list(self.complete(prompt, index))
                kept = tokens[: sampling.max_completion_tokens]
                drawn.append(Drawn(kept, [-1.0] * len(kept), len(kept) == len(tokens)))
        return to_rollout_batch(prompts, sampling, drawn, self.tokenizer, self.version)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Remember the names and the version."""
        self.loaded.append(([name for name, _ in weights], version))
        self.version = version

    def close(self) -> None:
        """Remember that it was called."""
        self.closed = True
