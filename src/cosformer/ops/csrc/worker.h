// One thread at work on one chunk of one sequence: loading, the three products (push, read, pull), storing.
#pragma once

#include <algorithm>
#include <cmath>

#include "gemm.h"
#include "rows.h"
#include "scratch.h"
#include "sequence.h"

namespace {

class Worker {
  public:
    explicit Worker(const Sequence &sequence) : s(sequence), D(s.D), E(s.E), F(s.F), C(s.chunk()) {
        static thread_local Scratch scratch;
        scratch.reserve([&] {
            auto matrix = [&](float *&p, int64_t rows, int64_t ld) { scratch.take(p, rows * ld); };
            for (float **p : {&q, &k, &dx}) matrix(*p, C, ldD);
            for (float **p : {&phi, &dphi}) matrix(*p, C, ldF);
            for (float **p : {&v, &dy, &y}) matrix(*p, C, ldE);
            for (float **p : {&scores, &dscores}) matrix(*p, C, ldC);
            if (s.rate_per_position) matrix(weights, C, ldC);
            matrix(xt, D, ldC), matrix(phit, F, ldC);
            for (float **p : {&vt, &yt}) matrix(*p, E + 1, ldC);
            for (float **p : {&state_s, &state_t}) matrix(*p, E + 1, ldF);
            for (float **p : {&lost_s, &lost_t}) if (s.is_long()) matrix(*p, E + 1, ldF);
            for (float **p : {&read_by[0], &read_by[1], &push_by[0], &push_by[1], &row_sums}) matrix(*p, 1, ldC);
            matrix(by_distance, 1, 2 * ldC);
            for (double **p : {&turn_cos, &turn_sin, &rates, &before, &after, &running}) scratch.take(*p, ldC);
        });
        const double rate = s.rate && !s.rate_per_position ? std::exp(-static_cast<double>(*s.rate)) : 1;
        turn(rate);
        std::fill_n(rates, C, rate);  // those of positions follow chunk by chunk
    }

    // The states of a sweep that no other thread takes part in.
    Carry carry(bool with_s, bool with_t) const {
        Carry c;
        if (with_s) c.s.at = state_s, c.s.lost = lost_s;
        if (with_t) c.t.at = state_t, c.t.lost = lost_t;
        return c;
    }

    int64_t state_size() const { return (E + 1) * ldF; }

    // States in the caller's tensors are (F, E+1).
    void import_state(State &state, const Rows &from) const {
        transpose(reinterpret_cast<float *>(from.data), from.row, F, E + 1, state.at, ldF);
        if (state.lost) std::fill_n(state.lost, state_size(), 0.f);
        state.empty = false;
    }
    void export_state(const State &state, const Rows &to) const {
        float *data = reinterpret_cast<float *>(to.data);
        if (state.empty) for (int64_t f = 0; f < F; f++) std::fill_n(data + f * to.row, E + 1, 0.f);
        else transpose(state.at, ldF, E + 1, F, data, to.row);
    }

    // Forward: queries read, keys push.  A chunk that only collects for a later sweep does not emit.
    void forward(const Chunk &c, Carry &carry, const Sweep &sweep, bool emit, bool push) {
        place(c, sweep);
        if (c.keys) load_keys(c);
        if (c.queries && emit) {
            soon.add(s.out, c.start - s.q_offset, c.start - s.q_offset + c.n, E);
            load_queries(c);
            transpose(q, ldD, c.n, D, xt, ldC);
            read(carry.s, c.n);
            if (sweep.local && c.keys) attend(c);
            write_out(c, sweep);
        }
        if (push) this->push(carry.s, v, k, c.keys ? c.n : 0);
        carry.decay *= total;
    }

    // The forward of a sequence that is one chunk whose every query sees every key: there is no state, and rows need no transposing.
    void forward_pairs(const Chunk &c) {
        place(c, Sweep());
        load_keys(c), load_queries(c);
        transpose(q, ldD, c.n, D, xt, ldC);
        for (int64_t i = 0; i < c.n; i += COLS) {
            gemm<Plain>(c.n, COLS, D, k, ldD, xt + i, ldC, Added{scores, ldC}, soon);
            vec sums[VECS] = {};
            for (int64_t j = 0; j < c.n; j++) {
                keep(scores + j * ldC, weight(j, i), i, 0, c.n);
                for (int n = 0; n < VECS; n++) sums[n] += load(scores + j * ldC + n * W);
            }
            for (int n = 0; n < VECS; n++) store(row_sums + i + n * W, sums[n]);
            gemm<Transposed>(std::min<int64_t>(COLS, c.n - i), E, c.n, scores, ldC, v, ldE, Added{y + i * ldE, ldE}, soon);
        }
        for (int64_t i = 0; i < c.n; i++) {
            if (s.norm) s.norm[i] = row_sums[i];
            s.out.put(i, y + i * ldE, E, 1 / s.clamp(row_sums[i]));
        }
    }

