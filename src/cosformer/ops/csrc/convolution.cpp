// The short convolution: rows of a few neighbouring tokens, weighted channel by channel (cosformer.h).
#include <algorithm>
#include <cstdint>
#include <vector>

#include "cosformer.h"
#include "host.h"
#include "parallel.h"
#include "rows.h"

namespace {

constexpr int64_t RUN = 64;  // rows a thread takes at a time

// The rows around the current one, as floats; each is read once.
class Window {
  public:
    Window(const Rows &rows, int64_t C, int64_t width) : rows_(rows), C_(C), width_(width), memory_(C * width), held_(width, -1) {}
    const float *row(int64_t t) {
        float *place = memory_.data() + t % width_ * C_;
        if (held_[t % width_] != t) rows_.get(t, place, C_), held_[t % width_] = t;
        return place;
    }

  private:
    Rows rows_;
    int64_t C_, width_;
    std::vector<float> memory_;
    std::vector<int64_t> held_;
};

// Calls what(t, s, neighbour) for every tap s whose neighbour t + ahead - s lies in the sequence of t, first <= t < last.
template <class What>
void taps(const cosformer_convolution_call &c, int64_t first, int64_t last, What what) {
    const int64_t *ends = c.cu_seqlens, *stop = ends + c.sequences + 1;
    int64_t begin = 0, end = c.L;
    for (int64_t t = first; t < last; t++) {
        if (c.sequences && (t == first || t >= end)) {
            const int64_t *next = std::upper_bound(ends, stop, t);
            begin = next[-1], end = *next;
        }
        for (int64_t s = 0; s < c.width; s++) {
            const int64_t near = t + c.ahead - s;
            if (near >= begin && near < end) what(t, s, near);
        }
    }
}

void convolve(const cosformer_convolution_call &c, int64_t b, int64_t first, int64_t last) {
    Window x(Rows(c.x, b, 0), c.C, c.width);
    const Rows y(c.y, b, 0);
    std::vector<float> sum(c.C);
    int64_t at = first;
    auto finish = [&] {
        y.put(at, sum.data(), c.C);
        std::fill(sum.begin(), sum.end(), 0.f);
    };
    taps(c, first, last, [&](int64_t t, int64_t s, int64_t near) {
        if (t != at) finish(), at = t;
        const float *__restrict from = x.row(near), *__restrict w = c.weight + s * c.C;
        float *__restrict to = sum.data();
        for (int64_t i = 0; i < c.C; i++) to[i] += w[i] * from[i];
    });
    finish();
}

void weigh(const cosformer_convolution_call &c, float *dweight, int64_t b, int64_t first, int64_t last) {
    Window x(Rows(c.x, b, 0), c.C, c.width), dout(Rows(c.y, b, 0), c.C, 1);
    taps(c, first, last, [&](int64_t t, int64_t s, int64_t near) {
        const float *__restrict from = x.row(near), *__restrict d = dout.row(t);
        float *__restrict to = dweight + s * c.C;
        for (int64_t i = 0; i < c.C; i++) to[i] += d[i] * from[i];
    });
}

}  // namespace

EXPORT int cosformer_convolution(const cosformer_convolution_call *call) try {
    const cosformer_convolution_call &c = *call;
    const int64_t blocks = (c.L + RUN - 1) / RUN, tasks = c.B * blocks;
    const int64_t threads = host::forked() ? 1 : std::min(c.threads, tasks);
    in_parallel(threads, threads, [&](int64_t i) {  // each a run of blocks, so that dweight has one part per thread
        for (int64_t task = tasks * i / threads; task < tasks * (i + 1) / threads; task++) {
            const int64_t b = task / blocks, first = task % blocks * RUN, last = std::min(first + RUN, c.L);
            if (c.dweight) weigh(c, c.dweight + i * c.width * c.C, b, first, last);
            else convolve(c, b, first, last);
        }
    });
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
