// The modes of attention as loops over chunks, and how they are shared among threads.
#include <atomic>
#include <vector>

#include "cosformer.h"
#include "decode.h"
#include "host.h"
#include "parallel.h"
#include "worker.h"

namespace {

// The chunks of a sequence, from left to right.
class Axis {
  public:
    explicit Axis(int64_t chunk) : chunk_(chunk) {}
    void add(int64_t begin, int64_t end, bool queries, bool keys) {
        if (begin >= end) return;
        int64_t size = queries || keys ? chunk_ : end - begin;
        segments_[used_++] = {begin, end, size, count_, queries, keys};
        count_ += (end - begin + size - 1) / size;
    }
    int64_t count() const { return count_; }
    Chunk operator[](int64_t i) const {
        int at = used_ - 1;
        while (segments_[at].first > i) at--;
        const Segment &g = segments_[at];
        int64_t start = g.begin + (i - g.first) * g.size;
        return {start, std::min(g.size, g.end - start), g.queries, g.keys};
    }

  private:
    struct Segment { int64_t begin, end, size, first; bool queries, keys; };
    Segment segments_[4];
    int used_ = 0;
    int64_t chunk_, count_ = 0;
};

Axis keys_of(const Sequence &s) {
    Axis axis(s.chunk());
    axis.add(0, s.S, false, true);
    return axis;
}

Axis queries_of(const Sequence &s) {
    Axis axis(s.chunk());
    axis.add(s.q_offset, s.q_offset + s.L, true, false);
    return axis;
}

// Keys and queries on one axis: keys before the queries, both, then whichever reaches further.  Keys past a causal window are not seen.
Axis everything_of(const Sequence &s) {
    int64_t first = s.q_offset, last = first + s.L, keys = s.causal ? std::min(s.S, last) : s.S;
    Axis axis(s.chunk());
    axis.add(0, std::min(first, keys), false, true);
    axis.add(keys, first, false, false);
    axis.add(first, std::min(last, keys), true, true);
    axis.add(std::max(first, keys), last, true, false);
    axis.add(last, keys, false, true);
    return axis;
}

// One task: a sequence, and the threads that share it.
class Task {
  public:
    Task(const Sequence &sequence, int64_t threads) : s(sequence), threads_(threads), worker_(s) {}

    void forward() {
        if (s.is_pairwise()) return worker_.forward_pairs({0, s.L, true, true});
        Carry carry = worker_.carry(true, false);
        if (s.state_in.data) worker_.import_state(carry.s, s.state_in);
        if (s.causal) {
            Sweep right;
            right.local = true;
            sweep(everything_of(s), right, carry, &Worker::forward, s.state_out.data);
        } else if (s.rate) {
            Sweep right, left;
            right.finish = false;
            left.rightward = false, left.local = left.add_queries = true;
            sweep(everything_of(s), right, carry, &Worker::forward, false);
            carry.s.empty = true;
            sweep(everything_of(s), left, carry, &Worker::forward, false);
        } else {
            collect(keys_of(s), carry, &Worker::forward);
            emit(queries_of(s), carry, &Worker::forward);
        }
        if (s.state_out.data) worker_.export_state(carry.s, s.state_out);
    }

    void backward() {
        Sweep right, left;
        left.rightward = false, left.local = left.add_queries = true;
        if (s.causal) {
            Carry carry = worker_.carry(true, false), mirrored = worker_.carry(false, true);
            if (s.state_in.data) worker_.import_state(carry.s, s.state_in);
            if (s.dstate_out.data) worker_.import_state(mirrored.t, s.dstate_out);
            sweep(everything_of(s), right, carry, &Worker::backward, false);
            sweep(everything_of(s), left, mirrored, &Worker::backward, s.dstate_in.data);
            if (s.dstate_in.data) worker_.export_state(mirrored.t, s.dstate_in);
        } else if (s.rate) {
            left.add_keys = true;
            for (const Sweep &direction : {right, left}) {
                Carry carry = worker_.carry(true, true);
                sweep(everything_of(s), direction, carry, &Worker::backward, false);
            }
        } else {
            Carry carry = worker_.carry(true, false);
            if (s.state_out.data) worker_.import_state(carry.s, s.state_out);
            else collect(keys_of(s), carry, &Worker::forward);
            Carry mirrored = worker_.carry(false, true);
            if (s.dstate_out.data) worker_.import_state(mirrored.t, s.dstate_out);
            mirrored.s = carry.s;
            collect(queries_of(s), mirrored, &Worker::backward);  // which also pulls dq out of S
            mirrored.s = State();
            emit(keys_of(s), mirrored, &Worker::backward);
            if (s.dstate_in.data) worker_.export_state(mirrored.t, s.dstate_in);
        }
        if (s.dA) integrate_decay();
    }

