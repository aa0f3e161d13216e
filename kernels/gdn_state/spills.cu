// What `make spills` compiles: the kernel as it is used, without what only `./harness tune` runs.

#include "gdn_state.cuh"

template cudaError_t gdn_state_cuda(const gdn_state_args<float> &, cudaStream_t);
template cudaError_t gdn_state_cuda(const gdn_state_args<__nv_bfloat16> &, cudaStream_t);
