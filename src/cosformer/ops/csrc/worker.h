// One thread's work on a chunk of a sequence whose order matters: the three products (push, read, pull), and storing.
#pragma once

#include <algorithm>

#include "pairs.h"

namespace {

class Worker : public Pairs {
  public:
    using Pairs::Pairs;

    // The states of a sweep by one thread.
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

    // Forward: queries read, keys push.  Without emit a chunk only updates the state, for a later pass.
    void forward(const Chunk &c, Carry &carry, const Sweep &sweep, bool emit, bool push) {
        place(c, sweep);
        if (s.rate_per_position && sweep.local && emit && c.queries && c.keys) weigh(c.n, !s.causal, true);
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

    // Backward: queries pull from S and push T; keys pull and read from T and push S.
    void backward(const Chunk &c, Carry &carry, const Sweep &sweep, bool emit, bool push) {
        bool local = emit && sweep.local && c.queries && c.keys;
        place(c, sweep);
        if (s.rate_per_position && local) weigh(c.n, true, !s.causal);
        if (emit && carry.s.at) soon.add(s.dq, c.start - s.q_offset, c.start - s.q_offset + (c.queries ? c.n : 0), D);
        if (emit && carry.t.at)
            soon.add(s.dk, c.start, c.start + (c.keys ? c.n : 0), D), soon.add(s.dv, c.start, c.start + (c.keys ? c.n : 0), E);
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
    // state = decay * state + sum over the rows of y^T phi(x)
    void push(State &state, const float *rows, const float *x, int64_t n) {
        if (!n && (state.empty || total == 1)) return;
        for (int64_t i = 0; i < n; i++)
            for (int64_t p = 0; p < s.parts; p++)  // in this order: a part's last vector may overlap the next part
                for (int64_t d = 0; d < D; d += W) store(phi + i * ldF + p * D + d, push_by[p][i] * load(x + i * ldD + d));
        product.gemm<Transposed>(E + 1, F, n, rows, ldE, phi, ldF,
                         Added{state.at, ldF, state.empty ? 0 : static_cast<float>(total), state.lost}, soon);
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
        product.gemm<Plain>(E + 1, n, F, state.at, ldF, phit, ldC, Added{yt, ldC}, soon);
    }

    // dx = gradient of f(x) from that of the rows read; x itself is for the decay's gradient.  False if there was nothing to pull.
    bool pull(const State &state, const float *dyx, const float *x, const Chunk &c, const Sweep &sweep) {
        if (state.empty) {
            std::fill_n(dx, c.n * ldD, 0.f);
            return false;
        }
        product.gemm<Plain>(c.n, F, E + 1, dyx, ldE, state.at, ldF, Added{dphi, ldF}, soon);
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

    static void add(const Rows &from, int64_t row, float *to, int64_t n) {  // from a float32 tensor
        const float *p = reinterpret_cast<const float *>(from.data) + row * from.row;
        for (int64_t d = 0; d < n; d++) to[d] += p[d * from.column];
    }

    // dx through f, written to the caller's tensor.
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
