// What is tested, and when an output is right.

#pragma once

#include "../common/check_selftest.cuh"
#include "../common/fill_q4.cuh"
#include "../common/shapes.cuh"
#include "variants.cuh"
#include "w4a16_columns.cuh"

#include <optional>
#include <random>

static const std::vector<weight_type> TYPES = {weight_type::Q4_0, weight_type::Q4_K};

// Tokens are of different sizes: times 2^-2p, 2^-p, 1, 2^p, 2^2p.
static __global__ void spread_columns(float * x, int64_t count, int64_t k, int p) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        x[i] *= __uint_as_float((uint32_t) (127 + ((int) (i / k % 5) - 2) * p) << 23);
    }
}

// The weights as a kernel reads them: ggml's blocks, or packed.
class operand {
  public:
    explicit operand(const void * weights) : at_(weights) {}

    void pack(const gemm_shape & s) {
        const w4a16_type type = w4a16_of(s.type);
        packed_.emplace((int64_t) w4a16_packed_bytes(type, s.m, s.k));
        CUDA_CHECK(w4a16_pack_cuda(type, at_, packed_->as<void>(), s.m, s.k, nullptr));
        CUDA_CHECK(cudaDeviceSynchronize());
        at_ = packed_->as<void>();
    }

    const void * at() const { return at_; }

    bool guards_intact() const { return !packed_ || packed_->guards_intact(); }

  private:
    const void *                 at_;
    std::optional<device_buffer> packed_;
};

struct problem {
    gemm_shape    shape;
    int64_t       row_bytes;
    device_buffer w, x, y;

    explicit problem(const gemm_shape & s)
        : shape(s), row_bytes(s.k / block_size(s.type) * block_bytes(s.type)), w(s.m * row_bytes),
          x(s.n * s.k * sizeof(float)), y(s.n * s.m * sizeof(float)) {}

    int64_t scratch_bytes(const rung & r) const {
        return (int64_t) r.of(shape.type).scratch_bytes(shape.m, shape.n, shape.k, blocks_of(r, shape));
    }

    // bytes that a product must read or write at least once
    int64_t bytes() const { return w.size() + x.size() + y.size(); }

    void fill(uint64_t seed, q4_fill how = q4_fill::ORDINARY) const {
        fill_q4(shape.type, w.as<uint8_t>(), shape.m * shape.k, seed, how);
        const int64_t count = shape.n * shape.k;
        fill_f32(x.as<float>(), count, seed, how);
        // ordinary tokens fit f16 unscaled; of the others four in five must be scaled
        const int power = how == q4_fill::ORDINARY ? 3 : 24;
        spread_columns<<<(unsigned) ((count + 255) / 256), 256>>>(x.as<float>(), count, shape.k, power);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaDeviceSynchronize());
    }

    void copy_in(const std::vector<uint8_t> & from_w, const std::vector<float> & from_x) const {
        CUDA_CHECK(cudaMemcpy(w.as<void>(), from_w.data(), w.size(), cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaMemcpy(x.as<void>(), from_x.data(), x.size(), cudaMemcpyHostToDevice));
    }

    // The weights in the form that the rung reads.
    operand weights_of(const rung & r) const {
        operand weights(w.as<void>());
        if (r.of(shape.type).packed) {
            weights.pack(shape);
        }
        return weights;
    }

    cudaError_t launch(const rung & r, const operand & weights, const device_buffer & scratch,
                       cudaStream_t stream = nullptr) const {
        return r.of(shape.type).launch(weights.at(), x.as<float>(), y.as<float>(), scratch.as<void>(), shape.m,
                                       shape.n, shape.k, blocks_of(r, shape), stream);
    }

    // False if a kernel wrote outside its buffers.
    bool run(const rung & r) const {
        const device_buffer scratch(scratch_bytes(r));
        const operand       weights = weights_of(r);
        y.poison();
        CUDA_CHECK(launch(r, weights, scratch));
        CUDA_CHECK(cudaDeviceSynchronize());
        return weights.guards_intact() && w.guards_intact() && x.guards_intact() && scratch.guards_intact() && y.guards_intact();
    }

    // The outputs of some rows of the weights: n times `rows` of them.
    std::vector<float> outputs(int64_t first, int64_t rows) const {
        std::vector<float> part(shape.n * rows);
        CUDA_CHECK(cudaMemcpy2D(part.data(), rows * sizeof(float), y.as<float>() + first, shape.m * sizeof(float),
                                rows * sizeof(float), shape.n, cudaMemcpyDeviceToHost));
        return part;
    }
};

