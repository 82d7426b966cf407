"""Triton kernels of a decode step: attention over pages, RMSNorm, RoPE, SwiGLU and sampling.

Attention is split over keys, in two launches (Dao et al. 2023, "Flash-Decoding"; Juravsky et al. 2024, "Hydragen"). The
first reads each prompt once for the query heads of all members of its group (8 members x 6 heads of a key head are 48
rows of one product on the tensor cores), and each completion's own keys; the second adds up the parts. Sampling is two
launches over the logits: sums by chunk, then the token, its log-prob and the row's next state.

No GPU has run them yet: they are compared with `PlainOps` in Triton's interpreter, and compiled for sm_80, sm_86,
sm_89 and sm_90 (`benchmarks/decode_step.py`).
"""

import triton
import triton.language as tl

CHUNK = 2048
"""Logits per chunk."""


# mypy: ignore-errors


@triton.jit
def rms_norm_kernel(x, weight, out, out_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    values = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    qkv, cosine, sine, q_norm, k_norm, eps, keys, values, table, table_width, slots, prompt_lengths, lengths,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    # One program per row and head of the fused q, k, v projection. `place` counts completion tokens, `position` all.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    place = tl.load(lengths + row) - 1
    position = tl.load(prompt_lengths + row) + place
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * SIZE
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at, mask=inside, other=0.0).to(tl.float32)
    # Queries and keys: norm over the head (Qwen 3), then rotation of its two halves. Values pass unchanged. A masked
    # load gives 0, so the sum of the two weights is the one of this head.
    if head < HEADS + KV_HEADS:
        if NORM:
            scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / SIZE + eps)
            of_query = inside & (head < HEADS)
            of_key = inside & (head >= HEADS)
            left = tl.load(q_norm + at, mask=of_query, other=0.0) + tl.load(k_norm + at, mask=of_key, other=0.0)
            right = tl.load(q_norm + HALF + at, mask=of_query, other=0.0)
            right += tl.load(k_norm + HALF + at, mask=of_key, other=0.0)
            first, second = first * scale * left.to(tl.float32), second * scale * right.to(tl.float32)
        cos = tl.load(cosine + position * HALF + at, mask=inside, other=0.0)
        sin = tl.load(sine + position * HALF + at, mask=inside, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    # Queries go back in place; keys and values to the page of this token. Padded rows have slot -1.
    kind = qkv.dtype.element_ty
    if head < HEADS:
        tl.store(source + at, first.to(kind), mask=inside)
        tl.store(source + HALF + at, second.to(kind), mask=inside)
    else:
        kv_head = (head - HEADS) % KV_HEADS
        there = slot >= 0
        page = tl.load(table + slot * table_width + place // PAGE, mask=there, other=0).to(tl.int64)
        target = ((page * KV_HEADS + kv_head) * PAGE + place % PAGE) * SIZE + at
        is_key = inside & there & (head < HEADS + KV_HEADS)
        is_value = inside & there & (head >= HEADS + KV_HEADS)
        tl.store(keys + target, first.to(kind), mask=is_key)
        tl.store(keys + target + HALF, second.to(kind), mask=is_key)
        tl.store(values + target, first.to(kind), mask=is_value)
        tl.store(values + target + HALF, second.to(kind), mask=is_value)


@triton.jit
def _attend_part(
    qkv, keys, values, table, table_width, holder, length, rows, valid, kv_head, split, splits, sums, stats, scale,
    part, parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attention of QUERIES heads over the `split`-th of `splits` parts of the `length` keys of table row `holder`.

    `rows` [QUERIES] are the heads' rows, where `valid`. Writes unnormalized sums of values [rows, heads, parts, SIZE],
    and the maximum score and sum of weights [rows, heads, parts, 2], base 2.
    """
    # Bounds of this part: whole blocks of KEYS, except the last.
    ratio: tl.constexpr = HEADS // KV_HEADS
    head = kv_head * ratio + tl.arange(0, QUERIES) % ratio
    share = tl.cdiv(tl.cdiv(length, splits), KEYS) * KEYS
    begin = split * share
    end = tl.minimum(begin + share, length)

    at = tl.arange(0, SIZE_BLOCK)
    inside = at < SIZE
    from_query = (rows * (HEADS + 2 * KV_HEADS) + head) * SIZE
    q = tl.load(qkv + from_query[:, None] + at[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
    # Online softmax (FlashAttention): whenever the maximum rises, the sums so far are scaled down.
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, SIZE_BLOCK), tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < end
        page = tl.load(table + holder * table_width + key // PAGE, mask=there, other=0).to(tl.int64)
        from_key = ((page * KV_HEADS + kv_head) * PAGE + key % PAGE) * SIZE
        mask = there[:, None] & inside[None, :]
        k = tl.load(keys + from_key[:, None] + at[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        fade = tl.exp2(peak - higher)
        shares = tl.exp2(scores - higher[:, None])
        v = tl.load(values + from_key[:, None] + at[None, :], mask=mask, other=0.0)
        total = total * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        weight = weight * fade + tl.sum(shares, 1)
        peak = higher
    # A part without keys writes no sums; its maximum of -inf excludes it in `merge_kernel`.
    target = (rows * HEADS + head) * parts + part
    mask = valid[:, None] & inside[None, :] & (end > begin)
    tl.store(sums + target[:, None] * SIZE + at[None, :], total, mask=mask)
    tl.store(stats + target * 2, peak, mask=valid)
    tl.store(stats + target * 2 + 1, weight, mask=valid)


@triton.jit(do_not_specialize=["tile_count", "of_prompt", "of_own"])
def attend_kernel(
    qkv, keys, values, prompts, prompts_width, own, own_width, tiles, groups, slots, prompt_lengths, lengths,
    sums, stats, scale, tile_count, of_prompt, of_own,
    TILE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    TILE_QUERIES: tl.constexpr, ROW_QUERIES: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attention over one part of a prompt for the rows of a tile (the first programs, which take longer), or of a row's
    own keys."""
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    ratio: tl.constexpr = HEADS // KV_HEADS
    of_prompts = tile_count * of_prompt
    if program < of_prompts:
        tile = program // of_prompt
        split = program % of_prompt
        member = tl.arange(0, TILE_QUERIES) // ratio
        first = tl.load(tiles + tile * TILE)
        if first >= 0:
            rows = tl.load(tiles + tile * TILE + member, mask=member < TILE, other=-1).to(tl.int64)
            _attend_part(
                qkv, keys, values, prompts, prompts_width, tl.load(groups + first),
                tl.load(prompt_lengths + first).to(tl.int32), rows, rows >= 0, kv_head, split, of_prompt, sums, stats,
                scale, split, of_prompt + of_own,
                HEADS, KV_HEADS, SIZE, SIZE_BLOCK, TILE_QUERIES, KEYS, PAGE,
            )  # fmt: skip
    else:
        row = (program - of_prompts) // of_own
        split = (program - of_prompts) % of_own
        head = tl.arange(0, ROW_QUERIES)
        slot = tl.load(slots + row)
        if slot >= 0:
            _attend_part(
                qkv, keys, values, own, own_width, slot, tl.load(lengths + row).to(tl.int32),
                (row + head * 0).to(tl.int64), head < ratio, kv_head, split, of_own, sums, stats,
                scale, of_prompt + split, of_prompt + of_own,
                HEADS, KV_HEADS, SIZE, SIZE_BLOCK, ROW_QUERIES, KEYS, PAGE,
            )  # fmt: skip


@triton.jit
def merge_kernel(
    sums, stats, out, out_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the parts of `attend_kernel`: [rows, heads * SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, PARTS_BLOCK)
    part = (row * HEADS + head) * PARTS + split
    peak = tl.load(stats + part * 2, mask=split < PARTS, other=float("-inf"))
    weight = tl.load(stats + part * 2 + 1, mask=split < PARTS, other=0.0)
    there = peak != float("-inf")  # an empty part has written nothing else
    fade = tl.where(there, tl.exp2(peak - tl.max(peak, 0)), 0.0)
    at = tl.arange(0, SIZE_BLOCK)
    mask = there[:, None] & (at < SIZE)[None, :]
    total = tl.load(sums + part[:, None] * SIZE + at[None, :], mask=mask, other=0.0)
    mixed = tl.sum(total * fade[:, None], 0) / tl.sum(weight * fade, 0)
    tl.store(out + row * out_stride + head * SIZE + at, mixed.to(out.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _scores(logits, stops, row, at, VOCAB: tl.constexpr, early, temperature, BANS: tl.constexpr):
    """Logits divided by the temperature, and the same with -inf for banned tokens."""
    inside = at < VOCAB
    scores = tl.load(logits + row * VOCAB + at, mask=inside, other=float("-inf")) / temperature
    allowed = scores
    if BANS:
        banned = early & (tl.load(stops + at, mask=inside, other=0) != 0)
        allowed = tl.where(banned, float("-inf"), scores)
    return scores, allowed


@triton.jit
def _weights(scores, peak):
    """exp(scores - peak); 0 for -inf, even if that is the peak."""
    return tl.where(scores == float("-inf"), 0.0, tl.exp(scores - peak))


@triton.jit
def vocabulary_kernel(
    logits, stats, lengths, temperature, minimum, stops,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BANS: tl.constexpr,
):  # fmt: skip
    """Maximum score and sum of exp(score - maximum) per chunk of a row's logits, over all tokens and over the allowed:
    [rows, CHUNKS, 4]."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    early = tl.load(lengths + row) < tl.load(minimum)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    scores, allowed = _scores(logits, stops, row, at, VOCAB, early, tl.load(temperature), BANS)
    peak = tl.max(scores, 0)
    total = tl.sum(_weights(scores, peak), 0)
    target = stats + (row * CHUNKS + chunk) * 4
    tl.store(target, peak)
    tl.store(target + 1, total)
    if BANS:
        peak = tl.max(allowed, 0)
        total = tl.sum(_weights(allowed, peak), 0)
    tl.store(target + 2, peak)
    tl.store(target + 3, total)


@triton.jit
def draw_kernel(
    logits, stats, temperature, minimum, stops, lengths, prefixes, limits, seeds, current, stopped, slots,
    tokens, logprobs, width,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GREEDY: tl.constexpr, BANS: tl.constexpr,
):  # fmt: skip
    """`sampling.sample` without top-k and top-p, then the state update of `ContinuousBatch._draw`."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    least = tl.load(minimum)
    heat = tl.load(temperature)
    number = tl.arange(0, CHUNKS_BLOCK)
    chunks = stats + (row * CHUNKS + number) * 4
    valid = number < CHUNKS
    peaks = tl.load(chunks, mask=valid, other=float("-inf"))
    peak = tl.max(peaks, 0)
    totals = tl.load(chunks + 1, mask=valid, other=0.0)
    denominator = tl.sum((totals * _weights(peaks, peak)).to(tl.float64), 0)
    peaks = tl.load(chunks + 2, mask=valid, other=float("-inf"))
    highest = tl.max(peaks, 0)
    if GREEDY:
        chunk = tl.min(tl.where(peaks == highest, number, CHUNKS - 1), 0)
        rest = tl.full((), 0.0, tl.float64)
    else:
        # SplitMix64, as in `sampling.uniforms`
        x = tl.load(seeds + row).to(tl.uint64, bitcast=True)
        x += (length + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = x ^ (x >> 31)
        uniform = ((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
        totals = tl.load(chunks + 3, mask=valid, other=0.0)
        parts = (totals * _weights(peaks, highest)).to(tl.float64)
        passed = tl.cumsum(parts, 0)
        end = tl.max(passed, 0)
        # Just below the sum, so that rounding cannot push the target past the last positive weight.
        target = tl.minimum(uniform * end, end - end * 8.881784197001252e-16)  # 2**-50
        chunk = tl.minimum(tl.sum((passed <= target).to(tl.int32), 0), CHUNKS - 1)
        rest = target - tl.max(tl.where(number < chunk, passed, 0.0), 0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    _, allowed = _scores(logits, stops, row, at, VOCAB, length < least, heat, BANS)
    if GREEDY:
        token = tl.min(tl.where(allowed == highest, at, VOCAB - 1), 0)
    else:
        inside = tl.cumsum(_weights(allowed, highest).to(tl.float64), 0)
        end = tl.max(inside, 0)
        rest = tl.minimum(rest, end - end * 8.881784197001252e-16)
        token = tl.minimum(chunk * CHUNK + tl.sum((inside <= rest).to(tl.int32), 0), VOCAB - 1)
    score = tl.load(logits + row * VOCAB + token) / heat
    logprob = ((score - peak).to(tl.float64) - tl.log(denominator)).to(tl.float32)
    stop = (tl.load(stops + token) != 0) & (length + 1 >= least)

    slot = tl.maximum(tl.load(slots + row), 0)
    target_place = slot * width + length
    going = (tl.load(stopped + row) == 0) & (length < tl.load(limits + row))
    fed = length < tl.load(prefixes + row)
    token = tl.where(fed, tl.load(tokens + target_place, mask=going & fed, other=0), token)
    tl.store(tokens + target_place, token, mask=going)
    tl.store(logprobs + target_place, tl.where(fed, 0.0, logprob), mask=going)
    tl.store(current + row, token.to(tl.int64), mask=going)
    tl.store(stopped + row, tl.full((), 1, tl.int64), mask=going & stop & (fed == 0))
    tl.store(lengths + row, length + 1, mask=going)