    // Backward: queries pull from S and push T; keys pull and read from T and push S.
    void backward(const Chunk &c, Carry &carry, const Sweep &sweep, bool emit, bool push) {
        bool local = emit && sweep.local && c.queries && c.keys;
        place(c, sweep);
        if (emit && carry.s.at) soon.add(s.dq, c.start - s.q_offset, c.start - s.q_offset + (c.queries ? c.n : 0), D);
        if (emit && carry.t.at) soon.add(s.dk, c.start, c.start + (c.keys ? c.n : 0), D), soon.add(s.dv, c.start, c.start + (c.keys ? c.n : 0), E);
        if (c.queries) load_queries(c), load_dy(c);
        if (c.keys) load_keys(c);
        if (local) differentiate_pairs(c);
        if (emit && c.queries && (carry.s.at || local)) {
            bool pulled = pull(carry.s, dy, q, c, sweep);
            if (local) add_dq(c, pulled);
            write_gradient(s.dq, c.start - s.q_offset, c.n, q, sweep.add_queries, false);
        }
        if (emit && c.keys && carry.t.at) {
            bool pulled = pull(carry.t, v, k, c, sweep);
            if (!local) transpose(k, ldD, c.n, D, xt, ldC);  // else done for the pairs
            read(carry.t, c.n);
            if (local) add_dk_dv(c, pulled);
            write_gradient(s.dk, c.start, c.n, k, sweep.add_keys, true);
            write_dv(c, sweep);
        }
        if (push && carry.s.at) this->push(carry.s, v, k, c.keys ? c.n : 0);
        if (push && carry.t.at) this->push(carry.t, dy, q, c.queries ? c.n : 0);
        carry.decay *= total;
    }

  private:
    const Sequence &s;
    const int64_t D, E, F, C;
    const int64_t ldD = padded(D), ldE = padded(E + 1), ldF = padded(F), ldC = padded(C);

    // All matrices are row-major; a trailing t: one column, not one row, per position.
    float *q, *k, *v;             // f(q), f(k), [v, 1]
    float *xt, *vt;               // f(q)^T or f(k)^T, and v^T
    float *phi, *phit;            // phi of what pushes, phi^T of what reads, decay included
    float *y, *yt;                // rows read
    float *dy, *dphi, *dx;        // gradients: of a row read, of phi, of q or k
    float *weights = nullptr;     // (C, C) cos(theta (i - j)) exp(-|A_i - A_j|), symmetric, where each position has its rate
    float *by_distance;           // the same where it depends on C + i - j alone; else the cosine
    float *scores, *dscores;      // the chunk's s_ij, and their gradient times the weight
    float *state_s, *state_t, *lost_s = nullptr, *lost_t = nullptr;
    float *read_by[2], *push_by[2];  // per part and position: cosine or sine, times the decay to or from the chunk's edge
    float *row_sums;
    double *turn_cos, *turn_sin;  // of theta * i
    double *rates, *before, *after, *running;  // exp(-rate), and its products: see cosformer.h
    double total = 1;             // decay over the chunk
    int64_t ahead = 0;            // from this chunk's rows to the next's
    Soon soon{3};

    // cos and sin of theta * i by repeated rotation: in double, C steps cost nothing.
    void turn(double rate) {
        double c = std::cos(s.theta), sn = std::sin(s.theta);
        turn_cos[0] = 1, turn_sin[0] = 0;
        for (int64_t i = 1; i < C; i++) {
            turn_cos[i] = turn_cos[i - 1] * c - turn_sin[i - 1] * sn;
            turn_sin[i] = turn_sin[i - 1] * c + turn_cos[i - 1] * sn;
        }
        double fade = 1;
        for (int64_t i = 0; i < C; i++, fade *= rate) by_distance[C + i] = by_distance[C - i] = static_cast<float>(fade * turn_cos[i]);
    }

