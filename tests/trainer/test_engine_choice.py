"""`rollout.engine: auto` and its share of a GPU: what is chosen, why, and what a run that goes on keeps."""

import re

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.cli.main import main
from atomrl.config import ConfigError, load_config
from atomrl.engines import requests
from atomrl.models.known_shapes import known_shape
from atomrl.trainer import auto as module
from atomrl.trainer.auto import engine_share, with_engine, with_share
from atomrl.trainer.checks.engine import check_engine
from atomrl.trainer.colocation import engine_sleeps
from atomrl.trainer.memory import memory_estimate
from tests.arithmetic import arithmetic_run
from tests.tiny import make_tiny_model
from tests.tiny_vision import make_tiny_vision_model

GIB = 2**30
GRPO = objective_of({"name": "grpo"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU, or none, and a vLLM whose registry has some architectures."""

    def make(gpus=1, vllm="0.32.0", capability=(9, 0), knows="LlamaForCausalLM", gib=80):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        size = type("Properties", (), {"total_memory": gib * GIB})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: size)
        registry = tmp_path / "vllm" / "model_executor" / "models" / "registry.py"
        registry.parent.mkdir(parents=True, exist_ok=True)
        registry.write_text(f'_TEXT_MODELS = {{"{knows}": ("llama", "{knows}")}}\n')
        spec = type("Spec", (), {"origin": str(tmp_path / "vllm" / "__init__.py")}) if vllm else None
        monkeypatch.setattr(module, "find_spec", lambda name: spec)
        for place in (module, requests):
            monkeypatch.setattr(place, "installed_version", lambda name: vllm)

    return make


def config_of(folder, model=None, **sections):
    tree = {
        "run_name": "run",
        "output_dir": str(folder.parent / "runs"),
        "model": {"path": str(folder), "dtype": "bfloat16", "device": "auto", **(model or {})},
        "data": {"train": "-", "max_prompt_tokens": 16},
    }
    return load_config(tree | sections)


def chosen(folder, **settings):
    config, reason = with_engine(config_of(folder, **settings), str(folder))
    return config.rollout.engine, reason


def test_on_a_gpu_it_is_vllm_that_knows_the_model(machine, folder):
    machine()
    name, reason = chosen(folder)
    assert name == "vllm" and "0.32.0" in reason and "auto" in reason
    assert chosen(folder, rollout={"engine": "hf"}) == ("hf", "set in the config")


@pytest.mark.parametrize(
    ("here", "settings", "why"),
    [
        ({"gpus": 0}, {}, "no GPU"),
        ({}, {"model": {"device": "cpu"}}, "no GPU"),
        ({"vllm": None}, {}, "not installed"),
        ({"vllm": "0.32.0+cpu"}, {}, "not installed"),
        ({"vllm": "0.21.0"}, {}, r"older than 0\.22\.1"),
        ({"capability": (7, 5)}, {}, "capability 7.5"),
        ({"knows": "Qwen2ForCausalLM"}, {}, "does not support LlamaForCausalLM"),
        ({}, {"model": {"dtype": "float32"}}, "float32"),
        ({}, {"rollout": {"temperature": 0.5, "top_k": 5}}, "logprobs_over"),
        ({}, {"backend": {"type": "fsdp", "ranks": 2}}, "several ranks"),
        ({}, {"cluster": {"resources": {"rollout": {"num_gpus": 0}}}}, "no GPU"),
    ],
    ids=str,
)
def test_else_it_is_native_with_the_reason(machine, folder, here, settings, why):
    machine(**here)
    name, reason = chosen(folder, **settings)
    assert name == "native"
    assert re.search(why, reason), reason


@pytest.mark.parametrize(
    ("version", "settings", "why"),
    [
        ("0.32.0", {}, None),
        ("0.31.0", {}, r"needs 0\.32 or later"),
        ("0.32.0", {"rollout": {"temperature": 0.7}}, "temperature=0.7"),
        ("0.32.0", {"cluster": {"resources": {"rollout": {"num_gpus": 1}}}}, None),
    ],
)
def test_a_model_of_pictures_uses_vllm_only_if_that_takes_them(machine, tmp_path, version, settings, why):
    model = make_tiny_vision_model(tmp_path / "vision")
    machine(vllm=version, knows="Qwen2_5_VLForConditionalGeneration")
    name, reason = chosen(model, **settings)
    assert name == ("native" if why else "vllm"), reason
    assert why is None or re.search(why, reason), reason


@pytest.mark.parametrize(
    ("gib", "model", "engine"),
    [(12, {"quantization": "nf4"}, "native"), (24, {}, "native"), (80, {}, "vllm"), (8, {}, "vllm")],
)
def test_where_only_native_fits_it_is_native(machine, folder, tmp_path, gib, model, engine):
    """7 billion weights: beside a trainer, vLLM needs them again. On 8 GiB neither fits."""
    machine(gib=gib, knows="Qwen2ForCausalLM")
    known = known_shape("Qwen/Qwen2.5-7B")
    known.architectures = ["Qwen2ForCausalLM"]
    known.save_pretrained(tmp_path / "large")
    rows = {"prompts_per_step": 16, "completions_per_prompt": 8}
    name, reason = chosen(tmp_path / "large", model={"lora": {"rank": 16}} | model, rollout=rows)
    assert name == engine, reason
    assert ("only native fits" in reason) is (name == "native"), reason


def test_servers_have_to_be_named(machine, folder):
    machine()
    with pytest.raises(ConfigError, match=r"rollout\.server: .*rollout\.engine=vllm-server or sglang"):
        chosen(folder, rollout={"server": "http://127.0.0.1:8000"})


def test_a_run_records_its_engine_and_keeps_it_when_it_continues(machine, folder, tmp_path):
    settings = [*arithmetic_run(folder, "chosen", "{function: tests.light_rewards.odd_length}"), "train.steps=1"]
    assert main(["train", *settings]) == 0
    run = folder.parent / "runs" / "chosen"
    assert "engine: native" in (run / "config.yaml").read_text()
    assert "rollout.engine=native (auto: no GPU)" in (run / "log.txt").read_text()
    machine()
    config = config_of(folder, rollout={"engine": "auto"}).model_copy(
        update={"output_dir": str(run.parent), "run_name": run.name}
    )
    kept, reason = with_engine(config, str(folder))
    assert (kept.rollout.engine, reason) == ("native", "the run started with it")


ROLLOUT = {"engine": "vllm", "max_concurrent_completions": 256, "max_completion_tokens": 640, "prompts_per_step": 32}


@pytest.mark.parametrize("gib", [8, 16, 24, 40, 48, 80, 96, 141])
@pytest.mark.parametrize("asynchronous", [None, {}], ids=["in turns", "at once"])
@pytest.mark.parametrize("lora", [None, {"rank": 32}], ids=["whole", "lora"])
def test_a_share_holds_the_engine_and_leaves_what_the_trainer_keeps(machine, folder, gib, asynchronous, lora):
    """Or there is no room, by the same formulas."""
    machine(gib=gib)
    config = config_of(folder, model={"lora": lora}, rollout=ROLLOUT, asynchronous=asynchronous)
    parts = {
        "trainer weights": (3 if lora else 6) * GIB,
        "optimizer": (1 if lora else 12) * GIB // 8,
        "activations": 6 * GIB,
        "engine weights": 3 * GIB,
        "key-value cache": 6 * GIB,
    }
    stays = parts["trainer weights"] + parts["optimizer"] + (0 if asynchronous is None else parts["activations"])
    try:
        share, reason = engine_share(config, parts, gib * GIB)
    except ConfigError as error:
        assert "no room" in str(error) and (gib - 0.6) * 0.92 * GIB - stays < 3.1 * GIB + 0.01 * gib * GIB
        return
    assert share * gib * GIB + stays <= gib * GIB * 0.93 and share * gib >= 3
    assert share == round(share, 2) <= 1 and f"{gib}.0" in reason
    if gib >= 80:  # no more than it can use, whatever there is
        assert 9 < share * gib < 16


def test_a_share_that_is_given_stays_and_an_engine_with_its_own_gpu_has_most_of_it(machine, folder):
    machine()
    given = config_of(folder, rollout={**ROLLOUT, "gpu_memory_utilization": 0.3})
    assert with_share(given, GRPO) == (given, None)
    split = config_of(folder, rollout=ROLLOUT, cluster={"placement": "split"})
    assert with_share(split, GRPO)[0].rollout.gpu_memory_utilization == 0.9
    mine = config_of(folder, rollout=ROLLOUT)
    parts = memory_estimate(mine, GRPO, device="cuda", compute=2)
    assert with_share(mine, GRPO)[0].rollout.gpu_memory_utilization == engine_share(mine, parts, 80 * GIB)[0]


def test_an_engine_sleeps_while_the_trainer_works_on_the_same_gpu(folder):
    for engine in ("vllm", "native"):
        assert engine_sleeps(config_of(folder, rollout={"engine": engine}), "cuda")
        assert not engine_sleeps(config_of(folder, rollout={"engine": engine}), "cpu")
        assert not engine_sleeps(config_of(folder, rollout={"engine": engine}, asynchronous={}), "cuda")
    assert engine_sleeps(config_of(folder, cluster={"placement": "colocated"}), "cuda")
    assert not engine_sleeps(config_of(folder, rollout={"engine": "vllm"}, cluster={"placement": "split"}), "cuda")


def test_a_model_is_cut_over_no_more_gpus_than_there_are_and_each_has_a_part(machine, folder, monkeypatch):
    machine(gpus=2)
    monkeypatch.setattr("atomrl.trainer.checks.engine.find_spec", lambda name: name)
    config = config_of(folder, rollout={"engine": "vllm", "tensor_parallel": 2})
    assert check_engine(config, str(folder)).package == "vllm"
    with pytest.raises(ConfigError, match=r"tensor_parallel=4.*2 GPUs"):
        check_engine(config_of(folder, rollout={"engine": "vllm", "tensor_parallel": 4}), str(folder))
    whole = memory_estimate(config_of(folder, rollout={"engine": "vllm"}), GRPO)
    half = memory_estimate(config, GRPO)
    for part in ("engine weights", "key-value cache"):
        assert half[part] == whole[part] // 2
    assert half["trainer weights"] == whole["trainer weights"]


def test_engine_arguments_are_not_for_our_own_engines(folder, capsys):
    run = arithmetic_run(folder, "refused", "strict_math")
    assert main(["train", *run, "rollout.engine_args={swap_space: 4}"]) != 0
    assert "rollout.engine_args" in capsys.readouterr().err
    assert main(["train", *run, "rollout.tensor_parallel=2"]) != 0
    assert "rollout.tensor_parallel=2" in capsys.readouterr().err


def test_a_correction_needs_the_engines_log_probs(folder, capsys):
    run = arithmetic_run(folder, "without", "strict_math")
    settings = ["rollout.logprobs_over=none", "algorithm={name: grpo, rollout_is: token_tis}"]
    assert main(["train", *run, *settings]) != 0
    assert "rollout.logprobs_over=none: algorithm.rollout_is=token_tis" in capsys.readouterr().err
