// What is tested, and when an output is right.

#pragma once

#include "../common/buffer.cuh"
#include "../common/check_selftest.cuh"
#include "../common/fill_q4.cuh"
#include "../common/shapes.cuh"
#include "q4_dequant.cuh"
#include "reference.cuh"

#include <string>

using dequant_t = cudaError_t (*)(const void *, __half *, int64_t, cudaStream_t);

static const std::vector<weight_type> TYPES = {weight_type::Q4_0, weight_type::Q4_K};

static dequant_t dequant_of(weight_type type) {
    return type == weight_type::Q4_0 ? q4_0_dequant_f16_cuda : q4_K_dequant_f16_cuda;
}

static int64_t bytes_of(weight_type type, int64_t n) {
    return n / block_size(type) * block_bytes(type);
}

struct problem {
    weight_type   type;
    int64_t       n;  // weights
    device_buffer x, y;

    problem(weight_type type, int64_t n, int64_t x_offset = 0)
        : type(type), n(n), x(bytes_of(type, n), x_offset), y(n * sizeof(__half)) {}

    int64_t bytes() const { return x.size() + y.size(); }

    void fill(uint64_t seed, q4_fill how = q4_fill::ORDINARY) const { fill_q4(type, x.as<uint8_t>(), n, seed, how); }

    void copy_in(const std::vector<uint8_t> & blocks) const {
        CUDA_CHECK(cudaMemcpy(x.as<void>(), blocks.data(), x.size(), cudaMemcpyHostToDevice));
    }

    cudaError_t launch(cudaStream_t stream = nullptr) const {
        return dequant_of(type)(x.as<void>(), y.as<__half>(), n, stream);
    }

    void run() const {
        y.poison();
        CUDA_CHECK(launch());
        CUDA_CHECK(cudaDeviceSynchronize());
    }
};

// -- when an output is right --

// In steps of f16. Only a Q4_K whose two scales are far apart may be off, by one step, and hardly ever is.
static tolerance tolerance_of(weight_type type, q4_fill how) {
    return type == weight_type::Q4_K && how == q4_fill::WILD ? tolerance{1.0, 1e-11} : EXACT;
}

// Judge rows x cols weights from the first-th on.
static verdict judge(const problem & p, int64_t first, int64_t rows, int64_t cols, q4_fill how) {
    const int64_t            n     = rows * cols;
    const std::vector<float> steps = steps_on_device(p.type, p.x.as<uint8_t>() + bytes_of(p.type, first), n);
    std::vector<f16_bits>    y(n);
    CUDA_CHECK(cudaMemcpy(y.data(), p.y.as<f16_bits>() + first, n * sizeof(f16_bits), cudaMemcpyDeviceToHost));
    const auto reference = [&](int64_t row, int64_t col) { return (double) steps[row * cols + col]; };
    verdict    v         = compare(y.data(), reference, rows, cols, tolerance_of(p.type, how));
    if (v.passed && !(p.y.guards_intact() && p.x.guards_intact())) {
        v.passed = false;
        v.why    = "it wrote outside its output";
    }
    return v;
}

static bool right(const problem & p, const std::string & what, int64_t rows, q4_fill how = q4_fill::ORDINARY) {
    p.run();
    const verdict v = judge(p, 0, rows, p.n / rows, how);
    return said(v.passed, std::string(name_of(p.type)) + " " + what, v.why);
}

// -- the tests --

static bool references_agree() {
    bool all = true;
    for (const weight_type type : TYPES) {
        const problem p(type, 64 * 256);
        p.fill(11, q4_fill::WILD);
        const std::vector<uint8_t> blocks  = p.x.host<uint8_t>();
        const std::vector<float>   steps   = steps_on_device(type, p.x.as<uint8_t>(), p.n);
        int64_t                    n_equal = 0;
        for (int64_t i = 0; i < p.n; ++i) {
            n_equal += steps[i] == f16_steps(q4_weight(type, blocks.data(), i));
        }
        all = said(n_equal == p.n, std::string(name_of(type)) + " references agree, host and device") && all;
    }
    return all;
}

// A byte of codes: as byte 0, 1, ... go on, each of 16 codes comes low and high; a turn shifts them.
static uint8_t two_codes(int byte, int turn) {
    return (uint8_t) (((byte + turn) & 15) | ((byte * 7 + turn + 3) & 15) << 4);
}

// Every finite f16 as the scale of a block that has all 16 codes.
static std::vector<uint8_t> every_scale_of_q4_0() {
    std::vector<uint8_t> x;
    for (int d = 0; d < 0x10000; ++d) {
        if ((d & 0x7C00) == 0x7C00) {
            continue;
        }
        x.push_back((uint8_t) d);
        x.push_back((uint8_t) (d >> 8));
        for (int byte = 0; byte < 16; ++byte) {
            x.push_back(two_codes(byte, d));
        }
    }
    return x;
}

