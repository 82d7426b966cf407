"""Prompts to requests, and outputs to trajectories."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from atomrl.common.hangs import progress
from atomrl.protocols import RolloutEngine
from atomrl.types import GenerationOutput, GenerationRequest, Prompt, SamplingParams, Segment, Trajectory


def requests_of(prompt: Prompt, sampling: SamplingParams) -> list[GenerationRequest]:
    """Return `sampling.completions_per_prompt` requests for a prompt, each with its own seed.

    A seed is a hash of run seed, step, prompt and index, as a non-negative integer below 2**63. So completions do not
    depend on the order in which they are sampled.

    Example:
        >>> from atomrl.types import Problem
        >>> problem = Problem(problem_id="a", prompt="", ground_truth="")
        >>> prompt = Prompt(prompt_id="0:a", problem=problem, token_ids=(5, 6))
        >>> [request.request_id for request in requests_of(prompt, SamplingParams(completions_per_prompt=2))]
        ['0:a/0', '0:a/1']
    """
    requests = []
    for index in range(sampling.completions_per_prompt):
        key = f"{sampling.seed}/{sampling.step}/{prompt.prompt_id}/{index}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
        requests.append(
            GenerationRequest(
                request_id=f"{prompt.prompt_id}/{index}",
                group_id=prompt.prompt_id,
                prompt_token_ids=prompt.token_ids,
                sampling=sampling,
                seed=seed,
                problem=prompt.problem,
                images=prompt.problem.images,
            )
        )
    return requests


def to_trajectory(prompt: Prompt, index: int, output: GenerationOutput) -> Trajectory:
    """Join a prompt and the output for it to a trajectory. Rewards of an episode's turns are placed at the last token
    of each turn.

    Args:
        index: index of the completion in its group.
    """
    rewards = output.episode.turn_rewards if output.episode else ()
    return Trajectory(
        prompt_id=prompt.prompt_id,
        index=index,
        problem=prompt.problem,
        segments=(Segment(origin="prompt", token_ids=prompt.token_ids), *output.segments),
        text=output.text,
        opening=prompt.opening,
        finish_reason=output.finish_reason,
        episode=output.episode,
        token_rewards=tuple((len(prompt.token_ids) + place, reward) for place, reward in rewards),
    )


def generate(engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Trajectory]:
    """Generate `sampling.completions_per_prompt` completions of each prompt, in the order of prompts and index.

    The engine must have no other requests: their outputs would be lost.

    Raises:
        ValueError: the engine refuses a prompt or the sampling, or the model's logits are not finite. The requests are
            then aborted.
        RuntimeError: the engine is paused or asleep, or finished a request submitted elsewhere.
        TimeoutError: the engine does not answer; it still has the requests.

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
                raise RuntimeError("the engine has requests but finishes none: it is paused or asleep")
            if not finished.keys() <= waiting:
                raise RuntimeError(f"the engine finished {sorted(finished.keys() - waiting)[:3]}, submitted elsewhere")
            outputs |= finished
            progress()
    except TimeoutError:  # an abort would time out, too
        raise
    except BaseException:
        engine.abort(waiting)
        raise
    return [
        to_trajectory(prompt, index, outputs[request.request_id])
        for prompt, group in zip(prompts, requests, strict=True)
        for index, request in enumerate(group)
    ]
