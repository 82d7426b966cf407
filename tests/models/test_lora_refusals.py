"""`model.lora` refuses by name what it cannot train, before any run starts."""

import pytest

from atomrl.cli.main import main
from atomrl.config import LoraConfig
from atomrl.engines.hf import HFEngine
from atomrl.models.loading import load_policy
from atomrl.models.lora import save_adapters
from atomrl.trainer.build import ENGINES

ROWS = [{"prompt": f"{k}+1=", "ground_truth": "1", "completion": "1", "chosen": "1", "rejected": "2"} for k in range(4)]
KINDS = {
    "train": {"rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 4}},
    "sft": {"sft": {}},
    "dpo": {"preference": {}, "algorithm": {"name": "dpo"}},
}


@pytest.fixture(params=KINDS)
def folder(request, working_directory, model):
    lora = {"rank": 2}
    return working_directory(
        {"run_name": "a", "model": {"path": "model", "device": "cpu", "lora": lora}, "data": {"train": "rows.jsonl"}}
        | KINDS[request.param],
        rows=ROWS,
    )


def test_names_are_checked_before_a_run(folder, capsys, tmp_path):
    for name, why in (("lm_head", "the output matrix"), ("embed_tokens", "an embedding"), ("q_prog", "no module of")):
        for more in ([], ["backend={type: fsdp, ranks: 2}"]):
            assert main(["train", "c.yaml", f"model.lora.target_modules=[q_proj,{name}]", "--dry-run", *more]) == 2
            assert name in (said := capsys.readouterr().err.splitlines()[-1]) and why in said
    assert main(["train", "c.yaml", "model.lora.target_modules=.*(q|v)_proj", "--dry-run"]) == 0
    for name, why in (("lm_head", "ties embedding and output matrix"), ("lm_hat", "matches no module")):
        assert main(["train", "c.yaml", f"model.lora.modules_to_save=[{name}]", "--dry-run"]) == 2
        assert why in capsys.readouterr().err


def test_an_engine_without_adapters_is_refused_before_models_are_loaded(working_directory, capsys, model, monkeypatch):
    class Plain(HFEngine):
        supports_lora = False

    monkeypatch.setitem(ENGINES, "plain", Plain)
    policy, rollout = {"path": "model", "device": "cpu", "lora": {"rank": 2}}, {**KINDS["train"]["rollout"]}
    working_directory(
        {"run_name": "a", "model": policy, "data": {"train": "rows.jsonl"}, "rollout": rollout | {"engine": "plain"}},
        rows=ROWS,
    )
    assert main(["train", "c.yaml", "--dry-run"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "model.lora" in said and "rollout.engine=native or hf" in said
    for other in ("rollout.engine=hf", "model.lora=null"):
        assert main(["train", "c.yaml", "--dry-run", other]) == 0


def test_adapters_are_put_onto_no_adapters(folder, capsys, tmp_path):
    save_adapters(load_policy("model", lora=LoraConfig(rank=2)), tmp_path / "first")
    assert main(["train", "c.yaml", "model.path=first"]) == 2
    assert "model.path=first has adapters" in (said := capsys.readouterr().err) and "atomrl export first" in said
    assert not (tmp_path / "runs").exists()
    assert main(["export", "first", "merged"]) == 0
    for path in (["model.path=merged"], ["model.path=first", "model.lora=null"]):
        assert main(["train", "c.yaml", "--dry-run", *path]) == 0