// Every pair of a scale and a minimum, each sub-block with all 16 codes, each in every sub-block's place; the two f16
// near 1.
static std::vector<uint8_t> every_pair_of_q4_K() {
    std::vector<uint8_t> x(4096 * 144);
    for (int b = 0; b < 4096; ++b) {
        uint8_t * block = &x[b * 144];
        block[0]        = (uint8_t) (b * 37);
        block[1]        = b & 1 ? 0x3C : 0xBC;
        block[2]        = (uint8_t) (b * 101);
        block[3]        = b & 2 ? 0x3C : 0x3D;
        for (int sub = 0; sub < 8; ++sub) {
            const int s = (b + sub) & 63;
            const int m = (b >> 6) ^ sub;
            if (sub < 4) {
                block[4 + sub] |= s;
                block[8 + sub] |= m;
            } else {
                block[8 + sub] |= (s & 15) | (m & 15) << 4;
                block[sub]     |= s >> 4 << 6;
                block[4 + sub] |= m >> 4 << 6;
            }
        }
        for (int byte = 0; byte < 128; ++byte) {
            block[16 + byte] = two_codes(byte, b);
        }
    }
    return x;
}

static bool every_code_is_right() {
    const problem q4_0(weight_type::Q4_0, (int64_t) 0xF800 * 32);
    const problem q4_K(weight_type::Q4_K, (int64_t) 4096 * 256);
    q4_0.copy_in(every_scale_of_q4_0());
    q4_K.copy_in(every_pair_of_q4_K());
    const bool scales = right(q4_0, "63488 scales x 16 codes", 0xF800);
    return right(q4_K, "64 scales x 64 minima x 16 codes", 4096) && scales;
}

// Scales from 0 and denormals to the largest.
static bool wild_scales_are_right(weight_type type, int64_t n) {
    const problem p(type, n);
    p.fill(3, q4_fill::WILD);
    return right(p, "scales of every size", n / 256, q4_fill::WILD);
}

static bool edges_are_right(weight_type type, const std::vector<int64_t> & blocks) {
    const std::vector<int64_t> offsets = type == weight_type::Q4_0 ? std::vector<int64_t>{0, 2, 8, 14}
                                                                   : std::vector<int64_t>{0, 4, 8, 12};
    bool all = true;
    for (const int64_t n : blocks) {
        for (const int64_t offset : offsets) {
            const problem p(type, n * block_size(type), offset);
            p.fill(n + offset);
            all = right(p, std::to_string(n) + " blocks at offset " + std::to_string(offset), n) && all;
        }
    }
    return all;
}

static bool layers_are_right(weight_type type) {
    bool all = true;
    for (const matrix_shape & s : LAYERS) {
        const problem p(type, s.rows * s.cols);
        p.fill(s.rows);
        all = right(p, s.name, s.rows) && all;
    }
    return all;
}

// More than 2^31 weights: beginning, the two sides of weight 2^31, end.
static bool stress_is_right(weight_type type) {
    const problem p(type, STRESS.rows * STRESS.cols);
    const int64_t n   = 16 * STRESS.cols;
    bool          all = true;
    p.fill(31);
    p.run();
    for (const int64_t first : {(int64_t) 0, ((int64_t) 1 << 31) - n / 2, p.n - n}) {
        const verdict v = judge(p, first, 16, STRESS.cols, q4_fill::ORDINARY);
        all = said(v.passed, std::string(name_of(type)) + " stress from weight " + std::to_string(first), v.why) && all;
    }
    return all;
}

static bool two_launches_agree(weight_type type, int64_t n) {
    const problem p(type, n);
    p.fill(7);
    p.run();
    const std::vector<uint16_t> once = p.y.host<uint16_t>();
    p.run();
    return said(once == p.y.host<uint16_t>(), std::string(name_of(type)) + " two launches are bit-equal");
}

static bool wrong_arguments_are_refused(weight_type type) {
    const int64_t size = block_size(type);
    const problem p(type, 2 * size);
    const int64_t huge   = INT64_MAX / size * size;
    const auto    status = [&](int64_t k, int x_by, int y_by) {
        return dequant_of(type)(p.x.as<char>() + x_by, (__half *) (p.y.as<char>() + y_by), k, nullptr);
    };
    bool refused = true;
    p.y.poison();
    for (const int64_t k : {-size, size - 1, size / 2, huge, (int64_t) INT32_MAX * Q4_DEQUANT_TILE + size}) {
        refused = status(k, 0, 0) == cudaErrorInvalidValue && refused;
    }
    refused = status(size, type == weight_type::Q4_0 ? 1 : 2, 0) == cudaErrorMisalignedAddress && refused;
    refused = status(size, 0, 8) == cudaErrorMisalignedAddress && refused;
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint16_t> untouched(p.n, 0xFFFF);
    const bool empty = status(0, 0, 0) == cudaSuccess && p.y.host<uint16_t>() == untouched;
    return said(refused && empty,
                std::string(name_of(type)) + " wrong arguments are refused, no weights are no work");
}
