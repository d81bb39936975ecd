"""What a sketch says of its rows, as tests compare it with the rows."""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor

from avow.numerics.sketch import Sketch, unpacked


def restored(sketch: Sketch) -> Float32[Tensor, "b g s d"]:
    """The rows as the sketch has them, divided by `size`, rounded to float32."""
    codes = unpacked(sketch.codes, sketch.bits)[..., : sketch.zero.shape[-1]].float()
    zero, scale = (x.float().unsqueeze(-2) for x in (sketch.zero, sketch.scale))
    return torch.addcmul(zero, codes, scale).flatten(2, 3)  # (b, g, c·G, d)
