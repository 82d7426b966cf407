// Training's elementwise work on a CPU, each in one pass over memory: RMS norm, SwiGLU, and around the matrix products of
// attention the rotation with the change of layout, and the masked softmax, each with its backward pass; and the weights
// of a quantized base.
// Memory is float32 or bfloat16 (T); all arithmetic is in float32.
#include "vectors.h"

#define PRAGMA(text) _Pragma(#text)
#define PARALLEL(work) PRAGMA(omp parallel for schedule(static) num_threads(threads) if ((work) > 32768))

template <class T>
static void norm_forward(const T* x, const T* weight, T* out, float* scale, int64_t rows, int64_t width, double eps,
                  int64_t threads) {
    PARALLEL(rows * width)
    for (int64_t r = 0; r < rows; r++) {
        const T* from = x + r * width; T* to = out + r * width;
        const float s = scale[r] = 1.f / std::sqrt(dot(from, from, width) / width + float(eps));
        each(width, [&](int64_t i, auto n) { put(to + i, part(from + i, n) * s * part(weight + i, n), n); });
    }
}

// `parts` [pieces, width] is zero, and takes the weight's gradient of each piece of the rows: summed in order, the result
// does not depend on how many threads there are.
template <class T>
static void norm_backward(const T* x, const T* weight, const float* scale, const T* grad, T* grad_x,
                   float* parts, int64_t rows, int64_t width, int64_t pieces, int64_t threads) {
    PARALLEL(rows * width)
    for (int64_t t = 0; t < pieces; t++) {
        float* sums = parts + t * width;
        for (int64_t r = rows * t / pieces; r < rows * (t + 1) / pieces; r++) {
            const T *from = x + r * width, *g = grad + r * width; T* to = grad_x + r * width;
            const float s = scale[r]; Floats along{};
            each(width, [&](int64_t i, auto n) { along += part(g + i, n) * part(weight + i, n) * part(from + i, n); });
            const float mean = sum(along) * s * s / width;
            each(width, [&](int64_t i, auto n) {
                const Floats y = part(from + i, n), d = part(g + i, n);
                put(sums + i, part(sums + i, n) + d * y * s, n);
                put(to + i, (d * part(weight + i, n) - y * mean) * s, n);
            });
        }
    }
}

template <class T>
static void swiglu_forward(const T* both, T* out, int64_t rows, int64_t width, int64_t threads) {
    PARALLEL(rows * width)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = both + 2 * r * width, *up = gate + width; T* to = out + r * width;
        each(width, [&](int64_t i, auto n) {
            const Floats g = part(gate + i, n);
            put(to + i, g * sigmoid(g) * part(up + i, n), n);
        });
    }
}

template <class T>
static void swiglu_backward(const T* both, const T* grad, T* result, int64_t rows, int64_t width, int64_t threads) {
    PARALLEL(rows * width)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = both + 2 * r * width, *up = gate + width, *from = grad + r * width;
        T* to = result + 2 * r * width;
        each(width, [&](int64_t i, auto n) {
            const Floats g = part(gate + i, n), s = sigmoid(g), d = part(from + i, n);
            put(to + i, d * part(up + i, n) * s * (1.f + g * (1.f - s)), n);
            put(to + width + i, d * g * s, n);
        });
    }
}

// Some heads of a stream [tokens, stride], `first` numbers into each token, to rows [R, heads, S, D] (back: from them).
// Token n is at `skip` + slots[n] % C of row slots[n] / C. Rotated by the angle of its position and scaled where there
// are tables [positions, D/2]; back, by the opposite angle.
template <class T>
static void move_heads(T* stream, T* rows, const int64_t* slots, const int64_t* positions, const float* cosine,
                const float* sine, int64_t tokens, int64_t stride, int64_t first, int64_t heads, int64_t D, int64_t C,
                int64_t S, int64_t skip, int64_t back, double factor, int64_t threads) {
    const int64_t half = D / 2; const float scale = factor, sign = back ? -scale : scale;
    PARALLEL(tokens * heads * D)
    for (int64_t n = 0; n < tokens; n++) {
        const int64_t row = slots[n] / C, at = slots[n] % C + skip;
        for (int64_t h = 0; h < heads; h++) {
            T *a = stream + n * stride + first + h * D, *b = rows + ((row * heads + h) * S + at) * D;
            const T* __restrict from = back ? b : a; T* __restrict to = back ? a : b;
            if (!cosine) { memcpy(to, from, sizeof(T) * D); continue; }
            const float *c = cosine + positions[n] * half, *s = sine + positions[n] * half;
            each(half, [&](int64_t i, auto n) {
                const Floats x = part(from + i, n), y = part(from + half + i, n);
                const Floats cos = part(c + i, n) * scale, sin = part(s + i, n) * sign;
                put(to + i, x * cos - y * sin, n);
                put(to + half + i, y * cos + x * sin, n);
            });
        }
    }
}

