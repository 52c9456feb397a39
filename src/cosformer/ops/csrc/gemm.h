// The one matrix product everything is made of, over compiler vector types.
#pragma once

#include <cstdint>

namespace {

// A register tile is ROWS x VECS vectors of W floats: as many accumulators as leave room for VECS columns of the right operand
// and one broadcast element of the left.
#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 12, VECS = 2;
#elif defined(__AVX__)
constexpr int W = 8, ROWS = 6, VECS = 2;
#elif defined(__aarch64__)
constexpr int W = 4, ROWS = 6, VECS = 4;
#else
constexpr int W = 4, ROWS = 6, VECS = 2;
#endif
constexpr int COLS = W * VECS;

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef float loose_vec __attribute__((vector_size(4 * W), aligned(4)));  // the same in memory, at any address

inline vec load(const float *p) { return *reinterpret_cast<const loose_vec *>(p); }
inline void store(float *p, vec x) { *reinterpret_cast<loose_vec *>(p) = x; }

inline float sum(vec x) {
    float s = 0;
    for (int i = 0; i < W; i++) s += x[i];
    return s;
}

// How the left operand lies in memory: element (r, t) at a[r * lda + t], or transposed at a[t * lda + r].
enum Layout { Plain, Transposed };

// c (R x COLS) = alpha * c + a (R x steps) * b (steps x COLS).  alpha == 0 means that c holds nothing yet.  The product is summed apart
// and then added, for c may be large beside it.  With `lost`, of c's shape, that sum is compensated: what rounding takes from c is kept
// there and enters the next sum, so that however many they are they lose no digits.  Not inlined: how much of it the compiler would copy
// where changes with every product that is added elsewhere, and by 5 to 10 % the time of those that were there.
template <int R, Layout A>
__attribute__((noinline)) void tile(int64_t steps, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, float alpha, float *lost) {
    vec acc[R][VECS];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < VECS; n++) acc[r][n] = lost && alpha != 0 ? alpha * load(lost + r * ldc + n * W) : vec{};
    for (int64_t t = 0; t < steps; t++) {
        vec bt[VECS];
        for (int n = 0; n < VECS; n++) bt[n] = load(b + t * ldb + n * W);
        for (int r = 0; r < R; r++) {
            float art = A == Plain ? a[r * lda + t] : a[t * lda + r];
            for (int n = 0; n < VECS; n++) acc[r][n] += art * bt[n];
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < VECS; n++) {
            float *to = c + r * ldc + n * W;
            vec before = alpha == 0 ? vec{} : alpha * load(to), sum = before + acc[r][n];
            if (lost) store(lost + r * ldc + n * W, before - sum + acc[r][n]);
            store(to, sum);
        }
}

template <int R, Layout A, class... Args>
inline void tile_of(int rows, Args... args) {  // tile<rows>, for a number of rows known only at run time
    if (rows == R) tile<R, A>(args...);
    else if constexpr (R > 1) tile_of<R - 1, A>(rows, args...);
}

// c (m x n) = alpha * c + a (m x steps) * b (steps x n).  n is rounded up to COLS: every buffer is that wide, and what the spare
// columns of b hold only reaches the spare columns of c.  Columns are the outer loop: a strip of b stays in L1 while a streams past.
// between() is called before every tile.
template <Layout A, class Between>
void gemm(int64_t m, int64_t n, int64_t steps, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, float alpha,
          Between &between, float *lost = nullptr) {
    for (int64_t j = 0; j < n; j += COLS) {
        for (int64_t i = 0; i < m;) {
            // A tile of a few rows waits for its own additions, so the last two tiles share what is left.
            int64_t left = m - i, rows = left >= ROWS + 4 ? ROWS : left > ROWS ? (left + 1) / 2 : left;
            between();
            tile_of<ROWS, A>(static_cast<int>(rows), steps, a + (A == Plain ? i * lda : i), lda, b + j, ldb, c + i * ldc + j, ldc, alpha,
                             lost ? lost + i * ldc + j : nullptr);
            i += rows;
        }
    }
}

}  // namespace
