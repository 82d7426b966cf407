"""One optimizer step (forward, log-probs, policy loss, backward, clip, AdamW): AtomRL against Hugging Face's model.

    python benchmarks/train_step.py --size small --dtype bfloat16 [--compile]

The rows are GRPO's: groups of 8 completions that share their prompt, and, for comparison, rows that share nothing.
AtomRL computes a shared prompt once, and no token whose state no loss needs; Hugging Face's model computes each row
whole, as the trainers around it do. Every contestant gets the same weights, rows, loss record, clipping and fused
AdamW on float32 weights, and its own best micro-batch of `--rows`. Hugging Face's model computes logits of the
completion alone and log-probs by `F.cross_entropy` on them; in bfloat16 it runs on a bfloat16 copy of the weights,
which is faster than autocast.
Contestants take turns in one run, and the median of each is shown. Compilation is timed apart. Gradients are compared
with those of Hugging Face's eager attention in float32.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen2Config

from atomrl.algorithms.grpo import GRPO
from atomrl.backends.local import LocalBackend
from atomrl.batches import TrainingBatch, select_rows
from atomrl.config import ModelConfig, TrainConfig
from atomrl.models.loading import compute_dtype, has_bfloat16
from atomrl.protocols import ModelOutputs

PROMPT_TOKENS, COMPLETION_TOKENS = 40, 128
SIZES = {
    "small": ({"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 576}, 128),
    "medium": ({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}, 32),
}
KV_HEADS = {"small": 2, "medium": 4}
ALGORITHM = GRPO
TRAIN = TrainConfig(learning_rate=1e-6, tokens_per_micro_batch=10**9)


def make_batch(
    rows: int, vocabulary: int, group: int, prompt: int = PROMPT_TOKENS, completion: int = COMPLETION_TOKENS
) -> TrainingBatch:
    """Rows of full length: a prompt, the same in a group, and a completion; random advantages."""
    generator = torch.Generator().manual_seed(1)
    length = prompt + completion
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[:, prompt:] = True
    advantages = torch.randn(rows, generator=generator)
    tokens = torch.randint(1, vocabulary, (rows, length), generator=generator)
    group_ids = torch.arange(rows) // group
    tokens[:, :prompt] = tokens[group_ids * group, :prompt]
    return TrainingBatch(
        tokens=tokens,
        loss_mask=mask,
        lengths=torch.full((rows,), length),
        prompt_lengths=torch.full((rows,), prompt),
        group_ids=group_ids,
        rewards=advantages,
        truncated=torch.zeros(rows, dtype=torch.bool),
        advantages=advantages[:, None] * mask,
        loss_weights=mask / mask.sum(),
    )


class HuggingFace:
    """A plain, tight training step around the transformers model."""

    def __init__(self, folder: str, attention: str, dtype: torch.dtype, rows: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype).train()
        self.masters = [parameter.detach().float().clone() for parameter in self.model.parameters()]
        if dtype == torch.float32:
            self.masters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.masters, lr=TRAIN.learning_rate, weight_decay=0.0, fused=True)
        self.rows = rows

    def gradients(self, batch: TrainingBatch) -> None:
        """Leave the gradient of the whole batch in the masters; bfloat16 parts are added in float32."""
        copy = self.masters[0] is not next(self.model.parameters())
        for index in torch.arange(batch.rows).split(self.rows):
            micro = select_rows(batch, index)
            logits = self.model(micro.tokens, use_cache=False, logits_to_keep=COMPLETION_TOKENS + 1).logits[:, :-1]
            targets = micro.tokens[:, PROMPT_TOKENS:]
            nll = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
            logprobs = F.pad(-nll.view_as(targets), (PROMPT_TOKENS, 0))
            ALGORITHM.loss(ModelOutputs(logprobs=logprobs), micro).loss.backward()
            if copy:
                for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                    gradient = parameter.grad.float()
                    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                    parameter.grad = None

    @torch.no_grad()
    def step(self, batch: TrainingBatch) -> None:
        with torch.enable_grad():
            self.gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.masters, TRAIN.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters[0] is not next(self.model.parameters()):
            torch._foreach_copy_(list(self.model.parameters()), self.masters)

    def named_gradients(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, (master.grad for master in self.masters), strict=True))


class Ours:
    """`LocalBackend.train_step`."""

    def __init__(self, folder: str, dtype: torch.dtype, rows: int, compiled: bool) -> None:
        model = ModelConfig(path=folder, dtype=str(dtype).removeprefix("torch."), compile=compiled)
        train = TRAIN.model_copy(update={"rows_per_micro_batch": rows})
        self.backend = LocalBackend(model, train, ALGORITHM, total_updates=10**6)

    def step(self, batch: TrainingBatch) -> None:
        self.backend.train_step(batch, ALGORITHM)

    def gradients(self, batch: TrainingBatch) -> None:
        self.backend.gradients(batch, ALGORITHM)

    def named_gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad for name, parameter in self.backend.policy.model.named_parameters()}


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def best_rows(make: Callable[[int], Ours | HuggingFace], batch: TrainingBatch, choices: list[int]) -> int:
    """The fastest micro-batch: the best of two steps each, after one to warm up."""
    if len(choices) == 1:
        return choices[0]
    times = {}
    for rows in [choice for choice in choices if choice <= batch.rows]:
        contestant = make(rows)
        contestant.step(batch)
        times[rows] = min(seconds(lambda c=contestant: c.step(batch)) for _ in range(2))
        del contestant
        gc.collect()
    return min(times, key=times.__getitem__)


def matmul_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """FLOP/s of a large matrix product, the best of five."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    a @ b
    return 2 * size**3 / min(seconds(lambda: a @ b) for _ in range(5))


