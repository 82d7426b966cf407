"""Layers and matrices cut over ranks by Megatron make the step of one process."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")

from atomrl.backends.fsdp import FSDPBackend
from atomrl.backends.local import LocalBackend
from atomrl.backends.megatron.backend import MegatronBackend
from atomrl.backends.megatron.layout import cut_along
from atomrl.backends.megatron.lora import LowRank
from atomrl.config import ConfigError, FSDPConfig, LoraConfig, MegatronConfig, ModelConfig, TrainConfig
from atomrl.models.loading import has_bfloat16
from tests.backends.batches import make_algorithm, make_batch
from tests.backends.comparison import compare
from tests.backends.continuing import alike, go_on, step
from tests.backends.equality import CASES, alone_by_pytorch, case, make_models, pairs, run_ranks, settings_of, train
from tests.backends.one_rank import one_rank
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow
SHARED = (
    "grpo", "ppo", "dapo", "gspo", "dpo", "kto", "gkd", "reward_model", "one row", "one row and a critic",
    "masked rows", "shared prompts", "many micro-batches", "clipped", "untied", "checkpointed", "adapters",
)  # fmt: skip
MORE = {
    "qwen3": case("grpo", model="qwen3"),
    "decay": case("ppo", train={"weight_decay": 0.1}),
    "padded": case("ppo", pack_rows=False),
    "padded pairs": case("reward_model", pairs, pack_rows=False),
    "some adapters": case("ppo", lora=LoraConfig(rank=2, target_modules=["q_proj", "v_proj", "up_proj"])),
}
CUTS = {
    "tensor": (2, {"tensor": 2}), "pipeline": (2, {"pipeline": 2}), "copies": (2, {}),
    "tensor and pipeline": (4, {"tensor": 2, "pipeline": 2}), "tensor and copies": (4, {"tensor": 2}),
    "pipeline and copies": (4, {"pipeline": 2}),
}  # fmt: skip
PPO, ADAPTED = case("ppo"), CASES["adapters"]
BACK_ENDS = {"megatron": (MegatronBackend, MegatronConfig), "fsdp": (FSDPBackend, FSDPConfig)}
NORM = 1e-4
"""Tolerance of losses and gradient norms, relative. Instead of the explicit products of one process, this one takes
PyTorch's attention, as Megatron's layers do here; what that changes in the norm depends on the CPU (1.3e-5 on one, over
2e-5 on another), and gradients of the norms of queries and keys begin at 85000 (qwen3). Weights are within 1e-5."""
EVERY = {name: CASES[name] for name in SHARED} | MORE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_models(tmp_path_factory.mktemp("models"))
    make_tiny_model(folder / "qwen3", "qwen3")
    make_tiny_model(folder / "mixture", "qwen3_moe", num_experts=4, moe_intermediate_size=24)
    return folder


def on_ranks(cases, cut, folder, ranks):
    """Run all cases on one rank, each with its own back end; rank 0 returns the weights."""
    results = {}
    for name, given in cases.items():
        settings = settings_of(given, folder)
        backend = MegatronBackend(MegatronConfig(type="megatron", **cut), collective=ranks, device="cpu", **settings)
        results[name] = train(backend, settings["algorithm"], given["rows"])
        backend.close()
    return results


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.short if name == "tensor" else ()) for name in CUTS]
)
def ranks(request, folder, tmp_path_factory):
    world, cut = CUTS[request.param]
    return run_ranks(partial(on_ranks, EVERY, cut, folder), world, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", EVERY)
def test_ranks_make_the_steps_of_one_process(folder, ranks, name):
    compare([rank[name] for rank in ranks], alone_by_pytorch(EVERY[name], folder), NORM)


def watch(cut, folder, ranks):
    """Return the recorded token values of an update with an entropy in the loss."""
    backend, algorithm = make_plain(MegatronBackend, folder, MegatronConfig(type="megatron", **cut), collective=ranks)
    backend.train_step(recorded_batch(), algorithm)
    return {name: tensor.clone() for name, tensor in backend.token_numbers().items()}


def make_plain(kind, folder, *arguments, **settings):
    algorithm = make_algorithm(outputs=frozenset({"logprobs", "entropy"}))
    model = ModelConfig(path=str(folder / "base"), dtype="float32")
    train = TrainConfig(rows_per_micro_batch=2)
    return kind(*arguments, model, train, algorithm, total_updates=1, device="cpu", **settings), algorithm


def recorded_batch():
    return make_batch(rows=7, recorded=torch.tensor([-1, 2, -1, 0, 1, -1, -1]))


@pytest.mark.parametrize("cut", ["pipeline", "tensor and copies"])
def test_recorded_tokens_equal_those_of_one_process(folder, tmp_path, cut):
    world, settings = CUTS[cut]
    local, algorithm = make_plain(LocalBackend, folder)
    local.train_step(recorded_batch(), algorithm)
    for recorded in run_ranks(partial(watch, settings, folder), world, tmp_path):
        assert recorded.keys() == local.token_numbers().keys()
        for name, tensor in local.token_numbers().items():
            torch.testing.assert_close(recorded[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora": LoraConfig(rank=2, target_modules=["lm_head", "q_proj"])}, "target_modules: lm_head: on Megatron"),
        ({"lora": LoraConfig(rank=2), "quantization": "nf4"}, "model.quantization"),
        ({"lora": LoraConfig(rank=2), "path": "mixture"}, "has experts, which do not support adapters"),
        ({"path": "other"}, "no mapping of weights for .*gpt2"),
    ],
    ids=str,
)
def test_options_that_megatron_lacks_are_refused(folder, changed, message):
    path = folder / changed.pop("path", "base")
    with one_rank() as ranks, pytest.raises(ConfigError, match=message):
        MegatronBackend(
            MegatronConfig(type="megatron"),
            ModelConfig(path=str(path), dtype="float32", **changed),
            TrainConfig(),
            make_algorithm(),
            total_updates=1,
            device="cpu",
            collective=ranks,
        )


def made(kind, cut, given, folder, ranks):
    """A back end of several ranks: Megatron's, or FSDP's shards."""
    settings = settings_of(given, folder)
    back_end, config = BACK_ENDS[kind]
    return back_end(config(type=kind, **cut), collective=ranks, device="cpu", **settings), settings["algorithm"]


def save_and_go_on(kind, cut, given, folder, checkpoint, ranks):
    """Two steps, a checkpoint that is written beside a third; two steps from there, and the same again in a new one."""
    backend, algorithm = made(kind, cut, given, folder, ranks)
    for number in range(2):
        step(backend, algorithm, number)
    written = backend.save(checkpoint)
    step(backend, algorithm, 9)
    written()
    ranks.max(0)
    metrics = []
    for again in (backend, made(kind, cut, given, folder, ranks)[0]):
        again.load(checkpoint)
        metrics.append(go_on(again, algorithm))
        again.close()
    return metrics


def load_and_go_on(kind, cut, given, folder, checkpoint, ranks):
    backend, algorithm = made(kind, cut, given, folder, ranks)
    backend.load(checkpoint)
    return go_on(backend, algorithm)


def went_on_bit_for_bit(world, cut, given, folder, place):
    """Metrics and weights of rank 0 after `save_and_go_on`, which are the same from the checkpoint."""
    (place / "ran").mkdir()
    work = partial(save_and_go_on, "megatron", cut, given, folder, place / "saved")
    first, *_ = run_ranks(work, world, place / "ran")
    (metrics, weights), (same_metrics, same_weights) = first
    assert metrics == same_metrics and weights.keys() == same_weights.keys()
    assert all(torch.equal(tensor, same_weights[name]) for name, tensor in weights.items())
    return metrics, weights


def policy_shards(checkpoint):
    """Read what all ranks wrote of the policy and its moments."""
    files = (checkpoint / "training_state" / "shards").glob("policy_*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("cut", ["tensor", "tensor and pipeline", "tensor and copies"])
def test_ranks_continue_bit_for_bit_and_others_from_there(folder, tmp_path, cut):
    """Bit for bit those of the same cut; within rounding those of another, and one process."""
    world, settings = CUTS[cut]
    first = went_on_bit_for_bit(world, settings, PPO, folder, tmp_path)
    weights = first[1]
    transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert len(list(transformers.parameters())) == len(weights)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved" / "critic")
    files = {path.name for path in tmp_path.joinpath("saved", "training_state").rglob("*.safetensors")}
    assert {f"policy_{rank}.safetensors" for rank in range(world)} <= files, "each rank writes a share"
    given = settings_of(PPO, folder)
    local = LocalBackend(**given)
    local.load(tmp_path / "saved")
    alike(go_on(local, given["algorithm"]), first)
    other, settings = CUTS["tensor and pipeline" if cut == "tensor" else "pipeline"]
    (tmp_path / "other").mkdir()
    work = partial(load_and_go_on, "megatron", settings, PPO, folder, tmp_path / "saved")
    alike(run_ranks(work, other, tmp_path / "other")[0], first)


ROUNDED = case("ppo", dtype="bfloat16")
rounding = pytest.mark.skipif(not has_bfloat16("cpu"), reason="needs a CPU that multiplies bfloat16")


@rounding
@pytest.mark.parametrize("cut", ["tensor", "copies"])
def test_rounded_weights_continue_bit_for_bit_from_float32_ones(folder, tmp_path, cut):
    world, settings = CUTS[cut]
    _, weights = went_on_bit_for_bit(world, settings, ROUNDED, folder, tmp_path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    kept = policy_shards(tmp_path / "saved")
    assert len(kept) == 3 * len(weights) and {tensor.dtype for tensor in kept.values()} == {torch.float32}


def begin(cut, folder, saved, ranks):
    backend, _ = made("megatron", cut, ROUNDED, folder, ranks)
    backend.save(saved)()


@rounding
@pytest.mark.parametrize("cut", ["tensor", "copies"])
def test_trained_weights_start_unrounded(folder, tmp_path, cut):
    world, settings = CUTS[cut]
    (tmp_path / "ran").mkdir()
    run_ranks(partial(begin, settings, folder, tmp_path / "saved"), world, tmp_path / "ran")
    kept = policy_shards(tmp_path / "saved")
    given = load_file(folder / "base" / "model.safetensors")
    assert kept.keys() == {f"policy/weight/{name}" for name in given}
    assert all(torch.equal(kept[f"policy/weight/{name}"], tensor) for name, tensor in given.items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in given.values())


def drop(cut, folder, ranks):
    """Return an adapter's first dropout mask, and after a step the replicated matrices by name."""
    given = case("grpo", lora=LoraConfig(rank=4, dropout=0.5))
    backend, algorithm = made("megatron", cut, given, folder, ranks)
    stage = backend.policy.model
    adapter = next(module for module in stage.modules() if isinstance(module, LowRank))
    left = adapter.dropout(torch.ones(64))
    step(backend, algorithm, 0)
    whole = {key: weight.detach() for key, weight in stage.trained_weights().items() if cut_along(key[0]) is None}
    return left, whole


