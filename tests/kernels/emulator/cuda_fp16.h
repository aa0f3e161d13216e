// f16 as the CPU computes it: exact in double, rounded once.

#pragma once

#include "cuda_runtime.h"

struct __half { uint16_t bits; };

static inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

static inline float __half2float(__half x) {
    const int   exponent  = x.bits >> 10 & 31;
    const int   mantissa  = x.bits & 1023;
    const float fraction  = exponent == 0 ? mantissa : 1024 + mantissa;
    const float special   = mantissa == 0 ? INFINITY : NAN;
    const float magnitude = exponent == 31 ? special : std::ldexp(fraction, std::max(exponent, 1) - 25);
    return x.bits & 0x8000 ? -magnitude : magnitude;
}

struct __half2 { __half x, y; };

static inline unsigned short __half_as_ushort(__half x) { return x.bits; }
static inline __half __low2half(__half2 v) { return v.x; }
static inline __half __high2half(__half2 v) { return v.y; }
static inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
static inline __half2 __half2half2(__half x) { return {x, x}; }
static inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
static inline __half2 __low2half2(__half2 v) { return {v.x, v.x}; }
static inline __half2 __high2half2(__half2 v) { return {v.y, v.y}; }

// Half to even; beyond the largest number infinite.
static inline __half emulated_half(double x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) {
        return {0x7FFF};
    }
    if (std::fabs(x) >= 65520.0) {
        return {(uint16_t) (sign | 0x7C00)};
    }
    const int      exponent = x == 0.0 ? -14 : std::max(std::ilogb(x), -14);
    const uint32_t ulps     = (uint32_t) std::nearbyint(std::ldexp(std::fabs(x), 10 - exponent));  // 1024 on: normal
    return {(uint16_t) (sign | (((uint32_t) (exponent + 14) << 10) + ulps))};
}

static inline double emulated_double(__half x) { return (x.bits & 0x7C00) == 0x7C00 ? NAN : __half2float(x); }

static inline __half __float2half_rn(float x) { return emulated_half(x); }
static inline __half2 __floats2half2_rn(float x, float y) { return {emulated_half(x), emulated_half(y)}; }
static inline __half2 __hneg2(__half2 a) { return {{(uint16_t) (a.x.bits ^ 0x8000)}, {(uint16_t) (a.y.bits ^ 0x8000)}}; }

static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {emulated_half(emulated_double(a.x) * emulated_double(b.x) + emulated_double(c.x)),
            emulated_half(emulated_double(a.y) * emulated_double(b.y) + emulated_double(c.y))};
}

static inline __half2 __hsub2(__half2 a, __half2 b) {
    return {emulated_half(emulated_double(a.x) - emulated_double(b.x)),
            emulated_half(emulated_double(a.y) - emulated_double(b.y))};
}

static inline __half2 __hmul2(__half2 a, __half2 b) {
    return {emulated_half(emulated_double(a.x) * emulated_double(b.x)),
            emulated_half(emulated_double(a.y) * emulated_double(b.y))};
}

static inline __half __hmul(__half a, __half b) { return emulated_half(emulated_double(a) * emulated_double(b)); }

static const std::vector<float> emulated_f16_values = [] {
    std::vector<float> all(1 << 16);
    for (size_t i = 0; i < all.size(); ++i) {
        all[i] = (float) emulated_double({(uint16_t) i});
    }
    return all;
}();

static inline float emulated_f16_value(uint32_t bits) { return emulated_f16_values[bits]; }

// c += a b by mma.m16n8k16 of f16
static void emulated_mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    emulated_mma_of<emulated_f16_value>(c, a, b);
}
