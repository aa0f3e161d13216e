// f16 as the CPU converts it.

#pragma once

#include "cuda_runtime.h"

struct __half { uint16_t bits; };

static inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

static inline float __half2float(__half x) {
    const int   exponent  = x.bits >> 10 & 31;
    const int   mantissa  = x.bits & 1023;
    const float fraction  = exponent == 0 ? mantissa : 1024 + mantissa;
    const float magnitude = std::ldexp(fraction, std::max(exponent, 1) - 25);
    return x.bits & 0x8000 ? -magnitude : magnitude;
}
