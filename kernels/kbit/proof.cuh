// What must hold, of the format and of each kernel; tails of every size; and wrong outputs that must be seen.

#pragma once

#include "published.cuh"

#include <functional>

template <typename T> static const char * name_of() {
    return std::is_same<T, float>::value ? "f32" : std::is_same<T, __half>::value ? "f16" : "bf16";
}

// -- the format --

static bool format_is_right() {
    bool   values = true, nearest = true, back = true;
    double worst = 0.0;
    for (int code = 0; code < 256; ++code) {
        const double value = reference_scale((uint8_t) code);
        values = values && kbit_decode((uint8_t) code) == (float) value;
        back   = back && kbit_encode((float) value) == code;
        for (int i = 1; i < 64 && code < 255; ++i) {
            const double next = reference_scale((uint8_t) (code + 1));
            const double x    = value + (next - value) * i / 64;
            const int    want = i < 32 || (i == 32 && code % 2 == 0) ? code : code + 1;
            nearest = nearest && kbit_encode((float) x) == want;
            worst   = code >= 16 ? std::fmax(worst, std::fabs(reference_scale((uint8_t) want) - x) / x) : worst;
        }
    }
    bool passed = said(values, "E4M4: every byte's value");
    passed = said(back, "E4M4: every value's byte") && passed;
    passed = said(nearest, "E4M4: the nearest of two, the even one halfway between") && passed;
    passed = said(worst <= 1.0 / 32 && worst > 0.03, "E4M4: 1/32 at most", worst <= 1.0 / 32 ? "" : std::to_string(worst)) && passed;
    return said(kbit_decode(16) == 1.0f / 1024 && kbit_decode(1) == 1.0f / 16384 && kbit_encode(1e9f) == 255 && kbit_decode(255) == 31.0f,
                "E4M4: 2^-10 is the smallest normal, 2^-14 the smallest, 31 the largest") && passed;
}

// -- quantise and dequantise --

static double half_of_largest_gap(const std::vector<float> & entries) {
    double gap = 0.0;
    for (size_t i = 1; i < entries.size(); ++i) {
        gap = std::fmax(gap, (double) entries[i] - entries[i - 1]);
    }
    return gap / 2;
}

