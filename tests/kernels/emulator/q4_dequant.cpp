// The proof of q4_dequant on the CPU: its kernel's own source, translated by tests/kernels/emulate.py.
//
// q4_dequant edges         the harness's edges, fewer of their sizes
// q4_dequant blocks TYPE   blocks on stdin, their weights on stdout as f16
// q4_dequant steps         doubles on stdin, the nearest f16 on stdout, counted in steps from zero, as doubles

#include "q4_dequant/proof.cuh"

#include <iostream>
#include <iterator>

static bool edges() {
    bool passed = said(checker_is_sound(), "the checker fails what is wrong");
    passed      = references_agree() && passed;
    passed      = every_code_is_right() && passed;
    for (const weight_type type : TYPES) {
        const int64_t tile = Q4_DEQUANT_TILE / block_size(type);
        passed = wrong_arguments_are_refused(type) && passed;
        passed = edges_are_right(type, {1, 2, 3, tile - 1, tile, tile + 1, 7 * tile + 1}) && passed;
        passed = wild_scales_are_right(type, 1 << 20) && passed;
        passed = two_launches_agree(type, 3 * Q4_DEQUANT_TILE) && passed;
    }
    return passed;
}

static std::string read_all() {
    return {std::istreambuf_iterator<char>(std::cin), {}};
}

template <typename T> static int write_all(const std::vector<T> & values) {
    std::cout.write(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(T));
    return std::cout.flush() ? 0 : 1;
}

static int blocks(weight_type type) {
    const std::string          in = read_all();
    const std::vector<uint8_t> x(in.begin(), in.end());
    const problem              p(type, x.size() / block_bytes(type) * block_size(type));
    p.copy_in(x);
    p.run();
    return write_all(p.y.host<uint16_t>());
}

static int steps() {
    const std::string   in = read_all();
    std::vector<double> values(in.size() / sizeof(double));
    memcpy(values.data(), in.data(), values.size() * sizeof(double));
    for (double & each : values) {
        each = f16_steps(each);
    }
    return write_all(values);
}

int main(int argc, char ** argv) {
    const std::string verb = argc > 1 ? argv[1] : "";
    if (verb == "edges" && argc == 2) {
        return edges() ? 0 : 1;
    }
    if (verb == "blocks" && argc == 3) {
        return blocks(argv[2] == std::string("q4_0") ? weight_type::Q4_0 : weight_type::Q4_K);
    }
    return verb == "steps" ? steps() : 2;
}
