"""The page shows the pictures of prompts as a run records them."""

import json

from atomrl.cli.rollouts import format_full
from atomrl.common.files import write_text
from atomrl.tools.ui import rollouts
from atomrl.tracking.reading import Run
from atomrl.tracking.run_directory import rollout_rows
from atomrl.types import Image, Problem, Segment, Trajectory
from tests.tools.ui.made import make_run


def test_recorded_pictures_are_shown_and_tell_prompts_of_one_text_apart(tmp_path):
    names = ["0a" * 32 + ".png", "0b" * 32 + ".jpg"]
    trajectories = []
    for name in names:
        images = (Image(name=name, height=28, width=28),)
        problem = Problem(problem_id=name[:2], prompt="<image>Which colour?", ground_truth="red", images=images)
        segments = (Segment(origin="prompt", token_ids=(1,)), Segment(origin="model", token_ids=(2,), policy_version=0))
        trajectory = Trajectory(
            prompt_id=name[:2], index=0, problem=problem, segments=segments, text="red", finish_reason="stop"
        )
        trajectories.append(trajectory)
    rows = rollout_rows(1, trajectories, {})
    run = make_run(tmp_path / "one", steps=0)
    write_text(run / "rollouts" / "step_000001" / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    index = Run(run).rollouts
    groups = [rollouts.group(index, 1, "train", place) for place in range(2)]
    assert [group["images"] for group in groups] == [[names[0]], [names[1]]]
    assert groups[0]["prompt_hash"] != groups[1]["prompt_hash"]
    assert rollouts.prompt_history(index, groups[1]["prompt_hash"], None)["images"] == [names[1]]
    assert f"picture: inputs/images/{names[1]}\n" in format_full(rows[1])
