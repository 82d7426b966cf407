"""`atomrl plan --gpu` and `--fit`: neither a GPU nor weights, data or a network is there."""

import re
from pathlib import Path

import pytest
import yaml

from atomrl.cli.main import main
from atomrl.config import ConfigError, load_config
from atomrl.engines.fake import FakeEngine
from atomrl.engines.hf import HFEngine
from atomrl.engines.native.engine import NativeEngine
from atomrl.models.known_shapes import known_shape
from atomrl.models.memory import count_parameters
from atomrl.planner.fit import find_fitting, trades
from atomrl.planner.gpus import GPUS, gpu_of
from atomrl.planner.plan import plan_on
from atomrl.trainer.build import ENGINES

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = CONFIGS / "qwen2.5-1.5b-gsm8k-24gb.yaml"
BY_CARD = sorted(CONFIGS.glob("*-gsm8k-*gb.yaml"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(name, **options):
        pytest.fail(f"the hub was asked for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("MistralConfig", "mistralai/Mistral-7B-v0.1"), ("SmolLM3Config", "HuggingFaceTB/SmolLM3-3B"),
     ("GptOssConfig", "openai/gpt-oss-120b")],
)  # fmt: skip
def test_shapes_are_those_of_transformers(kind, name):
    """The models whose shapes are the defaults of their config class."""
    import transformers

    theirs, ours = getattr(transformers, kind)(), known_shape(name)
    for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                  "num_key_value_heads", "tie_word_embeddings", "num_local_experts"):  # fmt: skip
        assert getattr(ours, field, None) == getattr(theirs, field, None), field


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen2.5-1.5B-Instruct", 1.54), ("qwen/qwen3-8b", 8.19), ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
     ("google/gemma-3-1b-it", 1.00), ("mistralai/Mistral-7B-Instruct-v0.3", 7.25), ("openai/gpt-oss-20b", 20.9),
     ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.78), ("allenai/OLMo-2-0425-1B-Instruct", 1.48)],
)  # fmt: skip
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert count_parameters(known_shape(name)) / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize("given", ["4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "1x4090"])
def test_names_of_a_card(given):
    assert gpu_of(given) == GPUS["4090"]


def test_names_of_other_cards():
    assert gpu_of("2xA100").count == 2 and gpu_of("H100 SXM5 80GB").gib == 80 and gpu_of("A100-40GB").gib == 40
    assert gpu_of("8 x 80GiB").count == 8 and gpu_of("24gb").gib == 24
    for wrong in ("4091", "0x4090", "GiB", ""):
        with pytest.raises(ConfigError):
            gpu_of(wrong)
    for unit in ("8", "8MB"):
        with pytest.raises(ConfigError, match="24GiB") as raised:
            gpu_of(unit)
        assert str(raised.value).count("4070tisuper") == 1  # the table once


MEASURED = [
    "model.gradient_checkpointing=true", "train.tokens_per_micro_batch=8192", "rollout.max_concurrent_completions=256",
]  # fmt: skip
"""With which the config was measured; now these are `auto`."""


def test_the_measured_memory(monkeypatch):
    """docs/start/hardware.md: 13.2 GiB, 0.6 of them the driver's, on an H200, with a copy of the base in the engine."""
    monkeypatch.setattr(NativeEngine, "shares_base", False)
    plan = plan_on(load_config(CONFIG, MEASURED), gpu_of("H200"))
    assert plan.memory.peak / (13.2 - 0.6) / 2**30 == pytest.approx(0.92, abs=0.02)  # what `USABLE` is


@pytest.mark.parametrize(
    ("changes", "tokens_a_second"),
    [(["rollout.engine=vllm"], 16972), (["rollout.engine=vllm", "rollout.logprobs_over=none"], 24559),
     (["rollout.engine=hf"], 3659)],
)  # fmt: skip
def test_the_measured_rates_of_engines(changes, tokens_a_second):
    """docs/development/benchmarks.md: 64 prompts x 4 completions of 128 + 256 tokens on an H200, without adapters."""
    work = ["data.max_prompt_tokens=128", "rollout.max_completion_tokens=256", "rollout.prompts_per_step=64",
            "rollout.completions_per_prompt=4", "model.lora=null"]  # fmt: skip
    plan = plan_on(load_config(CONFIG, [*MEASURED, *work, *changes]), gpu_of("H200"))
    assert 256 * 256 / plan.seconds["rollout"] == pytest.approx(tokens_a_second, rel=0.05)


def test_an_engine_without_a_decode_time_gets_that_of_hf(capsys, monkeypatch):
    monkeypatch.setitem(ENGINES, "mine", FakeEngine)
    assert main(["plan", str(CONFIG), "--gpu", "H200", "rollout.engine=mine"]) == 0
    assert "rollout.engine=mine: a decode step is estimated: as hf" in capsys.readouterr().out
    assert FakeEngine.decode_time.layer_s == HFEngine.decode_time.layer_s


def test_a_plan_says_that_its_time_is_an_estimate(capsys):
    assert main(["plan", str(CONFIG), "--gpu", "H200", "rollout.engine=vllm"]) == 0
    printed = capsys.readouterr().out
    hours = float(re.search(r"200 steps: ([\d.]+) h", printed)[1])
    least, most = map(float, re.search(r"not measured.*: ([\d.]+) to ([\d.]+) h", printed).groups())
    assert least < hours < most and "rollout.engine=vllm: a decode step is measured on one H200" in printed


def test_cards_without_bfloat16_compute_in_float32(capsys):
    assert main(["plan", str(CONFIG), *MEASURED, "--gpu", "T4"]) == 1
    assert "T4 has no bfloat16: it computes in float32" in capsys.readouterr().out
    t4, l4 = (plan_on(load_config(CONFIG, MEASURED), gpu_of(card)).memory.peak for card in ("T4", "L4"))
    assert t4 > 1.8 * l4


@pytest.mark.parametrize(
    ("path", "quantization", "two", "one"),
    [("Qwen/Qwen2.5-3B", "nf4", 8.9, 3.3), ("Qwen/Qwen2.5-7B", "nf4", 21.1, 7.3),
     ("Qwen/Qwen2.5-7B", "null", 30.1, 16.0), ("Qwen/Qwen2.5-14B", "nf4", 41.7, 14.7)],
)  # fmt: skip
def test_a_base_that_is_held_once_is_counted_once(path, quantization, two, one, monkeypatch):
    smallest = [
        "model.gradient_checkpointing=true", "train.tokens_per_micro_batch=1024", "model.lora={rank: 16}",
        "rollout.max_concurrent_completions=32", "rollout.max_completion_tokens=512", "rollout.prompts_per_step=16",
    ]  # fmt: skip
    config = load_config(CONFIG, [*smallest, f"model.path={path}", f"model.quantization={quantization}"])
    assert plan_on(config, gpu_of("80GiB")).memory.peak / 2**30 == pytest.approx(one, abs=0.06)
    monkeypatch.setattr(NativeEngine, "shares_base", False)
    assert plan_on(config, gpu_of("80GiB")).memory.peak / 2**30 == pytest.approx(two, abs=0.06)


def test_rounded_weights_are_counted_once_where_updates_round_into_the_engine():
    whole = load_config(CONFIG, [*MEASURED, "model.lora=null"])
    asynchronous = load_config(CONFIG, [*MEASURED, "model.lora=null", "asynchronous={max_staleness: 1}"])
    once, twice = (plan_on(config, gpu_of("80GiB")).memory.resident for config in (whole, asynchronous))
    head = 151936 * 1536  # the output matrix is rounded beside the engine's
    assert twice - once == pytest.approx(2 * (1.544e9 - head), rel=0.002)


def test_a_quantized_base_costs_the_time_of_its_dequantization():
    plain, nf4, int8 = (
        plan_on(load_config(CONFIG, [*MEASURED, f"model.quantization={kind}"]), gpu_of("4090")).seconds
        for kind in ("null", "nf4", "int8")
    )
    assert plain["rollout"] < nf4["rollout"] < int8["rollout"] and plain["update"] < nf4["update"] < int8["update"]


def test_where_nothing_fits_the_least_memory_and_the_largest_model_are_named(tmp_path, capsys):
    large = ["plan", str(CONFIG), "model.path=Qwen/Qwen2.5-14B"]
    assert main([*large, "--fit", "8GiB"]) == 1
    printed = capsys.readouterr().out
    least, usable = map(float, re.search(r"with all of them it needs ([\d.]+) GiB of ([\d.]+) GiB", printed).groups())
    assert least > usable
    name = re.search(r"model\.path=(Qwen/Qwen2[\w.-]*\w)", printed)[1]
    assert main([*large[:2], f"model.path={name}", "--fit", "8GiB", "--out", str(tmp_path / "fits.yaml")]) == 0
    assert main(["plan", str(CONFIG), "--fit", "1GiB"]) == 1
    assert "no well-known model fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes", [[], ["model.lora=null", "model.gradient_checkpointing=false"], ["model.path=Qwen/Qwen3-8B"]]
)
@pytest.mark.parametrize("size", ["8GiB", "12GiB", "24GiB", "80GiB"])
def test_a_fitted_plan_fits_and_each_change_is_needed(size, changes):
    plan = plan_on(load_config(CONFIG, changes), gpu_of(size))
    fitted = find_fitting(plan)
    if plan.fits:
        assert fitted == ([], plan)
        return
    if fitted is None:  # whole weights of 8B in the engine alone are more than the small cards have
        assert plan.memory.resident > plan.budget
        return
    chosen, smaller = fitted
    assert smaller.fits and chosen and set(map(str, chosen)) <= set(map(str, trades(plan.config, 1)))


def test_advice_names_only_what_helps(capsys):
    """Gradient checkpointing is on, and adapters are there: neither is named."""
    assert main(["plan", str(CONFIG), *MEASURED, "--gpu", "8GiB"]) == 1
    printed = capsys.readouterr().out
    assert "model.quantization=nf4" in printed and "rollout.max_concurrent_completions" in printed
    assert "gradient_checkpointing" not in printed and "lora" not in printed


def test_the_config_that_fits_is_written_once(tmp_path, capsys):
    out = tmp_path / "small.yaml"
    command = ["plan", str(CONFIG), "--fit", "8GiB", "--out", str(out), "train.steps=7", "model.path=Qwen/Qwen2.5-3B"]
    assert main(command) == 0
    assert "x the time" in capsys.readouterr().out
    config = load_config(out)
    assert config.train.steps == 7 and plan_on(config, gpu_of("8GiB")).fits
    assert yaml.safe_load(out.read_text())["model"]["quantization"] == "nf4" and "# " in out.read_text()
    assert main(command) == 2 and "exists" in capsys.readouterr().err
    assert main(["plan", str(out), "--fit", "8GiB"]) == 0 and "fits unchanged" in capsys.readouterr().out


def test_the_config_of_a_run_is_read_from_its_folder(tmp_path, capsys):
    (tmp_path / "config.yaml").write_bytes(CONFIG.read_bytes())
    assert main(["plan", str(tmp_path), "--fit", "5GiB"]) == 0
    assert plan_on(load_config(tmp_path / "config-5gib.yaml"), gpu_of("5GiB")).fits


@pytest.mark.parametrize("path", BY_CARD, ids=lambda path: path.stem)
def test_configs_by_card_fit_their_card(path):
    """`NAME-24gb.yaml` fits 24 GiB."""
    size = path.stem.rpartition("-")[2].removesuffix("gb")
    assert plan_on(load_config(path), gpu_of(f"{size}GiB")).fits


def _workload(config):
    """The changes that give another config the rows, lengths and adapters of this one."""
    rollout, lora = config.rollout, config.model.lora
    return [
        f"rollout.prompts_per_step={rollout.prompts_per_step}",
        f"rollout.max_completion_tokens={rollout.max_completion_tokens}",
        f"train.rows_per_update={config.train.rows_per_update}",
        *([f"model.lora.rank={lora.rank}"] if lora else []),
    ]


@pytest.mark.parametrize("path", BY_CARD, ids=lambda path: path.stem)
def test_a_fit_is_as_fast_as_the_config_for_the_card(path):
    """From the same run without adapters and quantisation, and from the configs for other cards with its workload."""
    gpu = gpu_of(f"{path.stem.rpartition('-')[2].removesuffix('gb')}GiB")
    shipped = plan_on(load_config(path), gpu)
    model = shipped.config.model
    others = [other for other in BY_CARD if load_config(other).model.path == model.path]
    others = [other for other in others if load_config(other).model.quantization == model.quantization]
    starts = [load_config(path, ["model.lora=null", "model.quantization=null"])]
    starts += [load_config(other, _workload(shipped.config)) for other in others]
    for start in starts:
        fitted = find_fitting(plan_on(start, gpu))
        assert fitted is not None and fitted[1].fits
        assert (fitted[1].config.model.lora is None and model.lora is not None) or (  # trains all weights: not compared
            fitted[1].step_seconds * fitted[1].config.train.steps
            <= 1.1 * shipped.step_seconds * shipped.config.train.steps
        )


ROW = re.compile(
    r"\| ([^|,]+), [^|]*\|[^|]*\| \[[^|]*\(\.\./\.\./(configs/[^)]+)\) "
    r"\| ([\d.]+) GiB \|[^|]*\| (\d+) s \| ([\d.]+) h \|"
)


def test_the_table_of_cards_is_what_plan_says():
    rows = ROW.findall((CONFIGS.parent / "docs/start/hardware.md").read_text(encoding="utf-8"))
    assert len(rows) >= 9
    for card, config, memory, step, hours in rows:
        plan = plan_on(load_config(CONFIGS.parent / config), gpu_of(card))
        now = f"docs/start/hardware.md has other numbers than `atomrl plan {config} --gpu '{card}'`"
        assert plan.memory.peak / 2**30 == pytest.approx(float(memory), abs=0.06), now
        assert plan.step_seconds == pytest.approx(float(step), abs=0.6), now
        assert plan.step_seconds * plan.config.train.steps / 3600 == pytest.approx(float(hours), abs=0.06), now


def test_a_run_by_passes_over_the_data_is_not_said_to_have_a_number_of_steps(capsys):
    assert main(["plan", str(CONFIG), "--gpu", "24GiB", "train.total_epochs=3"]) == 0
    assert "the run: 3 passes over the data" in capsys.readouterr().out


def test_several_cards_share_the_memory_and_the_update(capsys):
    assert main(["plan", str(CONFIG), "--gpu", "2x3090"]) == 0
    assert "backend.type=fsdp backend.ranks=2 uses all" in capsys.readouterr().out
    whole = ["model.lora=null", "model.path=Qwen/Qwen2.5-3B"]
    one, four = (plan_on(load_config(CONFIG, [*whole, "backend.type=fsdp"]), gpu_of(f"{n}x4090")) for n in (1, 4))
    assert four.memory.resident < 0.5 * one.memory.resident and four.seconds["update"] < 0.3 * one.seconds["update"]


@pytest.mark.parametrize(
    "wrong", [["--gpu", "4090", "--fit", "8GiB"], ["--gpu", "4090", "--probe"], ["--out", "f.yaml"]]
)
def test_options_that_do_not_go_together(wrong, capsys):
    assert main(["plan", str(CONFIG), *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_model_that_nobody_knows_is_refused_by_name(monkeypatch, capsys):
    def absent(name, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    assert main(["plan", str(CONFIG), "--gpu", "4090", "model.path=nobody/nothing-9B"]) == 2
    assert "nobody/nothing-9B" in capsys.readouterr().err


def test_an_engine_that_cuts_its_model_needs_as_many_gpus_and_less_memory_of_each(capsys):
    cut = ["rollout.engine=vllm", "rollout.tensor_parallel=2"]
    assert main(["plan", str(CONFIG), "--gpu", "H100", *cut]) == 2
    assert "rollout.tensor_parallel=2: the plan is for H100 (80 GiB)" in capsys.readouterr().err
    stays = []
    for settings in (cut[:1], cut):
        assert main(["plan", str(CONFIG), "--gpu", "2xH100", *settings]) == 0
        shown = capsys.readouterr().out
        stays.append(float(re.search(r"stays +([\d.]+) GiB", shown)[1]))
    assert "shards the model over 2 of the 2 GPUs" in shown and stays[1] < stays[0]
