// What `make spills` compiles: every kernel in every configuration that kbit_library.cu can launch.

#include "kbit_library.cu"
