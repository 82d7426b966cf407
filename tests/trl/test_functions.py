"""The five functions: tensors of the documented shapes, and the numbers of the trainer itself."""

import inspect
import pydoc

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import atomrl.trl as facade
from atomrl.algorithms.grpo import GRPO
from atomrl.batches import TrainingBatch
from atomrl.models.loading import load_policy, load_tokenizer
from atomrl.protocols import ModelOutputs
from atomrl.trl import (
    compute_advantages,
    compute_kl_penalty,
    compute_policy_loss,
    generate_samples,
    get_action_log_probs,
)
from tests.tiny import make_tiny_model

FIVE = ("generate_samples", "get_action_log_probs", "compute_advantages", "compute_policy_loss", "compute_kl_penalty")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def samples(model):
    tokenizer = load_tokenizer(model)
    return generate_samples(model, tokenizer, ["1+1=", "12+34="], num_generations=3, max_generate_length=6, seed=1)


def test_samples_are_the_documented_tensors(samples):
    rows, longest = samples["tokens"].shape
    assert rows == 6 and samples["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    kinds = {"tokens": torch.int64, "loss_mask": torch.bool, "lengths": torch.int64, "prompt_lengths": torch.int64,
             "group_ids": torch.int64, "rollout_logprobs": torch.float32, "truncated": torch.bool}  # fmt: skip
    assert {name: tensor.dtype for name, tensor in samples.items()} == kinds
    positions = torch.arange(longest)
    inside = (positions >= samples["prompt_lengths"][:, None]) & (positions < samples["lengths"][:, None])
    assert torch.equal(samples["loss_mask"], inside)
    assert (samples["rollout_logprobs"][inside] < 0).all() and not samples["rollout_logprobs"][~inside].any()


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_path_and_a_loaded_model_and_our_own_have_the_same_log_probs(model, bfloat16, monkeypatch):
    """By a path, in the precision of the machine; a model that is loaded, in its own."""
    monkeypatch.setattr("atomrl.models.loading.has_bfloat16", lambda device: bfloat16)
    prompts = ["1+1=", "12+34="]
    samples = generate_samples(model, load_tokenizer(model), prompts, num_generations=3, max_generate_length=6, seed=1)
    hf = AutoModelForCausalLM.from_pretrained(model)
    logits = hf(samples["tokens"]).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, samples["tokens"][:, 1:, None])[..., 0]
    for given in (model, hf, load_policy(model)):
        result = get_action_log_probs(given, samples["tokens"], samples["loss_mask"])
        mask = samples["loss_mask"]
        own, drawn = (0.3 if bfloat16 and given is not hf else 1e-5), (0.3 if bfloat16 else 1e-4)
        assert torch.allclose(result["logprobs"][:, 1:][mask[:, 1:]], expected[mask[:, 1:]], atol=own)
        assert torch.allclose(result["logprobs"][mask], samples["rollout_logprobs"][mask], atol=drawn)
        assert not result["logprobs"][~mask].any() and not result["entropy"][~mask].any()
        assert (result["entropy"][mask] > 0).all()
    assert result["logprobs"].requires_grad
    entropy = -(logits.exp() * logits).sum(-1)[mask[:, 1:]]
    assert torch.allclose(result["entropy"][mask], entropy, atol=0.3 if bfloat16 else 1e-4)


def test_a_loaded_model_draws_and_stays_as_it_was(model):
    hf = AutoModelForCausalLM.from_pretrained(model).train()
    settings, weights = hf.generation_config, {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    tokenizer = load_tokenizer(model)
    draws = [
        generate_samples(hf, tokenizer, ["1+1="], num_generations=2, max_generate_length=4, seed=s) for s in (3, 3)
    ]
    assert torch.equal(draws[0]["tokens"], draws[1]["tokens"])
    assert hf.training and hf.generation_config is settings
    assert all(torch.equal(tensor, weights[name]) for name, tensor in hf.state_dict().items())
    mask = draws[0]["loss_mask"]
    again = get_action_log_probs(hf.eval(), draws[0]["tokens"], mask)["logprobs"]
    assert torch.allclose(again[mask], draws[0]["rollout_logprobs"][mask], atol=1e-4)


def as_it_is(model):
    """Return the state of a model that its owner can see."""
    modules = list(model.modules())
    return {
        "attention": model.config._attn_implementation,
        "config": model.config.to_json_string(),
        "generation": model.generation_config.to_json_string(),
        "training": [module.training for module in modules],
        "attributes": [sorted(vars(module)) for module in modules],
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules],
        "gradients": [(weight.requires_grad, weight.grad is None, weight.dtype) for weight in model.parameters()],
    }


@pytest.mark.parametrize("family", ["llama", "gpt2 with dropout", "bfloat16", "eager", "partly in training"])
def test_a_loaded_model_is_left_as_it_was(model, samples, family):
    tokenizer = load_tokenizer(model)
    dtype = torch.bfloat16 if family == "bfloat16" else torch.float32
    attention = "eager" if family == "eager" else "sdpa"
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=attention)
    if family.startswith("gpt2"):
        small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
        hf = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **small)).train()
    if family.startswith("partly"):
        hf.model.layers[1].train()
    tokens, mask = samples["tokens"], torch.ones_like(samples["tokens"])
    mask[1, :2] = 0
    before = as_it_is(hf)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        logits = hf(tokens, attention_mask=mask).logits
    get_action_log_probs(hf, tokens, samples["loss_mask"])
    generate_samples(hf, tokenizer, ["1+1="], num_generations=2, max_generate_length=3)
    assert as_it_is(hf) == before
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        again = hf(tokens, attention_mask=mask).logits
    assert torch.equal(again, logits) and again.dtype == dtype


