// Rows of tensors in memory, of any element type and stride, to and from rows of floats.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "cosformer.h"
#include "gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct Bf16 { uint16_t bits; };
struct Half { uint16_t bits; };

template <class To, class From>
inline To bit_cast(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline void from_float(float x, float &y) { y = x; }
inline void from_float(float x, Bf16 &y) {  // to nearest, ties to even; a NaN stays one
    uint32_t u = bit_cast<uint32_t>(x), nan = (u & 0x7fffffff) > 0x7f800000;
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16, quiet = u >> 16 | 0x40;
    y.bits = static_cast<uint16_t>(nan ? quiet : rounded);
}

#if defined(__F16C__)
inline float to_float(Half x) { return _cvtsh_ss(x.bits); }
inline void from_float(float x, Half &y) { y.bits = static_cast<uint16_t>(_cvtss_sh(x, 0)); }
#elif defined(__aarch64__)
inline float to_float(Half x) { return bit_cast<__fp16>(x.bits); }
inline void from_float(float x, Half &y) { y.bits = bit_cast<uint16_t>(static_cast<__fp16>(x)); }
#else
inline float to_float(Half x) {
    uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
    if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // infinity, NaN
    if (magnitude < 0x400) return bit_cast<float>(sign | bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));  // subnormal
    return bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));  // the exponent's bias is 15 there, 127 here
}
inline void from_float(float x, Half &y) {
    uint32_t u = bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff, h;
    if (magnitude > 0x7f800000) h = 0x7e00;        // NaN
    else if (magnitude >= 0x477ff000) h = 0x7c00;  // rounds to infinity
    else if (magnitude < 0x38800000)               // subnormal there: adding 0.5 does the shift and the rounding
        h = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    else h = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    y.bits = static_cast<uint16_t>(sign | h);
}
#endif

typedef uint16_t narrow __attribute__((vector_size(2 * W), aligned(2)));
typedef uint32_t wide __attribute__((vector_size(4 * W)));

inline vec load(const Bf16 *p) {  // spelled out where the compiler needs five instructions for the conversion
#if defined(__AVX512F__)
    const wide bits = reinterpret_cast<wide>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))));
#elif defined(__AVX2__)
    const wide bits = reinterpret_cast<wide>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#else
    const wide bits = __builtin_convertvector(*reinterpret_cast<const narrow *>(p), wide);
#endif
    return reinterpret_cast<vec>(bits << 16);
}

// Runs of consecutive elements: to = max(from, least) and to = scale * from.  The compiler vectorises the plain loop by itself;
// half floats need intrinsics, and runs of floats are so short that its preparations for the loop would cost as much as the loop.
inline float at_least(float least, float x) { return x < least ? least : x; }  // written so that NaN stays NaN
inline vec at_least(float least, vec x) { return x < least ? vec{} + least : x; }

template <class T>
inline void read_run(const T *from, float *__restrict to, int64_t n, float least) {
    for (int64_t i = 0; i < n; i++) to[i] = at_least(least, to_float(from[i]));
}
template <class T>
inline void write_run(const float *__restrict from, T *to, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) from_float(scale * from[i], to[i]);
}
inline void read_run(const float *from, float *__restrict to, int64_t n, float least) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, at_least(least, load(from + i)));
    for (; i < n; i++) to[i] = at_least(least, from[i]);
}
inline void write_run(const float *__restrict from, float *to, int64_t n, float scale) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, scale * load(from + i));
    for (; i < n; i++) to[i] = scale * from[i];
}
inline void read_run(const Bf16 *from, float *__restrict to, int64_t n, float least) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, at_least(least, load(from + i)));
    for (; i < n; i++) to[i] = at_least(least, to_float(from[i]));
}
#if defined(__AVX512BF16__)
inline void write_run(const float *__restrict from, Bf16 *to, int64_t n, float scale) {
    int64_t i = 0;
    for (; i + W <= n; i += W)
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + i), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(scale * load(from + i))));
    for (; i < n; i++) from_float(scale * from[i], to[i]);
}
#endif
#if defined(__F16C__)
inline void read_run(const Half *from, float *to, int64_t n, float least) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i)));
        _mm256_storeu_ps(to + i, _mm256_max_ps(_mm256_set1_ps(least), x));  // in this order max(least, NaN) is NaN
    }
    for (; i < n; i++) to[i] = at_least(least, to_float(from[i]));
}
inline void write_run(const float *from, Half *to, int64_t n, float scale) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i),
                         _mm256_cvtps_ph(_mm256_mul_ps(_mm256_set1_ps(scale), _mm256_loadu_ps(from + i)), 0));
    for (; i < n; i++) from_float(scale * from[i], to[i]);
}
#endif

