"""Whole steps of certified sparse decoding: however they are shared, wherever they read, whatever they are told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from avow.errors import DtypeError, ParameterError, ShapeError
from avow.kernels.interpreted import interpret

interpret()

from avow.kernels import choice, finalize, planning, sketch_pass, work_partition
from avow.kernels.finalize import Decoded, blank_report
from avow.kernels.pausing import LEFT, LONGEST, PAUSE, SHORTEST, Used, blank_state
from avow.kernels.sparse_decode import Lengths, decode
from avow.numerics.sketch import GROUP, sketched
from tests.helpers import decode_references as references
from tests.helpers.decode_references import decode_reference, value_lengths
from tests.helpers.decoding import Step, drawn, step, terms_of

pytestmark = pytest.mark.kernels


def test_steps_repeat_bit_for_bit() -> None:
    given = step(*drawn(g=2))
    assert all(torch.equal(x, y) for x, y in zip(given.run(), given.run(), strict=True))


def test_a_whole_step_equals_its_reference() -> None:
    given = step(*drawn(g=2, s=300), torch.float32)
    for mine, other in zip(given.run(), given.run(how=decode_reference), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("count", [3, 7])
def test_programs_that_do_more_than_a_block_or_a_head_find_the_same(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    given = step(*drawn(g=3, s=500, d=32, e=32), torch.float32)
    alone = given.run(how=decode_reference)
    for module, name, value in ((choice, "BLOCK", 128), (sketch_pass, "_AT_ONCE", 7), (choice, "_AT_ONCE", 4)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(work_partition, "_WARPS", count)
    monkeypatch.setattr(finalize, "_CHUNK", 2)
    assert choice.spans_of(3, 500) == (2, 3)
    found, other = given.run(), given.run(how=decode_reference)
    for mine, theirs in zip(found, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(found.out, alone.out, rtol=1e-3, atol=1e-5)
    assert torch.equal(found.kept, alone.kept) and bool((given.errors(found.out) <= found.bound).all())


def test_a_sample_of_long_lists_is_enough_to_cut_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = step(*drawn(g=1, s=900, d=32, e=32, loud=6.0), torch.float32)
    whole = given.run()
    monkeypatch.setattr(planning, "enough", lambda rows: 300)
    assert references.stride_of(given.sketch.codes.shape[2], 2) == 2
    found, other = given.run(), given.run(how=decode_reference)
    assert torch.equal(found.kept, other.kept) and bool(found.within.all())
    assert 0.8 < float(found.kept / whole.kept) < 1.25
    terms = terms_of(given)
    assert torch.equal(terms.counts, references.counts_reference(terms))
    # Every other pair of groups, or nearly.
    assert terms.counts.sum(-1).tolist() == [6 * GROUP] * 2
    # Of far more one in 16 is counted: here the first pair.
    monkeypatch.setattr(planning, "enough", lambda rows: 1)
    terms = terms_of(given)
    assert torch.equal(terms.counts, references.counts_reference(terms))
    assert terms.counts.sum(-1).tolist() == [2 * GROUP] * 2


@pytest.mark.parametrize("how", [decode, decode_reference])
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


def test_a_histogram_that_lies_proves_nothing_false_and_is_empty_after_the_step() -> None:
    given = step(*drawn(g=2, s=300, loud=6.0), torch.float32)
    honest, counts = given.run(0.1), torch.randint(10**6, (4, planning.CIRCLE), dtype=torch.int32)
    lied = given.run(0.1, how=partial(decode, counts=counts))
    assert bool((given.errors(lied.out) <= lied.bound).all()) and not torch.equal(lied.kept, honest.kept)
    assert not bool(counts.any())
    for mine, other in zip(given.run(0.1, how=partial(decode, counts=counts)), honest, strict=True):
        assert torch.equal(mine, other)


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


@pytest.mark.parametrize("confidence", [1.0, 0.999])
def test_room_for_tokens_to_come_is_not_read(confidence: float) -> None:
    """Two heads with 200 and 130 tokens in buffers of 320, all else of which is nan."""
    q, k, v = drawn(g=2, s=320, d=32, e=32, loud=6.0)
    given = step(q, k, v)
    used, state = torch.tensor([200, 130], dtype=torch.int32), blank_state(torch.device("cpu"))
    sketch = given.sketch
    parts = {name: getattr(sketch, name).clone() for name in ("codes", "scale", "zero", "radius", "reach")}
    each = given.lengths.each.clone()
    keys, values = given.k.clone(), given.v.clone()
    for head, many in enumerate(used.tolist()):
        keys[:, head, many:] = values[:, head, many:] = math.nan
        each[:, head, many:] = math.nan
        for name, part in parts.items():
            part[:, head, many // GROUP :] = 255 if name == "codes" else math.nan
    # The longest values are those in use.
    most = torch.stack([value_lengths(given.v[:, i : i + 1, :many]).most[:, 0] for i, many in enumerate(used)], 1)
    room = dataclasses.replace(sketch, **parts)

    def seed() -> Tensor | None:
        return None if confidence == 1 else torch.tensor([7])

    with np.errstate(all="ignore"):
        options = (0.3, given.scale, None, 0.5, confidence)
        found = decode(q.bfloat16(), keys, values, room, Lengths(each, most), *options, seed(), used=Used(used, state))
    for head, many in enumerate(used.tolist()):
        own = slice(2 * head, 2 * head + 2)
        alone = step(q[:, own], k[:, head : head + 1, :many], v[:, head : head + 1, :many])
        assert bool((alone.errors(found.out[:, own]) <= found.bound[:, own]).all())
        assert bool((found.bound[:, own] < 0.5).all()) and int(found.kept[0, head]) <= many
        if confidence == 1:
            metric, size = room.metric[:, head : head + 1], room.size[:, head : head + 1]
            alone = dataclasses.replace(alone, sketch=sketched(alone.k, 4, metric, size))
            other = alone.run(0.3, how=lambda *x: decode(*x, limit=0.5))
            torch.testing.assert_close(found.out[:, own], other.out)
            assert torch.equal(found.kept[:, head], other.kept[:, 0])


def seen_by(given: Step, used: Used) -> Tensor:
    """Which tokens each row sees: those up to its own, of its window."""
    (b, h, _), (g, s) = given.q.shape, given.k.shape[1:3]
    queries = used.queries or 1
    tokens = used.tokens.view(b, g).repeat_interleave(h // g, 1)[:, :, None]
    own = tokens - queries + (torch.arange(h) % queries)[:, None]
    return (torch.arange(s) <= own) & (torch.arange(s) > own - (used.window or s))


def truth_of(given: Step, used: Used, sinks: Tensor | None = None) -> Tensor:
    """What each row should be in float64: it sees tokens up to its own, of its window, and perhaps a sink."""
    logits = torch.where(seen_by(given, used), given.logits() * math.log(2), -math.inf)
    if sinks is not None:
        own = sinks.double().repeat_interleave(used.queries or 1).expand(logits.shape[:2])
        logits = torch.cat([logits, own[..., None]], -1)
    weights = torch.softmax(logits, -1)[..., : given.k.shape[2]]
    return (weights.unsqueeze(-2) @ given.siblings(given.v)).squeeze(-2)


def apart(given: Step, out: Tensor, truth: Tensor, used: Used) -> Tensor:
    """How far answers are from the truth, in the unit of bounds: the longest value that a row sees."""
    lengths = torch.linalg.vector_norm(given.siblings(given.v), dim=-1)
    unit = torch.where(seen_by(given, used), lengths, 0.0).amax(-1)
    return torch.linalg.vector_norm(out.double() - truth, dim=-1) / unit


@pytest.mark.parametrize("confidence", [1.0, 0.999])
@pytest.mark.parametrize(
    ("siblings", "queries", "window", "sunk"),
    [(2, 3, None, False), (16, 1, None, True), (4, 8, 100, True), (1, 1, 70, False), (4, 16, 65, False)],
)
def test_rows_see_the_tokens_up_to_their_own_in_their_window_and_a_sink_takes_its_share(
    siblings: int, queries: int, window: int | None, sunk: bool, confidence: float
) -> None:
    q, k, v = drawn(g=2, r=siblings * queries, s=200, d=16, e=16, loud=8.0)
    # To see one of the last tokens that is not one's own shows; and so does a bound in units of what one does not see.
    v[:, :, 200 - queries :] *= 30.0
    if window is not None:
        v[:, :, :20] *= 900.0
    given = step(q, k, v)
    norms = torch.linalg.vector_norm(given.v.double(), dim=-1) * (1 + 2.0**-22)
    given = dataclasses.replace(given, lengths=Lengths(norms.float(), given.lengths.most))
    sinks = 8 * torch.randn(2 * siblings) if sunk else None
    tokens = torch.tensor([200, 200], dtype=torch.int32)
    used = Used(tokens, blank_state(tokens.device), None if queries == 1 else queries, window)
    seed = None if confidence == 1 else torch.tensor([5])
    truth = truth_of(given, used, sinks)
    for limit in (0.6, 0.02):
        how = partial(decode, limit=limit, confidence=confidence, seed=seed, used=used, sinks=sinks)
        found = given.run(0.3 if limit == 0.6 else 0.01, how=how)
        assert bool((apart(given, found.out, truth, used) <= found.bound).all())
        assert float(found.bound.max()) <= limit
        seen = 200 if window is None else min(200, window + queries - 1 + GROUP - 1)
        assert int(found.kept.max()) <= seen
    # What all rows see alike is not the truth.
    if queries > 1 or window is not None or sunk:
        alike = truth_of(given, Used(tokens, used.state), None)
        assert not bool((apart(given, found.out, alike, used) <= found.bound).all())


def test_a_sink_of_minus_infinity_is_none_and_one_that_is_not_a_number_proves_nothing() -> None:
    given = step(*drawn(s=200, loud=5.0))
    plain = given.run(0.1, how=partial(decode, limit=0.3))
    none = given.run(0.1, how=partial(decode, limit=0.3, sinks=torch.full((2,), -math.inf)))
    assert torch.equal(plain.out, none.out) and torch.equal(plain.bound, none.bound)
    lost = given.run(0.1, how=partial(decode, limit=0.3, sinks=torch.tensor([math.nan, 0.0])))
    assert float(lost.bound[0, 0]) == math.inf and float(lost.bound[0, 1]) <= 0.3


def test_a_sketch_that_saves_nothing_is_asked_less_and_less_often() -> None:
    given, state = step(*drawn(g=2, s=130, d=32, e=32, loud=0.01), torch.float32), blank_state(torch.device("cpu"))
    looks, report = [], blank_report(1, 4, state.device)
    used = Used(given.used.tokens, state)
    for _ in range(8):
        looks.append(int(state[LEFT]) == 0)
        found = given.run(0.01, how=lambda *x: decode(*x, limit=0.05, used=used, report=report))
        assert bool((given.errors(found.out) <= found.bound).all()) and float(found.bound.max()) < 1e-3
        assert found.kept.tolist() == [[130, 130]]
    # After the first look one step is exact, after the second two, after the third four.
    assert looks == [True, False, True, False, False, True, False, False]
    state[PAUSE] = LONGEST
    state[LEFT] = 0
    given.run(0.01, how=lambda *x: decode(*x, limit=0.05, used=used, report=report))
    assert int(state[LEFT]) == LONGEST
    always = Used(given.used.tokens, blank_state(state.device, always=True))
    for _ in range(2):
        given.run(0.01, how=lambda *x: decode(*x, limit=0.05, used=always, report=report))
    assert int(always.state[PAUSE]) == 2  # the sketch was asked both times


def test_short_heads_are_read_in_full_and_empty_ones_are_zero() -> None:
    given = step(*drawn(g=3, s=256, d=32, e=32, loud=6.0), torch.float32)
    state = blank_state(torch.device("cpu"), shortest=150)
    assert int(state[SHORTEST]) == 150
    used = Used(torch.tensor([256, 100, 0], dtype=torch.int32), state)
    found = given.run(0.2, how=lambda *x: decode(*x, limit=0.5, used=used))
    assert int(found.kept[0, 0]) < 256 and found.kept[0, 1:].tolist() == [100, 0]
    assert float(found.bound[0, 4:].max()) == 0 and not bool(found.out[0, 4:].any())
    alone = step(given.q[:, 2:4], given.k[:, 1:2, :100], given.v[:, 1:2, :100], torch.float32)
    assert (
        bool((alone.errors(found.out[:, 2:4]) <= found.bound[:, 2:4]).all()) and float(found.bound[0, 2:4].max()) < 1e-3
    )
    assert int(state[LEFT]) == 0


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
            lambda x: {"q": x.q.repeat(1, 33, 1)},
            ShapeError,
            "heads of q=66 must be a multiple of the 1 key heads, by at most 64",
        ),
        (lambda x: {"q": x.q.half()}, DtypeError, "types of q, k, v=.* must be one of the 16-bit types, or float32"),
        (lambda x: {"sketch": sketched(x.k, 8)}, ParameterError, "bits of the sketch=8 must be 4"),
        (lambda x: {"k": x.k[:, :, :100]}, ShapeError, "sketched rows, lengths, keys=192, 200, 100 must be at most"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[Step], dict[str, Any]], error: type[Exception], words: str
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