@pytest.mark.parametrize("cut", ["tensor", "copies"])
def test_no_two_ranks_draw_the_same_dropout_and_what_all_have_stays_the_same(folder, tmp_path, cut):
    """Ranks that share a layer have other tokens of its inputs, or other numbers of theirs."""
    world, settings = CUTS[cut]
    (left, whole), (other, same) = run_ranks(partial(drop, settings, folder), world, tmp_path)
    assert not torch.equal(left, other)
    assert whole.keys() == same.keys() and all(torch.equal(tensor, same[key]) for key, tensor in whole.items())
    assert whole and any(tensor.any() for tensor in whole.values())


def test_adapters_continue_bit_for_bit_and_others_from_there(folder, tmp_path):
    """A checkpoint of tensor-parallel ranks, resumed with pipeline stages, with FSDP and in one process."""
    for name in ("stages", "shards"):
        (tmp_path / name).mkdir()
    first, saved = went_on_bit_for_bit(2, {"tensor": 2}, ADAPTED, folder, tmp_path), tmp_path / "saved"
    given = settings_of(ADAPTED, folder)
    local = LocalBackend(**given)
    local.load(saved)
    alike(go_on(local, given["algorithm"]), first)
    for kind, cut, place in (("megatron", {"pipeline": 2}, "stages"), ("fsdp", {}, "shards")):
        work = partial(load_and_go_on, kind, cut, ADAPTED, folder, saved)
        alike(run_ranks(work, 2, tmp_path / place)[0], first)
    assert not list(saved.glob("model*")), "adapters alone"
    assert len(load_file(saved / "adapter_model.safetensors")) == 2 * 7 * 2
    assert AutoModelForCausalLM.from_pretrained(saved).peft_config["default"].r == 4


