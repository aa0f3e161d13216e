// Launches as llama.cpp replays them.

#pragma once

#include "check.cuh"

#include <cuda_runtime.h>
#include <functional>
#include <vector>

using launch_set_t = std::function<void(int, cudaStream_t)>;

// What is enqueued as a CUDA graph, and how many nodes it has; the caller destroys it.
static inline cudaGraphExec_t captured(const std::function<void(cudaStream_t)> & enqueue, size_t * nodes = nullptr) {
    cudaStream_t    stream;
    cudaGraph_t     graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue(stream);
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    if (nodes != nullptr) {
        CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, nodes));
    }
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaStreamDestroy(stream));
    return executable;
}

// Each set's launches as a CUDA graph.
static inline launch_set_t graphed(int n_sets, const launch_set_t & launch) {
    std::vector<cudaGraphExec_t> graphs;
    for (int set = 0; set < n_sets; ++set) {
        graphs.push_back(captured([&](cudaStream_t stream) { launch(set, stream); }));
    }
    return [graphs](int set, cudaStream_t s) { CUDA_CHECK(cudaGraphLaunch(graphs[set], s)); };
}
