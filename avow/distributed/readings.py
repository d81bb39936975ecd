"""What a shard read of its tokens on the way to an answer that all shards gave."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float64, Int
from torch import Tensor


class Kept(NamedTuple):
    """Tokens of one shard that some rows count, and by how much."""

    rows: slice
    head: Int[Tensor, " m"]
    place: Int[Tensor, " m"]
    logs: Float64[Tensor, "m r"]
    """Logits, less the logarithms of odds; −inf where a row does not count a token."""


class Reading(NamedTuple):
    """How many tokens each row read in full: in all shards, and in this one; and the answer before it was rounded, the
    logarithm of its normaliser, and what this shard has in both.
    """

    everywhere: Float64[Tensor, "b h n"]
    here: Float64[Tensor, "b h n"]
    out: Float64[Tensor, "b h n e"]
    lse: Float64[Tensor, "b h n"]
    kept: tuple[Kept, ...]
    """Empty where no gradient will be asked for."""
