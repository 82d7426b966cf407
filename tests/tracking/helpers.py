"""Small configs and batches for the tests of tracking."""

from atomrl.config import RunConfig, load_config, merge_trees
from atomrl.types import Problem, Segment, Trajectory


def make_config(folder, **changes) -> RunConfig:
    tree = {"run_name": "r", "output_dir": str(folder), "model": {"path": "m"}, "data": {"train": "countdown"}}
    return load_config(merge_trees(tree, changes))


def make_scored() -> list[Trajectory]:
    """Two prompts with two completions each; the last has no reward."""
    prompts = {
        (1, 2): Problem(problem_id="f:1", prompt="1+1=", ground_truth=2, data_source="sums"),
        (3,): Problem(problem_id="f:2", prompt=({"role": "user", "content": "hi"},), ground_truth="x"),
    }
    done = Segment(origin="model", token_ids=(4, 5), logprobs=(-0.5, -0.25), policy_version=3)
    cut = Segment(origin="model", token_ids=(4, 5, 6), policy_version=3)
    made = []
    for (tokens, problem), rewards in zip(prompts.items(), ((1.0, 0.0), (0.5, None)), strict=True):
        for index, reward in enumerate(rewards):
            whole = (index == 0) == (tokens == (1, 2))
            made.append(
                Trajectory(
                    prompt_id=f"{problem.problem_id}/0",
                    index=index,
                    problem=problem,
                    segments=(Segment(origin="prompt", token_ids=tokens), done if whole else cut),
                    text="<b>" if whole else "é",
                    finish_reason="stop" if whole else "length",
                    reward=reward,
                    reward_parts={"strict_math": reward},
                )
            )
    return made
