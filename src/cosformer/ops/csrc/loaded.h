// A chunk as one thread works on it: its matrices, the angles and decay of its positions, and how its rows are loaded.
#pragma once

#include <algorithm>
#include <cmath>

#include "angles.h"
#include "gemm.h"
#include "narrow.h"
#include "rows.h"
#include "scratch.h"
#include "sequence.h"

namespace {

class Loaded {
  public:
    explicit Loaded(const Sequence &sequence) : s(sequence), D(s.D), E(s.E), F(s.F), C(s.chunk()), product(s.narrow) {
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
            for (double **p : {&angles.cosine, &angles.sine, &rates, &before, &after, &running}) scratch.take(*p, ldC);
            product.reserve(scratch, std::max(C, E + 1), std::max({C, F, E + 1}));
        });
        const double rate = s.rate && !s.rate_per_position ? std::exp(-static_cast<double>(*s.rate)) : 1;
        std::fill_n(rates, C, rate);  // rates per position are filled in chunk by chunk
        angles.turn(s.theta, C);
        double fade = 1;
        for (int64_t i = 0; i < C; i++, fade *= rate) by_distance[C + i] = by_distance[C - i] = static_cast<float>(fade * angles.cosine[i]);
    }

  protected:
    const Sequence &s;
    const int64_t D, E, F, C;
    const int64_t ldD = padded(D), ldE = padded(E + 1), ldF = padded(F), ldC = padded(C);

    // All matrices are row-major; a trailing t means one column, not one row, per position.
    float *q, *k, *v;             // f(q), f(k), [v, 1]
    float *xt, *vt;               // f(q)^T or f(k)^T, and v^T
    float *phi, *phit;            // phi of the rows that push, phi^T of those that read, decay included
    float *y, *yt;                // rows read
    float *dy, *dphi, *dx;        // gradients: of a row read, of phi, of q or k
    float *weights = nullptr;     // (C, C) cos(theta (i - j)) exp(-|A_i - A_j|), symmetric, if each position has its own rate
    float *by_distance;           // at C + i - j: the same if there is one rate; else the cosine alone
    float *scores, *dscores;      // the chunk's s_ij, and their gradient times the weight
    float *state_s, *state_t, *lost_s = nullptr, *lost_t = nullptr;
    float *read_by[2], *push_by[2];  // per part and position: cosine or sine, times the decay to or from the chunk's edge
    float *row_sums;
    Angles angles;
    double *rates, *before, *after, *running;  // exp(-rate), and its products: see cosformer.h
    double total = 1;             // decay over the chunk
    int64_t ahead = 0;            // rows to the next chunk's
    Product product;
    Soon soon{COLS > 16 ? 8 : 3};

    // Angles and decay factors of the chunk's positions.
    void place(const Chunk &c, const Sweep &sweep) {
        soon.clear();
        ahead = sweep.rightward ? C : -C;
        if (!c.queries && !c.keys) {  // a gap of any length; only a constant rate gets here
            total = s.rate ? std::exp(-static_cast<double>(*s.rate) * c.n) : 1;
            return;
        }
        angles.from(s.theta * static_cast<double>(s.position + c.start), c.n, read_by[0], read_by[1]);
        for (int p = 0; p < 2; p++) std::copy_n(read_by[p], c.n, push_by[p]);
        if (!s.rate) return;

        if (s.rate_per_position)
            for (int64_t i = 0; i < c.n; i++) rates[i] = std::exp(-static_cast<double>(s.rate[(c.start + i) * s.rate_step]));
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
    // Called when rows are loaded: the next chunk's are prefetched.
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
};

}  // namespace
