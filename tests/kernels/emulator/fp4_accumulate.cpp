// The proof of fp4_accumulate on the CPU: its kernel's own source, translated by tests/kernels/emulate.py.

#include "fp4_accumulate/proof.cuh"

int main() {
    return all_edges() ? 0 : 1;
}
