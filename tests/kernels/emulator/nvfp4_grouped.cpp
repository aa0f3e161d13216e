// The proof of nvfp4_grouped on the CPU: its kernels' own source, translated by tests/kernels/emulate.py.
//
// nvfp4_grouped edges [RUNG]    the harness's edges of the tables' configurations, or of one of these by its number

#define NVFP4_GROUPED_FEW_RUNGS

#include "nvfp4_grouped/proof.cuh"

int main(int argc, char ** argv) {
    if (argc < 2 || argv[1] != std::string("edges")) {
        return 2;
    }
    const std::vector<rung> rungs  = rungs_here();
    bool                    passed = true;
    for (size_t i = 0; i < rungs.size(); ++i) {
        if (argc == 2 || i == (size_t) atoi(argv[2])) {
            passed = rung_is_right(rungs[i], true) && passed;
        }
    }
    return passed && (argc > 2 || plans_are_right()) ? 0 : 1;
}
