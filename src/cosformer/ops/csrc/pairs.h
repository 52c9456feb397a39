// Pairs within a chunk: their weights, scores and outputs, and the gradients of these.
//
//     s_ij = f(q_i).f(k_j) w_ij      w_ij = cos(theta (i - j)) exp(-|A_i - A_j|)      P_ij = ds_ij s_ij,  ds_ij = dy_i.[v_j, 1]
#pragma once

#include <algorithm>

#include "loaded.h"

namespace {

class Pairs : protected Loaded {
  public:
    using Loaded::Loaded;

    // The forward of a sequence of one chunk in which every query sees every key: there is no state, and out needs no transposing.
    void forward_pairs(const Chunk &c) {
        place(c, Sweep());
        if (s.rate_per_position) weigh(c.n, true, true);
        load_keys(c), load_queries(c);
        transpose(q, ldD, c.n, D, xt, ldC);
        for (int64_t i = 0; i < c.n; i += COLS) {
            product.gemm<Plain>(c.n, COLS, D, k, ldD, xt + i, ldC, Added{scores, ldC}, soon);
            vec sums[VECS] = {};
            for (int64_t j = 0; j < c.n; j++) {
                keep(scores + j * ldC, weight(j, i), i, 0, c.n);
                for (int n = 0; n < VECS; n++) sums[n] += load(scores + j * ldC + n * W);
            }
            for (int n = 0; n < VECS; n++) store(row_sums + i + n * W, sums[n]);
            product.gemm<Transposed>(std::min<int64_t>(COLS, c.n - i), E, c.n, scores, ldC, v, ldE, Added{y + i * ldE, ldE}, soon);
        }
        for (int64_t i = 0; i < c.n; i++) {
            if (s.norm) s.norm[i] = row_sums[i];
            s.out.put(i, y + i * ldE, E, 1 / s.clamp(row_sums[i]));
        }
    }

  protected:
    // weights of an n x n chunk.  Row by row, each its neighbour's times one rate; in double, so that n roundings do not add up.  If
    // causal, half of them suffice: keys x queries to attend, queries x keys to differentiate.
    void weigh(int64_t n, bool before, bool after) {
        auto row = [&](int64_t i, int64_t from, int64_t to, double rate) {
            for (int64_t j = from; j < to; j++) running[j] *= rate;
            running[i] = 1;
            float *w = weights + i * ldC;
            const float *cosine = by_distance + C - i;
            for (int64_t j = std::min(from, i); j < std::max(to, i + 1); j++) w[j] = static_cast<float>(running[j]) * cosine[j];
        };
        if (before) for (int64_t i = 0; i < n; i++) row(i, 0, i, rates[i]);
        if (after) for (int64_t i = n - 1; i >= 0; i--) row(i, i + 1, n, i + 1 < n ? rates[i + 1] : 1);
    }

    const float *weight(int64_t i, int64_t j) const { return s.rate_per_position ? weights + i * ldC + j : by_distance + C - i + j; }

    static ivec columns_from(int64_t j) {
        ivec column;
        for (int i = 0; i < W; i++) column[i] = static_cast<int>(j + i);
        return column;
    }

    // COLS entries of a row of the chunk's matrix, from column j on, times their weights; those outside [from, to) become zero.
    static void keep(float *a, const float *w, int64_t j, int64_t from, int64_t to) {
        if (from <= j && j + COLS <= to) {
            for (int n = 0; n < COLS; n += W) store(a + n, load(a + n) * load(w + n));
            return;
        }
        ivec column = columns_from(j);
        for (int n = 0; n < COLS; n += W, column += W) {
            ivec seen = (column >= static_cast<int>(from)) & (column < static_cast<int>(to));
            store(a + n, seen ? load(a + n) * load(w + n) : vec{});
        }
    }