// -- when an output is right --

static product reference_of(const problem & p, int64_t first, int64_t rows) {
    const gemm_shape & s    = p.shape;
    const uint8_t *    from = p.w.as<uint8_t>() + first * p.row_bytes;
    if (rows * s.n > 4096) {
        return multiply_on_device(s.type, from, p.x.as<float>(), rows, s.n, s.k);
    }
    std::vector<uint8_t> w(rows * p.row_bytes);
    CUDA_CHECK(cudaMemcpy(w.data(), from, w.size(), cudaMemcpyDeviceToHost));
    return multiply_on_cpu(s.type, w.data(), p.x.host<float>().data(), rows, s.n, s.k);
}

// The tolerance, relative to an output's magnitude. Rounding to f16 has an error of at most 2^-11, 1.9e-4 in the quadratic
// mean: of the activation, and of a weight's step, centre and their sum. A sum's error is at most the sum of its terms'
// errors. Errors of k ordinary terms have random signs and stay below eight standard deviations: this limit finds one wrong
// term among up to some thousand.
static tolerance tolerance_of(const rung & r, const gemm_shape & s, int64_t rows, q4_fill how) {
    const double terms = 3.0 * std::ldexp(1.1, -11);
    if (how != q4_fill::ORDINARY) {
        // Packing loses weights below 2^-19 of the row's largest. If one block of a thousand weights holds all large ones,
        // the activations of the others, some a thousand times as large, add up to 1200 times that block's.
        const double lost = r.of(s.type).packed ? std::ldexp(1200.0, -19) : 0.0;
        return {terms + lost, 1e-4};
    }
    // 1.45: quadratic mean of the terms over their mean
    const double deviation = 3.0 * 1.875e-4 * 1.45 / std::sqrt((double) s.k);
    // the mean of few outputs is no measure: one of them may be near 0
    return {std::fmin(terms, 8.0 * deviation), rows * s.n < 256 ? 1e-3 : 1e-6};
}

// Judge some rows of the weights by n columns, by their reference.
static verdict judge(const problem & p, const product & r, const tolerance & limit, int64_t first, int64_t rows) {
    std::vector<float> y = p.outputs(first, rows);

    const auto part = [&](double value, int64_t i) {
        return r.magnitude[i] > 0.0 ? value / r.magnitude[i] : value;
    };
    for (size_t i = 0; i < y.size(); ++i) {
        y[i] = (float) part(y[i], i);
    }
    const auto reference = [&](int64_t col, int64_t row) { return part(r.y[col * rows + row], col * rows + row); };
    return compare(y.data(), reference, p.shape.n, rows, limit);
}

static bool right(const problem & p, const rung & r, const std::string & what, q4_fill how = q4_fill::ORDINARY) {
    const bool    inside = p.run(r);
    const int64_t m      = p.shape.m;
    const verdict v      = judge(p, reference_of(p, 0, m), tolerance_of(r, p.shape, m, how), 0, m);
    return said(v.passed && inside, r.name + " " + p.shape.text() + what,
                inside ? v.why : "it wrote outside its buffers");
}

