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

    auto rows = [&](auto count, int64_t f) {  // several rows of the state at once, for which the sums are loaded and stored once
        const float *from = reinterpret_cast<const float *>(s.state_in.data) + f * s.state_in.row;
        float *to = reinterpret_cast<float *>(s.state_out.data) + f * s.state_out.row;
        auto columns = [&](int64_t e, auto like) {
            using T = decltype(like);  // a vector, or a float
            const T ye = get<T>(y + e);
            T sum = get<T>(sums + e);
            for (int r = 0; r < count; r++) {
                T x = decay * get<T>(from + r * s.state_in.row + e) + phi_k[f + r] * ye;
                put(to + r * s.state_out.row + e, x);
                sum += phi_q[f + r] * x;
            }
            put(sums + e, sum);
        };
        int64_t e = 0;
        for (; e + W <= s.E + 1; e += W) columns(e, vec{});
        for (; e <= s.E; e++) columns(e, 0.f);
    };
    int64_t f = 0;
    for (; f + 4 <= s.F; f += 4) rows(std::integral_constant<int, 4>(), f);
    for (; f < s.F; f++) rows(std::integral_constant<int, 1>(), f);
    const float z = sums[s.E], scale = 1 / s.clamp(z);
    if (s.norm) *s.norm = z;
    s.out.put(0, sums, s.E, scale);
}

}  // namespace
