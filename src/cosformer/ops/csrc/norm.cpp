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

    // A row of floats is read and written where it lies, any other through a copy.
    const float *read(const Rows &rows, int64_t i, float *copy) const {
        if (rows.is_plain()) return rows.plain(i);
        rows.get(i, copy, c.D);
        return copy;
    }
    template <class Fill>
    void write(const Rows &rows, int64_t i, Fill fill) {
        if (rows.is_plain()) return fill(rows.plain(i));
        fill(other.data());  // element by element, so that it may also be what is read
        rows.put(i, other.data(), c.D);
    }
    template <class Each>
    void each(Each what) const {
        int64_t d = 0;
        for (; d + W <= c.D; d += W) what(vec{}, d);
        for (; d < c.D; d++) what(float{}, d);
    }

    float scale(float squares) const { return static_cast<float>(1 / std::sqrt(squares / static_cast<double>(c.D) + c.eps)); }

    void forward(int64_t i) {
        const float *from = read(x, i, row.data());
        const float r = scale(dot(from, from, c.D));
        write(y, i, [&](float *to) {
            each([&](auto element, int64_t d) {
                using T = decltype(element);
                put(to + d, r * get<T>(from + d) * get<T>(c.weight + d));
            });
        });
    }

    // With g = w dy and n = r x:  dw += dy n,  dx = r (g - n mean(g n)).
    void backward(int64_t i, float *dweight) {
        const float *from = read(x, i, row.data()), *given = read(dy, i, other.data());
        vec squares = {}, products = {};  // of x, and of g and x
        float last_squares = 0, last_products = 0;
        int64_t d = 0;
        for (; d + W <= c.D; d += W) {
            squares += load(from + d) * load(from + d);
            products += load(c.weight + d) * load(given + d) * load(from + d);
        }
        for (; d < c.D; d++) {
            last_squares += from[d] * from[d];
            last_products += c.weight[d] * given[d] * from[d];
        }
        const float r = scale(sum(squares) + last_squares);
        const float mean = r * (sum(products) + last_products) / static_cast<float>(c.D);
        write(dx, i, [&](float *to) {
            each([&](auto element, int64_t d) {
                using T = decltype(element);
                const T n = r * get<T>(from + d), g = get<T>(given + d);
                put(dweight + d, get<T>(dweight + d) + g * n);
                put(to + d, r * (get<T>(c.weight + d) * g - n * mean));
            });
        });
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
