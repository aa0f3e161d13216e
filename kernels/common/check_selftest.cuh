// The checker's own test: every kind of wrong output must fail, and the right one must pass.

#pragma once

#include "check.cuh"

#include <functional>
#include <limits>
#include <vector>

struct mutant {
    const char *                                name;
    bool                                        must_pass;
    std::function<void(std::vector<float> & c)> spoil;
};

static const int64_t SELFTEST_ROWS = 48;
static const int64_t SELFTEST_COLS = 80;

// No two elements alike, so that any exchange shows; the signs alternate.
static inline double selftest_reference(int64_t row, int64_t col) {
    const int64_t i = row * SELFTEST_COLS + col;
    return (i % 2 ? -1.0 : 1.0) * (1.0 + i) / 64.0;
}

static inline void transpose(std::vector<float> & c) {
    const std::vector<float> from = c;
    for (int64_t i = 0; i < SELFTEST_ROWS * SELFTEST_COLS; ++i) {
        c[i] = from[i % SELFTEST_ROWS * SELFTEST_COLS + i / SELFTEST_ROWS];
    }
}

static inline std::vector<mutant> mutants() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float inf = std::numeric_limits<float>::infinity();
    return {
        {"right", true, [](std::vector<float> &) {}},
        {"all NaN", false, [=](std::vector<float> & c) { c.assign(c.size(), nan); }},
        {"one NaN", false, [=](std::vector<float> & c) { c.back() = nan; }},
        {"one Inf", false, [=](std::vector<float> & c) { c.front() = inf; }},
        {"all zero", false, [](std::vector<float> & c) { c.assign(c.size(), 0.0f); }},
        {"one element flipped", false, [](std::vector<float> & c) { c[c.size() / 2] *= -1.0f; }},
        {"two elements exchanged", false, [](std::vector<float> & c) { std::swap(c[1], c[3]); }},
        {"transposed", false, transpose},
        {"last row unwritten", false, [](std::vector<float> & c) {
             memset(&c[(SELFTEST_ROWS - 1) * SELFTEST_COLS], 0xFF, SELFTEST_COLS * sizeof(float));  // poison is a NaN
         }},
    };
}

static inline bool mutant_is_judged(const mutant & m, const tolerance & tol) {
    std::vector<float> c(SELFTEST_ROWS * SELFTEST_COLS);
    for (size_t i = 0; i < c.size(); ++i) {
        c[i] = (float) selftest_reference(i / SELFTEST_COLS, i % SELFTEST_COLS);
    }
    m.spoil(c);
    const verdict v = compare(c.data(), selftest_reference, SELFTEST_ROWS, SELFTEST_COLS, tol);
    if (v.passed != m.must_pass) {
        fprintf(stderr, "checker: '%s' %s at max_abs %g\n", m.name, v.passed ? "passed" : "failed", tol.max_abs);
    }
    return v.passed == m.must_pass;
}

// An NMSE that is just too large, each element being near enough; and what only an exact comparison sees.
static inline bool limits_hold() {
    const float four[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    const float zero[1] = {-0.0f};
    const auto  one     = [](int64_t, int64_t) { return 1.5; };
    const auto  plus    = [](int64_t, int64_t) { return 0.0; };
    const auto  nothing = compare(zero, plus, 1, 1, tolerance{1.0, 1.0});
    const auto  sign    = compare(zero, plus, 1, 1, EXACT);
    const bool  wide    = compare(four, one, 2, 2, tolerance{0.5, 0.12}).passed;
    const bool  narrow  = compare(four, one, 2, 2, tolerance{0.5, 0.11}).passed;
    if (!wide || narrow || nothing.passed || sign.n_bad != 1) {
        fprintf(stderr, "checker: an nmse, a zero reference or a zero's sign is misjudged\n");
        return false;
    }
    return true;
}

// Exit status material: false, with a line on stderr for each misjudged output, if the checker cannot be trusted.
static inline bool checker_is_sound() {
    bool sound = limits_hold();
    for (const mutant & m : mutants()) {
        for (const tolerance & tol : {EXACT, tolerance{1e-3, 1e-6}}) {
            sound = mutant_is_judged(m, tol) && sound;
        }
    }
    return sound;
}
