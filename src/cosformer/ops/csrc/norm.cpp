// The RMS norm of rows and its gradient, each in one pass over memory (cosformer.h).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cosformer.h"
#include "host.h"
#include "parallel.h"
#include "rows.h"

namespace {

constexpr int64_t RUN = 256;  // rows that are worth a thread

struct Norm {
    const cosformer_norm_call &c;
    Rows x{c.x, 0, 0}, y{c.y, 0, 0}, dy{c.dy, 0, 0}, dx{c.dx, 0, 0};
    std::vector<float> row = std::vector<float>(c.D), other = std::vector<float>(c.D);

    float scale() const {
        return static_cast<float>(1 / std::sqrt(dot(row.data(), row.data(), c.D) / static_cast<double>(c.D) + c.eps));
    }

    void forward(int64_t i) {
        x.get(i, row.data(), c.D);
        const float r = scale(), *__restrict w = c.weight;
        float *__restrict to = other.data(), *__restrict from = row.data();
        for (int64_t d = 0; d < c.D; d++) to[d] = from[d] * r * w[d];
        y.put(i, to, c.D);
    }

    // With g = w dy and n = r x:  dw += dy n,  dx = r (g - n mean(g n)).
    void backward(int64_t i, float *__restrict dweight) {
        x.get(i, row.data(), c.D);
        dy.get(i, other.data(), c.D);
        const float r = scale(), *__restrict w = c.weight;
        float *__restrict n = row.data(), *__restrict g = other.data();
        for (int64_t d = 0; d < c.D; d++) {
            n[d] *= r;
            dweight[d] += g[d] * n[d];
            g[d] *= w[d];
        }
        const float mean = dot(g, n, c.D) / static_cast<float>(c.D);
        for (int64_t d = 0; d < c.D; d++) g[d] = r * (g[d] - n[d] * mean);
        dx.put(i, g, c.D);
    }
};

}  // namespace

EXPORT int cosformer_norm(const cosformer_norm_call *call) try {
    const cosformer_norm_call &c = *call;
    const int64_t threads = host::forked() ? 1 : std::clamp<int64_t>(c.rows / RUN, 1, c.threads);
    in_parallel(threads, threads, [&](int64_t i) {
        Norm norm{c};
        std::vector<float> part(c.dweight ? c.D : 0);  // the sum of a run of rows: one long sum would lose digits
        const int64_t last = c.rows * (i + 1) / threads;
        for (int64_t row = c.rows * i / threads; row < last;) {
            const int64_t stop = std::min(row + RUN, last);
            for (; row < stop; row++) c.dweight ? norm.backward(row, part.data()) : norm.forward(row);
            for (size_t d = 0; d < part.size(); d++) c.dweight[i * c.D + d] += part[d], part[d] = 0;
        }
    });
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
