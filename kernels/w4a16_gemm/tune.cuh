// Every rung at every size, one line each: right or not by the reference in double, and how long.

#pragma once

#include "../common/bench.cuh"
#include "proof.cuh"

#include <algorithm>

// Errors of an output, summed on the device: the host would take longer than the product.
struct deviations {
    double   errors, squares;  // of all outputs
    unsigned long long largest;  // bits of the largest error relative to its output's magnitude
    unsigned long long not_finite;
};

static __global__ void deviations_kernel(const float * y, const double2 * reference, int64_t count, deviations * out) {
    double errors = 0.0, squares = 0.0, largest = 0.0;
    for (int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t) gridDim.x * blockDim.x) {
        const double value = y[i];
        // fast math must not decide what is finite
        if ((__float_as_uint(y[i]) & 0x7F800000) == 0x7F800000) {
            atomicAdd(&out->not_finite, 1ULL);
            continue;
        }
        const double error = value - reference[i].x;
        errors  += error * error;
        squares += reference[i].x * reference[i].x;
        largest  = fmax(largest, fabs(error) / reference[i].y);
    }
    atomicAdd(&out->errors, errors);
    atomicAdd(&out->squares, squares);
    // non-negative doubles order like their bits
    atomicMax(&out->largest, (unsigned long long) __double_as_longlong(largest));
}

// A problem, its product in double on the device, and copies of the weights to rotate through.
class tuning {
  public:
    explicit tuning(const gemm_shape & s) : problem_(s), reference_(s.m * s.n * sizeof(double2)) {
        problem_.fill(1);
        const device_buffer weights(s.m * s.k * sizeof(float2));
        const dim3          grid((unsigned) ((s.m + 15) / 16), (unsigned) ((s.n + 15) / 16));
        const int64_t       blocks = (s.m * s.k + 255) / 256;
        reference_weights<<<(unsigned) blocks, 256>>>(s.type, problem_.w.as<uint8_t>(), weights.as<float2>(), s.m * s.k);
        CUDA_CHECK(cudaGetLastError());
        reference_product<<<grid, dim3(16, 16)>>>(weights.as<float2>(), problem_.x.as<float>(), reference_.as<double2>(),
                                                  s.m, s.n, s.k);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < cold_sets(problem_.w.size()); ++i) {
            copies_.emplace_back(problem_.w.size());
            CUDA_CHECK(cudaMemcpy(copies_.back().as<void>(), problem_.w.as<void>(), problem_.w.size(),
                                  cudaMemcpyDeviceToDevice));
            operands_.emplace_back(copies_.back().as<void>());
            packed_.emplace_back(copies_.back().as<void>());
            packed_.back().pack(s);
        }
    }

    bool is_right(const rung & r, const device_buffer & scratch, std::string & error) const {
        const gemm_shape &  s = problem_.shape;
        const device_buffer sums(sizeof(deviations));
        problem_.y.poison();
        scratch.poison();
        launch(r, scratch, 0, nullptr);
        CUDA_CHECK(cudaMemset(sums.as<void>(), 0, sizeof(deviations)));
        deviations_kernel<<<1024, 256>>>(problem_.y.as<float>(), reference_.as<double2>(), s.m * s.n,
                                         sums.as<deviations>());
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaDeviceSynchronize());
        const deviations d = sums.host<deviations>()[0];
        double           largest;
        memcpy(&largest, &d.largest, sizeof(largest));
        const double    nmse  = d.errors / d.squares;
        const tolerance limit = tolerance_of(r, s, s.m, q4_fill::ORDINARY);
        char            text[80];
        snprintf(text, sizeof(text), "nmse %.2e", nmse);
        error = text;
        return d.not_finite == 0 && nmse <= limit.nmse && largest <= limit.max_abs && scratch.guards_intact();
    }

    const problem & of() const { return problem_; }

    void launch(const rung & r, const device_buffer & scratch, int set, cudaStream_t stream) const {
        const std::vector<operand> & weights = r.of(problem_.shape.type).packed ? packed_ : operands_;
        CUDA_CHECK(problem_.launch(r, weights[set], scratch, stream));
    }

    int sets() const { return (int) copies_.size(); }

  private:
    problem                    problem_;
    device_buffer              reference_;
    std::vector<device_buffer> copies_;
    std::vector<operand>       operands_, packed_;  // of the copies
};

