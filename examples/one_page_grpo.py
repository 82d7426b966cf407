"""GRPO in one file: python examples/one_page_grpo.py

1. SFT: a small GPT with random weights learns from worked solutions. Most of them skip the steps, so the model mostly
   guesses an answer, and is mostly wrong.
2. GRPO: the model samples several completions of each problem. Training raises the probability of completions with a
   higher reward than the others of the same problem. The model learns to write the steps down.

This file uses AtomRL's atoms (tensor functions of one equation each), its GPT and its task, but not its training loop.
It takes about two minutes on two CPU cores.
"""

import argparse
import random
import time

import torch
from torch.optim.lr_scheduler import OneCycleLR

from atomrl.atoms.advantages import group_zscore, per_token
from atomrl.atoms.logprobs import row_logprobs
from atomrl.atoms.policy_losses import clipped_policy_loss, token_mean, token_ratio
from atomrl.data.tasks import content_split
from atomrl.data.tasks.chain import CHAIN_WORDS, demonstrate_chain, make_chain
from atomrl.models.gpt import new_gpt
from atomrl.models.tokenizer import make_tokenizer
from atomrl.rewards import strict_math

STEPS_OF_A_PROBLEM = 5  # with one value all prompts have the same length, so sampling needs no padding
MAX_COMPLETION_TOKENS = 40


def make_problems(rng, count, split="train"):
    """Return `count` problems of one split. A hash of the text assigns each problem to a split."""
    problems = []
    while len(problems) < count:
        problem = make_chain(rng, min_steps=STEPS_OF_A_PROBLEM, max_steps=STEPS_OF_A_PROBLEM)
        if content_split(problem["prompt"]) == split:
            problems.append(problem)
    return problems


def encode(tokenizer, problems):
    """Tokenize prompts into one tensor [P, prompt tokens]."""
    texts = [f"<|user|>{problem['prompt']}<|assistant|>" for problem in problems]
    return torch.tensor(tokenizer(texts)["input_ids"])


def logprobs_and_mask(model, tokens, prompt_tokens, eos):
    """Return log-probs [B, T], and the mask [B, T] of the completions' tokens, the first end-of-sequence included."""
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    ended = (tokens[:, prompt_tokens:] == eos).int()
    mask[:, prompt_tokens:] = ended.cumsum(1) - ended == 0  # no end before this token
    logprobs, _ = row_logprobs(model.forward_hidden(tokens), model.head_weight, tokens, mask)
    return logprobs, mask


def imitate(model, tokenizer, rng, rows):
    """Return the SFT loss: minus the mean log-prob of the demonstrations' tokens."""
    problems = make_problems(rng, rows)
    prompts = encode(tokenizer, problems)
    solutions = [demonstrate_chain(rng, problem) + "<|end|>" for problem in problems]
    solutions = tokenizer(solutions, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    tokens = torch.cat([prompts, solutions], dim=1)
    logprobs, mask = logprobs_and_mask(model, tokens, prompts.shape[1], tokenizer.eos_token_id)
    return -(token_mean(mask) * logprobs).sum()


@torch.no_grad()
def sample(model, prompts, eos):
    """Sample until all rows [B, prompt tokens] have ended. Without a KV cache, each token costs a full forward pass."""
    tokens, running = prompts, torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(MAX_COMPLETION_TOKENS):
        logits = model.forward_hidden(tokens[running])[:, -1] @ model.head_weight.T
        drawn = torch.full((len(tokens),), eos)
        drawn[running] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
        running &= drawn != eos
        if not running.any():
            break
    return tokens


def score(tokenizer, tokens, prompt_tokens, problems):
    """Return rewards [B] (1 for the right format with the right answer, else 0) and the texts."""
    texts = tokenizer.batch_decode(tokens[:, prompt_tokens:], skip_special_tokens=True)
    return torch.tensor(strict_math(problems, texts, [problem["ground_truth"] for problem in problems])), texts


def grpo(model, tokenizer, rng, prompts_per_step, completions_per_prompt):
    """Return the loss of one GRPO step, and the mean reward and length of its completions."""
    problems = [p for p in make_problems(rng, prompts_per_step) for _ in range(completions_per_prompt)]
    prompts = encode(tokenizer, problems)
    tokens = sample(model, prompts, tokenizer.eos_token_id)
    rewards, _ = score(tokenizer, tokens, prompts.shape[1], problems)

    groups = torch.arange(prompts_per_step).repeat_interleave(completions_per_prompt)
    logprobs, mask = logprobs_and_mask(model, tokens, prompts.shape[1], tokenizer.eos_token_id)
    advantages = per_token(group_zscore(rewards, groups), mask)
    ratio = token_ratio(logprobs, logprobs.detach(), mask)  # one update per step, so the old policy is the policy
    loss = (token_mean(mask) * clipped_policy_loss(ratio, advantages)).sum()
    return loss, rewards.mean().item(), mask.sum(1).float().mean().item()


def evaluate(model, tokenizer, problems, title):
    """Print the accuracy on held-out problems, and three completions."""
    prompts = encode(tokenizer, problems)
    tokens = sample(model, prompts, tokenizer.eos_token_id)
    rewards, texts = score(tokenizer, tokens, prompts.shape[1], problems)
    print(f"\n{title}: accuracy {rewards.mean():.3f} on {len(problems)} held-out problems")
    for problem, text in list(zip(problems, texts, strict=True))[:3]:
        print(f"  {problem['prompt']}\n    {text}    (truth: {problem['ground_truth']})")
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--imitation-steps", type=int, default=900)
    parser.add_argument("--grpo-steps", type=int, default=40)
    parser.add_argument("--held-out", type=int, default=500, help="problems to evaluate on")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng, started = random.Random(args.seed), time.time()
    tokenizer = make_tokenizer(CHAIN_WORDS)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = new_gpt(len(tokenizer), layers=2, hidden=64, heads=2, seed=args.seed, **ends)
    held_out = make_problems(random.Random("held out"), args.held_out, "eval")

    def update(optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = OneCycleLR(optimizer, 4e-3, args.imitation_steps, pct_start=0.05, cycle_momentum=False)
    for step in range(1, args.imitation_steps + 1):
        loss = imitate(model, tokenizer, rng, rows=64)
        update(optimizer, loss)
        schedule.step()
        if step % 50 == 0:
            print(f"imitation {step:4d}  loss {loss.item():.3f}  {time.time() - started:4.0f} s", flush=True)
    evaluate(model, tokenizer, held_out, "Before GRPO")

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    for step in range(1, args.grpo_steps + 1):
        loss, reward, length = grpo(model, tokenizer, rng, prompts_per_step=16, completions_per_prompt=8)
        update(optimizer, loss)
        if step % 5 == 0:
            print(
                f"GRPO {step:4d}  reward {reward:.3f}  tokens {length:4.1f}  {time.time() - started:4.0f} s", flush=True
            )
    evaluate(model, tokenizer, held_out, "After GRPO")


if __name__ == "__main__":
    main()
