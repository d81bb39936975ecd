"""Tensors and facts in one file that is whole or refused: safetensors with a digest over all it holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from avow import atomic
from avow.errors import FileError

FORMAT = "avow key-value cache 2"


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Put tensors and facts where `path` says, all or none: what stood there stays until the new file is whole."""
    from safetensors.torch import save

    content = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    told = json.dumps(facts, sort_keys=True)
    atomic.write(path, save(content, {"format": FORMAT, "facts": told, "digest": _digest(content, told)}))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts that `write` put there, after the digest was found right."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            # Copies: the tensors of an open file change, or end the process, when the file does.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except FileNotFoundError as problem:
        raise FileError("path", path, "does not exist", "check the path") from problem
    except OSError as problem:
        raise FileError("path", path, f"cannot be read ({problem.strerror})", "name a readable file") from problem
    except (SafetensorError, ValueError) as problem:
        rule = f"is truncated or no safetensors file ({problem})"
        raise FileError("path", path, rule, "save the cache again") from problem
    if about.get("format") != FORMAT:
        raise FileError("path", path, f"is no {FORMAT!r}", "name a file that KeyValueCache.save wrote")
    if about.get("digest") != _digest(tensors, about.get("facts", "")):
        raise FileError("path", path, "is damaged: its digest is not that of what it holds", "save the cache again")
    return tensors, json.loads(about["facts"])


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    found = hashlib.sha256(facts.encode())
    for name, x in sorted(tensors.items()):
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        found.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
