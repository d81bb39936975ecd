"""Decoding steps that draw tokens: each kernel equals its reference, and bounds fail no more often than was allowed."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from avow.errors import ParameterError, ShapeError
from avow.kernels.interpreted import interpret
from tests.helpers.decode_checks import same_lists

interpret()

from avow.kernels import choice, finalize, gather_attention, planning, sampling, sketch_pass
from avow.kernels.choice import Chosen
from avow.kernels.finalize import Decoded
from avow.kernels.sample_bounds import Logs
from avow.kernels.sketch_pass import Terms
from avow.kernels.sparse_decode import decode
from avow.kernels.step_constants import STEPS
from avow.numerics import tails
from avow.numerics.sketch import sketched
from tests.helpers import decode_references as references
from tests.helpers.decode_references import decode_reference
from tests.helpers.decoding import BEYOND, HOSTILE, Step, drawn, flags_of, permuted, step, terms_of, unit_of

# A GPU does not warn of inf and nan.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

CONFIDENCE = 0.9
LOGS = Logs.of(CONFIDENCE)


def seeded(number: int = 3) -> Tensor:
    return torch.tensor([number])


def run(given: Step, drop: float = 0.3, seed: Tensor | None = None, how: Any = decode, **more: Any) -> Decoded:
    options = {"confidence": CONFIDENCE} | more
    seed = seeded() if seed is None else seed
    return how(given.q, given.k, given.v, given.sketch, given.lengths, drop, given.scale, seed=seed, **options)


def chosen_of(given: Step, drop: float = 0.3, number: int = 3) -> tuple[Terms, Chosen]:
    terms, s = terms_of(given), given.k.shape[2]
    aim = planning.goal(drop, None, given.q.dtype)
    return terms, sampling.drawn(terms, given.lengths.most, aim, LOGS, seeded(number), s)


def with_seed(chosen: Chosen, seed: Tensor) -> Chosen:
    assert chosen.draws is not None
    return chosen._replace(draws=chosen.draws._replace(seed=seed))


def halves(s: int = 2048, d: int = 32) -> Step:
    """One token that weighs as much as all others together, which are alike, and whose values are against it."""
    k = torch.nn.functional.pad(0.05 * torch.randn(1, 1, s, d - 1), (1, 0))
    k[0, 0, 100, 0] = math.log(s - 1)
    q = torch.zeros(1, 2, d)
    q[..., 0] = 1.0
    v = -torch.ones(1, 1, s, d)
    v[0, 0, 100] = 1.0
    return step(q, k, v, torch.float32, 1.0)


SHAPES = [
    (dict(b=1, g=2, r=4, s=500, d=64, e=64), torch.bfloat16),
    (dict(b=2, g=1, r=8, s=321, d=96, e=48), torch.float16),
    (dict(b=1, g=1, r=3, s=300, d=16, e=32), torch.float32),
]


@pytest.mark.parametrize(
    ("shape", "dtype"), SHAPES, ids=lambda x: f"r{x['r']}-s{x['s']}-d{x['d']}" if isinstance(x, dict) else str(x)
)
def test_each_kernel_equals_its_reference(shape: dict[str, int], dtype: torch.dtype) -> None:
    given = step(*drawn(**shape, loud=1.0), dtype)
    most, s = given.lengths.most, given.k.shape[2]
    terms = terms_of(given)
    asked = most, planning.goal(0.8, None, dtype), LOGS
    seeds = seeded(), seeded()
    chosen = sampling.drawn(terms, *asked, seeds[0], s)
    assert chosen.draws is not None
    rims, other_rims = chosen.draws.rims, references.rims_reference(terms, *asked)
    # Sums in another order may put a rim on the other side of a whole step.
    assert float((rims - other_rims)[:, 0].abs().max()) <= 1 / STEPS
    assert torch.equal(rims[:, 1], other_rims[:, 1])
    assert same_lists(chosen, references.drawn_reference(terms, *asked, seeds[0], s, rims))
    assert 0.05 < float((flags_of(chosen, s) > 1).float().mean()) < 0.9
    parts = gather_attention.attended(given.q, given.k, given.v, chosen, given.scale, given.used)
    other_parts = references.attended_reference(given.q, given.k, given.v, chosen, given.scale, given.used)
    # Uninitialised memory is nan here, too: what one writes, so does the other.
    torch.testing.assert_close(parts, other_parts, rtol=1e-4, atol=1e-3, equal_nan=True)
    found = [
        how(given.q, given.v, parts, terms, with_seed(chosen, seed), most, 0.8, given.scale)
        for how, seed in zip((finalize.merged, references.merged_reference), seeds, strict=True)
    ]
    assert seeds[0].tolist() == seeds[1].tolist() == [4]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=unit_of(mine), atol=1e-6)


def test_a_whole_step_equals_its_reference() -> None:
    given = step(*drawn(g=2, s=400, d=32, e=32, loud=1.0), torch.float32)
    for limit in (None, 0.3):
        seeds = seeded(), seeded()
        found = run(given, seed=seeds[0], limit=limit)
        other = run(given, seed=seeds[1], how=decode_reference, limit=limit)
        assert torch.equal(*seeds)
        for mine, theirs in zip(found, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, check_dtype=False)


# What the kernels run themselves; their references run everything.
INTERPRETED = ("random", "one giant key", "huge values", "tiny values", "no whole group")


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_answer_is_further_from_the_truth_than_its_bound(kind: str) -> None:
    given = step(*HOSTILE[kind]())
    found = run(given, confidence=0.999, how=decode if kind in INTERPRETED else decode_reference)
    errors = given.errors(found.out)
    assert bool(((errors <= found.bound) | (found.bound == math.inf)).all()), (errors, found.bound)
    assert not bool(found.bound.isnan().any())
    again = run(given, confidence=0.999, limit=0.3, how=decode_reference)
    if kind in BEYOND:
        # What float32 cannot compute is not vouched for.
        assert bool((found.bound > 1).all()) and not bool(found.within.any())
    else:
        assert bool((again.bound <= (2.1 if kind == "one giant key" else 0.3)).all())
        assert bool((given.errors(again.out) <= again.bound).all())


def test_no_term_exceeds_its_rim() -> None:
    given = step(*drawn(g=2, r=3, s=640, loud=1.5), torch.float32)
    terms, chosen = chosen_of(given)
    assert chosen.draws is not None
    rare = (flags_of(chosen, 640).long() - 1).repeat_interleave(3, 0)
    odds = torch.exp2(-(rare // 8).double()) * (16 - rare % 8) / 16
    norms = torch.linalg.vector_norm(given.siblings(given.v), dim=-1)[0]
    nu = terms.nu.double().repeat_interleave(3)[:, None]
    true = given.logits()[0] + torch.log2((norms + nu) / nu) - odds.log2()
    read = (rare >= 0) & (rare > 0)
    assert int(read.sum()) > 100
    rims = chosen.draws.rims[:, :1].double()
    assert bool((true <= rims)[read].all())
    # With odds of half as much, some would.
    assert bool((true + 4 > rims)[read].any())


def test_odds_are_at_least_what_they_stand_for() -> None:
    steps = torch.arange(sampling._RAREST.value + 1)
    whole = (16 - (steps & 7)) << (sampling._BITS - 4 - (steps >> 3))
    odds = whole.double() / 2**sampling._BITS
    bits = ((127 << 23) - (steps << 20)).int().view(torch.float32)
    assert torch.equal(odds, bits.double()) and bool((whole[1:] < whole[:-1]).all())
    assert bool((odds >= torch.exp2(-steps / 8)).all()) and bool((odds <= 1.07 * torch.exp2(-steps / 8)).all())


def test_draws_are_even_and_do_not_repeat() -> None:
    some = torch.stack([references.draws_reference(seeded(number), 3, 4096) for number in (0, 1, 2**62)]).flatten(0, 1)
    x = some.double() / 2**sampling._BITS - 0.5
    # Means and products of 4,096 even numbers: within five standard deviations.
    assert float(x.mean(-1).abs().max()) < 5 * math.sqrt(1 / 12 / 4096)
    product = x @ x.T / 4096 - torch.eye(9) / 12
    assert float(product.abs().max()) < 5 / 12 / 64
    shifted = (x[:, 1:] * x[:, :-1]).mean(-1)
    assert float(shifted.abs().max()) < 5 / 12 / 64
    counts = (some[0] >> 12).bincount(minlength=16)
    assert float((counts - 256).abs().max()) < 5 * 16


def test_the_generator_is_philox() -> None:
    """Beside the published generator, written down once more in Python's own numbers."""
    (key, high), mask = references.keys_reference(3, 1), 2**32 - 1
    for place in (0, 5, 4095):
        x, y, own = place >> 2, high, key
        for _ in range(7):
            product = 0xD256D193 * x
            x, y, own = product >> 32 ^ own ^ y, product & mask, own + 0x9E3779B9 & mask
        expected = [x & 0xFFFF, x >> 16, y & 0xFFFF, y >> 16][place % 4]
        assert int(references.draws_reference(seeded(), 2, 4096)[1, place]) == expected


