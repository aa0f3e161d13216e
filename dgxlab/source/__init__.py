"""Pins: llama.cpp's commits in the client's cache, from a git URL, a clone or the PyPI sdist.

cache       the bare repository that holds them, and packs for hosts
sdist       the repository inside llama-cpp-python's source archive
git         git with settings of its own (programs: running any program, disk: what a full one looks like)
"""

from dgxlab.source.cache import PinCache, default_path

__all__ = ["PinCache", "default_path"]
