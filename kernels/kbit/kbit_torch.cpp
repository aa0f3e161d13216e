// torch.ops.kbit: what kbit.py loads, once it has checked what it passes. Calls kbit_library.cu.

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <map>
#include <mutex>

extern "C" {
const char * kbit_error(int status);
int          kbit_quantise_any(const void *, int, const float *, int, int64_t, uint32_t *, void *, int, int *, cudaStream_t);
int          kbit_dequantise_any(const uint32_t *, const void *, int, const float *, int, int64_t, void *, int64_t, int, cudaStream_t);
int64_t      kbit_words_of_tiles(int, int64_t, int64_t);
int64_t      kbit_words_of_scales(int64_t, int64_t);
int          kbit_repack_any(const uint32_t *, const uint8_t *, int, int64_t, int64_t, uint32_t *, uint8_t *, cudaStream_t);
int          kbit_unpack_any(const uint32_t *, const uint8_t *, const float *, int, int64_t, int64_t, void *, int, cudaStream_t);
int64_t      kbit_workspace_of(int, int64_t, int64_t, int64_t);
int64_t      kbit_most_tokens(int);
int          kbit_gemm_any(const void *, int, int64_t, const uint32_t *, const uint8_t *, const float *, int, int64_t, int64_t, void *,
                           void *, int64_t, cudaStream_t);
}

namespace {

using at::Tensor;

void check(int status) { TORCH_CHECK_VALUE(status == 0, "kbit: ", kbit_error(status)); }

template <typename T> T * place(const Tensor & t) { return (T *) t.data_ptr(); }

// of kbit_library.cu
int code_of(const Tensor & t) {
    switch (t.scalar_type()) {
        case at::kHalf: return 0;
        case at::kBFloat16: return 1;
        case at::kFloat: return 2;
        case at::kByte: return 3;
        default: return -1;
    }
}

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// flags: as in kbit.cuh
std::tuple<Tensor, Tensor, Tensor> quantise(const Tensor & x, const Tensor & codebook, int64_t k, at::ScalarType absmax_dtype) {
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t              n      = x.numel();
    const Tensor               packed = at::empty({n / 32, k}, x.options().dtype(at::kInt));
    const Tensor               absmax = at::empty({n / 32}, x.options().dtype(absmax_dtype));
    const Tensor               flags  = at::zeros({3}, x.options().dtype(at::kInt));
    check(kbit_quantise_any(place<void>(x), code_of(x), place<float>(codebook), (int) k, n, place<uint32_t>(packed), place<void>(absmax),
                            code_of(absmax), place<int>(flags), stream()));
    return {packed, absmax, flags};
}

Tensor & dequantise_out(const Tensor & packed, const Tensor & absmax, const Tensor & codebook, int64_t k, Tensor & out) {
    const c10::cuda::CUDAGuard guard(packed.device());
    check(kbit_dequantise_any(place<uint32_t>(packed), place<void>(absmax), code_of(absmax), place<float>(codebook), (int) k,
                              packed.numel() / k * 32, place<void>(out), out.numel(), code_of(out), stream()));
    return out;
}

std::tuple<Tensor, Tensor> repack(const Tensor & packed, const Tensor & absmax, int64_t k_dim, int64_t n, int64_t k) {
    const c10::cuda::CUDAGuard guard(packed.device());
    const Tensor               tiles  = at::empty({kbit_words_of_tiles((int) k, n, k_dim)}, packed.options());
    const Tensor               scales = at::empty({kbit_words_of_scales(n, k_dim) * 4}, absmax.options());
    check(kbit_repack_any(place<uint32_t>(packed), place<uint8_t>(absmax), (int) k, n, k_dim, place<uint32_t>(tiles),
                          place<uint8_t>(scales), stream()));
    return {tiles, scales};
}

// Zeros that every product leaves zeros: one for each stream, kept. In a graph its own, in the graph's memory: it may be replayed anywhere.
Tensor workspace_for(const Tensor & a, int64_t n, int64_t bytes) {
    static std::mutex mutex;
    static auto &     kept = *new std::map<cudaStream_t, Tensor>();  // never freed: CUDA may be gone before it

    const auto zeros = [&] { return at::zeros({bytes}, a.options().dtype(at::kByte)); };
    const bool too_large_to_share = n > 256 * 2048;  // with 128 tokens 4096 tiles
    if (too_large_to_share || c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
        return zeros();
    }
    const std::lock_guard<std::mutex> lock(mutex);
    Tensor &                          mine = kept[stream()];
    if (!mine.defined() || mine.numel() < bytes || mine.device() != a.device()) {
        mine = zeros();
    }
    return mine;
}

// The router: beyond what the fused product is for, weights are unpacked and a library multiplies.
Tensor gemm(const Tensor & a, const Tensor & tiles, const Tensor & scales, const Tensor & codebook, int64_t k, int64_t n, int64_t k_dim) {
    const c10::cuda::CUDAGuard guard(a.device());
    const int64_t              m = a.size(0);
    if (m > kbit_most_tokens((int) k)) {
        const Tensor w = at::empty({n, k_dim}, a.options());
        check(kbit_unpack_any(place<uint32_t>(tiles), place<uint8_t>(scales), place<float>(codebook), (int) k, n, k_dim, place<void>(w),
                              code_of(w), stream()));
        return at::mm(a, w.t());
    }
    const Tensor c         = at::empty({m, n}, a.options());
    const Tensor workspace = workspace_for(a, n, kbit_workspace_of((int) k, m, n, k_dim));
    check(kbit_gemm_any(place<void>(a), code_of(a), m, place<uint32_t>(tiles), place<uint8_t>(scales), place<float>(codebook), (int) k, n,
                        k_dim, place<void>(c), place<void>(workspace), workspace.numel(), stream()));
    return c;
}

} // namespace

TORCH_LIBRARY(kbit, m) {
    m.def("quantise(Tensor x, Tensor codebook, int k, ScalarType absmax_dtype) -> (Tensor, Tensor, Tensor)");
    m.def("dequantise.out(Tensor packed, Tensor absmax, Tensor codebook, int k, *, Tensor(a!) out) -> Tensor(a!)");
    m.def("repack_for_gemm(Tensor packed, Tensor absmax, int K_dim, int N, int k) -> (Tensor, Tensor)");
    m.def("gemm(Tensor A, Tensor B_packed, Tensor absmax, Tensor codebook, int k, int N, int K_dim) -> Tensor");
}

TORCH_LIBRARY_IMPL(kbit, CompositeExplicitAutograd, m) {
    m.impl("quantise", &quantise);
    m.impl("dequantise.out", &dequantise_out);
    m.impl("repack_for_gemm", &repack);
    m.impl("gemm", &gemm);
}
