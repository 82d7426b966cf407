// CPU kernels of the native engine: decode attention, RMSNorm, SwiGLU, sampling.
// Sums are in float32 or float64.
#include "../../models/vectors.h"
#include <vector>

#define PARALLEL_ROWS _Pragma("omp parallel for num_threads(threads) if (rows * width > 16384)")

static inline float to_float(float x) { return x; }
static inline float to_float(bfloat16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float y; memcpy(&y, &wide, 4); return y;
}
static inline void store(float* to, float x) { *to = x; }
static inline void store(bfloat16* to, float x) {  // round to nearest, ties to even
    uint32_t wide; memcpy(&wide, &x, 4); to->bits = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
}

// ---- Attention -----------------------------------------------------------------------------------------------------
// Apply q/k norm (Qwen3) and RoPE, append key and value to the cache, attend to the prompt (one copy per group)
// and to the completion so far. Keys are in blocks of 32 tokens as [D, 32], so that 32 scores are computed at once;
// values as [tokens, D].

struct Args {  // mirrored by atomrl/engines/decoder.py
    const void* qkv; void* out; const void *q_norm, *k_norm;
    void *keys, *values; const void *prompt_keys, *prompt_values;
    const float *cosine, *sine; const int64_t *slots, *groups, *prompt_lengths, *lengths;
    int64_t rows, heads, kv_heads, head_dim, blocks, prompt_blocks, threads, act_bf16, cache_bf16;
    double eps;
};

template <class A>  // copy a head to float32, apply norm (if it has weights) and RoPE
static void prepare(const A* from, const A* norm, const float* cosine, const float* sine, float scale, float eps,
                    int D, float* to) {
    float square = 0;
    for (int d = 0; d < D; d++) { to[d] = to_float(from[d]); square += to[d] * to[d]; }
    if (norm) for (int d = 0; d < D; d++) to[d] *= to_float(norm[d]) / std::sqrt(square / D + eps);
    for (int d = 0; d < D / 2; d++) {
        const float x = to[d], y = to[d + D / 2];
        to[d] = (x * cosine[d] - y * sine[d]) * scale;
        to[d + D / 2] = (y * cosine[d] + x * sine[d]) * scale;
    }
}

// Number of vectors summed at once for R queries: eight sums keep two multipliers busy, up to 32 tokens or columns.
static constexpr int at_once(int R) { return 8 / R < 32 / L ? 8 / R : 32 / L; }

template <int R, class C>  // scores[r][0..32*blocks) of R queries
static void score(const float* q, const C* keys, int64_t blocks, int D, float* scores, int64_t stride) {
    constexpr int W = at_once(R);
    for (int64_t at = 0; at < 32 * blocks; at += W * L) {
        const C* key = keys + at / 32 * 32 * D + at % 32;
        Floats sum[R][W] = {};
        for (int d = 0; d < D; d++, key += 32)
            for (int w = 0; w < W; w++) {
                const Floats k = part(key + L * w, L);
                for (int r = 0; r < R; r++) sum[r][w] += q[r * D + d] * k;
            }
        for (int r = 0; r < R; r++) memcpy(scores + r * stride + at, sum[r], sizeof sum[r]);
    }
}

template <int W, int R, class A, class C>  // L * W columns of the values at a time, from column d; returns where it stopped
static int columns(int d, const C* const values[2], const float* scores, int64_t stride, int64_t second,
                   const int64_t tokens[2], int D, const float* total, A* out) {
    for (; d + L * W <= D; d += L * W) {
        Floats acc[R][W] = {};
        for (int side = 0; side < 2; side++) {
            const C* value = values[side] + d;
            const float* p = scores + side * second;
            for (int64_t j = 0; j < tokens[side]; j++, value += D, p++)
                for (int w = 0; w < W; w++) {
                    const Floats v = part(value + L * w, L);
                    for (int r = 0; r < R; r++) acc[r][w] += p[r * stride] * v;
                }
        }
        for (int r = 0; r < R; r++)
            for (int w = 0; w < W; w++) put(out + r * D + d + L * w, acc[r][w] * (1 / total[r]), L);
    }
    return d;
}

