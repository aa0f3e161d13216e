// The parts of the harnesses that need no GPU.
//
// host selftest    exit status 0 if the checker fails what is wrong
// host nvfp4       NVFP4 blocks on stdin, their weights on stdout as doubles

#include "common/check_selftest.cuh"
#include "nvfp4_dequant/reference.cuh"

#include <iostream>
#include <iterator>
#include <string>

static int nvfp4() {
    const std::string blocks{std::istreambuf_iterator<char>(std::cin), {}};
    for (size_t i = 0; i < blocks.size() / 36 * 64; ++i) {
        const double weight = nvfp4_weight(reinterpret_cast<const uint8_t *>(blocks.data()), i);
        std::cout.write(reinterpret_cast<const char *>(&weight), sizeof(weight));
    }
    return std::cout.flush() ? 0 : 1;
}

int main(int argc, char ** argv) {
    const std::string verb = argc == 2 ? argv[1] : "";
    return verb == "selftest" ? !checker_is_sound() : verb == "nvfp4" ? nvfp4() : 2;
}
