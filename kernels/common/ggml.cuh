// llama.cpp's own product out of its built libggml-cuda.so, by ggml's public interface.

#pragma once

#include "check.cuh"
#include "library.cuh"

#include <cstdint>
#include <cuda_runtime.h>
#include <vector>

class ggml {
  public:
    explicit ggml(const char * path) : loaded_(path) {
        void * (*init)(int);
        loaded_.find(init, "ggml_backend_cuda_init");
        loaded_.find(free_buffer, "ggml_backend_buffer_free");
        loaded_.find(free_context, "ggml_free");
        loaded_.find(new_context, "ggml_init");
        loaded_.find(new_matrix, "ggml_new_tensor_2d");
        loaded_.find(multiply, "ggml_mul_mat");
        loaded_.find(new_graph, "ggml_new_graph_custom");
        loaded_.find(expand, "ggml_build_forward_expand");
        loaded_.find(allocate, "ggml_backend_alloc_ctx_tensors");
        loaded_.find(address, "ggml_get_data");
        loaded_.find(compute_, "ggml_backend_graph_compute");
        backend_ = init(0);
        if (!backend_) {
            fprintf(stderr, "%s found no GPU\n", path);
            exit(1);
        }
    }

    ggml(const ggml &)             = delete;
    ggml & operator=(const ggml &) = delete;

    // Returns when the graph has been computed.
    void compute(void * graph) const {
        if (const int status = compute_(backend_, graph)) {
            fprintf(stderr, "ggml_backend_graph_compute failed with status %d\n", status);
            exit(1);
        }
    }

    void * backend() const { return backend_; }

    struct parameters {
        size_t bytes;
        void * memory;
        bool   no_alloc;
    };

    void * (*new_context)(parameters);
    void * (*new_matrix)(void * context, int type, int64_t columns, int64_t rows);
    void * (*multiply)(void * context, void * w, void * x);
    void * (*new_graph)(void * context, size_t nodes, bool gradients);
    void (*expand)(void * graph, void * tensor);
    void * (*allocate)(void * context, void * backend);  // a buffer
    void * (*address)(const void * tensor);
    void (*free_buffer)(void * buffer);
    void (*free_context)(void * context);

  private:
    library loaded_;
    void *  backend_;
    int (*compute_)(void * backend, void * graph);
};

// Products in one graph, each with operands of one of several sets and an output of its own.
class ggml_products {
  public:
    // type: enum ggml_type of the weights, m rows of k; activations n rows of k. set_of: of each product.
    ggml_products(const ggml & by, int type, int64_t m, int64_t n, int64_t k, int sets, const std::vector<int> & set_of)
        : by_(by), context_(by.new_context({CONTEXT_BYTES, nullptr, true})) {
        constexpr int F32 = 0;
        for (int set = 0; set < sets; ++set) {
            w_.push_back(by.new_matrix(context_, type, k, m));
            x_.push_back(by.new_matrix(context_, F32, k, n));
        }
        graph_ = by.new_graph(context_, 2 * (sets + set_of.size()), false);
        for (const int set : set_of) {
            y_.push_back(by.multiply(context_, w_[set], x_[set]));
            by.expand(graph_, y_.back());
        }
        buffer_ = by.allocate(context_, by.backend());
        if (!buffer_) {
            fprintf(stderr, "ggml found no memory for the products\n");
            exit(1);
        }
    }

    ~ggml_products() {
        by_.free_buffer(buffer_);
        by_.free_context(context_);
    }

    ggml_products(const ggml_products &)             = delete;
    ggml_products & operator=(const ggml_products &) = delete;

    void * w(int set) const { return by_.address(w_[set]); }
    void * x(int set) const { return by_.address(x_[set]); }
    void * y(int product) const { return by_.address(y_[product]); }

    void compute() const { by_.compute(graph_); }

  private:
    static constexpr size_t CONTEXT_BYTES = 16 << 20;  // of a thousand tensors' descriptions and the graph

    const ggml &        by_;
    void *              context_;
    void *              graph_;
    void *              buffer_;
    std::vector<void *> w_, x_, y_;
};
