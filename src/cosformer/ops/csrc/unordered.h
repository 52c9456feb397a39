// Sequences whose order does not matter: everything is pushed into one state, and then read; and how threads share that.
#pragma once

#include <vector>

#include "parallel.h"
#include "total.h"

namespace {

// A sequence whose order does not matter, and the threads that share it.
class Unordered {
  public:
    Unordered(const Sequence &sequence, int64_t threads) : s(sequence), threads_(threads), total_(s) {}

    void forward() {
        State state = total_.state(0);
        collect_keys(state);
        if (s.state_out.data) total_.export_state(state, s.state_out);
        each(s.L, &state, [&](Total &total, int64_t, int64_t first, int64_t n) { total.read(state, first, n); });
    }

    void backward() {
        State state = total_.state(0), mirrored = total_.state(1);
        if (s.state_out.data) total_.import_state(state, s.state_out);
        else collect_keys(state);
        if (s.dstate_out.data) total_.import_state(mirrored, s.dstate_out);
        collect(s.L, mirrored, [&](Total &total, State &into, int64_t first, int64_t n) { total.push_back(state, into, first, n); });
        each(s.S, &mirrored, [&](Total &total, int64_t, int64_t first, int64_t n) { total.read_back(mirrored, first, n); });
        if (s.dstate_in.data) total_.export_state(mirrored, s.dstate_in);
    }

  private:
    const Sequence &s;
    const int64_t threads_;
    Total total_;

    // Threads worth using for this many positions.
    int64_t threads_for(int64_t positions) const { return std::max<int64_t>(1, std::min(threads_, positions / s.chunk() / 8)); }

    // what(worker, thread, first, n) for every chunk; the workers first transpose the state that is read, if any.
    template <class What>
    void each(int64_t positions, const State *state, What what) {
        const int64_t chunk = s.chunk(), count = (positions + chunk - 1) / chunk, threads = threads_for(positions);
        auto some = [&](Total &total, int64_t thread) {
            if (state) total.turn(*state);
            for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; i++)
                what(total, thread, i * chunk, std::min(chunk, positions - i * chunk));
        };
        if (threads == 1) return some(total_, 0);
        in_parallel(threads, threads, [&](int64_t thread) {
            Total total(s);
            some(total, thread);
        });
    }

    // The same, adding to a state: each thread has its own, and they are summed.
    template <class What>
    void collect(int64_t positions, State &state, What what) {
        const int64_t size = total_.state_size(), threads = threads_for(positions);
        std::vector<State> own(threads, state);
        std::vector<float> memory(threads == 1 ? 0 : 2 * threads * size);
        for (int64_t i = 0; i < threads && threads > 1; i++) {
            own[i].at = memory.data() + 2 * i * size, own[i].empty = true;
            if (state.lost) own[i].lost = own[i].at + size;
        }
        each(positions, nullptr, [&](Total &total, int64_t thread, int64_t first, int64_t n) { what(total, own[thread], first, n); });
        if (threads == 1) state.empty = own[0].empty;
        for (const State &part : own) {
            if (part.empty || threads == 1) continue;
            for (int64_t i = 0; i < size; i++) state.at[i] = (state.empty ? 0 : state.at[i]) + part.at[i];
            state.empty = false;
        }
    }

    void collect_keys(State &state) {
        if (s.state_in.data) total_.import_state(state, s.state_in);
        collect(s.S, state, [](Total &total, State &into, int64_t first, int64_t n) { total.push(into, first, n); });
    }
};

}  // namespace
