"""Small configs and batches for the tests of tracking."""

from atomrl.config import RunConfig, build_config, merge_trees
from atomrl.stages import Completion, RewardBatch, Sample


def make_config(folder, **changes) -> RunConfig:
    tree = {"run_name": "r", "output_dir": str(folder), "model": {"path": "m"}, "data": {"train": "countdown"}}
    return build_config(merge_trees(tree, changes))


def make_rewarded() -> RewardBatch:
    """Two prompts with two completions each; the last has no reward."""
    done = Completion(token_ids=(4, 5), text="<b>", logprobs=(-0.5, -0.25), finish_reason="stop")
    cut = Completion(token_ids=(4, 5, 6), text="é", logprobs=None, finish_reason="length")
    return RewardBatch(
        samples=(
            Sample(sample_id="f:1", prompt="1+1=", ground_truth=2, data_source="sums"),
            Sample(sample_id="f:2", prompt=({"role": "user", "content": "hi"},), ground_truth="x"),
        ),
        prompt_ids=("f:1/0", "f:2/0"),
        prompt_token_ids=((1, 2), (3,)),
        completions=((done, cut), (cut, done)),
        policy_version=3,
        rewards=((1.0, 0.0), (0.5, None)),
        reward_parts={"strict_math": ((1.0, 0.0), (0.5, None))},
    )
