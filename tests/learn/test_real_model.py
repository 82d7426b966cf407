"""GSM8K with a real pretrained model of 1 MB, by configuration alone, on both engines."""

import json

import pytest

from atomrl.cli.main import main


@pytest.fixture
def files(shared_dir):
    model, data = shared_dir / "models/stories260k", shared_dir / "data/gsm8k"
    if not model.is_dir() or not data.is_dir():
        pytest.skip(f"no models/stories260k and data/gsm8k in {shared_dir}")
    return [f"model.path={model}", f"data.train={data / 'train.jsonl'}", f"data.eval={data / 'test.jsonl'}"]


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_gsm8k_runs_by_configuration_alone(engine, files, tmp_path, pytestconfig, capsys):
    config = str(pytestconfig.rootpath / "configs/stories260k-gsm8k.yaml")
    small = ["train.steps=2", "data.eval_size=4", "rollout.prompts_per_step=2", "rollout.max_completion_tokens=24"]
    small.append("model.dtype=float32")
    arguments = [config, *files, *small, f"rollout.engine={engine}", f"output_dir={tmp_path}", "run_name=gsm8k"]
    assert main(["train", *arguments]) == 0, capsys.readouterr().err
    run = tmp_path / "gsm8k"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2]
    # what the engine drew is what the trainer sees
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in steps)
    (first, *_) = (run / "rollouts/step_000001/train.jsonl").read_text().splitlines()
    row = json.loads(first)
    assert row["completion"] and row["reward_parts"].keys() == {"gsm8k"} and row["ground_truth"].isdigit()
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(run / "model").num_parameters() > 200_000