// Microseconds a launch: the median of samples of several launches. Cold rotates through all copies of the weights.
static double tuned_us(const tuning & t, const rung & r, const device_buffer & scratch, bool cold, double sample_us) {
    cudaStream_t stream;
    cudaEvent_t  start, stop;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<double> us;
    int                 launches = 2;
    for (int i = -1; i < 7; ++i) {
        t.launch(r, scratch, 0, stream);  // untimed: the timed launches queue behind it
        CUDA_CHECK(cudaEventRecord(start, stream));
        for (int l = 0; l < launches; ++l) {
            t.launch(r, scratch, cold ? l % t.sets() : 0, stream);
        }
        CUDA_CHECK(cudaEventRecord(stop, stream));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float ms = 0.0f;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (i >= 0) {
            us.push_back(1e3 * ms / launches);
        } else {
            launches = std::max(2, std::min(40, (int) (sample_us / (1e3 * ms / launches))));
        }
    }
    CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaStreamDestroy(stream));
    return median(us);
}

// Microseconds of packing, the median of several.
static double packing_us(const problem & p) {
    cudaEvent_t         start, stop;
    std::vector<double> us;
    const w4a16_type    type = w4a16_of(p.shape.type);
    const device_buffer to((int64_t) w4a16_packed_bytes(type, p.shape.m, p.shape.k));
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    for (int i = 0; i < 5; ++i) {
        float ms = 0.0f;
        CUDA_CHECK(cudaEventRecord(start));
        CUDA_CHECK(w4a16_pack_cuda(type, p.w.as<void>(), to.as<void>(), p.shape.m, p.shape.k, nullptr));
        CUDA_CHECK(cudaEventRecord(stop));
        CUDA_CHECK(cudaEventSynchronize(stop));
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        us.push_back(1e3 * ms);
    }
    CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaEventDestroy(start));
    return median(us);
}

// Microseconds of the conversion of the activations alone.
static double conversion_us(const problem & p, w4a16_order order) {
    const gemm_shape &  s = p.shape;
    const int64_t       padded = (s.n + 15) / 16 * 16;
    const device_buffer scratch(padded * s.k * 2 + 4096 * padded);
    const bool          fragments = order == w4a16_order::FRAGMENTS;
    const auto          convert = s.type == weight_type::Q4_0
        ? (fragments ? w4a16_to_f16_cuda<w4a16_type::Q4_0, w4a16_order::FRAGMENTS> : w4a16_to_f16_cuda<w4a16_type::Q4_0, w4a16_order::CORES>)
        : (fragments ? w4a16_to_f16_cuda<w4a16_type::Q4_K, w4a16_order::FRAGMENTS> : w4a16_to_f16_cuda<w4a16_type::Q4_K, w4a16_order::CORES>);
    cudaEvent_t         start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    for (int i = -2; i < 10; ++i) {
        if (i == 0) {
            CUDA_CHECK(cudaEventRecord(start));
        }
        CUDA_CHECK(convert(p.x.as<float>(), scratch.as<uint32_t>(), (float *) (scratch.as<char>() + padded * s.k * 2),
                           nullptr, 0, s.n, padded, s.k / W4A16_UNIT, nullptr));
    }
    CUDA_CHECK(cudaEventRecord(stop));
    CUDA_CHECK(cudaEventSynchronize(stop));
    float ms = 0.0f;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaEventDestroy(start));
    return 100.0 * ms;
}

static void print_resources(const rung & r) {
    for (const weight_type type : TYPES) {
        const variant & v = r.of(type);
        if (v.kernel == nullptr || r.divided == division::SHARES) {
            continue;
        }
        cudaFuncAttributes a;
        int                blocks = 0;
        CUDA_CHECK(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared));
        CUDA_CHECK(cudaFuncGetAttributes(&a, v.kernel));
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, v.kernel, v.threads, v.shared));
        printf("%-28s %s regs %3d local %3zu shared %6d threads %3d blocks/SM %d\n", r.name.c_str(), name_of(type),
               a.numRegs, a.localSizeBytes, v.shared, v.threads, blocks);
    }
}

