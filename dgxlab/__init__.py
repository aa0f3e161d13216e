"""Experiments on llama.cpp builds, run on a remote host, with numbers that can be traced."""

__version__ = "0.1.0"
