// One thread's work if order does not matter, without causality and decay: all keys enter one state, which all queries read.
//
// With c_i = cos(theta i), s_i = sin(theta i) and the two parts of phi(x_i) apart,
//
//     forward    S_c = sum_j c_j [v_j, 1] f(k_j)^T,  S_s alike                 y_i = c_i S_c f(q_i) + s_i S_s f(q_i)
//     backward   T_c = sum_i c_i dy_i f(q_i)^T,  T_s alike                     df(q_i) = c_i S_c^T dy_i + s_i S_s^T dy_i
//                dv_j = c_j T_c f(k_j) + s_j T_s f(k_j)                        df(k_j) = c_j T_c^T [v_j, 1] + s_j T_s^T [v_j, 1]
//
// so only rows that are pushed are multiplied by c and s beforehand, a strip at a time; what is read or pulled is multiplied in its tile:
// the columns of a state are HALF of one part, HALF of the other, and so on (gemm.h, Joined), and no row is ever transposed.
#pragma once

#include <algorithm>

#include "angles.h"
#include "gemm.h"
#include "narrow.h"
#include "rows.h"
#include "scratch.h"
#include "sequence.h"

namespace {

class Total {
  public:
    explicit Total(const Sequence &sequence) : s(sequence), D(s.D), E(s.E), C(s.chunk()), product(s.narrow) {
        static thread_local Scratch scratch;
        scratch.reserve([&] {
            scratch.take(left, C * std::max(ldD, ldE));
            for (float **p : {&x, &y}) scratch.take(*p, C * std::max(ldD, ldE));
            scratch.take(strips, C * WIDE);
            for (float **p : {&by[0], &by[1], &scaled[0], &scaled[1], &z}) scratch.take(*p, padded(C));
            for (float *&p : states) scratch.take(p, state_size());
            for (float *&p : lost) if (s.is_long()) scratch.take(p, state_size());
            scratch.take(turned, D * ldR);
            scratch.take(angles.cosine, C), scratch.take(angles.sine, C);
            product.reserve(scratch, std::max(C, E + 1), std::max({C, D, E + 1}));
        });
        angles.turn(s.theta, C);
    }

    int64_t state_size() const { return (E + 1) * ldF; }
    State state(int i) const {
        State state;
        state.at = states[i], state.lost = lost[i];
        return state;
    }

    // States in the caller's tensors are (F, E+1).
    void import_state(State &state, const Rows &from) const {
        const float *data = reinterpret_cast<const float *>(from.data);
        std::fill_n(state.at + E * ldF, ldF, 0.f);  // its spare columns are multiplied by zeros, and must not be NaN
        blocks(D, [&](int64_t p, int64_t d, int64_t n) {
            transpose(data + (p * D + d) * from.row, from.row, n, E + 1, state.at + column(p, d), ldF);
        });
        if (state.lost) std::fill_n(state.lost, state_size(), 0.f);
        state.empty = false;
    }
    void export_state(const State &state, const Rows &to) const {
        float *data = reinterpret_cast<float *>(to.data);
        if (state.empty) for (int64_t f = 0; f < s.F; f++) std::fill_n(data + f * to.row, E + 1, 0.f);
        else blocks(D, [&](int64_t p, int64_t d, int64_t n) {
            transpose(state.at + column(p, d), ldF, E + 1, n, data + (p * D + d) * to.row, to.row);
        });
    }

    // Reading takes the state transposed; every thread's worker transposes it for itself.
    void turn(const State &state) {
        if (!state.empty)
            blocks(D, [&](int64_t p, int64_t d, int64_t n) {
                for (int64_t e = 0; e < E; e += HALF)
                    transpose(state.at + e * ldF + column(p, d), ldF, std::min<int64_t>(HALF, E - e), n,
                              turned + d * ldR + column(p, e), ldR);
            });
    }

    // Forward: the keys [first, first + n) enter S.
    void push(State &state, int64_t first, int64_t n) {
        place(first, n);
        load_values(first, n);
        const Lines keys = lines(s.k, first, n, D, s.mask);
        foresee(s.k, first, s.S, D), foresee(s.v, first, s.S, E);
        push(state, keys, n);
    }

    // Forward: the queries [first, first + n) read S, transposed.
    void read(const State &state, int64_t first, int64_t n) {
        place(s.q_offset + first, n);
        load_features(lines(s.q, first, n, D, false), n);
        foresee(s.q, first, s.L, D);
        foresee(s.out, first, s.L, E);
        if (state.empty) std::fill_n(z, n, 0.f);
        else s.parts == 2 ? normalisers<2>(state, n) : normalisers<1>(state, n);
        for (int64_t i = 0; i < n; i++) {
            const float scale = 1 / s.clamp(z[i]);
            scaled[0][i] = by[0][i] * scale, scaled[1][i] = by[1][i] * scale;
        }
        if (s.norm) std::copy_n(z, n, s.norm + first);
        const Target out = target(s.out, first, E);
        join(state.empty, n, E, D, ldD, turned, ldR, scaled, out, {});
        put(s.out, first, n, E, out, false);
    }