def step_flops(config: Qwen2Config, rows: int, computed: float) -> float:
    """Operations of the matrix products of one step: three times the forward's; causal attention is counted in full.

    Args:
        computed: tokens of a row that go through the layers, on average.
    """
    length, hidden = PROMPT_TOKENS + COMPLETION_TOKENS, config.hidden_size
    kv = config.num_key_value_heads * hidden // config.num_attention_heads
    layer = 2 * hidden * (2 * hidden + 2 * kv + 3 * config.intermediate_size) + 4 * length * hidden
    return 3 * rows * (computed * config.num_hidden_layers * layer + COMPLETION_TOKENS * 2 * hidden * config.vocab_size)


def gradient_error(gradients: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Relative error of all gradients as one vector, and of the worst tensor."""
    errors = {name: (gradients[name] - exact[name]).norm().item() for name in exact}
    norms = {name: exact[name].norm().item() for name in exact}
    whole = sum(e**2 for e in errors.values()) ** 0.5 / sum(n**2 for n in norms.values()) ** 0.5
    return whole, max(errors[name] / norms[name] for name in exact)


def make_model(arguments: argparse.Namespace, folder: str) -> tuple[Qwen2Config, int]:
    """Save the model; its config and the rows of a step."""
    shape, rows = SIZES[arguments.size]
    rows = arguments.batch_rows or rows
    config = Qwen2Config(
        vocab_size=2048, num_key_value_heads=KV_HEADS[arguments.size], tie_word_embeddings=True, **shape
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    print(f"{model.num_parameters() / 1e6:.1f}M parameters, {rows} rows x 168 tokens, {arguments.dtype}", flush=True)
    model.save_pretrained(folder)
    return config, rows


def run(arguments: argparse.Namespace, folder: str, config: Qwen2Config, rows: int, group: int) -> None:
    """Measure and print, with rows in groups of `group` that share their prompt."""
    batch, dtype = make_batch(rows, config.vocab_size, group), getattr(torch, arguments.dtype)
    makers: dict[str, Callable[[int], Ours | HuggingFace]] = {
        "hf eager": lambda r: HuggingFace(folder, "eager", dtype, r),
        "hf sdpa": lambda r: HuggingFace(folder, "sdpa", dtype, r),
        "atomrl": lambda r: Ours(folder, dtype, r, compiled=False),
    }
    chosen = {name: best_rows(make, batch, arguments.rows) for name, make in makers.items()}
    if arguments.compile:
        makers["atomrl compiled"] = lambda r: Ours(folder, dtype, r, compiled=True)
        chosen["atomrl compiled"] = chosen["atomrl"]

    exact = HuggingFace(folder, "eager", torch.float32, chosen["hf eager"])
    exact.gradients(batch)
    contestants, errors, first = {}, {}, {}
    for name, make in makers.items():
        judged = make(chosen[name])
        judged.gradients(batch)
        errors[name] = gradient_error(judged.named_gradients(), exact.named_gradients())
        del judged
        contestants[name] = make(chosen[name])
        first[name] = seconds(lambda name=name: contestants[name].step(batch))
    del exact
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(arguments.rounds):
        for name, contestant in contestants.items():
            times[name].append(seconds(lambda c=contestant: c.step(batch)))
    whole = PROMPT_TOKENS + COMPLETION_TOKENS
    ours = PROMPT_TOKENS / group + COMPLETION_TOKENS - 1
    flops = {name: step_flops(config, rows, whole if name.startswith("hf") else ours) for name in makers}
    print(f"\ngroups of {group}" + (" (nothing is shared)" if group == 1 else f": {ours:.0f} tokens a row in atomrl"))
    report(times, first, errors, chosen, dtype, flops)


def report(times: dict, first: dict, errors: dict, chosen: dict, dtype: torch.dtype, flops: dict[str, float]) -> None:
    rate = matmul_rate(compute_dtype(str(dtype).removeprefix("torch.")))
    medians = {name: statistics.median(values) for name, values in times.items()}
    fastest_hf = min(medians["hf eager"], medians["hf sdpa"])
    print(f"matrix products: {rate / 1e9:.0f} GFLOP/s; of a step, GFLOP: ", end="")
    print(", ".join(f"{name} {flops[name] / 1e9:.0f}" for name in ("hf eager", "atomrl")))
    if dtype == torch.bfloat16 and not has_bfloat16("cpu"):
        print("this CPU has no bfloat16 instructions: atomrl answers dtype=bfloat16 by computing in float32")
    print(
        f"{'':17}{'median s':>9}{'min s':>8}{'first s':>9}{'rows':>6}{'vs HF':>7}{'of rate':>9}  gradient error, worst"
    )
    for name, median in medians.items():
        whole, worst = errors[name]
        print(
            f"{name:17}{median:9.3f}{min(times[name]):8.3f}{first[name]:9.2f}{chosen[name]:6d}"
            f"{fastest_hf / median:6.2f}x{flops[name] / median / rate:9.0%}  {whole:.1e}, {worst:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64], help="micro-batches to choose from")
    parser.add_argument("--batch-rows", type=int, help="rows of the step, where the size's own would take too long")
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 1], help="completions that share a prompt")
    parser.add_argument("--compile", action="store_true", help="also show the compiled layer")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        config, rows = make_model(arguments, folder)
        for group in arguments.groups:
            run(arguments, folder, config, rows, group)


if __name__ == "__main__":
    main()