// Skips tiles much wider than the product, which compute unused columns, and much narrower ones, which reread the weights.
static bool worth_it(const rung & r, const gemm_shape & s) {
    const int64_t tile_n = r.of(s.type).tile_n;
    return r.of(s.type).plan != nullptr ||
           (tile_n <= std::max<int64_t>(16, s.n) && s.n <= 16 * tile_n && (tile_n >= 64 || s.n <= 4 * tile_n));
}

static bool tune_shape(const gemm_shape & s, const std::vector<rung> & rungs) {
    const tuning t(s);
    bool         all = true;
    const problem scaled(s);
    scaled.fill(1, q4_fill::WILD);
    printf("\n%s  conversion %.1f us to fragments, %.1f to cores; with four columns in five to be scaled %.1f, %.1f; packing %.1f\n",
           s.text().c_str(), conversion_us(t.of(), w4a16_order::FRAGMENTS), conversion_us(t.of(), w4a16_order::CORES),
           conversion_us(scaled, w4a16_order::FRAGMENTS), conversion_us(scaled, w4a16_order::CORES), packing_us(t.of()));
    std::string best;
    double      least = INFINITY;
    for (const rung & r : rungs) {
        if (!worth_it(r, s)) {
            continue;
        }
        const device_buffer scratch(t.of().scratch_bytes(r));
        std::string         error;
        const bool          right = t.is_right(r, scratch, error);
        if (!right) {
            printf("FAIL %-28s %s n=%-5lld %s\n", r.name.c_str(), name_of(s.type), (long long) s.n, error.c_str());
            all = false;
            continue;
        }
        const double warm = tuned_us(t, r, scratch, false, 1500.0);
        const double cold = s.n <= 128 ? tuned_us(t, r, scratch, true, 1500.0) : NAN;
        printf("ok   %-28s %s n=%-5lld %8.1f us warm %8.1f cold %7.1f TFLOPS blocks %4lld %s\n", r.name.c_str(),
               name_of(s.type), (long long) s.n, warm, cold, 2e-6 * s.m * s.n * s.k / warm, (long long) blocks_of(r, s),
               error.c_str());
        if (warm < least) {
            least = warm;
            best  = r.name;
        }
    }
    printf("BEST %-28s %s n=%-5lld %8.1f us\n", best.c_str(), name_of(s.type), (long long) s.n, least);
    fflush(stdout);
    return all;
}

static void add_tuned_packed_wgmma_rungs(std::vector<rung> & rungs) {
    add_packed_wgmma_rungs<256, 16, 4, 4, 256, 4, 1>(rungs);
    add_packed_wgmma_rungs<128, 16, 2, 7, 256, 7, 1>(rungs);
    add_packed_wgmma_rungs<128, 32, 2, 5, 256, 5, 1>(rungs);
    add_packed_wgmma_rungs<128, 64, 2, 4, 256, 3, 1>(rungs);
    add_packed_wgmma_rungs<128, 64, 2, 5, 128, 6, 1>(rungs);
    add_packed_wgmma_rungs<256, 32, 4, 3, 256, 4, 1>(rungs);
    add_packed_wgmma_rungs<256, 32, 4, 4, 128, 6, 1>(rungs);
    add_packed_wgmma_rungs<256, 64, 4, 3, 256, 3, 1>(rungs);
    add_packed_wgmma_rungs<256, 64, 4, 4,  64, 6, 1>(rungs);
    add_packed_wgmma_rungs<128, 128, 2, 4, 64, 8, 1>(rungs);
    add_packed_wgmma_rungs<256, 128, 2, 3, 64, 6, 1>(rungs);
    add_packed_wgmma_rungs<128, 256, 2, 3, 64, 5, 1>(rungs);
    add_packed_wgmma_rungs<128, 256, 2, 4, 64, 4, 1>(rungs);
}