static bool right(const gemm_shape & s, const rung & r, uint64_t seed, q4_fill how = q4_fill::ORDINARY) {
    const problem p(s);
    p.fill(seed, how);
    return right(p, r, how == q4_fill::ORDINARY ? "" : ", scales and activations of every size", how);
}

// -- the tests --

static bool references_agree() {
    bool all = true;
    for (const weight_type type : TYPES) {
        const problem p({type, 37, 21, 512});
        p.fill(11, q4_fill::WILD);
        const gemm_shape & s       = p.shape;
        const product      cpu     = reference_of(p, 0, s.m);
        const product      gpu     = multiply_on_device(type, p.w.as<uint8_t>(), p.x.as<float>(), s.m, s.n, s.k);
        double             largest = 0.0;
        for (size_t i = 0; i < cpu.y.size(); ++i) {
            largest = std::fmax(largest, std::fabs(gpu.y[i] - cpu.y[i]) / cpu.magnitude[i]);
            largest = std::fmax(largest, std::fabs(gpu.magnitude[i] / cpu.magnitude[i] - 1.0));
        }
        all = said(largest <= 1e-7, std::string("the references agree on ") + name_of(type)) && all;
    }
    return all;
}

static bool wrong_arguments_are_refused(const rung & r, weight_type type) {
    const problem       p({type, 2, 2, 256});
    const device_buffer scratch(1 << 20);
    const gemm_t        gemm  = r.of(type).launch;
    const auto          sizes = [&](int64_t m, int64_t n, int64_t k, int64_t blocks = 1) {
        return gemm(p.w.as<void>(), p.x.as<float>(), p.y.as<float>(), scratch.as<void>(), m, n, k, blocks, nullptr);
    };
    const auto moved = [&](int w, int x, int y, int to) {
        return gemm(p.w.as<char>() + w, (float *) (p.x.as<char>() + x), (float *) (p.y.as<char>() + y),
                    scratch.as<char>() + to, 1, 1, 256, 1, nullptr);
    };
    bool refused = true;
    p.y.poison();
    for (const int64_t k : {(int64_t) -256, (int64_t) 0, (int64_t) 16, (int64_t) 272}) {
        refused = sizes(1, 1, k) == cudaErrorInvalidValue && refused;
    }
    refused = sizes(-1, 1, 256) == cudaErrorInvalidValue && sizes(1, -1, 256) == cudaErrorInvalidValue && refused;
    refused = sizes(1, 1, 32) == cudaErrorInvalidValue && refused;
    refused = sizes((int64_t) 1 << 31, 1, 256) == cudaErrorInvalidValue && refused;
    if (r.of(type).plan == nullptr) {
        refused = sizes(1, 1, 256, 0) == cudaErrorInvalidValue && refused;
        refused = sizes(1, 1, 256, 2) == cudaErrorInvalidValue && refused;  // more blocks than work
    }
    refused = moved(8, 0, 0, 0) == cudaErrorMisalignedAddress && refused;
    refused = moved(0, 4, 0, 0) == cudaErrorMisalignedAddress && refused;
    refused = moved(0, 0, 2, 0) == cudaErrorMisalignedAddress && refused;
    refused = moved(0, 0, 0, 8) == cudaErrorMisalignedAddress && refused;
    CUDA_CHECK(cudaDeviceSynchronize());
    const bool empty = sizes(0, 2, 256) == cudaSuccess && sizes(2, 0, 256) == cudaSuccess;
    const std::vector<uint8_t> untouched(p.y.size(), device_buffer::POISON);
    return said(refused && empty && p.y.host<uint8_t>() == untouched,
                r.name + ": wrong arguments are refused, no outputs are no work, " + name_of(type));
}

