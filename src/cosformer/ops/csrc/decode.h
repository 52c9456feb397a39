// One token of a stream: its state read, updated and written in one pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "rows.h"
#include "sequence.h"

namespace {

void decode(const Sequence &s) {
    constexpr int most = 256;  // the largest D and E
    float q[most], k[most], y[most + 1], sums[most + 1] = {};
    float phi_q[2 * most], phi_k[2 * most];
    const float least = s.relu ? 0 : -INFINITY;
    s.q.get(0, q, s.D, least);
    if (s.seen(0)) s.k.get(0, k, s.D, least), s.v.get(0, y, s.E);
    else std::fill_n(k, s.D, 0.f), std::fill_n(y, s.E, 0.f);
    y[s.E] = 1;

    const double angle = s.theta * static_cast<double>(s.position);
    const float turn[2] = {static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))};
    const float decay = s.rate ? static_cast<float>(std::exp(-static_cast<double>(*s.rate))) : 1;
    for (int64_t f = 0, p = 0; p < s.parts; p++)
        for (int64_t d = 0; d < s.D; d++, f++) phi_k[f] = turn[p] * k[d], phi_q[f] = turn[p] * q[d];

    // Some columns of the state, row by row: memory is read and written in order, and the sums stay in registers.  With `last`
    // also the column behind them, the normaliser's.
    auto columns = [&](int64_t e, auto like, auto count, auto last) {
        using T = decltype(like);  // a vector, or a float
        constexpr int64_t width = sizeof(T) / sizeof(float);
        T ye[count], sum[count] = {};
        for (int i = 0; i < count; i++) ye[i] = get<T>(y + e + i * width);
        float z = 0;
        const float *from = reinterpret_cast<const float *>(s.state_in.data) + e;
        float *to = reinterpret_cast<float *>(s.state_out.data) + e;
        for (int64_t f = 0; f < s.F; f++, from += s.state_in.row, to += s.state_out.row) {
            for (int i = 0; i < count; i++) {
                T x = decay * get<T>(from + i * width) + phi_k[f] * ye[i];
                put(to + i * width, x);
                sum[i] += phi_q[f] * x;
            }
            if (last) {
                float x = decay * from[count * width] + phi_k[f];
                to[count * width] = x;
                z += phi_q[f] * x;
            }
        }
        for (int i = 0; i < count; i++) put(sums + e + i * width, sum[i]);
        if (last) sums[e + count * width] = z;
    };
    auto some = [&](int64_t e, auto like, auto count) {
        const bool last = e + count * static_cast<int64_t>(sizeof(like) / sizeof(float)) == s.E;
        last ? columns(e, like, count, std::true_type()) : columns(e, like, count, std::false_type());
    };
    int64_t e = 0;
    for (; e + 4 * W <= s.E; e += 4 * W) some(e, vec{}, std::integral_constant<int, 4>());
    for (; e + 2 * W <= s.E; e += 2 * W) some(e, vec{}, std::integral_constant<int, 2>());
    for (; e + W <= s.E; e += W) some(e, vec{}, std::integral_constant<int, 1>());
    for (; e < s.E; e++) some(e, 0.f, std::integral_constant<int, 1>());
    const float z = sums[s.E], scale = 1 / s.clamp(z);
    if (s.norm) *s.norm = z;
    s.out.put(0, sums, s.E, scale);
}

}  // namespace