def test_the_odds_of_four_bytes_at_once_are_those_of_each() -> None:
    (assembly,) = re.findall(r'"""\s*(\{.*?\})\s*"""', inspect.getsource(sampling._rarer.fn), re.DOTALL)

    def executed(assembly: str, short: list[int], down: int, rare: list[int]) -> list[int]:
        """What a few lines of PTX make of four bytes, a number that is added to each, and four to stay below."""

        def pairs(numbers: list[int]) -> list[np.ndarray]:
            return [np.array(numbers[i : i + 2], np.float16) for i in (0, 2)]

        def permuted_pair(a: str, b: str, selector: str) -> np.ndarray:
            assert a == "$2"
            word = permuted(int.from_bytes(bytes(short), "little"), int(b, 0), int(selector, 0))
            return np.array([word], np.uint32).view(np.float16)

        registers = dict(zip(("$3", "$4", "$5", "$6"), pairs([down - 1024] * 4) + pairs(rare), strict=True))
        for line in re.findall(r"[^;{}]+", assembly):
            name, _, rest = line.strip().partition(" ")
            if not rest or name == ".reg":
                continue
            target, *sources = (x.strip() for x in rest.split(","))
            if name == "prmt.b32":
                registers[target] = permuted_pair(sources[0], sources[1], sources[2])
            else:
                does = {"add.rn.f16x2": np.add, "min.f16x2": np.minimum}[name]
                registers[target] = does(*(registers[x] for x in sources))
        return [int(x) for name in ("$0", "$1") for x in registers[name]]

    for down in (-900, -255, -1, 0, 60, 900):
        for start in range(0, 256, 3):
            short = [start, 255 - start, start * 7 % 256, 255]
            rare = [103, 50, 0, 103]
            expected = [min(own, x + down) for own, x in zip(rare, short, strict=True)]
            assert executed(assembly, short, down, rare) == expected
    assert executed(assembly.replace("0x4140", "0x4041"), [1, 2, 3, 4], 0, [9] * 4) != [1, 2, 3, 4]


