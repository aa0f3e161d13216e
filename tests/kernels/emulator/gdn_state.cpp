// The proof of gdn_state on the CPU: its kernel's own source, translated by tests/kernels/emulate.py.
//
// gdn_state edges    the harness's edges, fewer of their shapes

#include "gdn_state/proof.cuh"

int main(int argc, char ** argv) {
    return argc == 2 && argv[1] == std::string("edges") ? !edges({{1, 1, 1}, {2, 4, 2}}) : 2;
}
