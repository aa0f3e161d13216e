// cuBLAS, its functions declared as its documentation of version 13 has them; enumerations are passed as int.

#pragma once

#include "check.cuh"
#include "library.cuh"

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <vector>

class cublas {
  public:
    explicit cublas(const char * path) : loaded_(path) {
        loaded_.find(set_stream_, "cublasSetStream_v2");
        loaded_.find(gemm_, "cublasGemmEx");
        loaded_.find(destroy_, "cublasDestroy_v2");
        int (*create)(void **);
        int (*version)(void *, int *);
        loaded_.find(create, "cublasCreate_v2");
        loaded_.find(version, "cublasGetVersion_v2");
        check(create(&handle_), "cublasCreate");
        check(version(handle_, &version_), "cublasGetVersion");
    }

    ~cublas() { destroy_(handle_); }

    cublas(const cublas &)             = delete;
    cublas & operator=(const cublas &) = delete;

    int version() const { return version_; }

    // y = w x: w m rows of k, x n rows of k, y n rows of m, as ggml lays a product out; sums in f32.
    void multiply(const __half * w, const __half * x, float * y, int m, int n, int k, cudaStream_t stream) const {
        constexpr int OP_N = 0, OP_T = 1, COMPUTE_32F = 68, GEMM_DEFAULT = -1;
        const float   one = 1.0f, zero = 0.0f;
        check(set_stream_(handle_, stream), "cublasSetStream");
        check(gemm_(handle_, OP_T, OP_N, m, n, k, &one, w, CUDA_R_16F, k, x, CUDA_R_16F, k, &zero, y, CUDA_R_32F, m,
                    COMPUTE_32F, GEMM_DEFAULT),
              "cublasGemmEx");
    }

    // For each group y = w x of bf16 operands and results, sums in f32; the pointers are arrays on the device, the sizes the host's.
    void multiply_grouped(const void * const * w, const void * const * x, void * const * y, int m, const std::vector<int> & n,
                          int k, cudaStream_t stream) const {
        constexpr int            OP_N = 0, OP_T = 1, COMPUTE_32F = 68;
        const size_t             groups = n.size();
        const std::vector<int>   of_m(groups, m), of_k(groups, k), one(groups, 1), op_t(groups, OP_T), op_n(groups, OP_N);
        const std::vector<float> alpha(groups, 1.0f), beta(groups, 0.0f);
        grouped_t                grouped;
        loaded_.find(grouped, "cublasGemmGroupedBatchedEx");
        check(set_stream_(handle_, stream), "cublasSetStream");
        check(grouped(handle_, op_t.data(), op_n.data(), of_m.data(), n.data(), of_k.data(), alpha.data(), w, CUDA_R_16BF,
                      of_k.data(), x, CUDA_R_16BF, of_k.data(), beta.data(), y, CUDA_R_16BF, of_m.data(), (int) groups,
                      one.data(), COMPUTE_32F),
              "cublasGemmGroupedBatchedEx");
    }

  private:
    static void check(int status, const char * call) {
        if (status != 0) {
            fprintf(stderr, "%s failed with status %d\n", call, status);
            exit(1);
        }
    }

    using set_stream_t = int (*)(void * handle, cudaStream_t stream);
    using gemm_t       = int (*)(void * handle, int op_a, int op_b, int m, int n, int k, const void * alpha,
                           const void * a, int a_type, int lda, const void * b, int b_type, int ldb, const void * beta,
                           void * c, int c_type, int ldc, int compute, int algorithm);
    using grouped_t    = int (*)(void * handle, const int * op_a, const int * op_b, const int * m, const int * n, const int * k,
                              const void * alpha, const void * const * a, int a_type, const int * lda, const void * const * b,
                              int b_type, const int * ldb, const void * beta, void * const * c, int c_type, const int * ldc,
                              int groups, const int * group_size, int compute);
    using destroy_t    = int (*)(void * handle);

    library      loaded_;
    void *       handle_     = nullptr;
    set_stream_t set_stream_ = nullptr;
    gemm_t       gemm_       = nullptr;
    destroy_t    destroy_    = nullptr;
    int          version_    = 0;
};