  private:
    using Step = void (Worker::*)(const Chunk &, Carry &, const Sweep &, bool emit, bool push);

    const Sequence &s;
    const int64_t threads_;
    Worker worker_;

    // Threads worth using for so many chunks.
    int64_t threads_for(const Axis &axis) const { return std::max<int64_t>(1, std::min(threads_, axis.count() / 8)); }

    enum class Push { None, AllButLast, All };  // the last chunk's push is wasted when nobody wants the state after it

    // The chunks [first, last) of a sweep, counted in its own direction.
    static void run(Worker &worker, const Axis &axis, const Sweep &sweep, int64_t first, int64_t last, Carry &carry, Step step, bool emit,
                    Push push) {
        for (int64_t i = first; i < last; i++)
            (worker.*step)(axis[sweep.rightward ? i : axis.count() - 1 - i], carry, sweep, emit,
                           push == Push::All || (push == Push::AllButLast && i + 1 < last));
    }

    // Carries for spans of the sequence that run side by side: like the given one, but an empty state becomes an own one.
    std::vector<Carry> spans(int64_t n, const Carry &like, std::vector<float> &memory) const {
        int64_t size = worker_.state_size();
        memory.resize(n * 4 * size);
        std::vector<Carry> carries(n, like);
        float *free = memory.data();
        auto own = [&](State &state) {
            if (state.at && state.empty) state.at = free, state.lost = state.lost ? free + size : nullptr, free += 2 * size;
        };
        for (Carry &carry : carries) own(carry.s), own(carry.t);
        return carries;
    }

    // A span's own contribution becomes the state before the span, and the running state the one after it.
    void advance(State &running, State &span, double decay) const {
        if (!span.at) return;
        for (int64_t i = 0; i < worker_.state_size(); i++) {
            float before = running.empty ? 0 : running.at[i];
            running.at[i] = static_cast<float>(decay) * before + (span.empty ? 0 : span.at[i]);
            span.at[i] = before;
            if (running.lost) running.lost[i] = span.lost[i] = 0;
        }
        std::swap(running.empty, span.empty);
        running.empty = running.empty && span.empty;
    }

    // A sweep.  Shared among threads it has two levels: the spans find their own contributions to the state, a short serial scan turns
    // these into the states before each span, and then the spans run like sequences of their own.  The first span needs no scan: it
    // is done at once, and is short so as to take no longer than finding the others' contributions.  Nobody asks the last for its own.
    void sweep(const Axis &axis, const Sweep &sweep, Carry &carry, Step step, bool keep) {
        const Push after = keep ? Push::All : Push::AllButLast;
        int64_t count = axis.count(), threads = threads_for(axis);
        if (threads == 1) return run(worker_, axis, sweep, 0, count, carry, step, true, after);

        constexpr double share = 0.4;  // of the work on a chunk goes into the state
        auto begin = [&](int64_t span) { return span ? static_cast<int64_t>(count * (span - 1 + share) / (threads + share)) : 0; };
        std::vector<float> memory;
        Carry fresh = carry;
        fresh.s.empty = fresh.t.empty = true, fresh.decay = 1;
        std::vector<Carry> at = spans(threads, fresh, memory);
        in_parallel(threads, threads, [&](int64_t i) {
            Worker worker(s);
            run(worker, axis, sweep, begin(i), begin(i + 1), i ? at[i] : carry, step, !i, Push::All);
        });
        for (int64_t i = 1; i < threads; i++) {
            advance(carry.s, at[i].s, at[i].decay);
            advance(carry.t, at[i].t, at[i].decay);
        }
        in_parallel(threads, threads, [&](int64_t i) {
            Worker worker(s);
            bool last = i + 1 == threads;
            run(worker, axis, sweep, begin(i + 1), last ? count : begin(i + 2), last ? carry : at[i + 1], step, true, after);
        });
    }

