"""Scripts as in the libraries' documentation: each is one command, and then a dry run."""

import re
from pathlib import Path

import pytest
import yaml

from atomrl.cli.main import main
from atomrl.common.functions import find_function
from atomrl.config import load_config
from atomrl.tools.importers import import_config
from atomrl.tools.importers.sources import flat
from tests.tools.importers.conftest import Read

FILES = Path(__file__).with_name("files")
EXPECTED = FILES.with_name("expected")
"""Folder of the file that each import writes: made by the importer, then read against the source."""
ALL = sorted(path.name for path in FILES.iterdir())
SCRIPTS = ("verl_gsm8k_grpo.sh", "verl_megatron.sh", "openrlhf_ray_ppo.sh", "openrlhf_dpo.sh")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with verl's data of GSM8K, no network, and no model or data set of the hub."""
    datasets = pytest.importorskip("datasets", reason="needs the extra hub")
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hub")
    parquet = pytest.importorskip("pyarrow.parquet", reason="verl's rows are Parquet: needs pyarrow")
    import pyarrow

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, source in (("gsm8k", "openai/gsm8k"), ("math", "DigitalLearningGmbH/MATH-lighteval")):
        for split in ("train", "test"):
            row = {
                "data_source": source,
                "prompt": [{"role": "user", "content": f"What is 1 + 1 of the {split} split?"}],
                "reward_model": {"style": "rule", "ground_truth": "2"},
            }
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            parquet.write_table(pyarrow.Table.from_pylist([row] * 3), tmp_path / "data" / name / f"{split}.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ALL)
def test_each_key_is_what_the_source_asks_for_and_differences_are_said(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(FILES.parent)
    written = import_config(f"files/{name}", out="ours.yaml").yaml()
    assert written.replace(str(FILES.parent), "") == (EXPECTED / f"{Path(name).stem}.yaml").read_text()


@pytest.mark.parametrize("name", ALL)
def test_every_key_of_a_file_is_in_one_list_of_the_report(name: str) -> None:
    text = (FILES / name).read_text()
    if name.endswith(".yaml"):
        keys = set(flat(yaml.safe_load(text)))
    else:
        keys = set(re.findall(r"(?<=\s)\+*([a-z_]\w*(?:\.\w+)+)=|(?<=\s)--([a-z]\w*(?:\.\w+)+)", text))
        keys = {one or other for one, other in keys}
    report = import_config(FILES / name)
    translated = "\n".join([*report.carried, *report.approximated, *report.differences, *report.to_do])
    left = "\n".join(report.without_counterpart)
    said = {
        key: [bool(re.search(rf"(?<![\w.]){re.escape(key)}[=:]", one)) for one in (translated, left)] for key in keys
    }
    wrong = {key for key, found in said.items() if sum(found) != 1}
    assert wrong <= {"logger.wandb.key", "num_processes"}  # a secret; in the first line


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_one_command_and_then_a_dry_run(name: str, offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("math_verify", reason="the reward boxed needs the extra math")
    assert main(["import", str(FILES / name), "--out", "ours.yaml"]) == 0
    assert "atomrl train ours.yaml --dry-run" in capsys.readouterr().out
    assert (
        load_config(yaml.safe_load(Path("ours.yaml").read_text()))
        == import_config(FILES / name, out="ours.yaml").config
    )
    assert main(["train", "ours.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "is not a folder on this machine" in said and "a step: " in said
    assert (" problems (" if name.startswith("verl") else "not checked without them") in said


# ---- GPUs ----


def test_older_flags_of_openrlhf_say_how_many_gpus_and_what_is_left(read: Read) -> None:
    flags = "--pretrain m --prompt_data d.jsonl --reward_pretrain r --advantage_estimator reinforce"
    more = "--colocate_all_models --actor_num_nodes 2 --actor_num_gpus_per_node 4 --zero_stage 3 --bf16"
    more += " --normalize_reward --vllm_num_engines 4"
    imported = read(f"python3 -m openrlhf.cli.train_ppo_ray {flags} {more}")
    assert imported.report().startswith("8 GPUs (actor.num_gpus_per_node=4 x actor.num_nodes=2): ")
    assert not [line for line in imported.without_counterpart if "known to AtomRL" in line]
    assert [line for line in imported.to_do if line.startswith("reward.normalize_enable")]


@pytest.mark.parametrize(("options", "backend", "said"), [
    ("--gpus 1 --memory 24GiB", None,
     ["8 GPUs in the script, planned for a GPU as fast as 3090 (24 GiB)", "instead of", "8 of these GPUs"]),
    ("--memory 12GiB", None, ["changed for it: ", "GiB less", "train.optimizer=adamw8bit "]),
    ("--gpus 2 --memory 4090", {"type": "fsdp"}, ["2 x 4090"]),
])  # fmt: skip
def test_other_hardware_is_planned_with_its_price(
    options: str, backend: object, said: list[str], offline: Path
) -> None:
    assert main(["import", str(FILES / "verl_gsm8k_grpo.sh"), "--out", "ours.yaml", *options.split()]) == 0
    text = Path("ours.yaml").read_text()
    assert yaml.safe_load(text).get("backend") == backend
    assert not [words for words in said if words not in text]
    if options.endswith("GiB"):
        assert main(["plan", "ours.yaml", "--gpu", options.split()[-1]]) == 0  # one mechanism, and it fits
    assert (yaml.safe_load(text)["train"].get("optimizer") == "adamw8bit") == ("adamw8bit" in said[-1])


def test_hardware_that_nothing_fits_is_refused_and_nothing_is_written(
    offline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(FILES / "openrlhf_dpo.sh"), "--out", "ours.yaml", "--memory", "4GiB"]) == 2
    assert "no setting makes it fit" in capsys.readouterr().err and not Path("ours.yaml").exists()
    assert main(["import", str(FILES / "openrlhf_dpo.sh"), "--out", "ours.yaml", "--gpus", "0"]) == 2


# ---- Files ----


def test_nothing_is_overwritten(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ours.yaml").write_text("mine: 1")
    assert main(["import", str(FILES / "verl_gsm8k_grpo.sh"), "--out", "ours.yaml"]) == 2
    assert "ours.yaml already exists" in capsys.readouterr().err and Path("ours.yaml").read_text() == "mine: 1"


def test_a_path_in_the_home_folder_is_expanded(read: Read) -> None:
    words = "algorithm.adv_estimator=grpo data.train_files=a.parquet data.val_files=~/b.parquet"
    imported = read(f"python3 -m verl.trainer.main_ppo {words} actor_rollout_ref.model.path=$HOME/m\n")
    home = Path.home()
    assert (imported.tree["model"]["path"], imported.tree["data"]["eval"]) == (f"{home}/m", f"{home}/b.parquet")


def test_a_reward_function_of_openrlhf_is_called_as_rewards_are_here(tmp_path: Path, read: Read) -> None:
    (tmp_path / "theirs.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return {'rewards': [float(q == p + l) for q, p, l in zip(queries, prompts, labels)]}\n"
    )
    flags = f"--actor.model_name_or_path m --reward.remote_url {tmp_path}/theirs.py"
    flags += " --algo.advantage.estimator reinforce --data.prompt_dataset rows.jsonl"
    imported = read(f"python3 -m openrlhf.cli.train_ppo_ray {flags}")
    (tmp_path / "a_rewards.py").write_text(imported.files["a_rewards.py"])
    reward = find_function(f"{tmp_path}/a_rewards.py:reward_func")
    assert reward(prompts=["1+1=", "2+2="], completions=["2", "5"], ground_truth=["2", "4"], more=[0, 0]) == [1.0, 0.0]
