// The product that a fused kernel has to beat: all experts' weights to bf16, activations to bf16 in the experts' order, cuBLAS's
// grouped GEMM and its bf16 results to where they belong. It is given what llama.cpp could not give it without a
// synchronisation: the experts' sizes on the host, and the order.

#pragma once

#include "../common/cublas.cuh"
#include "../nvfp4_dequant/nvfp4_dequant.cuh"
#include "proof.cuh"

// A block for a product: a row of x as bf16.
static __global__ void gather_bf16(const float * x, const int32_t * order, __nv_bfloat16 * to, int k, int used, int slots,
                                   int64_t x_token, int64_t x_slot) {
    const int i = order[blockIdx.x];
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        to[(int64_t) blockIdx.x * k + j] = __float2bfloat16_rn(x[i / used * x_token + i % used % slots * x_slot + j]);
    }
}

static __global__ void scatter_f32(const __nv_bfloat16 * from, const int32_t * order, float * y, int m) {
    for (int j = threadIdx.x; j < m; j += blockDim.x) {
        y[(int64_t) order[blockIdx.x] * m + j] = __bfloat162float(from[(int64_t) blockIdx.x * m + j]);
    }
}

// Of a problem whose rows and experts are contiguous.
class materialised {
  public:
    materialised(const problem & p, const cublas & blas)
        : p_(p), blas_(blas), n_((int) p.routed.size()), w_(p.shape.experts * p.shape.m * p.shape.k * 2),
          x_(n_ * p.shape.k * 2), y_(n_ * p.shape.m * 2), order_(n_ * sizeof(int32_t)),
          pointers_(3 * p.shape.experts * sizeof(void *)) {
        std::vector<int32_t>      order;
        std::vector<const void *> of_w, of_x, of_y;
        for (int32_t e = 0; e < p.shape.experts; ++e) {
            const size_t first = order.size();
            for (int32_t i = 0; i < n_; ++i) {
                if (p.routed[i] == e) {
                    order.push_back(i);
                }
            }
            if (order.size() > first) {
                counts_.push_back((int) (order.size() - first));
                of_w.push_back(w_.as<__nv_bfloat16>() + e * p.shape.m * p.shape.k);
                of_x.push_back(x_.as<__nv_bfloat16>() + first * p.shape.k);
                of_y.push_back(y_.as<__nv_bfloat16>() + first * p.shape.m);
            }
        }
        std::vector<const void *> all = of_w;
        all.insert(all.end(), of_x.begin(), of_x.end());
        all.insert(all.end(), of_y.begin(), of_y.end());
        CUDA_CHECK(cudaMemcpy(order_.as<void>(), order.data(), order_.size(), cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaMemcpy(pointers_.as<void>(), all.data(), all.size() * sizeof(void *), cudaMemcpyHostToDevice));
    }

    void multiply(cudaStream_t stream) const {
        const moe_shape & s      = p_.shape;
        const size_t      groups = counts_.size();
        void ** const     at     = pointers_.as<void *>();
        CUDA_CHECK(nvfp4_dequant_bf16_cuda(p_.w.as<void>(), w_.as<__nv_bfloat16>(), s.experts * s.m * s.k, stream));
        gather_bf16<<<n_, 256, 0, stream>>>(p_.x.as<float>(), order_.as<int32_t>(), x_.as<__nv_bfloat16>(), (int) s.k,
                                            (int) s.used, (int) s.slots, p_.x_token, p_.x_slot);
        CUDA_CHECK(cudaGetLastError());
        blas_.multiply_grouped(at, at + groups, at + 2 * groups, (int) s.m, counts_, (int) s.k, stream);
        scatter_f32<<<n_, 256, 0, stream>>>(y_.as<__nv_bfloat16>(), order_.as<int32_t>(), p_.y.as<float>(), (int) s.m);
        CUDA_CHECK(cudaGetLastError());
    }

    // bf16 activations and results: each off by 2^-9 at most.
    bool is_right() const {
        const tolerance of_bf16 = {0x1p-7, 3e-5};
        p_.y.poison();
        multiply(nullptr);
        CUDA_CHECK(cudaDeviceSynchronize());
        const verdict v = judge(p_, std::max(1, n_ / 64), &of_bf16);
        return said(v.passed, "materialised " + text_of(p_.shape), v.why);
    }

  private:
    const problem &  p_;
    const cublas &   blas_;
    int              n_;
    device_buffer    w_, x_, y_, order_, pointers_;
    std::vector<int> counts_;
};
