// Verdicts about a kernel's output, against a reference given element by element. Plain C++, with or without nvcc.
//
// Every comparison is written so that NaN fails it: !(error <= tolerance), never error > tolerance.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#ifdef __CUDACC__
#define CUDA_CHECK(call)                                                                                  \
    do {                                                                                                  \
        const cudaError_t status_ = (call);                                                               \
        if (status_ != cudaSuccess) {                                                                     \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_));   \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)
#endif // __CUDACC__

struct tolerance {
    double max_abs;  // largest |out - reference| of one element
    double nmse;     // mse(out, reference) / mse(reference, 0)
};

// Every element is the reference's number with the reference's sign, of a zero too: for a format in which a number has
// one encoding, bit-equal.
static constexpr tolerance EXACT = {0.0, 0.0};

struct verdict {
    bool        passed;
    int64_t     n_bad;     // elements that failed by themselves
    int64_t     row, col;  // the first of them, -1 if there is none
    double      max_abs;   // over the finite elements
    double      nmse;      // NaN as soon as one element is not finite
    std::string why;       // one sentence, empty if passed
};

// -- what an element's bits mean --

static inline double value_of(float x) {
    return x;
}

static inline double value_of(uint16_t bf16_bits) {
    const uint32_t bits = static_cast<uint32_t>(bf16_bits) << 16;
    float          x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// -- comparison --

static inline bool element_agrees(double out, double ref, const tolerance & tol) {
    if (!std::isfinite(out) || !(std::fabs(out - ref) <= tol.max_abs)) {
        return false;
    }
    return tol.max_abs > 0.0 || std::signbit(out) == std::signbit(ref);
}

static inline void conclude(verdict & v, const tolerance & tol, double out, double ref) {
    char text[200] = "";
    if (v.n_bad > 0) {
        snprintf(text, sizeof(text), "%lld elements are wrong, the first at row %lld column %lld: %g, must be %g",
                 (long long) v.n_bad, (long long) v.row, (long long) v.col, out, ref);
    } else if (!(v.nmse <= tol.nmse)) {
        snprintf(text, sizeof(text), "nmse is %g, must be at most %g", v.nmse, tol.nmse);
    }
    v.why    = text;
    v.passed = v.why.empty();
}

// Judge rows x cols elements, row-major, against reference(row, col), a double. A reference that is 0 everywhere, or
// not finite somewhere, proves nothing and fails too.
template <typename T, typename F>
static verdict compare(const T * out, F reference, int64_t rows, int64_t cols, const tolerance & tol) {
    verdict v         = {false, 0, -1, -1, 0.0, 0.0, ""};
    double  squares   = 0.0;
    double  errors    = 0.0;
    double  bad_value = 0.0;
    double  bad_ref   = 0.0;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
            const double x     = value_of(out[row * cols + col]);
            const double ref   = reference(row, col);
            const double error = x - ref;
            squares += ref * ref;
            errors  += error * error;
            v.max_abs = std::fmax(v.max_abs, std::fabs(error));
            if (element_agrees(x, ref, tol)) {
                continue;
            }
            if (v.n_bad++ == 0) {
                v.row = row, v.col = col, bad_value = x, bad_ref = ref;
            }
        }
    }
    v.nmse = errors / squares;
    conclude(v, tol, bad_value, bad_ref);
    return v;
}

// -- what a harness says --

static inline bool said(bool passed, const std::string & what, const std::string & why = "") {
    fprintf(stderr, "%s %s%s%s\n", passed ? "ok  " : "FAIL", what.c_str(), why.empty() ? "" : ": ", why.c_str());
    return passed;
}

// Its exit status.
static inline int concluded(bool passed) {
    fprintf(stderr, "%s\n", passed ? "passed" : "FAILED");
    return passed ? 0 : 1;
}
