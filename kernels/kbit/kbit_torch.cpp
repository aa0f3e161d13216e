// torch.ops.kbit: what kbit.py loads. Checks what only torch knows, and calls kbit_library.cu.

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

// A tensor's place, once it is what it must be.
template <typename T> T * place(const Tensor & t, const char * name, const Tensor & beside, at::ScalarType type, int64_t elements) {
    TORCH_CHECK_VALUE(t.is_cuda() && t.device() == beside.device(), "kbit: ", name, " must be on ", beside.device(), ", it is on ",
                      t.device());
    TORCH_CHECK_TYPE(t.scalar_type() == type, "kbit: ", name, " must be ", type, ", it is ", t.scalar_type());
    TORCH_CHECK_VALUE(t.is_contiguous(), "kbit: ", name, " must be contiguous");
    TORCH_CHECK_VALUE(t.numel() >= elements, "kbit: ", name, " must have ", elements, " elements, it has ", t.numel());
    return (T *) t.data_ptr();
}

int code_of(at::ScalarType type) {
    TORCH_CHECK_TYPE(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat,
                     "kbit: values must be float16, bfloat16 or float32, not ", type);
    return type == at::kHalf ? 0 : type == at::kBFloat16 ? 1 : 2;
}

int code_of_absmax(at::ScalarType type) {
    TORCH_CHECK_TYPE(type == at::kByte || type == at::kHalf, "kbit: absmax must be uint8 (E4M4) or float16, not ", type);
    return type == at::kByte ? 3 : 0;
}

void check_on_gpu(const Tensor & t, const char * name) { TORCH_CHECK_VALUE(t.is_cuda(), "kbit: ", name, " must be on a CUDA device"); }

void check_bits(int64_t k) { TORCH_CHECK_VALUE(k >= 2 && k <= 5, "kbit: ", kbit_error(1), ", not ", k); }

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

std::tuple<Tensor, Tensor> quantise(const Tensor & x, const Tensor & codebook, int64_t k, at::ScalarType absmax_dtype) {
    check_on_gpu(x, "x");
    check_bits(k);
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t              n      = x.numel();
    const Tensor               packed = at::empty({n / 32, k}, x.options().dtype(at::kInt));
    const Tensor               absmax = at::empty({n / 32}, x.options().dtype(absmax_dtype));
    const Tensor               flags  = at::zeros({3}, x.options().dtype(at::kInt));
    check(kbit_quantise_any(place<void>(x, "x", x, x.scalar_type(), n), code_of(x.scalar_type()),
                            place<float>(codebook, "codebook", x, at::kFloat, 1 << k), (int) k, n, (uint32_t *) packed.data_ptr(),
                            absmax.data_ptr(), code_of_absmax(absmax_dtype), (int *) flags.data_ptr(), stream()));
    const Tensor found = flags.cpu();
    const int *  flag  = found.const_data_ptr<int>();
    TORCH_CHECK_VALUE(flag[2] == 0, "kbit: the codebook must be finite and ascend");
    TORCH_CHECK_VALUE(flag[0] == 0, "kbit: x has NaN or infinity");
    TORCH_CHECK_VALUE(flag[1] == 0, "kbit: a block's largest magnitude is beyond ",
                      absmax_dtype == at::kByte ? "31: scale x, or take float16 for absmax" : "65504");
    return {packed, absmax};
}

Tensor & dequantise_out(const Tensor & packed, const Tensor & absmax, const Tensor & codebook, int64_t k, Tensor & out) {
    check_on_gpu(packed, "packed");
    check_bits(k);
    const c10::cuda::CUDAGuard guard(packed.device());
    const int64_t              n = packed.numel() / k * 32;
    check(kbit_dequantise_any(place<uint32_t>(packed, "packed", packed, at::kInt, n / 32 * k),
                              place<void>(absmax, "absmax", packed, absmax.scalar_type(), n / 32), code_of_absmax(absmax.scalar_type()),
                              place<float>(codebook, "codebook", packed, at::kFloat, 1 << k), (int) k, n,
                              place<void>(out, "out", packed, out.scalar_type(), n), out.numel(), code_of(out.scalar_type()), stream()));
    return out;
}

Tensor dequantise(const Tensor & packed, const Tensor & absmax, const Tensor & codebook, int64_t k, at::ScalarType dtype) {
    check_bits(k);
    code_of(dtype);
    Tensor out = at::empty({packed.numel() / k * 32}, packed.options().dtype(dtype));
    return dequantise_out(packed, absmax, codebook, k, out);
}

