"""A run with a trainer of several processes is the run of one, however the processes are started."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from atomrl.cli.main import main
from atomrl.common.launchers import launched
from tests.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
RUN = {
    "model": {"path": "model", "dtype": "float32", "device": "cpu"},
    "data": {"train": "arithmetic", "train_size": 64},
    "rollout": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_completion_tokens": 12},
    "reward": {"functions": ["tests.light_rewards.letter_reward"]},
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1}},
    "train": {"steps": 4, "learning_rate": 1e-3, "adam_eps": 1e-3},
    "checkpoint": {"every_steps": 2, "keep": 9},
    "tracking": {"log_completions": False},
}


@pytest.fixture
def train(working_directory, capsys):
    folder = working_directory({"run_name": "run", **RUN})

    def run(name, *overrides):
        capsys.readouterr()
        code = main(["train", "c.yaml", f"run_name={name}", *overrides])
        return code, capsys.readouterr()

    run.folder = folder
    return run


def losses(folder, name):
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    names = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/kl_loss", "training/updates")
    return [[row[name] for name in names if name in row] for row in rows]


def weights(folder, name):
    return load_file(folder / "runs" / name / "model" / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "alone"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host0"}, False),
        ({"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "host0"}, True),
        ({"MASTER_ADDR": "host0"}, False),  # srun, on two machines: their loopbacks would not reach each other
        ({"MASTER_ADDR": "127.0.0.1"}, True),
    ],
)
def test_ranks_talk_through_the_loopback_where_all_are_on_this_machine(monkeypatch, given, alone):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"} | given).items():
        monkeypatch.setenv(name, value)
    started = launched()
    assert started is not None and (started.local_world == started.world) == alone


def test_two_ranks_make_the_run_of_one_process_and_continue(train):
    folder, two = train.folder, ["backend.type=fsdp", "backend.ranks=2"]
    assert train("alone")[0] == train("two", *two, "train.steps=2")[0] == 0
    code, said = train("two", *two, "--resume")
    assert code == 0, said.err
    for mine, theirs in zip(losses(folder, "two"), losses(folder, "alone"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, tensor in weights(folder, "alone").items():
        assert (tensor - weights(folder, "two")[name]).abs().max() <= 1e-4 * tensor.abs().max(), name


@pytest.mark.slow
def test_the_run_of_one_process_started_in_any_way_and_resumed_on_any_number(train):
    folder = train.folder
    assert train("alone")[0] == train("two", "backend.type=fsdp", "backend.ranks=2")[0] == 0
    for mine, theirs in zip(losses(folder, "two"), losses(folder, "alone"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, tensor in weights(folder, "alone").items():
        assert (tensor - weights(folder, "two")[name]).abs().max() <= 1e-4 * tensor.abs().max(), name

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "atomrl"]
    command = [*torchrun, "train", "c.yaml", "run_name=launched", "backend.type=fsdp"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count('"finished": true') == 1, "rank 0 alone says it"
    assert same(weights(folder, "launched"), weights(folder, "two")), "bit for bit"

    assert train("half", "backend.type=fsdp", "backend.ranks=2", "train.steps=2")[0] == 0
    code, said = train("half", "backend.type=fsdp", "backend.ranks=2", "--resume")
    assert code == 0, said.err
    assert same(weights(folder, "half"), weights(folder, "two")), "bit for bit"

    assert train("other", "backend.type=fsdp", "backend.ranks=2", "train.steps=2")[0] == 0
    code, said = train("other", "backend.type=fsdp", "backend.ranks=1", "--resume")
    assert code == 0, said.err
    for name, tensor in weights(folder, "two").items():
        assert (tensor - weights(folder, "other")[name]).abs().max() <= 1e-4 * tensor.abs().max(), name
    code, said = train("other", "train.steps=5", "--resume")
    assert code == 0, said.err
    assert train("two", "backend.type=fsdp", "backend.ranks=1", "train.steps=5", "--resume")[0] == 0
    for name, tensor in weights(folder, "two").items():
        assert (tensor - weights(folder, "other")[name]).abs().max() <= 1e-4 * tensor.abs().max(), name


@pytest.mark.slow
def test_ranks_that_share_matrices_make_the_run_of_one_process_and_continue(train):
    """Drawing with an engine that takes their weights after every step."""
    folder, two = train.folder, ["backend.type=fsdp", "backend.ranks=2", "backend.tensor=2"]
    assert train("alone")[0] == train("tensor", *two)[0] == 0
    for mine, theirs in zip(losses(folder, "tensor"), losses(folder, "alone"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, tensor in weights(folder, "alone").items():
        assert (tensor - weights(folder, "tensor")[name]).abs().max() <= 1e-4 * tensor.abs().max(), name
    assert train("half", *two, "train.steps=2")[0] == 0
    code, said = train("half", *two, "--resume")
    assert code == 0, said.err
    assert same(weights(folder, "half"), weights(folder, "tensor")), "bit for bit"


ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, "machine_rank": 0,
    "main_process_port": 0, "mixed_precision": "bf16", "use_cpu": False,
}  # fmt: skip
FILES = {
    "fsdp": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
            "fsdp_cpu_ram_efficient_loading": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    },
    "deepspeed": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True}},
}  # fmt: skip
"""A file as `accelerate config` writes it."""
OTHER = ["model.path=other", "train.steps=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "options"), [("fsdp", []), ("deepspeed", ["--multi_gpu"])])
def test_only_the_processes_of_an_accelerate_file_have_effect(train, file, options):
    """With a transformers model: an FSDP file would leave the second rank without weights."""
    pytest.importorskip("accelerate")
    folder = train.folder
    shape = make_tiny_model(folder / "other") / "config.json"
    shape.write_text(shape.read_text().replace('"silu"', '"gelu"'))
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(ACCELERATE | FILES[file]))
    assert train("alone", *OTHER)[0] == 0
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", *options]
    command = [*launch, "-m", "atomrl", "train", "c.yaml", "run_name=launched", "backend.type=fsdp", *OTHER]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(folder, "launched") == [pytest.approx(losses(folder, "alone")[0], rel=1e-4, abs=1e-5)]
    for name, tensor in weights(folder, "alone").items():
        assert (tensor - weights(folder, "launched")[name]).abs().max() <= 1e-4 * tensor.abs().max(), name


@pytest.mark.slow
def test_the_documented_srun_command_starts_the_same_run(train):
    """Its own words, in two processes that have Slurm's variables."""
    page = (ROOT / "docs" / "guides" / "multi_gpu.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"srun .* bash -c '(.*?)'", page, re.DOTALL)
    for old, new in {"LOCAL_WORLD_SIZE=8": "LOCAL_WORLD_SIZE=2", "exec python": f"exec {sys.executable}"}.items():
        assert old in said
        said = said.replace(old, new)
    said = said.replace("CONFIG", "c.yaml run_name=slurm train.steps=1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "SLURM_NTASKS": "2"}
    tasks = [env | {"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}"} for rank in range(2)]
    errors = [train.folder / f"{rank}.txt" for rank in range(2)]
    started = []
    for task, error in zip(tasks, errors, strict=True):
        with error.open("w") as file:
            started.append(subprocess.Popen(["bash", "-c", said], env=task, stdout=subprocess.DEVNULL, stderr=file))
    assert [process.wait(300) for process in started] == [0, 0], [error.read_text()[-2000:] for error in errors]
    assert train("two", "backend.type=fsdp", "backend.ranks=2", "train.steps=1")[0] == 0
    assert same(weights(train.folder, "slurm"), weights(train.folder, "two")), "bit for bit"


def children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks end when their group does")
def test_no_rank_outlives_a_launcher_that_is_killed(train):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "atomrl"]
    command = [*torchrun, "train", "c.yaml", "run_name=killed", "backend.type=fsdp", "train.steps=100000"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    until = time.monotonic() + 240
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env) as launcher:
        metrics = train.folder / "runs" / "killed" / "metrics.jsonl"
        while not metrics.exists() or not metrics.read_text():
            assert launcher.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        ranks = children(launcher.pid)
        assert len(ranks) == 2
        launcher.kill()
    while not all(map(gone, ranks)):
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.name=trpo"], "forward-mode derivatives"),
        (["model.compile=true"], "model.compile"),
        (["backend.cpu_offload=true"], "backend.cpu_offload"),
        (["backend.replicas=3"], "replicas=3 does not divide ranks=2"),
        (["backend.sequence=3"], "sequence=3 does not divide ranks=2"),
        (["backend.sequence=2", "model.pack_rows=false"], "set model.pack_rows"),
        (["backend.tensor=2", "model.lora={}", "model.quantization=nf4"], "a quantised base model cannot be sharded"),
        (["cluster.ranks=2"], "did you mean 'backend.ranks'"),
    ],
)
def test_options_that_ranks_lack_are_refused_before_a_start(train, overrides, said):
    code, shown = train("run", "backend.type=fsdp", "backend.ranks=2", *overrides, "--dry-run")
    assert code == 2 and said in shown.err


