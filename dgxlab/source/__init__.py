"""Pins: llama.cpp's commits in the client's cache, from a git URL, a clone or the PyPI sdist.

cache       the bare repository that holds them, and packs for hosts
names       commits by tag, branch or the beginning of an id
packages    downloads from the package index: the sdist, and wheels of build tools
git         git with settings of its own
programs    running a program on this machine, its disk, lock files
"""

from dgxlab.source.cache import PinCache
from dgxlab.source.names import full_id
from dgxlab.source.programs import cache_path
