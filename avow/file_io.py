"""Files read within limits, and files written whole or not at all.

**Reading.** What a file may cost is known before it is parsed. A parser makes ten to forty bytes of one byte of JSON,
so a file that is all header would cost gigabytes to refuse: headers and documents of JSON or TOML are limited here, for
all of avow. A file is opened once and read from that handle: if it is replaced meanwhile, as `write` does, old and new
are not mixed.

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

HEADER_BYTES = 1 << 22
"""The longest header of a safetensors file: about forty thousand tensors."""
DOCUMENT_BYTES = 1 << 22
"""The longest document of JSON or TOML."""
GGUF_FIELDS, GGUF_TENSORS = 1 << 12, 1 << 16
"""The most fields and tensors of a GGUF file."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
# Beyond this torch cannot count the elements of a shape, even where one of its sizes is 0.
_ELEMENTS = 1 << 62
_AGAIN = "write it again with safetensors.torch.save_file"


class Malformed(ValueError):
    """What is wrong with the content of a file, in words."""


class Entry(NamedTuple):
    """A tensor of a file before it is read; its bytes begin at `start`, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """What a safetensors file says it holds, found to fit its size; the entries stand in the order of their bytes."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


class Contents(NamedTuple):
    """The tensors of a safetensors file, each in memory of its own, and its metadata."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_header(file: BinaryIO, most: int = HEADER_BYTES) -> Header:
    """The header, of at most so many bytes, of a safetensors file, which is left where its first tensor begins.

    Raises `Malformed`, at no more cost than reading so many bytes of JSON.
    """
    size, length = _extent(file, most)
    try:
        plain = json.loads(file.read(length), object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its header is not JSON: {str(error)[:80]}") from error
    if not isinstance(plain, dict):
        raise Malformed("its header is not an object")
    metadata = plain.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise Malformed("its metadata are not strings")
    entries = {name: _entry(name, about) for name, about in plain.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)))
    end = 0
    for name, entry in ordered.items():
        if entry.start != end:
            raise Malformed(f"{name[:40]!r} begins at byte {entry.start}, not at {end}")
        end += entry.nbytes
    if end != size - 8 - length:
        raise Malformed(f"its tensors take {end} bytes, and it has {size - 8 - length} for them")
    return Header(ordered, metadata)


def read_tensors(file: BinaryIO, header: Header) -> dict[str, Tensor]:
    """The tensors of a file whose header was just read, each in memory of its own; raises `Malformed`."""
    tensors = {}
    for name, entry in header.entries.items():
        try:
            x = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")  # whatever the default device is
        except RuntimeError as error:
            raise Malformed(f"there is no memory for {name[:40]!r} of {entry.nbytes} bytes") from error
        as_bytes = x.reshape(-1).view(torch.uint8)
        # A file that someone cuts short, rather than replaces, ends early.
        if entry.nbytes and file.readinto(as_bytes.numpy()) != entry.nbytes:  # type: ignore[attr-defined]  # a raw file
            raise Malformed(f"it ends within {name[:40]!r}")
        if entry.dtype == torch.bool and entry.nbytes and int(as_bytes.amax()) > 1:
            raise Malformed(f"{name[:40]!r} holds booleans that are neither 0 nor 1")
        tensors[name] = x
    return tensors


def load_tensors(path: Path, option: str, remedy: str = _AGAIN) -> Contents:
    """Everything in a safetensors file; what is wrong with it is said of `option`, with this remedy."""
    with _opened(path, option, remedy) as file:
        header = read_header(file)
        return Contents(read_tensors(file, header), header.metadata)


def check_header(path: Path, option: str, remedy: str) -> None:
    """Raise where another library could not read the header of a safetensors or GGUF file at a small cost.

    What the header says is left to that library, which may know more types.
    """
    with _opened(path, option, remedy) as file:
        _check_gguf(file) if path.suffix == ".gguf" else _extent(file, HEADER_BYTES)


def read_document(path: Path) -> str:
    """The text of a file of JSON or TOML in UTF-8; raises `OSError`, and `ValueError` where it is too long."""
    with path.open("rb") as file:
        content = file.read(DOCUMENT_BYTES + 1)
    if len(content) > DOCUMENT_BYTES:
        raise ValueError(f"it has more than {DOCUMENT_BYTES} bytes")
    return content.decode("utf-8")


@contextlib.contextmanager
def _opened(path: Path, option: str, remedy: str) -> Iterator[BinaryIO]:
    """A file to read; whatever is wrong with it, on the way to it or inside, is said of `option`."""
    try:
        if path.exists() and not path.is_file():
            raise FileError(option, path, "is not a plain file", "name one that is")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise FileError(option, path, "does not exist", "check the path") from error
    except OSError as error:
        raise FileError(option, path, f"cannot be read ({error.strerror})", "name a readable file") from error
    except Malformed as error:
        kind = "GGUF" if path.suffix == ".gguf" else "safetensors"
        raise FileError(option, path, f"is truncated or no {kind} file ({error})", remedy) from error


def _extent(file: BinaryIO, most: int) -> tuple[int, int]:
    """The bytes of a safetensors file and of its header, where the file is left."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise Malformed(f"{size} bytes are fewer than its header says")
    if length > most:
        raise Malformed(f"its header has {length} bytes, and at most {most} are read")
    return size, length


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of two values under one name, readers would take different ones."""
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise Malformed("a name stands there twice")
    return plain


def _entry(name: str, about: Any) -> Entry:
    shown = repr(name[:40])
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"{shown} does not have dtype, shape and data_offsets")
    dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise Malformed(f"{shown} is of type {str(dtype)[:20]!r}; known are {', '.join(_DTYPES)}")
    if not _counts(shape) or len(shape) > 64 or math.prod(max(x, 1) for x in shape) > _ELEMENTS:
        raise Malformed(f"{shown} has a shape that is not a list of sizes")
    if not _counts(offsets) or len(offsets) != 2:
        raise Malformed(f"{shown} has data_offsets that are not two places")
    entry = Entry(_DTYPES[dtype], tuple(shape), offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise Malformed(f"{shown} takes {entry.nbytes} bytes, and its data_offsets say {offsets[1] - offsets[0]}")
    return entry


def _counts(x: Any) -> bool:
    return isinstance(x, list) and all(type(one) is int and 0 <= one <= _ELEMENTS for one in x)


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
    _place(path)
    with _beside(path) as temporary:
        put(temporary, content)
        settle(temporary, path)


def ready(path: Path) -> None:
    """Make the folder of a file to come and try it, or say why it cannot be written: before the work, not after it."""
    _place(path)
    # Only trying tells: rights do not speak of /proc, of a full disk, of names that are too long.
    with _beside(path) as temporary:
        temporary.touch(exist_ok=False)


def _place(path: Path) -> None:
    """Make the folder of a file to come; what is not a file is never replaced by one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError("path", path, f"has no folder ({error.strerror})", "name another place") from error
    # Not those of Path, which raise where a name is too long.
    if os.path.isdir(path):
        raise FileError("path", path, "is a folder", "name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError("path", path, "is not a plain file", "name another place")  # A device must not be replaced.


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name beside a file's; whatever happens, nothing is left under it."""
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
