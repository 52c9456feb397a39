// The work: one head of a sequence, its chunks, the states that travel between them, and what a sweep over them has to do.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "rows.h"

namespace {

// One head of one sequence: where its rows are, and its constants.
struct Sequence {
    int64_t D, E, parts, F;  // phi has `parts` = 2 (cosine, sine) or 1 pieces of D numbers, F together
    int64_t L, S, q_offset, position;
    bool causal, relu, signed_norm;
    bool narrow;  // operands of products may be rounded to bfloat16 (narrow.h)
    float eps;
    double theta;
    const float *rate;  // NULL: no decay
    bool rate_per_position;  // else *rate everywhere
    int64_t rate_step;
    const uint8_t *mask;
    int64_t mask_step;
    Rows q, k, v, out, dout, dq, dk, dv;
    Rows state_in, state_out, dstate_out, dstate_in;
    float *norm;
    double *dA, *ddecay;  // or NULL: see cosformer_grads

    // The normaliser, held away from zero.
    bool clamped(float z) const { return (signed_norm ? std::fabs(z) : z) < eps; }
    float clamp(float z) const { return clamped(z) ? (signed_norm && z < 0 ? -eps : eps) : z; }
    // Rates must be finite and 0 or more; NaN is neither.
    bool has_valid_rates() const {
        bool valid = true;
        for (int64_t t = 0, n = !rate ? 0 : rate_per_position ? S : 1; t < n; t++)
            valid &= rate[t * rate_step] >= 0 && rate[t * rate_step] < INFINITY;
        return valid;
    }
    bool seen(int64_t key) const { return !mask || mask[key * mask_step]; }
    bool is_ordered() const { return causal || rate; }  // else a pair's weight is a dot product of two vectors, in any order
    bool is_long() const { return std::max(L, S) > 512 * chunk(); }  // sums of fewer chunks lose less than their terms did
    // A short sequence is one chunk.  At an end without a state nothing is pushed or read, which saves F (E + 1) products per token, and
    // all pairs are within the chunk, (D + E + 1) products each and, if causal, half as many.  (3/4: rates per position cost, too.)
    bool is_short(int64_t most) const {
        const int64_t n = std::max(q_offset + L, S);
        return 0 < n && n <= std::min<int64_t>(most, 128);  // their matrix must stay in the cache
    }
    // Also without causality, if nobody wants the state of all keys; with decay there would be two states, from the left and the right.
    bool is_pairwise() const {
        return !causal && !state_in.data && !state_out.data && !dout.data && L == S && !q_offset && is_short(rate ? 2 * F : F);
    }
    int64_t chunk() const {  // measured at D = E = 64; pairs within a chunk cost more the longer it is, and come in strips of COLS
        if (is_pairwise() || (is_ordered() && is_short((!state_in.data + !state_out.data) * F * 3 / 4))) return std::max(q_offset + L, S);
        return !is_ordered() ? 72 : COLS > 16 ? COLS : D > 64 || E > 64 ? 64 : 48;
    }
};

// Positions [start, start + n) of a sequence; all of them hold a query or none does, and likewise for keys.
struct Chunk {
    int64_t start, n;
    bool queries, keys;
};

// A state, (E+1) x F.  An empty state is never read, so it needs no clearing.
struct State {
    float *at = nullptr;
    float *lost = nullptr;  // what rounding took from its sums (gemm.h), if they are long
    bool empty = true;
};

// What travels from chunk to chunk: S, pushed by keys and read by queries, and in the backward T, pushed by queries and read by keys.
struct Carry {
    State s, t;
    double decay = 1;  // over all chunks passed
};

// What one sweep over the chunks has to do.
struct Sweep {
    bool rightward = true;  // the state comes from the left
    bool local = false;     // this sweep also takes the pairs within chunks
    bool add_queries = false, add_keys = false;  // to what an earlier sweep wrote
    bool finish = true;     // forward: divide by the normaliser
};

}  // namespace
