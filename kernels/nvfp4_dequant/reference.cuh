// NVFP4 in ggml's blocks, decoded from the definition of its two number formats. Plain C++ in double: each weight is
// exact.

#pragma once

#include <cmath>
#include <cstdint>

// E2M1: sign, 2 exponent bits of bias 1, 1 mantissa bit; 0, 0.5, 1, 1.5, 2, 3, 4, 6. ggml's table has no -0: code 8 is
// +0.
static inline double e2m1_value(uint8_t code) {
    const int    exponent  = code >> 1 & 3;
    const int    mantissa  = code & 1;
    const double magnitude = exponent == 0 ? 0.5 * mantissa : std::ldexp(1.0 + 0.5 * mantissa, exponent - 1);
    return code & 8 && magnitude > 0.0 ? -magnitude : magnitude;
}

// UE4M3: 4 exponent bits of bias 7, 3 mantissa bits. The NaN code 0x7F counts as 0; bit 7 is not looked at otherwise,
// so that 0xFF is 480.
static inline double ue4m3_value(uint8_t code) {
    if (code == 0x7F) {
        return 0.0;
    }
    const int exponent = code >> 3 & 15;
    const int mantissa = code & 7;
    return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0 + mantissa, exponent - 10);
}

// Both, once for every code: a layer has tens of millions of weights.
struct nvfp4_values {
    double e2m1[16];
    double ue4m3[256];

    nvfp4_values() {
        for (int code = 0; code < 256; ++code) {
            e2m1[code % 16] = e2m1_value((uint8_t) (code % 16));
            ue4m3[code]     = ue4m3_value((uint8_t) code);
        }
    }
};

// Weight i of a row of blocks. A negative code under a zero scale is -0, as the product of the two.
static inline double nvfp4_weight(const uint8_t * blocks, int64_t i) {
    static const nvfp4_values VALUES;

    const uint8_t * block = blocks + i / 64 * 36;
    const int       sub   = (int) (i % 64 / 16);
    const int       j     = (int) (i % 16);
    const uint8_t   codes = block[4 + sub * 8 + j % 8];
    return VALUES.e2m1[j < 8 ? codes & 15 : codes >> 4] * VALUES.ue4m3[block[sub]];
}
