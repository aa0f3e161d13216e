// Device memory that notices who writes beyond it, and that starts out poisoned.

#pragma once

#include "check.cuh"

#include <cuda_runtime.h>
#include <vector>

// size bytes at an address that is offset bytes past a multiple of 256. GUARD bytes before and after belong to nobody.
class device_buffer {
  public:
    static constexpr int64_t GUARD  = 256;
    static constexpr int     POISON = 0xFF;  // a NaN in every float format that is 16 or 32 bits wide

    explicit device_buffer(int64_t size, int64_t offset = 0) : size_(size), offset_(offset) {
        CUDA_CHECK(cudaMalloc(&base_, whole()));
        poison();
    }

    ~device_buffer() { cudaFree(base_); }

    device_buffer(device_buffer && other) noexcept : base_(other.base_), size_(other.size_), offset_(other.offset_) {
        other.base_ = nullptr;
    }

    device_buffer(const device_buffer &)             = delete;
    device_buffer & operator=(const device_buffer &) = delete;

    template <typename T> T * as() const { return reinterpret_cast<T *>(base_ + GUARD + offset_); }

    int64_t size() const { return size_; }

    void poison() const { CUDA_CHECK(cudaMemset(base_, POISON, whole())); }

    template <typename T> std::vector<T> host() const {
        std::vector<T> copy(size_ / sizeof(T));
        CUDA_CHECK(cudaMemcpy(copy.data(), as<char>(), size_, cudaMemcpyDeviceToHost));
        return copy;
    }

    // Whether nothing but the size() bytes was written since poison().
    bool guards_intact() const {
        const int64_t before = GUARD + offset_;
        return all_poison(base_, before) && all_poison(base_ + before + size_, GUARD);
    }

  private:
    int64_t whole() const { return GUARD + offset_ + size_ + GUARD; }

    static bool all_poison(const char * from, int64_t n) {
        std::vector<unsigned char> copy(n);
        CUDA_CHECK(cudaMemcpy(copy.data(), from, n, cudaMemcpyDeviceToHost));
        for (const unsigned char byte : copy) {
            if (byte != POISON) {
                return false;
            }
        }
        return true;
    }

    char *  base_ = nullptr;
    int64_t size_;
    int64_t offset_;
};
