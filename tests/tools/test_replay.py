"""`atomrl explain RUN --step N` on a run that recorded its tokens."""

import json
from dataclasses import replace

import pytest
import torch

from atomrl.cli.main import main
from atomrl.tools.replay import objectives, recorded, replay
from tests.tiny import make_tiny_model

CONFIG = {
    "run_name": "r",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 8},
    "reward": {"functions": [{"function": "tests.light_rewards.letter_reward"}]},
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.05}},
    "train": {"steps": 2, "learning_rate": 0.02, "rows_per_update": 6},
    "checkpoint": {"every_steps": 0},
    "tracking": {"tokens": 3, "log_completions": 0},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three groups of a step, all recorded, in two updates."""
    folder = tmp_path_factory.mktemp("replay")
    make_tiny_model(folder / "model")
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1)} for k in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "c.yaml").write_text(json.dumps(CONFIG))
        assert main(["train", "c.yaml"]) == 0
    return folder / "runs" / "r"


def test_the_run_s_own_objective_gives_what_the_run_had(run):
    own, changed = objectives(run, [])
    table = recorded(run, 2)
    assert own == changed and len(table) == 12 and set(table.rows["update"].tolist()) == {0, 1}
    replayed = replay(table, own)
    for name in ("loss", "gradient", "advantages", "log_ratio"):
        mine = getattr(replayed, name)
        assert torch.allclose(mine, torch.as_tensor(table.tokens[name]), atol=1e-6), name
    assert replayed.gradient.abs().max() > 0 and replayed.log_ratio.abs().max() > 0
    assert replayed.clipped.tolist() == table.tokens["clipped"].tolist()


def test_a_tighter_clip_takes_gradients_away_and_nothing_else(run):
    own, tight = objectives(run, ["algorithm.clip.low=0", "algorithm.clip.high=0", "algorithm.kl.coefficient=0"])
    loose, _ = objectives(run, [])
    table = recorded(run, None)
    assert table.step == 2 and own == loose
    replayed = replay(table, tight)
    moved = torch.as_tensor(table.tokens["log_ratio"]) * replayed.advantages > 0
    assert replayed.clipped.sum() > 0 and not (replayed.clipped & ~moved).any()
    assert (replayed.gradient[replayed.clipped] == 0).all() and (
        replayed.gradient[~replayed.clipped & replayed.mask] != 0
    ).any()


def test_another_advantage_is_computed_from_the_recorded_rewards(run):
    _, other = objectives(run, ["algorithm.advantage=rloo"])
    table = recorded(run, 1)
    replayed = replay(table, other)
    rewards, groups = torch.as_tensor(table.rows["rewards"]), torch.as_tensor(table.rows["group_ids"])
    for row in range(len(table)):
        others = rewards[(groups == groups[row]) & (torch.arange(len(table)) != row)]
        expected = rewards[row] - others.mean()
        assert torch.allclose(replayed.advantages[table.span(row)], expected.expand(1), atol=1e-6)


def test_a_step_with_one_update_has_no_log_probs_before_it(run):
    _, plain = objectives(run, ["algorithm.kl.coefficient=0"])
    table = recorded(run, 1)
    kept = {name: column for name, column in table.tokens.items() if name != "old_logprobs"}
    one = replace(table, tokens=kept, rows=table.rows | {"update": table.rows["update"] * 0})
    replayed = replay(one, plain)
    assert replayed.log_ratio.abs().max() == 0 and not replayed.clipped.any()
    assert torch.allclose(replayed.gradient, -replayed.advantages / replayed.mask.sum(), atol=1e-8)
    assert replayed.gradient.abs().max() > 0


def test_explain_compares_a_recorded_step_with_another_config(run, capsys, tmp_path):
    out = tmp_path / "t.jsonl"
    arguments = ["--step", "2", "algorithm.clip.high=0", "algorithm.clip.low=0", "--top", "3", "--out", str(out)]
    assert main(["explain", str(run), *arguments]) == 0
    said = capsys.readouterr().out
    assert "advantages as recorded; gradient 1 times the recorded one, cosine 1.000000" in said
    assert "algorithm.clip.high=0 algorithm.clip.low=0" in said and "(now clipped)" in said
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(recorded(run, 2).tokens["tokens"]) and any(row["changed_clipped"] for row in rows)
    assert main(["explain", str(run), "--step", "last"]) == 0
    assert "no token's gradient differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--step", "newest"], "--step newest: must be a number or last"),
        (["--step", "2", "--latex"], "cannot be combined with --latex"),
        (["--top", "3"], "--top needs --step"),
        (["--step", "9"], "step 9 has no recorded tokens; steps that have: 1, 2"),
        (["--step", "last", "train.learning_rate=1"], "a replay can only change keys of `algorithm`"),
        (["--step", "2", "algorithm.name=dpo"], "dpo has no per-token loss"),
        (["--step", "2", "algorithm.advantage=gae"], "reads values, which the run did not record"),
        (["--step", "2", "algorithm.name=gkd"], "distributions"),
    ],
)
def test_steps_that_cannot_be_replayed_are_refused(run, capsys, arguments, said):
    assert main(["explain", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err
