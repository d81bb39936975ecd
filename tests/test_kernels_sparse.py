"""The kernels of certified sparse decoding: each equals its twin, and every bound holds."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from avow.errors import DtypeError, ParameterError, ShapeError
from avow.kernels.interpreted import interpret

interpret()

from avow.kernels import choice, gather_attention, merging, sketch_pass  # noqa: E402
from avow.kernels.sparse_decode import Decoded, Lengths, decode, decode_twin, value_lengths  # noqa: E402
from avow.maths.sketch import GROUP, Sketch, sketched  # noqa: E402

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass
class Step:
    """Everything that one decoding step is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    sketch: Sketch
    lengths: Lengths
    scale: float

    def run(self, drop: float = 1e-2, hint: Tensor | None = None, how: Callable[..., Decoded] = decode) -> Decoded:
        # A GPU does not warn of inf and nan.
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            return how(self.q, self.k, self.v, self.sketch, self.lengths, drop, self.scale, hint)

    def siblings(self, x: Tensor) -> Tensor:
        return x.double().repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)

    def logits(self) -> Tensor:
        """In float64, in octaves."""
        product = self.siblings(self.k) @ self.q.double().unsqueeze(-1)
        return product.squeeze(-1) * self.scale * math.log2(math.e)

    def errors(self, out: Tensor) -> Tensor:
        """How far an answer is from the truth, in the unit of bounds."""
        weights = torch.softmax(self.logits() * math.log(2), -1).unsqueeze(-2)
        values = self.siblings(self.v)
        apart = torch.linalg.vector_norm(out.double() - (weights @ values).squeeze(-2), dim=-1)
        unit = torch.linalg.vector_norm(values, dim=-1).amax(-1)
        return torch.where(apart == 0, 0.0, apart / unit)


Inputs = tuple[Tensor, Tensor, Tensor]


def step(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.bfloat16, scale: float | None = None) -> Step:
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    return Step(q, k, v, sketched(k), value_lengths(v), q.shape[-1] ** -0.5 if scale is None else scale)


def drawn(b: int = 1, g: int = 1, r: int = 2, s: int = 200, d: int = 64, e: int = 64, loud: float = 3.0) -> Inputs:
    """Queries that single out a few directions, keys and values."""
    return loud * torch.randn(b, g * r, d), torch.randn(b, g, s, d), torch.randn(b, g, s, e)


def terms_of(given: Step, hint: Tensor | None = None) -> sketch_pass.Terms:
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        known = sketch_pass.prepared(given.q, given.sketch, given.lengths.most, hint, given.scale)
        return sketch_pass.bounded(given.q, given.sketch, given.lengths.each, known)


def broken_terms(given: Step) -> int:
    """How many tokens weigh more, by float64, than the sketch pass said they could."""
    terms = terms_of(given)
    r = terms.top.shape[-1]
    tops = terms.top.transpose(1, 2).reshape(len(terms.widest), -1).repeat_interleave(GROUP, 1)
    said = (tops - terms.offset.int()).double() / sketch_pass.STEPS
    nu = terms.nu.double().repeat_interleave(r)[:, None]
    rows = given.sketch.rows
    norms = torch.linalg.vector_norm(given.siblings(given.v), dim=-1).flatten(0, 1)[:, :rows]
    true = given.logits().flatten(0, 1)[:, :rows] + torch.log2((norms + nu) / nu)
    # Terms at the limit may be anything above it: they are always read.
    return int(((true > said) & (said < sketch_pass.LIMIT / sketch_pass.STEPS)).sum())


SHAPES = [
    (dict(b=1, g=2, r=4, s=300, d=64, e=64), torch.bfloat16),
    (dict(b=2, g=1, r=8, s=193, d=96, e=48), torch.float16),
    (dict(b=1, g=2, r=1, s=128, d=128, e=128), torch.bfloat16),
    (dict(b=1, g=1, r=3, s=65, d=16, e=32), torch.float32),
]


