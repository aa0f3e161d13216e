// The parts of the harnesses that need no GPU.
//
// host selftest    exit status 0 if the checker fails what is wrong
// host nvfp4       NVFP4 blocks on stdin, their weights on stdout as doubles
// host q4_0        the same of Q4_0 blocks
// host q4_K        the same of Q4_K blocks
// host conv        weights of 3 channels on stdin, as floats, and 7 tokens' inputs to them; on stdout the results and the
//                  state after the last, as doubles
// host gdn         q, k, v, g and beta of a gated delta net's head on stdin, as floats, and its state, as doubles; on
//                  stdout the result and the new state, as doubles

#include "common/check_selftest.cuh"
#include "common/reference.cuh"
#include "conv_state/reference.cuh"
#include "gdn_state/reference.cuh"
#include "nvfp4_dequant/reference.cuh"

#include <iostream>
#include <iterator>
#include <string>

// size weights in blocks of so many bytes
template <typename F> static int decode(size_t size, size_t bytes, F weight) {
    const std::string blocks{std::istreambuf_iterator<char>(std::cin), {}};
    for (size_t i = 0; i < blocks.size() / bytes * size; ++i) {
        const double value = weight(reinterpret_cast<const uint8_t *>(blocks.data()), i);
        std::cout.write(reinterpret_cast<const char *>(&value), sizeof(value));
    }
    return std::cout.flush() ? 0 : 1;
}

static int decode_q4(weight_type type) {
    const auto weight = [=](const uint8_t * blocks, size_t i) { return weight_of(parts_of(type, blocks, i)); };
    return decode(block_size(type), block_bytes(type), weight);
}

static int step_gdn() {
    const std::string   in{std::istreambuf_iterator<char>(std::cin), {}};
    float               x[3 * 128 + 2];
    std::vector<double> state(128 * 128);
    if (in.size() != sizeof(x) + state.size() * sizeof(double)) {
        return 1;
    }
    memcpy(x, in.data(), sizeof(x));
    memcpy(state.data(), in.data() + sizeof(x), state.size() * sizeof(double));
    std::vector<double> out = gdn_reference(state, x, x + 128, x + 256, x[384], x[385]);
    out.insert(out.end(), state.begin(), state.end());
    std::cout.write(reinterpret_cast<const char *>(out.data()), out.size() * sizeof(double));
    return std::cout.flush() ? 0 : 1;
}

static int convolve() {
    const std::string   in{std::istreambuf_iterator<char>(std::cin), {}};
    float               x[3 * 4 + 7 * 3];
    std::vector<double> state(3 * 3), out;
    if (in.size() != sizeof(x)) {
        return 1;
    }
    memcpy(x, in.data(), sizeof(x));
    for (int token = 0; token < 7; ++token) {
        const std::vector<double> result = conv_reference(state, x + 12 + 3 * token, x, 3);
        out.insert(out.end(), result.begin(), result.end());
    }
    out.insert(out.end(), state.begin(), state.end());
    std::cout.write(reinterpret_cast<const char *>(out.data()), out.size() * sizeof(double));
    return std::cout.flush() ? 0 : 1;
}

int main(int argc, char ** argv) {
    const std::string verb = argc == 2 ? argv[1] : "";
    if (verb == "selftest") {
        return checker_is_sound() ? 0 : 1;
    }
    if (verb == "conv") {
        return convolve();
    }
    if (verb == "gdn") {
        return step_gdn();
    }
    if (verb == "nvfp4") {
        return decode(64, 36, nvfp4_weight);
    }
    if (verb == name_of(weight_type::Q4_0)) {
        return decode_q4(weight_type::Q4_0);
    }
    return verb == name_of(weight_type::Q4_K) ? decode_q4(weight_type::Q4_K) : 2;
}