def test_plans_and_lists_are_the_same_however_programs_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    given = step(*drawn(g=3, s=500, d=32, e=32, loud=1.0), torch.float32)
    _, whole = chosen_of(given)
    assert whole.draws is not None and whole.found.shape == (3, 1)
    for module, name, value in ((choice, "BLOCK", 128), (sketch_pass, "_AT_ONCE", 7), (choice, "_AT_ONCE", 4)):
        monkeypatch.setattr(module, name, value)
    terms, parts = chosen_of(given)
    # Three programs looked at each head, and whoever lists tokens finds what all of them had.
    assert parts.draws is not None and terms.peaks.shape[1] == 3 and parts.found.shape == (3, 2)
    assert float((parts.draws.rims - whole.draws.rims).abs().max()) <= 1 / STEPS
    if torch.equal(parts.draws.rims, whole.draws.rims):
        assert torch.equal(flags_of(parts, 500), flags_of(whole, 500))
    assert 0 < int(parts.found.sum()) < 1500
    # Attention over lists in several spans, whose last tiles are not full, is attention over the same tokens.
    both = []
    for chosen in (whole, parts):
        terms.used.state.zero_()  # so much is read that the next step would be exact
        found = gather_attention.attended(given.q, given.k, given.v, chosen, given.scale, given.used)
        other = references.attended_reference(given.q, given.k, given.v, chosen, given.scale, given.used)
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-3, equal_nan=True)
        most = given.lengths.most
        both.append(finalize.merged(given.q, given.v, found, terms, chosen, most, 1.0, given.scale))
    assert torch.equal(both[0].kept, both[1].kept)
    torch.testing.assert_close(both[0].out, both[1].out, rtol=1e-4, atol=1e-5)


