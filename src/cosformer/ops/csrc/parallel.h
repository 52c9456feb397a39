// Work shared among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Numbers too small for a normalised float become zero while this lives: a strong decay makes many, and each would cost 100 cycles.
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
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(std::min(n, threads)))
#endif
        for (int64_t i = 0; i < n; i++) guarded(i);
    } else {
        for (int64_t i = 0; i < n; i++) guarded(i);
    }
    if (failed) throw std::bad_alloc();
}

}  // namespace
