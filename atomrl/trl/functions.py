"""GRPO in five functions, thin wrappers of the atoms and engines that the trainer uses.

Axes: P prompts, G completions of each, B = P * G rows (prompt and completion, right-padded), T tokens of the longest
row. A tensor `[B, T]` is indexed by the token itself: `logprobs[b, t] = log p(tokens[b, t] | tokens[b, <t])`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from atomrl.atoms.advantages import group_mean_baseline, group_zscore, per_token, raw_reward
from atomrl.atoms.kl import k1_kl, k2_kl, k3_kl
from atomrl.atoms.logprobs import row_logprobs
from atomrl.atoms.masks import masked_mean, masked_sum
from atomrl.atoms.policy_losses import clipped_policy_loss, clipped_tokens, sequence_mean, token_mean, token_ratio
from atomrl.batches import flat_fields
from atomrl.common.chat_template import stop_tokens
from atomrl.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from atomrl.data.processor import DataProcessor
from atomrl.data.rows import to_rows
from atomrl.engines.generation import generate
from atomrl.engines.hf import HFEngine
from atomrl.models.gpt import GPT
from atomrl.models.loading import load_policy
from atomrl.models.transformers_model import HFModel
from atomrl.trainer.build import build_engine, device_name
from atomrl.types import Message, Problem, Prompt, SamplingParams, Trajectory

SAMPLES = ("tokens", "loss_mask", "lengths", "prompt_lengths", "group_ids", "rollout_logprobs", "truncated")


def generate_samples(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | list[dict[str, str]]],
    *,
    num_generations: int = 8,
    max_generate_length: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Sample a group of completions for each prompt.

        o_{p,1}, ..., o_{p,G} ~ pi_theta( . | prompt p)

    Prompts go through the tokenizer's chat template, if it has one, as user messages, as in training. The returned
    tokens are exactly the sampled ones; nothing is decoded and tokenized again.

    Paper: DeepSeekMath, arXiv:2402.03300, section 4.1 ("sample a group of outputs from the old policy").

    Args:
        model: a folder in Hugging Face layout, a hub name, or a loaded transformers model (not changed).
        tokenizer: tokenizer of the model.
        prompts: P texts, or lists of messages.
        num_generations: group size G.
        max_generate_length: maximum tokens of a completion.
        temperature: sampling temperature; 0: greedy.
        seed: the same seed gives the same completions.

    Returns:
        `tokens` [B, T] int64: prompt and completion, padded on the right; rows of one prompt follow each other.
        `loss_mask` [B, T] bool: True on the completion's tokens, the end-of-sequence token included.
        `lengths`, `prompt_lengths` [B] int64: tokens of the row without padding, and of its prompt.
        `group_ids` [B] int64: the index of the prompt.
        `rollout_logprobs` [B, T] float32: of the sampled tokens as the engine computed them, 0 off the mask.
        `truncated` [B] bool: the completion was truncated at `max_generate_length`.

    Raises:
        ValueError: a prompt is empty, or too long for the model's context.

    Example:
        >>> import tempfile
        >>> from atomrl.models.gpt import new_gpt
        >>> from atomrl.models.loading import save_model
        >>> from atomrl.models.tokenizer import make_tokenizer
        >>> tokenizer, folder = make_tokenizer(), tempfile.mkdtemp()
        >>> gpt = new_gpt(vocab_size=len(tokenizer), layers=1, hidden=32, heads=1, eos_token_id=1, pad_token_id=0)
        >>> save_model(gpt, tokenizer, folder)
        >>> samples = generate_samples(folder, tokenizer, ["1+1="], num_generations=3, max_generate_length=4)
        >>> samples["group_ids"], samples["prompt_lengths"]  # <|user|> 1 + 1 = <|assistant|>
        (tensor([0, 0, 0]), tensor([6, 6, 6]))
        >>> rows = zip(samples["tokens"], samples["loss_mask"])
        >>> texts = [tokenizer.decode(tokens[mask], skip_special_tokens=True) for tokens, mask in rows]
        >>> len(texts)
        3
    """
    if isinstance(prompts, str) or not prompts:
        raise ValueError("prompts must be a list of at least one prompt")
    prompt = [text if isinstance(text, str) else tuple(cast(list[Message], text)) for text in prompts]
    items = [(str(i), Problem(problem_id=str(i), prompt=text, ground_truth=None)) for i, text in enumerate(prompt)]
    sampling = SamplingParams(
        completions_per_prompt=num_generations,
        max_completion_tokens=max_generate_length,
        temperature=temperature,
        seed=seed,
    )
    data = DataConfig(train="-", max_prompt_tokens=10**6)
    batch = DataProcessor(tokenizer, data).to_prompts(items)
    if isinstance(model, str | Path):
        config = RunConfig(run_name="samples", model=ModelConfig(path=str(model)), data=data)
        engine = build_engine(config, str(model), tokenizer)
        trajectories = generate(engine, batch, sampling)
        engine.close()
    else:
        trajectories = _generate_with(model, tokenizer, batch, sampling)
    rows = to_rows([replace(item, reward=0.0) for item in trajectories])
    fields = flat_fields(rows)
    return {name: fields[name] for name in SAMPLES}


