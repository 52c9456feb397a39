// The one matrix product everything is made of, over compiler vector types.
#pragma once

#include <algorithm>
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

inline vec plus(vec sum, float a, vec b) { return sum + a * b; }

inline float sum(vec x) {  // halves added to halves, in registers
    typedef float quad __attribute__((vector_size(16)));
#if defined(__AVX512F__)
    auto eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    quad four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#elif defined(__AVX__)
    quad four = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
    quad four = x;
#endif
    four += __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return four[0] + four[1];
}

inline float dot(const float *a, const float *b, int64_t n) {
    vec sums = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) sums += load(a + i) * load(b + i);
    float s = sum(sums);
    for (; i < n; i++) s += a[i] * b[i];
    return s;
}

// How the left operand lies in memory: element (r, t) at a[r * lda + t], or transposed at a[t * lda + r].
enum Layout { Plain, Transposed };

// Where a product goes.  Added: c = alpha * c + product, where alpha == 0 means that c holds nothing yet.  The product is summed
// separately and then added, since c may be much larger.  With `lost`, of c's shape, that sum is compensated: what rounding takes from c
// is kept there and enters the next sum, so that any number of sums loses no digits.
struct Added {
    float *c;
    int64_t ld;
    float alpha = 0;
    float *lost = nullptr;

    Added at(int64_t i, int64_t j) const { return {c + i * ld + j, ld, alpha, lost ? lost + i * ld + j : nullptr}; }
    vec first(int r, int n) const { return lost && alpha != 0 ? alpha * load(lost + r * ld + n * W) : vec{}; }
    template <int R>
    void put(const vec (&product)[R][VECS]) const {
        for (int r = 0; r < R; r++)
            for (int n = 0; n < VECS; n++) {
                float *to = c + r * ld + n * W;
                vec before = alpha == 0 ? vec{} : alpha * load(to), sum = before + product[r][n];
                if (lost) store(lost + r * ld + n * W, before - sum + product[r][n]);
                store(to, sum);
            }
    }
};

// Joined: the product's columns belong to two parts (or one), HALF of one beside HALF of the other; c = the sum of the parts, each times
// a factor per row.  With `x`, of c's shape, c is zero where x is not positive.
constexpr int HALF = COLS / 2;
template <int PARTS>
struct Joined {
    float *c;
    int64_t ld;
    const float *by[2];
    const float *x = nullptr;
    int64_t ldx = 0;

    Joined at(int64_t i, int64_t j) const {
        return {c + i * ld + j / PARTS, ld, {by[0] + i, by[1] + i}, x ? x + i * ldx + j / PARTS : nullptr, ldx};
    }
    vec first(int, int) const { return vec{}; }
    template <int R>
    void put(const vec (&product)[R][VECS]) const {  // loads before stores: no load waits to learn that no store has its address
        vec sums[R][VECS / PARTS];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < VECS / PARTS; n++) {
                sums[r][n] = by[0][r] * product[r][n];
                if (PARTS == 2) sums[r][n] += by[1][r] * product[r][n + VECS / PARTS];
            }
        if (x)
            for (int r = 0; r < R; r++)
                for (int n = 0; n < VECS / PARTS; n++) sums[r][n] = load(x + r * ldx + n * W) <= 0 ? vec{} : sums[r][n];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < VECS / PARTS; n++) store(c + r * ld + n * W, sums[r][n]);
    }
};

// `count` tiles of R rows one below the other: a (count R x steps) * b (steps x COLS).  Not inlined: what the compiler inlines changes
// with every product added elsewhere, and with it the time of the existing ones, by 5 to 10 %.
template <int R, Layout A, class T, class Done, class Between>
__attribute__((noinline)) void tiles(int64_t count, int64_t steps, const T *a, int64_t lda, const T *b, int64_t ldb,
                                     const Done &done, Between &between) {
    for (int64_t k = 0; k < count; k++, a += A == Plain ? R * lda : R) {
        between();
        const Done to = done.at(k * R, 0);
        vec acc[R][VECS];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < VECS; n++) acc[r][n] = to.first(r, n);
        for (int64_t t = 0; t < steps; t++) {
            decltype(load(b)) bt[VECS];
            for (int n = 0; n < VECS; n++) bt[n] = load(b + t * ldb + n * W);
            for (int r = 0; r < R; r++) {
                const T art = A == Plain ? a[r * lda + t] : a[t * lda + r];
                for (int n = 0; n < VECS; n++) acc[r][n] = plus(acc[r][n], art, bt[n]);
            }
        }
        to.put(acc);
    }
}

template <int R, Layout A, class... Args>
inline void tile_of(int64_t rows, Args &...args) {  // tiles<rows>, for a number of rows known only at run time
    if (rows == R) tiles<R, A>(1, args...);
    else if constexpr (R > 1) tile_of<R - 1, A>(rows, args...);
}

// done's rows (m x COLS) = a (m x steps) * b (steps x COLS).
template <Layout A, class T, class Done, class Between>
void strip(int64_t m, int64_t steps, const T *a, int64_t lda, const T *b, int64_t ldb, const Done &done, Between &between) {
    // A tile of few rows waits for its own additions, so the last two tiles share the remaining rows.
    const int64_t whole = std::max<int64_t>(0, m % ROWS < 4 && m % ROWS ? m / ROWS - 1 : m / ROWS);
    if (whole) tiles<ROWS, A>(whole, steps, a, lda, b, ldb, done, between);
    for (int64_t i = whole * ROWS, rows; i < m; i += rows) {
        rows = m - i > ROWS ? (m - i + 1) / 2 : m - i;
        const T *below = a + (A == Plain ? i * lda : i);
        const Done rest = done.at(i, 0);
        tile_of<ROWS, A>(rows, steps, below, lda, b, ldb, rest, between);
    }
}

// done's rows (m x n) = a (m x steps) * b (steps x n).  n is rounded up to COLS: every buffer is that wide, and what the spare columns of
// b hold only reaches the spare columns of c.  Columns are the outer loop: a strip of b stays in L1 while a streams past.  between() is
// called before every tile.
template <Layout A, class Done, class Between>
void gemm(int64_t m, int64_t n, int64_t steps, const float *a, int64_t lda, const float *b, int64_t ldb, const Done &done,
          Between &between) {
    for (int64_t j = 0; j < n; j += COLS) strip<A>(m, steps, a, lda, b + j, ldb, done.at(0, j), between);
}

}  // namespace
