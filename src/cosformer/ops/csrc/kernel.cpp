// The C interface: a call becomes sequences, which threads share.
#include <atomic>
#include <vector>

#include "cosformer.h"
#include "decode.h"
#include "host.h"
#include "ordered.h"
#include "parallel.h"
#include "unordered.h"

namespace {

Sequence sequence_of(const cosformer_call &call, const cosformer_grads *grads, int64_t b, int64_t h, int64_t n) {
    Sequence s = {};
    int64_t begin = call.sequences ? call.cu_seqlens[n] : 0, head = b * call.H + h, kv = h / (call.H / call.Hk);
    s.D = call.D, s.E = call.E, s.parts = call.theta ? 2 : 1, s.F = s.D * s.parts;
    s.L = call.sequences ? call.cu_seqlens[n + 1] - begin : call.L;
    s.S = call.sequences ? s.L : call.S;
    s.q_offset = call.q_offset, s.position = call.position;
    s.causal = call.causal, s.relu = call.relu, s.signed_norm = call.signed_norm, s.eps = static_cast<float>(call.eps);
    s.theta = call.theta ? call.theta[h] : 0;
    if (call.decay) {
        s.rate_per_position = call.decay_per_position, s.rate_step = call.decay_stride[2];
        s.rate = call.decay + h * call.decay_stride[1];
        if (s.rate_per_position) s.rate += b * call.decay_stride[0] + begin * s.rate_step;
    }
    s.mask_step = call.mask_stride[1];
    if (call.mask) s.mask = call.mask + b * call.mask_stride[0] + begin * s.mask_step;
    s.q = Rows(call.q, b, h, begin), s.k = Rows(call.k, b, kv, begin), s.v = Rows(call.v, b, kv, begin);
    s.out = Rows(call.out, b, h, begin);
    // A normaliser of either sign may cancel to nearly nothing, and in short sums roundings do not average out.
    s.narrow = call.q.dtype == COSFORMER_BF16 && !call.signed_norm && std::min(call.D, call.E) >= 16;
    s.norm = call.norm ? call.norm + head * call.L + begin : nullptr;
    s.state_in = Rows(call.state_in, b, h), s.state_out = Rows(call.state_out, b, h);
    if (!grads) return s;

    s.dout = Rows(grads->dout, b, h, begin);
    s.dq = Rows(grads->dq, b, h, begin), s.dk = Rows(grads->dk, b, h, begin), s.dv = Rows(grads->dv, b, h, begin);
    s.dstate_out = Rows(grads->dstate_out, b, h), s.dstate_in = Rows(grads->dstate_in, b, h);
    if (grads->dA) {
        s.narrow = false;  // dA sums, over all positions, what nearly cancels: of a pair its query's part less its key's
        s.dA = grads->dA + head * std::max(call.q_offset + call.L, call.S) + begin;
        s.ddecay = grads->ddecay + (call.decay_per_position ? head * call.S + begin : head * std::max<int64_t>(call.sequences, 1) + n);
    }
    return s;
}

int run(const cosformer_call &call, const cosformer_grads *grads) try {
    // Packed sequences differ in length: the longest go first, so that no thread is left alone with one at the end.
    std::vector<int64_t> order(std::max<int64_t>(call.sequences, 1));
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int64_t>(i);
    auto length = [&](int64_t n) { return call.cu_seqlens[n + 1] - call.cu_seqlens[n]; };
    if (call.sequences) std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });

    const int64_t heads = call.B * call.H, tasks = heads * static_cast<int64_t>(order.size());
    int64_t threads = host::forked() ? 1 : call.threads;
    const bool one_token = !grads && call.causal && call.L == 1 && call.S == 1 && !call.q_offset &&
                           call.state_in.data && call.state_out.data;
    if (heads * (call.L + call.S) * call.D * call.E < 1 << 17) threads = 1;  // waking a thread would take longer
    const bool share = tasks < threads;  // then all threads work on one task at a time
    std::atomic<bool> refused{false};
    in_parallel(tasks, share ? 1 : threads, [&](int64_t i) {
        Sequence s = sequence_of(call, grads, i % heads / call.H, i % call.H, order[i / heads]);
        if (!s.has_valid_rates()) {
            refused = true;
            return;
        }
        if (one_token) return decode(s);
        auto with = [&](auto task) { grads ? task.backward() : task.forward(); };
        if (s.is_pairwise()) Worker(s).forward_pairs({0, s.L, true, true});
        else if (s.is_ordered()) with(Ordered(s, share ? threads : 1));
        else with(Unordered(s, share ? threads : 1));
    });
    return refused ? 2 : 0;
} catch (const std::bad_alloc &) {
    return 1;
}

cosformer_call at(cosformer_call c, const cosformer_places &p) {
    c.q.data = p.q, c.k.data = p.k, c.v.data = p.v, c.out.data = p.out;
    c.norm = static_cast<float *>(p.norm), c.decay = static_cast<float *>(p.decay), c.mask = static_cast<uint8_t *>(p.mask);
    c.state_in.data = p.state_in, c.state_out.data = p.state_out, c.position = p.position, c.threads = p.threads;
    return c;
}

cosformer_grads at(cosformer_grads g, const cosformer_grad_places &p) {
    g.dout.data = p.dout, g.dq.data = p.dq, g.dk.data = p.dk, g.dv.data = p.dv;
    g.dstate_out.data = p.dstate_out, g.dstate_in.data = p.dstate_in;
    g.dA = static_cast<double *>(p.dA), g.ddecay = static_cast<double *>(p.ddecay);
    return g;
}

}  // namespace

EXPORT int cosformer_forward(const cosformer_call *call, const cosformer_places *places) {
    return run(places ? at(*call, *places) : *call, nullptr);
}
EXPORT int cosformer_backward(const cosformer_call *call, const cosformer_grads *grads, const cosformer_places *places,
                              const cosformer_grad_places *grad_places) {
    const cosformer_grads g = grad_places ? at(*grads, *grad_places) : *grads;
    return run(places ? at(*call, *places) : *call, &g);
}
EXPORT int64_t cosformer_abi(void) {
    int64_t abi = 0;
    for (size_t size : {sizeof(cosformer_call), sizeof(cosformer_places), sizeof(cosformer_grads), sizeof(cosformer_grad_places),
                        sizeof(cosformer_convolution_call), sizeof(cosformer_norm_call), sizeof(cosformer_block),
                        sizeof(cosformer_kept), sizeof(cosformer_ends)})
        abi = (1000 * abi + static_cast<int64_t>(size)) % 1000000007;
    return abi;
}