    // weights of an n x n chunk.  Row by row, each the neighbour's times one rate; in double, so that n roundings do not add up.
    void weigh(int64_t n) {
        auto row = [&](int64_t i, int64_t from, int64_t to, double rate) {
            for (int64_t j = from; j < to; j++) running[j] *= rate;
            running[i] = 1;
            float *w = weights + i * ldC;
            const float *cosine = by_distance + C - i;
            for (int64_t j = std::min(from, i); j < std::max(to, i + 1); j++) w[j] = static_cast<float>(running[j]) * cosine[j];
        };
        for (int64_t i = 0; i < n; i++) row(i, 0, i, rates[i]);
        for (int64_t i = n - 1; i >= 0; i--) row(i, i + 1, n, i + 1 < n ? rates[i + 1] : 1);
    }

    const float *weight(int64_t i, int64_t j) const { return s.rate_per_position ? weights + i * ldC + j : by_distance + C - i + j; }

    // Angles and decay factors of the chunk's positions.
    void place(const Chunk &c, const Sweep &sweep) {
        soon.clear();
        ahead = sweep.rightward ? C : -C;
        if (!c.queries && !c.keys) {  // a gap, as long as it likes; only a constant rate gets here
            total = s.rate ? std::exp(-static_cast<double>(*s.rate) * c.n) : 1;
            return;
        }
        double angle = s.theta * static_cast<double>(s.position + c.start), c0 = std::cos(angle), s0 = std::sin(angle);
        float *const by[2] = {read_by[0], read_by[1]};
        for (int64_t i = 0; i < c.n; i++) by[0][i] = static_cast<float>(c0 * turn_cos[i] - s0 * turn_sin[i]);
        for (int64_t i = 0; i < c.n; i++) by[1][i] = static_cast<float>(s0 * turn_cos[i] + c0 * turn_sin[i]);
        for (int p = 0; p < 2; p++) std::copy_n(read_by[p], c.n, push_by[p]);
        if (!s.rate) return;

        if (s.rate_per_position) {
            for (int64_t i = 0; i < c.n; i++) rates[i] = std::exp(-static_cast<double>(s.rate[(c.start + i) * s.rate_step]));
            if (sweep.local) weigh(c.n);
        }
        total = 1;
        for (int64_t i = 0; i < c.n; i++) before[i] = total *= rates[i];
        after[c.n - 1] = 1;
        for (int64_t i = c.n - 1; i > 0; i--) after[i - 1] = after[i] * rates[i];
        const double *read = sweep.rightward ? before : after, *push = sweep.rightward ? after : before;
        for (int p = 0; p < 2; p++)
            for (int64_t i = 0; i < c.n; i++) {
                read_by[p][i] *= static_cast<float>(read[i]);
                push_by[p][i] *= static_cast<float>(push[i]);
            }
    }

    void load_features(const Rows &from, int64_t row, float *x) const { from.get(row, x, D, s.relu ? 0 : -INFINITY); }
    // Having loaded rows, think of the next chunk's.
    void foresee(const Rows &rows, int64_t first, int64_t limit, int64_t columns) {
        soon.add(rows, std::max<int64_t>(first + ahead, 0), std::min(first + ahead + C, limit), columns);
    }
    void load_queries(const Chunk &c) {
        for (int64_t i = 0; i < c.n; i++) load_features(s.q, c.start - s.q_offset + i, q + i * ldD);
        foresee(s.q, c.start - s.q_offset, s.L, D);
    }
    void load_keys(const Chunk &c) {
        for (int64_t j = 0; j < c.n; j++) {
            float *kj = k + j * ldD, *vj = v + j * ldE;
            if (s.seen(c.start + j)) {
                load_features(s.k, c.start + j, kj);
                s.v.get(c.start + j, vj, E);
            } else {
                std::fill_n(kj, D, 0.f);
                std::fill_n(vj, E, 0.f);
            }
            vj[E] = 1;
        }
        foresee(s.k, c.start, s.S, D);
        foresee(s.v, c.start, s.S, E);
    }
    // dy: the gradient of the rows read, from that of the normalised output.
    void load_dy(const Chunk &c) {
        for (int64_t i = 0; i < c.n; i++) {
            int64_t row = c.start - s.q_offset + i;
            float *dyi = dy + i * ldE, z = s.norm[row], scale = 1 / s.clamp(z);
            if (z == 0 && s.relu && !s.signed_norm) {  // nothing was attended to: no output, no gradient
                std::fill_n(dyi, E + 1, 0.f);
                continue;
            }
            s.dout.get(row, dyi, E);
            s.out.get(row, y, E);
            dyi[E] = s.clamped(z) ? 0 : -dot(dyi, y, E) * scale;
            for (int64_t e = 0; e < E; e++) dyi[e] *= scale;
        }
        foresee(s.dout, c.start - s.q_offset, s.L, E);
        foresee(s.out, c.start - s.q_offset, s.L, E);
    }

