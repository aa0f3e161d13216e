// What `make spills` compiles: the function in the smallest kernel around it, for every number of columns.

#include "product.cuh"

template <fp4_type type, int... columns> static auto instances() {
    return (fp4_product<type, columns, false>, ...);
}

const auto NVFP4 = instances<fp4_type::NVFP4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128>();
const auto MXFP4 = instances<fp4_type::MXFP4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128>();