def test_a_run_goes_from_shards_to_megatron_and_back(folder, tmp_path):
    for name in ("shards", "megatron", "back"):
        (tmp_path / name).mkdir()
    first, *_ = run_ranks(partial(save_and_go_on, "fsdp", {}, PPO, folder, tmp_path / "one"), 2, tmp_path / "shards")
    work = partial(save_and_go_on_from, tmp_path / "one", folder, tmp_path / "two")
    alike(run_ranks(work, 2, tmp_path / "megatron")[0], first[0])
    work = partial(load_and_go_on, "fsdp", {}, PPO, folder, tmp_path / "two")
    alike(run_ranks(work, 3, tmp_path / "back")[0], first[0])


def save_and_go_on_from(checkpoint, folder, saved, ranks):
    backend, algorithm = made("megatron", {"tensor": 2}, PPO, folder, ranks)
    backend.load(checkpoint)
    backend.save(saved)()
    return go_on(backend, algorithm)


def test_checkpoints_of_other_models_are_refused(folder, tmp_path):
    with one_rank() as ranks:
        backend, _ = made("megatron", {}, PPO, folder, ranks)
        backend.save(tmp_path / "saved")()
        backend.close()
        other, _ = made("megatron", {}, case("ppo", model="untied"), folder, ranks)
        with pytest.raises(ConfigError, match="of another model"):
            other.load(tmp_path / "saved")
        with pytest.raises(ConfigError, match="several ranks"):
            other.load(tmp_path)
