// The product that a fused kernel has to beat: weights to f16, activations to f16, and cuBLAS between them.

#pragma once

#include "../common/cublas.cuh"
#include "proof.cuh"

// -- activations --

// 8 a thread.
static __global__ void __launch_bounds__(256)
to_f16(const float4 * __restrict__ x, uint4 * __restrict__ y, const int64_t n_eights) {
    const int64_t i = (int64_t) blockIdx.x * 256 + threadIdx.x;
    if (i < n_eights) {
        const auto   two = [](float low, float high) { return q4_dequant_as_u32(__floats2half2_rn(low, high)); };
        const float4 a   = x[2 * i];
        const float4 b   = x[2 * i + 1];
        y[i] = make_uint4(two(a.x, a.y), two(a.z, a.w), two(b.x, b.y), two(b.z, b.w));
    }
}

// -- product --

// m rows of weights and up to n_max columns, all of them multiplied from the same buffers.
struct rival_problem {
    int64_t       m, n_max, k;
    problem       weights;
    device_buffer x, x_f16, y;

    rival_problem(weight_type type, int64_t m, int64_t n_max, int64_t k)
        : m(m), n_max(n_max), k(k), weights(type, m * k), x(n_max * k * sizeof(float)),
          x_f16(n_max * k * sizeof(__half)), y(n_max * m * sizeof(float)) {
        weights.fill(1);
        fill_f32(x.as<float>(), n_max * k, 1, q4_fill::ORDINARY);
    }

    int64_t convert_bytes(int64_t n) const { return n * k * (int64_t) (sizeof(float) + sizeof(__half)); }

    int64_t gemm_bytes(int64_t n) const {
        return (m + n) * k * (int64_t) sizeof(__half) + m * n * (int64_t) sizeof(float);
    }

    void convert(int64_t n, cudaStream_t stream) const {
        const int64_t n_eights = n * k / 8;
        to_f16<<<(unsigned) ((n_eights + 255) / 256), 256, 0, stream>>>(x.as<float4>(), x_f16.as<uint4>(), n_eights);
        CUDA_CHECK(cudaGetLastError());
    }

    void gemm(const cublas & blas, int64_t n, cudaStream_t stream) const {
        blas.multiply(weights.y.as<__half>(), x_f16.as<__half>(), y.as<float>(), (int) m, (int) n, (int) k, stream);
    }

    void multiply(const cublas & blas, int64_t n, cudaStream_t stream) const {
        CUDA_CHECK(weights.launch(stream));
        convert(n, stream);
        gemm(blas, n, stream);
    }

    // Weights and activations are each rounded to f16, off by 1.9e-4 in the quadratic mean; of k terms of random signs
    // such errors add up to that part of the root of the sum of their squares. 1.45: what the quadratic mean of the
    // terms is to their mean. Eight deviations occur in no output of ours, and one wrong term is more.
    verdict judge(const cublas & blas, const product & reference, int64_t n) const {
        weights.y.poison();
        x_f16.poison();
        y.poison();
        multiply(blas, n, nullptr);
        CUDA_CHECK(cudaDeviceSynchronize());
        std::vector<float> out(n * m);
        CUDA_CHECK(cudaMemcpy(out.data(), y.as<float>(), out.size() * sizeof(float), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < out.size(); ++i) {
            out[i] = (float) (out[i] / reference.magnitude[i]);
        }
        const double deviation = std::sqrt(2.0) * 1.9e-4 * 1.45 / std::sqrt((double) k);
        const auto   exact     = [&](int64_t col, int64_t row) {
            return reference.y[col * m + row] / reference.magnitude[col * m + row];
        };
        verdict v = compare(out.data(), exact, n, m, tolerance{8.0 * deviation, 2e-7});
        if (v.passed && !(x.guards_intact() && x_f16.guards_intact() && y.guards_intact())) {
            v.passed = false;
            v.why    = "it wrote outside its output";
        }
        return v;
    }
};
