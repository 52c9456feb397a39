// Sequences whose order matters, causal or with decay: sweeps over their chunks, and how threads share them.
#pragma once

#include <vector>

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

// A sequence whose order matters, and the threads that share it.
class Ordered {
  public:
    Ordered(const Sequence &sequence, int64_t threads) : s(sequence), threads_(threads), worker_(s) {}

    void forward() {
        Carry carry = worker_.carry(true, false);
        if (s.state_in.data) worker_.import_state(carry.s, s.state_in);
        if (s.causal) {
            Sweep right;
            right.local = true;
            sweep(everything_of(s), right, carry, &Worker::forward, s.state_out.data);
        } else {
            Sweep right, left;
            right.finish = false;
            left.rightward = false, left.local = left.add_queries = true;
            sweep(everything_of(s), right, carry, &Worker::forward, false);
            carry.s.empty = true;
            sweep(everything_of(s), left, carry, &Worker::forward, false);
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
        } else {
            left.add_keys = true;
            for (const Sweep &direction : {right, left}) {
                Carry carry = worker_.carry(true, true);
                sweep(everything_of(s), direction, carry, &Worker::backward, false);
            }
        }
        if (s.dA) integrate_decay();
    }

  private:
    using Step = void (Worker::*)(const Chunk &, Carry &, const Sweep &, bool emit, bool push);

    const Sequence &s;
    const int64_t threads_;
    Worker worker_;

    // Threads worth using for this many chunks.
    int64_t threads_for(const Axis &axis) const { return std::max<int64_t>(1, std::min(threads_, axis.count() / 8)); }

    enum class Push { None, AllButLast, All };  // the last chunk's push is wasted when nobody wants the state after it

    // The chunks [first, last) of a sweep, counted in its own direction.
    static void run(Worker &worker, const Axis &axis, const Sweep &sweep, int64_t first, int64_t last, Carry &carry, Step step, bool emit,
                    Push push) {
        for (int64_t i = first; i < last; i++)
            (worker.*step)(axis[sweep.rightward ? i : axis.count() - 1 - i], carry, sweep, emit,
                           push == Push::All || (push == Push::AllButLast && i + 1 < last));
    }

    // Carries for spans of the sequence that run in parallel: like the given one, but empty states have memory of their own.
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

    // Turns a span's own contribution into the state before the span, and the running state into the one after it.
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

    // A sweep.  Shared among threads it has two levels: the spans compute their own contributions to the state, a short serial scan turns
    // these into the state before each span, and then the spans run like sequences of their own.  The first span needs no scan: it is
    // done at once, and is short so as to take no longer than the others' contributions.  The last span's contribution is not needed.
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

}  // namespace