template <int R, class A, class C>  // R queries of one key-value head over prompt and completion
static void attend(const float* q, const C* const keys[2], const C* const values[2], const int64_t tokens[2], int D,
                   float* scores, A* out) {
    const int64_t padded[2] = {(tokens[0] + 31) / 32 * 32, (tokens[1] + 31) / 32 * 32};
    const int64_t stride = padded[0] + padded[1];
    float total[R];
    score<R>(q, keys[0], padded[0] / 32, D, scores, stride);
    score<R>(q, keys[1], padded[1] / 32, D, scores + padded[0], stride);
    for (int r = 0; r < R; r++) {
        float* s = scores + r * stride;
        for (int64_t j = tokens[0]; j < padded[0]; j++) s[j] = -1e30f;
        for (int64_t j = padded[0] + tokens[1]; j < stride; j++) s[j] = -1e30f;
        Floats peak = part(s, L), shares = {};
        for (int64_t j = L; j < stride; j += L) { const Floats x = part(s + j, L); peak = x > peak ? x : peak; }
        const float top = largest(peak);
        for (int64_t j = 0; j < stride; j += L) {
            const Floats x = exp(part(s + j, L) - top);
            shares += x; put(s + j, x, L);
        }
        total[r] = sum(shares);
    }
    int d = columns<at_once(R), R>(0, values, scores, stride, padded[0], tokens, D, total, out);
    d = columns<1, R>(d, values, scores, stride, padded[0], tokens, D, total, out);
    for (; d < D; d++)  // remainder of a head size that L does not divide
        for (int r = 0; r < R; r++) {
            float acc = 0;
            for (int side = 0; side < 2; side++)
                for (int64_t j = 0; j < tokens[side]; j++)
                    acc += scores[r * stride + side * padded[0] + j] * to_float(values[side][j * D + d]);
            store(out + r * D + d, acc / total[r]);
        }
}

template <class A, class C>
static void run(const Args& a) {
    const int D = a.head_dim, R = a.heads / a.kv_heads;
    const int64_t width = (a.heads + 2 * a.kv_heads) * D;
    const float scale = 1 / std::sqrt((float)D);
#pragma omp parallel for schedule(dynamic, 8) num_threads(a.threads)
    for (int64_t task = 0; task < a.rows * a.kv_heads; task++) {
        static thread_local std::vector<float> buffer;
        const int64_t row = task / a.kv_heads, head = task % a.kv_heads;
        const int64_t at = a.lengths[row], position = a.prompt_lengths[row] + at;
        const int64_t tokens[2] = {a.prompt_lengths[row], at + 1};
        const size_t need = (R + 1) * D + 4 * (tokens[0] + tokens[1] + 64);
        if (buffer.size() < need) buffer.resize(need);
        float *q = buffer.data(), *k = q + R * D, *scores = k + D;
        const A* qkv = (const A*)a.qkv + row * width;
        const float *cosine = a.cosine + position * (D / 2), *sine = a.sine + position * (D / 2);
        for (int r = 0; r < R; r++)
            prepare(qkv + (head * R + r) * D, (const A*)a.q_norm, cosine, sine, scale, a.eps, D, q + r * D);
        prepare(qkv + (a.heads + head) * D, (const A*)a.k_norm, cosine, sine, 1, a.eps, D, k);
        const int64_t own = a.slots[row] * a.kv_heads + head, shared = a.groups[row] * a.kv_heads + head;
        C* keys = (C*)a.keys + own * a.blocks * 32 * D;
        C* values = (C*)a.values + own * a.blocks * 32 * D;
        for (int d = 0; d < D; d++) {
            store(keys + (at / 32 * D + d) * 32 + at % 32, k[d]);
            store(values + at * D + d, to_float(qkv[(a.heads + a.kv_heads + head) * D + d]));
        }
        const C* both_keys[2] = {(const C*)a.prompt_keys + shared * a.prompt_blocks * 32 * D, keys};
        const C* both_values[2] = {(const C*)a.prompt_values + shared * a.prompt_blocks * 32 * D, values};
        A* out = (A*)a.out + row * a.heads * D + head * R * D;
        int r = 0;
        for (; r + 4 <= R; r += 4)
            attend<4>(q + r * D, both_keys, both_values, tokens, D, scores, out + r * D);
        for (; r + 2 <= R; r += 2)
            attend<2>(q + r * D, both_keys, both_values, tokens, D, scores, out + r * D);
        for (; r < R; r++) attend<1>(q + r * D, both_keys, both_values, tokens, D, scores, out + r * D);
    }
}

// ---- Row by row ----------------------------------------------------------------------------------------------------

template <class A>
static void rms_norm_rows(const A* x, const A* weight, A* out, int64_t rows, int64_t width, float eps, int threads) {
    PARALLEL_ROWS
    for (int64_t row = 0; row < rows; row++) {
        const A* from = x + row * width;
        A* to = out + row * width;
        const float scale = 1 / std::sqrt(dot(from, from, width) / width + eps);
        each(width, [&](int64_t i, auto n) { put(to + i, part(from + i, n) * scale * part(weight + i, n), n); });
    }
}

