"""Parts of the Megatron back end: weights in two layouts, log-probs over a sharded vocabulary."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from atomrl.atoms.logprobs import row_logprobs
from atomrl.backends.megatron.layout import SEVERAL, cut, cut_all, cut_along, join_parts, layer_names, padded_vocabulary
from atomrl.backends.megatron.shapes import check_shape
from atomrl.backends.vocabulary_parallel import parallel_row_logprobs, whole_rows
from atomrl.config import ConfigError, MegatronConfig
from atomrl.models.gpt import GPT
from tests.backends.equality import run_ranks

VOCABULARY = 11


def made(tied, family="qwen2"):
    shape = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    return GPT(kind(vocab_size=VOCABULARY, tie_word_embeddings=tied, **shape, **heads))


def names_of(layers, tied, family):
    layer = ["input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.linear_qkv.weight"]
    layer += ["self_attention.linear_proj.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    layer += ["self_attention.linear_qkv.bias"] * (family == "qwen2")
    layer += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"] * (family == "qwen3")
    ends = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"] + ["output_layer.weight"] * (not tied)
    return [(name, None) for name in ends] + [(name, number) for number in range(layers) for name in layer]


@pytest.mark.parametrize("tensor", [1, 2])
def test_adapters_are_restored_with_the_part_beneath_them(tensor):
    """On each rank B A is what the adapter adds to that rank's part of the matrix, or of its inputs."""
    model = made(True)
    weights = dict(model.named_parameters())
    for module, parts in {**SEVERAL, "mlp.linear_fc2": ["mlp.down_proj"]}.items():
        for own in parts:
            beneath, prefix = weights[f"model.layers.0.{own}.weight"], f"model.layers.0.{own}"
            names = [f"{module}.{own.rpartition('.')[2]}.lora_{which}" for which in "AB"]
            whole = [torch.randn(3, beneath.shape[1]), torch.randn(len(beneath), 3)]
            given = dict(zip([f"{prefix}.lora_{which}.default.weight" for which in "AB"], whole, strict=True))
            read = given.__getitem__
            ranks = [[cut(name, 0, read, model.spec, rank, tensor) for name in names] for rank in range(tensor)]
            added = torch.cat([b @ a for a, b in ranks], dim=cut_along(f"{module}.weight"))
            torch.testing.assert_close(added, whole[1] @ whole[0])
            restored = {}
            for name, pieces in zip(names, zip(*ranks, strict=True), strict=True):
                restored |= join_parts(name, 0, pieces, model.spec)
            assert restored.keys() == given.keys() and all(torch.equal(restored[name], given[name]) for name in given)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_rank_keeps_its_shard_and_no_whole_weight(family):
    model = made(False, family)
    whole = dict(model.state_dict())
    first = ("embedding.word_embeddings.weight", None)
    kept = cut_all([first, *((name, 1) for name in layer_names([]))], whole, model.spec, 1, 2)
    named = {key for key in names_of(2, False, family) if key[1] == 1 or key == first}
    assert kept.keys() == named
    assert all(torch.equal(kept[key], cut(*key, whole.__getitem__, model.spec, 1, 2)) for key in named)
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in kept.values())
    assert not {part.untyped_storage().data_ptr() for part in kept.values()} & {w.data_ptr() for w in whole.values()}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_are_restored(family, tied, tensor):
    model = made(tied, family)
    weights = dict(model.named_parameters())
    restored = {}
    for name, layer in names_of(2, tied, family):
        parts = [cut(name, layer, weights.__getitem__, model.spec, rank, tensor) for rank in range(tensor)]
        restored |= join_parts(name, layer, parts, model.spec)
    assert restored.keys() == weights.keys()
    assert all(torch.equal(restored[name], weight) for name, weight in weights.items())


def test_a_rank_has_some_key_heads_with_their_queries():
    model, size = made(True), 8
    weights = dict(model.named_parameters())
    part = cut("self_attention.linear_qkv.weight", 0, weights.__getitem__, model.spec, 1, 2)
    query, key, value = (weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(part, torch.cat([query[2 * size :], key[size:], value[size:]]))


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"tensor": 4}, "key heads"), ({"tensor": 3}, "heads"), ({"pipeline": 3}, "2 layers")],
    ids=str,
)
def test_weights_that_cannot_be_sharded_are_named(settings, what):
    with pytest.raises(ConfigError, match=what):
        check_shape(made(True).config, MegatronConfig(type="megatron", **settings), "model")


def parallel(ranks):
    """Log-probs, entropies and gradients of this rank's rows of the output matrix."""
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 6), torch.randn(VOCABULARY, 6)
    tokens, mask = torch.randint(VOCABULARY, (2, 4)), torch.ones(2, 4, dtype=torch.bool)
    mask[:, 0] = mask[1, 3] = False
    weigh = torch.randn(2, 2, 4)
    size = padded_vocabulary(VOCABULARY, 2) // 2
    own = head[ranks.rank * size :][:size].clone() if ranks.world == 2 else head.clone()
    hidden.requires_grad_(), own.requires_grad_()
    if ranks.world == 2:
        arguments = mask, ranks.rank * size, 0.7, dist.group.WORLD, True
        logprobs, entropy = parallel_row_logprobs(hidden, own, tokens, *arguments, chunk_tokens=2)
    else:
        logprobs, entropy = row_logprobs(hidden, own, tokens, mask, 0.7, None, True)
    (logprobs * weigh[0] + entropy * weigh[1]).sum().backward()
    return [logprobs.detach(), entropy.detach(), hidden.grad, own.grad]


def gathered(ranks):
    weight = torch.full((2, 3), float(ranks.rank), requires_grad=True)
    whole = whole_rows(weight, dist.group.WORLD)
    (whole * torch.arange(4.0)[:, None]).sum().backward()
    return [whole.detach(), weight.grad]


def both(ranks):
    return parallel(ranks), gathered(ranks)


def test_parts_of_a_vocabulary_give_what_the_whole_one_gives(tmp_path):
    class One:
        rank, world = 0, 1

    expected = parallel(One)
    (first, rows), (second, _) = run_ranks(both, 2, tmp_path)
    for mine, theirs in zip(first[:3], expected[:3], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.cat([first[3], second[3]]), expected[3], atol=1e-6, rtol=1e-5)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first[:3], second[:3], strict=True))
    assert torch.equal(rows[0], torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 3))
    assert torch.equal(rows[1], torch.tensor([0.0, 1.0])[:, None].expand(2, 3))
