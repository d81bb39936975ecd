"""Files read within limits, and files written whole or not at all.

**Reading.** What a file may cost is known before it is parsed. A parser makes ten to forty bytes of one byte of JSON,
so a file that is all header would cost gigabytes to refuse: headers and documents of JSON or TOML are limited here, for
all of avow. The tensors of a safetensors file are read by that library, each into memory of its own: if the file is
replaced meanwhile, as `write` does, old and new are not mixed, and one that is cut short is refused.

**Writing.** Whatever happens, an error, Ctrl-C, a crash or a power cut, a file is whole or not there. New content is
written beside its place under another name, flushed to the disk, and renamed; then the folder is flushed, since a name
may be lost as content may. If that fails, nothing of it is left.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from avow.errors import FileError
from avow.extras import require

HEADER_BYTES = 1 << 22
"""The longest header of a safetensors file: about forty thousand tensors."""
DOCUMENT_BYTES = 1 << 22
"""The longest document of JSON or TOML."""
GGUF_FIELDS, GGUF_TENSORS = 1 << 12, 1 << 16
"""The most fields and tensors of a GGUF file."""

# Beyond this torch cannot count the elements of a shape, even where one of its sizes is 0.
_ELEMENTS = 1 << 62
_AGAIN = "write it again with safetensors.torch.save_file"


class Malformed(ValueError):
    """What is wrong with the content of a file, in words."""


class Contents(NamedTuple):
    """The tensors of a safetensors file, each in memory of its own, and its metadata."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def load_tensors(path: Path, option: str, remedy: str = _AGAIN) -> Contents:
    """Everything in a safetensors file; what is wrong with it is said of `option`, with this remedy."""
    check_header(path, option, remedy)
    with _explained(path, option, remedy):
        return _read(path)


def parse_tensors(content: bytes, header_bytes: int) -> dict[str, Tensor]:
    """The tensors of a safetensors file in memory; raises `Malformed`, also if its header is too long."""
    _check_safetensors(io.BytesIO(content), header_bytes)
    return _read(content).tensors


def _read(source: Path | bytes) -> Contents:
    """What the library reads from a file or from memory, if torch can use it; raises `Malformed`."""
    # Older ones map files into memory, where one that somebody cuts short would end this process.
    require("safetensors", purpose="to read tensors from a file")
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    try:
        if isinstance(source, bytes):
            contents = Contents(load(source), {})
        else:
            with safe_open(source, "pt", backend="pread") as file:
                contents = Contents(file.get_tensors(), file.metadata() or {})
    except (SafetensorError, RuntimeError, MemoryError, KeyError) as error:
        raise Malformed(str(error)[:200] or "its tensors do not fit in memory") from error
    for name, x in contents.tensors.items():
        if x.ndim > 64 or math.prod(max(size, 1) for size in x.shape) > _ELEMENTS:
            raise Malformed(f"{name[:40]!r} has a shape that torch cannot count")
        if x.dtype == torch.bool and x.numel() and int(x.view(torch.uint8).amax()) > 1:
            raise Malformed(f"{name[:40]!r} holds booleans that are neither 0 nor 1")
    return contents


def check_header(path: Path, option: str, remedy: str) -> None:
    """Raise where reading a safetensors or GGUF header costs too much; what it says is left to other libraries."""
    with _explained(path, option, remedy), path.open("rb") as file:
        _check_gguf(file) if path.suffix == ".gguf" else _check_safetensors(file, HEADER_BYTES)


def read_document(path: Path) -> str:
    """The text of a file of JSON or TOML in UTF-8; raises `OSError`, and `ValueError` where it is too long."""
    with path.open("rb") as file:
        content = file.read(DOCUMENT_BYTES + 1)
    if len(content) > DOCUMENT_BYTES:
        raise ValueError(f"it has more than {DOCUMENT_BYTES} bytes")
    return content.decode("utf-8")


@contextlib.contextmanager
def _explained(path: Path, option: str, remedy: str) -> Iterator[None]:
    """Inside, whatever is wrong with a file, on the way to it or in it, is said of `option`."""
    try:
        if path.exists() and not path.is_file():
            raise FileError(option, path, "is not a plain file", "name one that is")
        yield
    except FileNotFoundError as error:
        raise FileError(option, path, "does not exist", "check the path") from error
    except OSError as error:
        raise FileError(option, path, f"cannot be read ({error.strerror})", "name a readable file") from error
    except Malformed as error:
        kind = "GGUF" if path.suffix == ".gguf" else "safetensors"
        raise FileError(option, path, f"is truncated or no {kind} file ({error})", remedy) from error


def _check_safetensors(file: BinaryIO, most: int) -> None:
    """Raise if the header of a safetensors file is longer than `most` bytes or holds a name twice."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise Malformed(f"{size} bytes are fewer than its header says")
    if length > most:
        raise Malformed(f"its header has {length} bytes, and at most {most} are read")

    def once(pairs: list[tuple[str, Any]]) -> None:
        # Of two values under one name, readers would take different ones.
        if len(dict(pairs)) != len(pairs):
            raise Malformed("a name occurs twice")

    try:
        json.loads(file.read(length), object_pairs_hook=once)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its header is not JSON: {str(error)[:80]}") from error


def _check_gguf(file: BinaryIO) -> None:
    start = file.read(24)
    if len(start) < 24 or start[:4] != b"GGUF":
        raise Malformed("it does not begin as one")
    tensors, fields = struct.unpack("<8xQQ", start)
    if fields > GGUF_FIELDS or tensors > GGUF_TENSORS:
        most = f"{GGUF_FIELDS} fields and {GGUF_TENSORS} tensors"
        raise Malformed(f"it says {fields} fields and {tensors} tensors, and at most {most} are read")


def write(path: Path, content: str | bytes) -> None:
    """Put content where `path` says, all of it or none: whatever stood there stays until the new file is whole."""
    with _beside(path) as temporary:
        put(temporary, content)
        settle(temporary, path)


def ready(path: Path) -> None:
    """Make the folder of a file to come and try it, or say why it cannot be written: before the work, not after it."""
    # Only trying tells: rights do not speak of /proc, of a full disk, of names that are too long.
    with _beside(path) as temporary:
        temporary.touch(exist_ok=False)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name beside that of a file to come, in a folder that is there; whatever happens, nothing is left under it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError("path", path, f"has no folder ({error.strerror})", "name another place") from error
    # Not those of Path, which raise where a name is too long.
    if os.path.isdir(path):
        raise FileError("path", path, "is a folder", "name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError("path", path, "is not a plain file", "name another place")  # A device must not be replaced.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
    except OSError as error:
        raise FileError("path", path, f"cannot be written ({error.strerror})", "name another place") from error
    finally:
        # Where nothing could be written, nothing can be removed either.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remedy(error: OSError) -> str:
    """What to do about a file that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "make room" if full else "let this process write there"


def put(path: Path, content: str | bytes) -> None:
    """Write a file that was not there, down to the disk."""
    with path.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def settle(temporary: Path, final: Path) -> None:
    """Give a file, or a folder whose files are on the disk, its name: in one moment, and for good."""
    if temporary.is_dir():
        _flush(temporary)
    os.replace(temporary, final)
    _flush(final.parent)


def _flush(folder: Path) -> None:
    """Make the names in a folder durable, not only the contents of its files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