    // yt += the chunk's own pairs, a strip of queries at a time: scores (keys x queries), then their product with v.
    void attend(const Chunk &c) {
        for (int64_t i = 0; i < c.n; i += COLS) {
            int64_t keys = s.causal ? std::min(c.n, i + COLS) : c.n;  // up to the strip's last query
            product.gemm<Plain>(keys, COLS, D, k, ldD, xt + i, ldC, Added{scores, ldC}, soon);
            for (int64_t j = 0; j < keys; j++) keep(scores + j * ldC, weight(j, i), i, s.causal ? j : 0, c.n);
            product.gemm<Transposed>(E + 1, COLS, keys, v, ldE, scores, ldC, Added{yt + i, ldC, 1}, soon);
        }
    }

    // scores (queries x keys) and dscores = their gradient times the weight; the pairs' part of dA.
    void differentiate_pairs(const Chunk &c) {
        transpose(k, ldD, c.n, D, xt, ldC);
        transpose(v, ldE, c.n, E + 1, vt, ldC);
        for (int64_t j = 0; j < c.n; j += COLS) {
            int64_t first = s.causal ? j : 0;  // the first query that sees the strip
            product.gemm<Plain>(c.n - first, COLS, D, q + first * ldD, ldD, xt + j, ldC, Added{scores + first * ldC + j, ldC}, soon);
            product.gemm<Plain>(c.n - first, COLS, E + 1, dy + first * ldE, ldE, vt + j, ldC, Added{dscores + first * ldC + j, ldC}, soon);
            double columns[COLS] = {};
            for (int64_t i = first; i < c.n; i++) {
                int64_t at = i * ldC + j, end = s.causal ? i + 1 : c.n;
                keep(scores + at, weight(i, j), j, 0, end);
                if (s.dA) s.dA[c.start + i] -= differentiate_decay(i, j, end, columns);
                keep(dscores + at, weight(i, j), j, 0, end);
            }
            if (s.dA) for (int64_t col = j; col < std::min(j + COLS, c.n); col++) s.dA[c.start + col] += columns[col - j];
        }
    }

    // Query i and the keys [j, j + COLS): returns the sum of sign(i - j) P_ij, and adds each term to its column's sum
    float differentiate_decay(int64_t i, int64_t j, int64_t end, double *columns) const {
        const float *s = scores + i * ldC + j, *ds = dscores + i * ldC + j;
        float p[COLS];
        vec total = {};
        for (int n = 0; n < COLS; n += W) {
            const ivec column = columns_from(j + n);
            const vec product = load(s + n) * load(ds + n);
            const vec seen = column < static_cast<int>(std::min(i, end)) ? product
                             : (column > static_cast<int>(i)) & (column < static_cast<int>(end)) ? -product : vec{};
            store(p + n, seen), total += seen;
        }
        for (int n = 0; n < COLS; n++) columns[n] += p[n];
        return sum(total);
    }

    void add_dq(const Chunk &c, bool pulled) {
        for (int64_t i = 0; i < c.n; i += COLS) {
            int64_t rows = std::min<int64_t>(COLS, c.n - i), keys = s.causal ? i + rows : c.n;
            product.gemm<Plain>(rows, D, keys, dscores + i * ldC, ldC, k, ldD, Added{dx + i * ldD, ldD, pulled ? 1.f : 0.f}, soon);
        }
    }

    void add_dk_dv(const Chunk &c, bool pulled) {
        for (int64_t j = 0; j < c.n; j += COLS) {
            int64_t rows = std::min<int64_t>(COLS, c.n - j), first = s.causal ? j : 0, queries = c.n - first;
            product.gemm<Transposed>(rows, D, queries, dscores + first * ldC + j, ldC, q + first * ldD, ldD,
                             Added{dx + j * ldD, ldD, pulled ? 1.f : 0.f}, soon);
            product.gemm<Transposed>(E, COLS, queries, dy + first * ldE, ldE, scores + first * ldC + j, ldC, Added{yt + j, ldC, 1}, soon);
        }
    }
};

}  // namespace
