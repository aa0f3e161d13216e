// What memory gives: copies of the device's own, which kernels at the speed of memory are held against.

#pragma once

#include "bench.cuh"
#include "buffer.cuh"
#include "shapes.cuh"

static inline contender copy_of(const std::vector<device_buffer> & from, const std::vector<device_buffer> & to) {
    const int64_t size = to[0].size();
    return {"copy", 2 * size, [&, size](int set, cudaStream_t s) {
        CUDA_CHECK(cudaMemcpyAsync(to[set].as<void>(), from[set].as<void>(), size, cudaMemcpyDeviceToDevice, s));
    }};
}

// Far more than L2, and so long that launching does not count. print is given the size, the copy and its times, and
// returns GB/s, which are returned.
template <typename print_t> static double bench_copy(bench & b, const print_t print) {
    static const matrix_shape  bytes = {"1GiB", 1 << 15, 1 << 15};
    std::vector<device_buffer> from, to;
    from.emplace_back(bytes.rows * bytes.cols);
    to.emplace_back(bytes.rows * bytes.cols);
    const std::vector<contender> all = {copy_of(from, to)};
    return print(bytes, all[0], b.measure(all, 1, 4)[0]);
}
