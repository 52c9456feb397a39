// Dot products of weights, which come from memory, with rows that are in the caches.
#pragma once

#include <cstdint>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

typedef int8_t bytes __attribute__((vector_size(W), aligned(1)));

inline vec load(const int8_t *p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
    return __builtin_convertvector(*reinterpret_cast<const bytes *>(p), vec);
#endif
}
inline float to_float(int8_t x) { return x; }

// How many bytes ahead weights are prefetched: the hardware's own prefetch ends at each page and begins anew with the next.
constexpr int64_t AHEAD = 8192;

// dot products of w with N rows of x, of n numbers each
template <int N, class T>
inline void dots(const T *w, const float *x, int64_t n, float *y) {
    constexpr int P = 4;
    vec sums[N][P] = {};
    int64_t i = 0;
    for (; i + P * W <= n; i += P * W) {
        const char *ahead = reinterpret_cast<const char *>(w + i) + AHEAD;
        for (size_t line = 0; line < P * W * sizeof(T); line += 64) __builtin_prefetch(ahead + line);
        for (int p = 0; p < P; p++) {
            const vec part = load(w + i + p * W);
            for (int r = 0; r < N; r++) sums[r][p] += part * load(x + r * n + i + p * W);
        }
    }
    for (; i + W <= n; i += W)
        for (int r = 0; r < N; r++) sums[r][0] += load(w + i) * load(x + r * n + i);
    for (int r = 0; r < N; r++) {
        float s = sum((sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]));
        for (int64_t j = i; j < n; j++) s += to_float(w[j]) * x[r * n + j];
        y[r] = s;
    }
}

}  // namespace
