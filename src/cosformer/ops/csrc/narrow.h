// The product of gemm.h with its operands rounded to bfloat16, for tensors of that type where the CPU multiplies them (AVX512_BF16).
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm.h"
#include "scratch.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512BF16__)
// Two successive steps of an operand, the earlier one in the lower half: one instruction adds both products to a float.
struct Two { uint32_t bits; };

inline __m512bh load(const Two *p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
inline vec plus(vec sum, Two a, __m512bh b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(a.bits))), b);
}
inline __m512i rounded(__m512 high, __m512 low) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }

// to[r][t / 2] = from[r][t] and from[r][t + 1]; what is missing to the last two is zero.
inline void pair_columns(int64_t rows, int64_t columns, const float *from, int64_t ld, Two *to, int64_t ld_to) {
    auto some = [](int64_t n) { return static_cast<__mmask16>(n < W ? (1 << std::max<int64_t>(n, 0)) - 1 : -1); };
    for (int64_t t = 0; t < columns; t += 2 * W) {
        const __mmask16 low = some(columns - t), high = some(columns - t - W);
        for (int64_t r = 0; r < rows; r++) {
            const float *p = from + r * ld + t;
            _mm512_storeu_si512(to + r * ld_to + t / 2, rounded(_mm512_maskz_loadu_ps(high, p + W), _mm512_maskz_loadu_ps(low, p)));
        }
    }
}

// to[t / 2][c] = from[t][c] and from[t + 1][c], likewise.
inline void pair_rows(int64_t rows, int64_t columns, const float *from, int64_t ld, Two *to, int64_t ld_to) {
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t t = 0; t < rows; t += 2)
        for (int64_t c = 0; c < columns; c += W) {
            const float *p = from + t * ld + c;
            const __m512 next = t + 1 < rows ? _mm512_loadu_ps(p + ld) : _mm512_setzero_ps();
            _mm512_storeu_si512(to + t / 2 * ld_to + c, _mm512_permutexvar_epi16(zip, rounded(next, _mm512_loadu_ps(p))));
        }
}

// The product of a call: its tensors, and so its operands, are rounded or they are not.
class Product {
  public:
    explicit Product(bool narrow) : narrow_(narrow) {}

    // Memory for the rounded operands of up to so many rows and steps.
    void reserve(Scratch &scratch, int64_t rows, int64_t steps) {
        if (!narrow_) return;
        scratch.take(left_, std::max(rows * ld_of(steps), (steps + 1) / 2 * padded(rows)));
        scratch.take(right_, (steps + 1) / 2 * COLS);
    }

    // As in gemm.h.
    template <Layout A, class Done, class Between>
    void gemm(int64_t m, int64_t n, int64_t steps, const float *a, int64_t lda, const float *b, int64_t ldb, const Done &done,
              Between &between) const {
        if (!narrow_) return ::gemm<A>(m, n, steps, a, lda, b, ldb, done, between);
        const int64_t ld = A == Plain ? ld_of(steps) : padded(m);
        if (A == Plain) pair_columns(m, steps, a, lda, left_, ld);
        else pair_rows(steps, m, a, lda, left_, ld);
        for (int64_t j = 0; j < n; j += COLS) {
            pair_rows(steps, COLS, b + j, ldb, right_, COLS);
            strip<A>(m, (steps + 1) / 2, left_, ld, right_, COLS, done.at(0, j), between);
        }
    }

  private:
    const bool narrow_;
    Two *left_ = nullptr, *right_ = nullptr;

    static int64_t ld_of(int64_t steps) { return padded((steps + 1) / 2); }
};
#else
class Product {
  public:
    explicit Product(bool) {}
    void reserve(Scratch &, int64_t, int64_t) {}
    template <Layout A, class... Args>
    void gemm(Args &&...args) const { ::gemm<A>(args...); }
};
#endif

}  // namespace
