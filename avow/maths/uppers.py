r"""The most that each term may be, by its logarithm, for every sketched row: in one pass over the codes.

Token j's term is its weight times the length that goes with it, :math:`\ln t_j = l_j + \ln(\|v_j\| + \nu)`, and the
sketch bounds it from above. A compiler turns unpacking, products and bounds into one loop over bytes, several times as
fast as plain torch, which has to write every code down as a float first; both ways stay within the same bounds, as
those hold for sums in any order, with or without fused multiply-adds.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from avow.maths.brackets import Ends, field, products_with
from avow.maths.fused import Fused
from avow.maths.sketch import Sketch

# Differences of rounding between here and `Ends`: three additions, relative to the products; and relative to
# logarithms of lengths, which are within 90, and to the ends' own, which are rounded outward.
_ADDED, _CONSTANT = 2.0**-21, 2.0**-14


def uppers(
    told: Ends, sketch: Sketch, logged: Float32[Tensor, "b g s"], compiled: bool
) -> list[Float32[Tensor, "r s"]]:
    """For each head, at least factor·q·k + logged, for logarithms within ±90 and products within 1e6.

    Raises `NotCompiled` where a compiler is asked for and there is none.
    """
    b, g, _, d = told.q.shape
    c, rows = sketch.codes.shape[2:4]
    least = (told.least + told.most * _ADDED + _CONSTANT).float() * (1 + 2.0**-20)
    grown, slope = told.grown.float(), told.slope.float() * (1 + 2.0**-20)
    start = told.q @ sketch.zero.float().transpose(-1, -2)  # (b, g, r, c)
    if not compiled:
        middle = products_with(told.q, sketch)
        half = torch.addcmul(least.unsqueeze(-1), slope.unsqueeze(-1), sketch.radius.float().unsqueeze(2))
        half.addcmul_(middle, grown.unsqueeze(-1)).add_(logged.reshape(b, g, 1, c, rows))
        return list(half.flatten(3).flatten(0, 1).unbind())
    planes = sketch.codes.shape[-1] * (8 // field(sketch.bits))
    q, scale = (torch.nn.functional.pad(x, (0, planes - d)) if planes > d else x for x in (told.q, sketch.scale))
    found = []
    for i in range(b):
        for j in range(g):
            # One head at a time: contiguous, so that the same code serves however much room its neighbours have.
            long = (sketch.codes[i, j], scale[i, j], sketch.radius[i, j], logged[i, j].view(c, rows))
            short = (start[i, j].T.contiguous(), least[i, j].T.contiguous())
            found.append(
                _one_head((*long, *short), q[i, j], slope[i, j, :, 0], grown[i, j, 0, 0], sketch.bits).flatten(1)
            )
    return found


def _of_one_head(
    codes: UInt8[Tensor, "c G w"],
    scale: Tensor,
    radius: Tensor,
    logged: Tensor,
    start: Tensor,
    least: Tensor,
    q: Tensor,
    slope: Tensor,
    grown: Tensor,
    bits: int,
) -> Tensor:
    """For each row of q, what `uppers` says: (r, c, G)."""
    width, taken = codes.shape[-1], field(bits)
    last = 8 // taken - 1
    planes = [codes >> (taken * i) if i else codes for i in range(last + 1)]
    # What is shifted furthest has nothing above it.
    planes = [(x & (2**taken - 1) if i < last else x).float() for i, x in enumerate(planes)]
    wide, far = scale.float(), radius.float()
    found = []
    for i in range(q.shape[0]):
        scaled = (q[i] * wide).unsqueeze(1)  # (c, 1, d)
        parts = [x * scaled[..., at * width : (at + 1) * width] for at, x in enumerate(planes)]
        middle = functools.reduce(torch.add, parts).sum(-1) + start[:, i, None]
        found.append(middle * grown + (far * slope[i] + least[:, i, None]) + logged)
    return torch.stack(found)


_one_head = Fused(_of_one_head)
