"""Ranks that share each layer's matrices make the step of one process, alone and with shards of everything."""

from functools import partial

import pytest
import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2MoeConfig,
    StableLmConfig,
)

from atomrl.backends.local import LocalBackend
from atomrl.backends.tensor_parallel import check_tensor
from atomrl.config import ConfigError, FSDPConfig, LoraConfig
from atomrl.models.loading import has_bfloat16
from tests.backends.batches import weights_of, written
from tests.backends.comparison import compare
from tests.backends.continuing import alike, go_on, step
from tests.backends.equality import (
    all_cases,
    case,
    compared,
    few,
    locally,
    make_models,
    masked,
    pairs,
    run_ranks,
    settings_of,
    shared,
    with_ranks,
)
from tests.tiny import make_tiny_model

TENSOR = {"fsdp": {"tensor": 2}}
CASES = {
    "grpo": case("grpo", **TENSOR),
    "ppo": case("ppo", **TENSOR),
    "dpo": case("dpo", compared, **TENSOR),
    "dapo": case("dapo", **TENSOR),
    "gspo": case("gspo", **TENSOR),
    "kto": case("kto", compared, **TENSOR),
    "gkd": case("gkd", **TENSOR),
    "reward model": case("reward_model", pairs, **TENSOR),
    "shared prompts": case("grpo", shared, train={"tokens_per_micro_batch": 80, "learning_rate": 3e-5}, **TENSOR),
    "one row": case("grpo", few, **TENSOR),
    "masked rows": case("ppo", masked, **TENSOR),
    "many micro-batches": case("grpo", train={"rows_per_micro_batch": 1}, **TENSOR),
    "transformers": case("grpo", model="mistral", **TENSOR),
    "checkpointed": case("grpo", checkpointed=True, **TENSOR),
    "clipped": case("ppo", train={"max_grad_norm": 0.05}, **TENSOR),
    "norms of heads": case("ppo", model="qwen3", **TENSOR),
    "norms of heads, transformers": case("grpo", model="gemma3", **TENSOR),
    "adapters": case("grpo", lora=LoraConfig(rank=4), axes={"kl": {"coefficient": 0.1}}, **TENSOR),
    "adapters, transformers": case("grpo", model="mistral", lora=LoraConfig(rank=4), **TENSOR),
    "adapters of some layers": case("ppo", lora=LoraConfig(rank=2, target_modules=["q_proj", "down_proj"]), **TENSOR),
}

ON_FOUR = ("grpo", "ppo", "dpo", "reward model", "one row", "masked rows", "norms of heads", "adapters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_models(tmp_path_factory.mktemp("models"))
    small = {
        "vocab_size": 102, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.2, "max_position_embeddings": 64,
    }  # fmt: skip
    shape = MistralConfig(**small)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "mistral")
        shape = Gemma3TextConfig(**small, head_dim=8, layer_types=["full_attention"] * 2)
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "gemma3")
    make_tiny_model(folder / "qwen3", "qwen3")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_make_the_steps_of_one_process(folder, ranks, tmp_path):
    cases = {name: CASES[name] for name in ON_FOUR} if ranks == 4 else CASES
    results = run_ranks(partial(all_cases, cases, folder), ranks, tmp_path)
    for name, given in cases.items():
        compare([rank[name] for rank in results], locally(given, folder))


def train_with_dropout(folder, ranks):
    """This rank's own numbers of an adapter's first matrix, which both have whole; one of them draws beside it."""
    dropped = case("grpo", lora=LoraConfig(rank=4, dropout=0.5), **TENSOR)
    backend, algorithm = with_ranks(dropped, folder, ranks)
    torch.manual_seed(ranks.rank)
    for number in range(2):
        step(backend, algorithm, number)
    weights = backend.roles["policy"].model.named_parameters()
    return {name: weight.to_local().detach().clone() for name, weight in weights if "q_proj.lora_A" in name}


@pytest.mark.slow
def test_ranks_that_share_layers_drop_the_same_of_what_both_have(folder, tmp_path):
    first, second = run_ranks(partial(train_with_dropout, folder), 2, tmp_path)
    assert len(first) == 2
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, atol=1e-6, rtol=1e-6)


