"""The arithmetic of a run on a cluster: memory, bytes and seconds of a step, each with its formula.

    python benchmarks/plan_cluster.py                                    64 H100s or H200s and a dense model of 32B
    python benchmarks/plan_cluster.py trainers=32 groups=256 median=4000 the same with other numbers

Every number is a field of `Model`, `Gpu` or `Plan`, with where it is from. Nothing here was measured on a cluster.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from random import Random
from statistics import NormalDist

GB, TB = 1e9, 1e12


@dataclass(frozen=True)
class Model:
    """A dense model: numbers of its config.json."""

    name: str
    parameters: float
    layers: int
    hidden: int
    vocabulary: int
    query_numbers: int
    """Numbers per layer and token: heads x head size."""
    kv_numbers: int
    """Numbers per layer and token: keys and values x their heads x head size."""


@dataclass(frozen=True)
class Gpu:
    """NVIDIA's data sheets: SXM, bfloat16 without sparsity. The price is an assumption."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    dollars_an_hour: float


QWEN_1_5B = Model("Qwen2.5-1.5B", 1.54e9, 28, 1536, 151936, 1536, 2 * 2 * 128)
QWEN_32B = Model("Qwen2.5-32B", 32.5e9, 64, 5120, 152064, 5120, 2 * 8 * 128)
H100 = Gpu("H100", 989 * TB, 80 * GB, 3.35 * TB, 2.5)
H200 = Gpu("H200", 989 * TB, 141 * GB, 4.8 * TB, 3.5)


