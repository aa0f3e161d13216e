// The library behind kbit.py: C functions of all types. Each returns 0 or a code of kbit_error.
//
// Pointers are the device's but for those of strings. dtype: 0 f16, 1 bf16, 2 f32; of absmax 0 f16, 3 E4M4.

#include "kbit_gemm.cuh"

#define KBIT_API extern "C" __attribute__((visibility("default")))

enum kbit_status {
    KBIT_OK, KBIT_BAD_BITS, KBIT_BAD_SIZE, KBIT_BAD_K_DIM, KBIT_NO_TOKENS, KBIT_BAD_TYPE, KBIT_BAD_POINTER, KBIT_SMALL, KBIT_CUDA
};

KBIT_API const char * kbit_error(const int status) {
    static const char * const words[] = {
        "", "k must be 2, 3, 4 or 5", "the number of weights must be a multiple of 32, and positive",
        "K_dim must be a multiple of 32, and N positive", "A must have a token at least, and 4194240 at most",
        "this type is not supported here", "a pointer is not aligned as kbit.cuh says",
        "an output or the workspace is too small", "CUDA refused the launch",
    };
    return status >= KBIT_OK && status <= KBIT_CUDA ? words[status] : "unknown status";
}

static int status_of(const cudaError_t status) {
    return status == cudaSuccess ? KBIT_OK : status == cudaErrorMisalignedAddress ? KBIT_BAD_POINTER : KBIT_CUDA;
}

// f(a null pointer of the type)
template <typename F> static int by_type(const int dtype, const F f) {
    switch (dtype) {
        case 0: return f((__half *) nullptr);
        case 1: return f((__nv_bfloat16 *) nullptr);
        case 2: return f((float *) nullptr);
        default: return KBIT_BAD_TYPE;
    }
}

template <typename F> static int by_absmax(const int dtype, const F f) {
    return dtype == 3 ? f((uint8_t *) nullptr) : dtype == 0 ? f((__half *) nullptr) : KBIT_BAD_TYPE;
}

static int checked(const int k, const int64_t n) {
    return k < 2 || k > 5 ? KBIT_BAD_BITS : kbit_check(k, n) == cudaSuccess ? KBIT_OK : KBIT_BAD_SIZE;
}

static int checked(const int k, const int64_t n, const int64_t k_dim) {
    return k < 2 || k > 5 ? KBIT_BAD_BITS : kbit_check(k, n, k_dim) == cudaSuccess ? KBIT_OK : KBIT_BAD_K_DIM;
}

KBIT_API int kbit_quantise_any(const void * x, const int dtype, const float * codebook, const int k, const int64_t n, uint32_t * planes,
                               void * absmax, const int absmax_dtype, int * flags, cudaStream_t stream) {
    if (const int status = checked(k, n)) {
        return status;
    }
    return by_type(dtype, [&](auto * t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return by_absmax(absmax_dtype, [&](auto * a) {
            return status_of(kbit_quantise_cuda((const T *) x, codebook, k, n, planes, (decltype(a)) absmax, flags, stream));
        });
    });
}

KBIT_API int kbit_dequantise_any(const uint32_t * planes, const void * absmax, const int absmax_dtype, const float * codebook, const int k,
                                 const int64_t n, void * out, const int64_t out_elements, const int dtype, cudaStream_t stream) {
    if (const int status = checked(k, n)) {
        return status;
    }
    if (out_elements < n) {
        return KBIT_SMALL;
    }
    return by_type(dtype, [&](auto * t) {
        return by_absmax(absmax_dtype, [&](auto * a) {
            using A = std::remove_pointer_t<decltype(a)>;
            return status_of(kbit_dequantise_cuda(planes, (const A *) absmax, codebook, k, n, (decltype(t)) out, stream));
        });
    });
}

KBIT_API int64_t kbit_words_of_tiles(const int k, const int64_t n, const int64_t k_dim) { return kbit_tile_words(k, n, k_dim); }
KBIT_API int64_t kbit_words_of_scales(const int64_t n, const int64_t k_dim) { return kbit_tile_scales(n, k_dim); }

KBIT_API int kbit_repack_any(const uint32_t * planes, const uint8_t * absmax, const int k, const int64_t n, const int64_t k_dim,
                             uint32_t * tiles, uint8_t * scales, cudaStream_t stream) {
    if (const int status = checked(k, n, k_dim)) {
        return status;
    }
    return status_of(kbit_repack_cuda(planes, absmax, k, n, k_dim, tiles, scales, stream));
}

KBIT_API int kbit_unpack_any(const uint32_t * tiles, const uint8_t * scales, const float * codebook, const int k, const int64_t n,
                             const int64_t k_dim, void * out, const int dtype, cudaStream_t stream) {
    if (const int status = checked(k, n, k_dim)) {
        return status;
    }
    return by_type(dtype, [&](auto * t) {
        return status_of(kbit_unpack_cuda(tiles, scales, codebook, k, n, k_dim, (decltype(t)) out, stream));
    });
}

static kbit_plan plan_here(const int k, const int64_t m, const int64_t n, const int64_t k_dim) {
    int device = 0, multiprocessors = 1, shared = 0;
    (void) cudaGetDevice(&device);
    (void) cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    (void) cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return kbit_plan_of(k, m, n, k_dim, multiprocessors, shared);
}

KBIT_API int64_t kbit_workspace_of(const int k, const int64_t m, const int64_t n, const int64_t k_dim) {
    return checked(k, n, k_dim) == KBIT_OK && m > 0 ? plan_here(k, m, n, k_dim).workspace : 0;
}

KBIT_API int64_t kbit_most_tokens(const int k) { return kbit_most_fused(k); }

KBIT_API int kbit_gemm_any(const void * a, const int dtype, const int64_t m, const uint32_t * tiles, const uint8_t * scales,
                           const float * codebook, const int k, const int64_t n, const int64_t k_dim, void * c, void * workspace,
                           const int64_t workspace_bytes, cudaStream_t stream) {
    if (const int status = checked(k, n, k_dim)) {
        return status;
    }
    if (m < 1 || m > 65535 * KBIT_MOST_TOKENS) {
        return KBIT_NO_TOKENS;
    }
    const kbit_plan plan = plan_here(k, m, n, k_dim);
    const kbit_args args = {k, m, n, k_dim, a, tiles, scales, codebook, c, workspace};
    if (workspace_bytes < plan.workspace) {
        return KBIT_SMALL;
    }
    return dtype == 0   ? status_of(kbit_gemm_cuda<__half>(args, plan, stream))
           : dtype == 1 ? status_of(kbit_gemm_cuda<__nv_bfloat16>(args, plan, stream))
                        : (int) KBIT_BAD_TYPE;
}
