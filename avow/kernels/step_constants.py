"""What the kernels of a step agree on: how terms are counted, how rows are tiled, and how far products may be off."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from avow.numerics.rounding import gamma, unit

# Terms are counted in eighths of an octave.
STEPS = 8
# The largest term there is, in steps: far below the 2^22 that the sketch pass can round.
LIMIT = 2**21
LOWEST_TERM = tl.constexpr(-LIMIT)
# Rows that share a key head, at most: its query heads times the queries of each. And in the smallest tile of a tensor
# core, of which there are powers of two.
ROWS, FEWEST = 64, 8


def relative_error(d: int) -> float:
    """What a product with a sketched row may be off, relative to the query's length and the group's reach.

    Queries times scales are rounded to float16, |q_c·scale_c·code| summing to ‖q‖·reach at most; both products, with
    the codes and with the zeros (with these in up to three parts), are summed in float32 (on tensor cores, with twice
    its unit); bringing them to steps and adding them up takes less than 2^-20.
    """
    half, u = unit(torch.float16), 2 * unit(torch.float32)
    return half + (gamma(d + 8, u) + gamma(3 * d + 8, u)) * (1 + half) + 2.0**-20


def absolute_error(d: int) -> float:
    """The same for products that are too small for float16: each by 2^-25, lifted by 2^12, times a code of 240."""
    return d * 240 * 2.0**-25 * 2.0**-12 + 2.0**-60


class StepShape(NamedTuple):
    """What a kernel of a step is compiled for; fields that it does not read stay at their defaults."""

    R: int  # rows to a key head, in tiles of RP, of which so many are looked at in turns as divide R
    RP: int = 1
    TURN: int = 1
    D: int = 0  # width of queries and keys, in tiles of DP, and of codes, two to a byte, in tiles of WP
    DP: int = 0
    WP: int = 0
    E: int = 0  # width of values, in tiles of EP
    EP: int = 0
    BLOCK: int = 0  # tokens that a program lists at once
    ENOUGH: int = 0  # tokens that a histogram counts, of more than twice as many
    HEADS: int = 0  # powers of two that are at least the number of key heads, and of spans of a list
    SPANS: int = 0
    PROGRAMS: int = 0  # programs that share lists, or a power of two that is at least as many as look at a head
    PARTS: int = 0  # parts whose largest logits are compared at once, and parts that are merged at once
    CHUNK: int = 0
    LARGEST: float = 0.0  # what the type of answers can hold
    FAST: bool = True  # whether the device has instructions of its own


def tile_of(rows: int) -> int:
    """The tile of a tensor core that so many rows fit in."""
    return max(FEWEST, triton.next_power_of_2(rows))


def turn_of(rows: int) -> int:
    """How many rows to look at in a turn, so that turns are equal: loops over all of them would be long."""
    return max(many for many in range(1, FEWEST + 1) if rows % many == 0)
