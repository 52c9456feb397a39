// A thread's memory for the matrices of a chunk.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "gemm.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace {

// Row strides are an odd number of cache lines, so that a column of a matrix spreads over all sets of the L1 cache.
constexpr int64_t padded(int64_t n) { return (n + COLS - 1) / COLS * COLS + ((n + COLS - 1) / COLS * COLS / 16 % 2 ? 0 : 16); }

// Aligned memory that a thread keeps from task to task; its size depends on D, E and the chunk, not on the length.
class Scratch {
  public:
    // Calls layout twice: first to measure, then, with memory, to hand it out.
    template <class Layout>
    void reserve(Layout layout) {
        cursor_ = nullptr;
        layout();
        size_t bytes = reinterpret_cast<uintptr_t>(cursor_);
        if (bytes > size_) {
            size_ = 0;
            memory_.reset(static_cast<char *>(std::aligned_alloc(64, bytes)));
            if (!memory_) throw std::bad_alloc();
            size_ = bytes;
            std::memset(memory_.get(), 0, bytes);
        }
        cursor_ = memory_.get();
#ifdef __SANITIZE_ADDRESS__
        __asan_unpoison_memory_region(cursor_, size_);
#endif
        layout();
    }
    template <class T>
    void take(T *&pointer, int64_t count) {
        pointer = reinterpret_cast<T *>(cursor_);
        advance((count * sizeof(T) + 63) / 64 * 64);
#ifdef __SANITIZE_ADDRESS__  // nothing may touch the space between two buffers
        if (memory_ && cursor_ > memory_.get()) __asan_poison_memory_region(cursor_, 64);
        advance(64);
#endif
    }

  private:
    void advance(size_t bytes) { cursor_ = reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(cursor_) + bytes); }
    struct Free { void operator()(char *p) const { std::free(p); } };
    std::unique_ptr<char, Free> memory_;
    size_t size_ = 0;
    char *cursor_ = nullptr;
};

}  // namespace