def _generate_with(model: Any, tokenizer: Any, batch: Sequence[Prompt], sampling: SamplingParams) -> list[Trajectory]:
    """Sample with a loaded transformers model; its settings are restored afterwards."""
    from transformers import GenerationConfig

    if not hasattr(model, "generate"):
        raise TypeError(f"model must be a folder, a hub name or a transformers model, not {type(model).__name__}")
    own, head = model.generation_config, model.get_output_embeddings()
    eos = stop_tokens(tokenizer, model.config, own)
    forward = {name: value for name, value in vars(head).items() if name == "forward"}
    model.generation_config = GenerationConfig()  # the model's own sampling settings must not apply
    try:
        with _evaluating(model):
            engine = HFEngine(model, eos, tokenizer, RolloutConfig().concurrent_completions)
            return generate(engine, batch, sampling)
    finally:
        model.generation_config = own
        vars(head).pop("forward", None)  # set by the engine
        vars(head).update(forward)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Set a model to evaluation mode within the block, and then restore the mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def get_action_log_probs(
    model: Any, tokens: Int[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"], temperature: float = 1.0
) -> dict[str, Tensor]:
    """Compute log-probs and entropies of the sampled tokens.

        logprobs[b, t] = log pi_theta(tokens[b, t] | tokens[b, <t])
                       = z_x - log sum_v exp(z_v),   z = logits / temperature at position t - 1, x = tokens[b, t]

    Call it on the policy with gradient for `logprobs`; once before the updates, under `torch.no_grad()`, for
    `old_logprobs`; on the frozen initial model for `ref_logprobs`. The shift by one position is done here. Logits are
    computed in chunks of tokens, so [B, T, V] never exists.

    Paper: PPO, arXiv:1707.06347 (the policy's probability of an action); a language model's action is a token.

    Args:
        model: a transformers causal language model, AtomRL's own `GPT`, or a path (loaded for this call).
        tokens: rows as `generate_samples` makes them: prompt and completion, padded on the right.
        loss_mask: True on the tokens of the completion; others get 0.
        temperature: the sampling temperature (1 for greedy).

    Returns:
        `logprobs` [B, T] float32: nats, at most 0; 0 off the mask. With gradient, unless under `torch.no_grad()`.
        `entropy` [B, T] float32: entropy in nats of the distribution at each token; 0 off the mask.

    Raises:
        ValueError: the temperature is not above 0, or the shapes differ.

    Example:
        >>> import torch
        >>> from atomrl.models.gpt import new_gpt
        >>> model = new_gpt(vocab_size=11, layers=1, hidden=32, heads=1)
        >>> tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])          # prompt 5 6, completions 7 8 and 9
        >>> loss_mask = torch.tensor([[False, False, True, True], [False, False, True, False]])
        >>> result = get_action_log_probs(model, tokens, loss_mask)
        >>> result["logprobs"].shape, (result["logprobs"] < 0).tolist()
        (torch.Size([2, 4]), [[False, False, True, True], [False, False, True, False]])
        >>> result["logprobs"].requires_grad
        True
    """
    if tokens.shape != loss_mask.shape:
        raise ValueError(
            f"tokens {tuple(tokens.shape)} and loss_mask {tuple(loss_mask.shape)} must have the same shape"
        )
    policy = _as_policy(model)
    hidden = policy.forward_hidden(tokens)
    logprobs, entropy = row_logprobs(hidden, policy.head_weight, tokens, loss_mask, temperature, with_entropy=True)
    assert entropy is not None
    return {"logprobs": logprobs, "entropy": entropy}


def _as_policy(model: Any) -> GPT | HFModel:
    if isinstance(model, GPT | HFModel):
        return model
    if isinstance(model, str | Path):
        return load_policy(model, trainable=False, device=device_name())
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"model must be a causal language model or a path, not {type(model).__name__}")
    policy = HFModel(model)
    with _evaluating(model):
        policy.check(streams=False)
    return policy


