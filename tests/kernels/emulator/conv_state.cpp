// The proof of conv_state on the CPU: its kernel's own source, translated by tests/kernels/emulate.py.
//
// conv_state edges    the harness's edges

#include "conv_state/proof.cuh"

int main(int argc, char ** argv) {
    return argc == 2 && argv[1] == std::string("edges") ? !edges(EDGES) : 2;
}