// One (batch, head) of a tensor, row by row.
struct Rows {
    char *data = nullptr;
    int64_t dtype = COSFORMER_F32, row = 0, column = 1;  // strides in elements

    Rows() = default;
    Rows(const cosformer_tensor &t, int64_t b, int64_t h, int64_t first_row = 0)
        : dtype(t.dtype), row(t.stride[2]), column(t.stride[3]) {
        if (t.data)
            data = static_cast<char *>(t.data) +
                   (b * t.stride[0] + h * t.stride[1] + first_row * row) * (dtype == COSFORMER_F32 ? 4 : 2);
    }

    // Calls what(pointer to row i's first element); the pointer has the tensor's own type.
    template <class What>
    void at(int64_t i, What what) const {
        if (dtype == COSFORMER_F32) what(reinterpret_cast<float *>(data) + i * row);
        else if (dtype == COSFORMER_BF16) what(reinterpret_cast<Bf16 *>(data) + i * row);
        else what(reinterpret_cast<Half *>(data) + i * row);
    }

    // The usual rows inline, all others by a call.
    bool is_plain() const { return dtype == COSFORMER_F32 && column == 1; }
    float *plain(int64_t i) const { return reinterpret_cast<float *>(data) + i * row; }
    void get(int64_t i, float *to, int64_t n, float least = -INFINITY) const {
        if (is_plain()) read_run(plain(i), to, n, least);
        else get_any(i, to, n, least);
    }
    void put(int64_t i, const float *from, int64_t n, float scale = 1) const {
        if (is_plain()) write_run(from, plain(i), n, scale);
        else put_any(i, from, n, scale);
    }

  private:
    __attribute__((noinline)) void get_any(int64_t i, float *to, int64_t n, float least) const {
        at(i, [&](auto *from) {
            if (column == 1) read_run(from, to, n, least);
            else for (int64_t d = 0; d < n; d++) to[d] = at_least(least, to_float(from[d * column]));
        });
    }

    __attribute__((noinline)) void put_any(int64_t i, const float *from, int64_t n, float scale) const {
        at(i, [&](auto *to) {
            if (column == 1) write_run(from, to, n, scale);
            else for (int64_t d = 0; d < n; d++) from_float(scale * from[d], to[d * column]);
        });
    }
};

// Rows that will be needed soon.  Those of interleaved heads lie far apart, where the hardware does not prefetch them, and requested all at
// once they would only queue up for memory: so they are requested a few at a time, between the tiles of the products in progress.
class Soon {
  public:
    explicit Soon(int rows) : rows_(rows) {}  // at a time: wider tiles are fewer
    void clear() { used_ = at_ = 0; }
    void add(const Rows &rows, int64_t first, int64_t last, int64_t columns) {
        int64_t size = rows.dtype == COSFORMER_F32 ? 4 : 2;
        if (first >= last || !rows.data || used_ == MOST) return;
        pending_[used_++] = {rows.data + first * rows.row * size, rows.row * size, last - first, columns * size};
    }
    void operator()() {
        if (at_ < used_) ask();
    }

