// The library of kbit.py on the CPU: its kernels' own source, translated by tests/kernels/emulate.py, as a shared library.

#include "kbit/kbit_library.cu"

// That memory of the caller's is device memory.
extern "C" void emulated_memory(const char * begin, size_t size) { emulated_allocations[begin] = size; }
