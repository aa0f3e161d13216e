// Others' products, out of libraries that the harness is given: libmarlin.so, whose making README.md has, libcublas.so and
// libggml-cuda.so.

#pragma once

#include "../common/cublas.cuh"
#include "../common/ggml.cuh"
#include "../q4_dequant/q4_dequant.cuh"
#include "contest.cuh"

// -- activations and outputs in f16 --

static __global__ void to_f16(const float * from, __half * to, int64_t count) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (2 * i < count) {
        reinterpret_cast<__half2 *>(to)[i] = __float22half2_rn(reinterpret_cast<const float2 *>(from)[i]);
    }
}

static __global__ void to_f32(const __half * from, float * to, int64_t count) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (2 * i < count) {
        reinterpret_cast<float2 *>(to)[i] = __half22float2(reinterpret_cast<const __half2 *>(from)[i]);
    }
}

static unsigned blocks_of_pairs(int64_t count) { return (unsigned) ((count / 2 + 255) / 256); }

// -- Marlin --

static constexpr int64_t MARLIN_GROUP = 128;

// A thread fills a word of b: 8 codes as a lane of mma.m16n8k16 has them of two tiles of 8 rows, the four of even place
// first. Words lie in the order of 16 columns, then 64 rows, the lane, and its 16 rows.
static __global__ void pack_for_marlin(const uint8_t * w, uint32_t * b, int64_t m, int64_t k) {
    const int64_t word = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (word >= m * k / 8) {
        return;
    }
    const int64_t of_row = 2 * m, col = word / of_row * 16, row = word % of_row / 128 * 64;
    const int     lane = word % 128 / 4, part = word % 4;
    uint32_t      codes = 0;
    for (int place = 0; place < 8; ++place) {
        const int     i     = place < 4 ? 2 * place : 2 * place - 7;
        const int64_t at_k  = col + lane % 4 * 2 + i % 2 + i / 2 % 2 * 8;
        const int64_t at_m  = row + part * 16 + lane / 4 + i / 4 * 8;
        const int     code  = q4_0_parts(w + (at_m * k + at_k) / 32 * 18, (int) (at_k % 32)).code;
        codes |= (uint32_t) code << 4 * place;
    }
    b[word] = codes;
}

// Rows of scales, one for each group of columns; of 64 rows every eighth follows.
static __global__ void scales_for_marlin(const uint8_t * w, uint16_t * s, int64_t m, int64_t k) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < m * (k / MARLIN_GROUP)) {
        const int64_t  row  = i % m / 64 * 64 + i % 8 * 8 + i % 64 / 8;
        const uint8_t * of  = w + (row * k + i / m * MARLIN_GROUP) / 32 * 18;
        s[i] = of[0] | of[1] << 8;
    }
}

struct marlin_operands {
    device_buffer b, s, x, y, locks;

    explicit marlin_operands(const problem & p)
        : b(p.shape.m * p.shape.k / 2), s(p.shape.m * p.shape.k / MARLIN_GROUP * 2), x(p.shape.n * p.shape.k * 2),
          y(p.shape.n * p.shape.m * 2), locks(p.shape.m / 128 * 16 * 4) {
        const gemm_shape & of     = p.shape;
        const int64_t      blocks = of.m * of.k / 32;
        pack_for_marlin<<<(unsigned) (blocks / 64), 256>>>(p.w.as<uint8_t>(), b.as<uint32_t>(), of.m, of.k);
        scales_for_marlin<<<(unsigned) (blocks / 1024 + 1), 256>>>(p.w.as<uint8_t>(), s.as<uint16_t>(), of.m, of.k);
        to_f16<<<blocks_of_pairs(of.n * of.k), 256>>>(p.x.as<float>(), x.as<__half>(), of.n * of.k);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaMemset(locks.as<void>(), 0, locks.size()));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
};

using marlin_t = int (*)(const void * a, const void * b, void * c, void * s, int m, int n, int k, void * locks, int group,
                         int device, cudaStream_t stream, int thread_k, int thread_n, int multiprocessors, int parallel);