// Each code is a nearest entry, each scale its block's, and what comes back is within the bound.
template <typename T, typename A> static std::string quantised_wrong(int k, const std::vector<float> & entries, int64_t blocks) {
    const int64_t       n = blocks * 32;
    const device_buffer x(n * sizeof(T)), codebook(4 << k), planes(blocks * 4 * k), absmax(blocks * sizeof(A)), flags(12), y(n * 4);
    fill_normal<T>(x, 5 + k);
    std::vector<T> in = x.host<T>();
    for (int64_t i = 0; i < n; ++i) {
        // blocks of many sizes, one of zeros
        const float by = i / 32 == 1 ? 0.0f : std::ldexp(1.0f, (int) (i / 32 % 12) - 9);
        kbit_round(kbit_float(in[i]) * by, in[i]);
    }
    to_device(x, in);
    to_device(codebook, entries);
    CUDA_CHECK(cudaMemset(flags.as<char>(), 0, 12));
    CUDA_CHECK(kbit_quantise_cuda(x.as<T>(), codebook.as<float>(), k, n, planes.as<uint32_t>(), absmax.as<A>(), flags.as<int>(), nullptr));
    CUDA_CHECK(kbit_dequantise_cuda(planes.as<uint32_t>(), absmax.as<A>(), codebook.as<float>(), k, n, y.as<float>(), nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint32_t> bits   = planes.host<uint32_t>();
    const std::vector<A>        scales = absmax.host<A>();
    const std::vector<float>    out    = y.host<float>();
    for (const int flag : flags.host<int>()) {
        if (flag != 0) {
            return "a flag is set";
        }
    }
    const bool spans = entries.front() == -1.0f;  // what x by its block's largest can be
    for (int64_t block = 0; block < blocks; ++block) {
        double largest = 0.0;
        for (int j = 0; j < 32; ++j) {
            largest = std::fmax(largest, std::fabs((double) kbit_float(in[block * 32 + j])));
        }
        A must;
        kbit_store_absmax((float) largest, must);
        if (memcmp(&must, &scales[block], sizeof(A)) != 0) {
            return "the scale of block " + std::to_string(block);
        }
        for (int j = 0; j < 32; ++j) {
            const double x_j     = kbit_float(in[block * 32 + j]);
            const double target  = x_j / std::fmax(largest, 1e-8);
            const float  chosen  = entries[reference_code(bits.data(), k, block, j)];
            double       nearest = 1e9;
            for (const float entry : entries) {
                nearest = std::fmin(nearest, std::fabs(entry - target));
            }
            if (!(std::fabs(chosen - target) <= nearest + 2e-7)) {
                return "the code of element " + std::to_string(block * 32 + j);
            }
            // of a subnormal scale the rounding is a share of 2^-10
            const double share = 1.0 / 32 * std::fmax(largest, 1.0 / 1024);
            if (spans && !(std::fabs(out[block * 32 + j] - x_j) <= half_of_largest_gap(entries) * largest + share + 1e-6)) {
                return "element " + std::to_string(block * 32 + j) + " came back beyond the bound";
            }
        }
    }
    return "";
}

template <typename T, typename A> static std::string dequantised_wrong(int k) {
    problem<__half> p({k, 1, 67, 416});  // several blocks of threads, the last of which is not full
    p.fill(k);
    const int64_t       blocks = 67 * 13, n = blocks * 32;
    const device_buffer absmax(blocks * sizeof(A)), out(n * sizeof(T));
    std::vector<double> scales;
    std::vector<A>      stored(blocks);
    for (const uint8_t byte : p.absmax.template host<uint8_t>()) {
        kbit_store_absmax((float) reference_scale(byte), stored[scales.size()]);
        scales.push_back(reference_scale(byte));
    }
    to_device(absmax, stored);
    CUDA_CHECK(kbit_dequantise_cuda(p.planes.template as<uint32_t>(), absmax.as<A>(), p.codebook.template as<float>(), k, n, out.as<T>(),
                                    nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<T> must = reference_weights<T>(p.planes.template host<uint32_t>(), scales, p.entries, k, false);
    if (!out.guards_intact()) {
        return "written beyond the output";
    }
    return memcmp(must.data(), out.host<T>().data(), n * sizeof(T)) == 0 ? "" : "not the entry times the scale";
}

// x by a value that no block can have: which flag is set.
static bool flags_are_set() {
    bool passed = true;
    const auto flagged = [](float value, std::vector<float> entries, bool by_f16) {
        const device_buffer x(256), codebook(16), planes(16), absmax(4), flags(12);
        std::vector<float>  in(64, 0.5f);
        in[40] = value;
        to_device(x, in);
        to_device(codebook, entries);
        CUDA_CHECK(cudaMemset(flags.as<char>(), 0, 12));
        if (by_f16) {
            CUDA_CHECK(kbit_quantise_cuda(x.as<float>(), codebook.as<float>(), 2, 64, planes.as<uint32_t>(), absmax.as<__half>(),
                                          flags.as<int>(), nullptr));
        } else {
            CUDA_CHECK(kbit_quantise_cuda(x.as<float>(), codebook.as<float>(), 2, 64, planes.as<uint32_t>(), absmax.as<uint8_t>(),
                                          flags.as<int>(), nullptr));
        }
        CUDA_CHECK(cudaDeviceSynchronize());
        return flags.host<int>();
    };
    const std::vector<float> good = {-1.0f, -0.25f, 0.25f, 1.0f}, bad = {-1.0f, 0.25f, 0.25f, 1.0f};
    passed = said(flagged(NAN, good, false)[KBIT_NOT_FINITE] == 1, "NaN is flagged") && passed;
    passed = said(flagged(INFINITY, good, true)[KBIT_NOT_FINITE] == 1, "infinity is flagged") && passed;
    passed = said(flagged(31.25f, good, false)[KBIT_BEYOND_FORMAT] == 1, "an absmax above 31 is flagged") && passed;
    passed = said(flagged(31.25f, good, true) == std::vector<int>{0, 0, 0}, "f16 has an absmax above 31") && passed;
    passed = said(flagged(31.0f, good, false) == std::vector<int>{0, 0, 0}, "E4M4 has an absmax of 31") && passed;
    passed = said(flagged(1e9f, good, true)[KBIT_BEYOND_FORMAT] == 1, "an absmax above 65504 is flagged") && passed;
    return said(flagged(1.0f, bad, false)[KBIT_NOT_ASCENDING] == 1, "a codebook that does not ascend is flagged") && passed;
}

// Ascending, of any sign and gaps.
static std::vector<float> skewed_codebook(int k, float from) {
    std::vector<float> entries;
    for (int i = 0; i < 1 << k; ++i) {
        entries.push_back(from + (1.0f - from) * std::pow((i + 1.0f) / (1 << k), 1.5f));
    }
    return entries;
}

template <typename T> static bool quantises(int k) {
    bool              passed = true;
    const std::string what   = std::string("K=") + std::to_string(k) + " " + name_of<T>();
    const std::string worst  = quantised_wrong<T, uint8_t>(k, normal_codebook(k), 53);
    passed = said(worst.empty(), what + ": quantised to the nearest, E4M4", worst) && passed;
    const std::string f16 = quantised_wrong<T, __half>(k, normal_codebook(k), 1);
    passed = said(f16.empty(), what + ": quantised to the nearest, f16", f16) && passed;
    const std::string skewed = quantised_wrong<T, uint8_t>(k, skewed_codebook(k, -0.3f), 9);
    passed = said(skewed.empty(), what + ": to the nearest of an asymmetric codebook", skewed) && passed;
    const std::string bytes = dequantised_wrong<T, uint8_t>(k), halves = dequantised_wrong<T, __half>(k);
    passed = said(bytes.empty(), what + ": dequantised from E4M4, exactly", bytes) && passed;
    return said(halves.empty(), what + ": dequantised from f16, exactly", halves) && passed;
}

// -- tiles --

// Reads a code back by the picture in kbit.cuh.
static int code_in_tiles(const std::vector<uint32_t> & tiles, const shape & s, int64_t row, int64_t k) {
    const int64_t tile = row / 16 * kbit_units(s.k_dim) + k / 128;
    const int     lane = (int) (row % 8 * 4 + k / 32 % 4);
    int           code = 0;
    for (int b = 0; b < s.k; ++b) {
        const int     bit  = (int) (k % 32) * s.k + b;
        const int     word = (int) (row % 16 / 8) * s.k + bit / 32;
        const bool    odd  = s.k % 2 == 1 && word >= 2 * s.k - 2;
        const int64_t at   = odd ? (2 * s.k - 2) * 32 + lane * 2 + word % 2 : (word / 4 * 32 + lane) * 4 + word % 4;
        code |= (int) (tiles[tile * 64 * s.k + at] >> bit % 32 & 1) << b;
    }
    return code;
}

template <typename T> static bool repacks(const shape & s) {
    problem<T> p(s);
    p.fill(s.n + s.k_dim);
    const device_buffer out(s.n * s.k_dim * (int64_t) sizeof(T));
    CUDA_CHECK(kbit_unpack_cuda(p.tiles.template as<uint32_t>(), p.scales.template as<uint8_t>(), p.codebook.template as<float>(), s.k,
                                s.n, s.k_dim, out.as<T>(), nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint32_t> planes = p.planes.template host<uint32_t>(), tiles = p.tiles.template host<uint32_t>();
    bool                        same = p.tiles.guards_intact() && p.scales.guards_intact() && out.guards_intact();
    for (int64_t row = 0; row < kbit_strips(s.n) * 16; ++row) {
        for (int64_t k = 0; k < kbit_units(s.k_dim) * KBIT_UNIT; ++k) {
            const int64_t i    = row * s.k_dim + k;
            const int     must = row < s.n && k < s.k_dim ? reference_code(planes.data(), s.k, i / 32, (int) (i % 32)) : 0;
            same = same && code_in_tiles(tiles, s, row, k) == must;
        }
    }
    int64_t scales_there = 0;
    for (const uint8_t byte : p.scales.template host<uint8_t>()) {
        scales_there += byte != 0;
    }
    for (const uint8_t byte : p.absmax.template host<uint8_t>()) {
        scales_there -= byte != 0;
    }
    same = same && scales_there == 0;
    std::vector<double> scales;
    for (const uint8_t byte : p.absmax.template host<uint8_t>()) {
        scales.push_back(reference_scale(byte));
    }
    const std::vector<T> must = reference_weights<T>(planes, scales, p.entries, s.k, true);
    const bool           back = memcmp(must.data(), out.host<T>().data(), must.size() * sizeof(T)) == 0;
    return said(same && back, s.name() + " " + name_of<T>() + ": repacked and unpacked, exactly");
}

// -- products --

template <typename T> static bool multiplies(const shape & s, const std::vector<float> & entries = {}, bool normal = false) {
    problem<T> p(s, entries);
    p.fill(s.m + s.n, normal);
    const std::string why = wrong<T>(p.multiply(), p.reference());
    return said(why.empty() && p.c.guards_intact() && p.workspace.guards_intact(), s.name() + " " + name_of<T>() + ": the product", why);
}

// Each token is 1 at one k: its outputs are the weights there, bit by bit.
template <typename T> static bool reads_back(int k) {
    problem<T> p({k, 64, 33, 544});
    p.fill(k);
    std::vector<T> a(64 * 544);
    for (T & x : a) {
        kbit_round(0.0f, x);
    }
    std::vector<double> scales;
    for (const uint8_t byte : p.absmax.template host<uint8_t>()) {
        scales.push_back(reference_scale(byte));
    }
    const std::vector<T> w = reference_weights<T>(p.planes.template host<uint32_t>(), scales, p.entries, k, true);
    bool                 same = true;
    for (int first = 0; first < 544; first += 64) {
        std::vector<T> one = a;
        for (int token = 0; token < 64 && first + token < 544; ++token) {
            kbit_round(1.0f, one[token * 544 + first + token]);
        }
        to_device(p.a, one);
        const std::vector<uint16_t> out = p.multiply();
        for (int i = 0; i < 64 * 33; ++i) {
            const int at = first + i / 33;
            same = same && (at >= 544 || value_as<T>(out[i]) == kbit_float(w[i % 33 * 544 + at]));
        }
    }
    return said(same, std::string("K=") + std::to_string(k) + " " + name_of<T>() + ": activations of one 1 read back every weight");
}

// All scales are 0 but one: what is not that block's is 0.
static bool reads_one_block(int k) {
    problem<__half> p({k, 3, 40, 320});
    p.fill(3);
    bool right = true;
    for (const int block : {0, 9, 10, 57, 399}) {
        std::vector<uint8_t> bytes(p.absmax.size(), 0);
        bytes[block] = 0xB0;
        to_device(p.absmax, bytes);
        p.repack();
        right = right && wrong<__half>(p.multiply(), p.reference()).empty();
    }
    return said(right, "K=" + std::to_string(k) + ": one block's scale is that block's alone");
}

// NaN and infinity stay in their token.
static bool not_finite_stays() {
    problem<__half> p({4, 9, 20, 320});
    p.fill(1);
    const std::vector<uint16_t> before = p.multiply();
    std::vector<__half>         a      = p.a.host<__half>();
    kbit_round(NAN, a[2 * 320 + 7]);
    kbit_round(INFINITY, a[5 * 320 + 300]);
    to_device(p.a, a);
    const std::vector<uint16_t> after = p.multiply();
    bool                        right = true;
    for (int i = 0; i < 9 * 20; ++i) {
        const double x = value_as<__half>(after[i]);
        right = right && (i / 20 == 2 || i / 20 == 5 ? !std::isfinite(x) || i / 20 == 5 : after[i] == before[i]);
    }
    return said(right, "NaN and infinity of a token reach no other");
}

template <typename T> static bool splits_are_equal(int k, int64_t m) {
    problem<T> p({k, m, 20, 4128});
    p.fill(k, true);
    kbit_plan plan = p.plan();
    plan.parts     = 16;
    plan.blocks    = 1;
    const std::vector<uint16_t> one = p.multiply(plan);
    bool                        same = wrong<T>(one, p.reference()).empty();
    for (int blocks = 2; blocks <= 16; ++blocks) {
        plan.blocks = blocks;
        same = same && p.multiply(plan) == one;
    }
    return said(same, p.s.name() + " " + name_of<T>() + ": 16 parts among 1 to 16 blocks, equal bits");
}

static bool refuses() {
    problem<__half> p({4, 2, 16, 64});
    p.fill(1);
    const auto status = [&](const std::function<void(kbit_args &)> & change, kbit_plan plan = {1, 1, false, 0}) {
        kbit_args g = p.args();
        change(g);
        return kbit_gemm_cuda<__half>(g, plan, nullptr);
    };
    const auto same = [](kbit_args &) {};
    bool       sizes = status(same) == cudaSuccess;
    for (const int k : {0, 1, 6, -3}) {
        sizes = sizes && status([&](kbit_args & g) { g.k = k; }) == cudaErrorInvalidValue;
    }
    sizes = sizes && status([](kbit_args & g) { g.m = 0; }) == cudaErrorInvalidValue &&
            status([](kbit_args & g) { g.n = 0; }) == cudaErrorInvalidValue &&
            status([](kbit_args & g) { g.k_dim = 48; }) == cudaErrorInvalidValue &&
            status([](kbit_args & g) { g.k_dim = 0; }) == cudaErrorInvalidValue &&
            status(same, {2, 1, false, 0}) == cudaErrorInvalidValue && status(same, {1, 2, false, 0}) == cudaErrorInvalidValue &&
            status(same, {1, 0, false, 0}) == cudaErrorInvalidValue;
    const bool pointers = status([](kbit_args & g) { g.a = (const char *) g.a + 8; }) == cudaErrorMisalignedAddress &&
                          status([](kbit_args & g) { g.workspace = (char *) g.workspace + 16; }) == cudaErrorMisalignedAddress;
    const bool others   = kbit_quantise_cuda(p.a.as<__half>(), p.codebook.as<float>(), 4, 33, p.planes.as<uint32_t>(),
                                             p.absmax.as<uint8_t>(), p.flags.as<int>(), nullptr) == cudaErrorInvalidValue &&
                        kbit_dequantise_cuda(p.planes.as<uint32_t>(), p.absmax.as<uint8_t>(), p.codebook.as<float>(), 6, 64,
                                             p.a.as<__half>(), nullptr) == cudaErrorInvalidValue;
    return said(sizes, "sizes that cannot be are refused") && said(pointers, "pointers that are not aligned are refused") &&
           said(others, "quantise and dequantise refuse sizes");
}

// -- what must fail --

// Outputs that are wrong in one way each, and inputs with the errors that a layout invites.
static bool faults_are_seen() {
    bool            passed = true;
    problem<__half> p({4, 5, 40, 288});
    p.fill(7);
    passed = said(published_mapping_fails(), "seen: the published mapping") && passed;
    passed = said(published_loop_is_right(), "the published inner loop, made correct") && passed;
    const std::vector<double2>  reference = p.reference();
    const std::vector<uint16_t> right     = p.multiply();
    const auto fails = [&](const std::vector<uint16_t> & out, const char * what) {
        passed = said(!wrong<__half>(out, reference).empty(), std::string("seen: ") + what) && passed;
    };
    passed = said(wrong<__half>(right, reference).empty(), "the checker passes what is right") && passed;
    const auto spoiled = [&](const std::function<void(std::vector<uint16_t> &)> & spoil) {
        std::vector<uint16_t> out = right;
        spoil(out);
        return out;
    };
    fails(spoiled([](auto & out) { out.assign(out.size(), 0x7FFF); }), "all NaN");
    fails(spoiled([](auto & out) { out.assign(out.size(), 0); }), "all 0");
    fails(spoiled([](auto & out) { out[77] ^= 0x8000; }), "a sign");
    fails(spoiled([](auto & out) { std::swap(out[3], out[43]); }), "two outputs exchanged");
    fails(spoiled([](auto & out) { std::fill(out.begin() + 160, out.end(), 0xFFFF); }), "a token not written");

    std::vector<uint32_t> planes = p.planes.host<uint32_t>();
    const auto            kept   = planes;
    for (size_t i = 0; i < planes.size(); i += 4) {
        std::swap(planes[i], planes[i + 1]);
    }
    to_device(p.planes, planes);
    p.repack();
    fails(p.multiply(), "two planes exchanged");
    to_device(p.planes, kept);
    std::vector<uint8_t> bytes = p.absmax.host<uint8_t>();
    std::rotate(bytes.begin(), bytes.begin() + 1, bytes.end());
    to_device(p.absmax, bytes);
    p.repack();
    fails(p.multiply(), "scales off by one block");
    std::rotate(bytes.begin(), bytes.end() - 1, bytes.end());
    to_device(p.absmax, bytes);
    p.repack();
    kbit_plan plan = p.plan();
    plan.parts = plan.blocks = 2;
    p.workspace.poison();
    fails(p.multiply(plan), "a workspace that was not zeros");
    CUDA_CHECK(cudaMemset(p.workspace.as<char>(), 0, p.workspace.size()));
    return said(wrong<__half>(p.multiply(plan), reference).empty(), "right again") && passed;
}

// -- all --

template <typename T> static bool products_of(int k, const std::vector<shape> & shapes) {
    bool passed = true;
    for (shape s : shapes) {
        s.k    = k;
        passed = multiplies<T>(s) && passed;
    }
    return passed;
}

static const std::vector<shape> EDGES = {
    {0, 1, 1, 32},    {0, 2, 8, 64},     {0, 3, 15, 96},   {0, 5, 16, 128},  {0, 7, 17, 160},   {0, 8, 255, 224}, {0, 9, 256, 256},
    {0, 12, 257, 288}, {0, 16, 64, 512}, {0, 17, 136, 544}, {0, 32, 33, 768}, {0, 33, 120, 800}, {0, 63, 40, 288}, {0, 65, 20, 1056},
};

template <typename T> static bool edges_of(int k) {
    bool passed = repacks<T>({k, 1, 1, 32});
    for (const shape & s : {shape{k, 1, 17, 288}, shape{k, 1, 31, 512}}) {
        passed = repacks<T>(s) && passed;
    }
    passed = products_of<T>(k, EDGES) && passed;
    passed = multiplies<T>({k, 4, 48, 416}, skewed_codebook(k, 0.1f)) && passed;
    passed = multiplies<T>({k, 4, 48, 416}, skewed_codebook(k, -0.5f), true) && passed;
    passed = reads_back<T>(k) && passed;
    return splits_are_equal<T>(k, 17) && splits_are_equal<T>(k, 3) && passed;
}

static bool edges(int k) {
    bool passed = quantises<float>(k);
    passed = quantises<__half>(k) && passed;
    passed = quantises<__nv_bfloat16>(k) && passed;
    passed = edges_of<__half>(k) && passed;
    passed = edges_of<__nv_bfloat16>(k) && passed;
    return reads_one_block(k) && passed;
}

static bool general() {
    bool passed = format_is_right();
    passed = flags_are_set() && passed;
    passed = not_finite_stays() && passed;
    passed = refuses() && passed;
    return faults_are_seen() && passed;
}