def test_the_inequalities_are_those_of_the_library_and_never_sharper() -> None:
    for log in (3.0, LOGS.mean, 12.0):
        found = torch.tensor([0.0, 1e-6, 0.3, 2.0, 40.0, 63.0, 65.0, 1e3, 1e6], dtype=torch.float64)
        mine, theirs = (
            references.at_most_reference(found, 8.0, log),
            tails.at_most(found, torch.full_like(found, 8.0), log),
        )
        assert bool((mine >= theirs).all()) and bool((mine <= 1.03 * theirs).all())
        wide = tails.deviation(found, torch.ones_like(found), log)
        mine = references.strayed_reference(found, 1.0, log)
        assert bool((mine >= wide).all())
        assert bool((mine <= 1.25 * wide)[3:].all())
    logs = Logs.of(0.999)
    failing = math.exp(-logs.mean) + math.exp(-logs.variance) + 2 * 2 * math.exp(-logs.sum)
    assert 0.00099 < failing <= 0.001


def misses(given: Step, steps: int, sabotage: Any = None) -> tuple[float, float]:
    """How often rows are further from the truth than their bounds, and the largest bound."""
    terms = terms_of(given)
    aim, s = planning.goal(0.2, None, given.q.dtype), given.k.shape[2]
    rims = references.rims_reference(terms, given.lengths.most, aim, LOGS)
    seed, broken, widest = seeded(), 0.0, 0.0
    for _ in range(steps):
        chosen = references.drawn_reference(terms, given.lengths.most, aim, LOGS, seed, s, rims)
        if sabotage is not None:
            chosen = sabotage(chosen)
        parts = references.attended_reference(given.q, given.k, given.v, chosen, given.scale, given.used)
        most = given.lengths.most
        found = references.merged_reference(given.q, given.v, parts, terms, chosen, most, 1.0, given.scale)
        broken += float((given.errors(found.out) > found.bound).double().mean()) / steps
        widest = max(widest, float(found.bound.max()))
    return broken, widest


def likelier(chosen: Chosen) -> Chosen:
    """Odds that are said to be twice what they were."""
    step_of = (chosen.listed >> choice.PLACES) - 8
    place = chosen.listed & (1 << choice.PLACES) - 1
    return chosen._replace(listed=torch.where(step_of >= 0, place | step_of << choice.PLACES, chosen.listed))


def test_bounds_fail_no_more_often_than_allowed_and_do_where_odds_are_wrong() -> None:
    given = halves()
    share, widest = misses(given, 40)
    assert share <= 1 - CONFIDENCE and widest < 0.25
    wrong, _ = misses(given, 10, likelier)
    assert wrong > 0.9


