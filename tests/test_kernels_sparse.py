"""The kernels of certified sparse decoding: each equals its reference, and every bound holds."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from avow.kernels.interpreted import interpret
from tests.helpers.decode_checks import faults_at, same_lists

interpret()

from avow.kernels import choice, finalize, gather_attention, planning, sketch_pass, step_constants
from avow.kernels.finalize import Decoded
from avow.numerics.sketch import GROUP, sketched
from tests.helpers import decode_references as references
from tests.helpers.decoding import BEYOND, HOSTILE, Step, drawn, flags_of, permuted, step, terms_of, unit_of
from tests.helpers.sketches import restored

pytestmark = pytest.mark.kernels


def broken_terms(given: Step) -> int:
    """How many tokens weigh more, by float64, than the sketch pass said they could."""
    terms = terms_of(given)
    r = terms.top.shape[-1]
    tops = terms.top.transpose(1, 2).flatten(0, 1).repeat_interleave(GROUP, 1)
    said = (tops - terms.offset.int()).double() / step_constants.STEPS
    nu = terms.nu.double().repeat_interleave(r)[:, None]
    rows = given.sketch.rows
    norms = torch.linalg.vector_norm(given.siblings(given.v), dim=-1).flatten(0, 1)[:, :rows]
    true = given.logits().flatten(0, 1)[:, :rows] + torch.log2((norms + nu) / nu)
    # Terms at the limit may be anything above it: they are always read.
    return int(((true > said) & (said < step_constants.LIMIT / step_constants.STEPS)).sum())


SHAPES = [
    (dict(b=1, g=2, r=4, s=300, d=64, e=64), torch.bfloat16),
    (dict(b=2, g=1, r=8, s=193, d=96, e=48), torch.float16),
    (dict(b=1, g=2, r=1, s=128, d=128, e=128), torch.bfloat16),
    (dict(b=1, g=1, r=3, s=65, d=16, e=32), torch.float32),
    (dict(b=1, g=2, r=12, s=200, d=32, e=32), torch.bfloat16),
    (dict(b=1, g=1, r=20, s=330, d=32, e=32), torch.float16),
]


@pytest.mark.parametrize(
    ("shape", "dtype"), SHAPES, ids=lambda x: f"r{x['r']}-s{x['s']}-d{x['d']}" if isinstance(x, dict) else str(x)
)
def test_each_kernel_equals_its_reference(shape: dict[str, int], dtype: torch.dtype) -> None:
    given = step(*drawn(**shape), dtype)
    most, s, drop = given.lengths.most, given.k.shape[2], 2e-2
    hint = most.repeat_interleave(shape["r"], 1) * torch.rand(given.q.shape[:2])
    own, terms = (
        how(
            given.q,
            given.sketch,
            given.lengths.each,
            most,
            hint,
            given.scale,
            given.used,
            planning.blank_counts(given.q.shape[0] * given.q.shape[1], given.q.device),
        )
        for how in (sketch_pass.bounded, references.bounded_reference)
    )
    assert torch.equal(own.nu, terms.nu) and torch.equal(own.counts, references.counts_reference(own))
    # Sums in another order may put a term on the other side of a whole number.
    apart = references.steps_below(own) - references.steps_below(terms)
    assert int(apart.abs().max()) <= 1 and float((apart != 0).float().mean()) < 0.02
    assert int((own.top - terms.top).abs().max()) <= 1
    masses = [
        (each.masses * torch.exp2((each.peaks - terms.peaks) / step_constants.STEPS)).sum(1) for each in (own, terms)
    ]
    torch.testing.assert_close(*masses, rtol=1e-3, atol=0.0)
    chosen = choice.marked(terms, most, drop, s)
    other = references.marked_reference(terms, most, drop, s)
    assert same_lists(chosen, other) and int(chosen.found.sum()) > 0
    torch.testing.assert_close(chosen.tails, other.tails)
    assert torch.equal(chosen.widest, other.widest)
    parts = references.attended_reference(given.q, given.k, given.v, chosen, given.scale, given.used)
    own_parts = gather_attention.attended(given.q, given.k, given.v, chosen, given.scale, given.used)
    # Uninitialised memory is nan here, too: what one writes, so does the other.
    torch.testing.assert_close(own_parts, parts, rtol=1e-4, atol=1e-3, equal_nan=True)
    pair = [
        how(given.q, given.v, parts, terms, chosen, most, drop, given.scale)
        for how in (finalize.merged, references.merged_reference)
    ]
    for mine, other in zip(*pair, strict=True):
        torch.testing.assert_close(mine, other, rtol=unit_of(mine), atol=1e-6)


def holds(given: Step, drop: float) -> Decoded:
    """A step whose bounds were compared with the truth."""
    found = given.run(drop)
    errors = given.errors(found.out)
    assert bool(((errors <= found.bound) | (found.bound == math.inf)).all()), (errors, found.bound)
    assert not bool(found.bound.isnan().any())
    return found


def test_the_checks_that_a_gpu_runs_find_nothing_here() -> None:
    assert faults_at("cpu", 200, torch.float32, (1, 96)) == []


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_answer_is_further_from_the_truth_than_its_bound(kind: str) -> None:
    given = step(*HOSTILE[kind]())
    found = holds(given, 0.3)
    assert broken_terms(given) == 0
    if kind in BEYOND:
        # What float32 cannot compute is not vouched for.
        assert bool((found.bound > 1).all()) and not bool(found.within.any())
    else:
        assert bool(torch.isfinite(found.out).all() & found.within.all())
        assert bool((found.bound <= (2.1 if kind == "one giant key" else 0.35)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "values against the choice"])
def test_bounds_hold_in_every_type(kind: str, dtype: torch.dtype) -> None:
    assert float(holds(step(*HOSTILE[kind](), dtype), 0.05).bound.max()) <= 0.06


def test_a_step_reads_far_fewer_tokens_where_few_matter_and_all_where_all_do() -> None:
    sharp = step(*drawn(r=1, s=960, loud=12.0)).run()
    assert int(sharp.kept) < 480 and bool(sharp.within.all())
    flat = step(*drawn(r=1, loud=0.01)).run()
    assert int(flat.kept) > 195 and bool(flat.within.all())


def test_what_is_not_listed_is_not_read() -> None:
    given = step(*drawn(g=2, s=500, loud=12.0))
    before = given.run()
    known = terms_of(given)
    chosen = choice.marked(known, given.lengths.most, 1e-2, 500)
    flags = flags_of(chosen, 500)[None] > 0
    assert 0.1 < float(flags.float().mean()) < 0.9
    k, v = (torch.where(flags.unsqueeze(-1), x, math.nan) for x in (given.k, given.v))
    after = dataclasses.replace(given, k=k, v=v).run()
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert bool(torch.isfinite(after.out).all() and torch.isfinite(after.bound).all())


def test_a_sketch_that_understates_its_errors_is_caught() -> None:
    given = step(*drawn(s=256))
    # A radius is a worst case: queries along what a key lost meet it.
    lost = given.k.double() - restored(given.sketch).double() * given.sketch.size[..., None, None]
    q = 20 * lost[:, 0, :2] / given.sketch.metric.double()
    along = step(q, given.k, given.v)
    assert broken_terms(along) == 0
    short = dataclasses.replace(along.sketch, radius=along.sketch.radius * 0.5)
    assert broken_terms(dataclasses.replace(along, sketch=short)) > 0


def test_a_step_that_is_lied_to_breaks_its_bound() -> None:
    given = step(*drawn(r=1, s=256, loud=8.0))
    assert bool((given.errors(given.run(0.1).out) <= given.run(0.1).bound).all())
    # The sketch of a cache in which the token that matters most is another.
    largest, least = int(given.logits().argmax()), int(given.logits().argmin())
    other = given.k.clone()
    other[0, 0, largest] = other[0, 0, least]
    found = dataclasses.replace(given, sketch=sketched(other)).run(0.1)
    assert bool((given.errors(found.out) > found.bound).all())


def executed(assembly: str, word: int) -> np.ndarray:
    """The eight numbers that a few lines of PTX make of four bytes, in units of 2^-24."""
    registers: dict[str, int] = {"$4": word}
    does: dict[str, Callable[..., int]] = {
        "and.b32": lambda x, y: x & y,
        "shr.b32": lambda x, y: x >> y,
        "prmt.b32": permuted,
    }
    for line in re.findall(r"[^;{}]+", assembly):
        name, _, rest = line.strip().partition(" ")
        if not rest or name == ".reg":
            continue
        target, *sources = (x.strip() for x in rest.split(","))
        registers[target] = does[name](*(registers[x] if x in registers else int(x, 0) for x in sources))
    halves = np.array([registers[f"${i}"] for i in range(4)], np.uint32).view(np.float16)
    return halves.astype(np.float64) * 2.0**24


def test_the_unpacking_of_four_bytes_at_once_is_that_of_each() -> None:
    (assembly,) = re.findall(r'"""\s*(\{.*?\})\s*"""', inspect.getsource(sketch_pass._codes.fn), re.DOTALL)
    for start in range(0, 256, 4):
        chunk = bytes([start, (start * 7 + 1) % 256, start + 2, 255 - start])
        expected = [x & 15 for x in chunk] + [x & 240 for x in chunk]
        assert executed(assembly, int.from_bytes(chunk, "little")).tolist() == expected
    assert executed(assembly.replace("0x3120", "0x3210"), 0x04030201).tolist()[:4] != [1, 2, 3, 4]
