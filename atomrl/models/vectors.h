// What both kernels.cpp compute with: vectors of as many floats as the machine's registers hold (GCC takes wider ones apart,
// one number at a time where it compares them), loaded from float32 or bfloat16 and rounded once where they are stored.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
constexpr int64_t L = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int64_t L = 8;
#else
constexpr int64_t L = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * L)));
typedef int32_t Ints __attribute__((vector_size(4 * L)));
typedef uint32_t Words __attribute__((vector_size(4 * L)));
typedef uint16_t Halves __attribute__((vector_size(2 * L)));
struct bfloat16 { uint16_t bits; };

static inline Floats exp(Floats x) {  // Cody-Waite and a polynomial; relative error 2e-7 for x in [-87, 0]
    x = x < -87.f ? Floats{} - 87.f : x;
    const Floats n = (x * 1.44269504f + 12582912.f) - 12582912.f;
    const Floats f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f; p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f; p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.f;
    const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats scale; memcpy(&scale, &power, 4 * L);
    return p * scale;
}
// Up to L floats; where `count` is a constant, these are single instructions.
template <class Count> static inline Floats part(const float* from, Count count, float fill = 0) {
    Floats x = Floats{} + fill; memcpy(&x, from, 4 * count); return x;
}
template <class Count> static inline void put(float* to, Floats x, Count count) { memcpy(to, &x, 4 * count); }
template <class Count> static inline Floats part(const bfloat16* from, Count count, float fill = 0) {
    uint32_t high; memcpy(&high, &fill, 4);
    Halves x = Halves{} + uint16_t(high >> 16); memcpy(&x, from, 2 * count);
    const Words words = __builtin_convertvector(x, Words) << 16;
    Floats wide; memcpy(&wide, &words, 4 * L); return wide;
}
template <class Count> static inline void put(bfloat16* to, Floats x, Count count) {  // to the nearest, ties to even
    Words bits; memcpy(&bits, &x, 4 * L);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves narrow = __builtin_convertvector(x == x ? bits : Words{} + 0x7fc0, Halves);  // else NaN
    memcpy(to, &narrow, 2 * count);
}
template <class Work> static inline void each(int64_t n, Work work) {
    int64_t i = 0;
    for (; i + L <= n; i += L) work(i, std::integral_constant<int64_t, L>());
    if (i < n) work(i, n - i);
}
static inline float sum(Floats x) { float total = 0; for (int i = 0; i < L; i++) total += x[i]; return total; }
static inline float largest(Floats x) {
    float most = x[0];
    for (int i = 1; i < L; i++) most = x[i] > most ? x[i] : most;
    return most;
}
template <class T> static inline float dot(const T* a, const T* b, int64_t n) {
    Floats total{};
    each(n, [&](int64_t i, auto count) { total += part(a + i, count) * part(b + i, count); });
    return sum(total);
}
static inline Floats sigmoid(Floats g) {
    const Floats e = exp(g < 0.f ? g : -g), one = Floats{} + 1.f;
    return (g < 0.f ? e : one) / (1.f + e);
}
