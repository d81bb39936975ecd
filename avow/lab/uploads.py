"""Tensors that a reader gives the lab: safetensors only, in memory only, few and not too large."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from typing import Any

import torch
from starlette.requests import Request

from avow import file_io
from avow.core import DTYPES, dtype_name
from avow.errors import DtypeError, FileError, NonFiniteError, ShapeError
from avow.lab.security import Refused, read_body

_TENSORS = 8
_HEADER_BYTES, _FILE_BYTES = 1 << 16, 1 << 25
_DIMENSIONS = 4
_ELEMENTS = 1 << 23
# A reader compares a few files; older ones make room.
_FILES = 4
# Files that are received and read at once; the others wait so many seconds, and what they send with them.
_AT_ONCE, _WAIT_SECONDS = 2, 20.0


def tensors_of(content: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, each within the limits; nothing of it is ever run."""
    try:
        tensors = file_io.parse_tensors(content, _HEADER_BYTES)
    except file_io.Malformed as error:
        rule = f"is not a safetensors file ({str(error)[:120]})"
        raise FileError("file", f"{len(content)} bytes", rule, "write it with safetensors.torch.save_file") from None
    if not 1 <= len(tensors) <= _TENSORS:
        raise FileError("file", f"{len(tensors)} tensors", f"must hold 1 to {_TENSORS}", "save q, k and v alone")
    for name, x in tensors.items():
        shown = repr(name[:40])
        if x.dtype not in DTYPES:
            raise DtypeError(shown, x.dtype, "must be floating point", "convert it before saving")
        if not 1 <= x.ndim <= _DIMENSIONS or not 1 <= x.numel() <= _ELEMENTS:
            rule = f"must have 1 to {_DIMENSIONS} axes and 1 to {_ELEMENTS} numbers"
            raise ShapeError(shown, tuple(x.shape), rule, "save a slice of it")
        if not bool(x.isfinite().all()):
            raise NonFiniteError(shown, "nan or inf", "must be finite", "remove nan and inf before saving")
    return tensors


class FileStore:
    """Files by the handles that pages know them by: the last few, in memory."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def receive(self, request: Request) -> dict[str, Any]:
        """Take a file in its turn, check it and keep it; its handle, and what it holds."""
        try:
            await asyncio.wait_for(self._turns.acquire(), _WAIT_SECONDS)
        except TimeoutError:
            rule = f"had to wait for {_AT_ONCE} other files for {_WAIT_SECONDS:g} s"
            raise Refused(503, "file", "unread", rule, "try again in a moment") from None
        try:
            return await asyncio.to_thread(self.put, await read_body(request, _FILE_BYTES, "file"))
        finally:
            self._turns.release()

    def put(self, content: bytes) -> dict[str, Any]:
        tensors, handle = tensors_of(content), secrets.token_hex(8)
        self._files[handle] = content
        while len(self._files) > _FILES:
            self._files.popitem(last=False)
        held = {name: {"shape": list(x.shape), "dtype": dtype_name(x.dtype)} for name, x in tensors.items()}
        return {"file": handle, "tensors": held}

    def get(self, handle: str) -> bytes:
        if handle not in self._files:
            raise FileError("file", handle, "is no longer stored", "upload it again")
        self._files.move_to_end(handle)
        return self._files[handle]