@dataclass(frozen=True)
class Plan:
    """Assumptions of a plan; its properties are the resulting figures, in bytes and seconds."""

    model: Model = QWEN_32B
    gpu: Gpu = H100
    gpus: int = 64
    trainers: int = 32
    """GPUs that train; all others draw."""
    tensor_parallel: int = 4
    """GPUs of an engine."""
    node: int = 8
    """GPUs of a machine."""

    groups: int = 128
    members: int = 8
    """Completions of a group."""
    staleness: int = 1
    prompt: int = 512
    """Tokens."""
    median: float = 7500
    """Tokens of a completion: log-normal, cut at `longest`."""
    sigma: float = 0.6
    longest: int = 16384
    reward: float = 5.0
    """Mean seconds of a group's rewards, exponentially distributed."""
    output: float = 0.004
    """Seconds of the driver for a completion; `simulate_cluster.py --calibrate` measures it here."""

    mfu: float = 0.40
    """Share of `flops` that training reaches. Llama 3 reports 0.38 to 0.43 (arXiv:2407.21783)."""
    decode_bandwidth: float = 0.6
    """Share of `bandwidth` that decoding reaches."""
    decode_flops: float = 0.5
    """Share of `flops` that decoding reaches."""
    floor: float = 0.004
    """Least seconds of a token: kernels to launch, and the exchanges of tensor parallelism."""
    rows_limit: int = 256
    """Completions at once in an engine (`rollout.max_concurrent_completions`)."""
    state: float = 16
    """Bytes of a parameter in training: weight, gradient and Adam's two moments in float32."""
    activation: float = 34
    """Bytes of a token and hidden unit within a layer that is computed again (arXiv:2205.05198, without scores)."""
    head_chunk: int = 2048
    """Tokens whose logits exist at once."""
    kept: float = 0.9
    """Share of an engine's memory that it may use (`rollout.gpu_memory_utilization`)."""

    nvlink: float = 450 * GB
    """Bytes a second of a GPU within its node, each way."""
    link: float = 50 * GB
    """...and to other nodes: an InfiniBand adapter of 400 Gbit/s for each GPU."""
    ethernet: float = 3 * GB
    """Between two nodes over TCP, as Ray's object store sends: one stream of a 100 Gbit/s network."""
    disk_write: float = 2 * GB
    disk_read: float = 5 * GB
    """Reading speed of a shared file system, by one client."""
    copy: float = 10 * GB
    """In a machine's memory, and between it and a GPU: one thread."""
    hash: float = 3 * GB
    """Speed of `tensor_hash` on a CPU: 0.2 s for 0.6 GB."""

    # ---- Lengths ----

    @cached_property
    def lengths(self) -> tuple[float, float]:
        """Mean tokens of a completion, and tokens that one which is being drawn has on average so far."""
        points = [(step + 0.5) / 4000 for step in range(4000)]
        drawn = [
            min(self.longest, self.median * math.exp(self.sigma * NormalDist().inv_cdf(point))) for point in points
        ]
        mean = sum(drawn) / len(drawn)
        return mean, sum(tokens**2 for tokens in drawn) / len(drawn) / (2 * mean)

    def length(self, rng: Random) -> float:
        """Tokens of a completion, by chance."""
        return min(self.longest, rng.lognormvariate(math.log(self.median), self.sigma))

    @property
    def completions(self) -> int:
        return self.groups * self.members

    @property
    def drawn_tokens(self) -> float:
        return self.completions * self.lengths[0]

    @property
    def trained_tokens(self) -> float:
        return self.completions * (self.prompt + self.lengths[0])

    # ---- Training ----

    def token_flops(self, tokens: float) -> float:
        """Operations of a token in a row of this length: forward 2 per parameter, and causal attention over half of the
        row on average; times 4, as a backward pass is two and gradient checkpointing repeats the forward pass."""
        attention = 2 * tokens * self.model.layers * self.model.query_numbers
        return 4 * (2 * self.model.parameters + attention)

    @property
    def row(self) -> float:
        return self.prompt + self.longest

    @property
    def compute_s(self) -> float:
        tokens = self.prompt + self.lengths[0]
        return self.token_flops(tokens) * self.trained_tokens / (self.trainers * self.gpu.flops * self.mfu)

    @property
    def longest_row_s(self) -> float:
        """A row is not divided: the GPU with the longest one takes at least that."""
        return self.token_flops(self.row) * self.row / (self.gpu.flops * self.mfu)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a GPU in a step, each as large as the longest row."""
        return math.ceil(self.trained_tokens / (self.trainers * self.row))

    @property
    def exchange_s(self) -> float:
        """Sharding: each micro-batch gathers the bfloat16 weights twice (forward, backward) and scatters gradients."""
        if self.trainers == 1:
            return 0.0
        speed = self.nvlink if self.trainers <= self.node else self.link
        return self.micro_batches * 3 * self.weight_bytes * (1 - 1 / self.trainers) / speed

    @property
    def learn_s(self) -> float:
        """Exchange is hidden behind computing, as far as that lasts."""
        return max(self.compute_s, self.longest_row_s, self.exchange_s)

    @property
    def trainer_memory(self) -> dict[str, float]:
        """Bytes of each GPU that trains, by what they are."""
        model = self.model
        return {
            "weights, gradients, moments": self.state * model.parameters / self.trainers,
            "two gathered layers and the head": 2 * (2 * model.parameters / model.layers)
            + 2 * model.vocabulary * model.hidden,
            "activations of a micro-batch": self.row * model.hidden * (2 * model.layers + self.activation),
            "logits of a chunk": 2 * 4 * self.head_chunk * model.vocabulary,
        }

    @property
    def fits(self) -> bool:
        """True if trainer and engines fit, with a tenth of the trainers' memory left over."""
        return sum(self.trainer_memory.values()) <= 0.9 * self.gpu.memory and self.engines > 0 and self.rows > 0

    # ---- Drawing ----

    @property
    def weight_bytes(self) -> float:
        return 2 * self.model.parameters

    @property
    def kv_bytes(self) -> float:
        """Bytes of the cache per token, in all layers."""
        return 2 * self.model.layers * self.model.kv_numbers

    @property
    def engines(self) -> int:
        return (self.gpus - self.trainers) // self.tensor_parallel

    @property
    def cache_tokens(self) -> float:
        """Tokens of the cache that fit into an engine's memory."""
        return (self.kept * self.tensor_parallel * self.gpu.memory - self.weight_bytes) / self.kv_bytes

    @property
    def context(self) -> float:
        """Tokens of a completion that is being drawn, with its prompt."""
        return self.prompt + self.lengths[1]

    @property
    def rows(self) -> int:
        """Completions that an engine draws at once."""
        return min(self.rows_limit, int(self.cache_tokens / self.context))

    def token_s(self, rows: float) -> float:
        """Seconds in which an engine draws a token of each of so many completions."""
        read = (self.weight_bytes + rows * self.context * self.kv_bytes) / (
            self.tensor_parallel * self.gpu.bandwidth * self.decode_bandwidth
        )
        compute = 2 * self.model.parameters * rows / (self.tensor_parallel * self.gpu.flops * self.decode_flops)
        return self.floor + max(read, compute)

    @property
    def busy_rows(self) -> float:
        """...that there are: of the step that is waited for, and of those that are drawn ahead."""
        return min(self.rows, (1 + self.staleness) * self.completions / self.engines)

    @property
    def tokens_a_second(self) -> float:
        """Tokens per second of all engines."""
        return self.engines * self.busy_rows / self.token_s(self.busy_rows)

    @property
    def draw_s(self) -> float:
        return self.drawn_tokens / self.tokens_a_second

    @property
    def tail_s(self) -> float:
        """The longest completion in an engine that has little else."""
        return self.longest * self.token_s(1)

    # ---- Weights ----

    @property
    def transfers(self) -> dict[str, float]:
        """Seconds by way: from the process of the run to the engines' GPUs."""
        size, nodes = self.weight_bytes, math.ceil((self.gpus - self.trainers) / self.node)
        return {
            "collective": size / self.link,
            "shared_memory": nodes * size / self.ethernet + size / self.copy,
            "files": size / self.disk_write + size / self.disk_read,
        }

    @property
    def driver_s(self) -> float:
        """Before that, by any way: the float32 weights go from a GPU to its host and into Ray's store, and the process
        of the run rounds them, copies what is rounded into what the way sends or keeps, and hashes it, on its CPU."""
        return (3 * 4 + 2) * self.model.parameters / self.copy + self.weight_bytes / self.hash

    @property
    def read_back_s(self) -> float:
        """After it: engines hash what they hold, on their GPUs, in two passes over it."""
        return 2 * self.weight_bytes / (self.tensor_parallel * self.gpu.bandwidth * self.decode_bandwidth)

    @property
    def transfer_s(self) -> float:
        """The broadcast alone."""
        return self.transfers["collective"]

    # ---- Together ----

    @property
    def overlapped_s(self) -> float:
        """A step where drawing goes on while the trainer learns."""
        return max(self.learn_s + self.driver_s + self.transfer_s + self.read_back_s, self.draw_s)

    @property
    def dollars(self) -> float:
        """Price of 1,000 steps."""
        return 1000 * self.overlapped_s / 3600 * self.gpus * self.gpu.dollars_an_hour


