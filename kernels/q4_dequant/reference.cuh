// Weights in double, exact, and f16 numbers counted in steps from zero, so that an error of one step is an error of 1
// and infinity is a number like others. Plain C++; with nvcc also on the device, for whole layers.

#pragma once

#include "../common/reference.cuh"

// A multiple of 2^-24 below 2^27: nothing is rounded. Zeros have the signs that products and differences give them.
REFERENCE_FN double q4_weight(weight_type type, const uint8_t * blocks, int64_t i) {
    const weight_parts p = parts_of(type, blocks, i);
    if (type == weight_type::Q4_0) {
        return p.step * (p.code - 8);
    }
    const uint8_t * block = blocks + i / 256 * 144;
    return p.step * p.code - f16_at(block + 2) * q4_K_six_bits(block + 4, 8 + (int) (i % 256 / 32));
}

static constexpr double F16_INFINITY = 0x7C00;  // in steps, as in bits

// The nearest f16, half to even.
REFERENCE_FN double f16_steps(double x) {
    const double magnitude = fabs(x);
    if (!(magnitude < 65520.0)) {
        return magnitude >= 65520.0 ? copysign(F16_INFINITY, x) : x;
    }
    const int    exponent = magnitude < ldexp(1.0, -14) ? -14 : ilogb(magnitude);
    const double units    = nearbyint(ldexp(magnitude, 10 - exponent));  // from 1024 on a normal number
    return copysign(1024.0 * (exponent + 14) + units, x);
}

// An f16 as it lies in memory, to be judged in steps.
struct f16_bits {
    uint16_t bits;
};

static inline double value_of(f16_bits x) {
    const int magnitude = x.bits & 0x7FFF;
    return std::copysign(magnitude > F16_INFINITY ? std::nan("") : magnitude, x.bits & 0x8000 ? -1.0 : 1.0);
}

#ifdef __CUDACC__

static __global__ void reference_steps(weight_type type, const uint8_t * blocks, float * steps, int64_t n) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        steps[i] = (float) f16_steps(q4_weight(type, blocks, i));
    }
}

// What n weights on the device are as f16, in steps: whole numbers below 2^15, exact in float.
static inline std::vector<float> steps_on_device(weight_type type, const uint8_t * blocks, int64_t n) {
    const device_buffer steps(n * sizeof(float));
    reference_steps<<<(unsigned) ((n + 255) / 256), 256>>>(type, blocks, steps.as<float>(), n);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    return steps.host<float>();
}

#endif // __CUDACC__
