// The short convolution: each channel a weighted sum of a few neighbouring rows, and the gradient of its weight (cosformer.h).
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cosformer.h"
#include "host.h"
#include "parallel.h"
#include "rows.h"

namespace {

constexpr int64_t RUN = 64;   // rows a thread takes at a time
constexpr int GROUP = 4;      // rows of a tile: each neighbour is read once for all of them
constexpr int64_t TAPS = 4;   // of a tile; a wider convolution takes several

// Rows as floats, `ld` apart.
struct Floats {
    const float *data;
    int64_t ld;
};

// y_r (+)= sum_s w_s x_(r + taps - 1 - s) for some rows, in the channels of one T, a float or a vector.
template <class T, int rows, int taps>
inline void convolve_tile(Floats x, const float *w, int64_t ld_w, float *y, int64_t ld_y, bool add) {
    T tap[taps], sum[rows];
    for (int s = 0; s < taps; s++) tap[s] = get<T>(w + s * ld_w);
    for (int r = 0; r < rows; r++) {
        sum[r] = tap[0] * get<T>(x.data + (r + taps - 1) * x.ld);
        for (int s = 1; s < taps; s++) sum[r] += tap[s] * get<T>(x.data + (r + taps - 1 - s) * x.ld);
    }
    for (int r = 0; r < rows; r++) put(y + r * ld_y, add ? get<T>(y + r * ld_y) + sum[r] : sum[r]);
}

// w_s += sum_r d_r x_(r + taps - 1 - s), likewise.
template <class T, int rows, int taps>
inline void weigh_tile(Floats x, float *w, int64_t ld_w, const float *d, int64_t ld_d) {
    T given[rows];
    for (int r = 0; r < rows; r++) given[r] = get<T>(d + r * ld_d);
    for (int s = 0; s < taps; s++) {
        T sum = get<T>(w + s * ld_w);
        for (int r = 0; r < rows; r++) sum += given[r] * get<T>(x.data + (r + taps - 1 - s) * x.ld);
        put(w + s * ld_w, sum);
    }
}

// Calls tile(taps as a constant, the first of them) until all `width` are done.
template <class Tile>
void each_taps(int64_t width, Tile tile) {
    for (int64_t s = 0; s < width; s += TAPS) switch (std::min(TAPS, width - s)) {
        case 1: tile(std::integral_constant<int, 1>{}, s); break;
        case 2: tile(std::integral_constant<int, 2>{}, s); break;
        case 3: tile(std::integral_constant<int, 3>{}, s); break;
        default: tile(std::integral_constant<int, 4>{}, s);
    }
}

// Calls tile(T{}, rows as a constant, the first row, the first channel) for all of `rows` x C.
template <class Tile>
void each_tile(int64_t rows, int64_t C, Tile tile) {
    auto across = [&](auto group, int64_t r) {
        int64_t c = 0;
        for (; c + W <= C; c += W) tile(vec{}, group, r, c);
        for (; c < C; c++) tile(float{}, group, r, c);
    };
    int64_t r = 0;
    for (; r + GROUP <= rows; r += GROUP) across(std::integral_constant<int, GROUP>{}, r);
    for (; r < rows; r++) across(std::integral_constant<int, 1>{}, r);
}

// One thread's part of a call.
class Convolution {
  public:
    explicit Convolution(const cosformer_convolution_call &call) : c(call), back_(c.width - 1 - c.ahead) {
        near_.resize((RUN + c.width - 1) * c.C);
        other_.resize(RUN * c.C);
        if (c.dweight) part_.resize(c.width * c.C);
    }

    // The rows first .. last of batch row b, sequence by sequence; with dweight, what they add to it.
    void operator()(int64_t b, int64_t first, int64_t last, float *dweight) {
        const Rows x(c.x, b, 0), y(c.y, b, 0);
        if (!c.sequences) return piece(x, y, first, last, 0, c.L, dweight);
        const int64_t *next = std::upper_bound(c.cu_seqlens, c.cu_seqlens + c.sequences + 1, first);
        for (; first < last; first = *next++) piece(x, y, first, std::min(last, *next), next[-1], *next, dweight);
    }

  private:
    // The rows first .. last, which lie in the sequence begin .. end.
    void piece(const Rows &x, const Rows &y, int64_t first, int64_t last, int64_t begin, int64_t end, float *dweight) {
        if (first >= last) return;
        const Floats near = within(x, first - back_, last + c.ahead, begin, end, near_.data());
        if (dweight) return weigh(near, within(y, first, last, begin, end, other_.data()), last - first, dweight);
        if (y.is_plain()) return convolve(near, last - first, y.plain(first), y.row);
        convolve(near, last - first, other_.data(), c.C);
        for (int64_t t = first; t < last; t++) y.put(t, other_.data() + (t - first) * c.C, c.C);
    }

    void convolve(Floats near, int64_t rows, float *y, int64_t ld) {
        each_taps(c.width, [&](auto taps, int64_t s) {
            each_tile(rows, c.C, [&](auto element, auto group, int64_t r, int64_t i) {
                convolve_tile<decltype(element), group(), taps()>(neighbours(near, r, s + taps(), i), c.weight + s * c.C + i, c.C,
                                                                  y + r * ld + i, ld, s > 0);
            });
        });
    }

    void weigh(Floats near, Floats d, int64_t rows, float *dweight) {
        std::fill(part_.begin(), part_.end(), 0.f);  // a sum of its own: one long sum would lose digits
        each_taps(c.width, [&](auto taps, int64_t s) {
            each_tile(rows, c.C, [&](auto element, auto group, int64_t r, int64_t i) {
                weigh_tile<decltype(element), group(), taps()>(neighbours(near, r, s + taps(), i), part_.data() + s * c.C + i, c.C,
                                                               d.data + r * d.ld + i, d.ld);
            });
        });
        for (size_t i = 0; i < part_.size(); i++) dweight[i] += part_[i];
    }

    // From the row on that the last of the taps before `stop` meets in row r.
    Floats neighbours(Floats near, int64_t r, int64_t stop, int64_t i) const {
        return {near.data + (r + c.width - stop) * near.ld + i, near.ld};
    }

    // The rows first .. last, zero outside begin .. end: where they lie, or copied.
    Floats within(const Rows &rows, int64_t first, int64_t last, int64_t begin, int64_t end, float *copies) const {
        if (rows.is_plain() && begin <= first && last <= end) return {rows.plain(first), rows.row};
        for (int64_t t = first; t < last; t++) {
            float *to = copies + (t - first) * c.C;
            if (begin <= t && t < end) rows.get(t, to, c.C);
            else std::fill_n(to, c.C, 0.f);
        }
        return {copies, c.C};
    }

    const cosformer_convolution_call &c;
    const int64_t back_;
    std::vector<float> near_, other_, part_;
};

}  // namespace

EXPORT int cosformer_convolution(const cosformer_convolution_call *call) try {
    const cosformer_convolution_call &c = *call;
    const int64_t blocks = (c.L + RUN - 1) / RUN, tasks = c.B * blocks;
    const int64_t threads = host::forked() ? 1 : std::min(c.threads, tasks);
    in_parallel(threads, threads, [&](int64_t i) {  // each a run of blocks, so that dweight has one part per thread
        Convolution convolution(c);
        for (int64_t task = tasks * i / threads; task < tasks * (i + 1) / threads; task++) {
            const int64_t first = task % blocks * RUN;
            convolution(task / blocks, first, std::min(first + RUN, c.L), c.dweight ? c.dweight + i * c.width * c.C : nullptr);
        }
    });
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