template <class A>  // gate_up [rows, 2 * width] -> silu(gate) * up [rows, width]
static void silu_mul_rows(const A* gate_up, A* out, int64_t rows, int64_t width, int threads) {
    PARALLEL_ROWS
    for (int64_t row = 0; row < rows; row++) {
        const A *gate = gate_up + row * 2 * width, *up = gate + width;
        A* to = out + row * width;
        each(width, [&](int64_t i, auto n) {
            const Floats g = part(gate + i, n);
            put(to + i, g * sigmoid(g) * part(up + i, n), n);
        });
    }
}

static double uniform(uint64_t seed, uint64_t position) {  // as `uniforms` of atomrl/engines/sampling.py
    uint64_t x = seed + (position + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return ((x >> 12) + 0.5) * 0x1p-52;
}

template <class A>  // inverse-CDF sampling: sums of chunks of 256, then one chunk; allocates nothing of size V
static void sample_rows(const A* logits, const int64_t* seeds, const int64_t* positions, int64_t* tokens,
                        float* logprobs, int64_t rows, int64_t width, float temperature, int threads) {
    PARALLEL_ROWS
    for (int64_t row = 0; row < rows; row++) {
        static thread_local std::vector<double> sums;
        const A* from = logits + row * width;
        const int64_t even = width / L * L;
        float top = to_float(from[0]);
        Floats peak = Floats{} + top;
        for (int64_t i = 0; i < even; i += L) { const Floats x = part(from + i, L); peak = x > peak ? x : peak; }
        for (int lane = 0; lane < L; lane++) top = peak[lane] > top ? peak[lane] : top;
        for (int64_t i = even; i < width; i++) top = to_float(from[i]) > top ? to_float(from[i]) : top;
        const auto weight = [&](int64_t i) {  // weights of L tokens from i; 0 beyond the vocabulary
            Floats x;
            if (i < even) return exp((part(from + i, L) - top) / temperature);
            for (int lane = 0; lane < L; lane++) x[lane] = i + lane < width ? to_float(from[i + lane]) : -INFINITY;
            x = exp((x - top) / temperature);
            for (int lane = 0; lane < L; lane++) x[lane] = i + lane < width ? x[lane] : 0;
            return x;
        };
        sums.clear();
        double total = 0;
        for (int64_t start = 0; start < width; start += 256) {
            Floats sum = {};
            for (int64_t i = start; i < start + 256 && i < width; i += L) sum += weight(i);
            for (int lane = 0; lane < L; lane++) total += sum[lane];
            sums.push_back(total);
        }
        const double target = uniform(seeds[row], positions[row]) * total;
        size_t chunk = 0;
        while (chunk + 1 < sums.size() && sums[chunk] <= target) chunk++;
        double passed = chunk ? sums[chunk - 1] : 0;
        int64_t token = -1;
        for (int64_t i = chunk * 256; i < (int64_t)chunk * 256 + 256 && i < width && passed <= target; i += L) {
            const Floats x = weight(i);
            for (int lane = 0; lane < L && passed <= target; lane++)
                if (x[lane] > 0) { token = i + lane; passed += x[lane]; }  // the last one if rounding passes all of them
        }
        if (token < 0) { tokens[row] = 0; logprobs[row] = NAN; continue; }  // NaN or infinite logits; checked by the caller
        tokens[row] = token;
        logprobs[row] = (to_float(from[token]) - top) / temperature - (float)std::log(total);
    }
}

#define DISPATCH(f, bf16, ...) \
    if (bf16) { using T = bfloat16; f(__VA_ARGS__); } else { using T = float; f(__VA_ARGS__); }

extern "C" void decode_attention(const Args* a) {
    if (a->act_bf16) run<bfloat16, bfloat16>(*a);
    else if (a->cache_bf16) run<float, bfloat16>(*a);
    else run<float, float>(*a);
}

extern "C" void rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t width, double eps,
                         int64_t threads, int64_t bf16) {
    DISPATCH(rms_norm_rows, bf16, (const T*)x, (const T*)weight, (T*)out, rows, width, eps, threads)
}

extern "C" void silu_mul(const void* gate_up, void* out, int64_t rows, int64_t width, int64_t threads, int64_t bf16) {
    DISPATCH(silu_mul_rows, bf16, (const T*)gate_up, (T*)out, rows, width, threads)
}

extern "C" void sample(const void* logits, const int64_t* seeds, const int64_t* positions, int64_t* tokens,
                       float* logprobs, int64_t rows, int64_t width, double temperature, int64_t threads,
                       int64_t bf16) {
    DISPATCH(sample_rows, bf16, (const T*)logits, seeds, positions, tokens, logprobs, rows, width, temperature, threads)
}
