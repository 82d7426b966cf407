"""`FakeEngine`: a scripted rollout engine for tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from atomrl.engines.requests import RequestEngine, RequestState
from atomrl.engines.stop_rule import StopRule
from atomrl.protocols import WeightHash, WeightUpdate
from atomrl.types import FinishReason, SamplingParams
from atomrl.weight_sync.hashes import tensor_hashes


class FakeEngine(RequestEngine):
    """Engine whose completions come from a function of the prompt's tokens and the index within the group.

    The index is the number at the end of the request id (`0:a/3`). Each `poll` finishes `at_once` requests in order of
    submission. A completion longer than `max_completion_tokens` is truncated and finishes with "length", any other with
    "stop"; all log-probs are -1. `updates` records the names and the version of every weight update.

    Example:
        >>> from atomrl.engines.generation import generate
        >>> from atomrl.types import Prompt, Problem, SamplingParams
        >>> class Words:
        ...     def batch_decode(self, rows, **options): return [" ".join(map(str, row)) for row in rows]
        >>> engine = FakeEngine(lambda prompt, index: [*prompt, index], Words())
        >>> problem = Problem(problem_id="a", prompt="", ground_truth="")
        >>> prompt = Prompt(prompt_id="a", problem=problem, token_ids=(5, 6))
        >>> [each.text for each in generate(engine, [prompt], SamplingParams(completions_per_prompt=2))]
        ['5 6 0', '5 6 1']
    """

    seeded = exact = supports_lora = True

    def __init__(
        self, complete: Callable[[tuple[int, ...], int], Sequence[int]], tokenizer: Any, at_once: int = 2**31
    ) -> None:
        super().__init__(tokenizer)
        self.complete, self.at_once = complete, at_once
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        self.updates: list[tuple[list[str], int]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.closed = False

    def _make_rule(self, sampling: SamplingParams) -> StopRule:
        """Return a rule without conditions: completions end where `complete` ends them."""
        return StopRule(SamplingParams(), (), self.tokenizer, 1, torch.device("cpu"))

    def _advance(self, end: float) -> list[tuple[RequestState, FinishReason]]:
        finished: list[tuple[RequestState, FinishReason]] = []
        while self.waiting and len(finished) < self.at_once:
            state = self.waiting.popleft()
            request = state.request
            tokens = list(self.complete(request.prompt_token_ids, int(request.request_id.rpartition("/")[2])))
            state.set_version(self.version)
            state.token_ids = tokens[: request.sampling.max_completion_tokens]
            state.logprobs = [-1.0] * len(state.token_ids)
            finished.append((state, "stop" if len(state.token_ids) == len(tokens) else "length"))
        return finished

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return `shapes`, which a test sets."""
        return self.shapes

    def update_weights(self, update: WeightUpdate) -> None:
        """Copy all weights, and record names and version."""
        tensors = list(update.tensors)
        parts = {name: part.detach().clone() for name, part in replace(update, tensors=tensors).parts()}
        base = {name: tensor for name, tensor in self.weights.items() if ".lora_" not in name}
        self.weights = base | parts
        self.updates.append(([name for name, _ in tensors], update.version))
        self.version = update.version

    def weight_hashes(self) -> list[WeightHash]:
        """Hashes of the copies."""
        values = tensor_hashes((tensor, tensor.dtype) for tensor in self.weights.values())
        pairs = zip(self.weights.items(), values, strict=True)
        return [WeightHash(name, tensor.dtype, value) for (name, tensor), value in pairs]

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True