    // Backward: the queries pull their gradient out of S and push into T.
    void push_back(const State &from, State &to, int64_t first, int64_t n) {
        place(s.q_offset + first, n);
        load_dy(first, n);
        const Lines queries = lines(s.q, first, n, D, false);
        foresee(s.q, first, s.L, D), foresee(s.dout, first, s.L, E), foresee(s.out, first, s.L, E);
        foresee(s.dq, first, s.L, D);
        const Target dq = target(s.dq, first, D);
        join(from.empty, n, D, E + 1, ldE, from.at, ldF, by, dq, queries);
        push(to, queries, n);
        put(s.dq, first, n, D, dq, false);
    }

    // Backward: the keys pull their gradient out of T, and read that of their values out of T transposed.
    void read_back(const State &state, int64_t first, int64_t n) {
        place(first, n);
        foresee(s.k, first, s.S, D), foresee(s.v, first, s.S, E);
        foresee(s.dk, first, s.S, D), foresee(s.dv, first, s.S, E);
        load_values(first, n);
        const Lines keys = lines(s.k, first, n, D, s.mask);
        const Target dk = target(s.dk, first, D), dv = target(s.dv, first, E);
        join(state.empty, n, D, E + 1, ldE, state.at, ldF, by, dk, keys);
        put(s.dk, first, n, D, dk, s.mask);
        load_features(keys, n);
        join(state.empty, n, E, D, ldD, turned, ldR, by, dv, {});
        put(s.dv, first, n, E, dv, s.mask);
    }

  private:
    static constexpr int WIDE = COLS > 16 ? COLS : 2 * COLS;  // columns of a strip: with two parts, a cache line of a row

    struct Lines { const float *at = nullptr; int64_t ld = 0; };  // rows of floats
    struct Target { float *at; int64_t ld; };

    const Sequence &s;
    const int64_t D, E, C;
    const int64_t features = columns(D);  // of a state
    const int64_t ldD = padded(D), ldE = padded(E + 1), ldF = padded(features), ldR = padded(columns(E));

    float *left;                    // rows on the left of a product: [v, 1], dy, f(q) or f(k)
    float *x, *y;                   // copies of rows that cannot be read or written in place
    float *strips;                  // rows of phi, WIDE columns at a time
    float *by[2], *scaled[2], *z;   // per position: cosine and sine, the same over the normaliser, the normaliser
    float *states[2], *lost[2] = {nullptr, nullptr};
    float *turned;                  // (D x E) transposed, its columns laid out like a state's
    Angles angles;
    Product product;
    Soon soon{COLS > 16 ? 4 : 2};

    // The column of number d of part p, and how many such columns there are.
    int64_t column(int64_t p, int64_t d) const { return s.parts == 1 ? d : d / HALF * COLS + p * HALF + d % HALF; }
    int64_t columns(int64_t size) const { return s.parts == 1 ? size : (size + HALF - 1) / HALF * COLS; }
    // what(part, first, n) for all runs of numbers in adjacent columns.
    template <class What>
    void blocks(int64_t size, What what) const {
        for (int64_t p = 0; p < s.parts; p++)
            for (int64_t d = 0; d < size; d += HALF) what(p, d, std::min<int64_t>(HALF, size - d));
    }

    void place(int64_t position, int64_t n) {
        soon.clear();
        angles.from(s.theta * static_cast<double>(s.position + position), n, by[0], by[1]);
    }
    // Called when rows are loaded: the next chunk's are prefetched.
    void foresee(const Rows &rows, int64_t first, int64_t limit, int64_t columns) {
        soon.add(rows, first + C, std::min(first + 2 * C, limit), columns);
    }

    // Rows in place, if whole strips may be read there, else copied to x; those of masked keys are zero.
    static bool is_whole(const Rows &rows, int64_t size) { return rows.is_plain() && size % WIDE == 0; }
    Lines lines(const Rows &rows, int64_t first, int64_t n, int64_t size, bool masked) {
        if (is_whole(rows, size) && !masked) return {rows.plain(first), rows.row};
        const int64_t ld = padded(size);
        for (int64_t i = 0; i < n; i++) {
            if (masked && !s.seen(first + i)) std::fill_n(x + i * ld, size, 0.f);
            else rows.get(first + i, x + i * ld, size);
            std::fill_n(x + i * ld + size, ld - size, 0.f);
        }
        return {x, ld};
    }
    static const float *row(const Rows &rows, int64_t i, int64_t size, float *to) {
        if (is_whole(rows, size)) return rows.plain(i);
        rows.get(i, to, size);
        return to;
    }
    float least() const { return s.relu ? 0 : -INFINITY; }

