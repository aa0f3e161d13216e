"""How fast GPUs copy within their memory: what their memory really gives, through CUDA's driver, without a compiler."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Iterator
from statistics import median
from typing import Any
from uuid import UUID

from dgxlab.errors import RemoteError

_SIZE = 1 << 30  # bytes of a copy, far more than any cache; a quarter of the free memory, if that is less
_WARM_S = 0.3  # time of copying before the first copy that counts: an idle memory has a lower clock
_COPIES = 11

_Pointer = ctypes.c_uint64


def bandwidths(gpus: Collection[str]) -> dict[str, float]:
    """Return the bandwidth of a copy on each of these GPUs, in GB/s read and written together, by uuid.

    Raises RemoteError if the driver refuses; {} if there is none.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}
    return {uuid: _measured(driver, device) for uuid, device in _devices(driver) if uuid in gpus}


def _devices(driver: ctypes.CDLL) -> Iterator[tuple[str, ctypes.c_int]]:
    n, device, raw = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGetCount", ctypes.byref(n))
    for ordinal in range(n.value):
        _call(driver, "cuDeviceGet", ctypes.byref(device), ordinal)
        _call(driver, "cuDeviceGetUuid", ctypes.byref(raw), device)
        yield f"GPU-{UUID(bytes=bytes(raw))}", ctypes.c_int(device.value)


def _measured(driver: ctypes.CDLL, device: ctypes.c_int) -> float:
    context, begin, end = (ctypes.c_void_p() for _ in range(3))
    free, total, source, target = ctypes.c_size_t(), ctypes.c_size_t(), _Pointer(), _Pointer()
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(driver, "cuCtxSetCurrent", context)
    _call(driver, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    size = ctypes.c_size_t(min(_SIZE, free.value // 4))
    for buffer in (source, target):
        _call(driver, "cuMemAlloc_v2", ctypes.byref(buffer), size)
    for event in (begin, end):
        _call(driver, "cuEventCreate", ctypes.byref(event), 0)

    def copy_ms() -> float:
        took = ctypes.c_float()
        _call(driver, "cuEventRecord", begin, None)
        _call(driver, "cuMemcpyDtoDAsync_v2", target, source, size, None)
        _call(driver, "cuEventRecord", end, None)
        _call(driver, "cuEventSynchronize", end)
        _call(driver, "cuEventElapsedTime", ctypes.byref(took), begin, end)
        return took.value

    warm = time.monotonic() + _WARM_S
    while time.monotonic() < warm:
        copy_ms()
    return 2 * size.value / 1e6 / median(copy_ms() for _ in range(_COPIES))


def _call(driver: ctypes.CDLL, name: str, *args: Any) -> None:
    """Call a function of the driver, whose memory the process's end frees; raises RemoteError if it fails."""
    if status := getattr(driver, name)(*args):
        raise RemoteError(f"CUDA's driver answers {status} to {name}", next="nvidia-smi")