// Sizes without a plan, and arguments that a plan's launch refuses.
static bool impossible_plans_are_refused(weight_type type) {
    const w4a16_type    w4a16  = w4a16_of(type);
    const w4a16_device  device = {900, 132, 227 * 1024, false};
    const auto          none   = [&](int64_t m, int64_t n, int64_t k, const w4a16_device & d) {
        return w4a16_plan_of(w4a16, m, n, k, d).kernel == nullptr;
    };
    bool refused = !none(1, 1, 256, device) && !none(1, 1, 256, {900, 132, 227 * 1024, true});
    for (const int64_t k : {(int64_t) -256, (int64_t) 0, (int64_t) 32, (int64_t) 255, (int64_t) 272, INT64_MAX / 256 * 256}) {
        refused = none(1, 1, k, device) && refused;
    }
    for (const int64_t size : {(int64_t) -1, (int64_t) 0, (int64_t) 1 << 31, INT64_MAX}) {
        refused = none(size, 1, 256, device) && none(1, size, 256, device) && refused;
    }
    refused = none(1 << 29, 1 << 29, 256, device) && refused;
    refused = none(1, 1, 256, {750, 132, 227 * 1024, false}) && none(1, 1, 256, {900, 132, 48 * 1024, false}) && refused;

    const problem       p({type, 2, 2, 256});
    const w4a16_plan    plan = w4a16_plan_of(w4a16, 1, 1, 256, device_here());
    const device_buffer scratch(plan.scratch_bytes);
    p.y.poison();
    refused = w4a16_mul_mat_cuda(plan, p.w.as<char>() + 8, p.x.as<float>(), p.y.as<float>(), scratch.as<void>(), 1, 1, 256,
                                 nullptr) == cudaErrorMisalignedAddress && refused;
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint8_t> untouched(p.y.size(), device_buffer::POISON);
    return said(refused && p.y.host<uint8_t>() == untouched,
                std::string("planned: what cannot be is refused, ") + name_of(type));
}

// A wide tile where there are enough of them, the one before where there are not.
static bool wide_tiles_fill_the_gpu(weight_type type) {
    const auto tile_n = [&](auto plan_of, int64_t m, int64_t n, int multiprocessors) {
        return plan_of(w4a16_of(type), m, n, 4096, w4a16_device{900, multiprocessors, 227 * 1024, true}).kernel->tile_n;
    };
    const auto plain  = [&](int64_t m, int64_t n, int multiprocessors = 132) { return tile_n(w4a16_plan_of, m, n, multiprocessors); };
    const auto packed = [&](int64_t m, int64_t n) { return tile_n(w4a16_packed_plan_of, m, n, 132); };
    return said(plain(4096, 512) == 256 && plain(4096, 256) == 128 && plain(1024, 512) == 128 && plain(1024, 512, 48) == 256 &&
                    plain(1024, 8) == 8 && plain(1024, 64) == 32 && plain(1024, 128) == 32 && plain(1024, 256) == 32 &&
                    plain(4096, 128) == 128 && plain(14336, 64) == 64 && packed(1024, 128) == 32 && packed(1024, 256) == 64 &&
                    packed(4096, 128) == 128 && packed(2048, 1024) == 128 && packed(4096, 1024) == 256,
                std::string("wide tiles are planned where they fill the GPU, ") + name_of(type));
}

// Every n at which the table changes, and its neighbours.
static bool switches_are_right(const rung & r, weight_type type, int64_t m, int64_t k) {
    const w4a16_table & table = *r.of(type).table();
    bool                all   = true;
    for (int i = 0; i + 1 < table.count; ++i) {
        for (const int64_t n : {table.rows[i].max_n - 1, table.rows[i].max_n, table.rows[i].max_n + 1}) {
            all = right({type, m, n, k}, r, n) && all;
        }
    }
    return all;
}