@pytest.mark.parametrize(
    ("shape", "dtype"), SHAPES, ids=lambda x: f"r{x['r']}-s{x['s']}-d{x['d']}" if isinstance(x, dict) else str(x)
)
def test_each_kernel_equals_its_twin(shape: dict[str, int], dtype: torch.dtype) -> None:
    given = step(*drawn(**shape), dtype)
    most, s, drop = given.lengths.most, given.k.shape[2], 2e-2
    hint = most.repeat_interleave(shape["r"], 1) * torch.rand(given.q.shape[:2])
    known = sketch_pass.prepared_twin(given.q, given.sketch, most, hint, given.scale)
    for own, twin in zip(sketch_pass.prepared(given.q, given.sketch, most, hint, given.scale), known, strict=True):
        torch.testing.assert_close(own, twin, rtol=1e-5, atol=1e-5)
    terms = sketch_pass.bounded_twin(given.q, given.sketch, given.lengths.each, known)
    own = sketch_pass.bounded(given.q, given.sketch, given.lengths.each, known)
    # Sums in another order may put a term on the other side of a whole number.
    apart = choice.steps_below(own) - choice.steps_below(terms)
    assert int(apart.abs().max()) <= 1 and float((apart != 0).float().mean()) < 0.02
    assert int((own.top - terms.top).abs().max()) <= 1 and int((own.widest - terms.widest).abs().max()) <= 1
    scale = torch.exp2((own.top - terms.top) / sketch_pass.STEPS)
    torch.testing.assert_close(own.mass * scale, terms.mass, rtol=1e-3, atol=0.0)
    found = choice.counted_twin(terms)
    counted = choice.counted(terms)
    assert torch.equal(counted.counts, found.counts)
    torch.testing.assert_close(counted.masses.sum(-1), found.masses.sum(-1))
    chosen, twin_chosen = choice.marked(terms, found, most, drop, s), choice.marked_twin(terms, found, most, drop, s)
    assert same_lists(chosen, twin_chosen) and int(chosen.found.sum()) > 0
    torch.testing.assert_close(chosen.tails, twin_chosen.tails)
    parts = gather_attention.attended_twin(given.q, given.k, given.v, chosen, given.scale)
    for mine, other in zip(
        gather_attention.attended(given.q, given.k, given.v, chosen, given.scale), parts, strict=True
    ):
        # Uninitialised memory is nan here, too: what one writes, so does the other.
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3, equal_nan=True)
    answers = [
        how(given.q, given.v, parts, terms, chosen, most, drop, given.scale)
        for how in (merging.merged, merging.merged_twin)
    ]
    for mine, other in zip(*answers, strict=True):
        torch.testing.assert_close(mine, other, rtol=unit_of(mine), atol=1e-6)


def same_lists(mine: choice.Chosen, other: choice.Chosen) -> bool:
    """Whether the same tokens are listed, in ascending order, with the same odds; what is behind them is nothing."""
    room = mine.listed.shape[1] // mine.found.shape[1]
    inside = torch.arange(room) < mine.found.unsqueeze(-1)  # (bg, spans, room)
    lists = [x.listed.view(inside.shape)[inside] for x in (mine, other)]
    return torch.equal(mine.found, other.found) and torch.equal(*lists)


def flags_of(chosen: choice.Chosen, s: int) -> Tensor:
    """For each token, 0 where it is not listed, or else one more than the step of its odds."""
    heads, spans = chosen.found.shape
    flags = torch.zeros(heads, s, dtype=torch.int32)
    for head, (lists, found) in enumerate(zip(chosen.listed.view(heads, spans, -1), chosen.found, strict=True)):
        for own, number in zip(lists, found.tolist(), strict=True):
            flags[head, own[:number].long() & 2**choice.PLACES - 1] = (own[:number] >> choice.PLACES) + 1
    return flags