    // left = [v, 1]
    void load_values(int64_t first, int64_t n) {
        for (int64_t j = 0; j < n; j++) {
            if (s.seen(first + j)) s.v.get(first + j, left + j * ldE, E);
            else std::fill_n(left + j * ldE, E, 0.f);
            left[j * ldE + E] = 1;
        }
    }
    // left = f(x)
    void load_features(const Lines &from, int64_t n) {
        for (int64_t i = 0; i < n; i++)
            for (int64_t d = 0; d < D; d += W) store(left + i * ldD + d, at_least(least(), load(from.at + i * from.ld + d)));
    }
    // left = dy, from the gradient of the normalised output
    void load_dy(int64_t first, int64_t n) {
        for (int64_t i = 0; i < n; i++) {
            const float z = s.norm[first + i], scale = 1 / s.clamp(z);
            float *dy = left + i * ldE;
            if (z == 0 && s.relu && !s.signed_norm) {  // nothing was attended to: no output, no gradient
                std::fill_n(dy, E + 1, 0.f);
                continue;
            }
            const float *dout = row(s.dout, first + i, E, dy), *out = row(s.out, first + i, E, y);
            dy[E] = s.clamped(z) ? 0 : -dot(dout, out, E) * scale;
            for (int64_t e = 0; e < E; e++) dy[e] = dout[e] * scale;
        }
    }

    // z = the normalisers that the queries in `left` read
    template <int PARTS>
    void normalisers(const State &state, int64_t n) {
        const float *norms = state.at + E * ldF;
        for (int64_t i = 0; i < n; i++) {
            vec sums[PARTS] = {};
            for (int64_t d = 0; d < D; d += W) {
                const vec q = load(left + i * ldD + d);
                for (int p = 0; p < PARTS; p++) sums[p] += q * load(norms + (PARTS == 2 ? d / HALF * COLS + d % HALF : d) + p * HALF);
            }
            vec joined = by[0][i] * sums[0];
            if (PARTS == 2) joined += by[1][i] * sums[PARTS - 1];
            z[i] = sum(joined);
        }
    }

    // state += left^T phi(from)
    void push(State &state, const Lines &from, int64_t n) {
        for (int64_t j = 0; j < features; j += WIDE) {
            const int64_t width = std::min<int64_t>(WIDE, features - j);
            if (width > COLS) s.parts == 2 ? weigh<2, WIDE>(from, j / 2, n) : weigh<1, WIDE>(from, j, n);
            else s.parts == 2 ? weigh<2, COLS>(from, j / 2, n) : weigh<1, COLS>(from, j, n);
            product.gemm<Transposed>(E + 1, width, n, left, ldE, strips, WIDE,
                             Added{state.at + j, ldF, state.empty ? 0.f : 1.f, state.lost ? state.lost + j : nullptr}, soon);
        }
        state.empty = false;
    }
    // Strips of phi, of the numbers from d on.
    template <int PARTS, int WIDTH>
    void weigh(const Lines &from, int64_t d, int64_t n) const {
        const float least = this->least();
        for (int64_t i = 0; i < n; i++) {
            const float *row = from.at + i * from.ld + d;
            float *to = strips + i * WIDE;
            for (int m = 0; m < WIDTH / PARTS; m += W) {
                const vec f = at_least(least, load(row + m));
                if (PARTS == 1) store(to + m, f);
                else store(to + m / HALF * COLS + m % HALF, by[0][i] * f), store(to + m / HALF * COLS + m % HALF + HALF, by[1][i] * f);
            }
        }
    }

    // to (n x size) = the parts of left (n x steps) * state, joined
    void join(bool empty, int64_t n, int64_t size, int64_t steps, int64_t ld, const float *state, int64_t ld_state, float *const *by,
              const Target &to, const Lines &through) {
        if (empty) {
            for (int64_t i = 0; i < n; i++) std::fill_n(to.at + i * to.ld, size, 0.f);
            return;
        }
        const float *x = s.relu ? through.at : nullptr;
        if (s.parts == 2) product.gemm<Plain>(n, columns(size), steps, left, ld, state, ld_state,
                                      Joined<2>{to.at, to.ld, {by[0], by[1]}, x, through.ld}, soon);
        else product.gemm<Plain>(n, size, steps, left, ld, state, ld_state, Joined<1>{to.at, to.ld, {by[0], by[1]}, x, through.ld}, soon);
    }

    // Where a product goes: to the caller's rows, if they can be written a strip at a time, else to y, from which `put` copies it there.
    Target target(const Rows &rows, int64_t first, int64_t size) const {
        if (is_whole(rows, size)) return {rows.plain(first), rows.row};
        return {y, padded(size)};
    }
    void put(const Rows &rows, int64_t first, int64_t n, int64_t size, const Target &from, bool masked) const {
        for (int64_t i = 0; i < n && (masked || from.at == y); i++) {
            if (masked && !s.seen(first + i)) std::fill_n(from.at + i * from.ld, size, 0.f);
            if (from.at == y) rows.put(first + i, from.at + i * from.ld, size);
        }
    }
};

}  // namespace
