"""Room for tensors in memory of the host that a GPU reads and writes by its address, over the bus.

The pages are locked and known to the GPU's page tables. A tensor there is one of the GPU's: kernels take its pointer as
that of any other, and reading it takes no memory on the GPU. `host_of` is the same memory as a tensor of the CPU's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from avow.errors import ParameterError

# Blocks by their first address.
_BLOCKS: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
# Blocks that were let go while a CUDA graph was captured, when nothing may wait for the device.
_LATER: list[tuple[Tensor, torch.device]] = []
_PAGE, _LARGE_PAGE = 4096, 2**21
_REMEDY = "lower capacity=, give the machine more memory, or make the cache without offload"


class _Block:
    """Locked pages, which go back when the last tensor that lies there is gone, and the GPU is done with them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.device, self._locked = device, False
        while _LATER:
            _let_go(*_LATER.pop())
        try:
            # Whole pages of its own: what is locked must not overlap.
            pages = torch.empty(count + 2 * _PAGE, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise ParameterError("offload", True, _rule(count, str(error).partition("\n")[0]), _REMEDY) from error
        self.host = pages[-pages.data_ptr() % _PAGE :][:count]
        ask_for_large_pages(self.host)
        with torch.cuda.device(device):
            fault = int(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), -(-count // _PAGE) * _PAGE, 0))
        if fault:
            # The next launch would report this fault as its own.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            raise ParameterError("offload", True, _rule(count, f"CUDA's error {fault}"), _REMEDY)
        self._locked = True
        _BLOCKS[self.host.data_ptr()] = self

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What makes a tensor of the GPU's of it."""
        return {"shape": self.host.shape, "typestr": "|u1", "data": (self.host.data_ptr(), False), "version": 3}

    def __del__(self) -> None:
        if not self._locked or sys.is_finalizing():
            return
        if torch.cuda.is_current_stream_capturing():
            _LATER.append((self.host, self.device))
        else:
            _let_go(self.host, self.device)


def _let_go(host: Tensor, device: torch.device) -> None:
    # Kernels that were started may still read or write there.
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def _rule(count: int, why: str) -> str:
    return f"needs {count:,} bytes of the host's memory that the GPU can read, which it did not get ({why})"


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a device in memory of the host; its numbers are anything.

    Raises:
        ParameterError: there is not that much memory, or the device does not read it by its address.
    """
    count = math.prod(shape) * dtype.itemsize
    if not count or device.type != "cuda":
        # Where kernels are interpreted, memory of the CPU's stands for both.
        return torch.empty(shape, dtype=dtype, device=device)
    block = _Block(count, device)
    with torch.cuda.device(device):
        there = torch.as_tensor(block, device=device)
    if there.data_ptr() != block.host.data_ptr():
        rule = "needs a GPU that reads the host's memory by its address, which this one does not"
        raise ParameterError("offload", True, rule, "make the cache without offload")
    return there.view(dtype).view(shape)


def host_of(x: Tensor) -> Tensor | None:
    """The memory of a tensor as one of the CPU's, if it lies in memory of the host that `room` gave; else None."""
    if x.device.type == "cpu":
        return x
    block = _BLOCKS.get(x.untyped_storage().data_ptr())
    if block is None:
        return None
    host = block.host.view(x.dtype)
    return host.as_strided(x.shape, x.stride(), host.storage_offset() + x.storage_offset())


def ask_for_large_pages(x: Tensor) -> None:
    """Have Linux keep a tensor that was just made in pages of 2 MiB, where it leaves that to programs.

    Reading all of a long cache takes a sixth less time then. Elsewhere, and if it is refused, nothing changes.
    """
    first, last = -(-x.data_ptr() // _LARGE_PAGE), (x.data_ptr() + x.nbytes) // _LARGE_PAGE
    if sys.platform == "linux" and last > first:
        span = ctypes.c_size_t((last - first) * _LARGE_PAGE)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first * _LARGE_PAGE), span, mmap.MADV_HUGEPAGE)


@functools.cache
def refused(device: torch.device) -> str:
    """Why tensors of a device cannot be in memory of the host; nothing if they can."""
    if device.type != "cuda":
        return f"is for GPUs, and the cache is on {device.type}, whose memory is the host's"
    try:
        there = room((64,), torch.uint8, device)
        host = host_of(there)
        assert host is not None
        host.fill_(7)
        there += 1
        torch.cuda.synchronize(device)
        if int(host.sum()) == 8 * 64 == int(there.sum()):
            return ""
    except (ParameterError, RuntimeError, AssertionError) as error:
        return f"needs a GPU that reads the host's memory by its address ({str(error).splitlines()[0]})"
    return "needs a GPU that reads the host's memory by its address, and this one reads something else"