    // state = decay * state + sum over the rows of y^T phi(x)
    void push(State &state, const float *rows, const float *x, int64_t n) {
        if (!n && (state.empty || total == 1)) return;
        for (int64_t i = 0; i < n; i++)
            for (int64_t p = 0; p < s.parts; p++)  // in this order: a part's last vector may run into the next part
                for (int64_t d = 0; d < D; d += W) store(phi + i * ldF + p * D + d, push_by[p][i] * load(x + i * ldD + d));
        gemm<Transposed>(E + 1, F, n, rows, ldE, phi, ldF, Added{state.at, ldF, state.empty ? 0 : static_cast<float>(total), state.lost}, soon);
        state.empty = false;
    }

    // yt = state * phi(x)^T, where xt holds f(x)^T
    void read(const State &state, int64_t n) {
        if (state.empty) {
            std::fill_n(yt, (E + 1) * ldC, 0.f);
            return;
        }
        for (int64_t p = 0; p < s.parts; p++)
            for (int64_t d = 0; d < D; d++)
                for (int64_t i = 0; i < n; i += W) store(phit + (p * D + d) * ldC + i, load(read_by[p] + i) * load(xt + d * ldC + i));
        gemm<Plain>(E + 1, n, F, state.at, ldF, phit, ldC, Added{yt, ldC}, soon);
    }

    // dx = gradient of f(x) from that of the rows read; x itself serves the decay's gradient.  False: there was nothing to pull.
    bool pull(const State &state, const float *dyx, const float *x, const Chunk &c, const Sweep &sweep) {
        if (state.empty) {
            std::fill_n(dx, c.n * ldD, 0.f);
            return false;
        }
        gemm<Plain>(c.n, F, E + 1, dyx, ldE, state.at, ldF, Added{dphi, ldF}, soon);
        for (int64_t i = 0; i < c.n; i++)
            for (int64_t d = 0; d < D; d += W) {
                vec g = read_by[0][i] * load(dphi + i * ldF + d);
                if (s.parts == 2) g += read_by[1][i] * load(dphi + i * ldF + D + d);
                store(dx + i * ldD + d, g);
            }
        if (s.dA)  // what lies to the left of a position decays more when A rises there, what lies to the right less
            for (int64_t i = 0; i < c.n; i++) {
                float g = dot(x + i * ldD, dx + i * ldD, D);
                s.dA[c.start + i] += sweep.rightward ? -g : g;
            }
        return true;
    }

    // COLS entries of a row of the chunk's matrix, from column j on, times their weights; those outside [from, to) are not seen.
    static void keep(float *a, const float *w, int64_t j, int64_t from, int64_t to) {
        if (from <= j && j + COLS <= to) {
            for (int n = 0; n < COLS; n += W) store(a + n, load(a + n) * load(w + n));
            return;
        }
        ivec column;
        for (int i = 0; i < W; i++) column[i] = static_cast<int>(j + i);
        for (int n = 0; n < COLS; n += W, column += W) {
            ivec seen = (column >= static_cast<int>(from)) & (column < static_cast<int>(to));
            store(a + n, seen ? load(a + n) * load(w + n) : vec{});
        }
    }

    // yt += the chunk's own pairs, a strip of queries at a time: scores (keys x queries), then their product with v.
    void attend(const Chunk &c) {
        for (int64_t i = 0; i < c.n; i += COLS) {
            int64_t keys = s.causal ? std::min(c.n, i + COLS) : c.n;  // up to the strip's last query
            gemm<Plain>(keys, COLS, D, k, ldD, xt + i, ldC, Added{scores, ldC}, soon);
            for (int64_t j = 0; j < keys; j++) keep(scores + j * ldC, weight(j, i), i, s.causal ? j : 0, c.n);
            gemm<Transposed>(E + 1, COLS, keys, v, ldE, scores, ldC, Added{yt + i, ldC, 1}, soon);
        }
    }

