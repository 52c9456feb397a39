// One token per row through whole blocks of a model and the parts around them (cosformer.h).  With a state of constant size, decoding is
// mostly reading the weights, so all threads stay in one parallel region and meet between the products.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attend.h"
#include "cosformer.h"
#include "decode.h"
#include "dots.h"
#include "host.h"
#include "parallel.h"

namespace {

// what(row, b, (scale w x_b + bias)[row]) for the rows [first, last) of w (., n); x is (B, n).  Every weight comes from memory once, in
// order.
template <class Weight, class T, class What>
void project(const Weight *w, const float *scales, const T *bias, int64_t first, int64_t last, const float *x, int64_t B, int64_t n,
             What what) {
    for (int64_t row = first; row < last; row++) {
        const float scale = scales ? scales[row] : 1, add = bias ? to_float(bias[row]) : 0;
        float y[2];
        int64_t b = 0;
        for (; b + 2 <= B; b += 2) {
            dots<2>(w + row * n, x + b * n, n, y);
            what(row, b, y[0] * scale + add), what(row, b + 1, y[1] * scale + add);
        }
        if (b < B) dots<1>(w + row * n, x + b * n, n, y), what(row, b, y[0] * scale + add);
    }
}

template <class T>
void normalise(const float *x, const T *weight, int64_t n, double eps, float *y) {
    float squares;
    dots<1>(x, x, n, &squares);
    const float scale = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(n) + eps));
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * to_float(weight[i]);
}

template <class T>  // the type of parameters and of kept tokens
class Step {
  public:
    Step(const cosformer_block *blocks, const cosformer_kept *kept, int64_t count, float *x, int64_t B, int64_t C, int64_t position)
        : blocks_(blocks), kept_(kept), count_(count), x_(x), B(B), C(C), position_(position) {
        int64_t qkv = 0, heads = 0, wide = 0, hidden = 0;
        for (const cosformer_block *b = blocks; b < blocks + count; b++) {
            qkv = std::max(qkv, (b->heads + 2 * b->kv_heads) * b->size), heads = std::max(heads, b->heads);
            wide = std::max(wide, b->heads * b->size), hidden = std::max(hidden, b->hidden);
        }
        for (auto [buffer, size] : {std::pair(&qkv_, qkv), {&rates_, heads}, {&gates_, wide}, {&mixed_, wide}, {&hidden_, hidden}})
            buffer->resize(B * size);
    }

    // x = the rows of the tables for these tokens; false if there is no such row.
    bool embed(const cosformer_ends &ends, const int64_t *ids, const int64_t *places) {
        for (int64_t at = 0; at < B; at++) {
            if (ids[at] < 0 || ids[at] >= ends.vocabulary || (places && (places[at] < 0 || places[at] >= ends.most))) return false;
            read_run(in(ends.embeddings) + ids[at] * C, x_ + at * C, C, -INFINITY);
            if (places) for (int64_t i = 0; i < C; i++) x_[at * C + i] += to_float(in(ends.positions)[places[at] * C + i]);
        }
        return true;
    }

