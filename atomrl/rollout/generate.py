"""Completions of whole prompts, for callers that wait for all of them."""

import hashlib
from collections.abc import Sequence

from atomrl.progress import progress
from atomrl.protocols import RolloutEngine
from atomrl.types import GenerationOutput, GenerationRequest, Prompt, SamplingParams, Segment, Trajectory


def completion_seed(seed: int, step: int, prompt_id: str, index: int) -> int:
    """The seed of one completion: a hash, so that the order in which completions arrive cannot matter.

    Returns:
        A non-negative integer below 2**63.
    """
    key = f"{seed}/{step}/{prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def requests_of(prompt: Prompt, sampling: SamplingParams) -> list[GenerationRequest]:
    """The requests for `sampling.completions_per_prompt` completions of a prompt, each with its own seed.

    Example:
        >>> from atomrl.types import Sample
        >>> prompt = Prompt(prompt_id="0:a", sample=Sample(sample_id="a", prompt="", ground_truth=""), token_ids=(5, 6))
        >>> [request.request_id for request in requests_of(prompt, SamplingParams(completions_per_prompt=2))]
        ['0:a/0', '0:a/1']
    """
    return [
        GenerationRequest(
            request_id=f"{prompt.prompt_id}/{index}",
            group_id=prompt.prompt_id,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            seed=completion_seed(sampling.seed, sampling.step, prompt.prompt_id, index),
            sample=prompt.sample,
        )
        for index in range(sampling.completions_per_prompt)
    ]


def to_trajectory(prompt: Prompt, index: int, output: GenerationOutput) -> Trajectory:
    """The prompt's segment, and those that came after it; rewards of turns at the last token of each."""
    rewards = output.episode.turn_rewards if output.episode else ()
    return Trajectory(
        prompt_id=prompt.prompt_id,
        index=index,
        sample=prompt.sample,
        segments=(Segment(origin="prompt", token_ids=prompt.token_ids), *output.segments),
        text=output.text,
        opening=prompt.opening,
        finish_reason=output.finish_reason,
        episode=output.episode,
        token_rewards=tuple((len(prompt.token_ids) + place, reward) for place, reward in rewards),
    )


def generate(engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Trajectory]:
    """`sampling.completions_per_prompt` completions of each prompt, in the order of prompts and index.

    The engine must hold no other requests: their outputs would be lost.

    Raises:
        ValueError: the engine refuses a prompt or the sampling, or its model's logits are not finite; none of these
            requests is then left in it.
        RuntimeError: the engine is paused or asleep, or finished a request of someone else's.
        TimeoutError: it does not answer; it then still has the requests.

    Example:
        >>> generate(engine, prompts, SamplingParams(completions_per_prompt=8, seed=1, step=3))  # doctest: +SKIP
    """
    requests = [requests_of(prompt, sampling) for prompt in prompts]
    waiting = {request.request_id for group in requests for request in group}
    outputs: dict[str, GenerationOutput] = {}
    engine.submit([request for group in requests for request in group])
    try:
        while len(outputs) < len(waiting):
            finished = {output.request_id: output for output in engine.poll()}
            if not finished:
                raise RuntimeError("the engine holds requests and finishes none: it is paused or asleep")
            if not finished.keys() <= waiting:
                raise RuntimeError(f"the engine finished {sorted(finished.keys() - waiting)[:3]}, submitted elsewhere")
            outputs |= finished
            progress()
    except TimeoutError:  # who does not answer would not answer that either
        raise
    except BaseException:
        engine.abort(waiting)
        raise
    return [
        to_trajectory(prompt, index, outputs[request.request_id])
        for prompt, group in zip(prompts, requests, strict=True)
        for index, request in enumerate(group)
    ]
