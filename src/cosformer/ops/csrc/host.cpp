// Built with the compiler's default instructions, whatever the kernel next to it uses: it must run on any CPU.
#include "host.h"

#include <cstring>

#include "cosformer.h"

#ifndef _WIN32
#include <pthread.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {
bool in_child = false;
}

bool host::forked() { return in_child; }

#ifndef _WIN32
// The OpenMP runtime's threads do not survive fork(), and waiting for them would hang: a child works alone.
__attribute__((constructor)) static void watch_fork() {
    pthread_atfork(nullptr, nullptr, [] { in_child = true; });
}
#endif

#if defined(__x86_64__)
static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

EXPORT void cosformer_expect(void *data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t HUGE = 1 << 21;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + HUGE - 1) / HUGE * HUGE;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / HUGE * HUGE;
    if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);  // advice: it may be ignored
#else
    (void)data, (void)bytes;
#endif
}

EXPORT int cosformer_cpu_supports(const char *isa) {
    if (!std::strcmp(isa, "baseline")) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!std::strcmp(isa, "avx2")) return has_avx2();  // every such CPU has F16C too
    if (!std::strcmp(isa, "avx512")) return has_avx512();
    if (!std::strcmp(isa, "avx512bf16")) return has_avx512() && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    if (!std::strcmp(isa, "neon")) return 1;
#endif
    return 0;
}