def unit_of(x: Tensor) -> float:
    return {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(x.dtype, 1e-3)


def clustered() -> Inputs:
    centers = 3 * torch.randn(5, 64)
    k = (centers[torch.randint(5, (200,))] + 0.05 * torch.randn(200, 64))[None, None]
    return 2 * centers[:2][None], k, torch.randn(1, 1, 200, 64)


def ties() -> Inputs:
    """Two keys in turn, whose logits differ by nearly nothing, with opposite values."""
    a = torch.randn(64)
    even = torch.arange(200) % 2 == 0
    k = torch.where(even[:, None], a, a + 1e-3 * torch.randn(64))[None, None]
    return torch.randn(1, 2, 64), k, torch.where(even[:, None], 1.0, -1.0).expand(200, 64)[None, None]


def one_of(kind: str, size: float) -> Inputs:
    """Random inputs, one key or value of which is long."""
    q, k, v = drawn()
    {"key": k, "value": v}[kind][..., 77, :] *= size
    return q, k, v


def worst_values() -> Inputs:
    """What looks small points one way, what looks large the other, and the small ones are the longest."""
    q, k, _ = drawn(r=1, loud=2.0)
    logits = (k @ q.unsqueeze(-1)).squeeze(-1)
    return q, k, torch.where(logits < logits.quantile(0.8), 1.0, -0.01).unsqueeze(-1) * torch.ones(64)


def scaled(q: float = 1.0, k: float = 1.0, v: float = 1.0) -> Inputs:
    return tuple(x * size for x, size in zip(drawn(), (q, k, v), strict=True))


HOSTILE: dict[str, Callable[[], Inputs]] = {
    "random": drawn,
    "clustered": clustered,
    "ties": ties,
    "one giant key": lambda: one_of("key", 1e4),
    "one long value": lambda: one_of("value", 1e3),
    "all keys equal": lambda: (lambda q, k, v: (q, k[:, :, :1].expand_as(k), v))(*drawn()),
    "values against the choice": worst_values,
    "huge queries": lambda: scaled(q=100.0),
    "tiny queries": lambda: scaled(q=1e-20),
    "queries of zero": lambda: scaled(q=0.0),
    "huge keys": lambda: scaled(q=1e-12, k=1e12),
    "huge queries, tiny keys": lambda: scaled(q=1e25, k=1e-25),
    "logits beyond float32": lambda: scaled(q=1e25, k=1e25),
    "huge values": lambda: scaled(v=1e30),
    "tiny values": lambda: scaled(v=1e-25),
    "values of zero": lambda: scaled(v=0.0),
    "no whole group": lambda: drawn(s=40),
    "one token": lambda: drawn(s=1),
}


BEYOND = ("logits beyond float32", "huge queries, tiny keys")


def holds(given: Step, drop: float) -> Decoded:
    """A step whose bounds were compared with the truth."""
    found = given.run(drop)
    errors = given.errors(found.out)
    assert bool(((errors <= found.bound) | (found.bound == math.inf)).all()), (errors, found.bound)
    assert not bool(found.bound.isnan().any())
    return found


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
    chosen = choice.marked(known, choice.counted(known), given.lengths.most, 1e-2, 500)
    flags = flags_of(chosen, 500)[None] > 0
    assert 0.1 < float(flags.float().mean()) < 0.9
    k, v = (torch.where(flags.unsqueeze(-1), x, math.nan) for x in (given.k, given.v))
    after = dataclasses.replace(given, k=k, v=v).run()
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert bool(torch.isfinite(after.out).all() and torch.isfinite(after.bound).all())


def test_a_sketch_that_understates_its_errors_is_caught() -> None:
    given = step(*drawn(s=256))
    # A radius is a worst case: queries along what a key lost meet it.
    lost = given.k.double() - given.sketch.restored().double() * given.sketch.size[..., None, None]
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


def test_steps_repeat_bit_for_bit() -> None:
    given = step(*drawn(g=2))
    assert all(torch.equal(x, y) for x, y in zip(given.run(), given.run(), strict=True))


def test_a_whole_step_equals_its_twin() -> None:
    given = step(*drawn(g=2, s=300), torch.float32)
    for mine, other in zip(given.run(), given.run(how=decode_twin), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("count", [3, 7])
def test_programs_that_do_more_than_a_block_or_a_head_find_the_same(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    given = step(*drawn(g=3, s=500, d=32, e=32), torch.float32)
    alone = given.run(how=decode_twin)
    for name, value in (("BLOCK", 128), ("_SPAN", 128), ("_AT_ONCE", 4)):
        monkeypatch.setattr(choice, name, value)
    monkeypatch.setattr(gather_attention, "_PROGRAMS", count)
    monkeypatch.setattr(merging, "_CHUNK", 2)
    assert choice.spans_of(3, 500) == (4, 2, 3)
    found, other = given.run(), given.run(how=decode_twin)
    for mine, theirs in zip(found, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(found.out, alone.out, rtol=1e-3, atol=1e-5)
    assert torch.equal(found.kept, alone.kept) and bool((given.errors(found.out) <= found.bound).all())


def test_a_sample_of_long_lists_is_enough_to_cut_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = step(*drawn(g=1, s=900, d=32, e=32, loud=6.0), torch.float32)
    whole = given.run()
    monkeypatch.setattr(choice, "_ENOUGH", 300)
    assert choice.stride_of(given.sketch.codes.shape[2]) == 2
    found, other = given.run(), given.run(how=decode_twin)
    assert torch.equal(found.kept, other.kept) and bool(found.within.all())
    assert 0.8 < float(found.kept / whole.kept) < 1.25
    terms = terms_of(given)
    counts = choice.counted(terms).counts
    assert torch.equal(counts, choice.counted_twin(terms).counts) and counts.sum(-1).tolist() == [7 * GROUP] * 2


@pytest.mark.parametrize("how", [decode, decode_twin])
def test_heads_that_would_break_the_limit_read_all_tokens_after_all(how: Callable[..., Decoded]) -> None:
    given = step(*drawn(g=2, loud=6.0), torch.float32)
    hint = torch.tensor([[1e-4, 1e-4, 9.0, 9.0]])
    plain = given.run(0.02, hint, how)
    again = given.run(0.02, hint, lambda *x: how(*x, limit=0.04))
    # The first head was misled, and the second one was not.
    assert plain.within.tolist() == again.within.tolist() == [[False, False, True, True]]
    assert bool((plain.bound[0, :2] > 0.04).all() & (again.bound[0, :2] < 1e-3).all())
    assert torch.equal(plain.out[0, 2:], again.out[0, 2:]) and torch.equal(plain.bound[0, 2:], again.bound[0, 2:])
    assert bool((given.errors(again.out) <= again.bound).all())


def test_part_of_a_larger_cache_is_read_in_place() -> None:
    q, k, v = drawn(b=2, g=2, r=1, s=100)
    given = step(q, k, v)
    whole = given.run()
    room = [torch.full((2, 2, 128, 64), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    for x, y in zip(room, (given.k, given.v), strict=True):
        x[:, :, :100] = y
    k, v = (x[:, :, :100] for x in room)
    assert all(torch.equal(x, y) for x, y in zip(whole, dataclasses.replace(given, k=k, v=v).run(), strict=True))
    with pytest.raises(ShapeError, match=r"k\.stride\(\)=.* must be that of heads in one piece each; pass a slice"):
        dataclasses.replace(given, k=given.k.transpose(-1, -2).contiguous().transpose(-1, -2)).run()


def test_a_hint_far_too_small_is_flagged_and_proves_nothing_false() -> None:
    q, k, v = drawn(r=1, s=320, loud=6.0)
    given = step(q, k, 0.1 * v.abs() + torch.eye(64)[torch.arange(320) % 64])
    plain = given.run()
    near, far = given.run(hint=1.1 * plain.length), given.run(hint=torch.full((1, 1), 1e-3))
    assert bool(near.within.all()) and int(near.kept) < int(plain.kept)
    assert not bool(far.within.all())
    assert bool((given.errors(far.out) <= far.bound).all())


def test_lengths_bound_values_from_both_sides() -> None:
    for size in (1e-35, 1e-18, 1.0, 1e18, 1e37):
        v = torch.randn(2, 3, 50, 24) * size
        v[0, 0] = 0.0
        each, most = value_lengths(v)
        true = torch.linalg.vector_norm(v.double(), dim=-1)
        assert bool((each.double() >= true).all())
        assert float(most[0, 0]) == 0.0
        assert bool(((most.double() <= true.amax(-1)) | most.isnan()).all())
        if size > 1e-20:
            assert bool((each.double() <= true * 1.02 + 2e-15 * size).all())
            assert bool((most.double() >= true.amax(-1) * 0.999).all())


def test_nothing_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    given = step(*drawn(s=70))
    expected = given.run()

    def refused(*_: object) -> None:
        raise AssertionError("a step read a number back")

    # Not `cpu`: with that the interpreter itself fetches what a kernel works on.
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(Tensor, name, refused)
    found = given.run()
    monkeypatch.undo()
    assert torch.equal(found.out, expected.out)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda x: {"q": x.q.repeat(1, 5, 1)},
            ShapeError,
            "heads of q=10 must be a multiple of the 1 key heads, by at most 8",
        ),
        (lambda x: {"q": x.q.half()}, DtypeError, "types of q, k, v=.* must be one of the 16-bit types, or float32"),
        (lambda x: {"sketch": sketched(x.k, 8)}, ParameterError, "bits of the sketch=8 must be 4"),
        (lambda x: {"k": x.k[:, :, :100]}, ShapeError, "sketched rows, lengths, keys=192, 200, 100 must be at most"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[Step], dict[str, Tensor]], error: type[Exception], words: str
) -> None:
    given = step(*drawn())
    with pytest.raises(error, match=words):
        dataclasses.replace(given, **change(given)).run()
    with pytest.raises(ParameterError, match="drop=-1 must be at least 0; give the error"):
        given.run(-1)
    with pytest.raises(ParameterError, match=r"scale=-0\.5 must be above 0; turn the signs"):
        dataclasses.replace(given, scale=-0.5).run()
    with pytest.raises(ShapeError, match="dim of q=24 must be a multiple of 16 up to 256; fill up q and k"):
        step(*drawn(d=24)).run()


def permuted(a: int, b: int, selector: int) -> int:
    """PTX's prmt: four bytes chosen from the eight of two registers."""
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return int.from_bytes(bytes(pool[selector >> 4 * i & 7] for i in range(4)), "little")


def executed(assembly: str, word: int) -> np.ndarray:
    """The eight numbers that a few lines of PTX make of four bytes, in units of 2^-24."""
    registers: dict[str, int] = {"$4": word}
    does = {"and.b32": lambda x, y: x & y, "shr.b32": lambda x, y: x >> y, "prmt.b32": permuted}
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


COMPILED = """
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

names = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.int32: "i32", torch.int8: "i8"}
names |= {torch.uint8: "u8", torch.float16: "fp16", torch.int64: "i64"}
done = []

def run(self, *args, grid, warmup, num_warps=4, num_stages=3, maxnreg=None, **constants):
    given = dict(zip(self.arg_names, args)) | constants
    assert list(given) == self.arg_names, (self.__name__, list(given), self.arg_names)
    kind = lambda x: "*" + names[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32"
    signature = {n: "constexpr" if n in constants else kind(x) for n, x in given.items()}
    place = {n: (i,) for i, n in enumerate(given)}
    aligned = {place[n]: [["tt.divisibility", 16]] for n, x in given.items() if isinstance(x, torch.Tensor)}
    source = ASTSource(self, signature, {place[n]: x for n, x in constants.items()}, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    # Triton 3.6 reorders what is counted and its mask each in a way of its own.
    assert "tt.histogram" not in made.asm["ttgir"] or not re.search("tt.histogram %[^:]*,", made.asm["ttgir"])
    assert made.metadata.shared <= 227 * 1024, (self.__name__, made.metadata.shared)
    done.append(self.__name__)

triton.JITFunction.run = run
from avow.kernels.sparse_decode import decode, value_lengths
from avow.maths.sketch import sketched

q, k, v = (torch.randn(shape).bfloat16() for shape in ((1, 8, 128), (1, 2, 200, 128), (1, 2, 200, 128)))
decode(q, k, v, sketched(k), value_lengths(v), 1e-2, limit=1e-2)
print(*done)
"""


def test_every_kernel_compiles_for_a_gpu() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert told.returncode == 0, told.stderr[-2000:]
    assert told.stdout.split() == [
        "_prepared",
        "_bounded",
        "_counted",
        "_marked",
        "_attended",
        "_merged",
        "_read_again",
    ]