// Arguments that packing refuses.
static bool wrong_packing_is_refused(weight_type type) {
    const w4a16_type    w4a16 = w4a16_of(type);
    const problem       p({type, 2, 1, 256});
    const device_buffer to((int64_t) w4a16_packed_bytes(w4a16, 2, 256));
    const auto          packed = [&](int w, int at, int64_t m, int64_t k) {
        return w4a16_pack_cuda(w4a16, p.w.as<char>() + w, to.as<char>() + at, m, k, nullptr);
    };
    bool refused = packed(8, 0, 1, 256) == cudaErrorMisalignedAddress && packed(0, 8, 1, 256) == cudaErrorMisalignedAddress;
    for (const int64_t k : {(int64_t) -256, (int64_t) 0, (int64_t) 32, (int64_t) 272, INT64_MAX / 256 * 256}) {
        refused = packed(0, 0, 1, k) == cudaErrorInvalidValue && refused;
    }
    refused = packed(0, 0, -1, 256) == cudaErrorInvalidValue && packed(0, 0, (int64_t) 1 << 31, 256) == cudaErrorInvalidValue && refused;
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint8_t> untouched(to.size(), device_buffer::POISON);
    return said(refused && packed(0, 0, 0, 256) == cudaSuccess && to.host<uint8_t>() == untouched,
                std::string("what cannot be packed is refused, ") + name_of(type));
}

// Every m beside several n and k, and the other way round: just below, at and just above tiles of 16, of 64 and of 128.
static bool edges_are_right(const rung & r, weight_type type) {
    static const std::vector<int64_t> MS = {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257};
    static const std::vector<int64_t> NS = {1,  2,  3,  4,  7,  8,  9,  12,  15,  16,  17,  24, 31,
                                            32, 33, 48, 64, 65, 96, 118, 127, 128, 129, 152, 257};
    bool all = true;
    for (size_t i = 0; i < 2 * NS.size(); ++i) {
        const int64_t blocks = 1 + i % (type == weight_type::Q4_0 ? 5 : 3);
        all = right({type, MS[i % MS.size()], NS[i % NS.size()], blocks * W4A16_UNIT}, r, i) && all;
    }
    all = right({type, 129, 17, 2560}, r, 1, q4_fill::WILD_F16) && all;
    all = right({type, 40, 130, 2048}, r, 2, q4_fill::WILD_F16) && all;
    return all;
}

static bool layers_are_right(const rung & r, weight_type type) {
    bool all = true;
    for (const matrix_shape & layer : LAYERS) {
        for (const int64_t n : {9, 512}) {
            all = right({type, layer.rows, n, layer.cols}, r, n) && all;
        }
    }
    return right({type, 200, 1024, 2048}, r, 6) && all;
}

// More than 2^31 weights: beginning, the two sides of weight 2^31, end.
static bool stress_is_right(const rung & r, weight_type type) {
    const problem p({type, STRESS.rows, 3, STRESS.cols});
    const int64_t rows = 70;
    bool          all  = true;
    p.fill(31);
    all = said(p.run(r), r.name + " " + p.shape.text() + " writes inside its buffers");
    for (const int64_t first : {(int64_t) 0, ((int64_t) 1 << 31) / STRESS.cols - rows / 2, STRESS.rows - rows}) {
        const tolerance limit = tolerance_of(r, p.shape, rows, q4_fill::ORDINARY);
        const verdict   v     = judge(p, reference_of(p, first, rows), limit, first, rows);
        all = said(v.passed, r.name + " " + p.shape.text() + " from row " + std::to_string(first), v.why) && all;
    }
    return all;
}

static bool repeats_agree(const rung & r, const gemm_shape & s, int times) {
    const problem p(s);
    p.fill(7);
    p.run(r);
    const std::vector<uint32_t> once = p.y.host<uint32_t>();
    bool                        same = true;
    for (int i = 1; i < times; ++i) {
        p.run(r);
        same = p.y.host<uint32_t>() == once && same;
    }
    return said(same, r.name + " " + std::to_string(times) + " launches are bit-equal, " + s.text());
}

// -- activations for a library's GEMM --

