"""Weights in closed form, for a terminal, a JSON document and a file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from avow.core import dtype_name
from avow.extras import require
from avow.report import formatting
from avow.report.terminal import Columns
from avow.theory.constructions.construction import Construction, Proof

# A terminal shows this many numbers of a tensor.
_SHOWN = 6


def weights_table(construction: Construction) -> Columns:
    """Every tensor by name, with its shape, its type and its first numbers."""
    rows = []
    for name, x in construction.tensors().items():
        numbers = [formatting.number(float(number)) for number in x.flatten()[:_SHOWN].tolist()]
        more = ", …" if x.numel() > _SHOWN else ""
        shape = " × ".join(map(str, x.shape)) or "one number"
        rows.append((Text(name, "bold"), shape, dtype_name(x.dtype), ", ".join(numbers) + more))
    return Columns("lllw", ("", "", "", ""), rows)


def proof_lines(proof: Proof) -> Iterator[RenderableType]:
    """A proof line by line, each wrapped under its own beginning."""
    first, *rest = str(proof).splitlines()
    yield Text(first, "bold" if proof else "bold red")
    for line in rest:
        text = line.lstrip(" -")
        hanging = Table.grid()
        hanging.add_row(line.removesuffix(text), Text(text))
        yield hanging


def plain(construction: Construction, proof: Proof, most: int) -> dict[str, Any]:
    """A construction and its proof as JSON has them; tensors of more than `most` numbers come without them."""
    from avow.theory.claims.evidence import as_json

    return {
        "promise": construction.promise,
        "bound": construction.bound,
        "proof": {
            "holds": proof.holds,
            "achieved": proof.achieved if math.isfinite(proof.achieved) else None,
            "steps": list(proof.steps),
        },
        "tensors": {
            name: {
                "shape": list(x.shape),
                "dtype": dtype_name(x.dtype),
                "values": as_json(x.tolist()) if x.numel() <= most else None,
            }
            for name, x in construction.tensors().items()
        },
        "picture": as_json(construction.picture().plain()),
    }


def safetensors_bytes(construction: Construction, proof: Proof) -> bytes:
    """A safetensors file: the weights, and beside them what they promise and what was proved."""
    require("safetensors", purpose="to save weights")
    from safetensors.torch import save

    metadata = {
        "made_by": f"avow.{type(construction).__name__}",
        "promise": construction.promise,
        "bound": repr(construction.bound),
        "proved": repr(proof.achieved),
    }
    return save({name: x.contiguous() for name, x in construction.tensors().items()}, metadata)
