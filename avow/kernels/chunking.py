"""What every chunk scan needs on the host: its layout, its launch, the sums before each part, and its gradients.

A sequence is cut into parts of whole chunks, just enough to fill the device. No program adds to what another one
writes, so every run gives the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from avow.errors import DtypeError, ShapeError
from avow.kernels.tile_ops import LOWEST, Shape, filled, interpreted, view

TYPES = (torch.bfloat16, torch.float16, torch.float32)
# Beyond this many numbers in a row, a state has no room in registers.
_WIDEST = 512
# Rows that parts are multiples of, and so every chunk divides.
_WHOLE = 128
# Programs that may share the sums of one part.
MOST_PIECES = 6


class Layout(NamedTuple):
    """Rows of a chunk, columns of values and features per program, warps, loads under way, and how many programs a
    processor holds at once."""

    chunk: int
    columns: int
    warps: int
    stages: int
    resident: int = 2
    features: int = 0

    def shape(self, h: int, r: int, d: int, e: int, kind: torch.dtype, **more: Any) -> Shape:
        """What kernels of this layout are compiled for: h heads of rows, r to a head of keys, of widths d and e."""
        # TF32 has the digits of float16. Three products of it have nearly those of float32, at tensor cores' speed.
        precision = "tf32x3" if kind == torch.float32 else "tf32"
        factors = tl.bfloat16 if kind == torch.bfloat16 else tl.float32
        return Shape(h, r, d, padded(d), e, self.columns, self.chunk, precision, factors, not interpreted(), **more)


class Cut(NamedTuple):
    """A sequence in parts of `length` rows, for so many processors."""

    parts: int
    length: int
    processors: int


class Sums(NamedTuple):
    """Sums over keys of features times values and of features, relative to powers of `tops` if there are any.

    They are those of each part, of its pieces, before each part, or over all. Features have a top each, or share one.
    Powers are those of 2 inside scans, and of e in the states that outlast them.
    """

    sums: Float32[Tensor, "*heads m e"]
    totals: Float32[Tensor, "*heads m"]
    tops: Float32[Tensor, "..."] | None = None


@functools.cache
def processors(device: torch.device) -> int:
    """How many processors a device has; interpreted kernels are laid out as on an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def padded(width: int) -> int:
    """The next width that a tile can have."""
    return max(16, 1 << (int(width) - 1).bit_length())