def figures(plan: Plan) -> list[tuple[str, str, str]]:
    """(what, formula, value)"""
    memory = {name: value / GB for name, value in plan.trainer_memory.items()}
    state, gathered, activations, logits = memory.values()
    broadcast, stored, written = plan.transfers.values()
    weights, token_ms, step = plan.weight_bytes / GB, plan.token_s(plan.busy_rows) * 1e3, plan.overlapped_s
    return [
        ("tokens of a completion, mean", "log-normal: `median`, `sigma`, cut at `longest`", f"{plan.lengths[0]:,.0f}"),
        ("tokens drawn in a step", "`groups` x `members` x mean", f"{plan.drawn_tokens / 1e6:.2f} million"),
        ("tokens trained on", "... x (mean + `prompt`)", f"{plan.trained_tokens / 1e6:.2f} million"),
        ("**trainer**", "`trainers`", f"{plan.trainers} GPUs"),
        ("weights, gradients, moments", "16 x parameters / trainers", f"{state:.1f} GB"),
        ("gathered for a moment", "2 layers and the head in bfloat16", f"{gathered:.1f} GB"),
        ("activations", "longest row x hidden x (2 x layers + 34)", f"{activations:.1f} GB"),
        ("logits", "2 x 4 x `head_chunk` x vocabulary", f"{logits:.1f} GB"),
        ("a GPU's memory", "their sum", f"{sum(memory.values()):.0f} of {plan.gpu.memory / GB:.0f} GB"),
        (
            "computing",
            "4 x (2 x parameters + attention) x tokens / (trainers x flops x `mfu`)",
            f"{plan.compute_s:.0f} s",
        ),
        ("exchange, hidden behind it", "micro-batches x 3 x 2 x parameters / `link`", f"{plan.exchange_s:.0f} s"),
        ("the longest row, on one GPU", "the same of one row", f"{plan.longest_row_s:.0f} s"),
        ("**engines**", "(`gpus` - trainers) / `tensor_parallel`", f"{plan.engines} x {plan.tensor_parallel} GPUs"),
        ("weights of a GPU", "2 x parameters / tensor_parallel", f"{weights / plan.tensor_parallel:.1f} GB"),
        ("cache of a token", "2 x layers x keys and values", f"{plan.kv_bytes / 1e3:.0f} kB"),
        ("tokens with room in an engine", "(`kept` x memory - weights) / that", f"{plan.cache_tokens:,.0f}"),
        ("tokens of a completion under way", "`prompt` + E[length^2] / 2 E[length]", f"{plan.context:,.0f}"),
        ("completions with room", "their quotient, at most `rows_limit`", f"{plan.rows}"),
        ("...that there are", "(1 + `staleness`) x groups x members / engines", f"{plan.busy_rows:.0f}"),
        ("a token of each", "`floor` + (weights + cache) / (bandwidth x `decode_bandwidth`)", f"{token_ms:.1f} ms"),
        ("all engines", "engines x completions / that", f"{plan.tokens_a_second:,.0f} tokens/s"),
        ("drawing", "tokens / that", f"{plan.draw_s:.0f} s"),
        ("the longest completion, alone", "`longest` x a token of one", f"{plan.tail_s:.0f} s"),
        ("**a transfer**", "2 x parameters", f"{weights:.0f} GB"),
        (
            "through the process of the run",
            "14 x parameters / `copy` + 2 x parameters / `hash`",
            f"{plan.driver_s:.0f} s",
        ),
        ("`collective`: NCCL, InfiniBand", "bytes / `link`, passed on down a chain", f"{broadcast:.1f} s"),
        ("`shared_memory`: Ray's store", "nodes x bytes / `ethernet` + bytes / `copy`", f"{stored:.0f} s"),
        ("`files`", "bytes / `disk_write` + / `disk_read`", f"{written:.0f} s"),
        (
            "reading back, on the engines' GPUs",
            "2 x bytes / (bandwidth x `decode_bandwidth`)",
            f"{plan.read_back_s:.2f} s",
        ),
        ("**a step**, overlapped", "max(computing + `collective` and what is around it, drawing)", f"{step:.0f} s"),
        ("the bottleneck", "the larger one", "drawing" if plan.draw_s == step else "training"),
        ("1,000 steps", "hours x `gpus` x dollars of a GPU hour", f"{step / 3.6:.0f} h, ${plan.dollars:,.0f}"),
    ]