    // Without decay or causality the order does not matter: everything is pushed into one state ...
    void collect(const Axis &axis, Carry &carry, Step step) {
        int64_t count = axis.count(), threads = threads_for(axis);
        if (threads == 1) return run(worker_, axis, Sweep(), 0, count, carry, step, true, Push::All);

        std::vector<float> memory;
        std::vector<Carry> at = spans(threads, carry, memory);
        in_parallel(threads, threads, [&](int64_t i) {
            Worker worker(s);
            run(worker, axis, Sweep(), count * i / threads, count * (i + 1) / threads, at[i], step, true, Push::All);
        });
        for (Carry &span : at) {
            if (carry.s.at != span.s.at) advance(carry.s, span.s, 1);
            if (carry.t.at != span.t.at) advance(carry.t, span.t, 1);
        }
    }

    // ... and then read.
    void emit(const Axis &axis, Carry &carry, Step step) {
        int64_t count = axis.count(), threads = threads_for(axis);
        if (threads == 1) return run(worker_, axis, Sweep(), 0, count, carry, step, true, Push::None);

        in_parallel(threads, threads, [&](int64_t i) {
            Worker worker(s);
            Carry mine = carry;
            run(worker, axis, Sweep(), count * i / threads, count * (i + 1) / threads, mine, step, true, Push::None);
        });
    }

    // From dA to the gradient of the rates: A is their running sum.
    void integrate_decay() const {
        int64_t last = std::max(s.q_offset + s.L, s.S) - 1;
        if (s.dstate_out.data)  // the outgoing state has decayed up to the last position
            for (int64_t f = 0; f < s.F; f++) {
                auto row = [&](const Rows &t) { return reinterpret_cast<const float *>(t.data) + f * t.row; };
                s.dA[last] -= dot(row(s.dstate_out), row(s.state_out), s.E + 1);
            }
        double sum = 0;
        for (int64_t t = last; t >= 0; t--) {
            sum += s.rate_per_position ? s.dA[t] : s.dA[t] * static_cast<double>(t + 1);
            if (s.rate_per_position) s.ddecay[t] = sum;
        }
        if (!s.rate_per_position) *s.ddecay = sum;
    }
};

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
    s.norm = call.norm ? call.norm + head * call.L + begin : nullptr;
    s.state_in = Rows(call.state_in, b, h), s.state_out = Rows(call.state_out, b, h);
    if (!grads) return s;

    s.dout = Rows(grads->dout, b, h, begin);
    s.dq = Rows(grads->dq, b, h, begin), s.dk = Rows(grads->dk, b, h, begin), s.dv = Rows(grads->dv, b, h, begin);
    s.dstate_out = Rows(grads->dstate_out, b, h), s.dstate_in = Rows(grads->dstate_in, b, h);
    if (grads->dA) {
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
    const bool one_token = !grads && call.causal && call.L == 1 && call.S == 1 && !call.q_offset && call.state_in.data && call.state_out.data;
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
        Task task(s, share ? threads : 1);
        grads ? task.backward() : task.forward();
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

#define EXPORT __attribute__((visibility("default")))

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
    for (size_t size : {sizeof(cosformer_call), sizeof(cosformer_places), sizeof(cosformer_grads), sizeof(cosformer_grad_places), sizeof(cosformer_convolution_call), sizeof(cosformer_norm_call), sizeof(cosformer_block)})
        abi = (1000 * abi + static_cast<int64_t>(size)) % 1000000007;
    return abi;
}
