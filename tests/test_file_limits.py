"""Files that nobody vouched for: read as safetensors reads them, or refused in words before they cost anything."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from avow import calibration_file
from avow.bench import workloads
from avow.cli.parsing import tensor_in
from avow.errors import AvowError, FileError
from avow.file_io import DOCUMENT_BYTES, HEADER_BYTES, Malformed, load_tensors, parse_tensors
from avow.integrations.transformers import read_plan
from avow.integrations.transformers.model_files import load_model
from avow.nn import KeyValueCache
from avow.training import checkpoint, read_config

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.complex64,
)


def framed(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def about(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_what_safetensors_wrote_is_read_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    shapes = [(3, 5), (), (0,), (2, 0, 7), (1, 1, 1, 9)]
    made = {f"{kind} {shape}": torch.randint(255, (*shape, kind.itemsize), dtype=torch.uint8).view(kind).reshape(shape)
            for kind in TYPES for shape in shapes}  # fmt: skip
    made["flags"] = torch.tensor([True, False])
    safetensors.torch.save_file(made, path, {"who": "me"})
    found, metadata = load_tensors(path, "input")
    assert metadata == {"who": "me"} and found.keys() == made.keys()
    for name, x in made.items():
        assert found[name].dtype == x.dtype and found[name].shape == x.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8)), name
    places = [x.untyped_storage().data_ptr() for x in found.values() if x.numel()]
    assert len(set(places)) == len(places), "each in memory of its own"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes are fewer than its header says"),
        (b"\xff" * 9, "9 bytes are fewer than its header says"),
        (framed(b"x" * 10), "its header is not JSON"),
        (framed(b"[" * 100000), "its header is not JSON"),
        (framed(b"\xff{}"), "its header is not JSON"),
        (framed([]), "invalid JSON in header"),
        (framed({"__metadata__": []}), "invalid JSON in header"),
        (framed({"__metadata__": {"a": 1}}), "invalid JSON in header"),
        (framed(b'{"a": {}, "a": {}}'), "a name occurs twice"),
        (framed({"a": 1}), "invalid JSON in header"),
        (framed({"a": about("F31")}), "unknown variant `F31`"),
        (framed({"a": about([])}), "invalid JSON in header"),
        (framed({"a": about(shape=[-2])}), "invalid value: integer `-2`"),
        (framed({"a": about(shape=[True, 2])}), "invalid type: boolean"),
        (framed({"a": about(shape=[0, 2**62, 2**62], offsets=[0, 0])}), "overflow"),
        (framed({"a": about(shape=[2] + [1] * 99)}, bytes(8)), "'a' has a shape that torch cannot count"),
        (framed({"a": about(offsets=[8])}), "invalid length 1"),
        (framed({"a": about(offsets=[8, 0])}), "invalid offset for tensor `a`"),
        (framed({"a": about(), "b": about()}, bytes(8)), "invalid offset for tensor `"),
        (framed({"a": about(offsets=[4, 12])}, bytes(12)), "invalid offset for tensor `a`"),
        (framed({"a": about()}, bytes(7)), "file not fully covered"),
        (framed({"a": about()}, bytes(9)), "file not fully covered"),
        (framed({"a": about("BOOL", [8])}, b"\2" * 8), "'a' holds booleans that are neither 0 nor 1"),
        (framed({"a": about(shape=[2**40], offsets=[0, 2**42])}), "file not fully covered"),
    ],
)
def test_a_malformed_file_is_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(Malformed) as refused:
        parse_tensors(content, HEADER_BYTES)
    assert words in str(refused.value)
    path = tmp_path / "malformed.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError, match="is truncated or no safetensors file"):
        load_tensors(path, "input")


def too_long(kind: str) -> bytes:
    """A file of some kind that is all header."""
    if kind == "gguf":
        return b"GGUF" + struct.pack("<IQQ", 3, 1, 10**6) + bytes(64)
    if kind == "safetensors":
        return framed(b'{"__metadata__":{}}' + b" " * HEADER_BYTES)
    return b'{"model": ' + b"[" * 10 + b" " * DOCUMENT_BYTES


def checkpoint_of(path: Path) -> None:
    checkpoint.load(path.parent, {"format": checkpoint.FORMAT})


READERS: list[tuple[str, Callable[[Path], object], str]] = [
    ("heads.safetensors", workloads.read, "its header has 4194323 bytes, and at most 4194304 are read"),
    ("keys.safetensors", lambda path: tensor_in(path, "keys", "keys"), "at most 4194304 are read"),
    ("cache.safetensors", KeyValueCache.load, "at most 4194304 are read"),
    ("weights.safetensors", checkpoint_of, "at most 4194304 are read"),
    ("model.safetensors", lambda path: load_model(str(path.parent)), "at most 4194304 are read"),
    ("model.gguf", lambda path: load_model(str(path)), "says 1000000 fields and 1 tensors, and at most 4096 fields"),
    ("plan.json", read_plan, "it has more than 4194304 bytes"),
    ("config.json", read_config, "cannot be read (it has more than 4194304 bytes)"),
    ("config.toml", read_config, "cannot be read (it has more than 4194304 bytes)"),
]


@pytest.mark.parametrize(("name", "read", "words"), READERS, ids=[name for name, *_ in READERS])
def test_whatever_reads_a_users_file_limits_its_header(
    tmp_path: Path, name: str, read: Callable[[Path], object], words: str
) -> None:
    if name.startswith("model."):
        (tmp_path / "config.json").write_text("{}")
    path = tmp_path / name
    path.write_bytes(too_long(path.suffix[1:]))
    with pytest.raises(AvowError) as refused:
        read(path)
    assert words in str(refused.value) and str(tmp_path) in str(refused.value)


def test_rates_that_are_too_long_are_no_rates(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    written = '{"date": "2026-01-01T00:00:00+00:00", "fault": "", "found": {}}'
    path.write_text(written + " " * DOCUMENT_BYTES)
    assert calibration_file.recall(path, dict) is None
    path.write_text(written)
    calibration_file.forget_memory()
    found = calibration_file.recall(path, dict)
    assert found is not None and found.found == {}


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(FileError, match=r"is not a plain file; name one that is$"):
            load_tensors(path, "input")
    with pytest.raises(FileError, match=r"input=.*nothing does not exist; check the path$"):
        load_tensors(tmp_path / "nothing", "input")


def test_tensors_that_memory_does_not_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    path = tmp_path / "large"
    path.write_bytes(framed({"a": about()}, bytes(8)))
    monkeypatch.setattr(safetensors, "safe_open", full)
    with pytest.raises(FileError, match=r"\(its tensors do not fit in memory\); write it again"):
        load_tensors(path, "input")
