"""Batches made of texts. Nothing here is slow to import."""

from atomrl.stages import Completion, RolloutBatch, Sample


def rollouts(groups: dict[str, list[str]], **samples) -> RolloutBatch:
    """A batch of {sample id: texts}."""
    made = [samples.get(name) or Sample(sample_id=name, prompt=f"p-{name}", ground_truth=name) for name in groups]
    return RolloutBatch(
        samples=tuple(made),
        prompt_ids=tuple(f"0:{name}" for name in groups),
        prompt_token_ids=((1,),) * len(groups),
        completions=tuple(
            tuple(Completion(token_ids=(1,), text=text, logprobs=None, finish_reason="stop") for text in texts)
            for texts in groups.values()
        ),
        policy_version=3,
    )