def divided(count: int, size: int) -> int:
    """How many blocks of a size hold so many: what `triton.cdiv` says, which takes microseconds to say it."""
    return -(-count // size)


def cut_for(rows: int, programs: int, resident: int, device: torch.device) -> Cut:
    """Parts that so many programs work on at once, if each processor holds `resident` of them."""
    count = processors(device)
    parts = max(1, min(count * resident // max(programs, 1), divided(rows, 2 * _WHOLE)))
    length = max(1, divided(divided(rows, parts), _WHOLE)) * _WHOLE
    return Cut(max(1, divided(rows, length)), length, count)


def pieces_of(cut: Cut, programs: int, resident: int) -> int:
    """How many programs share the sums of one part: the fewest that fill the device about as well as any number does.

    The last part needs no sums.
    """
    summed = cut.parts - 1
    if not summed * programs:
        return 1

    def idle(pieces: int) -> float:
        busy = summed * programs * pieces / (cut.processors * resident)
        return math.ceil(busy) / busy

    counts = range(1, max(1, min(MOST_PIECES, cut.length // _WHOLE)) + 1)
    least = min(map(idle, counts))
    return next(pieces for pieces in counts if idle(pieces) <= 1.05 * least)


def check(q: Tensor, k: Tensor, v: Tensor, paired: bool = True) -> None:
    """Refuse what no scan can do; rows and keys are `paired` where row i sees the keys up to i."""
    if q.dtype not in TYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        kinds, rule = f"{q.dtype}, {k.dtype}, {v.dtype}", "must be one of the 16-bit types, or float32"
        raise DtypeError("types of q, k, v", kinds, rule, "convert them to one")
    if q.shape[1] % max(k.shape[1], 1) or not k.shape[1]:
        rule = f"must be a multiple of the {k.shape[1]} key heads"
        raise ShapeError("heads of q", q.shape[1], rule, "repeat keys and values for some of the query heads")
    if paired and (q.shape[2] != k.shape[2] or k.shape[2] != v.shape[2]):
        lengths, rule = f"{q.shape[2]}, {k.shape[2]}, {v.shape[2]}", "must be the same number"
        raise ShapeError("lengths of q, k, v", lengths, rule, "row i sees keys up to i: pass one key for each query")
    if max(q.shape[3], v.shape[3]) > _WIDEST:
        widths, rule = f"{q.shape[3]}, {v.shape[3]}", f"must be at most {_WIDEST}"
        raise ShapeError("widths of k, v", widths, rule, "split the values by columns, or use fewer features")


def launch(
    kernel: Any, grid: tuple[int, ...], inputs: Mapping[str, Tensor], *others: Any, shape: Shape, layout: Layout
) -> None:
    """Run a kernel on views of its inputs, named as their rows' strides are in the shape, and on all others."""
    rows: dict[str, Any] = {f"{name}_row": x.stride(2) for name, x in inputs.items()}
    options = {"num_warps": layout.warps, "num_stages": layout.stages}
    kernel[grid](*map(view, inputs.values()), *others, S=shape._replace(**rows), **options)


def blank(like: Tensor, *shapes: tuple[int | torch.SymInt, ...]) -> list[Float32[Tensor, "..."]]:
    """Room for numbers of float32, of some shapes."""
    return [like.new_empty(shape, dtype=torch.float32) for shape in shapes]


def by_key_head(x: Tensor, groups: int) -> Tensor:
    """Sums over the query heads of each key head."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, x.shape[1] // groups)).sum(2)


def register_gradients(forward: Any, backward: Any, tensors: int = 3, unused: Sequence[int] = ()) -> None:
    """Give a scan its gradients: those of q, k and v, its first inputs, by the output's, which comes first.

    Backward is given them, then as one list the other of its first inputs that are `tensors` and all outputs but the
    `unused`, then the numbers among its inputs.
    """

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count, ctx.numbers = len(inputs), [x for x in inputs[tensors:] if isinstance(x, float | bool)]
        ctx.save_for_backward(*inputs[:tensors], *(x for i, x in enumerate(output) if i not in unused))
        ctx.mark_non_differentiable(*output[1:])

    def gradients(ctx: Any, gradient: Tensor, *rest: Any) -> Any:
        q, k, v, *held = ctx.saved_tensors
        return *backward(gradient, q, k, v, held, *ctx.numbers), *[None] * (ctx.count - 3)

    forward.register_autograd(gradients, setup_context=keep)
    backward.register_fake(lambda gradient, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)))


class Prefixes(NamedTuple):
    """What `part_prefixes` is compiled for: of SIZE sums, every WIDTH share a feature, and features share LOGS tops."""

    SIZE: int
    WIDTH: int
    LOGS: int
    BLOCK: int
    PIECES: int
    REVERSE: bool
    WHOLE: bool


@triton.jit
def part_prefixes(added, tops, begin, begin_tops, before, before_tops, parts, S: tl.constexpr):
    """Sums of the pieces of parts become those before each part, in the order of the scan, or the WHOLE sum."""
    PIECES: tl.constexpr = S.PIECES
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * S.BLOCK + tl.arange(0, S.BLOCK)
    inside = place < S.SIZE
    at = (place // S.WIDTH) % S.LOGS
    leads = inside & (place % S.WIDTH == 0) & (place // S.WIDTH < S.LOGS)
    state = filled(0.0, S.BLOCK)
    top = filled(LOWEST, S.BLOCK)
    if begin is not None:
        state = tl.load(begin + head * S.SIZE + place, mask=inside, other=0.0)
        top = tl.load(begin_tops + head * S.LOGS + at, mask=inside, other=0.0)
    for step in range(parts):
        part = step
        if S.REVERSE:
            part = parts - 1 - step
        own = head * parts + part
        if not S.WHOLE:
            tl.store(before + own * S.SIZE + place, state, mask=inside)
            if tops is not None:
                tl.store(before_tops + own * S.LOGS + at, top, mask=leads)
        # The last part has no sum, and nothing comes after it.
        there = inside & ((step < parts - 1) | S.WHOLE)
        for piece in tl.static_range(PIECES):
            sums = tl.load(added + (own * PIECES + piece) * S.SIZE + place, mask=there, other=0.0)
            if tops is None:
                state += sums
            else:
                log = tl.load(tops + (own * PIECES + piece) * S.LOGS + at, mask=there, other=LOWEST)
                higher = tl.maximum(top, log)
                finite = tl.where(higher > LOWEST, higher, 0.0)
                state = state * tl.exp2(top - finite) + sums * tl.exp2(log - finite)
                top = higher
    if S.WHOLE:
        tl.store(before + head * S.SIZE + place, state, mask=inside)
        tl.store(before_tops + head * S.LOGS + at, top, mask=leads)


def before_parts(
    added: Sums, cut: Cut, begin: Sums | None = None, reverse: bool = False, pieces: int = 1, batch: int | None = None
) -> Sums:
    """The sums before each part, from those of its pieces and from what the scan begins with.

    Given the size of a `batch`, they are the sums over all parts instead.
    """
    heads = added.sums.shape[0]
    lead = (heads, cut.parts) if batch is None else (batch, heads // batch)
    before = Sums(*(None if x is None else x.new_empty(*lead, *x.shape[2:]) for x in added))  # type: ignore[arg-type]  # sums are never None
    features = added.sums.shape[2]
    for i, width in enumerate((added.sums.shape[3], 1)):
        size = math.prod(added[i].shape[2:])  # type: ignore[union-attr]  # neither is
        if not size:  # totals that nobody asked for
            continue
        block = min(1024, padded(size))
        logs = 1 if added.tops is None or added.tops.ndim == 2 else features
        shape = Prefixes(size, width, logs, block, pieces, reverse, batch is not None)
        first = (None, None) if begin is None else (begin[i], begin.tops)
        part_prefixes[(heads, divided(size, block))](
            added[i], added.tops, *first, before[i], before.tops, cut.parts, S=shape, num_warps=4
        )
    return before


def sums_before(
    kernel: Any,
    y: Tensor,
    z: Tensor,
    given: Sequence[Any],
    others: Sequence[tuple[int, ...]],
    cut: Cut,
    shape: Shape,
    layout: Layout,
    begin: Sums | None = None,
) -> Sums:
    """Sums of y zᵀ before each part, or over all, from those that `kernel` takes of pieces.

    The kernel is `given` what it needs beside y and z; `others` are the shapes of totals and tops.
    """
    (b, h, n), many = y.shape[:3], cut.parts * shape.PIECES
    shapes = ((shape.M or shape.D, shape.E), *others)
    added = Sums(*blank(y, *((b * h, many, *one) for one in shapes)))
    if cut.parts > 1 or shape.WHOLE:
        grid = (b * h, many, shape.NB * divided(shape.E, shape.EB))
        launch(kernel, grid, {"y": y, "z": z}, *given, added, n, cut.length, shape=shape, layout=layout)
    return before_parts(added, cut, begin, shape.REVERSE, shape.PIECES, b if shape.WHOLE else None)
