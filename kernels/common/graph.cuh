// Launches as llama.cpp replays them.

#pragma once

#include "bench.cuh"

using launch_set_t = std::function<void(int, cudaStream_t)>;

// Each set's launches as a CUDA graph.
static inline launch_set_t graphed(int n_sets, const launch_set_t & launch) {
    std::vector<cudaGraphExec_t> graphs(n_sets);
    cudaStream_t                 stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int set = 0; set < n_sets; ++set) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        launch(set, stream);
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&graphs[set], graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaStreamDestroy(stream));
    return [graphs](int set, cudaStream_t s) { CUDA_CHECK(cudaGraphLaunch(graphs[set], s)); };
}
