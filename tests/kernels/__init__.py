"""Tests of kernels/: what a compiler can show here, and the kernels' own tests where there is a GPU."""