  private:
    __attribute__((noinline)) void ask() {
        for (int row = 0; row < rows_ && at_ < used_; row++) {
            Pending &p = pending_[at_];
            for (int64_t b = 0; b < p.bytes; b += 64) __builtin_prefetch(p.data + b);
            p.data += p.step;
            at_ += !--p.rows;
        }
    }

    static constexpr int MOST = 8;
    struct Pending { const char *data; int64_t step, rows, bytes; };
    Pending pending_[MOST];
    const int rows_;
    int used_ = 0, at_ = 0;
};

// A float or a vector, at any address.  (Not memcpy: as far as the compiler knows, that might change any variable.)
template <class T>
struct Loose { typedef T type __attribute__((aligned(4))); };
template <class T>
inline T get(const float *p) { return *reinterpret_cast<const typename Loose<T>::type *>(p); }
template <class T>
inline void put(float *p, T x) { *reinterpret_cast<typename Loose<T>::type *>(p) = x; }

// to (cols x rows) = from (rows x cols), in blocks of four columns and as many rows as a vector of 4 or 8 floats holds.
#if defined(__AVX__)
constexpr int BLOCK = 8;
#else
constexpr int BLOCK = 4;
#endif
typedef float quad __attribute__((vector_size(16)));
typedef float loose_quad __attribute__((vector_size(16), aligned(4)));
typedef float block __attribute__((vector_size(4 * BLOCK)));
typedef float loose_block __attribute__((vector_size(4 * BLOCK), aligned(4)));

// Picks i, j, k, l from a quad of a (0..3) and of b (4..7); in vectors of two quads, from both quads alike.
#if defined(__AVX__)
#define IN_8(i) ((i) < 4 ? (i) : (i) + 4)
#define PICK(a, b, i, j, k, l) \
    __builtin_shufflevector(a, b, IN_8(i), IN_8(j), IN_8(k), IN_8(l), IN_8(i) + 4, IN_8(j) + 4, IN_8(k) + 4, IN_8(l) + 4)
#else
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#endif

inline block four_columns(const float *p, int64_t ld) {  // of one row, and of the row four further down
    quad upper = *reinterpret_cast<const loose_quad *>(p);
#if defined(__AVX__)
    quad lower = *reinterpret_cast<const loose_quad *>(p + 4 * ld);
    return __builtin_shufflevector(upper, lower, 0, 1, 2, 3, 4, 5, 6, 7);
#else
    (void)ld;
    return upper;
#endif
}

inline void transpose(const float *from, int64_t ld_from, int64_t rows, int64_t cols, float *to, int64_t ld_to) {
    int64_t whole_rows = rows / BLOCK * BLOCK, whole_cols = cols / 4 * 4;
    for (int64_t i = 0; i < whole_rows; i += BLOCK)
        for (int64_t j = 0; j < whole_cols; j += 4) {
            const float *p = from + i * ld_from + j;
            block a = four_columns(p, ld_from), b = four_columns(p + ld_from, ld_from);
            block c = four_columns(p + 2 * ld_from, ld_from), d = four_columns(p + 3 * ld_from, ld_from);
            block ab0 = PICK(a, b, 0, 4, 1, 5), ab1 = PICK(a, b, 2, 6, 3, 7), cd0 = PICK(c, d, 0, 4, 1, 5), cd1 = PICK(c, d, 2, 6, 3, 7);
            float *q = to + j * ld_to + i;
            *reinterpret_cast<loose_block *>(q) = PICK(ab0, cd0, 0, 1, 4, 5);
            *reinterpret_cast<loose_block *>(q + ld_to) = PICK(ab0, cd0, 2, 3, 6, 7);
            *reinterpret_cast<loose_block *>(q + 2 * ld_to) = PICK(ab1, cd1, 0, 1, 4, 5);
            *reinterpret_cast<loose_block *>(q + 3 * ld_to) = PICK(ab1, cd1, 2, 3, 6, 7);
        }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i < whole_rows ? whole_cols : 0; j < cols; j++) to[j * ld_to + i] = from[i * ld_from + j];
}

}  // namespace