    void write_out(const Chunk &c, const Sweep &sweep) {
        int64_t row = c.start - s.q_offset;
        transpose(yt, ldC, E, c.n, y, ldE);
        for (int64_t i = 0; i < c.n; i++) {
            float *yi = y + i * ldE, z = yt[E * ldC + i] + (sweep.add_queries ? s.norm[row + i] : 0);
            if (s.norm) s.norm[row + i] = z;
            if (sweep.add_queries) add(s.out, row + i, yi, E);
            s.out.put(row + i, yi, E, sweep.finish ? 1 / s.clamp(z) : 1);
        }
    }

    // scores (queries x keys) and dscores = their gradient times the weight; the pairs' part of dA.
    void differentiate_pairs(const Chunk &c) {
        transpose(k, ldD, c.n, D, xt, ldC);
        transpose(v, ldE, c.n, E + 1, vt, ldC);
        for (int64_t j = 0; j < c.n; j += COLS) {
            int64_t first = s.causal ? j : 0;  // the first query that sees the strip
            gemm<Plain>(c.n - first, COLS, D, q + first * ldD, ldD, xt + j, ldC, Added{scores + first * ldC + j, ldC}, soon);
            gemm<Plain>(c.n - first, COLS, E + 1, dy + first * ldE, ldE, vt + j, ldC, Added{dscores + first * ldC + j, ldC}, soon);
            for (int64_t i = first; i < c.n; i++) {
                int64_t at = i * ldC + j, end = s.causal ? i + 1 : c.n;
                keep(scores + at, weight(i, j), j, 0, end);
                if (s.dA) differentiate_decay(c, i, j, end);
                keep(dscores + at, weight(i, j), j, 0, end);
            }
        }
    }

    // Pairs of query i and the keys [j, j + COLS): P_ij = ds_ij s_ij
    void differentiate_decay(const Chunk &c, int64_t i, int64_t j, int64_t end) {
        float rise = 0;
        for (int64_t col = j; col < std::min(j + COLS, end); col++) {
            float p = scores[i * ldC + col] * dscores[i * ldC + col];
            p = col < i ? p : col > i ? -p : 0;
            s.dA[c.start + col] += p;
            rise += p;
        }
        s.dA[c.start + i] -= rise;
    }

    void add_dq(const Chunk &c, bool pulled) {
        for (int64_t i = 0; i < c.n; i += COLS) {
            int64_t rows = std::min<int64_t>(COLS, c.n - i), keys = s.causal ? i + rows : c.n;
            gemm<Plain>(rows, D, keys, dscores + i * ldC, ldC, k, ldD, Added{dx + i * ldD, ldD, pulled ? 1.f : 0.f}, soon);
        }
    }

    void add_dk_dv(const Chunk &c, bool pulled) {
        for (int64_t j = 0; j < c.n; j += COLS) {
            int64_t rows = std::min<int64_t>(COLS, c.n - j), first = s.causal ? j : 0, queries = c.n - first;
            gemm<Transposed>(rows, D, queries, dscores + first * ldC + j, ldC, q + first * ldD, ldD, Added{dx + j * ldD, ldD, pulled ? 1.f : 0.f}, soon);
            gemm<Transposed>(E, COLS, queries, dy + first * ldE, ldE, scores + first * ldC + j, ldC, Added{yt + j, ldC, 1}, soon);
        }
    }

    static void add(const Rows &from, int64_t row, float *to, int64_t n) {  // from a float32 tensor
        const float *p = reinterpret_cast<const float *>(from.data) + row * from.row;
        for (int64_t d = 0; d < n; d++) to[d] += p[d * from.column];
    }

    // dx through f, to the caller.
    void write_gradient(const Rows &to, int64_t row, int64_t n, const float *x, bool adding, bool keys) {
        for (int64_t i = 0; i < n; i++) {
            float *g = dx + i * ldD;
            if (s.relu)
                for (int64_t d = 0; d < D; d += W) store(g + d, load(x + i * ldD + d) <= 0 ? vec{} : load(g + d));
            if (keys && !s.seen(row + i)) std::fill_n(g, D, 0.f);
            if (adding) add(to, row + i, g, D);
            to.put(row + i, g, D);
        }
    }
    void write_dv(const Chunk &c, const Sweep &sweep) {
        transpose(yt, ldC, E, c.n, y, ldE);
        for (int64_t j = 0; j < c.n; j++) {
            float *g = y + j * ldE;
            if (!s.seen(c.start + j)) std::fill_n(g, E, 0.f);
            if (sweep.add_keys) add(s.dv, c.start + j, g, E);
            s.dv.put(c.start + j, g, E);
        }
    }
};

}  // namespace