def test_vllm_in_the_process_of_rank_0_is_refused_beside_others(train, monkeypatch, tmp_path_factory):
    packages = tmp_path_factory.mktemp("packages")
    (packages / "vllm.py").write_text("")
    monkeypatch.syspath_prepend(packages)
    two, vllm = ["backend.type=fsdp", "backend.ranks=2"], ["rollout.engine=vllm", "--dry-run"]
    code, said = train("run", *two, *vllm)
    assert code == 2 and "cluster.replicas=1 (or more) or rollout.engine=vllm-server" in said.err
    for other in (["backend.type=fsdp", "backend.ranks=1"], [*two, "rollout.source=pool"], []):
        code, said = train("run", *other, *vllm)
        assert code == 0, said.err
    assert train("run", *two, "rollout.engine=vllm-server", "--dry-run")[0] == 0


def test_a_run_says_how_many_ranks_it_has_and_that_a_launcher_was_asked_for_more(train, monkeypatch, caplog):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    code, said = train("run", "train.steps=1", "eval.before=false", "eval.after=false")
    assert code == 0 and "\nranks: 1\n" in said.err and "but started one, so this run has 1 rank" in caplog.text
    caplog.clear()
    code, said = train("run", "backend.type=fsdp", "backend.ranks=2", "--dry-run")
    assert "ranks   2, started by this run" in said.out and "several processes" not in caplog.text