def test_what_was_drawn_is_all_that_is_read_and_far_less_than_is_cut_off() -> None:
    given = halves(1024)
    before = run(given)
    assert int(before.kept) < 0.7 * 1024 < int(given.run(0.3, how=decode_reference).kept)
    seed = seeded()
    _, chosen = chosen_of(given)
    flags = flags_of(chosen, 1024)[None] > 0
    k, v = (torch.where(flags.unsqueeze(-1), x, math.nan) for x in (given.k, given.v))
    after = run(dataclasses.replace(given, k=k, v=v), seed=seed)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_steps_repeat_with_their_seed_and_differ_with_the_next() -> None:
    given = step(*drawn(s=300, loud=0.5), torch.float32)
    seed = seeded()
    first, second = run(given, seed=seed), run(given, seed=seed)
    assert seed.tolist() == [5] and not torch.equal(first.out, second.out)
    assert all(torch.equal(x, y) for x, y in zip(first, run(given), strict=True))
    assert bool((given.errors(first.out) <= first.bound).all() & (given.errors(second.out) <= second.bound).all())


def test_a_step_that_is_lied_to_breaks_its_bound() -> None:
    given = halves()
    # The sketch of a cache in which the token that matters most is another.
    other = given.k.clone()
    other[0, 0, 100] = 0.0
    lied = dataclasses.replace(given, sketch=sketched(other))
    broken = [run(lied, seed=seeded(number), how=decode_reference) for number in range(6)]
    assert any(bool((given.errors(found.out) > found.bound).all()) for found in broken)


@pytest.mark.parametrize("how", [decode, decode_reference])
def test_heads_beyond_the_limit_read_all_tokens_after_all(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A hint that is far too short is not believed unless asked to.
    monkeypatch.setattr(planning, "shortest", lambda *_: 0.0)
    given = step(*drawn(g=2, s=400, loud=1.0), torch.float32)
    hint = torch.tensor([[1e-4, 1e-4, 9.0, 9.0]])
    plain, again = (run(given, 0.4, how=how, hint=hint, limit=limit) for limit in (None, 0.5))
    # The first head was misled, and the second one was not.
    assert bool((plain.bound[0, :2] > 0.5).all()) and again.within.tolist() == [[False, False, True, True]]
    assert bool((again.bound[0, :2] < 1e-3).all() & (again.bound[0, 2:] > 1e-2).all())
    assert bool((given.errors(again.out) <= again.bound).all() & (again.bound <= 0.5).all())


def test_nothing_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    given = step(*drawn(s=200))
    expected = run(given, limit=0.3)
    seed = seeded()

    def refused(*_: object) -> None:
        raise AssertionError("a step read a number back")

    # Not `cpu`: with that the interpreter itself fetches what a kernel works on.
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(Tensor, name, refused)
    found = run(given, limit=0.3, seed=seed)
    monkeypatch.undo()
    assert torch.equal(found.out, expected.out)


def test_what_does_not_fit_is_refused() -> None:
    given = step(*drawn(s=70))
    with pytest.raises(ParameterError, match=r"confidence=0 must be above 0 and at most 1; try 0\.999, or 1 for"):
        run(given, confidence=0)
    for wrong in (torch.tensor([1.0]), torch.tensor(1)):
        with pytest.raises(
            ParameterError, match=r"seed=.* must be one torch.int64 on cpu, since tokens are drawn; try"
        ):
            run(given, seed=wrong)
    long = torch.empty(1, 1, 1, 16).expand(1, 1, 2**24 + 1, 16)
    with pytest.raises(ShapeError, match="keys=16777217 must be at most 16777216 if tokens are drawn; leave"):
        from avow.kernels.sparse_decode import _checked_seed

        _checked_seed(0.9, seeded(), long)
