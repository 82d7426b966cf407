"""The memory estimate against counts by hand and against what is really kept."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from atomrl.algorithms import objective_of
from atomrl.backends.local import LocalBackend
from atomrl.backends.megatron.shapes import check_shape
from atomrl.batches import TrainingBatch
from atomrl.config import FSDPConfig, load_config
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import load_policy, model_config_only, save_model
from atomrl.models.memory import adapter_parameters
from atomrl.models.scalar import load_scalar
from atomrl.objectives import PolicyObjective
from atomrl.trainer.memory import memory_estimate, peak_of, rank_choices
from tests.models.gpt2 import save_gpt2
from tests.tiny import make_tiny_model
from tests.weight_sync.test_updates import peak_bytes

ROOT = Path(__file__).parents[2]
WITH_REFERENCE = objective_of({"name": "grpo", "kl": {"coefficient": 0.1}})


def config(folder, **changes):
    tree = {
        "run_name": "r",
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": "d", "max_prompt_tokens": 10},
        "rollout": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 20},
        "train": {"tokens_per_micro_batch": 100},
    }
    return load_config(
        {key: {**value, **changes.get(key, {})} if isinstance(value, dict) else value for key, value in tree.items()}
    )


def test_parts_by_hand(tmp_path):
    save_model(new_gpt(vocab_size=64, layers=2, hidden=64, heads=2, kv_heads=1), None, tmp_path)
    parts = memory_estimate(config(tmp_path), WITH_REFERENCE)
    weights = 102_720 * 4
    assert parts["trainer weights"] == parts["gradients"] == parts["reference"] == parts["engine weights"] == weights
    assert parts["optimizer"] == 2 * weights
    # 8 completions of 20 tokens and 2 prompts of 10; keys and values of 2 layers, one head of 32, float32
    assert parts["key-value cache"] == (8 * 20 + 2 * 10) * 2 * 2 * 32 * 4
    assert parts["log-prob chunk"] == 2 * 100 * 64 * 4
    inner = 192  # of gate and up
    assert parts["backward pass"] == 4 * (100 * (3 * inner + 2 * 64) + 2 * inner * 64)
    assert parts["fresh gradients"] == 4 * (2 * inner + 64) * 64
    passing = min(parts["log-prob chunk"], parts["backward pass"])
    assert parts["total"] == sum(size for name, size in parts.items() if name != "total") - passing
    entropy = memory_estimate(config(tmp_path), objective_of({"name": "grpo", "entropy": {"coefficient": 0.01}}))
    assert entropy["log-prob chunk"] == 3 * 100 * 64 * 4


def test_a_step_takes_what_the_estimate_says(tmp_path):
    """Compare with all that torch's allocator hands out while the model is loaded and two updates are made."""
    save_model(new_gpt(vocab_size=512, layers=4, hidden=128, heads=4), None, tmp_path)
    given = config(tmp_path, train={"tokens_per_micro_batch": 960}, data={"max_prompt_tokens": 20})
    given = load_config(given.to_tree() | {"rollout": {"max_completion_tokens": 100}})
    algorithm = objective_of({"name": "grpo"}).resolved(max_completion_tokens=100)
    rows, tokens = 16, 120
    batch = TrainingBatch(
        tokens=torch.randint(0, 512, (rows, tokens)),
        loss_mask=(mask := (torch.arange(tokens) > 0).expand(rows, -1)),
        lengths=torch.full((rows,), tokens),
        prompt_lengths=torch.ones(rows, dtype=torch.long),
        group_ids=torch.arange(rows),
        rewards=torch.zeros(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        advantages=torch.ones(rows, 1) * mask,
        loss_weights=mask / mask.sum(),
    )

    def work():
        backend = LocalBackend(given.model, given.train, algorithm, total_updates=2)
        for _ in range(2):
            backend.train_step(batch, algorithm)

    of_engine = ("engine weights", "key-value cache", "total")
    parts = memory_estimate(given, algorithm, device="cpu")
    expected = peak_of({name: size for name, size in parts.items() if name not in of_engine})
    assert peak_bytes(work) == pytest.approx(expected, rel=0.1)


def test_rows_between_two_turns_are_kept_too(tmp_path):
    folder, cached = make_tiny_model(tmp_path), []
    for environment in (None, {"function": "f.py:f"}):
        for concurrent in (1, 2, 5, 99):  # of 8, of 2 prompts
            tree = config(folder, rollout={"max_concurrent_completions": concurrent}).to_tree()
            parts = memory_estimate(load_config(tree | {"environment": environment}), WITH_REFERENCE)
            cached.append(parts["key-value cache"] // (2 * 2 * 16 * 4))  # of a token: 2 layers, 2 heads of 8
    alone = [20 + 10, 2 * 20 + 20, 5 * 20 + 20, 8 * 20 + 20]  # one completion at a time: the prompt of one
    assert cached == [*alone, 2 * 20 + 20, 4 * 20 + 20, 8 * 20 + 20, 8 * 20 + 20]


def test_adapters_shrink_what_is_trained(tmp_path):
    folder = make_tiny_model(tmp_path)
    lora = {"model": {"lora": {"rank": 4}, "dtype": "bfloat16"}}
    parts = memory_estimate(config(folder, **lora), WITH_REFERENCE)
    policy = load_policy(folder, lora=config(folder, **lora).model.lora)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert adapter_parameters(policy.config, 4) == trained
    assert parts["gradients"] == trained * 4 and parts["reference"] == 0


def test_checkpointing_saves_activations_and_other_families_are_counted(tmp_path):
    folder = save_gpt2(tmp_path)
    plain = memory_estimate(config(folder), objective_of({"name": "grpo"}))
    less = memory_estimate(config(folder, model={"gradient_checkpointing": True}), objective_of({"name": "grpo"}))
    assert less["activations"] < plain["activations"]
    assert plain["trainer weights"] == sum(p.numel() for p in load_policy(folder).parameters()) * 4


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_is_counted_whole(tmp_path, tied):
    folder = make_tiny_model(tmp_path, tie_word_embeddings=tied)
    plain, parts = (memory_estimate(config(folder), objective_of({"name": name})) for name in ("grpo", "ppo"))
    weights = sum(weight.numel() for weight in load_scalar(folder, dtype="float32").parameters())
    assert parts["critic"] == 4 * 4 * weights
    assert parts["critic activations"] == parts["activations"] > 0
    added = ("critic", "critic activations", "reference")
    assert parts["total"] == plain["total"] + sum(parts[name] for name in added)


def test_a_setting_changes_what_a_rank_holds_by_the_arithmetic(tmp_path):
    save_model(new_gpt(vocab_size=64, layers=2, hidden=64, heads=2), None, tmp_path)
    given = load_config(config(tmp_path).to_tree() | {"backend": {"type": "fsdp", "ranks": 4}})
    algorithm = objective_of({"name": "grpo"})
    parts = memory_estimate(given, algorithm, 4, "cuda")
    choices = rank_choices(given, algorithm, 4, "cuda")
    now, weights = parts["total"], memory_estimate(config(tmp_path), algorithm)["trainer weights"]
    sharded = sum(parts[name] for name in ("trainer weights", "gradients", "optimizer"))
    assert choices.pop("backend.ranks=4") == (now, 0) and sharded == weights
    assert choices["backend.ranks=8"] == (now - sharded // 2, 0)
    assert choices["backend.replicas=2"] == (now + sharded, 0)
    assert choices["backend.reduce=update"] == (now + weights, 0)
    assert choices["backend.cpu_offload=true"] == (now - sharded, sharded)
    assert choices["backend.sequence=2"] == (now - (parts["activations"] + parts["backward pass"]) // 2, 0)
    assert choices["model.gradient_checkpointing=true"][0] < now


MEGATRON = {"type": "megatron", "ranks": 8, "tensor": 2, "pipeline": 2}


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_parts_on_megatron_by_hand(tmp_path, lora):
    save_model(new_gpt(vocab_size=64, layers=2, hidden=64, heads=2), None, tmp_path)
    tree = config(tmp_path, model={"dtype": "bfloat16", "lora": lora}).to_tree()
    parts = memory_estimate(load_config(tree | {"backend": MEGATRON}), objective_of({"name": "grpo"}), 8, "cuda")
    inner = 192
    layer = 4 * 64 * 64 + 3 * 64 * inner + 2 * 64
    own = (layer + 64 // 2 + 64 * 64) // 2  # one of two layers, a share of the final norm, the embedding; of two ranks
    if lora is None:
        expected = {"trainer weights": 2 * own, "rounded weights": 4 * own // 2, "optimizer": 8 * own // 2}
        trained, fresh = own, 4 * (2 * inner + 64) * 64 // 2
    else:  # of one layer: 7 matrices as wide as the residual stream, and a half of each that goes with it
        trained, fresh = 4 * (7 * 64 + (4 * 64 + 3 * inner) // 2), 0
        expected = {"trainer weights": 2 * own + 4 * trained, "rounded weights": 0, "optimizer": 8 * trained // 2}
    expected |= {
        "gradients": 4 * trained,
        "activations": 2 * 2 * 100 * (4 * 64 + 4 * 64 + 3 * inner) // 2,  # of a layer, and of two micro-batches
        "log-prob chunk": 2 * 100 * 64 * 4 // 2,
        "backward pass": 2 * (100 * (3 * inner + 2 * 64) + 2 * inner * 64) // 2,
        "fresh gradients": fresh,
    }
    assert {name: parts[name] for name in expected} == expected


def test_experts_are_spread_by_the_arithmetic_and_a_model_without_has_no_such_choice(tmp_path):
    given = {"type": "megatron", "ranks": 2}
    mixture = make_tiny_model(tmp_path / "moe", "qwen3_moe", num_experts=4, moe_intermediate_size=24)
    tree, algorithm = config(mixture).to_tree() | {"backend": given}, objective_of({"name": "grpo"})
    choices = rank_choices(load_config(tree), algorithm, 2, "cuda")
    experts = 2 * 4 * 3 * 32 * 24  # of two layers; moments are shared either way
    assert choices["backend.expert=2"][0] == choices["backend.ranks=2"][0] - experts // 2 * (4 + 4)
    dense = make_tiny_model(tmp_path / "dense")

    def check(changed):
        check_shape(model_config_only(str(dense), False), changed.backend, "model")

    given = load_config(config(dense).to_tree() | {"backend": given})
    assert "backend.expert=2" not in rank_choices(given, algorithm, 2, "cuda", check)


def test_the_page_has_the_arithmetic_of_ranks(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from plan_ranks import tables

    page = (ROOT / "docs" / "development" / "scaling.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- from benchmarks/plan_ranks.py -->")[2].partition("<!-- until here -->")[0]
    now = "\n".join(tables([8, 64], 8192, 80.0))
    assert shown.strip() == now, "put what `python benchmarks/plan_ranks.py` prints into docs/development/scaling.md"


QWEN25_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def shipped_7b(tmp_path):
    """The config of 7B on 12 GB, with a model of that shape and without weights."""
    Qwen2Config(**QWEN25_7B).save_pretrained(tmp_path)
    sizes = ["rollout.max_concurrent_completions=32", "train.tokens_per_micro_batch=1024"]
    changes = [f"model.path={tmp_path}", "model.gradient_checkpointing=true", *sizes]
    return load_config(ROOT / "configs" / "qwen2.5-7b-gsm8k-12gb.yaml", changes)


def test_7b_fits_a_card_of_12_gb_by_the_arithmetic_that_the_page_shows(shipped_7b):
    assert isinstance(shipped_7b.algorithm, PolicyObjective)
    algorithm = shipped_7b.algorithm.resolved(max_completion_tokens=shipped_7b.rollout.max_completion_tokens)
    parts = {name: size / 2**30 for name, size in memory_estimate(shipped_7b, algorithm, device="cuda").items()}
    assert parts["total"] < 10
    page = (ROOT / "docs" / "guides" / "reduce_memory.md").read_text(encoding="utf-8")
    table = page.partition("<!-- from configs/qwen2.5-7b-gsm8k-12gb.yaml -->")[2].partition("<!-- until here -->")[0]
    shown = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in table.strip().splitlines()[2:]}
    chunk, layer = parts.pop("log-prob chunk"), parts.pop("backward pass")
    parts["log-prob chunk, or backward pass"] = max(chunk, layer)
    parts["gradients, optimizer"] = parts.pop("gradients") + parts.pop("optimizer")
    now = {name: f"{size:.2f}" for name, size in parts.items() if size}
    assert shown == now, "write these GiB into the table of docs/guides/reduce_memory.md"


def test_quantized_bases_are_gathered_as_codes(shipped_7b):
    def on_two(quantization):
        model = shipped_7b.model.model_copy(update={"quantization": quantization})
        given = shipped_7b.model_copy(update={"model": model, "backend": FSDPConfig(type="fsdp", ranks=2)})
        return memory_estimate(given, objective_of({"name": "grpo"}), 2, "cuda")

    plain, nf4, int8 = map(on_two, (None, "nf4", "int8"))
    assert nf4["gathered layers"] / plain["gathered layers"] == pytest.approx(0.516 / 2, rel=1e-3)
    assert int8["gathered layers"] / plain["gathered layers"] == pytest.approx(1 / 2, rel=1e-3)
    matrix = 3584 * 18944
    assert plain["backward pass"] - nf4["backward pass"] == 2 * matrix, "one of two"
    assert int8["backward pass"] == nf4["backward pass"]