def test_loss_and_gradient_are_the_trainers(samples):
    """The trainer computes them from a batch; the functions from tensors."""
    torch.manual_seed(0)
    mask, rows = samples["loss_mask"], samples["tokens"].shape[0]
    old = torch.where(mask, -torch.rand(mask.shape), 0.0)
    rewards = torch.rand(rows)
    credit = compute_advantages(rewards, samples["group_ids"], mask)
    new = (old + 0.4 * torch.randn(mask.shape)).requires_grad_()
    result = compute_policy_loss(new, old, credit["advantages"], mask)
    kl = compute_kl_penalty(new, old, mask)
    (result["loss"] + 0.1 * kl["mean_kl"]).backward()
    own = new.grad.clone()
    new.grad = None
    objective = GRPO.override({"kl": {"coefficient": 0.1}})
    rest = {
        name: samples[name] for name in ("tokens", "loss_mask", "lengths", "prompt_lengths", "group_ids", "truncated")
    }
    batch = TrainingBatch(
        **rest, rewards=rewards, advantages=credit["advantages"], loss_weights=result["loss_weights"],
        old_logprobs=old, ref_logprobs=old,
    )  # fmt: skip
    theirs = objective.loss(ModelOutputs(logprobs=new), batch)
    theirs.loss.backward()
    assert torch.allclose(new.grad, own) and own.abs().max() > 0
    assert torch.allclose(theirs.loss, result["loss"] + 0.1 * kl["mean_kl"])
    assert theirs.metrics["actor/pg_clipfrac"].value == pytest.approx((result["clipped"].sum() / mask.sum()).item())


def test_garbage_off_the_mask_does_nothing():
    mask = torch.tensor([[False, True, False]])
    for garbage in (float("nan"), float("inf"), 1e30):
        new = torch.tensor([[garbage, -1.0, garbage]], requires_grad=True)
        old = torch.tensor([[0.0, -1.5, 0.0]])
        loss = compute_policy_loss(new, old, mask.float(), mask)["loss"] + compute_kl_penalty(new, old, mask)["mean_kl"]
        loss.backward()
        assert loss.isfinite() and new.grad.isfinite().all() and new.grad[0, 1] != 0


def test_advantages_of_every_mode():
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 2, dtype=torch.bool)
    expected = {"grpo": [0.7071, -0.7071, 0, 0], "grpo_no_std": [0.5, -0.5, 0, 0], "raw": [1, 0, 1, 1]}
    for mode, values in expected.items():
        result = compute_advantages(rewards, groups, mask, mode)
        assert torch.allclose(result["sequence_advantages"], torch.tensor(values, dtype=torch.float32), atol=1e-4)
        assert torch.equal(result["advantages"], result["sequence_advantages"][:, None].expand(4, 2))
        assert result["centred_rewards"].tolist() == [0.5, -0.5, 0, 0]


def test_what_cannot_be():
    mask = torch.ones(1, 2, dtype=torch.bool)
    zeros = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="not one of grpo"):
        compute_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.long), mask, "gae")
    with pytest.raises(ValueError, match="not one of token_mean"):
        compute_policy_loss(zeros, zeros, zeros, mask, aggregate="mean")
    with pytest.raises(ValueError, match="not one of k1"):
        compute_kl_penalty(zeros, zeros, mask, "k4")
    with pytest.raises(ValueError, match="same shape"):
        get_action_log_probs(object(), torch.zeros(1, 3, dtype=torch.long), mask)
    with pytest.raises(TypeError, match="not object"):
        get_action_log_probs(object(), torch.zeros(1, 2, dtype=torch.long), mask)
    for prompts in ("1+1=", []):
        with pytest.raises(ValueError, match="at least one"):
            generate_samples("m", None, prompts)


@pytest.mark.parametrize("name", FIVE)
def test_help_has_paper_arguments_errors_and_an_example(name):
    text = inspect.getdoc(getattr(facade, name))
    for part in ("arXiv:", "Args:", "Returns:", "Raises:", "Example:", ">>> ", "[B"):
        assert part in text, part


def test_help_shows_the_equation():
    shown = pydoc.render_doc(get_action_log_probs, renderer=pydoc.plaintext)
    assert "log pi_theta(tokens[b, t] | tokens[b, <t])" in shown and "loss_mask" in shown


@pytest.mark.parametrize("mode", ["grpo", "grpo_no_std", "raw"])
def test_rewards_may_be_whole_numbers_or_bools(mode):
    rewards, ids, mask = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, 2) > 0
    wanted = compute_advantages(rewards, ids, mask, mode=mode)
    for dtype in (torch.int64, torch.bool):
        actual = compute_advantages(rewards.to(dtype), ids, mask, mode=mode)
        assert all(torch.equal(actual[name], wanted[name]) for name in wanted)
    with pytest.raises(TypeError, match="rewards"):
        compute_advantages([1.0, 0.0, 0.0, 1.0], ids, mask, mode=mode)
