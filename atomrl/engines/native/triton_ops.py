"""`TritonOps`: the Triton kernels as `StepOps`, and their check against PyTorch on the current GPU."""

from typing import ClassVar

import torch
import triton
from torch import Tensor

from atomrl.engines.native.batching import GROUP, LENGTH, LIMIT, MEMBER, PREFIX, PROMPT_LENGTH, SEED, SLOT, STOPPED
from atomrl.engines.native.cache import DecodeBatch
from atomrl.engines.native.paged_cache import PAGE
from atomrl.engines.native.step_ops import Drawing, PlainOps, Rope, StepOps, StepRows, least_splits, tiles_of
from atomrl.engines.native.triton_kernels import (
    CHUNK,
    attend_kernel,
    draw_kernel,
    merge_kernel,
    rms_norm_kernel,
    rotate_kernel,
    silu_mul_kernel,
    vocabulary_kernel,
)
from atomrl.engines.sampling import sample
from atomrl.models.decoder_spec import DecoderSpec
from atomrl.types import SamplingParams

MAX_SPLITS, _PROGRAMS = 32, 256
_LEAST_CAPABILITY = (8, 0)
"""Compute capability with bfloat16 on tensor cores."""
_EXAMPLE_PAGES = 24


class TritonOps:
    """`StepOps` with Triton kernels for a model's shape. Launch sizes depend on the padded batch alone."""

    draws: ClassVar[bool] = True

    def __init__(self, spec: DecoderSpec) -> None:
        self.heads, self.kv_heads, self.size = spec.heads, spec.kv_heads, spec.head_dim
        self.ratio = spec.heads // spec.kv_heads
        self.tile = max(1, 64 // self.ratio)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `StepOps`."""
        width = x.shape[1]
        block = triton.next_power_of_2(width)
        warps = 8 if block >= 2048 else 4
        rms_norm_kernel[(len(x),)](x, weight, out, out.stride(0), eps, width, block, num_warps=warps)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `StepOps`."""
        width = out.shape[1]
        grid = (len(out), triton.cdiv(width, 1024))
        silu_mul_kernel[grid](gate_up, out, out.stride(0), width, 1024)

    def rotate_and_write(
        self, qkv: Tensor, rope: Rope, norms: tuple[Tensor, Tensor] | None, eps: float,
        keys: Tensor, values: Tensor, rows: StepRows,
    ) -> None:  # fmt: skip
        """See `StepOps`."""
        half = self.size // 2
        q_norm, k_norm = norms if norms is not None else (rope[0], rope[0])  # the kernel needs some pointer
        rotate_kernel[(len(qkv), self.heads + 2 * self.kv_heads)](
            qkv, *rope, q_norm, k_norm, eps, keys, values, rows.own, rows.own.stride(0), rows.slots,
            rows.prompt_lengths, rows.lengths, self.heads, self.kv_heads, self.size, half,
            triton.next_power_of_2(half), PAGE, norms is not None, num_warps=1,
        )  # fmt: skip

    def attend(self, qkv: Tensor, keys: Tensor, values: Tensor, rows: StepRows, out: Tensor) -> None:
        """See `StepOps`."""
        count, tiles, block = len(qkv), len(rows.tiles), max(16, triton.next_power_of_2(self.size))
        key_block = 64 if block * keys.element_size() <= 256 else 32
        of_prompt, of_own = (
            max(_splits(programs * self.kv_heads), min(MAX_SPLITS, least_splits(keys_of_each)))
            for programs, keys_of_each in (
                (triton.cdiv(count, self.tile), rows.batch.longest_prompt),
                (count, rows.batch.longest),
            )
        )
        parts = of_prompt + of_own
        sums = torch.empty(count, self.heads, parts, self.size, dtype=torch.float32, device=qkv.device)
        stats = torch.empty(count, self.heads, parts, 2, dtype=torch.float32, device=qkv.device)
        scale = self.size**-0.5 * 1.4426950408889634  # exp2 with it is exp
        of_tile, of_row = (max(16, triton.next_power_of_2(self.ratio * n)) for n in (self.tile, 1))
        attend_kernel[(tiles * of_prompt + count * of_own, self.kv_heads)](
            qkv, keys, values, rows.prompts, rows.prompts.stride(0), rows.own, rows.own.stride(0), rows.tiles,
            rows.groups, rows.slots, rows.prompt_lengths, rows.lengths, sums, stats, scale, tiles, of_prompt, of_own,
            self.tile, self.heads, self.kv_heads, self.size, block, of_tile, of_row, key_block, PAGE,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        merge_kernel[(count, self.heads)](
            sums, stats, out, out.stride(0), self.heads, self.size, block, parts, triton.next_power_of_2(parts),
            num_warps=1 if parts <= 4 else 4,
        )  # fmt: skip

    def draw(self, logits: Tensor, rows: StepRows, drawing: Drawing) -> None:
        """See `StepOps`."""
        count, vocab = logits.shape
        chunks = triton.cdiv(vocab, CHUNK)
        stats = torch.empty(count, chunks, 4, dtype=torch.float32, device=logits.device)
        vocabulary_kernel[(count, chunks)](
            logits, stats, rows.lengths, drawing.temperature, drawing.minimum, drawing.stops,
            vocab, chunks, CHUNK, drawing.bans,
        )  # fmt: skip
        draw_kernel[(count,)](
            logits, stats, drawing.temperature, drawing.minimum, drawing.stops, rows.lengths, rows.prefixes,
            rows.limits, rows.seeds, rows.tokens, rows.stopped, rows.slots, drawing.tokens, drawing.logprobs,
            drawing.tokens.stride(0), vocab, chunks, triton.next_power_of_2(chunks), CHUNK,
            drawing.greedy, drawing.bans, num_warps=8,
        )  # fmt: skip


def _splits(programs: int) -> int:
    """Return the number of parts to split keys into, so that there are enough programs for a GPU."""
    return min(MAX_SPLITS, 1 << (max(1, _PROGRAMS // programs).bit_length() - 1))


def check_ops(ops: StepOps, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Compare operations with `PlainOps` at a model's shape on a device.

    Raises:
        RuntimeError: one differs by more than rounding, or the GPU has no bfloat16 tensor cores.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise RuntimeError(f"{torch.cuda.get_device_name(device)} has no bfloat16 on tensor cores")
    chance, plain = torch.Generator().manual_seed(0), PlainOps()

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=chance).to(device, kind)

    def near(name: str, mine: Tensor, theirs: Tensor) -> None:
        mine, theirs = (values.float().nan_to_num(2.0) for values in (mine, theirs))
        error = float((mine - theirs).norm() / theirs.norm())
        if not error <= (1e-5 if dtype == torch.float32 else 1e-2):
            raise RuntimeError(f"the Triton kernel {name} differs from PyTorch by {error:.1e}")

    rows = example_rows(ops.tile, device, chance)
    count, real, width = len(rows.slots), len(rows.batch.slots), spec.heads * spec.head_dim
    x, weight = normal(count, spec.hidden), normal(spec.hidden)
    mine, theirs = normal(count, spec.hidden + 16)[:, : spec.hidden], torch.empty_like(x, dtype=torch.float32)
    ops.rms_norm(x, weight, spec.norm_eps, mine)
    plain.rms_norm(x.float(), weight.float(), spec.norm_eps, theirs)
    near("rms_norm", mine, theirs)
    gate_up = normal(count, 2 * spec.intermediate)
    mine, theirs = normal(count, spec.intermediate), gate_up.float()[:, : spec.intermediate].clone()
    ops.silu_mul(gate_up, mine)
    plain.silu_mul(gate_up.float(), theirs)
    near("silu_mul", mine, theirs)

    angles = torch.rand(200, spec.head_dim // 2, generator=chance).to(device)
    norms = (normal(spec.head_dim), normal(spec.head_dim)) if spec.qk_norm else None
    qkv = normal(count, width + 2 * spec.kv_heads * spec.head_dim)
    pages = normal(2, _EXAMPLE_PAGES, spec.kv_heads, PAGE, spec.head_dim)
    pages[:, rows.own[:, 2].long()] = pages[:, rows.prompts[1, 1:].long()] = torch.nan  # must not be read
    results = []
    for each, kind in ((ops, dtype), (plain, torch.float32)):
        # The reference does not support padded rows.
        seen = rows if each is ops else StepRows(rows.state[:, :real], rows.tiles, rows.own, rows.prompts, rows.batch)
        own, (keys, values) = qkv.clone()[: len(seen.slots)].to(kind), pages.clone().to(kind)
        weights = norms and (norms[0].to(kind), norms[1].to(kind))
        each.rotate_and_write(own, (angles.cos(), angles.sin()), weights, spec.norm_eps, keys, values, seen)
        out = torch.empty(len(own), width, dtype=kind, device=device)
        each.attend(own, keys, values, seen, out)
        results.append((own[:real, :width], keys, values, out[:real]))
    for name, mine, theirs in zip(("rotate", "rotate (keys)", "rotate (values)", "attend"), *results, strict=True):
        near(name, mine, theirs)
    for temperature, minimum in ((0.0, 0), (0.8, 0), (1.0, 40)):
        _check_draw(ops, spec.vocab, temperature, minimum, rows, normal(count, spec.vocab, kind=torch.float32).mul_(3))


def _check_draw(ops: StepOps, vocab: int, temperature: float, minimum: int, rows: StepRows, logits: Tensor) -> None:
    """Compare `draw` with `sampling.sample`."""
    device, slots = logits.device, rows.slots.clamp(min=0)
    stops = (torch.arange(vocab, device=device) % 3 == 0).to(torch.int8)
    state, before = rows.state.clone(), rows.lengths.clone()
    numbers = torch.tensor([temperature or 1.0], device=device), torch.tensor([minimum], device=device)
    tokens = torch.full((_EXAMPLE_PAGES, 80), vocab, dtype=torch.int32, device=device)
    logprobs = torch.zeros(tokens.shape, device=device)
    drawing = Drawing(temperature == 0, minimum > 0, *numbers, stops, tokens, logprobs)
    drawn = StepRows(state, rows.tiles, rows.own, rows.prompts, rows.batch)
    ops.draw(logits, drawn, drawing)
    banned = (before < minimum)[:, None] & (stops > 0)
    sampling = SamplingParams(temperature=temperature)
    right, rate = sample(logits, sampling, rows.seeds, before, banned if minimum else None)
    fed = before < rows.prefixes
    right, rate = torch.where(fed, vocab, right), rate.masked_fill(fed, 0.0)  # `vocab` is what `tokens` was filled with
    going = (rows.stopped == 0) & (before < rows.limits)
    stopped = ((stops[right.clamp(max=vocab - 1)] > 0) & (before + 1 >= minimum) & ~fed & going) | (rows.stopped > 0)
    same = [
        torch.equal(drawn.lengths, before + going),
        torch.equal(drawn.tokens, torch.where(going, right, rows.tokens)),
        torch.equal(drawn.stopped > 0, stopped),
        torch.equal(tokens[slots, before].long()[going], right[going]),
        torch.allclose(logprobs[slots, before][going], rate[going], atol=1e-4),
    ]
    if not all(same):
        raise RuntimeError(f"the Triton kernel draw differs from PyTorch at temperature {temperature}: {same}")


def example_rows(tile: int, device: torch.device, chance: torch.Generator) -> StepRows:
    """Six rows in three groups, one finished and one within its prefix, and two padded rows."""
    groups = [0, 0, 1, 0, 2, 1]
    prompts, lengths = [45, 7, 64], [1, 33, 64, 5, 40, 32]
    state = torch.zeros(10, 8, dtype=torch.int64)
    state[SLOT], state[GROUP], state[LENGTH], state[STOPPED] = -1, -1, 1, 1
    real = state[:, : len(groups)]
    real[SLOT] = torch.tensor([3, 0, 5, 1, 2, 4])
    real[GROUP], real[LENGTH] = torch.tensor(groups), torch.tensor(lengths)
    real[MEMBER] = torch.tensor([groups[:place].count(group) for place, group in enumerate(groups)])
    real[PROMPT_LENGTH] = torch.tensor([prompts[group] for group in groups])
    real[LIMIT], real[SEED] = 70, torch.randint(-(2**62), 2**62, (len(groups),), generator=chance)
    real[STOPPED], real[PREFIX] = 0, torch.tensor([0, 0, 0, 20, 0, 0])
    real[STOPPED, 4] = 1
    tables = torch.randperm(_EXAMPLE_PAGES, generator=chance).int()
    own, of_prompts = tables[:18].view(6, 3), tables[18:].view(3, 2)
    state, own, of_prompts = state.to(device), own.to(device), of_prompts.to(device)
    real = state[:, : len(groups)]
    batch = DecodeBatch(real[SLOT], real[GROUP], real[MEMBER], real[PROMPT_LENGTH], real[LENGTH] - 1, 64, 64, 6, 3, 3)
    return StepRows(state, tiles_of(groups, 8, tile).to(device), own, of_prompts, batch)