    // The work of one of `threads` threads; normed (B, C) is its own.
    void run(int64_t thread, int64_t threads, float *normed, const cosformer_ends *ends, float *logits) {
        FlushSubnormals flush;
        auto share = [&](int64_t n, auto what) { what(n * thread / threads, n * (thread + 1) / threads); };
        auto some = [&](const cosformer_linear &l, int64_t first, int64_t last, const float *x, int64_t n, auto what) {
            if (l.scales) project(static_cast<const int8_t *>(l.weight), l.scales, in(l.bias), first, last, x, B, n, what);
            else project(in(l.weight), nullptr, in(l.bias), first, last, x, B, n, what);
        };
        auto products = [&](const cosformer_linear &l, const float *x, int64_t n, auto what) {
            if (l.weight) share(l.rows, [&](int64_t first, int64_t last) { some(l, first, last, x, n, what); });
        };
        auto add = [&](int64_t row, int64_t at, float y) { x_[at * C + row] += y; };
        for (int64_t i = 0; i < count_; i++) {
            const cosformer_block &b = blocks_[i];

            const int64_t q = b.heads * b.size, kv = b.kv_heads * b.size, all = q + 2 * kv;
            for (int64_t at = 0; at < B; at++) normalise(x_ + at * C, in(b.norm), C, b.norm_eps, normed + at * C);
            products(b.q, normed, C, [&](int64_t row, int64_t at, float y) { qkv_[at * all + row] = y; });
            products(b.k, normed, C, [&](int64_t row, int64_t at, float y) { qkv_[at * all + q + row] = y; });
            products(b.v, normed, C, [&](int64_t row, int64_t at, float y) { qkv_[at * all + q + kv + row] = y; });
            products(b.rate_gate, normed, C, [&](int64_t row, int64_t at, float y) { rates_[at * b.heads + row] = y; });
            products(b.output_gate, normed, C, [&](int64_t row, int64_t at, float y) { gates_[at * q + row] = 1 / (1 + std::exp(-y)); });
            meet();
            share(B * b.heads, [&](int64_t first, int64_t last) {
                for (int64_t task = first; task < last; task++) mix(b, kept_[i], task / b.heads, task % b.heads);
            });
            meet();
            share(B, [&](int64_t first, int64_t last) {
                for (int64_t at = first; at < last; at++) remember(b, kept_[i], at);
            });
            products(b.o, mixed_.data(), q, add);
            meet();
            for (int64_t at = 0; at < B; at++) normalise(x_ + at * C, in(b.mlp_norm), C, b.norm_eps, normed + at * C);
            share(b.hidden, [&](int64_t first, int64_t last) {
                auto at = [&](int64_t row, int64_t row_of_x) -> float & { return hidden_[row_of_x * b.hidden + row]; };
                auto gate = [&](int64_t row, int64_t n, float y) { at(row, n) = y / (1 + std::exp(-y)); };
                auto up = [&](int64_t row, int64_t n, float y) { at(row, n) *= y; };
                some(b.gate, first, last, normed, C, gate);
                some(b.up, first, last, normed, C, up);
            });
            meet();
            products(b.down, hidden_.data(), b.hidden, add);
            meet();
        }
        if (!logits) return;
        for (int64_t at = 0; at < B; at++) normalise(x_ + at * C, in(ends->norm), C, ends->norm_eps, normed + at * C);
        products(ends->head, normed, C, [&](int64_t row, int64_t at, float y) { logits[at * ends->head.rows + row] = y; });
    }

    bool refused() const { return refused_; }

  private:
    const cosformer_block *blocks_;
    const cosformer_kept *kept_;
    const int64_t count_;
    float *x_;
    const int64_t B, C, position_;
    std::vector<float> qkv_, rates_, gates_, mixed_, hidden_;
    std::atomic<bool> refused_{false};

    static const T *in(const void *parameter) { return static_cast<const T *>(parameter); }

    // One head of row `at`: convolution, norms, rate, state.
    void mix(const cosformer_block &b, const cosformer_kept &kept, int64_t at, int64_t head) {
        constexpr int most = 256;  // the largest size
        const int64_t D = b.size, q = b.heads * D, kv = b.kv_heads * D, shared = head / (b.heads / b.kv_heads);
        const float *qkv = qkv_.data() + at * (q + 2 * kv);
        float x[3][most];
        const int64_t begins[3] = {head * D, shared * D, shared * D}, channels[3] = {q, kv, kv}, offsets[3] = {0, q, q + kv};
        for (int p = 0; p < 3; p++) {
            const float *now = qkv + offsets[p] + begins[p];
            std::copy_n(now, D, x[p]);
            if (!b.conv_width) continue;
            const int64_t before = b.conv_width - 1;
            const T *taps = in(b.conv[p]) + begins[p] * b.conv_width, *last = in(kept.last[p]) + at * before * channels[p] + begins[p];
            for (int64_t d = 0; d < D; d++) {
                const T *tap = taps + d * b.conv_width;
                float y = to_float(tap[0]) * now[d];
                for (int64_t s = 1; s <= before; s++) y += to_float(tap[s]) * to_float(last[(before - s) * channels[p] + d]);
                x[p][d] = y;
            }
        }
        if (b.q_norm) normalise(x[0], in(b.q_norm), D, b.qk_norm_eps, x[0]), normalise(x[1], in(b.k_norm), D, b.qk_norm_eps, x[1]);

        if (b.softmax) {
            attend(b, kept, at, head, x[0], x[1], x[2]);
            gate(b, at, head);
            return;
        }
        float rate = b.rates ? b.rates[head] : 0;
        if (b.rate_gate.weight) rate *= std::exp(std::min(rates_[at * b.heads + head], static_cast<float>(b.largest_exponent)));
        if (!(rate >= 0 && rate < INFINITY)) refused_ = true;

        Sequence s = {};
        s.D = s.E = D, s.parts = b.theta ? 2 : 1, s.F = D * s.parts, s.L = s.S = 1, s.position = position_;
        s.causal = true, s.relu = b.relu, s.signed_norm = b.signed_norm, s.eps = static_cast<float>(b.eps);
        s.theta = b.theta ? b.theta[head] : 0, s.rate = b.rates ? &rate : nullptr;
        s.q.data = reinterpret_cast<char *>(x[0]), s.k.data = reinterpret_cast<char *>(x[1]), s.v.data = reinterpret_cast<char *>(x[2]);
        float *out = mixed_.data() + at * q + head * D;
        s.out.data = reinterpret_cast<char *>(out);
        s.state_in.data = reinterpret_cast<char *>(kept.state + (at * b.heads + head) * s.F * (D + 1));
        s.state_in.row = D + 1, s.state_out = s.state_in;
        decode(s);
        gate(b, at, head);
    }