static std::vector<float> gaussian_floats(int64_t count, uint64_t seed) {
    std::mt19937_64                 bits(seed);
    std::normal_distribution<float> gaussian;
    std::vector<float>              x(count);
    for (float & each : x) {
        each = gaussian(bits);
    }
    return x;
}

// Columns of every size. Converting and undoing has an error of 2^-11 of the activation, or one that is negligible beside
// the column's largest. An infinite or NaN column changes no other column.
static bool columns_are_right() {
    const int64_t      n = 10, k = 16400;
    std::vector<float> x = gaussian_floats(n * k, 3);
    const float        scales[n] = {1.0f, 0.0f, 1e-30f, 1e30f, 2e4f, 0.01f, 5e-4f, 1e-44f, 1.0f, 1.0f};
    for (int64_t i = 0; i < n * k; ++i) {
        x[i] *= scales[i / k];
    }
    x[8 * k + 5] = INFINITY;
    x[9 * k + 6] = NAN;
    const device_buffer from(n * k * sizeof(float)), to(n * k * sizeof(__half)), undo(n * sizeof(float));
    CUDA_CHECK(cudaMemcpy(from.as<void>(), x.data(), from.size(), cudaMemcpyHostToDevice));
    CUDA_CHECK(w4a16_columns_to_f16_cuda(from.as<float>(), to.as<__half>(), undo.as<float>(), n, k, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint16_t> x16  = to.host<uint16_t>();
    const std::vector<float>    back = undo.host<float>();
    bool passed = to.guards_intact() && undo.guards_intact() && back[0] == 1.0f && back[1] == 1.0f && back[5] == 1.0f;
    for (const int64_t col : {2, 3, 4, 6}) {
        passed = back[col] != 1.0f && passed;
    }
    for (int64_t col = 0; col < 8; ++col) {
        double largest = 0.0;
        for (int64_t i = 0; i < k; ++i) {
            largest = std::fmax(largest, std::fabs((double) x[col * k + i]));
        }
        for (int64_t i = 0; i < k; ++i) {
            const double exact = x[col * k + i];
            const double value = f16_at((const uint8_t *) &x16[col * k + i]) * (double) back[col];
            // fast math flushes f32 denormals to 0
            const double limit = std::fmax(std::ldexp(std::fabs(exact), -11), std::ldexp(largest, -17));
            passed = std::fabs(value - exact) <= std::fmax(limit, std::ldexp(1.0, -126)) && passed;
        }
    }
    return said(passed && x16[8 * k + 5] == 0x7C00 && (x16[9 * k + 6] & 0x7FFF) > 0x7C00,
                "columns of every size become f16");
}

static bool undoing_is_right() {
    const int64_t            m = 1500, n = 3;
    const std::vector<float> undo = {1.0f, 0.25f, 1024.0f};
    const std::vector<float> y    = gaussian_floats(m * n, 4);
    const device_buffer      by(n * sizeof(float)), to(m * n * sizeof(float));
    CUDA_CHECK(cudaMemcpy(by.as<void>(), undo.data(), by.size(), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(to.as<void>(), y.data(), to.size(), cudaMemcpyHostToDevice));
    CUDA_CHECK(w4a16_columns_undo_cuda(to.as<float>(), by.as<float>(), m, n, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<float> undone = to.host<float>();
    bool                     passed = to.guards_intact();
    for (int64_t i = 0; i < m * n; ++i) {
        passed = undone[i] == y[i] * undo[i / m] && passed;
    }
    const bool refused = w4a16_columns_to_f16_cuda(by.as<float>(), nullptr, nullptr, 1, 12, nullptr) == cudaErrorInvalidValue &&
                         w4a16_columns_to_f16_cuda(by.as<float>() + 1, nullptr, nullptr, 1, 8, nullptr) == cudaErrorMisalignedAddress &&
                         w4a16_columns_undo_cuda(to.as<float>(), by.as<float>(), 0, 1, nullptr) == cudaErrorInvalidValue;
    return said(passed && refused, "columns are undone");
}
