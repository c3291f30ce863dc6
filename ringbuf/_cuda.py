"""Page-locked for CUDA: copies between a device and a ring are then DMA, asynchronous, with no staging copy.

Rule 1: no CUDA of our own. The runtime that the program has loaded (torch's) registers the memory, by its C API.
Rule 2: memory is unregistered before it is unmapped.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ringbuf._errors import CudaFailed

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every context of the process


class CudaRuntime:
    """The CUDA runtime that the program has loaded. Raises CudaFailed: there is none."""

    def __init__(self) -> None:
        self._library = _loaded_runtime()

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of its C API on this thread's current device. arguments: as ctypes takes them.

        Raises CudaFailed.
        """
        if code := getattr(self._library, function)(*arguments):
            self._library.cudaGetLastError()  # clears the error, which torch's next call would report
            describe = self._library.cudaGetErrorString
            describe.restype = ctypes.c_char_p
            raise CudaFailed(function, code, describe(code).decode())


class Registration:
    """Page-locks the ``size`` bytes at ``address`` until ``close``. Raises CudaFailed.

    device: the device in whose context to register, so that no context is made on another one; None: the current one.
    """

    def __init__(self, address: int, size: int, device: int | None = None) -> None:
        self._runtime, self._device = CudaRuntime(), device
        self._address = ctypes.c_void_p(address)
        self._call("cudaHostRegister", self._address, ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE))

    def close(self) -> None:
        """Raises CudaFailed."""
        self._call("cudaHostUnregister", self._address)

    def _call(self, function: str, *arguments: object) -> None:
        """Call a function with the device as the current one: in a thread of its own, as each thread has its own."""
        if self._device is None:
            self._runtime.call(function, *arguments)
            return
        # To set a device makes a context on it, so the caller's thread could not be set back without making one there.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._runtime.call, "cudaSetDevice", ctypes.c_int(self._device)).result()
            thread.submit(self._runtime.call, function, *arguments).result()


def _loaded_runtime() -> ctypes.CDLL:
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line[line.find("/") :].rstrip("\n")
            if os.path.basename(path).startswith("libcudart"):
                return ctypes.CDLL(path)
    raise CudaFailed("loading CUDA", None, "no CUDA runtime is loaded in this process: import a torch with CUDA")