    void gate(const cosformer_block &b, int64_t at, int64_t head) {
        const int64_t begin = (at * b.heads + head) * b.size;
        if (b.output_gate.weight) for (int64_t d = begin; d < begin + b.size; d++) mixed_[d] *= gates_[d];
    }

    // Softmax: q and k are turned to their position, k and v appended to those kept, and q attends over all of them.
    void attend(const cosformer_block &b, const cosformer_kept &kept, int64_t at, int64_t head, float *q, float *k, float *v) {
        const int64_t D = b.size, row = at * b.heads + head;
        for (int64_t d = 0; b.turns && d < D / 2; d++) {
            const double angle = static_cast<double>(position_) * b.turns[d];
            const float c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
            for (float *x : {q, k}) {
                const float first = x[d], second = x[d + D / 2];
                x[d] = first * c - second * s, x[d + D / 2] = first * s + second * c;
            }
        }
        T *keys = static_cast<T *>(kept.keys) + row * kept.room * D, *values = static_cast<T *>(kept.values) + row * kept.room * D;
        write_run(k, keys + position_ * D, D, 1), write_run(v, values + position_ * D, D, 1);
        softmax(q, keys, values, position_ + 1, D, mixed_.data() + row * D);
    }

    // Keeps the tokens that the next convolution looks back at.
    void remember(const cosformer_block &b, const cosformer_kept &kept, int64_t at) const {
        if (!b.conv_width) return;
        const int64_t q = b.heads * b.size, kv = b.kv_heads * b.size, before = b.conv_width - 1;
        const float *now = qkv_.data() + at * (q + 2 * kv);
        const int64_t channels[3] = {q, kv, kv};
        for (int p = 0; p < 3; now += channels[p++]) {
            T *last = static_cast<T *>(kept.last[p]) + at * before * channels[p];
            std::copy(last + channels[p], last + before * channels[p], last);
            write_run(now, last + (before - 1) * channels[p], channels[p], 1);
        }
    }
};

template <class T>
int run(const cosformer_block *blocks, const cosformer_kept *kept, int64_t count, float *x, int64_t B, int64_t C, int64_t position,
        int64_t threads, const cosformer_ends *ends, const int64_t *ids, const int64_t *places, float *logits) try {
    Step<T> step(blocks, kept, count, x, B, C, position);
    if (ids && !step.embed(*ends, ids, places)) return 3;
    threads = host::forked() || C < 128 ? 1 : std::max<int64_t>(threads, 1);  // a narrow block is done before a thread is awake
    std::vector<float> normed(threads * B * C);
    team(threads, [&](int64_t thread, int64_t all) { step.run(thread, all, normed.data() + thread * B * C, ends, logits); });
    return step.refused() ? 2 : 0;
} catch (const std::bad_alloc &) {
    return 1;
}

}  // namespace

EXPORT int cosformer_step(const cosformer_block *blocks, const cosformer_kept *kept, int64_t count, int64_t dtype, float *x, int64_t B,
                          int64_t C, int64_t position, int64_t threads, const cosformer_ends *ends, const int64_t *ids,
                          const int64_t *places, float *logits) {
    return (dtype == COSFORMER_BF16 ? run<Bf16> : run<float>)(blocks, kept, count, x, B, C, position, threads, ends, ids, places, logits);
}