// The first group fits the shared memory of sm_90, the last that of sm_12x.
static void add_tuned_packed_mma_rungs(std::vector<rung> & rungs) {
    add_packed_mma_rungs< 64,  16, 16, 16, 3, 256, 3, 4>(rungs);
    add_packed_mma_rungs<128,  16, 16, 16, 3, 256, 3, 2>(rungs);
    add_packed_mma_rungs<128,  16, 32, 16, 3, 128, 6, 2>(rungs);
    add_packed_mma_rungs<256,  16, 32, 16, 4, 256, 4, 1>(rungs);
    add_packed_mma_rungs< 64,  32, 16, 32, 3, 256, 2, 3>(rungs);
    add_packed_mma_rungs<128,  32, 32, 32, 2, 128, 6, 2>(rungs);
    add_packed_mma_rungs<256,  32, 32, 32, 3, 256, 4, 1>(rungs);
    add_packed_mma_rungs< 64,  64, 16, 64, 3, 128, 4, 2>(rungs);
    add_packed_mma_rungs<128,  64, 32, 32, 4, 128, 7, 1>(rungs);
    add_packed_mma_rungs<128,  64, 32, 64, 2, 128, 3, 2>(rungs);
    add_packed_mma_rungs<256,  64, 32, 64, 3, 128, 5, 1>(rungs);
    add_packed_mma_rungs<256,  64, 64, 32, 3, 128, 5, 1>(rungs);
    add_packed_mma_rungs< 64, 128, 32, 64, 2, 128, 2, 2>(rungs);
    add_packed_mma_rungs<128, 128, 32, 64, 4,  64, 8, 1>(rungs);
    add_packed_mma_rungs<128, 128, 32, 64, 4, 128, 4, 1>(rungs);
    add_packed_mma_rungs<128, 128, 32, 64, 3, 128, 5, 1>(rungs);

    add_packed_mma_rungs< 64,  16, 16, 16, 2, 128, 4, 2>(rungs);
    add_packed_mma_rungs< 64,  32, 16, 32, 2, 128, 3, 2>(rungs);
    add_packed_mma_rungs< 64,  64, 16, 64, 2,  64, 3, 2>(rungs);
    add_packed_mma_rungs<128, 128, 32, 64, 2,  64, 3, 1>(rungs);
}

static std::vector<rung> tuned_rungs() {
    std::vector<rung> rungs = packed_wgmma_rungs();
    if (w4a16_has_wgmma()) {
        add_tuned_packed_wgmma_rungs(rungs);
    }
    if (device_here().cc >= 900) {
        add_tuned_packed_mma_rungs(rungs);
    }
    for (const auto & more : {packed_mma_rungs(), wgmma_rungs(), fragment_rungs()}) {
        rungs.insert(rungs.end(), more.begin(), more.end());
    }
    add_rungs<false, 128, 128, 32, 128, 2, 4, 2>(rungs);
    add_rungs<false, 128, 128, 64, 64, 2, 4, 2>(rungs);
    add_rungs<false, 128, 128, 32, 64, 2, 4, 2>(rungs);
    add_rungs<true, 128, 128, 32, 64, 2, 4, 1>(rungs);
    add_rungs<true, 256, 128, 32, 128, 2, 4, 1>(rungs);
    add_rungs<true, 128, 64, 32, 64, 2, 4, 3>(rungs);
    add_rungs<true, 128, 64, 32, 64, 3, 4, 2>(rungs);
    add_rungs<true, 128, 32, 32, 32, 2, 4, 4>(rungs);
    add_rungs<true, 128, 16, 32, 16, 4, 8, 2>(rungs);
    add_rungs<true, 128, 16, 32, 16, 2, 4, 4>(rungs);
    add_rungs<true, 64, 16, 16, 16, 4, 8, 4>(rungs);
    add_rungs<true, 64, 64, 16, 64, 3, 4, 3>(rungs);

    const int shared = (int) device_here().shared;
    rungs.erase(std::remove_if(rungs.begin(), rungs.end(),
                               [&](const rung & r) { return r.of(weight_type::Q4_K).shared > shared; }),
                rungs.end());
    return rungs;
}

static bool tune() {
    std::vector<rung> rungs = tuned_rungs();
    for (const rung & r : rungs) {
        print_resources(r);
    }
    for (const rung & r : planned_rungs()) {
        rungs.push_back(r);
    }
    bool all = true;
    for (const weight_type type : TYPES) {
        for (const int64_t n : {16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048}) {
            all = tune_shape({type, 4096, n, 14336}, rungs) && all;
        }
    }
    return all;
}