def compute_advantages(
    rewards: Shaped[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    loss_mask: Bool[Tensor, "B T"],
    mode: Literal["grpo", "grpo_no_std", "raw"] = "grpo",
    eps: float = 1e-6,
) -> dict[str, Tensor]:
    """Compute group-relative advantages, which replace a critic.

        grpo          A_i = (r_i - mean_group r) / (std_group r + eps)
        grpo_no_std   A_i = r_i - mean_group r                           (Dr. GRPO)
        raw           A_i = r_i                                          (REINFORCE)

    Every token gets the advantage of its completion. A group with equal rewards has advantage exactly 0, and so gives
    no gradient.

    Paper: DeepSeekMath, arXiv:2402.03300, section 4.1.2; Dr. GRPO, arXiv:2503.20783.

    Args:
        rewards: reward of each completion: float, integer or bool.
        group_ids: equal for completions of one prompt.
        loss_mask: True on the completion's tokens.
        mode: one of the three equations.
        eps: added to the standard deviation (only `grpo`).

    Returns:
        `advantages` [B, T]: per token, 0 off the mask, without gradient.
        `sequence_advantages` [B]: per completion.
        `centred_rewards` [B]: reward minus the mean of its group, in every mode.

    Raises:
        ValueError: the mode is unknown, or eps is negative.

    Example:
        >>> import torch
        >>> loss_mask = torch.tensor([[False, True, True], [False, True, False]])
        >>> result = compute_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), loss_mask)
        >>> result["advantages"]
        tensor([[ 0.0000,  0.7071,  0.7071],
                [ 0.0000, -0.7071,  0.0000]])
        >>> result["centred_rewards"]
        tensor([ 0.5000, -0.5000])
    """
    modes: dict[str, Callable[..., Tensor]]
    modes = {"grpo": partial(group_zscore, eps=eps), "grpo_no_std": group_mean_baseline, "raw": raw_reward}
    if mode not in modes:
        raise ValueError(f"mode {mode!r} is not one of grpo, grpo_no_std, raw")
    credit = modes[mode](rewards, group_ids)
    return {
        "advantages": per_token(credit, loss_mask),
        "sequence_advantages": credit,
        "centred_rewards": group_mean_baseline(rewards, group_ids),
    }


def compute_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    aggregate: Literal["token_mean", "sequence_mean"] = "token_mean",
) -> dict[str, Tensor]:
    """Compute PPO's clipped policy loss.

        rho_t = exp(logprobs_t - old_logprobs_t)
        L_t   = -min(rho_t A_t, clip(rho_t, 1 - clip_eps, 1 + clip_eps_high) A_t)
        loss  = sum_{b,t} w_{b,t} L_{b,t}

    On the first update after sampling rho is 1, the loss is minus the mean advantage (near 0 for GRPO), and the
    gradient is that of REINFORCE. The clip acts from the second update on the same samples.

    Paper: PPO, arXiv:1707.06347, equation 7; DeepSeekMath, arXiv:2402.03300, equation 3 (which averages by
    `sequence_mean`); two clip bounds: DAPO, arXiv:2503.14476.

    Args:
        logprobs: log-probs of the policy, with gradient.
        old_logprobs: log-probs of the policy that sampled, without gradient.
        advantages: per token.
        loss_mask: True on the completion's tokens; values off the mask have no effect, NaN included.
        clip_eps: clip range below and above 1.
        clip_eps_high: clip range above 1, if it differs.
        aggregate: `token_mean` weights all tokens equally, `sequence_mean` all completions.

    Returns:
        `loss` []: scalar, for `backward()`.
        `per_token_loss` [B, T]: L, unweighted.
        `loss_weights` [B, T]: w; sums to 1.
        `ratio` [B, T]: rho, 1 off the mask.
        `clipped` [B, T] bool: tokens without gradient because of the clip.

    Raises:
        ValueError: a clip bound is negative, or the aggregate is unknown.

    Example:
        >>> import torch
        >>> logprobs = torch.tensor([[0.0, -0.5, -1.0]], requires_grad=True)
        >>> old_logprobs = torch.tensor([[0.0, -1.0, -1.0]])
        >>> loss_mask = torch.tensor([[False, True, True]])
        >>> result = compute_policy_loss(logprobs, old_logprobs, loss_mask.float(), loss_mask)
        >>> result["ratio"].detach(), result["clipped"]
        (tensor([[1.0000, 1.6487, 1.0000]]), tensor([[False,  True, False]]))
        >>> result["loss"].backward(); logprobs.grad
        tensor([[ 0.0000,  0.0000, -0.5000]])
    """
    aggregates = {"token_mean": token_mean, "sequence_mean": sequence_mean}
    if aggregate not in aggregates:
        raise ValueError(f"aggregate {aggregate!r} is not one of token_mean, sequence_mean")
    high = clip_eps if clip_eps_high is None else clip_eps_high
    ratio = token_ratio(logprobs, old_logprobs, loss_mask)
    per_token_loss = clipped_policy_loss(ratio, advantages, clip_eps, high)
    weights = aggregates[aggregate](loss_mask)
    return {
        "loss": masked_sum(weights * per_token_loss, loss_mask),
        "per_token_loss": per_token_loss,
        "loss_weights": weights,
        "ratio": ratio,
        "clipped": clipped_tokens(ratio, advantages, clip_eps, high) & loss_mask,
    }


