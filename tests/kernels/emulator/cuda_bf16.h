// bf16 as the CPU computes it: exact in double, rounded once.

#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
using nv_bfloat16 = __nv_bfloat16;

static inline float __bfloat162float(__nv_bfloat16 x) { return emulated_bf16_value(x.bits); }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }

// Half to even. To eight bits first, so that a double is rounded once; then bf16 or not, it is a float.
static inline __nv_bfloat16 emulated_bf16(double x) {
    const double step    = std::ldexp(1.0, (x == 0.0 || !std::isfinite(x) ? 0 : std::max(std::ilogb(x), -126)) - 7);
    const float  rounded = (float) (std::nearbyint(x / step) * step);
    uint32_t     bits;
    memcpy(&bits, &rounded, sizeof(bits));
    return {(uint16_t) (bits >> 16)};
}

static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return emulated_bf16(x); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {emulated_bf16(x), emulated_bf16(y)}; }

static inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {emulated_bf16((double) __bfloat162float(a.x) - __bfloat162float(b.x)),
            emulated_bf16((double) __bfloat162float(a.y) - __bfloat162float(b.y))};
}

static inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {emulated_bf16((double) __bfloat162float(a.x) * __bfloat162float(b.x) + __bfloat162float(c.x)),
            emulated_bf16((double) __bfloat162float(a.y) * __bfloat162float(b.y) + __bfloat162float(c.y))};
}

static inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {emulated_bf16((double) __bfloat162float(a.x) * __bfloat162float(b.x)),
            emulated_bf16((double) __bfloat162float(a.y) * __bfloat162float(b.y))};
}
