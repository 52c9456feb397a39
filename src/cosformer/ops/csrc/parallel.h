// Work shared among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#if defined(COSFORMER_SANITIZED)
#include <pthread.h>

#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// While this lives, subnormal floats become zero: a strong decay makes many, and each would cost 100 cycles.
class FlushSubnormals {
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
  public:
    FlushSubnormals() { _mm_setcsr(saved | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
    uint64_t saved;
  public:
    FlushSubnormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
        __asm__ volatile("msr fpcr, %0" ::"r"(saved | 1 << 24));
    }
    ~FlushSubnormals() { __asm__ volatile("msr fpcr, %0" ::"r"(saved)); }
#endif
};

// what(thread, threads) in each of a team of at most `threads` threads, which wait for one another at `meet`.
#if defined(COSFORMER_SANITIZED)  // ThreadSanitizer does not see how an OpenMP runtime orders threads, and reports races at its barriers
thread_local pthread_barrier_t *barrier = nullptr;

template <class What>
void team(int64_t threads, What what) {
    pthread_barrier_t all;
    pthread_barrier_init(&all, nullptr, static_cast<unsigned>(threads));
    auto member = [&](int64_t thread) {
        barrier = &all;
        what(thread, threads);
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; i++) others.emplace_back(member, i);
    member(0);
    for (std::thread &other : others) other.join();
    barrier = nullptr;
    pthread_barrier_destroy(&all);
}
inline void meet() { if (barrier) pthread_barrier_wait(barrier); }
#elif defined(_OPENMP)
template <class What>
void team(int64_t threads, What what) {
    if (threads == 1) return what(int64_t{0}, int64_t{1});  // the only way in a forked child
#pragma omp parallel num_threads(static_cast<int>(threads))
    what(static_cast<int64_t>(omp_get_thread_num()), static_cast<int64_t>(omp_get_num_threads()));
}
inline void meet() {
#pragma omp barrier
}
#else
template <class What>
void team(int64_t, What what) { what(int64_t{0}, int64_t{1}); }
inline void meet() {}
#endif

// what(0) .. what(n - 1), in any order.  Throws bad_alloc when any of them did.
template <class What>
void in_parallel(int64_t n, int64_t threads, What what) {
    std::atomic<bool> failed{false};
    auto guarded = [&](int64_t i) {
        FlushSubnormals flush;
        try {
            what(i);
        } catch (const std::bad_alloc &) {  // must not leave the parallel region
            failed = true;
        }
    };
    if (threads > 1 && n > 1) {
        std::atomic<int64_t> next{0};
        team(std::min(n, threads), [&](int64_t, int64_t) {
            for (int64_t i; (i = next++) < n;) guarded(i);
        });
    } else {
        for (int64_t i = 0; i < n; i++) guarded(i);
    }
    if (failed) throw std::bad_alloc();
}

}  // namespace