def far(actual, other):
    """Distances of losses, of gradient norms, and of weights, each as one vector."""
    metrics = ("actor/pg_loss", "actor/grad_norm")
    vectors = [[torch.tensor([step[name] for step in each["metrics"]]) for name in metrics] for each in (actual, other)]
    weights = [torch.cat([each["weights"][name].flatten() for name in actual["weights"]]) for each in (actual, other)]
    return [float((a - b).norm()) for a, b in (*zip(*vectors, strict=True), weights)]


@pytest.mark.slow
@pytest.mark.skipif(not has_bfloat16("cpu"), reason="needs a CPU that multiplies bfloat16")
def test_in_bfloat16_they_differ_by_its_rounding_alone(folder, tmp_path):
    """From one process's bfloat16 about as far as that is from float32: sums in another order are rounded elsewhere."""
    rounded = case("grpo", dtype="bfloat16", **TENSOR)
    actual = run_ranks(partial(all_cases, {"grpo": rounded}, folder), 2, tmp_path)[0]["grpo"]
    exact, alone = locally(CASES["grpo"], folder), locally(rounded, folder)
    for apart, rounding, whole in zip(far(actual, alone), far(alone, exact), far(actual, exact), strict=True):
        assert apart < 2 * rounding and whole > 0.2 * rounding, (apart, rounding, whole)


def save_and_go_on(name, folder, checkpoint, ranks):
    backend, algorithm = with_ranks(CASES[name], folder, ranks)
    for number in range(2):
        step(backend, algorithm, number)
    written(backend.save(checkpoint))
    weights = {name: tensor.clone() for name, tensor in weights_of(backend).items()}
    ranks.max(0)
    straight = go_on(backend, algorithm)
    again, _ = with_ranks(CASES[name], folder, ranks)
    again.load(checkpoint)
    return weights, straight, go_on(again, algorithm)


def load_and_go_on(folder, checkpoint, ranks):
    backend, algorithm = with_ranks(case("ppo"), folder, ranks)
    backend.load(checkpoint)
    return go_on(backend, algorithm)


@pytest.mark.slow
def test_a_checkpoint_continues_exactly_and_on_ranks_that_share_nothing(folder, tmp_path):
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
    weights, straight, again = run_ranks(partial(save_and_go_on, "ppo", folder, tmp_path / "saved"), 4, places[0])[0]
    assert straight[0] == again[0], "bit for bit"
    assert all(torch.equal(tensor, again[1][name]) for name, tensor in straight[1].items())
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    assert weights and all(torch.equal(tensor, written[name]) for name, tensor in weights.items())
    alike(run_ranks(partial(load_and_go_on, folder, tmp_path / "saved"), 2, places[1])[0], straight)
    settings = settings_of(case("ppo"), folder)
    alone = LocalBackend(**settings)
    alone.load(tmp_path / "saved")
    alike(go_on(alone, settings["algorithm"]), straight)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapters", "norms of heads"])
def test_a_checkpoint_of_what_only_some_ranks_have_continues_exactly(folder, tmp_path, name):
    _, straight, again = run_ranks(partial(save_and_go_on, name, folder, tmp_path / "saved"), 2, tmp_path)[0]
    assert straight[0] == again[0] and straight[1]
    assert all(torch.equal(tensor, again[1][key]) for key, tensor in straight[1].items())
    settings = settings_of(CASES[name], folder)
    alone = LocalBackend(**settings)
    alone.load(tmp_path / "saved")
    alike(go_on(alone, settings["algorithm"]), straight)


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED = {
    "heads": (
        LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=3),
        "does not divide num_key_value_heads=3",
    ),
    "joined matrices": (Phi3Config(), "transformers shards mlp.down_proj as"),
    "experts": (Qwen2MoeConfig(**SMALL), "transformers names .*, which a layer does not have"),
    "weights between matrices": (ApertusConfig(**SMALL), "transformers does not say how to shard mlp.act_fn.alpha_"),
    "several parts": (Gemma3Config(), "transformers has no plan for it"),
    "widths": (Gemma3nTextConfig(), "cannot be sharded"),
    "no plan": (StableLmConfig(), "transformers has no plan for it"),
}


@pytest.mark.parametrize("config, message", REFUSED.values(), ids=REFUSED)
def test_models_that_cannot_be_cut_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        check_tensor(config, 2, "model")


def test_incompatible_settings_are_refused():
    for other in ("sequence", "replicas"):
        with pytest.raises(ValueError, match=r"sequence.*replicas"):
            FSDPConfig(type="fsdp", tensor=2, **{other: 2})
