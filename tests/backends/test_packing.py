"""Rows end to end make the steps of padded rows."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MistralConfig, OPTConfig

from atomrl.backends.roles import load_role
from atomrl.config import ConfigError, CriticConfig, LoraConfig, ModelConfig
from atomrl.models.loading import load_policy
from atomrl.models.stream import states_before
from tests.backends.comparison import compare
from tests.backends.equality import alone_by_pytorch, case, drawn, few, locally, make_models, masked

SHAPE = {"vocab_size": 102, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def shared(seed):
    """Groups of which every row begins with the same prompt, of unequal lengths."""
    rows = drawn(seed)
    for group in rows.group_ids.unique():
        own = (rows.group_ids == group).nonzero()[:, 0]
        shortest = int(rows.prompt_lengths[own].min())
        rows.prompt_lengths[own] = shortest
        rows.tokens[own, :shortest] = rows.tokens[own[0], :shortest]
    return rows


CRITIC = {"critic": CriticConfig(path="base", learning_rate=1e-3)}
CASES = {
    "base": case("grpo", shared),
    "critic": case("ppo", shared, **CRITIC),
    "transformers": case("grpo", shared),
    "transformers, rows that share nothing": case("grpo"),
    "transformers and a critic": case("ppo", shared, **CRITIC),
    "transformers and a distilled teacher": case("gkd", shared),
    "one row": case("gspo", few),
    "masked rows": case("gspo", masked),
    "adapters": case("grpo", shared, lora=LoraConfig(rank=4), axes={"kl": {"coefficient": 0.1}}),
    "checkpointed": case("grpo", shared, checkpointed=True),
    "windows shorter than a row": case("grpo", shared),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_models(tmp_path_factory.mktemp("models"))
    with torch.random.fork_rng():
        for name, window in (("mistral", None), ("windows", 6)):
            torch.manual_seed(0)
            config = MistralConfig(
                **SHAPE, num_key_value_heads=2, intermediate_size=48, sliding_window=window, initializer_range=0.3
            )
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        shape = OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, init_std=0.3)
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "opt")
        shape = MambaConfig(vocab_size=102, hidden_size=32, num_hidden_layers=2)
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "mamba")
    return folder


def with_rows(name, folder, pack_rows):
    model = {"base": "base", "critic": "base", "windows shorter than a row": "windows"}.get(name, "mistral")
    given = CASES[name] | {"model": model}
    alone = alone_by_pytorch if name == "critic" else locally
    return alone(given | {"settings": given["settings"] | {"pack_rows": pack_rows}}, folder)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_padded_rows(folder, name):
    # other kernels, and norms of 115 and 162: off by 1.3e-5 in the tenth update, and by 1.8e-5 where there is AMX
    looser = {"base": 2e-5, "critic": 2e-5}.get(name, 1e-5)
    compare([with_rows(name, folder, True)], with_rows(name, folder, False), looser)


@pytest.mark.parametrize("family", ["mistral", "other", "opt", "windows"])
def test_states_are_those_of_padded_rows(folder, family):
    model, rows = load_policy(folder / family, dtype="float32"), shared(1)
    seen = []
    model.inner.get_input_embeddings().register_forward_hook(lambda *inputs: seen.append(inputs[1][0].numel()))

    def states(pack_rows):
        model.pack_rows = pack_rows
        model.zero_grad()
        states, _ = states_before(model, rows.tokens, rows.loss_mask, rows.prompt_lengths)
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        return states.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    (padded, expected), (packed, gradients) = states(False), states(True)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name  # of biases of keys it is 0
    assert seen[0] == rows.tokens.numel() and (seen[1] < 0.8 * seen[0]) == (family != "windows")


def test_a_model_that_carries_a_state_along_its_row_is_refused(folder):
    assert not load_policy(folder / "mamba", dtype="float32").shares_prompts
    with pytest.raises(ConfigError, match=r"model\.pack_rows=true"):
        load_role("policy", str(folder / "mamba"), ModelConfig(pack_rows=True), torch.device("cpu"))