def table(plans: Sequence[Plan]) -> str:
    """A column for each plan."""
    names = " | ".join(f"{plan.gpus} x {plan.gpu.name}" for plan in plans)
    lines = [f"| {plans[0].model.name} | formula | {names} |", "|---" * (2 + len(plans)) + "|"]
    for rows in zip(*map(figures, plans), strict=True):
        lines.append(f"| {rows[0][0]} | {rows[0][1]} | {' | '.join(value for _, _, value in rows)} |")
    return "\n".join(lines)


def changed(plan: Plan, pairs: Sequence[str]) -> Plan:
    """The plan with `key=value` replaced; `gpu.` and `model.` lead to their fields.

    Example:
        >>> changed(Plan(), ["trainers=24", "gpu.memory=96e9"]).gpu.memory
        96000000000.0
    """
    for pair in pairs:
        key, _, value = pair.partition("=")
        part, _, name = key.rpartition(".")
        target = getattr(plan, part) if part in ("gpu", "model") else plan
        known = {field.name for field in fields(target)} - {"gpu", "model"}
        if name not in known or not value or part not in ("", "gpu", "model"):
            raise SystemExit(f"{pair!r}: give KEY=VALUE of {', '.join(sorted(known))}, or gpu.KEY, model.KEY")
        try:
            number = type(getattr(target, name))(float(value)) if name != "name" else value
        except ValueError:
            raise SystemExit(f"{pair!r}: {value!r} is no number") from None
        target = replace(target, **{name: number})
        plan = replace(plan, **{part: target}) if part else target
    return plan


def main() -> int:
    plans = [changed(plan, sys.argv[1:]) for plan in PLANS]
    for plan in plans:
        if not plan.fits:
            print(f"{plan.gpu.name}: this does not fit into the memory", file=sys.stderr)
    print(table(plans))
    return 0


PLANS = (Plan(trainers=32, gpu=H100), Plan(trainers=40, gpu=H200))
"""Each with the division whose overlapped step is the shortest."""

if __name__ == "__main__":
    sys.exit(main())
