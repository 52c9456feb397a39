// Softmax attention of one query over keys and values in memory, each read once:
//
//     out = sum_j exp(q.k_j / sqrt(D)) v_j / sum_j exp(q.k_j / sqrt(D))
//
// A few keys at a time, relative to the largest score so far: when a larger one comes, the sums are scaled down.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "dots.h"

namespace {

// sums (D) += the weighted sum of `count` rows of values
template <class T>
inline void add_weighted(const T *values, const float *weights, int64_t count, int64_t D, float *sums) {
    constexpr int R = 4;  // rows at once, for which the sums are loaded and stored once
    int64_t j = 0;
    auto rows = [&](auto n, const T *from, const float *w) {
        int64_t d = 0;
        for (; d + W <= D; d += W) {
            vec sum = load(sums + d);
            for (int r = 0; r < n; r++) {
                __builtin_prefetch(reinterpret_cast<const char *>(from + r * D + d) + AHEAD);
                sum += w[r] * load(from + r * D + d);
            }
            store(sums + d, sum);
        }
        for (; d < D; d++)
            for (int r = 0; r < n; r++) sums[d] += w[r] * to_float(from[r * D + d]);
    };
    for (; j + R <= count; j += R) rows(std::integral_constant<int, R>(), values + j * D, weights + j);
    for (; j < count; j++) rows(std::integral_constant<int, 1>(), values + j * D, weights + j);
}

// q (D), keys and values (count, D), count > 0; D is at most 256
template <class T>
void softmax(const float *q, const T *keys, const T *values, int64_t count, int64_t D, float *out) {
    constexpr int64_t RUN = 64;
    float scores[RUN], sums[256] = {}, most = -INFINITY, total_weight = 0;
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
    for (int64_t first = 0; first < count; first += RUN) {
        const int64_t n = std::min(RUN, count - first);
        float largest = most;
        for (int64_t j = 0; j < n; j++) {
            dots<1>(keys + (first + j) * D, q, D, scores + j);
            scores[j] *= scale, largest = std::max(largest, scores[j]);
        }
        if (largest > most) {
            const float shrink = std::exp(most - largest);
            for (int64_t d = 0; d < D; d++) sums[d] *= shrink;
            total_weight *= shrink, most = largest;
        }
        for (int64_t j = 0; j < n; j++) scores[j] = std::exp(scores[j] - most), total_weight += scores[j];
        add_weighted(values + first * D, scores, n, D, sums);
    }
    for (int64_t d = 0; d < D; d++) out[d] = sums[d] / total_weight;
}

}  // namespace
