// Packed copies of the weights in a buffer, which are never older than the weights.
//
//   get(weights, stream)         the copy, which the first call packs and waits for, so that any stream may read it. nullptr:
//                                there is none, for want of memory, as a graph writes these weights, or as the stream is
//                                being captured
//   written(data, size, stream)  after the host wrote, on a stream that comes after that: what was written is packed anew,
//                                in its place, before this returns
//   will_write(data, size)       before a graph that writes there is run or captured: these weights have no copy any more
//
// A copy stays where it is until the buffer is freed, as a CUDA graph may hold its address. A graph that was captured at
// another generation may hold one that is gone or old, and must be captured anew. Methods may be called from any thread.

#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

struct w4a16_weights {
    const void * data;
    int          type;
    int64_t      k, m;
    size_t       size;

    // tensors may lie at one place, one after the other
    bool operator<(const w4a16_weights & other) const {
        return std::tie(data, type, k, m) < std::tie(other.data, other.type, other.k, other.m);
    }
};

class w4a16_copies {
  public:
    static inline std::atomic<uint64_t> generation{0};

    const int device;

    explicit w4a16_copies(const int device) : device(device) {}

    ~w4a16_copies() {
        generation += !copies_.empty() || !by_graphs_.empty();
        for (const auto & [weights, copy] : copies_) {
            (void) cudaFree(copy);
        }
        for (void * copy : retired_) {
            (void) cudaFree(copy);
        }
    }

    const void * get(const w4a16_weights & weights, cudaStream_t stream) {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto known = copies_.find(weights);
        if (known != copies_.end()) {
            return known->second;
        }
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone) {
            return nullptr;
        }
        for (const span & each : by_graphs_) {
            if (each.meets(span(weights))) {
                return nullptr;
            }
        }
        return copies_[weights] = pack(weights, stream);
    }

    void written(const void * data, const size_t size, cudaStream_t stream = cudaStreamPerThread) {
        // to the end under the lock: of two who write parts of one tensor, the later one to pack must find both parts
        std::lock_guard<std::mutex> lock(mutex_);
        for (const auto & [weights, copy] : copies_) {
            if (copy != nullptr && span(weights).meets(span(data, size))) {
                pack_again(weights, copy, stream);
            }
        }
    }

    void will_write(const void * data, const size_t size) {
        const span                  all(data, size);
        std::lock_guard<std::mutex> lock(mutex_);
        for (const span & each : by_graphs_) {
            if (each.first <= all.first && all.end <= each.end) {
                return;
            }
        }
        by_graphs_.push_back(all);
        for (auto & [weights, copy] : copies_) {
            if (copy != nullptr && span(weights).meets(all)) {
                retired_.push_back(copy);
                copy = nullptr;
                ++generation;
            }
        }
    }

  private:
    struct span {
        const char * first;
        const char * end;

        span(const void * data, const size_t size) : first((const char *) data), end(first + size) {}
        explicit span(const w4a16_weights & weights) : span(weights.data, weights.size) {}

        bool meets(const span & other) const { return first < other.end && other.first < end; }
    };

    // Defined by whoever knows the types: a new copy or nullptr, and a copy's contents once more. Both wait for the stream.
    void * pack(const w4a16_weights & weights, cudaStream_t stream) const;
    void   pack_again(const w4a16_weights & weights, void * copy, cudaStream_t stream) const;

    std::mutex                      mutex_;
    std::map<w4a16_weights, void *> copies_;     // nullptr: there is to be none
    std::vector<void *>             retired_;    // copies that no product takes any more
    std::vector<span>               by_graphs_;  // what graphs write
};