def test_a_checkpoint_of_one_process_is_refused_before_ranks_are_started(train, monkeypatch):
    assert train("one", "train.steps=2", "eval.before=false")[0] == 0
    monkeypatch.setattr("atomrl.trainer.base.build_trainer", lambda *given, **options: pytest.fail("it was begun"))
    code, said = train("one", "backend.type=fsdp", "backend.ranks=2", "--resume")
    assert code == 2 and "is not a checkpoint of several ranks; resume without the section backend" in said.err


def test_a_dry_run_has_the_memory_of_a_rank(train):
    def sizes(*overrides):
        code, said = train("run", *overrides, "--dry-run")
        assert code == 0, said.err
        matches = re.findall(r"^(?:memory)?\s+(\S[^\n]*?)\s+([\d.]+) (MiB|GiB)$", said.out, re.MULTILINE)
        return {name: float(size) * (1024 if unit == "GiB" else 1) for name, size, unit in matches}

    alone, two = sizes(), sizes("backend.type=fsdp", "backend.ranks=2")
    assert two["trainer weights"] == pytest.approx(alone["trainer weights"] / 2, abs=0.01)
    assert two["optimizer"] == pytest.approx(alone["optimizer"] / 2, abs=0.01)
    assert two["gathered layers"] > 0 and "gathered layers" not in alone
    assert {"backend.ranks=4", "backend.sequence=2", "backend.tensor=2", "backend.replicas=2"} <= two.keys()
    other = sizes("backend.type=fsdp", "backend.ranks=2", "backend.tensor=2")
    assert {"backend.ranks=4", "backend.reduce=update"} <= other.keys()
    assert not {"backend.sequence=2", "backend.replicas=2", "backend.tensor=4"} & other.keys(), "what cannot be"


def test_a_launcher_that_started_another_number_is_named(train, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("atomrl.common.workers.die_with_parent", lambda parent: None)
    code, said = train("run", "backend.type=fsdp", "backend.ranks=2", "--dry-run")
    assert code == 2 and "backend.ranks=2, but the launcher started 4" in said.err
    code, said = train("run", "--dry-run")
    assert code == 2 and "backend.type=fsdp" in said.err