// As published, f16 in and out; and with f32 in and out, as ours has it.
static std::vector<contestant> marlin_contestants(marlin_t marlin, const field & f) {
    const gemm_shape s = f.sets[0].shape;
    if (s.type != weight_type::Q4_0 || s.m % 256 != 0 || s.k % MARLIN_GROUP != 0) {
        return {};
    }
    const auto operands = std::make_shared<std::vector<marlin_operands>>();
    for (const problem & p : f.sets) {
        operands->emplace_back(p);
    }
    const auto multiply = [=](int set, cudaStream_t stream) {
        const marlin_operands & o = (*operands)[set];
        if (const int status = marlin(o.x.as<void>(), o.b.as<void>(), o.y.as<void>(), o.s.as<void>(), (int) s.n, (int) s.m,
                                      (int) s.k, o.locks.as<void>(), MARLIN_GROUP, 0, stream, -1, -1, -1, 16)) {
            fprintf(stderr, "marlin_cuda failed with status %d\n", status);
            exit(1);
        }
    };
    const auto whole = [=, &f](int set, cudaStream_t stream) {
        const marlin_operands & o = (*operands)[set];
        const problem &         p = f.sets[set];
        to_f16<<<blocks_of_pairs(s.n * s.k), 256, 0, stream>>>(p.x.as<float>(), o.x.as<__half>(), s.n * s.k);
        multiply(set, stream);
        to_f32<<<blocks_of_pairs(s.n * s.m), 256, 0, stream>>>(o.y.as<__half>(), p.y.as<float>(), s.n * s.m);
        CUDA_CHECK(cudaGetLastError());
    };
    return {{"marlin", 8.0, whole}, {"marlin-f16", 8.0, whole, multiply}};
}

// -- cuBLAS --

// Weights that are f16 already; activations are converted.
static std::vector<contestant> cublas_contestants(const std::shared_ptr<cublas> & blas, const field & f) {
    const gemm_shape s     = f.sets[0].shape;
    const auto       w     = std::make_shared<std::vector<device_buffer>>();
    const auto       x     = std::make_shared<device_buffer>(2 * s.n * s.k);
    const auto       to_w  = s.type == weight_type::Q4_0 ? q4_0_dequant_f16_cuda : q4_K_dequant_f16_cuda;
    for (const problem & p : f.sets) {
        w->emplace_back(2 * s.m * s.k);
        CUDA_CHECK(to_w(p.w.as<void>(), w->back().as<__half>(), s.m * s.k, nullptr));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    return {{"cublas-f16", 8.0, [=, &f](int set, cudaStream_t stream) {
        const problem & p = f.sets[set];
        to_f16<<<blocks_of_pairs(s.n * s.k), 256, 0, stream>>>(p.x.as<float>(), x->as<__half>(), s.n * s.k);
        CUDA_CHECK(cudaGetLastError());
        blas->multiply((*w)[set].as<__half>(), x->as<__half>(), p.y.as<float>(), (int) s.m, (int) s.n, (int) s.k, stream);
    }}};
}

// -- llama.cpp --

static void copy(void * to, const void * from, int64_t bytes) {
    CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
}

// What a model's graph takes, on a stream of its own.
static std::vector<contestant> ggml_contestants(const std::shared_ptr<ggml> & by, const field & f) {
    const gemm_shape s    = f.sets[0].shape;
    const int        type = s.type == weight_type::Q4_0 ? 2 : 12;  // enum ggml_type
    const int        sets = (int) f.sets.size();
    std::vector<int> set_of;
    for (int product = 0; product < f.products; ++product) {
        set_of.push_back(product % sets);
    }
    const auto all = std::make_shared<ggml_products>(*by, type, s.m, s.n, s.k, sets, set_of);
    for (int set = 0; set < sets; ++set) {
        copy(all->w(set), f.sets[set].w.as<void>(), f.sets[set].w.size());
        copy(all->x(set), f.sets[set].x.as<void>(), f.sets[set].x.size());
    }
    const auto first = [=, &f](int, cudaStream_t) {
        all->compute();
        copy(f.sets[0].y.as<void>(), all->y(0), f.sets[0].y.size());
    };
    // activations of 8 bits: a correct product had 64.4
    return {{"ggml", 100.0, first, nullptr, [by, all] { all->compute(); }}};
}

// -- whose library it is --

static rival rival_of(const char * path) {
    static const char * const MARLIN = "_Z11marlin_cudaPKvS0_PvS1_iiiS1_iiP11CUstream_stiiii";
    const library             found(path);
    if (found.has(MARLIN)) {
        marlin_t marlin;
        found.find(marlin, MARLIN);
        return [marlin](const field & f) { return marlin_contestants(marlin, f); };
    }
    if (found.has("ggml_backend_cuda_init")) {
        setenv("GGML_CUDA_W4A16", "0", 1);  // a patched one as it was
        const auto by = std::make_shared<ggml>(path);
        return [by](const field & f) { return ggml_contestants(by, f); };
    }
    const auto blas = std::make_shared<cublas>(path);
    return [blas](const field & f) { return cublas_contestants(blas, f); };
}