std::tuple<Tensor, Tensor> repack(const Tensor & packed, const Tensor & absmax, int64_t k_dim, int64_t n, int64_t k, int64_t tile_k,
                                  int64_t tile_n) {
    check_on_gpu(packed, "packed");
    check_bits(k);
    TORCH_CHECK_VALUE(tile_k == 256 && tile_n == 16, "kbit: tiles are of tile_k=256 by tile_n=16, not ", tile_k, " by ", tile_n);
    TORCH_CHECK_VALUE(k_dim > 0 && k_dim % 32 == 0 && n > 0, "kbit: ", kbit_error(3));
    const c10::cuda::CUDAGuard guard(packed.device());
    const Tensor               tiles  = at::empty({kbit_words_of_tiles((int) k, n, k_dim)}, packed.options());
    const Tensor               scales = at::empty({kbit_words_of_scales(n, k_dim) * 4}, absmax.options());
    check(kbit_repack_any(place<uint32_t>(packed, "packed", packed, at::kInt, n * k_dim / 32 * k),
                          place<uint8_t>(absmax, "absmax", packed, at::kByte, n * k_dim / 32), (int) k, n, k_dim,
                          (uint32_t *) tiles.data_ptr(), (uint8_t *) scales.data_ptr(), stream()));
    return {tiles, scales};
}

// Zeros that every product leaves zeros: one for each stream, kept. In a graph its own, in the graph's memory: it may be replayed anywhere.
Tensor workspace_for(const Tensor & a, int64_t bytes) {
    static std::mutex mutex;
    static auto &     kept = *new std::map<cudaStream_t, Tensor>();  // never freed: CUDA may be gone before it

    const auto zeros = [&] { return at::zeros({bytes}, a.options().dtype(at::kByte)); };
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
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
    check_on_gpu(a, "A");
    check_bits(k);
    TORCH_CHECK_TYPE(a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16, "kbit: A must be float16 or bfloat16, not ",
                     a.scalar_type());
    TORCH_CHECK_VALUE(a.dim() == 2 && a.size(1) == k_dim, "kbit: A must be [M, K_dim=", k_dim, "], it is ", a.sizes());
    TORCH_CHECK_VALUE(k_dim > 0 && k_dim % 32 == 0 && n > 0, "kbit: ", kbit_error(3));
    TORCH_CHECK_VALUE(a.size(0) > 0, "kbit: ", kbit_error(4));
    const c10::cuda::CUDAGuard guard(a.device());
    const int64_t              m     = a.size(0);
    const int                  type  = code_of(a.scalar_type());
    const uint32_t *           words = place<uint32_t>(tiles, "B_packed", a, at::kInt, kbit_words_of_tiles((int) k, n, k_dim));
    const uint8_t *            bytes = place<uint8_t>(scales, "absmax", a, at::kByte, kbit_words_of_scales(n, k_dim) * 4);
    const float *              entries = place<float>(codebook, "codebook", a, at::kFloat, 1 << k);
    const void *               from  = place<void>(a, "A", a, a.scalar_type(), m * k_dim);
    if (m > kbit_most_tokens((int) k)) {
        const Tensor w = at::empty({n, k_dim}, a.options());
        check(kbit_unpack_any(words, bytes, entries, (int) k, n, k_dim, w.data_ptr(), type, stream()));
        return at::mm(a, w.t());
    }
    const Tensor c         = at::empty({m, n}, a.options());
    const Tensor workspace = workspace_for(a, kbit_workspace_of((int) k, m, n, k_dim));
    check(kbit_gemm_any(from, type, m, words, bytes, entries, (int) k, n, k_dim, c.data_ptr(), workspace.data_ptr(), workspace.numel(),
                        stream()));
    return c;
}

} // namespace

TORCH_LIBRARY(kbit, m) {
    m.def("quantise(Tensor x, Tensor codebook, int k, ScalarType absmax_dtype) -> (Tensor, Tensor)");
    m.def("dequantise(Tensor packed, Tensor absmax, Tensor codebook, int k, ScalarType dtype) -> Tensor");
    m.def("dequantise.out(Tensor packed, Tensor absmax, Tensor codebook, int k, *, Tensor(a!) out) -> Tensor(a!)");
    m.def("repack_for_gemm(Tensor packed, Tensor absmax, int K_dim, int N, int k, int tile_k, int tile_n) -> (Tensor, Tensor)");
    m.def("gemm(Tensor A, Tensor B_packed, Tensor absmax, Tensor codebook, int k, int N, int K_dim) -> Tensor");
}

// Tensors that are elsewhere come here too, and are refused with a sentence.
TORCH_LIBRARY_IMPL(kbit, CompositeExplicitAutograd, m) {
    m.impl("quantise", &quantise);
    m.impl("dequantise", &dequantise);
    m.impl("dequantise.out", &dequantise_out);
    m.impl("repack_for_gemm", &repack);
    m.impl("gemm", &gemm);
}