// Scores [R, heads, C, P + C] -> shares in place. Query c of a row sees the first prompts[row] of P, and own 0..c.
template <class T>
static void softmax_forward(T* scores, const int64_t* prompts, int64_t rows, int64_t heads, int64_t C, int64_t P,
                     int64_t threads) {
    const int64_t S = P + C;
    PARALLEL(rows * heads * C * S)
    for (int64_t q = 0; q < rows * heads * C; q++) {
        T* x = scores + q * S; const int64_t end = P + q % C + 1, seen = P ? prompts[q / (heads * C)] : 0;
        for (int64_t i = seen; i < P; i++) put(x + i, Floats{} - INFINITY, 1);
        Floats top = Floats{} - INFINITY, total{};
        each(end, [&](int64_t i, auto n) { const Floats y = part(x + i, n, -INFINITY); top = y > top ? y : top; });
        const float most = largest(top);
        const auto share = [&](Floats y) { return y == -INFINITY ? Floats{} : exp(y - most); };
        constexpr bool wide = std::is_same<T, float>::value;  // else shares are made again, not to be rounded twice
        each(end, [&](int64_t i, auto n) {
            const Floats z = share(part(x + i, n, -INFINITY));
            total += z;
            if (wide) put(x + i, z, n);
        });
        const float scale = 1.f / sum(total);
        each(end, [&](int64_t i, auto n) {
            const Floats z = part(x + i, n, -INFINITY);
            put(x + i, (wide ? z : share(z)) * scale, n);
        });
        memset(x + end, 0, sizeof(T) * (S - end));
    }
}

// The gradient of shares -> that of scores, in place; what a query does not see has a share of 0.
template <class T>
static void softmax_backward(const T* shares, T* grad, int64_t queries, int64_t C, int64_t P, int64_t threads) {
    const int64_t S = P + C;
    PARALLEL(queries * S)
    for (int64_t q = 0; q < queries; q++) {
        const T* y = shares + q * S; T* g = grad + q * S; const int64_t end = P + q % C + 1;
        const float mean = dot(y, g, end);
        each(end, [&](int64_t i, auto n) { put(g + i, part(y + i, n) * (part(g + i, n) - mean), n); });
        memset(g + end, 0, sizeof(T) * (S - end));
    }
}

// The weights of a base in nf4, [rows, width], whose rows in `out` are `stride` apart. Two codes of 4 bits are a byte, the
// first in its upper half; 64 weights have a scale: a code of 8 bits with a scale for 256 of them, plus a mean.
template <class T>
static void dequantize_nf4(T* out, const uint8_t* codes, const float* values, const uint8_t* scales, const float* scale_map,
                    const float* scale_scales, const float* mean, int64_t rows, int64_t width, int64_t stride,
                    int64_t threads) {
    const int64_t size = rows * width, B = 64;
    float pairs[256][2];
    for (int64_t i = 0; i < 256; i++) { pairs[i][0] = values[i >> 4]; pairs[i][1] = values[i & 15]; }
    PARALLEL(size)
    for (int64_t b = 0; b < (size + B - 1) / B; b++) {
        const int64_t begin = b * B, end = begin + B < size ? begin + B : size;
        volatile float product = scale_map[scales[b]] * scale_scales[b / 256];  // rounded: not fused with the sum
        const float scale = product + *mean;
        float block[B];
        for (int64_t i = begin / 2; i < (end + 1) / 2; i++) memcpy(block + 2 * i - begin, pairs[codes[i]], 8);
        for (int64_t at = begin, n; at < end; at += n) {  // a block may go on in the next row
            const int64_t column = at % width; const float* from = block + at - begin; T* to = out + at / width * stride + column;
            n = end - at < width - column ? end - at : width - column;
            each(n, [&](int64_t i, auto n) { put(to + i, part(from + i, n) * scale, n); });
        }
    }
}

// What Python finds: a pointer to each kernel, by name and type.
#define EXPORT(name) \
    extern "C" { auto* name##_float32 = &name<float>; auto* name##_bfloat16 = &name<bfloat16>; }
EXPORT(norm_forward) EXPORT(norm_backward) EXPORT(swiglu_forward) EXPORT(swiglu_backward)
EXPORT(dequantize_nf4)
EXPORT(move_heads) EXPORT(softmax_forward) EXPORT(softmax_backward)