def compute_kl_penalty(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> dict[str, Tensor]:
    """Estimate the KL divergence from the reference policy, per token.

        d_t  = logprobs_t - ref_logprobs_t
        k1_t = d_t                      unbiased, of high variance
        k2_t = d_t^2 / 2                biased; its gradient is that of the KL
        k3_t = exp(-d_t) - 1 + d_t      unbiased, never negative: GRPO's

    The loss of GRPO is `compute_policy_loss(...)["loss"] + beta * compute_kl_penalty(...)["mean_kl"]`; beta is 0.04 in
    the paper, and many use 0 today.

    Paper: DeepSeekMath, arXiv:2402.03300, equation 4; Schulman, "Approximating KL divergence" (2020).

    Args:
        logprobs: log-probs of the policy, with gradient.
        ref_logprobs: log-probs of the reference, without gradient.
        loss_mask: True on the completion's tokens.
        estimator: one of the three.

    Returns:
        `kl` [B, T]: estimate at each token in nats, 0 off the mask.
        `mean_kl` []: mean over the mask.

    Raises:
        ValueError: the estimator is unknown.

    Example:
        >>> import torch
        >>> result = compute_kl_penalty(torch.tensor([[-1.0, 9.0]]), torch.tensor([[-1.5, 0.0]]),
        ...                             torch.tensor([[True, False]]))
        >>> result["kl"], result["mean_kl"]
        (tensor([[0.1065, 0.0000]]), tensor(0.1065))
    """
    estimators = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}
    if estimator not in estimators:
        raise ValueError(f"estimator {estimator!r} is not one of k1, k2, k3")
    kl = estimators[estimator](logprobs, ref_logprobs, loss_mask)
    return {"kl": kl, "mean_kl": masked_mean(kl, loss_mask)}
